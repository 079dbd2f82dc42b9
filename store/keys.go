package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/versioned"
)

// purgePages is how many pages of child_keys a slice goes over: 1 MiB, some 7,000 keys.
const purgePages = 128

// keysBoundsSQL reads how many pages there are, and the first id that a child made now minus the time could have: ids begin with their time.
// Locks: none.
const keysBoundsSQL = `
SELECT /* store.keys_bounds */ pg_relation_size('child_keys') / current_setting('block_size')::bigint,
       (lpad(to_hex((extract(epoch FROM now() - @after::interval) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid::text`

// oldKeys are those of the pages from @from to @to whose child is older. The keys of erased authors stay: each refuses a write that would bring back
// what was erased.
const oldKeys = `child_keys WHERE ctid >= @from::tid AND ctid < @to::tid AND child_id < @before::uuid AND request_hash <> ''`

// countKeysSQL counts what purgeKeysSQL would purge.
// Index: none, the range of pages.   Locks: none.
const countKeysSQL = `SELECT /* store.count_keys */ count(*) FROM ` + oldKeys

// purgeKeysSQL purges the old keys of a range of pages. An index by age would cost each create something; to go over all pages, in their order on
// the disk, costs a run a second per gigabyte.
// Index: none, the range of pages.   Locks: the keys.
const purgeKeysSQL = `DELETE /* store.purge_keys */ FROM ` + oldKeys

// PurgeKeys purges the idempotency keys whose create is older than terms.After, of every kind and tenant, slice by slice, each a transaction: a retry of
// such a create makes another child. The keys that BlankKeys has made forget their request stay. What ctx or a crash interrupts, the next call finds.
// The pool acts as the system role.
func PurgeKeys(ctx context.Context, pool *pgxpool.Pool, terms versioned.Terms) error {
	if terms.After <= 0 {
		return nil
	}
	var pages int64
	var before string
	if err := pool.QueryRow(ctx, keysBoundsSQL, pgx.StrictNamedArgs{"after": terms.After}).Scan(&pages, &before); err != nil {
		return fmt.Errorf("read the size of child_keys: %w", err)
	}
	for page := int64(0); page < pages; page += purgePages {
		args := pgx.StrictNamedArgs{"from": fmt.Sprintf("(%d,0)", page), "to": fmt.Sprintf("(%d,0)", page+purgePages), "before": before}
		var n int64
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if terms.DryRun {
				return tx.QueryRow(ctx, countKeysSQL, args).Scan(&n)
			}
			if terms.Fence != nil {
				if err := terms.Fence(ctx, tx); err != nil {
					return err
				}
			}
			tag, err := tx.Exec(ctx, purgeKeysSQL, args)
			n = tag.RowsAffected()
			return err
		})
		if err != nil {
			return fmt.Errorf("purge idempotency keys of the pages from %d on: %w", page, err)
		}
		if terms.Done != nil {
			terms.Done(0, n, 0)
		}
	}
	return nil
}
