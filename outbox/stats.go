package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// statsBound is where the counts of Stats stop, so that a backlog of any size costs the same.
const statsBound = 100_000

// archiveSample is how many of the messages that the archive waits for are looked at for the oldest.
const archiveSample = 100

// Stats says how the outbox stands.
type Stats struct {
	Pending     int     `json:"pending"`        // not yet published, put off or not; counted up to PendingMax
	PendingMax  bool    `json:"pending_capped"` // there are more than Pending says
	Delayed     int     `json:"delayed"`        // of these, put off; counted up to the same bound
	LagSeconds  float64 `json:"lag_seconds"`    // the greatest age of a partition's first row that is due; 0 without any
	DLQDepth    int     `json:"dlq_depth"`      // counted up to the same bound
	MaxAttempts int     `json:"max_attempts"`   // of the pending rows and the DLQ

	ArchiveOldestSeconds float64 `json:"archive_oldest_seconds"` // since the oldest message that the archive waits for was published; 0 without any
	ArchiveMonths        int     `json:"archive_months"`         // with a partition
}

// statsSQL reads the outbox's gauges. The lag is the age of each partition's lowest claimable id, and of its longest overdue
// put-off row, since it was inserted or fell due, whichever is later. The
// orders are those that only the partial indexes have, as in claimSQL. Where the archive's next run begins lie the oldest messages.
// Index: outbox_messages_pending_idx, outbox_messages_delayed_idx, outbox_messages_attempts_idx, outbox_messages_pkey: 64 probes and bounded counts.
const statsSQL = `
SELECT /* outbox.stats */
  (SELECT count(*) FROM (SELECT FROM outbox_messages WHERE processed_at IS NULL AND NOT delayed ORDER BY partition, id LIMIT @bound) c)::int,
  (SELECT count(*) FROM (SELECT FROM outbox_messages WHERE processed_at IS NULL AND delayed ORDER BY partition, available_at LIMIT @bound) c)::int,
  (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - since)), 0)
     FROM generate_series(0, @partitions::int - 1) AS p(partition)
    CROSS JOIN LATERAL (
          (SELECT greatest(inserted_at, available_at) AS since FROM outbox_messages m
            WHERE (m.partition, id) > (p.partition::smallint, 0) AND (m.partition, id) < (p.partition::smallint + 1::smallint, 0)
              AND processed_at IS NULL AND NOT delayed ORDER BY m.partition, id LIMIT 1)
          UNION ALL
          (SELECT available_at FROM outbox_messages m
            WHERE m.partition = p.partition::smallint AND processed_at IS NULL AND delayed AND available_at <= now() ORDER BY available_at LIMIT 1)) oldest)::float8,
  (SELECT count(*) FROM (SELECT FROM outbox_messages_dlq LIMIT @bound) c)::int,
  greatest((SELECT coalesce(max(attempts), 0) FROM outbox_messages WHERE processed_at IS NULL AND attempts > 0),
           (SELECT coalesce(max(attempts), 0) FROM outbox_messages_dlq))::int,
  (SELECT coalesce(max(extract(epoch FROM clock_timestamp() - processed_at)), 0)
     FROM (SELECT m.processed_at FROM outbox_messages m WHERE m.id > (SELECT front FROM outbox_archive_cursor) ORDER BY m.id LIMIT @sample) oldest)::float8,
  (SELECT count(*) FROM outbox_archive_months)::int`

// ReadStats reads how the outbox stands, at a cost that does not grow with the backlog.
func ReadStats(ctx context.Context, pool *pgxpool.Pool) (Stats, error) {
	var s Stats
	err := pool.QueryRow(ctx, statsSQL, pgx.StrictNamedArgs{"bound": statsBound, "partitions": event.Partitions, "sample": archiveSample}).
		Scan(&s.Pending, &s.Delayed, &s.LagSeconds, &s.DLQDepth, &s.MaxAttempts, &s.ArchiveOldestSeconds, &s.ArchiveMonths)
	if err != nil {
		return Stats{}, fmt.Errorf("read outbox stats: %w", err)
	}
	s.PendingMax = s.Pending == statsBound || s.Delayed == statsBound
	s.Pending += s.Delayed
	return s, nil
}
