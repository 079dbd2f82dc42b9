package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// statsBound is the limit of the counts in Stats, so that any backlog costs the same.
const statsBound = 100_000

// archiveSample is the number of published messages from which the age of the oldest one is taken.
const archiveSample = 100

// Stats is a snapshot of backlog, lag (seconds) and DLQ depth. Counts are capped.
type Stats struct {
	Pending    int     `json:"pending"`        // unpublished; counts up to statsBound delayed ones and as many others
	PendingMax bool    `json:"pending_capped"` // there may be more than Pending
	Delayed    int     `json:"delayed"`        // of these, delayed; counted up to the same bound
	Retrying   int     `json:"retrying"`       // of the delayed ones, those that failed before
	LagSeconds float64 `json:"lag_seconds"`    // the age of the oldest row that is due; 0 if none
	// seconds since the oldest unpublished row was inserted, for any reason except a later time
	// that its writer set
	Undelivered float64 `json:"undelivered"`
	DLQDepth    int     `json:"dlq_depth"`    // counted up to the same bound
	MaxAttempts int     `json:"max_attempts"` // of pending rows and the DLQ

	// seconds since the oldest message outside the archive was published; 0 if none
	ArchiveOldestSeconds float64 `json:"archive_oldest_seconds"`
	Ranges               int     `json:"ranges"`         // of the outbox
	ArchiveRanges        int     `json:"archive_ranges"` // of the archive
	RangesAhead          int     `json:"ranges_ahead"`   // above the last id
	// messages in the default range, above the last range; counted up to the same bound
	Strays int `json:"strays"`
}

// statsSQL reads the outbox's gauges. It searches pending rows only above the floors, so dead index
// entries cost nothing.
//
// The lag is the age of the oldest due row among the first ones by id. The age counts from the
// later of insertion and due time. A row that its writer delayed counts as undelivered only once it
// is due. The oldest published messages are at the beginning of the first range.
//
// Ages use this server's clock alone and are never negative. After a failover this clock may be
// behind the one that inserted the rows.
//
// Index: outbox_messages_pkey from the lowest floor, outbox_messages_delayed_idx,
// outbox_messages_delayed_id_idx: bounded counts. Locks: none.
const statsSQL = `
WITH fresh AS MATERIALIZED (
  SELECT inserted_at, available_at FROM outbox_messages
   WHERE id > (SELECT coalesce(min(floor_id), 0) FROM outbox_partitions WHERE final_seq IS NULL) AND processed_at IS NULL AND NOT delayed
   ORDER BY id LIMIT @bound),
waiting AS MATERIALIZED (SELECT inserted_at, available_at, attempts, behind FROM outbox_messages WHERE delayed ORDER BY id LIMIT @bound)
SELECT /* outbox.stats */ (SELECT count(*) FROM fresh)::int, (SELECT count(*) FROM waiting)::int,
  (SELECT count(*) FROM waiting WHERE attempts > 0)::int,
  greatest(extract(epoch FROM clock_timestamp() - least((SELECT min(greatest(inserted_at, available_at)) FROM fresh),
                                                        (SELECT min(available_at) FROM waiting WHERE available_at <= now()))), 0)::float8,
  greatest(extract(epoch FROM clock_timestamp() - least((SELECT min(inserted_at) FROM fresh),
    (SELECT min(inserted_at) FROM waiting WHERE attempts > 0 OR behind IS NOT NULL OR available_at <= now()))), 0)::float8,
  (SELECT count(*) FROM (SELECT FROM outbox_messages_dlq LIMIT @bound) c)::int,
  greatest((SELECT coalesce(max(attempts), 0) FROM waiting), (SELECT coalesce(max(attempts), 0) FROM outbox_messages_dlq))::int,
  (SELECT greatest(max(extract(epoch FROM clock_timestamp() - processed_at)), 0)
     FROM (SELECT m.processed_at FROM outbox_messages m
            WHERE m.id >= (SELECT min(from_id) FROM outbox_ranges WHERE state = 'OPEN') ORDER BY m.id LIMIT @sample) oldest)::float8,
  (SELECT count(*) FROM outbox_ranges WHERE state = 'OPEN')::int, (SELECT count(*) FROM outbox_ranges WHERE state = 'ARCHIVED')::int,
  (SELECT count(*) FROM outbox_ranges WHERE state = 'OPEN' AND from_id > (` + lastIDSQL + `))::int,
  (SELECT count(*) FROM (SELECT FROM outbox_messages WHERE id >= (SELECT max(to_id) FROM outbox_ranges) LIMIT @bound) s)::int`

// ReadStats reads the outbox's gauges, at a cost that does not grow with the backlog.
func ReadStats(ctx context.Context, pool *pgxpool.Pool) (Stats, error) {
	var s Stats
	var b pgx.Batch
	b.Queue(walkSQL)
	b.Queue(statsSQL, pgx.StrictNamedArgs{"bound": statsBound, "sample": archiveSample}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&s.Pending, &s.Delayed, &s.Retrying, &s.LagSeconds, &s.Undelivered, &s.DLQDepth, &s.MaxAttempts,
			&s.ArchiveOldestSeconds, &s.Ranges, &s.ArchiveRanges, &s.RangesAhead, &s.Strays)
	})
	err := pool.SendBatch(ctx, &b).Close()
	if err != nil {
		return Stats{}, fmt.Errorf("read outbox stats: %w", err)
	}
	s.PendingMax = s.Pending == statsBound || s.Delayed == statsBound
	s.Pending += s.Delayed
	return s, nil
}

