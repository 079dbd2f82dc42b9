package outbox

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

const (
	// redoSQL inserts rows for messages that are on a stream and that the database has lost. The
	// rows are pending, under their old ids, as if their relay had died before it marked them. It
	// skips rows whose id belongs to another event now, and events without an id.
	//
	// Index: outbox_messages_pkey.   Locks: only the new rows.
	redoSQL = `
INSERT /* outbox.redo */ INTO outbox_messages
       (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
SELECT e.id, e.tenant_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_version, e.payload, e.occurred_at,
       nullif(e.trace_id, ''), e.event_id
  FROM unnest(@ids::bigint[], @tenant_ids::bigint[], @aggregate_types::text[], @aggregate_ids::text[], @event_types::text[],
              @event_versions::smallint[], @payloads::jsonb[], @occurred_ats::timestamptz[], @trace_ids::text[], @event_ids::uuid[])
    AS e(id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
 WHERE e.id > 0 AND NOT EXISTS (SELECT FROM outbox_requeued r WHERE r.event_id = e.event_id)
   AND NOT EXISTS (SELECT FROM outbox_messages_dlq d WHERE d.id = e.id)
   AND NOT EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = e.id)
    ON CONFLICT DO NOTHING
RETURNING event_id::text`

	// redoneSQL finds the events that have their row already, under the id of their message.
	//
	// Index: outbox_messages_pkey, the primary keys of the archive's ranges,
	// outbox_messages_dlq_event_id_key. Locks: none.
	redoneSQL = `
SELECT /* outbox.redone */ e.event_id::text FROM unnest(@ids::bigint[], @event_ids::uuid[]) AS e(id, event_id)
 WHERE EXISTS (SELECT FROM outbox_messages m WHERE m.id = e.id AND m.event_id = e.event_id)
    OR EXISTS (SELECT FROM outbox_messages_archive a WHERE a.id = e.id AND a.event_id = e.event_id)
    OR EXISTS (SELECT FROM outbox_messages_dlq d WHERE d.event_id = e.event_id)`

	// redoMovedSQL inserts the rows that are still missing under new ids, and records these, once.
	//
	// Index: outbox_messages_pkey, outbox_requeued_pkey.   Locks: only the new rows.
	redoMovedSQL = `
WITH fresh AS (
  INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id)
  SELECT e.tenant_id, e.aggregate_type, e.aggregate_id, e.event_type, e.event_version, e.payload, e.occurred_at,
         nullif(e.trace_id, ''), e.event_id
    FROM unnest(@ids::bigint[], @tenant_ids::bigint[], @aggregate_types::text[], @aggregate_ids::text[], @event_types::text[],
                @event_versions::smallint[], @payloads::jsonb[], @occurred_ats::timestamptz[], @trace_ids::text[],
                @event_ids::uuid[]) WITH ORDINALITY
      AS e(id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, trace_id, event_id, ord)
   WHERE e.event_id <> ALL (@there::uuid[]) AND NOT EXISTS (SELECT FROM outbox_requeued r WHERE r.event_id = e.event_id)
   ORDER BY e.ord
  RETURNING event_id, id)
INSERT /* outbox.redo_moved */ INTO outbox_requeued (event_id, id) SELECT event_id, id FROM fresh RETURNING event_id::text`

	// lowerAllFloorsSQL lowers the floors of all open partitions below a row that is pending again.
	// Index: none, a row per partition that ever existed. Locks: the partitions.
	lowerAllFloorsSQL = `
UPDATE /* outbox.lower_all_floors */ outbox_partitions SET floor_id = least(floor_id, @id - 1) WHERE final_seq IS NULL`
)

