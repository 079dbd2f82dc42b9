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

// activeSQL selects the partitions p to which a relay may publish now, as Active does.
const activeSQL = `p.final_seq IS NULL AND NOT EXISTS (SELECT FROM outbox_partitions o WHERE o.partition = ANY(p.after) AND ` +
	`o.final_seq IS NULL)`

// inFirstSlotSQL is the first number that is an aggregate id of the partition's first slot.
const inFirstSlotSQL = `(SELECT n::text FROM generate_series(1, 10000) n
         WHERE get_byte(decode(md5(@tenant::bigint || '/' || @type::text || '/' || n), 'hex'), 0) & 31 = first_slot LIMIT 1)`

// heartbeatSQL writes a heartbeat for each active partition that had none for an interval. It locks
// the partition's row and checks it again, so of several callers only one writes. A heartbeat_at in
// the future counts as none: it came from a server whose clock was ahead.
//
// Index: none, a row per partition that ever existed.   Locks: the due partitions, by number.
const heartbeatSQL = `
WITH due AS (
  SELECT partition FROM outbox_partitions p
   WHERE ` + activeSQL + ` AND (heartbeat_at BETWEEN clock_timestamp() - @interval::interval AND clock_timestamp()) IS NOT true
   ORDER BY partition FOR NO KEY UPDATE),
beat AS (
  UPDATE outbox_partitions p SET heartbeat_at = clock_timestamp() FROM due WHERE p.partition = due.partition
  RETURNING p.partition, p.first_slot, p.heartbeat_at)
INSERT /* outbox.heartbeat */ INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at)
SELECT @tenant::bigint, @type::text,
       ` + inFirstSlotSQL + `,
       @event, jsonb_build_object('partition', partition, 'interval_seconds', extract(epoch FROM @interval::interval)::float8), heartbeat_at
  FROM beat ORDER BY partition`

// nextHeartbeatSQL reads the time until the next partition is due.
//
// Index: none, a row per partition that ever existed.   Locks: none.
const nextHeartbeatSQL = `
SELECT /* outbox.next_heartbeat */ coalesce(min(heartbeat_at) + @interval::interval - clock_timestamp(), @interval)
  FROM outbox_partitions p WHERE ` + activeSQL

// Heartbeat writes an event of the system tenant for each active partition whose last one is an
// interval old. Any number of callers together write at most one per partition and interval. It
// returns the number written, and the time until the next call. Cost: one round trip.
func Heartbeat(ctx context.Context, pool *pgxpool.Pool, interval time.Duration) (written int, next time.Duration, err error) {
	every := pgtype.Interval{Microseconds: interval.Microseconds(), Valid: true}
	var b pgx.Batch
	b.Queue(heartbeatSQL, pgx.StrictNamedArgs{"interval": every, "tenant": event.SystemTenant, "type": event.AggregateHeartbeat,
		"event": event.Sent}).Exec(func(tag pgconn.CommandTag) error {
		written = int(tag.RowsAffected())
		return nil
	})
	b.Queue(nextHeartbeatSQL, pgx.StrictNamedArgs{"interval": every}).QueryRow(func(row pgx.Row) error { return row.Scan(&next) })
	if err := pool.SendBatch(ctx, &b).Close(); err != nil {
		return 0, 0, fmt.Errorf("write heartbeats: %w", err)
	}
	return written, min(max(next, time.Millisecond), interval), nil
}

// broadcastSQL writes an event into each active partition.
//
// Index: none, a row per partition that ever existed.   Locks: none.
const broadcastSQL = `
WITH at AS (SELECT first_slot FROM outbox_partitions p WHERE ` + activeSQL + `), told AS (
INSERT /* outbox.broadcast */ INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
SELECT @tenant::bigint, @type::text, ` + inFirstSlotSQL + `, @event, @payload::jsonb FROM at)
SELECT coalesce(array_agg(first_slot), '{}') FROM at`

// Broadcast writes an event of a tenant into each active partition, in tx. It returns the first
// slots of these partitions. If the partitions are resized before a relay has published the events,
// those after the resize may lack it: compare their first slots.
func Broadcast(ctx context.Context, tx pgx.Tx, tenant int64, aggregateType, eventType string, payload any) (slots []int, err error) {
	if err := tx.QueryRow(ctx, broadcastSQL, pgx.StrictNamedArgs{"tenant": tenant, "type": aggregateType, "event": eventType,
		"payload": payload}).Scan(&slots); err != nil {
		return nil, fmt.Errorf("write %s.%s of tenant %d into each partition: %w", aggregateType, eventType, tenant, err)
	}
	return slots, nil
}
