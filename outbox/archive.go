package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
)

// ArchiveConfig is the environment of the outbox's ranges and their archive.
type ArchiveConfig struct {
	Every     time.Duration `env:"OUTBOX_ARCHIVE_EVERY, default=1h"`    // between runs; 0: only by command
	RangeRows int64         `env:"OUTBOX_RANGE_ROWS, default=50000000"` // ids per new range, 1000..1000000000
	RangeAge  time.Duration `env:"OUTBOX_RANGE_AGE, default=24h"`       // the age at which the current range ends, 1m or more
}

// Validate reports every value out of bounds.
func (c ArchiveConfig) Validate() error {
	var errs []error
	if c.Every < 0 {
		errs = append(errs, fmt.Errorf("OUTBOX_ARCHIVE_EVERY is %s: want 0 or more", c.Every))
	}
	if c.RangeRows < 1000 || c.RangeRows > 1_000_000_000 {
		errs = append(errs, fmt.Errorf("OUTBOX_RANGE_ROWS is %d: want 1000..1000000000", c.RangeRows))
	}
	if c.RangeAge < time.Minute {
		errs = append(errs, fmt.Errorf("OUTBOX_RANGE_AGE is %s: want 1m or more", c.RangeAge))
	}
	return errors.Join(errs...)
}

// Terms are the retention times of ranges.
type Terms struct {
	After time.Duration // from the publish of a range's last row to its move to the archive
	Keep  time.Duration // from a range's move to its drop; 0: never drop
}

// ArchiveJob is the name of the job of Archive.Run.
const ArchiveJob = "outbox-archive"

// The counts of a run.
const (
	CountArchived    = "ranges archived"
	CountDropped     = "ranges dropped"
	CountLate        = "late rows archived"
	CountKeptDropped = "kept rows dropped"
)

// Lease is the right to move ranges. Fence fails if another process has it (package ops/jobs).
type Lease interface {
	Fence(ctx context.Context, tx pgx.Tx) error
	Continue() error // called before each step: an error ends the run, and the next run resumes
	Count(what string, n int64)
}

// Archive creates the outbox's ranges, moves old ones to the archive, and drops the archive's
// expired ones. Only one process at a time may run it.
type Archive struct {
	cfg        ArchiveConfig
	ask        func(context.Context) (Terms, error)
	terms      Terms // of the current run
	pool       *pgxpool.Pool
	log        *slog.Logger
	archived   prometheus.Counter
	beforeDrop func(ctx context.Context, r Range) (ok bool, why string, err error)
	at         func(step string) // called at the crash points of the tests
}

// NewArchive returns the archive of pool, which acts as the system role. Each run and each plan
// calls terms. It starts nothing.
func NewArchive(cfg ArchiveConfig, terms func(context.Context) (Terms, error), pool *pgxpool.Pool, log *slog.Logger,
	reg prometheus.Registerer) (*Archive, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &Archive{
		cfg: cfg, ask: terms, pool: pool, log: log.With("component", "outbox-archive"), at: func(string) {},
		archived: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_ranges_archived_total",
			Help: "Ranges of the outbox moved to the archive by this process."}),
	}
	if err := reg.Register(a.archived); err != nil {
		return nil, fmt.Errorf("register the metrics of the archive: %w", err)
	}
	return a, nil
}

// BeforeDrop sets a check that runs before a range is dropped. If ok is false, the range stays
// until the next run, and why is logged. Call it before the first run.
func (a *Archive) BeforeDrop(ok func(ctx context.Context, r Range) (ok bool, why string, err error)) {
	a.beforeDrop = ok
}

// mostWaiting is the limit of delayed rows of a range that moves. They move while the outbox is
// locked, about 20 us each.
const mostWaiting = 5000

// lateRows is the limit of rows that one transaction moves or deletes.
const lateRows = 2000

const (
	// archiveRangeSQL moves a range from the outbox to the archive.
	// Locks: the outbox, ACCESS EXCLUSIVE, from the call on, for some milliseconds.
	archiveRangeSQL = `SELECT /* outbox.archive_range */ outbox_range_archive(@from, @most)`
	// indexRangeSQL builds the indexes of an archived range. Locks: the range, against writers.
	indexRangeSQL = `SELECT /* outbox.index_range */ outbox_range_index(@from)`
	// archiveLateSQL moves rows that were published after their range had moved. Index:
	// outbox_messages_default's primary key, all of it. Locks: the rows, and the archive if a range
	// must be created again.
	archiveLateSQL = `SELECT /* outbox.archive_late */ outbox_archive_late(@before, @most)`
	// spanRangeSQL records when the events of a range occurred. It reads the whole range.
	spanRangeSQL = `SELECT /* outbox.span_range */ outbox_range_span(@from)`
	// dropRangeSQL drops a range. Locks: the archive, ACCESS EXCLUSIVE, at its end; the holds,
	// against additions.
	dropRangeSQL = `SELECT /* outbox.drop_range */ outbox_range_drop(@from)`
)

