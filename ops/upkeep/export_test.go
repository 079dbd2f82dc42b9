package upkeep

import (
	"context"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
)

// fixed returns settings that never change.
func fixed(s Settings) func(context.Context) (Settings, error) {
	return func(context.Context) (Settings, error) { return s, nil }
}

// run runs the outbox's jobs in their order, and returns their counts.
func run(t *testing.T, pool *pgxpool.Pool, cfg Config, s Settings) map[string]int64 {
	t.Helper()
	list, err := Jobs(cfg, Deps{Truth: pool, Projections: pool, Registry: prometheus.NewRegistry(), Log: testkit.Logger(t)}, fixed(s))
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]int64)
	if err := jobs.WithLease(t.Context(), pool, "test", func(ctx context.Context, h *jobs.Hold) error {
		for _, j := range list {
			if j.Name != outbox.RangesJob && j.Name != outbox.ArchiveJob && j.Name != ExportJob {
				continue
			}
			counts, err := h.Run(ctx, j)
			if err != nil {
				return err
			}
			for what, n := range counts {
				all[what] += n
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// A range with messages of two tenants is old enough to be dropped. The archiver drops it only
// after it is exported as it is. A message that arrives late is neither lost nor dropped. The rows
// that a hold of a tenant names remain.
func TestNoRangeIsDroppedBeforeItIsExported(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	dir := t.TempDir()
	cfg := Config{OutboxArchive: outbox.ArchiveConfig{Every: time.Hour, RangeRows: 1000, RangeAge: time.Hour},
		Retention: RetentionConfig{Every: time.Hour}}
	s := Settings{OutboxArchiveAfter: Span(time.Hour), OutboxArchiveKeep: Span(40 * 24 * time.Hour), OutboxExportURL: "file://" + dir}
	exec := func(sql string) {
		t.Helper()
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at, inserted_at,
		processed_at, stream_seq)
		SELECT tenant, 'post', 1, 'created', '{}', at, at, at, at, 1
		FROM (VALUES (1), (2), (1)) v(tenant), (SELECT now() - interval '60 days' AS at) t`)
	run(t, pool, cfg, s) // closes the range
	exec(`INSERT INTO outbox_messages (id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (4, gen_random_uuid(), 1, 'post', 1, 'later', '{}', now() + interval '1 day')`)
	exec(`UPDATE outbox_partitions SET floor_id = 50000000`)
	run(t, pool, cfg, s)
	exec(`UPDATE outbox_ranges SET settled_at = settled_at - interval '2 hours'`)
	if got := run(t, pool, cfg, s); got[outbox.CountArchived] != 1 || got[CountRangesExported] != 1 || got[CountRowsExported] != 3 {
		t.Fatalf("the archived range: %v", got)
	}
	// arrives late; the next run moves it before it drops ranges
	exec(`UPDATE outbox_messages SET processed_at = now() - interval '2 hours' WHERE id = 4`)
	if got := run(t, pool, cfg, s); got[outbox.CountLate] != 1 || got[outbox.CountDropped] != 0 {
		t.Fatalf("the late message: %v", got)
	}
	exec(`UPDATE outbox_ranges SET archived_at = archived_at - interval '41 days'`)
	if got := run(t, pool, cfg, s); got[outbox.CountDropped] != 0 || got[CountRangesExported] != 1 || got[CountRowsExported] != 4 {
		t.Fatalf("a range that has changed since it was exported: %v", got)
	}
	if _, err := outbox.AddHold(t.Context(), pool, outbox.ArchiveHold{TenantID: 2, Reason: "test", CreatedBy: "test"}); err != nil {
		t.Fatal(err)
	}
	if got := run(t, pool, cfg, s); got[outbox.CountDropped] != 1 {
		t.Fatalf("the range, exported again: %v", got)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", "*", "manifest.json"))
	if err != nil || len(files) != 1 {
		t.Errorf("exports: %v, %v", files, err)
	}
	rows, _ := pool.Query(t.Context(), `SELECT id FROM outbox_messages_kept UNION ALL SELECT id FROM outbox_messages_archive`)
	if ids, err := pgx.CollectRows(rows, pgx.RowTo[int64]); err != nil || !slices.Equal(ids, []int64{2}) {
		t.Errorf("rows %v remain, %v; want those that tenant 2 holds", ids, err)
	}
}
