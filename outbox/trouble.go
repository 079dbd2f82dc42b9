package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

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
