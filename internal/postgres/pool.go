package postgres

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Role is the database role of a pool's connections.
type Role string

// The roles that the migrations create. RoleOwner is the login of the connection string.
const (
	RoleOwner    Role = ""
	RoleAPI      Role = "tidings_api"
	RoleRelay    Role = "tidings_relay"    // in the database of the truth
	RoleConsumer Role = "tidings_consumer" // in the database of the projections
	RoleReader   Role = "tidings_reader"
	RoleSystem   Role = "tidings_system" // has the rights of the last three
	RoleWriter   Role = "tidings_writer"
	RoleUpstream Role = "tidings_upstream"
)

// Config is the environment of all pools. The connection strings are separate, because the truth
// and the projections may be in two databases.
type Config struct {
	MaxConns         int           `env:"POSTGRES_MAX_CONNS, default=16"`          // connections per pool, 2..1000
	ConnectTimeout   time.Duration `env:"POSTGRES_CONNECT_TIMEOUT, default=5s"`    // for one connection
	StatementTimeout time.Duration `env:"POSTGRES_STATEMENT_TIMEOUT, default=60s"` // no statement of Tidings needs longer; 0 for no limit
}

// Validate reports every value out of bounds.
func (c Config) Validate() error {
	var errs []error
	if c.MaxConns < 2 || c.MaxConns > 1000 {
		errs = append(errs, fmt.Errorf("POSTGRES_MAX_CONNS is %d: want 2..1000", c.MaxConns))
	}
	if c.ConnectTimeout <= 0 {
		errs = append(errs, fmt.Errorf("POSTGRES_CONNECT_TIMEOUT is %s: want more than 0", c.ConnectTimeout))
	}
	if c.StatementTimeout < 0 {
		errs = append(errs, fmt.Errorf("POSTGRES_STATEMENT_TIMEOUT is %s: want 0 or more", c.StatementTimeout))
	}
	return errors.Join(errs...)
}

// ParseConfig is pgx.ParseConfig with errors that do not contain the connection string: a malformed
// one does not show which part is the password (pgconn.ParseConfigError). An unescaped slash in a
// password moves the rest of it into the database's name, so a name with an @ is malformed too.
func ParseConfig(url string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, unreadable(err)
	}
	if strings.Contains(cfg.Database, "@") {
		return nil, errors.New("the connection string cannot be read: the database's name has an @; in a password, / is written %2F " +
			"and @ is written %40")
	}
	return cfg, nil
}

func unreadable(err error) error {
	var bad *pgconn.ParseConfigError
	if !errors.As(err, &bad) {
		return err
	}
	text := bad.Error()
	text = text[strings.LastIndex(text, "`: ")+len("`: "):]
	if reason, _, ok := strings.Cut(text, " ("); ok && strings.HasPrefix(text, "failed to parse") {
		text = reason + "; a character of its password may need an escape"
	}
	return errors.New("the connection string cannot be read: " + text)
}

// Open returns a pool whose connections act as role and have the application_name `tidings NAME`.
// It does not connect: the first use does, and Ping reports the result. Each new connection proves
// its role and settings, and fails with ErrUnmigrated, ErrPooler or ErrUnproven.
func Open(ctx context.Context, url string, cfg Config, role Role, name string) (*pgxpool.Pool, error) {
	return OpenWith(ctx, url, cfg, role, name, nil)
}