// Redo inserts rows for messages that are on a stream and that this database has lost. The rows are
// pending under their old ids, and the next catch-up marks them. An event that has its row already
// gets no other one.
//
// moved are the events whose id belongs to another event now, or that have the id 0. They get new
// ids, so the relay publishes them again, and the caller must delete their old messages. written
// are the events whose rows this call inserted. The caller writes the state that they describe in
// the same transaction.
func Redo(ctx context.Context, tx pgx.Tx, lost []event.Event) (moved []string, written []event.Event, err error) {
	n := len(lost)
	if n == 0 {
		return nil, nil, nil
	}
	ids, tenants, aggregates, versions := make([]int64, n), make([]int64, n), make([]event.ID, n), make([]int16, n)
	aggregateTypes, types, payloads, traces, eventIDs := make([]string, n), make([]string, n), make([]string, n),
		make([]string, n), make([]string, n)
	occurred, lowest := make([]time.Time, n), int64(math.MaxInt64)
	for i, e := range lost {
		ids[i], tenants[i], aggregates[i], versions[i] = e.OutboxID, e.TenantID, e.AggregateID, int16(e.Version)
		aggregateTypes[i], types[i], payloads[i], traces[i], eventIDs[i] = e.AggregateType, e.Type, string(e.Payload), e.TraceParent, e.ID
		if occurred[i] = e.OccurredAt; e.OutboxID > 0 {
			lowest = min(lowest, e.OutboxID)
		}
	}
	args := pgx.StrictNamedArgs{"ids": ids, "tenant_ids": tenants, "aggregate_types": aggregateTypes, "aggregate_ids": aggregates,
		"event_types": types, "event_versions": versions, "payloads": payloads, "occurred_ats": occurred, "trace_ids": traces,
		"event_ids": eventIDs}
	there, is := make([]string, 0, n), make(map[string]bool, n) // events whose rows have the ids of their messages
	inserted := make(map[string]bool, n)
	run := func(what, sql string, args pgx.StrictNamedArgs, each func(id string)) {
		if err != nil {
			return
		}
		var id string
		rows, _ := tx.Query(ctx, sql, args)
		if _, err = pgx.ForEachRow(rows, []any{&id}, func() error { each(id); return nil }); err != nil {
			err = fmt.Errorf("%s for %d lost messages: %w", what, n, err)
		}
	}
	run("look up the rows", redoneSQL, pgx.StrictNamedArgs{"ids": ids, "event_ids": eventIDs},
		func(id string) { there, is[id] = append(there, id), true })
	run("insert rows", redoSQL, args, func(id string) { there, is[id], inserted[id] = append(there, id), true, true })
	if err != nil {
		return nil, nil, err
	}
	if len(inserted) > 0 {
		if _, err := tx.Exec(ctx, lowerAllFloorsSQL, pgx.StrictNamedArgs{"id": lowest}); err != nil {
			return nil, nil, fmt.Errorf("lower the floors to %d: %w", lowest, err)
		}
	}
	if len(there) < n {
		args["there"] = there
		if run("insert rows under new ids", redoMovedSQL, args, func(id string) { inserted[id] = true }); err != nil {
			return nil, nil, err
		}
	}
	for i, id := range eventIDs {
		if !is[id] {
			moved = append(moved, id)
		}
		if inserted[id] {
			written = append(written, lost[i])
		}
	}
	return moved, written, nil
}

const (
	// stayUncutSQL keeps outbox_range_cut from moving the sequence: that reads the last id and then
	// sets it, so ids that others take in between would be assigned again. An INSERT takes the same
	// lock. Locks: the outbox, as a writer.
	stayUncutSQL = `LOCK TABLE ONLY outbox_messages IN ROW EXCLUSIVE MODE`
	// raiseIDsSQL consumes ids of the sequence, up to @above.
	raiseIDsSQL = `
SELECT /* outbox.raise_ids */ count(nextval('outbox_messages_id_seq'))
  FROM generate_series(1, least(@above - (` + lastIDSQL + `), 1000000))`
)

// RaiseIDs makes all further rows get ids higher than above. The ids up to above belong to messages
// that a restored database lost.
func RaiseIDs(ctx context.Context, pool *pgxpool.Pool, above int64) error {
	for {
		var given int64
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, stayUncutSQL); err != nil {
				return err
			}
			return tx.QueryRow(ctx, raiseIDsSQL, pgx.StrictNamedArgs{"above": above}).Scan(&given)
		}); err != nil {
			return fmt.Errorf("raise the ids of the outbox above %d: %w", above, err)
		}
		if given == 0 {
			return nil
		}
	}
}

// Renew replaces the open partitions by the same number of new ones, as Resize does: with new
// numbers and new streams. It returns the old ones, or ErrResizing while a resize has not ended.
func Renew(ctx context.Context, pool *pgxpool.Pool) (old []Partition, err error) {
	old, _, err = replaceOpen(ctx, pool, 0)
	return old, err
}
