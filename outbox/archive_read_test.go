package outbox

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestAWalkOverTheArchiveMeetsEveryRowOfItsRangeOnceInOrder(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	// Some rows are larger than a page, where pages are large already.
	exec(t, db.Pool(t, postgres.RoleOwner), `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at)
		SELECT 1, 'post', 1, 'created', CASE WHEN g BETWEEN 2990 AND 2992 THEN to_jsonb(repeat('x', 5000000)) ELSE '1' END, now()
		FROM generate_series(1, 6000) g`)
	exec(t, db.Pool(t, postgres.RoleOwner), `UPDATE outbox_messages SET inserted_at = now() - interval '2 days'`)
	leave(t, pool, 8*archiveDay)
	archive(t, newArchive(t, pool))
	exec(t, db.Pool(t, postgres.RoleOwner), `ANALYZE outbox_messages_archive`)
	var got []int64
	if err := WalkArchive(t.Context(), pool, 700, 5600, func(key ArchiveKey, line []byte) error {
		if !strings.HasPrefix(string(line), fmt.Sprintf(`{"id" : "%d", `, key.ID)) {
			t.Errorf("row %d is %.50s", key.ID, line)
		}
		got = append(got, key.ID)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for from, want := range map[int64]bool{700: true, 9000: false} {
		if some, err := AnyArchived(t.Context(), pool, from, from+10); err != nil || some != want {
			t.Errorf("any rows from %d: %t, %v", from, some, err)
		}
	}
	if len(got) != 4900 || !slices.IsSorted(got) || got[0] != 700 || got[4899] != 5599 {
		t.Errorf("%d rows", len(got))
	}
	rows, _ := pool.Query(t.Context(), "EXPLAIN (COSTS OFF) "+walkArchiveSQL, pgx.QueryExecModeExec,
		pgx.StrictNamedArgs{"after": int64(0), "to": int64(6000), "limit": 100})
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if text := strings.Join(plan, "\n"); err != nil || !strings.Contains(text, "_pkey") || strings.Contains(text, "Sort") ||
		strings.Contains(text, "Seq Scan") {
		t.Errorf("the walk does not follow the key (%v):\n%s", err, text)
	}
}