// OpenWith is Open with additional run-time parameters for every connection.
func OpenWith(ctx context.Context, url string, cfg Config, role Role, name string, settings map[string]string) (*pgxpool.Pool, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if _, err := ParseConfig(url); err != nil {
		return nil, err
	}
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, unreadable(err)
	}
	pc.MaxConns = int32(cfg.MaxConns)
	pc.ConnConfig.ConnectTimeout = cfg.ConnectTimeout
	pc.PingTimeout = cfg.ConnectTimeout // a lost idle connection is given up as soon as a new one would be
	params := pc.ConnConfig.RuntimeParams
	params["application_name"] = "tidings " + name
	params["timezone"] = "GMT" // like UTC, and the only zone that the server has without the system's tzdata
	params["jit"] = "off"      // statements take milliseconds; compiling one with overestimated rows takes 100 ms
	// Each statement must see earlier commits, whatever the default of the database or the login
	// is. Writers lock rows and then read again, and check what an archiver has set since their
	// transaction began (ADR 8).
	params["default_transaction_isolation"] = "read committed"
	if cfg.StatementTimeout > 0 {
		params["statement_timeout"] = fmt.Sprint(cfg.StatementTimeout.Milliseconds())
	}
	// in ms: the locks of a frozen process must not outlive its lease (LEASE_TTL) by much
	params["idle_in_transaction_session_timeout"] = "10000"
	// in ms: nor may those of a process that takes no answer: no other limit ends a statement that
	// sends
	params["tcp_user_timeout"] = fmt.Sprint(lostAfter.Milliseconds())
	params["client_min_messages"] = "warning" // commit must hear the one that a COMMIT did not wait
	maps.Copy(params, settings)
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return prove(ctx, conn, role, params) }
	pc.PrepareConn = limitLockWait
	watch(pc)
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	return pool, nil
}

// CertificateExpiry returns the earliest expiry of the client certificates of the pool's
// connections (sslcert in the connection string). ok is false without certificates. The pool reads
// them once, when it is opened.
func CertificateExpiry(pool *pgxpool.Pool) func() (at time.Time, ok bool) {
	var at time.Time
	var ok bool
	if tls := pool.Config().ConnConfig.TLSConfig; tls != nil {
		for _, chain := range tls.Certificates {
			for _, der := range chain.Certificate {
				if cert, err := x509.ParseCertificate(der); err == nil && (!ok || cert.NotAfter.Before(at)) {
					at, ok = cert.NotAfter, true
				}
			}
		}
	}
	return func() (time.Time, bool) { return at, ok }
}

// rollbackTimeout bounds the rollback of InTx, which has its own context.
const rollbackTimeout = 5 * time.Second

// maxAttempts is the limit of InTx's attempts if the database aborts fn because of concurrency.
const maxAttempts = 4

// InTx runs fn in a transaction and commits it. After a serialization failure or a deadlock it runs
// fn again, a few times, so fn must only use tx. If fn fails or ctx ends, InTx rolls back with its
// own context, because pgx discards a connection whose rollback fails. After an error of COMMIT the
// outcome is unknown, unless the server reported the error.
func InTx(ctx context.Context, pool *pgxpool.Pool, opts pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	begin := func(conn *pgx.Conn) (pgx.Tx, error) { return conn.BeginTx(ctx, opts) }
	return inTx(ctx, pool, opts.AccessMode, begin, fn)
}

// InShortTx is InTx with fewer round trips: the transaction begins together with the first
// statement of fn, and Later spares others.
func InShortTx(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
	begin := func(conn *pgx.Conn) (pgx.Tx, error) {
		o := newOpening(conn, pgx.TxOptions{})
		o.short = true
		return o, nil
	}
	return inTx(ctx, pool, pgx.ReadWrite, begin, fn)
}

func inTx(ctx context.Context, pool *pgxpool.Pool, mode pgx.TxAccessMode, begin func(*pgx.Conn) (pgx.Tx, error),
	fn func(tx pgx.Tx) error) error {
	for attempt := 1; ; attempt++ {
		_, err := once(ctx, pool, mode, begin, "commit", func(tx pgx.Tx) (Landed, error) { return nil, fn(tx) })
		if !again(attempt, err) {
			return err
		}
	}
}

// again reports whether a transaction that failed runs once more.
func again(attempt int, err error) bool {
	return attempt < maxAttempts && (IsConcurrency(err) || errors.Is(err, errAborted))
}