// Run moves ranges that have been settled for long enough to the archive, moves late rows of
// earlier ranges, and drops expired ranges. Each step is one transaction, so the next run resumes
// after an interruption. Run returns when no step is left, ctx ends or h returns an error. A failed
// step does not stop steps of another kind. For example, a long reader of the outbox can keep a
// step from its lock.
//
// A range is settled once the floors of all partitions have passed it. This proves that no row in
// it is pending and that none will be added (docs/adr/0004-floor.md). Delayed rows are the
// exception: they move to the default range, under their ids.
func (a *Archive) Run(ctx context.Context, h Lease) error {
	a, err := a.underTerms(ctx)
	if err != nil {
		return err
	}
	if err := a.settle(ctx, h); err != nil {
		return err
	}
	all, now, err := Ranges(ctx, a.pool)
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range a.due(all, now) {
		if err := h.Continue(); err != nil {
			return err
		}
		if err := a.archive(ctx, h, r); err != nil {
			errs = append(errs, err)
			break
		}
	}
	if err := a.slices(ctx, h, CountLate, archiveLateSQL,
		pgx.StrictNamedArgs{"before": now.Add(-a.terms.After), "most": lateRows}); err != nil {
		errs = append(errs, fmt.Errorf("archive rows that were published late: %w", err))
	}
	return errors.Join(append(errs, a.index(ctx, h), a.drop(ctx, h))...)
}

// underTerms returns a copy with the current terms.
func (a *Archive) underTerms(ctx context.Context) (*Archive, error) {
	now := *a
	var err error
	now.terms, err = a.ask(ctx)
	return &now, err
}

// due returns the ranges to archive at now.
func (a *Archive) due(all []Range, now time.Time) (due []Range) {
	for _, r := range all {
		if r.State == RangeOpen && !r.SettledAt.IsZero() && now.Sub(r.SettledAt) >= a.terms.After {
			due = append(due, r)
		}
	}
	return due
}

func (a *Archive) archive(ctx context.Context, h Lease, r Range) error {
	var outcome string
	if err := a.ddl(ctx, h, func(tx pgx.Tx) error {
		defer a.at("range moved")
		return tx.QueryRow(ctx, archiveRangeSQL, pgx.StrictNamedArgs{"from": r.From, "most": mostWaiting}).Scan(&outcome)
	}); err != nil {
		return fmt.Errorf("archive the range from %d: %w", r.From, err)
	}
	a.at("range archived")
	if outcome != "archived" {
		a.log.InfoContext(ctx, "a range of the outbox is not archived yet", "from", r.From, "why", outcome)
		return nil
	}
	a.archived.Inc()
	h.Count(CountArchived, 1)
	a.log.InfoContext(ctx, "a range of the outbox was archived", "from", r.From, "to", r.To)
	return nil
}

// index builds the missing indexes of archived ranges. A range without them is searchable only by
// id and event.
func (a *Archive) index(ctx context.Context, h Lease) error {
	all, _, err := Ranges(ctx, a.pool)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.State != RangeArchived || r.Indexed {
			continue
		}
		if err := h.Continue(); err != nil {
			return err
		}
		if err := a.inTx(ctx, h, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, oneWorkerSQL); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, indexRangeSQL, pgx.StrictNamedArgs{"from": r.From})
			return err
		}); err != nil {
			return fmt.Errorf("index the range from %d: %w", r.From, err)
		}
		a.at("range indexed")
	}
	return nil
}

// slices runs a statement that returns its number of rows, until that is 0. No hold can be added
// meanwhile.
func (a *Archive) slices(ctx context.Context, h Lease, what, sql string, args pgx.StrictNamedArgs) error {
	for {
		if err := h.Continue(); err != nil {
			return err
		}
		var n int64
		if err := a.ddl(ctx, h, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, lockHoldsSQL); err != nil {
				return err
			}
			return tx.QueryRow(ctx, sql, args).Scan(&n)
		}); err != nil || n == 0 {
			return err
		}
		a.at("slice")
		h.Count(what, n)
	}
}

// The limits of a lock on the whole outbox or archive. While such a lock waits, all later users
// wait too, at most for lockWait.
const (
	lockWait  = 100 * time.Millisecond
	lockTries = 60
	lockPause = time.Second // between two tries, half of it random
)

const (
	// boundLocksSQL bounds the wait for each lock. The work before the lock may take any time.
	boundLocksSQL = `SELECT set_config('lock_timeout', @ms, true), set_config('statement_timeout', '0', true)`
	noTimeoutSQL  = `SELECT set_config('statement_timeout', '0', true)`
	// oneWorkerSQL makes one process build an index, for any time, so that other work continues.
	oneWorkerSQL = `SELECT set_config('statement_timeout', '0', true), set_config('max_parallel_maintenance_workers', '0', true)`
)

