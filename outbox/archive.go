package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
)

// ArchiveConfig is the environment of the archiving of processed messages.
type ArchiveConfig struct {
	Every time.Duration `env:"OUTBOX_ARCHIVE_EVERY, default=1h"`   // between runs; 0: by command alone
	After time.Duration `env:"OUTBOX_ARCHIVE_AFTER, default=168h"` // a message moves so long after it was published, 1m or more
	Keep  time.Duration `env:"OUTBOX_ARCHIVE_KEEP, default=2160h"` // a month is dropped so long after its end; 0: never. Longer than After and NATS_MAX_AGE
	Batch int           `env:"OUTBOX_ARCHIVE_BATCH, default=2000"` // rows looked at per transaction, 1..20000
	Share int           `env:"OUTBOX_ARCHIVE_SHARE, default=25"`   // percent of the time in which a run works; it pauses in the rest, 1..100
}

// Validate reports every value out of bounds.
func (c ArchiveConfig) Validate() error {
	var errs []error
	if c.Every < 0 {
		errs = append(errs, fmt.Errorf("OUTBOX_ARCHIVE_EVERY is %s: want 0 or more", c.Every))
	}
	if c.After < time.Minute {
		errs = append(errs, fmt.Errorf("OUTBOX_ARCHIVE_AFTER is %s: want 1m or more", c.After))
	}
	if c.Keep < 0 || c.Keep > 0 && c.Keep < c.After {
		errs = append(errs, fmt.Errorf("OUTBOX_ARCHIVE_KEEP is %s: want 0, or no less than OUTBOX_ARCHIVE_AFTER, %s", c.Keep, c.After))
	}
	if c.Batch < 1 || c.Batch > 20000 {
		errs = append(errs, fmt.Errorf("OUTBOX_ARCHIVE_BATCH is %d: want 1..20000", c.Batch))
	}
	if c.Share < 1 || c.Share > 100 {
		errs = append(errs, fmt.Errorf("OUTBOX_ARCHIVE_SHARE is %d: want 1..100", c.Share))
	}
	return errors.Join(errs...)
}

// ArchiveJob is the name of the job that Archive.Run is.
const ArchiveJob = "outbox-archive"

// What a run counts.
const (
	CountArchived     = "rows archived"
	CountMonthsMade   = "months made"
	CountMonthDropped = "months dropped"
	CountMonthShrunk  = "months shrunk to held tenants"
	CountRowsDropped  = "rows dropped" // of the default partition
)

// Lease is the right to move rows, which is somebody else's when Fence fails (package internal/jobs).
type Lease interface {
	Fence(ctx context.Context, tx pgx.Tx) error
	Count(what string, n int64)
}

// Archive moves processed messages from the outbox into the archive and drops the archive's old months. One runs at a time.
type Archive struct {
	cfg        ArchiveConfig
	pool       *pgxpool.Pool
	log        *slog.Logger
	archived   prometheus.Counter
	beforeDrop func(ctx context.Context, m Month) (ok bool, why string, err error)
	at         func(step string) // crash points of the tests
}

// NewArchive returns the archiving of pool, which acts as the system role. It starts nothing.
func NewArchive(cfg ArchiveConfig, pool *pgxpool.Pool, log *slog.Logger, reg prometheus.Registerer) (*Archive, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	a := &Archive{
		cfg: cfg, pool: pool, log: log.With("component", "outbox-archive"), at: func(string) {},
		archived: prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_archive_rows_total", Help: "Processed outbox messages moved to the archive by this process."}),
	}
	if err := reg.Register(a.archived); err != nil {
		return nil, fmt.Errorf("register the metrics of the archive: %w", err)
	}
	return a, nil
}

// BeforeDrop has ok asked before a month is dropped, or shrunk, or rows of the default partition are deleted (Month.Default: those of
// before Month.To). Where it answers no, they stay until the next run; why is logged. It is to be set before the first run.
func (a *Archive) BeforeDrop(ok func(ctx context.Context, m Month) (ok bool, why string, err error)) {
	a.beforeDrop = ok
}

// idRange is how many ids one slice covers at most. With vacuum held back by a snapshot an index walk meets an entry for every row
// that was ever there; the range bounds it, about a second's worth.
const idRange = 1_000_000

// sweepEvery is between two sweeps over what earlier runs left behind.
const sweepEvery = 24 * time.Hour

// countMonthsSQL adds rows that are new in the archive, here, to what is known of their months.
const countMonthsSQL = `
  UPDATE outbox_archive_months m SET rows = m.rows + n.rows, last_processed_at = greatest(m.last_processed_at, n.last)
    FROM (SELECT date_trunc('month', occurred_at AT TIME ZONE 'UTC')::date AS month, count(*) AS rows, max(processed_at) AS last
            FROM here WHERE isfinite(occurred_at) GROUP BY 1) n
   WHERE m.month = n.month`

