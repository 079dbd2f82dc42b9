package lease

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"weak"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

// Config is the environment of every lease holder.
type Config struct {
	TTL time.Duration `env:"LEASE_TTL, default=10s"` // from the last renewal to a lease's end, 500ms..10m
}

// Validate reports a TTL out of bounds.
func (c Config) Validate() error {
	if c.TTL < 500*time.Millisecond || c.TTL > maxTTL {
		return fmt.Errorf("LEASE_TTL is %s: want 500ms..10m", c.TTL)
	}
	return nil
}

const (
	maxTTL           = 10 * time.Minute
	heartbeatsPerTTL = 5  // renewals per TTL: four may fail before the lease is lost
	marginPerTTL     = 10 // the last tenth of the TTL, in which the holder no longer trusts its leases

	refusedFor = time.Minute // its refuser does not take the lease back, and others do not refuse it
)

// incarnation tells this process from an earlier one with its id, which in a container is often 1.
var incarnation = rand.Text()[:6]

var owners atomic.Int64 // named by this process

// Owner returns a unique name for an instance of this process: name, host, process id, incarnation
// and a number.
func Owner(name string) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return ownerOf(name+"-"+host, os.Getpid(), incarnation, owners.Add(1))
}

func ownerOf(of string, pid int, incarnation string, n int64) string {
	return fmt.Sprintf("%s-%d-%s-%d", of, pid, incarnation, n)
}

var ownerPattern = regexp.MustCompile(`^(.+)-([0-9]+)-([0-9A-Z]{6})-[0-9]+$`)

// joined has the kinds that this process has joined, by its name. Only the first instance takes
// what an ended process held. Otherwise each session of a relay, and each run of a job, would take
// leases from a live process that only seems to have ended.
var joined sync.Map // of member

type member struct {
	pool     weak.Pointer[pgxpool.Pool] // a program may open and close many
	kind, of string
}

// member returns what g has in common with the other instances of this process and its name.
func (g *Group) member() member {
	return member{weak.Make(g.pool), g.kind, g.owner[:strings.LastIndex(g.owner, "-")+1]}
}

// ended reports whether owner was an instance with this one's name and host, whose process has
// ended. It may be wrong about a process in another container with the same host name.
func (g *Group) ended(owner string) bool {
	other, own := ownerPattern.FindStringSubmatch(owner), ownerPattern.FindStringSubmatch(g.owner)
	if other == nil || own == nil || other[1] != own[1] {
		return false
	}
	if other[2] == own[2] {
		return other[3] != own[3]
	}
	pid, err := strconv.Atoi(other[2])
	if err != nil {
		return false
	}
	p, err := os.FindProcess(pid)
	return err == nil && errors.Is(p.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

// Group is one instance's membership in a kind. Its methods may be called from any goroutine.
type Group struct {
	cfg      Config
	pool     *pgxpool.Pool
	kind     string
	owner    string
	log      *slog.Logger
	changed  work.Signal
	beat     work.Signal // requests a heartbeat at once
	rowsMade []int       // the partitions whose rows this instance has seen; only Run uses it

	mu       sync.Mutex
	wanted   []int // all partitions to distribute, sorted
	held     []int // sorted
	draining []int // given up; the next heartbeat frees them
	refused  []int // to be freed for others by the next heartbeat
	until    time.Time
	failed   error // of the last heartbeat
}

// New returns owner's membership in the group of kind. It starts nothing, and has no partitions
// before Share.
func New(cfg Config, pool *pgxpool.Pool, kind, owner string, log *slog.Logger) (*Group, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if kind == "" || owner == "" {
		return nil, fmt.Errorf("lease: kind is %q and owner is %q: want both", kind, owner)
	}
	return &Group{
		cfg: cfg, pool: pool, kind: kind, owner: owner,
		log: log.With("component", "lease", "kind", kind), changed: work.NewSignal(), beat: work.NewSignal(),
	}, nil
}

// Owner returns the instance's name, as Holders reports it.
func (g *Group) Owner() string { return g.owner }

// Share sets the partitions to distribute, from the next heartbeat on. All instances of a kind must
// eventually pass the same ones.
func (g *Group) Share(partitions []int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if wanted := slices.Sorted(slices.Values(partitions)); !slices.Equal(wanted, g.wanted) {
		g.wanted = wanted
		g.beat.Notify()
	}
}

// Refuse asks another instance to take a partition that this one holds and cannot serve. If there
// is another instance, the lease is freed, and this instance does not take it back for a minute. A
// lease that another instance refused within the last minute is not freed, so two instances do not
// exchange it repeatedly. Call Refuse again while the lease is held.
func (g *Group) Refuse(partition int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Contains(g.refused, partition) {
		g.refused = append(g.refused, partition)
	}
	g.beat.Notify()
}

// Held returns the partitions whose leases this instance may trust now, sorted. It is empty if
// renewals have failed for a TTL, less a margin.
func (g *Group) Held() []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !time.Now().Before(g.until) {
		return nil
	}
	return slices.Clone(g.held)
}

// Err returns why this instance trusts no lease, if its heartbeats fail. It is nil while the leases
// of an earlier heartbeat are trusted, and for an instance whose leases others hold.
func (g *Group) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failed == nil || time.Now().Before(g.until) {
		return nil
	}
	return fmt.Errorf("no leases of kind %s, because the heartbeat fails: %w", g.kind, g.failed)
}

