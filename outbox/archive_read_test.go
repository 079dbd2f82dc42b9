package outbox

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestAWalkOverTheArchiveMeetsEveryRowOfItsTimeOnceInOrder(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	start := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	// Many rows share a time; some are larger than a page, and they come where pages have grown.
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
		       processed_at, attempts, event_id, inserted_at, slot)
		SELECT g, 1, 'post', 1, 'created', 1, CASE WHEN g BETWEEN 2990 AND 2992 THEN to_jsonb(repeat('x', 5000000)) ELSE '1' END,
		       $1::timestamptz + (g / 700) * interval '1 day', now(), now(), 0, gen_random_uuid(), now(), 0
		  FROM generate_series(1, 6000) g`, start); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `ANALYZE outbox_messages_archive`); err != nil {
		t.Fatal(err)
	}
	from, before := start.AddDate(0, 0, 1), start.AddDate(0, 0, 8)
	var got []int64
	if err := WalkArchive(t.Context(), pool, from, before, func(key ArchiveKey, line []byte) error {
		if !strings.HasPrefix(string(line), fmt.Sprintf(`{"id" : "%d", `, key.ID)) {
			t.Errorf("row %d is %.50s", key.ID, line)
		}
		got = append(got, key.ID)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	n, err := CountArchive(t.Context(), pool, from, before)
	if err != nil || len(got) != 4900 || n != 4900 || !slices.IsSorted(got) || got[0] != 700 || got[4899] != 5599 {
		t.Errorf("%d rows, %d counted, %v", len(got), n, err)
	}
	months, err := ArchivedMonths(t.Context(), pool, start.AddDate(0, 0, 40))
	if err != nil || !slices.Equal(months, []time.Time{start}) {
		t.Errorf("months: %v, %v", months, err)
	}
	if months, err := ArchivedMonths(t.Context(), pool, start.AddDate(0, 0, 20)); err != nil || len(months) != 0 {
		t.Errorf("a month that has not ended: %v, %v", months, err)
	}
	rows, _ := pool.Query(t.Context(), "EXPLAIN (COSTS OFF) "+walkArchiveSQL, pgx.QueryExecModeExec,
		pgx.StrictNamedArgs{"after": from, "after_id": int64(0), "before": before, "limit": 100})
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if text := strings.Join(plan, "\n"); err != nil || !strings.Contains(text, "_pkey") || strings.Contains(text, "Sort") || strings.Contains(text, "Seq Scan") {
		t.Errorf("the walk does not follow the key (%v):\n%s", err, text)
	}
}