// once runs fn in the transaction of begin, and then COMMIT, or the statement unwritten if fn
// returns no Landed. After an error of COMMIT that leaves the outcome unknown it returns a
// *lostCommit.
func once(ctx context.Context, pool *pgxpool.Pool, mode pgx.TxAccessMode, begin func(*pgx.Conn) (pgx.Tx, error), unwritten string,
	fn func(tx pgx.Tx) (Landed, error)) (landed Landed, err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	defer conn.Release()
	if mode != pgx.ReadOnly {
		if err := admitCommit(ctx, conn.Conn()); err != nil {
			return nil, fmt.Errorf("begin: %w", err)
		}
	}
	tx, err := begin(conn.Conn())
	if err != nil {
		return nil, fmt.Errorf("begin: %w", err)
	}
	done := false
	defer func() {
		if done {
			return
		}
		rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		if rerr := tx.Rollback(rctx); rerr != nil && !errors.Is(rerr, pgx.ErrTxClosed) && err != nil {
			err = fmt.Errorf("%w (and rollback: %w)", err, rerr)
		}
	}()
	landed, err = fn(tx)
	var last *pgx.Batch
	if o, ok := tx.(*opening); ok {
		last, err = o.end(ctx, err)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return landed, err
	}
	end := "commit"
	if landed == nil {
		end = unwritten
	}
	err = commit(ctx, conn.Conn(), last, end)
	switch {
	case err == nil:
		done = true
		return landed, nil
	case !provesRollback(err):
		done = true // committed or not
		return landed, &lostCommit{err}
	}
	done = conn.Conn().PgConn().TxStatus() == 'I'
	return landed, fmt.Errorf("commit: %w", err)
}

// InTenant is InTx for one tenant: row-level security hides and protects the rows of other tenants.
// The statement that begins the transaction also sets the tenant, so the caller must not set
// opts.BeginQuery.
func InTenant(ctx context.Context, pool *pgxpool.Pool, tenant int64, opts pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	begin := "begin"
	if opts.IsoLevel != "" {
		begin += " isolation level " + string(opts.IsoLevel)
	}
	begin += " " + string(opts.AccessMode) + " " + string(opts.DeferrableMode)
	opts.BeginQuery = begin + setTenants(tenant)
	return InTx(ctx, pool, opts, fn)
}

// tenantSQL sets the tenant like setTenants.
//
// Index: none.   Locks: none.
const tenantSQL = `SELECT /* postgres.tenant */ set_config('tidings.tenant', $1, true)`

// InShortTenant is InTenant with a round trip less, as InShortTx. The first statement of fn takes
// no options (pgx.QueryExecMode).
func InShortTenant(ctx context.Context, pool *pgxpool.Pool, tenant int64, opts pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	return inShortTenant(ctx, pool, tenantSQL, tenant, opts, fn)
}

// ProbeInTenant is InShortTenant for reads that find their rows by an index. PostgreSQL keeps their
// plans, even those of empty tables.
func ProbeInTenant(ctx context.Context, pool *pgxpool.Pool, tenant int64, fn func(tx pgx.Tx) error) error {
	return inShortTenant(ctx, pool, tenantSQL+", "+probes, tenant, pgx.TxOptions{AccessMode: pgx.ReadOnly}, fn)
}

func inShortTenant(ctx context.Context, pool *pgxpool.Pool, settings string, tenant int64, opts pgx.TxOptions,
	fn func(tx pgx.Tx) error) error {
	begin := func(conn *pgx.Conn) (pgx.Tx, error) {
		o := newOpening(conn, opts)
		o.waiting.Queue(settings, tenantList([]int64{tenant}))
		return o, nil
	}
	return inTx(ctx, pool, opts.AccessMode, begin, fn)
}

// setTenants sets the tenants that row-level security compares with, for this transaction.
func setTenants(tenants ...int64) string {
	return "; set local tidings.tenant = '" + tenantList(tenants) + "'"
}

func tenantList(tenants []int64) string {
	list := make([]byte, 0, 8*len(tenants))
	for i, tenant := range tenants {
		if i > 0 {
			list = append(list, ',')
		}
		list = strconv.AppendInt(list, tenant, 10)
	}
	return string(list)
}