// Changed receives a value after a heartbeat has changed Held. It buffers one value for any number
// of changes.
func (g *Group) Changed() <-chan struct{} { return g.changed }

// Run joins the group and renews its leases until ctx ends. Then it frees them at once and returns
// nil. It logs and repeats failed heartbeats: an unavailable database is no reason to restart.
func (g *Group) Run(ctx context.Context) error {
	every := g.cfg.TTL / heartbeatsPerTTL
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if err := g.heartbeat(ctx); err != nil && ctx.Err() == nil {
			g.log.WarnContext(ctx, "lease heartbeat failed; retrying", "owner", g.owner, "err", err)
		}
		select {
		case <-ctx.Done():
			return g.leave(context.WithoutCancel(ctx))
		case <-g.beat:
		case <-tick.C:
		}
	}
}

// While runs fn as a member of the group. It frees the leases after fn has returned, or when ctx
// ends.
func (g *Group) While(ctx context.Context, fn func()) {
	ctx, leave := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { _ = g.Run(ctx) }) // returns nil
	defer running.Wait()
	defer leave()
	fn()
}

// ensureSQL inserts the kind's missing rows. Every heartbeat runs it, because without its row
// nobody takes a partition.
//
// Index: leases_pkey.   Locks: the rows inserted.
const ensureSQL = `
INSERT INTO leases (kind, partition) SELECT @kind, unnest(@partitions::int[]) ON CONFLICT DO NOTHING`

// boundSQL makes the server end this transaction if the process freezes in it. Otherwise the locks
// would outlive the leases.
const boundSQL = `SELECT set_config('idle_in_transaction_session_timeout', @ttl_ms, true)`

// expiredSQL is true for what has expired, and for an end that no holder can have written by this
// clock: it was set back, and a dead instance would hold its leases for as long. @longest is more
// than the longest TTL, because now() is when a transaction began, and the holder's may be younger.
//
// What belongs to an instance whose process has ended (@ended) counts as expired too.
const expiredSQL = `(expires_at < now() OR expires_at > now() + @longest::interval OR owner = ANY(@ended::text[]))`

// othersSQL reads the other members.
const othersSQL = `SELECT owner FROM lease_members WHERE kind = @kind AND owner <> @owner`

// joinSQL renews the membership and deletes expired members, unless one of them is renewing at this
// moment. A member without partitions counts as expired.
//
// Index: lease_members_pkey.   Locks: the own row, and rows of expired members.
const joinSQL = `
WITH gone AS (DELETE FROM lease_members WHERE kind = @kind AND owner IN (
     SELECT owner FROM lease_members WHERE kind = @kind AND ` + expiredSQL + ` AND owner <> @owner FOR UPDATE SKIP LOCKED))
INSERT INTO lease_members (kind, owner, expires_at)
SELECT @kind, @owner, CASE WHEN cardinality(@partitions::int[]) > 0 THEN now() + @ttl::interval ELSE '-infinity' END
    ON CONFLICT (kind, owner) DO UPDATE SET expires_at = excluded.expires_at`

// shareSQL counts the members and finds the own rank. The first members get the remainder of an
// uneven division.
const shareSQL = `
SELECT count(*)::int, count(*) FILTER (WHERE owner < @owner)::int FROM lease_members WHERE kind = @kind AND NOT ` + expiredSQL

// renewSQL renews the owner's leases that @drop does not name, and frees those that it names.
//
// Index: leases_pkey.   Locks: the own rows.
const renewSQL = `
UPDATE leases SET owner      = CASE WHEN partition = ANY(@drop::int[]) THEN '' ELSE owner END,
                  expires_at = CASE WHEN partition = ANY(@drop::int[]) THEN '-infinity' ELSE now() + @ttl::interval END
 WHERE kind = @kind AND owner = @owner
RETURNING partition::int, owner <> '', refused_until > now() AND refused_by <> @owner`

