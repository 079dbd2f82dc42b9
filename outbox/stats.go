package outbox

import (
	"context"
	"fmt"

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
