package upkeep

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
)

// A long export holds the lease of the jobs for hours. Meanwhile writers use up the ranges that
// exist ahead. So the job that creates ranges does not wait for the lease.
func TestRangesAreMadeWhileAnotherJobHoldsTheLease(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	cfg := Config{OutboxArchive: outbox.ArchiveConfig{RangeRows: 1000, RangeAge: time.Hour}, Retention: RetentionConfig{Every: time.Hour}}
	list, err := Jobs(cfg, Deps{Truth: pool, Projections: pool, Registry: prometheus.NewRegistry(), Log: testkit.Logger(t)},
		fixed(Default()))
	if err != nil {
		t.Fatal(err)
	}
	runner, err := jobs.New(pool, list, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`SELECT setval('outbox_messages_id_seq', (SELECT max(from_id) FROM outbox_ranges))`); err != nil {
		t.Fatal(err)
	}
	if err := jobs.WithLease(t.Context(), pool, "export", func(ctx context.Context, _ *jobs.Hold) error {
		ctx, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- runner.Run(ctx) }()
		testkit.Eventually(t, "two ranges exist ahead", func() (bool, error) {
			s, err := outbox.ReadStats(ctx, pool)
			return s.RangesAhead == 2, err
		})
		stop()
		return <-ended
	}); err != nil {
		t.Fatal(err)
	}
}
