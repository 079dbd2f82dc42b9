package outbox

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Month is a month of the archive, by occurred_at in UTC: a partition that holds From up to To.
type Month struct {
	From          time.Time `json:"from"`
	To            time.Time `json:"to"`
	Rows          int64     `json:"rows"`                       // moved there
	Bytes         int64     `json:"bytes"`                      // on disk, with its indexes
	LastProcessed time.Time `json:"last_processed_at,omitzero"` // when the last of its messages was published
	Held          bool      `json:"held"`                       // a hold keeps it, or some tenants' rows of it
	Default       bool      `json:"default,omitempty"`          // no month: the rows of every other time. From is zero, and Rows above 10,000 an estimate
}

// Name is the month as 2006-01, or "default".
func (m Month) Name() string {
	if m.Default {
		return "default"
	}
	return m.From.Format("2006-01")
}

// monthsSQL reads the months and the default partition. The last row is the default's, whose number of rows is counted up to 10,000, and beyond
// what ANALYZE found.
// Locks: none but those of reading.
const monthsSQL = `
SELECT m.month::timestamp AT TIME ZONE 'UTC', (m.month + interval '1 month') AT TIME ZONE 'UTC', m.rows,
       coalesce(pg_total_relation_size(to_regclass('outbox_messages_archive_' || to_char(m.month, 'YYYYMM'))), 0),
       CASE WHEN isfinite(m.last_processed_at) THEN m.last_processed_at END, h.whole OR h.tenants <> '{}', false
  FROM outbox_archive_months m CROSS JOIN LATERAL outbox_archive_holds_month(m.month) h
UNION ALL
SELECT NULL, NULL, greatest(c.reltuples::bigint, (SELECT count(*) FROM (SELECT FROM outbox_messages_archive_default LIMIT 10000) few)), pg_total_relation_size(c.oid), NULL, false, true
  FROM pg_class c WHERE c.oid = 'outbox_messages_archive_default'::regclass
 ORDER BY 7, 1`

// Months returns the months of the archive, the earliest first, and the default partition after them. The pool acts as the system role.
func Months(ctx context.Context, pool *pgxpool.Pool) ([]Month, error) {
	rows, _ := pool.Query(ctx, monthsSQL)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (m Month, err error) {
		var from, to, last *time.Time
		err = row.Scan(&from, &to, &m.Rows, &m.Bytes, &last, &m.Held, &m.Default)
		for to, from := range map[*time.Time]*time.Time{&m.From: from, &m.To: to, &m.LastProcessed: last} {
			if from != nil {
				*to = from.UTC()
			}
		}
		return m, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the months of the archive: %w", err)
	}
	return all, nil
}

func monthOf(t time.Time) time.Time {
	t = t.UTC()
	return time.Date(t.Year(), t.Month(), 1, 0, 0, 0, 0, time.UTC)
}

const (
	monthsAhead = 2  // made before anything can be of them
	monthsBack  = 24 // made for what is old already, where Keep goes back further
)

// wanted returns the months that are to have a partition at now: those not past Keep, the current one, and the next ones. Rows of any
// other time are few and odd, and go to the default partition.
func (c ArchiveConfig) wanted(now time.Time) (all []time.Time) {
	first := monthOf(now).AddDate(0, -monthsBack, 0)
	if keep := monthOf(now.Add(-c.Keep)); c.Keep > 0 && keep.After(first) {
		first = keep
	}
	for m := first; !m.After(monthOf(now).AddDate(0, monthsAhead, 0)); m = m.AddDate(0, 1, 0) {
		all = append(all, m)
	}
	return all
}

// missing returns the wanted months that have no partition.
func (a *Archive) missing(ctx context.Context, now time.Time) (missing []time.Time, err error) {
	have, err := Months(ctx, a.pool)
	if err != nil {
		return nil, err
	}
	made := make(map[time.Time]bool)
	for _, m := range have {
		made[m.From] = true
	}
	for _, m := range a.cfg.wanted(now) {
		if !made[m] {
			missing = append(missing, m)
		}
	}
	return missing, nil
}

