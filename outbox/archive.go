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
)

// ArchiveConfig is the environment of the outbox's ranges and of their archiving.
type ArchiveConfig struct {
	Every     time.Duration `env:"OUTBOX_ARCHIVE_EVERY, default=1h"`    // between runs; 0: by command alone
	RangeRows int64         `env:"OUTBOX_RANGE_ROWS, default=50000000"` // ids of a range that is made, 1000..1000000000
	RangeAge  time.Duration `env:"OUTBOX_RANGE_AGE, default=24h"`       // a range that is written for so long ends, 1m or more
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

// Terms say when ranges go.
type Terms struct {
	After time.Duration // a range moves so long after the last of it was published
	Keep  time.Duration // a range is dropped so long after it moved; 0: never
}

// ArchiveJob is the name of the job that Archive.Run is.
const ArchiveJob = "outbox-archive"

// What a run counts.
const (
	CountArchived    = "ranges archived"
	CountDropped     = "ranges dropped"
	CountLate        = "late rows archived"
	CountKeptDropped = "kept rows dropped"
)

// Lease is the right to move ranges, which is somebody else's when Fence fails (package internal/jobs).
type Lease interface {
	Fence(ctx context.Context, tx pgx.Tx) error
	Continue() error // asked before each step: an error ends the run, and the next one goes on
	Count(what string, n int64)
}

// Archive makes the outbox's ranges, moves those of the past into the archive as they are, and drops the archive's old ones. One runs at a time.
type Archive struct {
	cfg        ArchiveConfig
	ask        func(context.Context) (Terms, error)
	terms      Terms // of the run in hand
	pool       *pgxpool.Pool
	log        *slog.Logger
	archived   prometheus.Counter
	beforeDrop func(ctx context.Context, r Range) (ok bool, why string, err error)
	at         func(step string) // crash points of the tests
}

// NewArchive returns the archiving of pool, which acts as the system role. Each run and each plan asks terms. It starts nothing.
func NewArchive(cfg ArchiveConfig, terms func(context.Context) (Terms, error), pool *pgxpool.Pool, log *slog.Logger, reg prometheus.Registerer) (*Archive, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &Archive{
		cfg: cfg, ask: terms, pool: pool, log: log.With("component", "outbox-archive"), at: func(string) {},
		archived: prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_ranges_archived_total", Help: "Ranges of the outbox moved to the archive by this process."}),
	}
	if err := reg.Register(a.archived); err != nil {
		return nil, fmt.Errorf("register the metrics of the archive: %w", err)
	}
	return a, nil
}

// BeforeDrop has ok asked before a range is dropped. Where it answers no, the range stays until the next run; why is logged. It is to be set
// before the first run.
func (a *Archive) BeforeDrop(ok func(ctx context.Context, r Range) (ok bool, why string, err error)) {
	a.beforeDrop = ok
}

// mostWaiting is how many waiting rows a range may have to be archived. They move while the outbox is locked, about 20 us each.
const mostWaiting = 5000

// lateRows is how many rows one transaction moves or deletes.
const lateRows = 2000

const (
	// archiveRangeSQL moves a range from the outbox to the archive.
	// Locks: the outbox, ACCESS EXCLUSIVE, from the call on for some milliseconds.
	archiveRangeSQL = `SELECT /* outbox.archive_range */ outbox_range_archive(@from, @most)`
	// indexRangeSQL builds the indexes of an archived range.
	// Locks: the range, against those who write it.
	indexRangeSQL = `SELECT /* outbox.index_range */ outbox_range_index(@from)`
	// archiveLateSQL moves rows that were published after their range had left.
	// Index: outbox_messages_default's primary key, all of it.   Locks: the rows, and the archive where a range has to be made again.
	archiveLateSQL = `SELECT /* outbox.archive_late */ outbox_archive_late(@before, @most)`
	// spanRangeSQL notes when the events of a range occurred. It reads the range.
	spanRangeSQL = `SELECT /* outbox.span_range */ outbox_range_span(@from)`
	// dropRangeSQL drops a range.
	// Locks: the archive, ACCESS EXCLUSIVE, at its end; the holds, against additions.
	dropRangeSQL = `SELECT /* outbox.drop_range */ outbox_range_drop(@from)`
)

// Run moves the ranges that are settled for long enough into the archive, with what came late for it, and drops those that are past. Each step is a
// transaction; it is resumable, and returns when nothing is left to do, ctx ends or h says so. A step that fails, such as one that gets no lock beside a long
// reader of the outbox, holds up none of another kind.
//
// A range is settled once the floors of all partitions have passed it: that proves that nothing in it is pending, and that nothing will be
// added (docs/adr/0004-floor.md). Rows that wait for their time are outside of that; they go to the default range, under their ids.
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
	if err := a.slices(ctx, h, CountLate, archiveLateSQL, pgx.StrictNamedArgs{"before": now.Add(-a.terms.After), "most": lateRows}); err != nil {
		errs = append(errs, fmt.Errorf("archive what was published late: %w", err))
	}
	return errors.Join(append(errs, a.index(ctx, h), a.drop(ctx, h))...)
}