// settledSQL searches for an unpublished message inserted up to @before.
//
// Index: those of pending rows, all of them in the worst case.   Locks: none.
const settledSQL = `
SELECT /* outbox.settled */ NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL AND inserted_at <= @before), now()`

// Settled reports whether every message written up to before is published or in the DLQ. Both times
// are by the database's clock. It also returns the clock's time now. A zero before only reads the
// clock.
func Settled(ctx context.Context, pool *pgxpool.Pool, before time.Time) (settled bool, now time.Time, err error) {
	if err := pool.QueryRow(ctx, settledSQL, pgx.StrictNamedArgs{"before": before}).Scan(&settled, &now); err != nil {
		return false, now, fmt.Errorf("check whether all messages before %s are published: %w", before, err)
	}
	return settled, now, nil
}

// Trouble is why the relay of a partition publishes nothing.
type Trouble struct {
	Partition int
	Reason    string
	Refused   bool // not before an operator has repaired something; otherwise the relay retries
}

// tellSQL records a trouble. The next mark clears it.
//
// Index: outbox_partitions_pkey.   Locks: the partition.
const tellSQL = `
UPDATE /* outbox.tell */ outbox_partitions SET trouble = @reason, refused = @refused, trouble_at = clock_timestamp()
 WHERE partition = @partition AND final_seq IS NULL`

// SaveTrouble records a trouble for Troubles. A relay repeats it at each failure.
func SaveTrouble(ctx context.Context, pool *pgxpool.Pool, t Trouble) error {
	args := pgx.StrictNamedArgs{"partition": t.Partition, "reason": t.Reason, "refused": t.Refused}
	if _, err := pool.Exec(ctx, tellSQL, args); err != nil {
		return fmt.Errorf("record the trouble of partition %d: %w", t.Partition, err)
	}
	return nil
}

// troublesSQL reads the troubles that a relay has recorded within a minute: an older one may be of
// a relay that ended.
//
// Index: none, a row per partition that ever existed.   Locks: none.
const troublesSQL = `
SELECT /* outbox.troubles */ partition, trouble, refused FROM outbox_partitions
 WHERE trouble IS NOT NULL AND final_seq IS NULL AND trouble_at > clock_timestamp() - interval '1 minute' ORDER BY partition`

// Troubles returns the partitions to which relays cannot publish now, by number.
func Troubles(ctx context.Context, q Querier) ([]Trouble, error) {
	rows, _ := q.Query(ctx, troublesSQL)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Trouble])
	if err != nil {
		return nil, fmt.Errorf("read the troubles of the partitions: %w", err)
	}
	return all, nil
}

// slotsBound limits the unpublished rows that ReadSlots reads: the oldest ones by id, this many
// pending and this many delayed.
const slotsBound = 20_000

// Slot counts the unpublished rows of one slot.
type Slot struct {
	Slot    int           `json:"slot"`
	Pending int           `json:"pending"` // due
	Delayed int           `json:"delayed"` // delayed until a later time, or behind such a row
	Oldest  time.Duration `json:"oldest"`  // time since the oldest due row was inserted or became due
}

// slotsSQL counts unpublished rows by slot, among the first ones by id.
//
// Index: outbox_messages_pkey from the lowest floor, outbox_messages_delayed_id_idx: bounded.
// Locks: none.
const slotsSQL = `
WITH fresh AS MATERIALIZED (
  SELECT slot, greatest(inserted_at, available_at) AS due FROM outbox_messages
   WHERE id > (SELECT coalesce(min(floor_id), 0) FROM outbox_partitions WHERE final_seq IS NULL) AND processed_at IS NULL AND NOT delayed
   ORDER BY id LIMIT @bound),
waiting AS MATERIALIZED (
  SELECT slot, available_at, available_at <= now() AND behind IS NULL AS due FROM outbox_messages WHERE delayed ORDER BY id LIMIT @bound),
by_slot AS (
  SELECT slot, count(*) AS pending, 0::bigint AS delayed, min(due) AS due FROM fresh GROUP BY slot
  UNION ALL
  SELECT slot, count(*) FILTER (WHERE due), count(*) FILTER (WHERE NOT due), min(available_at) FILTER (WHERE due)
    FROM waiting GROUP BY slot)
SELECT /* outbox.slots */ slot::int, sum(pending)::int, sum(delayed)::int,
       greatest(coalesce(extract(epoch FROM clock_timestamp() - min(due)), 0), 0)::float8
  FROM by_slot GROUP BY slot ORDER BY slot`

// ReadSlots returns the unpublished rows by slot, without empty slots. more reports that there may
// be rows beyond the counted ones. Its cost does not grow with the backlog. pool acts as
// postgres.RoleSystem.
func ReadSlots(ctx context.Context, pool *pgxpool.Pool) (all []Slot, more bool, err error) {
	var b pgx.Batch
	b.Queue(walkSQL)
	b.Queue(slotsSQL, pgx.StrictNamedArgs{"bound": slotsBound}).Query(func(rows pgx.Rows) (err error) {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Slot, err error) {
			var oldest float64
			err = row.Scan(&s.Slot, &s.Pending, &s.Delayed, &oldest)
			s.Oldest = time.Duration(oldest * float64(time.Second))
			return s, err
		})
		return err
	})
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		return nil, false, fmt.Errorf("count the unpublished messages by slot: %w", err)
	}
	n := 0
	for _, s := range all {
		n += s.Pending + s.Delayed
	}
	return all, n >= slotsBound, nil // more is also true if the count is exact at the bound
}
