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

	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// run runs both jobs, the archive's first, and returns what they counted.
func run(t *testing.T, pool *pgxpool.Pool, cfg Config) map[string]int64 {
	t.Helper()
	list, err := Jobs(cfg, Deps{Truth: pool, Projections: pool, Registry: prometheus.NewRegistry(), Log: testkit.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]int64)
	if err := jobs.WithLease(t.Context(), pool, "test", func(ctx context.Context, h *jobs.Hold) error {
		for _, j := range list {
			if j.Name != outbox.ArchiveJob && j.Name != ExportJob {
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

// archived are the ids in the archive.
func archived(t *testing.T, pool *pgxpool.Pool) []int64 {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT id FROM outbox_messages_archive ORDER BY id`)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// Old messages of a month with a partition, of a time that has none, and of the current month: nothing old goes before it is exported,
// and what comes late or is held is neither lost nor dropped.
func TestNoMonthIsDroppedBeforeItIsExported(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	dir := t.TempDir()
	cfg := Config{OutboxArchive: outbox.ArchiveConfig{Every: time.Hour, After: time.Hour, Keep: 40 * 24 * time.Hour, Batch: 100, Share: 100}}
	cfg.Cold.URL = "file://" + dir
	add := func(tenant int64, occurred string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at,
			inserted_at, processed_at, stream_seq) SELECT $1, 'post', 1, 'created', '{}', o, o, o, greatest(o, now() - interval '60 days'), 1
			FROM (SELECT date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' + $2::interval AS o) at`, tenant, occurred); err != nil {
			t.Fatal(err)
		}
	}
	old := monthBefore(t, pool, 3)
	list, err := outbox.NewArchive(cfg.OutboxArchive, pool, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if err := jobs.WithLease(t.Context(), pool, "test", func(ctx context.Context, h *jobs.Hold) error { return list.MakeMonth(ctx, h, old) }); err != nil {
		t.Fatal(err)
	}
	add(1, "-3 months 1 day")
	add(2, "-3 months 2 days")
	add(1, "-300 months 1 day")
	add(1, "0")
	got := run(t, pool, cfg)
	if ids := archived(t, pool); len(ids) < 3 || got[CountMonthsExported] != 2 || got[CountRowsExported] != 3 || got[outbox.CountMonthDropped]+got[outbox.CountRowsDropped] != 0 {
		t.Fatalf("the first run: %v, archived are %v", got, ids)
	}

	add(1, "-3 months 3 days") // late: moved by this run, and seen before the drop
	if got := run(t, pool, cfg); got[outbox.CountMonthDropped] != 0 || got[outbox.CountRowsDropped] != 1 || got[CountMonthsExported] != 1 || got[CountRowsExported] != 3 {
		t.Fatalf("the second run: %v", got)
	}
	if _, err := outbox.AddHold(t.Context(), pool, outbox.ArchiveHold{TenantID: 2, Reason: "test", CreatedBy: "test"}); err != nil {
		t.Fatal(err)
	}
	if got := run(t, pool, cfg); got[outbox.CountMonthShrunk] != 1 {
		t.Fatalf("the third run: %v", got)
	}
	if got := run(t, pool, cfg); got[outbox.CountMonthShrunk]+got[outbox.CountMonthDropped]+got[CountMonthsExported] != 0 {
		t.Errorf("a run with only held rows: %v", got)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*", "*", "manifest.json"))
	if err != nil || len(files) != 2 {
		t.Errorf("exports: %v, %v", files, err)
	}
	if ids := archived(t, pool); !slices.Contains(ids, 2) || slices.Contains(ids, 1) || slices.Contains(ids, 3) || slices.Contains(ids, 5) {
		t.Errorf("archived are %v", ids)
	}
}

// monthBefore is the first moment of a month some months ago, by the database's clock.
func monthBefore(t *testing.T, pool *pgxpool.Pool, months int) (month time.Time) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' - $1 * interval '1 month'`, months).Scan(&month); err != nil {
		t.Fatal(err)
	}
	return month.UTC()
}
