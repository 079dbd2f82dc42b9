package postgres

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Role is the database role that the connections of a pool act as.
type Role string

// The roles that the migrations make. RoleOwner is the login of the connection string.
const (
	RoleOwner    Role = ""
	RoleAPI      Role = "tidings_api"
	RoleRelay    Role = "tidings_relay"    // of the truth
	RoleConsumer Role = "tidings_consumer" // of the projections
	RoleReader   Role = "tidings_reader"
	RoleSystem   Role = "tidings_system" // may all that the last three may
	RoleWriter   Role = "tidings_writer"
)

// Config is the environment that every pool shares. The connection strings are apart, because the truth and the projections
// may live in two databases.
type Config struct {
	MaxConns         int           `env:"POSTGRES_MAX_CONNS, default=16"`          // connections per pool, 2..1000
	ConnectTimeout   time.Duration `env:"POSTGRES_CONNECT_TIMEOUT, default=5s"`    // for one connection
	StatementTimeout time.Duration `env:"POSTGRES_STATEMENT_TIMEOUT, default=60s"` // no statement of ours needs longer; 0 for none
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

// ParseConfig is pgx.ParseConfig with errors that do not have the connection string: where it is malformed nobody can say which part is the password
// (pgconn.ParseConfigError). A slash in a password makes the rest of it part of the database's name, so such names are malformed too.
func ParseConfig(url string) (*pgx.ConnConfig, error) {
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, unreadable(err)
	}
	if strings.Contains(cfg.Database, "@") {
		return nil, errors.New("the connection string cannot be read: the database's name has an @; in a password, / is written %2F and @ is written %40")
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

// Open returns a pool whose connections act as role and call themselves name (application_name). It does not connect: the
// first use does, and Ping tells. Each new connection proves that it is what was asked for: ErrUnmigrated, ErrPooler and ErrUnproven say what is wrong.
func Open(ctx context.Context, url string, cfg Config, role Role, name string) (*pgxpool.Pool, error) {
	return OpenWith(ctx, url, cfg, role, name, nil)
}

// OpenWith is Open with run-time parameters of the caller's, which every connection sets.
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
	pc.PingTimeout = cfg.ConnectTimeout // an idle connection that the network has lost is given up as soon as a new one would be
	params := pc.ConnConfig.RuntimeParams
	params["application_name"] = "tidings " + name
	params["timezone"] = "GMT" // as UTC, and the one zone that the server knows without the system's tzdata
	params["jit"] = "off"      // statements take milliseconds; compiling one whose rows were overestimated takes a hundred
	// Each statement is to see what was committed before it, whatever a database or a login has been given as its default: writers lock rows and
	// then look again, and look for what an archiver has set since their transaction began (ADR 0008).
	params["default_transaction_isolation"] = "read committed"
	if cfg.StatementTimeout > 0 {
		params["statement_timeout"] = fmt.Sprint(cfg.StatementTimeout.Milliseconds())
	}
	params["idle_in_transaction_session_timeout"] = "10000" // ms: the locks of a frozen process must not outlive its lease (LEASE_TTL) by much
	maps.Copy(params, settings)
	pc.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return prove(ctx, conn, role, params) }
	pool, err := pgxpool.NewWithConfig(ctx, pc)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	return pool, nil
}

// CertificateExpiry returns when the first of the certificates expires that the pool's connections present (sslcert in the connection string); ok is false where there
// are none. They are read once, when the pool is opened.
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

// rollbackTimeout bounds the rollback that InTx sends on a context of its own.
const rollbackTimeout = 5 * time.Second

// maxAttempts is how often InTx runs fn when the database aborts it for concurrency alone.
const maxAttempts = 4

// InTx runs fn in a transaction and commits it. A serialisation failure or a deadlock runs fn again, a few times, so fn
// touches nothing but tx. When fn fails, or ctx ends, the transaction is rolled back on a context of its own, because pgx
// discards a connection whose rollback fails. An error of COMMIT leaves the outcome unknown unless it is an error that the
// server reported.
func InTx(ctx context.Context, pool *pgxpool.Pool, opts pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	return retry(func() error { return inTx(ctx, pool, opts, fn) })
}

func retry(once func() error) error {
	for attempt := 1; ; attempt++ {
		err := once()
		if err == nil || attempt == maxAttempts || !IsConcurrency(err) && !errors.Is(err, errAborted) {
			return err
		}
	}
}

// inTx runs fn once. An error of COMMIT that leaves the outcome unknown is a *lostCommit.
func inTx(ctx context.Context, pool *pgxpool.Pool, opts pgx.TxOptions, fn func(tx pgx.Tx) error) (err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer conn.Release()
	tx, err := conn.BeginTx(ctx, opts)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
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
	if err := fn(tx); err != nil {
		return err
	}
	err = tx.Commit(ctx)
	switch {
	case err == nil:
		done = true
		return nil
	case !decided(err):
		done = true // one way or the other
		return &lostCommit{err}
	}
	return fmt.Errorf("commit: %w", err)
}

// InTenant is InTx for one tenant: row-level security shows and takes no row of another. The tenant is set in the round trip
// that begins the transaction, so opts.BeginQuery is not the caller's to set.
func InTenant(ctx context.Context, pool *pgxpool.Pool, tenant int64, opts pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	begin := "begin"
	if opts.IsoLevel != "" {
		begin += " isolation level " + string(opts.IsoLevel)
	}
	begin += " " + string(opts.AccessMode) + " " + string(opts.DeferrableMode)
	opts.BeginQuery = begin + setTenant(tenant)
	return InTx(ctx, pool, opts, fn)
}

func setTenant(tenant int64) string {
	return "; set local tidings.tenant = '" + strconv.FormatInt(tenant, 10) + "'"
}

// durably has the transaction's COMMIT wait for the disk, whatever a database or a login has been given as its default. More than that stays.
const durably = `set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), true)`

// WriteInTenant is InTenant for the small writes that a client waits for. No statement waits longer than lockTimeout for one lock
// (IsLockTimeout), in milliseconds; 0 sets no limit. fn returns how to find out that what it wrote is there; nil when it wrote nothing.
//
// When the answer to COMMIT is lost, and the transaction can run no longer, landed is asked in another one, for settleTimeout at most: the
// write counts as committed, or fn runs again. An ErrUnknown says that the server could not be asked. A write of nothing is not looked for: the
// error is that of COMMIT, and the same write may be tried again.
func WriteInTenant(ctx context.Context, pool *pgxpool.Pool, tenant int64, lockTimeout time.Duration, fn func(tx pgx.Tx) (landed Landed, err error)) error {
	begin := "begin" + setTenant(tenant)
	if lockTimeout > 0 {
		begin += "; set local lock_timeout = " + strconv.FormatInt(lockTimeout.Milliseconds(), 10)
	}
	return writeOnce(ctx, pool, begin, func(tx pgx.Tx) (int64, Landed, error) {
		landed, err := fn(tx)
		return tenant, landed, err
	})
}

// setTenantSQL makes the transaction's tenant the one that row-level security compares with.
const setTenantSQL = `SELECT set_config('tidings.tenant', $1::bigint::text, true)`

// SetTenant sets the tenant of the transaction that tx is in.
func SetTenant(ctx context.Context, tx pgx.Tx, tenant int64) error {
	if _, err := tx.Exec(ctx, setTenantSQL, tenant); err != nil {
		return fmt.Errorf("set tenant %d: %w", tenant, err)
	}
	return nil
}