// youngSQL is a message inserted too late to have been published long ago. One of the future is not: the clock was ahead when it came,
// what comes after it may be older.
const youngSQL = `inserted_at >= @before AND inserted_at < now() + interval '1 hour'`

// sliceSQL looks at the next messages by id and moves those that were published before a time. Whoever makes one of them pending
// again meanwhile (a repair) is waited for, and then it stays.
// Index: outbox_messages_pkey, a range of ids.   Locks: the messages moved.
const sliceSQL = `
WITH look AS MATERIALIZED (
  SELECT id, coalesce(processed_at < @before, false) AS old, ` + youngSQL + ` AS young
    FROM outbox_messages WHERE id > @after AND id <= @upto ORDER BY id LIMIT @limit),
gone AS (
  DELETE FROM outbox_messages m USING look l WHERE m.id = l.id AND l.old AND m.processed_at < @before RETURNING m.*),
here AS (
  INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, processed_at, attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition, slot)
  SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
         available_at, processed_at, attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition, slot FROM gone
  RETURNING occurred_at, processed_at),
counted AS (` + countMonthsSQL + `)
SELECT /* outbox.archive */ count(*)::int, (SELECT count(*) FROM here)::int, (count(*) FILTER (WHERE young AND NOT old))::int,
       coalesce(max(id), 0), coalesce(max(id) FILTER (WHERE old), 0) FROM look`

// slice is what a slice found and did.
type slice struct {
	looked, moved, young int   // messages looked at, moved, and of those that stay, the ones inserted too late to move
	last, lastOld        int64 // the last id looked at, and of what was old enough
}

// cursor is the row of outbox_archive_cursor.
type cursor struct {
	front, rewalk, sweep int64
	sweptAt              time.Time
}

// sweepDue reports whether a sweep is due at now. One that ended in the future did by a clock that was ahead.
func (c cursor) sweepDue(now time.Time) bool {
	return now.Sub(c.sweptAt) >= sweepEvery || now.Before(c.sweptAt.Add(-sweepEvery))
}

const (
	// cursorSQL reads the cursor, and what the clock says.
	cursorSQL = `SELECT front, rewalk, sweep, CASE WHEN isfinite(swept_at) THEN swept_at ELSE 'epoch' END, now() FROM outbox_archive_cursor`
	// moveCursorSQL writes it.
	moveCursorSQL = `UPDATE outbox_archive_cursor SET front = @front, rewalk = @rewalk, sweep = @sweep, swept_at = CASE WHEN @swept::boolean THEN now() ELSE swept_at END`
)

func (a *Archive) readCursor(ctx context.Context) (c cursor, now time.Time, err error) {
	if err := a.pool.QueryRow(ctx, cursorSQL).Scan(&c.front, &c.rewalk, &c.sweep, &c.sweptAt, &now); err != nil {
		return cursor{}, time.Time{}, fmt.Errorf("read the archive's cursor: %w", err)
	}
	return c, now, nil
}

// Run moves every message that was published long enough ago, makes the months that are wanted soon, and drops those that are past.
// It works in slices of one transaction each, is resumable, and returns when nothing is left to do or ctx ends.
//
// Messages are met in the order of their ids, from where the last run ended. That leaves some behind: those that were put off, or
// published late, or a little younger than their neighbours. The next run looks again at the range of the last one, and a sweep once
// a day at all that is left from before, so nothing stays for ever and what stays for long is not walked over at every run.
func (a *Archive) Run(ctx context.Context, h Lease) error {
	c, now, err := a.readCursor(ctx)
	if err != nil {
		return err
	}
	if err := a.makeMonths(ctx, h, now); err != nil {
		return err
	}
	last, err := a.lastID(ctx)
	if err != nil {
		return err
	}
	before, began := now.Add(-a.cfg.After), c
	err = a.walk(ctx, h, before, c.rewalk, last, &c, func(c *cursor, s slice, end int64) (done bool) {
		switch {
		case s.moved > 0 || s.lastOld > 0:
			c.front = max(c.front, s.lastOld)
		case s.young*2 > s.looked: // all the later ones are younger still
			return true
		default: // what is put off, or not published yet though old: the sweep's
			c.front = max(c.front, end)
		}
		return false
	})
	if err != nil {
		return err
	}
	c.rewalk = began.front
	if err := a.inTx(ctx, h, func(tx pgx.Tx) error { return moveCursor(ctx, tx, c, false) }); err != nil {
		return err
	}
	if c.sweepDue(now) {
		err := a.walk(ctx, h, before, c.sweep, c.rewalk, &c, func(c *cursor, _ slice, end int64) bool { c.sweep = end; return false })
		if err != nil {
			return err
		}
		c.sweep = 0
		if err := a.inTx(ctx, h, func(tx pgx.Tx) error { return moveCursor(ctx, tx, c, true) }); err != nil {
			return err
		}
	}
	return a.drop(ctx, h, now)
}