// ddl runs fn, whose locks block all others, in a transaction that h fences.
func (a *Archive) ddl(ctx context.Context, h Lease, fn func(tx pgx.Tx) error) error {
	return withLocks(ctx, a.pool, a.at, func(tx pgx.Tx) error {
		if err := h.Fence(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	})
}

// withLocks repeats fn until it gets its locks. It gives up after about a minute.
func withLocks(ctx context.Context, pool *pgxpool.Pool, at func(step string), fn func(tx pgx.Tx) error) error {
	for try := 1; ; try++ {
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, boundLocksSQL, pgx.StrictNamedArgs{"ms": fmt.Sprint(lockWait.Milliseconds())}); err != nil {
				return err
			}
			return fn(tx)
		})
		if !postgres.IsLockTimeout(err) || try == lockTries {
			return err
		}
		if at != nil {
			at("lock refused")
		}
		if err := work.Sleep(ctx, lockPause/2+rand.N(lockPause/2)); err != nil {
			return err
		}
	}
}

// inTx runs fn in a transaction that h fences.
func (a *Archive) inTx(ctx context.Context, h Lease, fn func(tx pgx.Tx) error) error {
	return postgres.InTx(ctx, a.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := h.Fence(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	})
}

// past returns the ranges that have expired at now.
func (a *Archive) past(all []Range, now time.Time) (past []Range) {
	for _, r := range all {
		if a.terms.Keep > 0 && r.State == RangeArchived && now.Sub(r.ArchivedAt) >= a.terms.Keep {
			past = append(past, r)
		}
	}
	return past
}

// drop drops expired ranges, and expired kept rows without a hold.
func (a *Archive) drop(ctx context.Context, h Lease) error {
	all, now, err := Ranges(ctx, a.pool)
	if err != nil || a.terms.Keep == 0 {
		return err
	}
	for _, r := range a.past(all, now) {
		if err := h.Continue(); err != nil {
			return err
		}
		if err := a.dropRange(ctx, h, r); err != nil {
			return fmt.Errorf("drop the range from %d: %w", r.From, err)
		}
	}
	if err := a.slices(ctx, h, CountKeptDropped, trimKeptSQL,
		pgx.StrictNamedArgs{"before": now.Add(-a.terms.Keep), "most": lateRows}); err != nil {
		return fmt.Errorf("delete rows that no hold keeps: %w", err)
	}
	return nil
}

func (a *Archive) dropRange(ctx context.Context, h Lease, r Range) error {
	args := pgx.StrictNamedArgs{"from": r.From}
	held, err := held(ctx, a.pool)
	if err != nil {
		return err
	}
	if held { // the holds keep rows by the time of their events
		if err := a.inTx(ctx, h, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, noTimeoutSQL); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, spanRangeSQL, args)
			return err
		}); err != nil {
			return err
		}
		if whole, err := heldWhole(ctx, a.pool, r.From); whole || err != nil {
			return err
		}
	}
	if a.beforeDrop != nil {
		ok, why, err := a.beforeDrop(ctx, r)
		if err != nil {
			return fmt.Errorf("check whether it may be dropped: %w", err)
		}
		if !ok {
			a.log.WarnContext(ctx, "an expired range of the archive is not dropped", "from", r.From, "why", why)
			return nil
		}
	}
	var outcome string
	if err := a.ddl(ctx, h, func(tx pgx.Tx) error { return tx.QueryRow(ctx, dropRangeSQL, args).Scan(&outcome) }); err != nil {
		return err
	}
	a.at("range dropped")
	if outcome == "dropped" {
		h.Count(CountDropped, 1)
		a.log.InfoContext(ctx, "an expired range of the archive was dropped", "from", r.From)
	}
	return nil
}

// Plan returns the counts of a run at this time, and the ranges that it would drop. It changes
// nothing.
func (a *Archive) Plan(ctx context.Context) (counts map[string]int64, drops []Range, err error) {
	if a, err = a.underTerms(ctx); err != nil {
		return nil, nil, err
	}
	all, now, err := Ranges(ctx, a.pool)
	if err != nil {
		return nil, nil, err
	}
	drops = slices.DeleteFunc(a.past(all, now), func(r Range) bool { return r.Held })
	counts = map[string]int64{CountArchived: int64(len(a.due(all, now))), CountDropped: int64(len(drops))}
	if a.terms.Keep > 0 {
		var kept int64
		if err := a.pool.QueryRow(ctx, countKeptSQL, pgx.StrictNamedArgs{"before": now.Add(-a.terms.Keep)}).Scan(&kept); err != nil {
			return nil, nil, fmt.Errorf("count the rows that no hold keeps: %w", err)
		}
		counts[CountKeptDropped] = kept
	}
	return counts, drops, nil
}
