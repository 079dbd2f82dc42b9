package lease

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

// clearSQL frees every lease and forgets every member.
// Locks: the leases.
const clearSQL = `
WITH gone AS (DELETE FROM lease_members)
UPDATE leases SET owner = '', expires_at = '-infinity' WHERE owner <> ''`

// Clear frees the leases of all kinds. It is for a process that knows itself alone, such as one that holds the database's
// directory: what its predecessor held when it was killed need not expire first.
func Clear(ctx context.Context, pool *pgxpool.Pool) error {
	if _, err := pool.Exec(ctx, clearSQL); err != nil {
		return fmt.Errorf("free all leases: %w", err)
	}
	return nil
}