// walk looks at the ids above after, up to upto, and moves what is old. advance changes the cursor, which is written with the slice;
// end is how far the slice looked.
func (a *Archive) walk(ctx context.Context, h Lease, before time.Time, after, upto int64, c *cursor, advance func(c *cursor, s slice, end int64) (done bool)) error {
	for after < upto {
		if err := ctx.Err(); err != nil {
			return err
		}
		var s slice
		var end int64
		var done bool
		next, start := *c, time.Now()
		err := a.inTx(ctx, h, func(tx pgx.Tx) error {
			end = min(after+idRange, upto)
			next = *c
			err := tx.QueryRow(ctx, sliceSQL, pgx.StrictNamedArgs{"before": before, "after": after, "upto": end, "limit": a.cfg.Batch}).
				Scan(&s.looked, &s.moved, &s.young, &s.last, &s.lastOld)
			if err != nil {
				return err
			}
			if s.looked == a.cfg.Batch {
				end = s.last
			}
			a.at("moved")
			done = s.looked > 0 && advance(&next, s, end)
			if next == *c {
				return nil
			}
			return moveCursor(ctx, tx, next, false)
		})
		if err != nil {
			return fmt.Errorf("archive up to %d messages after %d: %w", a.cfg.Batch, after, err)
		}
		a.at("slice committed")
		if s.moved > 0 {
			a.archived.Add(float64(s.moved))
			h.Count(CountArchived, int64(s.moved))
		}
		if *c = next; done {
			return nil
		}
		after = end
		if err := a.rest(ctx, time.Since(start)); err != nil {
			return err
		}
	}
	return nil
}

// rest leaves the database to others for a while after so much work.
func (a *Archive) rest(ctx context.Context, worked time.Duration) error {
	if a.cfg.Share == 100 {
		return nil
	}
	pause := time.NewTimer(worked * time.Duration(100-a.cfg.Share) / time.Duration(a.cfg.Share))
	defer pause.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-pause.C:
		return nil
	}
}

func moveCursor(ctx context.Context, tx pgx.Tx, c cursor, swept bool) error {
	_, err := tx.Exec(ctx, moveCursorSQL, pgx.StrictNamedArgs{"front": c.front, "rewalk": c.rewalk, "sweep": c.sweep, "swept": swept})
	if err != nil {
		return fmt.Errorf("move the archive's cursor to %d: %w", c.front, err)
	}
	return nil
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

func (a *Archive) lastID(ctx context.Context) (id int64, err error) {
	if err := a.pool.QueryRow(ctx, lastIDSQL).Scan(&id); err != nil {
		return 0, fmt.Errorf("read the last outbox id: %w", err)
	}
	return id, nil
}

// planSQL counts what a slice would meet, range by range of ids.
// Index: outbox_messages_pkey.   Locks: none.
const planSQL = `
SELECT /* outbox.plan_archive */ count(*), count(*) FILTER (WHERE processed_at < @before), count(*) FILTER (WHERE ` + youngSQL + `)
  FROM outbox_messages WHERE id > @after AND id <= @upto`

// Plan says what a run would do now, as it counts, and changes nothing. It reads the messages that the run would look at.
func (a *Archive) Plan(ctx context.Context) (map[string]int64, error) {
	c, now, err := a.readCursor(ctx)
	if err != nil {
		return nil, err
	}
	last, err := a.lastID(ctx)
	if err != nil {
		return nil, err
	}
	counts := make(map[string]int64)
	after := c.rewalk
	if c.sweepDue(now) {
		after = c.sweep
	}
	for ; after < last; after += idRange {
		var looked, old, young int64
		args := pgx.StrictNamedArgs{"before": now.Add(-a.cfg.After), "after": after, "upto": min(after+idRange, last)}
		if err := a.pool.QueryRow(ctx, planSQL, args).Scan(&looked, &old, &young); err != nil {
			return nil, fmt.Errorf("count what is to be archived after %d: %w", after, err)
		}
		counts[CountArchived] += old
		if after >= c.front && looked > 0 && old == 0 && young*2 > looked {
			break
		}
	}
	if err := a.planMonths(ctx, now, counts); err != nil {
		return nil, err
	}
	return counts, nil
}
