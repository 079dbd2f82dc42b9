package threadcache

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/projections"
)

// repairKeys repairs the keys, and calls between after each step.
func repairKeys(t *testing.T, pool *pgxpool.Pool, p Projection, keys []projections.Key, between func()) {
	t.Helper()
	for len(keys) > 0 {
		if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			rest, err := p.Repair(t.Context(), tx, pool, keys, func(int64, string, event.ID) bool { return false })
			keys = rest
			return err
		}); err != nil {
			t.Fatal(err)
		}
		between()
	}
}

// putSQL sets a comment of the truth to the state of an event.
const putSQL = `
INSERT INTO children_comment (tenant_id, kind, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state,
	version, created_at, updated_at)
VALUES (1, 'comment', $1, $2, NULLIF($3, '')::uuid, $4, $5, $6, $7, $8, $9, $10, $11, $12)
ON CONFLICT (tenant_id, child_id) DO UPDATE SET body = excluded.body, author_state = excluded.author_state,
	moderation_state = excluded.moderation_state,
   version = excluded.version, updated_at = excluded.updated_at`
