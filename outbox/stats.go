package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// statsBound is where the counts of Stats stop, so that a backlog of any size costs the same.
const statsBound = 100_000

// archiveSample is how many of the messages that the archive waits for are looked at for the oldest.
const archiveSample = 100

// Stats says how the outbox is.
type Stats struct {
	Pending     int     `json:"pending"`        // not yet published, waiting or not; counted up to PendingMax
	PendingMax  bool    `json:"pending_capped"` // there are more than Pending says
	Delayed     int     `json:"delayed"`        // of these, waiting for their time; counted up to the same bound
	Retrying    int     `json:"retrying"`       // of the delayed ones, those that failed before
	LagSeconds  float64 `json:"lag_seconds"`    // the age of the oldest row that is due; 0 without any
	Undelivered float64 `json:"undelivered"`    // seconds since the oldest row that is not published was inserted, whatever it waits for but a time that its writer asked for
	DLQDepth    int     `json:"dlq_depth"`      // counted up to the same bound
	MaxAttempts int     `json:"max_attempts"`   // of the pending rows and the DLQ

	ArchiveOldestSeconds float64 `json:"archive_oldest_seconds"` // since the oldest message that the archive waits for was published; 0 without any
	Ranges               int     `json:"ranges"`                 // of the outbox
	ArchiveRanges        int     `json:"archive_ranges"`         // of the archive
	RangesAhead          int     `json:"ranges_ahead"`           // above the last id
	Strays               int     `json:"strays"`                 // messages above the last range, in the default one; counted up to the same bound
}

// statsSQL reads the outbox's gauges. Pending rows are looked for above the floors alone, so dead index entries of the past cost nothing.
// The lag is the age of the oldest row that is due, since it was inserted or fell due, whichever is later, among the first ones by id; a
// row that its writer asked to be held back does not count as undelivered before it is due. The oldest messages are at the
// beginning of the first range. Ages are by this server's clock alone, and never negative: after a failover that may be behind the clock that rows were inserted by.
// Index: outbox_messages_pkey from the lowest floor, outbox_messages_delayed_idx, outbox_messages_delayed_id_idx: bounded counts.
const statsSQL = `
WITH fresh AS MATERIALIZED (
  SELECT inserted_at, available_at FROM outbox_messages
   WHERE id > (SELECT coalesce(min(floor_id), 0) FROM outbox_partitions WHERE final_seq IS NULL) AND processed_at IS NULL AND NOT delayed
   ORDER BY id LIMIT @bound),
waiting AS MATERIALIZED (SELECT inserted_at, available_at, attempts, behind FROM outbox_messages WHERE delayed ORDER BY id LIMIT @bound)
SELECT /* outbox.stats */ (SELECT count(*) FROM fresh)::int, (SELECT count(*) FROM waiting)::int, (SELECT count(*) FROM waiting WHERE attempts > 0)::int,
  greatest(extract(epoch FROM clock_timestamp() - least((SELECT min(greatest(inserted_at, available_at)) FROM fresh),
                                                        (SELECT min(available_at) FROM waiting WHERE available_at <= now()))), 0)::float8,
  greatest(extract(epoch FROM clock_timestamp() - least((SELECT min(inserted_at) FROM fresh),
                                                        (SELECT min(inserted_at) FROM waiting WHERE attempts > 0 OR behind IS NOT NULL OR available_at <= now()))), 0)::float8,
  (SELECT count(*) FROM (SELECT FROM outbox_messages_dlq LIMIT @bound) c)::int,
  greatest((SELECT coalesce(max(attempts), 0) FROM waiting), (SELECT coalesce(max(attempts), 0) FROM outbox_messages_dlq))::int,
  (SELECT greatest(max(extract(epoch FROM clock_timestamp() - processed_at)), 0)
     FROM (SELECT m.processed_at FROM outbox_messages m WHERE m.id >= (SELECT min(from_id) FROM outbox_ranges WHERE state = 'OPEN') ORDER BY m.id LIMIT @sample) oldest)::float8,
  (SELECT count(*) FROM outbox_ranges WHERE state = 'OPEN')::int, (SELECT count(*) FROM outbox_ranges WHERE state = 'ARCHIVED')::int,
  (SELECT count(*) FROM outbox_ranges WHERE state = 'OPEN' AND from_id > (` + lastIDSQL + `))::int,
  (SELECT count(*) FROM (SELECT FROM outbox_messages WHERE id >= (SELECT max(to_id) FROM outbox_ranges) LIMIT @bound) s)::int`

// ReadStats reads how the outbox stands, at a cost that does not grow with the backlog.
func ReadStats(ctx context.Context, pool *pgxpool.Pool) (Stats, error) {
	var s Stats
	var b pgx.Batch
	b.Queue(walkSQL)
	b.Queue(statsSQL, pgx.StrictNamedArgs{"bound": statsBound, "sample": archiveSample}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&s.Pending, &s.Delayed, &s.Retrying, &s.LagSeconds, &s.Undelivered, &s.DLQDepth, &s.MaxAttempts, &s.ArchiveOldestSeconds,
			&s.Ranges, &s.ArchiveRanges, &s.RangesAhead, &s.Strays)
	})
	err := pool.SendBatch(ctx, &b).Close()
	if err != nil {
		return Stats{}, fmt.Errorf("read outbox stats: %w", err)
	}
	s.PendingMax = s.Pending == statsBound || s.Delayed == statsBound
	s.Pending += s.Delayed
	return s, nil
}
