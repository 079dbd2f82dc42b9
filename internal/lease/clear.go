package lease

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

// clearSQL frees every lease and deletes every member. Locks: the leases.
const clearSQL = `
WITH gone AS (DELETE FROM lease_members)
UPDATE leases SET owner = '', expires_at = '-infinity' WHERE owner <> ''`

// Clear frees the leases of all kinds, so that those of a killed predecessor need not expire first.
// Only a process that is certainly alone may call it, for example one that holds the lock on the
// database's directory.
func Clear(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, clearSQL); err != nil {
		return fmt.Errorf("free all leases: %w", err)
	}
	return nil
}
