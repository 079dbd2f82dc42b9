package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// ArchiveHold keeps part of the archive beyond its retention: of one tenant or all, for a range of
// months or all.
type ArchiveHold struct {
	ID         int64     `json:"id"`
	TenantID   int64     `json:"tenant_id,omitzero"` // 0: every tenant
	From       time.Time `json:"from,omitzero"`      // the first month; zero: from the beginning
	To         time.Time `json:"to,omitzero"`        // the last month, included; zero: without end
	Reason     string    `json:"reason"`
	CreatedBy  string    `json:"created_by"`
	CreatedAt  time.Time `json:"created_at"`
	ReleasedBy string    `json:"released_by,omitempty"`
	ReleasedAt time.Time `json:"released_at,omitzero"`
}

// ErrNoHold reports a hold that does not exist or was released.
var ErrNoHold = errors.New("outbox: the archive has no such hold, or it was released")

const (
	// addHoldSQL adds a hold. It waits while a range is being dropped.
	addHoldSQL = `
INSERT INTO outbox_archive_holds (tenant_id, from_month, to_month, reason, created_by)
VALUES (@tenant, @from::date, @to::date, @reason, @by) RETURNING hold_id, created_at`
	// listHoldsSQL reads the holds.
	listHoldsSQL = `
SELECT hold_id, coalesce(tenant_id, 0), from_month::timestamp, to_month::timestamp, reason, created_by, created_at,
       coalesce(released_by, ''), released_at
  FROM outbox_archive_holds WHERE @all::boolean OR released_at IS NULL ORDER BY hold_id`
	// releaseHoldSQL ends a hold, and keeps who released it and when.
	releaseHoldSQL = `
UPDATE outbox_archive_holds SET released_by = @by, release_reason = @reason, released_at = now()
 WHERE hold_id = @id AND released_at IS NULL`
)

const (
	// heldSQL checks whether a hold is in force.
	heldSQL = `SELECT /* outbox.held */ EXISTS (SELECT FROM outbox_archive_holds WHERE released_at IS NULL)`
	// heldWholeSQL checks whether a hold of every tenant covers an event of a range.
	heldWholeSQL = `
SELECT /* outbox.held_whole */ h.whole
  FROM outbox_ranges r CROSS JOIN LATERAL outbox_holds_on(r.first_occurred, r.last_occurred) h
 WHERE r.from_id = @from`
	// heldMonthSQL checks whether a hold of every tenant covers all events of a month.
	heldMonthSQL = `
SELECT /* outbox.held_month */ EXISTS (SELECT FROM outbox_archive_holds WHERE released_at IS NULL AND tenant_id IS NULL
   AND coalesce(from_month <= @month::date, true) AND coalesce(to_month >= @month::date, true))`
	// lockHoldsSQL blocks new holds.
	lockHoldsSQL = `LOCK TABLE outbox_archive_holds IN SHARE MODE`
	// trimKeptSQL deletes expired kept rows without a hold.
	//
	// Index: none, the table has only rows that holds keep or kept.   Locks: the rows.
	trimKeptSQL = `
WITH gone AS (
  DELETE FROM outbox_messages_kept k USING (
    SELECT id, event_id FROM ` + keptPast + ` LIMIT @most) old
   WHERE k.id = old.id AND k.event_id = old.event_id RETURNING 1)
SELECT /* outbox.trim_kept */ count(*) FROM gone`
	// countKeptSQL counts the rows that trimKeptSQL would delete. Index: none. Locks: none.
	countKeptSQL = `SELECT /* outbox.count_kept */ count(*) FROM ` + keptPast
	keptPast     = `outbox_messages_kept m
     WHERE processed_at < @before
       AND NOT EXISTS (SELECT FROM outbox_archive_holds h
                        WHERE h.released_at IS NULL AND (h.tenant_id IS NULL OR h.tenant_id = m.tenant_id)
                          AND coalesce(m.occurred_at >= h.from_month::timestamp AT TIME ZONE 'UTC', true)
                          AND coalesce(m.occurred_at < (h.to_month + interval '1 month') AT TIME ZONE 'UTC', true))`
)

func held(ctx context.Context, pool *pgxpool.Pool) (any bool, err error) {
	if err := pool.QueryRow(ctx, heldSQL).Scan(&any); err != nil {
		return false, fmt.Errorf("check for a hold: %w", err)
	}
	return any, nil
}

func heldWhole(ctx context.Context, pool *pgxpool.Pool, from int64) (whole bool, err error) {
	if err := pool.QueryRow(ctx, heldWholeSQL, pgx.StrictNamedArgs{"from": from}).Scan(&whole); err != nil {
		return false, fmt.Errorf("check for a hold on the range from %d: %w", from, err)
	}
	return whole, nil
}

// HeldMonth reports whether a hold keeps all events that occurred in a month. month is its first
// moment.
func HeldMonth(ctx context.Context, pool *pgxpool.Pool, month time.Time) (whole bool, err error) {
	if err := pool.QueryRow(ctx, heldMonthSQL, pgx.StrictNamedArgs{"month": month}).Scan(&whole); err != nil {
		return false, fmt.Errorf("check for a hold on %s: %w", month.Format("2006-01"), err)
	}
	return whole, nil
}

// AddHold adds the hold and returns it with its id. It keeps all rows that it covers and that still
// exist. Reason and CreatedBy are required.
func AddHold(ctx context.Context, pool *pgxpool.Pool, h ArchiveHold) (ArchiveHold, error) {
	args := pgx.StrictNamedArgs{"tenant": postgres.IfSet(h.TenantID), "from": postgres.IfSet(h.From), "to": postgres.IfSet(h.To),
		"reason": h.Reason, "by": h.CreatedBy}
	if err := pool.QueryRow(ctx, addHoldSQL, args).Scan(&h.ID, &h.CreatedAt); err != nil {
		return ArchiveHold{}, fmt.Errorf("add a hold on the archive: %w", err)
	}
	return h, nil
}

// Holds returns the holds in force, and with all the released ones too.
func Holds(ctx context.Context, pool *pgxpool.Pool, all bool) ([]ArchiveHold, error) {
	rows, _ := pool.Query(ctx, listHoldsSQL, pgx.StrictNamedArgs{"all": all})
	holds, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h ArchiveHold, err error) {
		var from, to, released *time.Time
		err = row.Scan(&h.ID, &h.TenantID, &from, &to, &h.Reason, &h.CreatedBy, &h.CreatedAt, &h.ReleasedBy, &released)
		for to, from := range map[*time.Time]*time.Time{&h.From: from, &h.To: to, &h.ReleasedAt: released} {
			if from != nil {
				*to = from.UTC()
			}
		}
		return h, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the holds on the archive: %w", err)
	}
	return holds, nil
}

// ReleaseHold ends a hold, or returns ErrNoHold. The next run of the archive drops what only this
// hold kept.
func ReleaseHold(ctx context.Context, pool *pgxpool.Pool, id int64, by, reason string) error {
	tag, err := pool.Exec(ctx, releaseHoldSQL, pgx.StrictNamedArgs{"id": id, "by": by, "reason": reason})
	if err == nil && tag.RowsAffected() == 0 {
		err = ErrNoHold
	}
	if err != nil {
		return fmt.Errorf("release hold %d on the archive: %w", id, err)
	}
	return nil
}
