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

// keysBoundsSQL reads how far a purge that was cut short has come, how many pages there are, and the first id that a child made now minus the time could have: ids begin with their time.
// Index: retention_cursors_pkey.   Locks: none.
const keysBoundsSQL = `
SELECT /* store.keys_bounds */ coalesce((SELECT after_key[1]::bigint FROM retention_cursors WHERE table_name = 'child_keys'), 0),
       pg_relation_size('child_keys') / current_setting('block_size')::bigint,
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

const (
	// keysCursorSQL notes how far a purge has come.
	// Index: retention_cursors_pkey.   Locks: its row.
	keysCursorSQL = `
INSERT /* store.keys_cursor */ INTO retention_cursors (table_name, step, after_key) VALUES ('child_keys', 'purge', ARRAY[@page::bigint::text])
    ON CONFLICT (table_name) DO UPDATE SET after_key = excluded.after_key, moved_at = excluded.moved_at`
	// keysRestSQL notes that a purge is through.
	// Index: retention_cursors_pkey.   Locks: its row.
	keysRestSQL = `DELETE /* store.keys_rest */ FROM retention_cursors WHERE table_name = 'child_keys'`
)

// PurgeKeys purges the idempotency keys whose create is older than terms.After, of every kind and tenant, slice by slice, each a transaction: a retry of
// such a create makes another child. The keys that BlankKeys has made forget their request stay. What ctx or a crash interrupts, the next call goes on with.
// The pool acts as the system role.
func PurgeKeys(ctx context.Context, pool *pgxpool.Pool, terms versioned.Terms) error {
	if terms.After <= 0 {
		return nil
	}
	var page, pages int64
	var before string
	if err := pool.QueryRow(ctx, keysBoundsSQL, pgx.StrictNamedArgs{"after": terms.After}).Scan(&page, &pages, &before); err != nil {
		return fmt.Errorf("read the size of child_keys: %w", err)
	}
	if terms.DryRun {
		page = 0
	}
	for end := false; !end; page += purgePages {
		end = page+purgePages >= pages
		args := pgx.StrictNamedArgs{"from": fmt.Sprintf("(%d,0)", page), "to": fmt.Sprintf("(%d,0)", page+purgePages), "before": before}
		n, err := purgeKeys(ctx, pool, terms, args, page+purgePages, end)
		if err != nil {
			return fmt.Errorf("purge idempotency keys of the pages from %d on: %w", page, err)
		}
		if terms.Done != nil {
			terms.Done(0, n, 0)
		}
	}
	return nil
}

// purgeKeys purges a slice of keys, and notes that the next one begins at the page next, or that there is none.
func purgeKeys(ctx context.Context, pool *pgxpool.Pool, terms versioned.Terms, args pgx.StrictNamedArgs, next int64, end bool) (n int64, err error) {
	err = postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if terms.DryRun {
			return tx.QueryRow(ctx, countKeysSQL, args).Scan(&n)
		}
		if terms.Fence != nil {
			if err := terms.Fence(ctx, tx); err != nil {
				return err
			}
		}
		tag, err := tx.Exec(ctx, purgeKeysSQL, args)
		if err != nil {
			return err
		}
		n = tag.RowsAffected()
		if end {
			_, err = tx.Exec(ctx, keysRestSQL)
		} else {
			_, err = tx.Exec(ctx, keysCursorSQL, pgx.StrictNamedArgs{"page": next})
		}
		return err
	})
	return n, err
}
