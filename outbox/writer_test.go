package outbox

import (
	"fmt"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAWriterAppendsAndNoMore: what docs/upstream.md promises of the role tidings_writer.
func TestAWriterAppendsAndNoMore(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleWriter)
	for tenant := range 2 {
		var id int64
		if err := pool.QueryRow(t.Context(), fmt.Sprintf(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
			VALUES (%d, 'like', 42, 'created', '{"version": 1}', NULL) RETURNING id`, tenant+1)).Scan(&id); err != nil {
			t.Error(err)
		}
	}
	for _, sql := range []string{
		`UPDATE outbox_messages SET payload = '{}'`, `UPDATE outbox_messages SET processed_at = now()`, `DELETE FROM outbox_messages`, `SELECT payload FROM outbox_messages`,
		`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES (1, 'like', 42, 'created', '{}', now())`,
		`INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (7, 1, 'like', 42, 'created', '{}')`,
		`SELECT setval('outbox_messages_id_seq', 7)`, `SELECT last_value FROM outbox_messages_id_seq`,
		`SELECT FROM api_tokens`, `SELECT FROM outbox_messages_dlq`, `SELECT FROM outbox_messages_archive`, `SELECT FROM outbox_partitions`, `SELECT FROM leases`,
		`SELECT FROM comment_keys`, `SELECT FROM threads`, `DELETE FROM follows`, `DELETE FROM comments`, `UPDATE follows SET follower_id = 1`,
		`UPDATE comments SET moderation_state = 'APPROVED'`,
	} {
		if _, err := pool.Exec(t.Context(), sql); !postgres.IsSystemic(err) { // insufficient_privilege is one
			t.Errorf("%s: %v, want it refused", sql, err)
		}
	}
}
