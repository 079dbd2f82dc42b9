package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// activeSQL tells the partitions p that a relay may publish to now, as Active does.
const activeSQL = `p.final_seq IS NULL AND NOT EXISTS (SELECT FROM outbox_partitions o WHERE o.partition = ANY(p.after) AND o.final_seq IS NULL)`

// heartbeatSQL writes a heartbeat for each active partition that has had none for an interval. The partition's row is locked and looked at again, so of all
// that try at once one writes. A time that is still to come is of a server that was ahead of this one: it counts for nothing. The aggregate is the
// first that falls into the partition's first slot.
// Index: none, a row per partition that ever was.   Locks: the partitions that are due, by number.
const heartbeatSQL = `
WITH due AS (
  SELECT partition FROM outbox_partitions p
   WHERE ` + activeSQL + ` AND (heartbeat_at BETWEEN clock_timestamp() - @interval::interval AND clock_timestamp()) IS NOT true
   ORDER BY partition FOR NO KEY UPDATE),
beat AS (
  UPDATE outbox_partitions p SET heartbeat_at = clock_timestamp() FROM due WHERE p.partition = due.partition
  RETURNING p.partition, p.first_slot, p.heartbeat_at)
INSERT /* outbox.heartbeat */ INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at)
SELECT @tenant::bigint, @type::text, (SELECT n FROM generate_series(1, 10000) n WHERE get_byte(decode(md5(@tenant::bigint || '/' || @type::text || '/' || n), 'hex'), 0) & 31 = first_slot LIMIT 1),
       @event, jsonb_build_object('partition', partition, 'interval_seconds', extract(epoch FROM @interval::interval)::float8), heartbeat_at
  FROM beat ORDER BY partition`

// nextHeartbeatSQL tells how long it takes until a partition is due.
// Index: none, likewise.   Locks: none.
const nextHeartbeatSQL = `
SELECT /* outbox.next_heartbeat */ coalesce(min(heartbeat_at) + @interval::interval - clock_timestamp(), @interval) FROM outbox_partitions p WHERE ` + activeSQL

// Heartbeat writes an event of the system's tenant for each partition that is published to, if the last one is an interval old. However many call it, there is at most
// one for each partition and interval. It returns how many it wrote, and after how long to call it again. Cost: one round trip.
func Heartbeat(ctx context.Context, pool *pgxpool.Pool, interval time.Duration) (written int, next time.Duration, err error) {
	every := pgtype.Interval{Microseconds: interval.Microseconds(), Valid: true}
	var b pgx.Batch
	b.Queue(heartbeatSQL, pgx.StrictNamedArgs{"interval": every, "tenant": event.SystemTenant, "type": event.AggregateHeartbeat, "event": event.Sent}).Exec(func(tag pgconn.CommandTag) error {
		written = int(tag.RowsAffected())
		return nil
	})
	b.Queue(nextHeartbeatSQL, pgx.StrictNamedArgs{"interval": every}).QueryRow(func(row pgx.Row) error { return row.Scan(&next) })
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		return 0, 0, fmt.Errorf("write heartbeats: %w", err)
	}
	return written, min(max(next, time.Millisecond), interval), nil
}
