package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
)

// purgePages is the number of pages of child_keys that one slice covers: 1 MiB, about 7,000 keys.
const purgePages = 128

// keysBoundsSQL reads how far an interrupted purge has come, the number of pages, and the lowest id
// of a child made now minus @after. Ids begin with their time. Index: retention_cursors_pkey.
// Locks: none.
const keysBoundsSQL = `
SELECT /* store.keys_bounds */ coalesce((SELECT after_key[1]::bigint FROM retention_cursors WHERE table_name = 'child_keys'), 0),
       pg_relation_size('child_keys') / current_setting('block_size')::bigint,
       (lpad(to_hex((extract(epoch FROM now() - @after::interval) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid::text`

// oldKeys are the keys on the pages from @from to @to whose child is older than @before. It leaves
// out the keys of erased authors: each of them refuses a write that would bring back erased
// content.
const oldKeys = `child_keys WHERE ctid >= @from::tid AND ctid < @to::tid AND child_id < @before::uuid AND request_hash <> ''`

// countKeysSQL counts the keys that purgeKeysSQL would purge. Index: none, the range of pages.
// Locks: none.
const countKeysSQL = `SELECT /* store.count_keys */ count(*) FROM ` + oldKeys

// purgeKeysSQL purges the old keys of a range of pages. An index by age would slow down each
// create. Reading all pages in their order on disk costs a run one second per gigabyte. Index:
// none, the range of pages. Locks: the keys.
const purgeKeysSQL = `DELETE /* store.purge_keys */ FROM ` + oldKeys

const (
	// keysCursorSQL records how far a purge has come. Index: retention_cursors_pkey. Locks: its
	// row.
	keysCursorSQL = `
INSERT /* store.keys_cursor */ INTO retention_cursors (table_name, step, after_key)
    VALUES ('child_keys', 'purge', ARRAY[@page::bigint::text])
    ON CONFLICT (table_name) DO UPDATE SET after_key = excluded.after_key, moved_at = excluded.moved_at`
	// keysRestSQL records that a purge is complete. Index: retention_cursors_pkey. Locks: its row.
	keysRestSQL = `DELETE /* store.keys_rest */ FROM retention_cursors WHERE table_name = 'child_keys'`
)

// PurgeKeys purges the idempotency keys of all kinds and tenants whose create is older than
// terms.After. A retry of such a create makes another child. Keys whose request BlankKeys has
// erased remain. Each slice is one transaction; if ctx or a crash interrupts a run, the next call
// resumes there. The pool acts as the system role.
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
			return fmt.Errorf("purge idempotency keys from page %d: %w", page, err)
		}
		if terms.Done != nil {
			terms.Done(0, n, 0)
		}
	}
	return nil
}

// purgeKeys purges a slice of keys. It records the page at which the next slice begins or, with
// end, that the purge is complete.
func purgeKeys(ctx context.Context, pool *pgxpool.Pool, terms versioned.Terms, args pgx.StrictNamedArgs, next int64,
	end bool) (n int64, err error) {
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