// refuseSQL frees leases for other instances, unless there is none, or another one refused the
// lease recently.
//
// Index: leases_pkey.   Locks: the rows.
const refuseSQL = `
UPDATE leases SET owner = '', expires_at = '-infinity', refused_by = @owner, refused_until = now() + @refused_for::interval
 WHERE kind = @kind AND owner = @owner AND partition = ANY(@refused::int[]) AND refused_until < now() AND @members > 1`

// takeSQL takes up to @want free or expired leases, and also every lease that another instance
// refused. Each gets a new epoch. It does not take a lease that this instance refused while there
// are others. It skips rows that another instance is taking at this moment.
//
// Index: leases_pkey.   Locks: the rows taken.
const takeSQL = `
UPDATE leases l SET owner = @owner, epoch = l.epoch + 1, expires_at = now() + @ttl::interval
  FROM (SELECT partition FROM leases
         WHERE kind = @kind AND ` + expiredSQL + ` AND partition = ANY(@partitions::int[]) AND owner <> @owner
           AND (refused_until < now() OR refused_by <> @owner OR @members = 1)
         ORDER BY refused_until > now() DESC, partition
         LIMIT greatest(@want, (SELECT count(*) FROM leases
                                 WHERE kind = @kind AND ` + expiredSQL + ` AND partition = ANY(@partitions::int[])
                                   AND refused_until > now() AND refused_by <> @owner)) FOR UPDATE SKIP LOCKED) free
 WHERE l.kind = @kind AND l.partition = free.partition
RETURNING l.partition::int, l.refused_until > now() AND l.refused_by <> @owner`

// heartbeat renews leases, gives up those above the fair share, and takes more up to it.
func (g *Group) heartbeat(ctx context.Context) error {
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, g.cfg.TTL/2)
	defer cancel()
	g.mu.Lock()
	drop, wanted, refused := slices.Clone(g.draining), slices.Clone(g.wanted), g.refused
	g.refused = nil
	g.mu.Unlock()

	var b heartbeatResult
	err := postgres.InTx(ctx, g.pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
		b, err = g.exchange(ctx, tx, wanted, drop, refused)
		return err
	})
	if err != nil {
		g.mu.Lock()
		g.failed = err
		g.mu.Unlock()
		return err
	}
	if b.made > 0 && slices.Equal(g.rowsMade, wanted) {
		g.log.WarnContext(ctx, "lease rows were missing, and are inserted again: somebody deleted them", "owner", g.owner, "rows", b.made)
	}
	g.rowsMade = wanted
	if len(wanted) > 0 {
		joined.Store(g.member(), nil)
	}
	slices.Sort(b.held)
	if keep := max(0, b.share-len(b.lent)); len(b.held) > keep {
		b.surplus = append(b.surplus, b.held[keep:]...)
		b.held = b.held[:keep]
	}
	held := slices.Sorted(slices.Values(append(b.held, b.lent...)))

	g.mu.Lock()
	before := g.held
	g.held, g.draining, g.failed = slices.Clone(held), b.surplus, nil
	g.until = start.Add(g.cfg.TTL - g.cfg.TTL/marginPerTTL)
	g.mu.Unlock()
	if !slices.Equal(before, held) {
		g.log.InfoContext(ctx, "leases changed", "owner", g.owner, "held", len(held), "share", b.share)
		g.changed.Notify()
	}
	return nil
}

// heartbeatResult is the result of a heartbeat: the database's state of this instance's leases.
type heartbeatResult struct {
	share   int
	made    int64 // rows inserted
	held    []int
	lent    []int // also held, because another instance refused them
	surplus []int // held, and to be freed
}

// exchange renews the leases, except those to drop or to refuse, and takes missing ones.
func (g *Group) exchange(ctx context.Context, tx pgx.Tx, wanted, drop, refused []int) (b heartbeatResult, err error) {
	if _, err := tx.Exec(ctx, boundSQL, pgx.StrictNamedArgs{"ttl_ms": strconv.FormatInt(g.cfg.TTL.Milliseconds(), 10)}); err != nil {
		return b, fmt.Errorf("bound the heartbeat: %w", err)
	}
	args := pgx.NamedArgs{"kind": g.kind, "owner": g.owner, "ttl": g.cfg.TTL, "partitions": wanted, "drop": drop, "refused": refused,
		"refused_for": refusedFor, "longest": 2 * maxTTL, "ended": []string{}}
	if _, is := joined.Load(g.member()); !is && len(wanted) > 0 {
		rows, _ := tx.Query(ctx, othersSQL, args)
		others, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return b, fmt.Errorf("read the other members: %w", err)
		}
		args["ended"] = slices.DeleteFunc(others, func(owner string) bool { return !g.ended(owner) })
	}
	inserted, err := tx.Exec(ctx, ensureSQL, args)
	if err != nil {
		return b, fmt.Errorf("insert lease rows: %w", err)
	}
	b.made = inserted.RowsAffected()
	if _, err := tx.Exec(ctx, joinSQL, args); err != nil {
		return b, fmt.Errorf("join: %w", err)
	}
	var members, rank int
	if err := tx.QueryRow(ctx, shareSQL, args).Scan(&members, &rank); err != nil {
		return b, fmt.Errorf("count members: %w", err)
	}
	members = max(members, 1)
	b.share = len(wanted) / members
	if rank < len(wanted)%members {
		b.share++
	}
	b.share = max(b.share, 1) // with more members than partitions, none gives up its only one: nobody would gain from that
	args["members"] = members
	if len(refused) > 0 {
		if _, err := tx.Exec(ctx, refuseSQL, args); err != nil {
			return b, fmt.Errorf("refuse leases: %w", err)
		}
	}
	err = g.renew(ctx, tx, args, wanted, &b)
	return b, err
}