// underTerms returns the archiving under the terms as they are now.
func (a *Archive) underTerms(ctx context.Context) (*Archive, error) {
	now := *a
	var err error
	now.terms, err = a.ask(ctx)
	return &now, err
}

// due returns the ranges that are to be archived at now.
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
		a.log.InfoContext(ctx, "a range of the outbox stays", "from", r.From, "why", outcome)
		return nil
	}
	a.archived.Inc()
	h.Count(CountArchived, 1)
	a.log.InfoContext(ctx, "a range of the outbox was archived", "from", r.From, "to", r.To)
	return nil
}

// index builds the indexes of the ranges that have none. A range without them is found by id and event alone.
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

// slices runs a statement that returns how many rows it took, until it takes none. No hold is added meanwhile.
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

// How the locks on all of the outbox, or of the archive, are asked for. Everybody who comes while such a lock is waited for waits too, for
// lockWait at most.
const (
	lockWait  = 100 * time.Millisecond
	lockTries = 60
	lockPause = time.Second // between two tries, half of it at random
)

const (
	// boundLocksSQL bounds the wait for each lock. What the functions do before they lock may take its time.
	boundLocksSQL = `SELECT set_config('lock_timeout', @ms, true), set_config('statement_timeout', '0', true)`
	noTimeoutSQL  = `SELECT set_config('statement_timeout', '0', true)`
	// oneWorkerSQL has an index built by one process, beside whom others go on, however long it takes.
	oneWorkerSQL = `SELECT set_config('statement_timeout', '0', true), set_config('max_parallel_maintenance_workers', '0', true)`
)

// ddl runs fn, which takes locks that keep everybody else waiting, in a transaction that h fences.
func (a *Archive) ddl(ctx context.Context, h Lease, fn func(tx pgx.Tx) error) error {
	return withLocks(ctx, a.pool, a.at, func(tx pgx.Tx) error {
		if err := h.Fence(ctx, tx); err != nil {
			return err
		}
		return fn(tx)
	})
}

// withLocks runs fn until it gets its locks. It gives up after about a minute.
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
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(lockPause/2 + rand.N(lockPause/2)):
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

// past returns the ranges that are to go at now.
func (a *Archive) past(all []Range, now time.Time) (past []Range) {
	for _, r := range all {
		if a.terms.Keep > 0 && r.State == RangeArchived && now.Sub(r.ArchivedAt) >= a.terms.Keep {
			past = append(past, r)
		}
	}
	return past
}

// drop drops the ranges whose time has passed, and the rows that no hold keeps any more.
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
	if err := a.slices(ctx, h, CountKeptDropped, trimKeptSQL, pgx.StrictNamedArgs{"before": now.Add(-a.terms.Keep), "most": lateRows}); err != nil {
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
	if held { // which rows they keep depends on when the events occurred
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
			return fmt.Errorf("ask whether it may be dropped: %w", err)
		}
		if !ok {
			a.log.WarnContext(ctx, "a range of the archive is past its time and stays", "from", r.From, "why", why)
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
		a.log.InfoContext(ctx, "a range of the archive has passed its time", "from", r.From)
	}
	return nil
}

// Plan says what a run would do now, as it counts, and which ranges it would drop. It changes nothing.
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