// durableCommit makes the transaction's COMMIT wait for the disk, whatever the default of the
// database or the login is. It does not lower a stronger setting.
const durableCommit = `set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), true)`

// probes keeps scans of whole tables out of plans. PostgreSQL keeps some plans, and one that it
// makes while a table is empty would scan that table until somebody analyzes it.
const probes = `set_config('enable_seqscan', 'off', true)`

// writeSettingsSQL prepares a transaction of writes, and gives it its id. PostgreSQL keeps its
// plan. To parse these settings each time takes as long as to insert a few rows.
//
// Index: none.   Locks: the advisory lock.
const writeSettingsSQL = `
SELECT /* postgres.write_settings */ set_config('tidings.tenant', $1, true),
       set_config('lock_timeout', coalesce($2::bigint::text, current_setting('lock_timeout')), true),
       pg_advisory_xact_lock($3), pg_current_xact_id(), ` + probes + `, ` + durableCommit

// WriteInTenants is InTenant for small writes that clients wait for. Row-level security hides and
// protects the rows of all tenants but these. No statement waits longer than lockTimeout for one
// lock (IsLockTimeout); 0 sets no limit. The transaction has its id before the snapshot of its
// first statement. fn returns a function that checks whether its write exists, or nil if it wrote
// nothing.
//
// If the answer to COMMIT is lost, WriteInTenants waits until the transaction has ended. Then it
// calls landed in another transaction, for at most settleTimeout. The write counts as committed, or
// fn runs again. ErrUnknown means that no server answered. Without landed it returns the error of
// COMMIT, and the caller may retry the write.
func WriteInTenants(ctx context.Context, pool *pgxpool.Pool, tenants []int64, lockTimeout time.Duration,
	fn func(tx pgx.Tx) (landed Landed, err error)) error {
	for attempt := 1; ; attempt++ {
		lock := rand.Int64() // unique, as far as 63 bits allow: a session that gets this lock knows that the transaction has ended
		begin := func(conn *pgx.Conn) (pgx.Tx, error) {
			o := newOpening(conn, pgx.TxOptions{})
			o.waiting.Queue(writeSettingsSQL, tenantList(tenants), IfSet(lockTimeout.Milliseconds()), lock)
			return o, nil
		}
		landed, err := once(ctx, pool, pgx.ReadWrite, begin, repeatedSQL, fn)
		if lost, ok := errors.AsType[*lostCommit](err); ok && landed != nil {
			err = settle(ctx, pool, tenants, lock, landed, lost)
		}
		if !again(attempt, err) {
			return err
		}
	}
}

type lockWaitKey struct{}

// WithLockWait returns a context whose statements wait for one lock at most as long as wait. A
// longer wait is an error: IsLockTimeout. Zero means no limit. It is for readers that must answer
// while somebody locks a table. It applies to connections that a pool of this package hands out for
// the context, and costs a round trip when a connection changes from one limit to another.
func WithLockWait(ctx context.Context, wait time.Duration) context.Context {
	return context.WithValue(ctx, lockWaitKey{}, wait)
}

// limitLockWait gives a connection that leaves its pool the lock_timeout of ctx.
func limitLockWait(ctx context.Context, conn *pgx.Conn) (ok bool, err error) {
	want, _ := ctx.Value(lockWaitKey{}).(time.Duration)
	have, _ := conn.PgConn().CustomData()[customLockWait].(time.Duration)
	if want == have {
		return true, nil
	}
	sql := "RESET lock_timeout"
	if want > 0 {
		sql = fmt.Sprintf("SET lock_timeout = %d", want.Milliseconds())
	}
	if _, err := conn.Exec(ctx, sql); err != nil {
		return false, fmt.Errorf("limit the wait for locks: %w", err)
	}
	conn.PgConn().CustomData()[customLockWait] = want
	return true, nil
}

// customLockWait is the key of a connection's limit in its custom data.
const customLockWait = "tidings.lock_wait"