// renew sets the leases held now.
func (g *Group) renew(ctx context.Context, tx pgx.Tx, args pgx.NamedArgs, wanted []int, b *heartbeatResult) error {
	var p int
	var kept, isLent bool
	hold := func() {
		if isLent {
			b.lent = append(b.lent, p)
		} else {
			b.held = append(b.held, p)
		}
	}
	rows, _ := tx.Query(ctx, renewSQL, args)
	if _, err := pgx.ForEachRow(rows, []any{&p, &kept, &isLent}, func() error {
		if _, is := slices.BinarySearch(wanted, p); kept && is {
			hold()
		} else if kept {
			b.surplus = append(b.surplus, p) // the partition no longer exists
		}
		return nil
	}); err != nil {
		return fmt.Errorf("renew leases: %w", err)
	}
	args["want"] = max(0, b.share-len(b.held)-len(b.lent))
	rows, _ = tx.Query(ctx, takeSQL, args)
	if _, err := pgx.ForEachRow(rows, []any{&p, &isLent}, func() error { hold(); return nil }); err != nil {
		return fmt.Errorf("take leases: %w", err)
	}
	return nil
}

// leaveSQL frees every lease of the owner and deletes its membership.
const leaveSQL = `
WITH left_group AS (DELETE FROM lease_members WHERE kind = @kind AND owner = @owner)
UPDATE leases SET owner = '', expires_at = '-infinity' WHERE kind = @kind AND owner = @owner`

func (g *Group) leave(ctx context.Context) error {
	g.mu.Lock()
	g.held, g.draining, g.until, g.failed = nil, nil, time.Time{}, nil
	g.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, g.cfg.TTL/2)
	defer cancel()
	if err := postgres.InTx(ctx, g.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, leaveSQL, pgx.StrictNamedArgs{"kind": g.kind, "owner": g.owner})
		return err
	}); err != nil {
		// The leases expire by themselves. An unavailable database must not turn a clean stop into
		// a failure.
		g.log.WarnContext(ctx, "leases not released: others wait until they expire", "owner", g.owner, "ttl", g.cfg.TTL, "err", err)
	}
	return nil
}

// Holder is a lease in the database.
type Holder struct {
	Partition int       `json:"partition"`
	Owner     string    `json:"owner"`
	Epoch     int64     `json:"epoch"`
	ExpiresAt time.Time `json:"expires_at"`
}

// holdersSQL reads the leases of a kind that are held now.
const holdersSQL = `
SELECT partition::int, owner, epoch, expires_at FROM leases WHERE kind = @kind AND owner <> '' AND expires_at >= now() ORDER BY partition`

// Holders returns the leases of kind that are held now, by partition.
func Holders(ctx context.Context, pool *pgxpool.Pool, kind string) ([]Holder, error) {
	rows, _ := pool.Query(ctx, holdersSQL, pgx.StrictNamedArgs{"kind": kind})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Holder])
	if err != nil {
		return nil, fmt.Errorf("read the leases of %s: %w", kind, err)
	}
	return all, nil
}

// Refusal is a partition that an instance could not serve. By does not take it back before Until.
type Refusal struct {
	Partition int
	By        string
	Until     time.Time
}

// refusalsSQL reads the refusals of a kind that are in force.
const refusalsSQL = `
SELECT partition::int, refused_by, refused_until FROM leases
 WHERE kind = @kind AND refused_by <> '' AND refused_until > now() ORDER BY partition`

// Refusals returns the partitions of kind that an instance refused recently, by partition.
func Refusals(ctx context.Context, pool *pgxpool.Pool, kind string) ([]Refusal, error) {
	rows, _ := pool.Query(ctx, refusalsSQL, pgx.StrictNamedArgs{"kind": kind})
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Refusal])
	if err != nil {
		return nil, fmt.Errorf("read the refused partitions of %s: %w", kind, err)
	}
	return all, nil
}
