package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// A floor is a proof: no snapshot sees a claimable row of the partition with an id at or below it (docs/adr/0004-floor.md). It rises in
// two steps. The first notes the last id that was handed out, and then a transaction id of its own. A writer has its transaction id
// before its row's id (the default of outbox_messages.id sees to that), so each writer of an id up to the noted one has a lower
// transaction id. The second step is due when a snapshot begins at the noted transaction id or above: then all of them have ended.

// lastIDSQL reads the last id that was handed out. A sequence that nobody has used shows the id that it hands out first.
const lastIDSQL = `SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM outbox_messages_id_seq`

// lockFloorsSQL locks the partitions whose floors can rise, and so gives this transaction its id. It passes over those that a mark or a
// release holds now, so it waits for nobody.
// Index: outbox_partitions_pkey.   Locks: the partition rows.
const lockFloorsSQL = `
SELECT /* outbox.lock_floors */ partition::int FROM outbox_partitions
 WHERE partition = ANY(@partitions::smallint[]) AND floor < @last ORDER BY partition FOR UPDATE SKIP LOCKED`

// raiseFloorsSQL takes the second step for what was noted, if every writer of that time has ended, and notes what is now. Its
// snapshot is younger than the locks, so it sees every row that was released before them.
// Index: outbox_partitions_pkey; outbox_messages_pending_idx, one probe per partition past its floor.   Locks: none but those held.
const raiseFloorsSQL = `
UPDATE /* outbox.raise_floors */ outbox_partitions p
   SET floor = coalesce((SELECT m.id - 1 FROM outbox_messages m
                          WHERE (m.partition, m.id) > (p.partition, p.floor) AND (m.partition, m.id) <= (p.partition, p.next_floor)
                            AND m.processed_at IS NULL AND NOT m.delayed
                          ORDER BY m.partition, m.id LIMIT 1), p.next_floor),
       next_floor = @last, next_floor_xid = pg_current_xact_id()
 WHERE p.partition = ANY(@partitions::smallint[]) AND p.next_floor_xid <= pg_snapshot_xmin(pg_current_snapshot())`

// RaiseFloors raises the floors of the partitions as far as they can rise, or prepares that. Call it about once a second: a call raises
// a floor to the last id of the call before, unless a transaction of that time still runs. On an idle outbox it writes nothing.
func RaiseFloors(ctx context.Context, pool *pgxpool.Pool, partitions []int) error {
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		var last int64 // before anything that gives this transaction an id
		if err := tx.QueryRow(ctx, lastIDSQL).Scan(&last); err != nil {
			return fmt.Errorf("read the last id: %w", err)
		}
		rows, _ := tx.Query(ctx, lockFloorsSQL, pgx.StrictNamedArgs{"partitions": partitions, "last": last})
		locked, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil || len(locked) == 0 {
			return err
		}
		_, err = tx.Exec(ctx, raiseFloorsSQL, pgx.StrictNamedArgs{"partitions": locked, "last": last})
		return err
	})
	if err != nil {
		return fmt.Errorf("raise the floors of %d partitions: %w", len(partitions), err)
	}
	return nil
}

// belowFloorSQL looks for claimable rows at the floor and some ids below: a bounded look, whatever dead entries lie under the floor. A
// snapshot that sees a floor sees none.
// Index: outbox_partitions_pkey; outbox_messages_pending_idx, one range scan per partition.
const belowFloorSQL = `
SELECT /* outbox.below_floor */ p.partition::int, m.id, p.floor
  FROM outbox_partitions p
 CROSS JOIN LATERAL (
       SELECT m.id FROM outbox_messages m
        WHERE (m.partition, m.id) > (p.partition, p.floor - @depth) AND (m.partition, m.id) <= (p.partition, p.floor) AND m.processed_at IS NULL AND NOT m.delayed
        ORDER BY m.partition, m.id LIMIT 1) m
 WHERE p.partition = ANY(@partitions::smallint[])`

// lowerFloorsSQL takes floors back.
// Index: outbox_partitions_pkey.   Locks: the partition rows.
const lowerFloorsSQL = `
UPDATE /* outbox.lower_floors */ outbox_partitions p SET floor = f.below - 1
  FROM unnest(@partitions::smallint[], @ids::bigint[]) AS f(partition, below) WHERE p.partition = f.partition AND p.floor >= f.below`

// belowFloorDepth is how many ids below a floor BelowFloor looks. What is further below shows as lag.
const belowFloorDepth = 10_000

// Violation is a claimable row at or below its partition's floor: the proof does not hold.
type Violation struct {
	Partition int
	ID, Floor int64
}

// BelowFloor returns the first row of each partition that contradicts its floor, and lowers that floor so that the row is claimed. It must
// return none.
func BelowFloor(ctx context.Context, pool *pgxpool.Pool, partitions []int) ([]Violation, error) {
	rows, _ := pool.Query(ctx, belowFloorSQL, pgx.StrictNamedArgs{"partitions": partitions, "depth": belowFloorDepth})
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Violation])
	if err != nil {
		return nil, fmt.Errorf("look below the floors of %d partitions: %w", len(partitions), err)
	}
	if len(found) == 0 {
		return nil, nil
	}
	below, ids := make([]int, len(found)), make([]int64, len(found))
	for i, v := range found {
		below[i], ids[i] = v.Partition, v.ID
	}
	if _, err := pool.Exec(ctx, lowerFloorsSQL, pgx.StrictNamedArgs{"partitions": below, "ids": ids}); err != nil {
		return found, fmt.Errorf("lower the floors of %d partitions: %w", len(below), err)
	}
	return found, nil
}