// makeMonthSQL and dropMonthSQL call the owner's functions.
// Locks: of makeMonthSQL the default partition, of dropMonthSQL the whole archive, ACCESS EXCLUSIVE, and only at their end.
const (
	makeMonthSQL = `SELECT outbox_archive_make_month(@month::date)`
	dropMonthSQL = `SELECT outbox_archive_drop_month(@month::date)`
)

func (a *Archive) makeMonths(ctx context.Context, h Lease, now time.Time) error {
	missing, err := a.missing(ctx, now)
	if err != nil {
		return err
	}
	for _, m := range missing {
		if err := a.MakeMonth(ctx, h, m); err != nil {
			return err
		}
	}
	return nil
}

// MakeMonth makes the partition of a month, given by its first moment in UTC, unless it is there.
func (a *Archive) MakeMonth(ctx context.Context, h Lease, m time.Time) error {
	var moved int64
	err := a.ddl(ctx, h, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, makeMonthSQL, pgx.StrictNamedArgs{"month": m}).Scan(&moved)
	})
	if err != nil {
		return fmt.Errorf("make the archive's month %s: %w", m.Format("2006-01"), err)
	}
	a.at("month made")
	a.log.InfoContext(ctx, "month of the archive made", "month", m.Format("2006-01"), "from_default", moved)
	h.Count(CountMonthsMade, 1)
	return nil
}

// How the partitions' locks are asked for. Everybody who comes while such a lock is waited for waits too, for lockWait at most.
const (
	lockWait  = 100 * time.Millisecond
	lockTries = 60
	lockPause = time.Second // between two tries, half of it at random
)

// boundLocksSQL bounds the wait for each lock. What the functions do before they lock may take its time.
const boundLocksSQL = `SELECT set_config('lock_timeout', @ms, true), set_config('statement_timeout', '0', true)`

// ddl runs fn, which takes locks that keep everybody else waiting, until it gets them. It gives up after about a minute.
func (a *Archive) ddl(ctx context.Context, h Lease, fn func(tx pgx.Tx) error) error {
	for try := 1; ; try++ {
		err := a.inTx(ctx, h, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, boundLocksSQL, pgx.StrictNamedArgs{"ms": fmt.Sprint(lockWait.Milliseconds())}); err != nil {
				return err
			}
			return fn(tx)
		})
		if !postgres.IsLockTimeout(err) || try == lockTries {
			return err
		}
		a.at("lock refused")
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(lockPause/2 + rand.N(lockPause/2)):
		}
	}
}

// past returns the months that are to go at now.
func (a *Archive) past(ctx context.Context, now time.Time) (past []Month, err error) {
	if a.cfg.Keep == 0 {
		return nil, nil
	}
	months, err := Months(ctx, a.pool)
	if err != nil {
		return nil, err
	}
	for _, m := range months {
		if until := now.Add(-a.cfg.Keep); !m.Default && m.To.Before(until) && m.LastProcessed.Before(until) {
			past = append(past, m)
		}
	}
	return past, nil
}

// drop drops the months whose time has passed, and deletes the default partition's rows of such months.
func (a *Archive) drop(ctx context.Context, h Lease, now time.Time) error {
	if a.cfg.Keep == 0 {
		return nil
	}
	past, err := a.past(ctx, now)
	if err != nil {
		return err
	}
	for _, m := range past {
		if ok, err := a.mayDrop(ctx, m); err != nil {
			return err
		} else if !ok {
			continue
		}
		var outcome string
		if err := a.ddl(ctx, h, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, dropMonthSQL, pgx.StrictNamedArgs{"month": m.From}).Scan(&outcome)
		}); err != nil {
			return fmt.Errorf("drop the archive's month %s: %w", m.Name(), err)
		}
		a.at("month dropped")
		switch outcome {
		case "dropped":
			h.Count(CountMonthDropped, 1)
		case "shrunk":
			h.Count(CountMonthShrunk, 1)
		default:
			continue
		}
		a.log.InfoContext(ctx, "month of the archive has passed its time", "month", m.Name(), "outcome", outcome, "rows", m.Rows)
	}
	return a.trimDefault(ctx, h, now)
}

