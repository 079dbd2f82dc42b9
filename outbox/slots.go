package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

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