func (a *Archive) mayDrop(ctx context.Context, m Month) (bool, error) {
	if a.beforeDrop == nil {
		return true, nil
	}
	ok, why, err := a.beforeDrop(ctx, m)
	if err != nil {
		return false, fmt.Errorf("ask whether month %s may be dropped: %w", m.Name(), err)
	}
	if !ok {
		a.log.WarnContext(ctx, "month of the archive is past its time and stays", "month", m.Name(), "why", why)
	}
	return ok, nil
}

// oldDefaultSQL selects rows of the default partition that are of months past and were published as long ago, unless held.
const oldDefaultSQL = `
  FROM outbox_messages_archive_default a
 WHERE a.occurred_at < @before AND a.processed_at < @published
   AND NOT EXISTS (SELECT FROM outbox_archive_holds h
                    WHERE h.released_at IS NULL AND (h.tenant_id IS NULL OR h.tenant_id = a.tenant_id)
                      AND coalesce(a.occurred_at >= h.from_month::timestamp AT TIME ZONE 'UTC', true)
                      AND coalesce(a.occurred_at < (h.to_month + interval '1 month') AT TIME ZONE 'UTC', true))`

// trimDefaultSQL deletes some of them. Nobody adds a hold before it has ended.
// Index: outbox_messages_archive_default_pkey.   Locks: the rows, and the table of holds against additions.
const (
	lockHoldsSQL   = `LOCK TABLE outbox_archive_holds IN SHARE MODE`
	trimDefaultSQL = `
DELETE /* outbox.trim_default */ FROM outbox_messages_archive_default d
 USING (SELECT a.occurred_at, a.id` + oldDefaultSQL + ` ORDER BY a.occurred_at, a.id LIMIT @limit) old
 WHERE d.occurred_at = old.occurred_at AND d.id = old.id`
	countDefaultSQL = `SELECT count(*)` + oldDefaultSQL
)

func (a *Archive) defaultArgs(now time.Time) pgx.StrictNamedArgs {
	return pgx.StrictNamedArgs{"before": monthOf(now.Add(-a.cfg.Keep)), "published": now.Add(-a.cfg.Keep)}
}

func (a *Archive) trimDefault(ctx context.Context, h Lease, now time.Time) error {
	args := a.defaultArgs(now)
	var left int64
	if err := a.pool.QueryRow(ctx, countDefaultSQL, args).Scan(&left); err != nil {
		return fmt.Errorf("count old rows of the archive's default partition: %w", err)
	}
	if left == 0 {
		return nil
	}
	if ok, err := a.mayDrop(ctx, Month{Default: true, To: monthOf(now.Add(-a.cfg.Keep)), Rows: left}); err != nil || !ok {
		return err
	}
	args["limit"] = a.cfg.Batch
	for n := int64(a.cfg.Batch); n == int64(a.cfg.Batch); {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := a.inTx(ctx, h, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, lockHoldsSQL); err != nil {
				return err
			}
			tag, err := tx.Exec(ctx, trimDefaultSQL, args)
			n = tag.RowsAffected()
			return err
		})
		if err != nil {
			return fmt.Errorf("delete old rows of the archive's default partition: %w", err)
		}
		h.Count(CountRowsDropped, n)
	}
	return nil
}

// planMonths adds what a run would make and drop.
func (a *Archive) planMonths(ctx context.Context, now time.Time, counts map[string]int64) error {
	missing, err := a.missing(ctx, now)
	if err != nil {
		return err
	}
	counts[CountMonthsMade] = int64(len(missing))
	past, err := a.past(ctx, now)
	if err != nil || a.cfg.Keep == 0 {
		return err
	}
	for _, m := range past {
		if !m.Held {
			counts[CountMonthDropped]++
		}
	}
	var rows int64
	if err := a.pool.QueryRow(ctx, countDefaultSQL, a.defaultArgs(now)).Scan(&rows); err != nil {
		return fmt.Errorf("count old rows of the archive's default partition: %w", err)
	}
	counts[CountRowsDropped] = rows
	return nil
}
