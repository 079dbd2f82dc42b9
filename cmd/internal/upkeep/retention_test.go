package upkeep

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestTheRetentionJobWorksUnderTheLeaseAndOnlyWhereATimeIsSet(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO threads (tenant_id, object, metadata) VALUES (1, '{"post_id": "5", "version": 1}', '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
		INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id) VALUES
		  (1, 'comment', 7, 'old', 'x', '01990000-0000-7000-8000-000000000000'), (1, 'comment', 7, 'new', 'x', 'ffff0000-0000-7000-8000-000000000000');
		INSERT INTO follows (tenant_id, follower_id, followee_id, status, version) VALUES (1, 7, 42, 'REMOVED', 2);
		INSERT INTO follow_history (tenant_id, object, metadata) VALUES
		  (1, '{"follower_id": "7", "followee_id": "42", "version": 1}', '{"version_id": 1, "version_state": "ARCHIVED", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}'),
		  (1, '{"follower_id": "7", "followee_id": "42", "version": 2}', '{"version_id": 2, "version_state": "DELETED", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`); err != nil {
		t.Fatal(err)
	}
	run := func(cfg RetentionConfig, stolen bool) (counts map[string]int64, err error) {
		t.Helper()
		cfg.Every = time.Hour
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		job, err := retention(cfg, Deps{Truth: pool, Projections: pool, Kinds: kinds.Builtin, Registry: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		err = jobs.WithLease(t.Context(), pool, "test", func(ctx context.Context, h *jobs.Hold) (err error) {
			if stolen {
				if _, err := pool.Exec(ctx, `UPDATE leases SET epoch = epoch + 1 WHERE kind = $1`, jobs.Kind); err != nil {
					return err
				}
			}
			counts, err = h.Run(ctx, job)
			return err
		})
		return counts, err
	}
	if counts, err := run(RetentionConfig{}, false); len(counts) > 0 || err != nil {
		t.Errorf("without a time: %v, %v", counts, err)
	}
	all := RetentionConfig{Threads: time.Hour, CommentHistory: time.Hour, FollowHistory: time.Hour, CommentKeys: time.Hour}
	job, err := retention(RetentionConfig{Threads: time.Hour, FollowHistory: time.Hour}, Deps{Truth: pool, Projections: pool, Kinds: kinds.Builtin, Registry: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := job.Plan(t.Context())
	if diff := cmp.Diff(map[string]int64{"threads expired": 1, "threads purged": 0, "follow_history expired": 0, "follow_history purged": 1}, plan); diff != "" || err != nil {
		t.Errorf("the plan (-want +got): %v\n%s", err, diff)
	}
	if counts, err := run(all, true); !errors.Is(err, jobs.ErrLost) || len(counts) > 0 {
		t.Errorf("with a lease that somebody took: %v, %v", counts, err)
	}
	want := map[string]int64{"threads expired": 1, "threads purged": 0, "threads versions purged": 0,
		"comment_history expired": 0, "comment_history purged": 0, "comment_history versions purged": 0,
		"follow_history expired": 0, "follow_history purged": 1, "follow_history versions purged": 2,
		"child_keys expired": 0, "child_keys purged": 1, "child_keys versions purged": 0}
	counts, err := run(all, false)
	if diff := cmp.Diff(want, counts); diff != "" || err != nil {
		t.Errorf("counts (-want +got): %v\n%s", err, diff)
	}
}

func TestAnArchiveThatTheStreamOutlivesIsReported(t *testing.T) {
	for _, c := range []struct {
		keep, maxAge time.Duration
		ok           bool
	}{{90, 30, true}, {30, 30, true}, {29, 30, false}, {90, 0, false}, {0, 30, true}, {0, 0, true}} {
		cfg := Config{OutboxArchive: outbox.ArchiveConfig{Keep: c.keep}}
		if err := cfg.Outlives(c.maxAge); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestATimeBelowAnHourIsRefused(t *testing.T) {
	for _, cfg := range []RetentionConfig{{Every: time.Second}, {Every: time.Hour, Threads: time.Minute}, {Every: time.Hour, CommentHistory: -time.Hour}, {Every: time.Hour, FollowHistory: time.Second}, {Every: time.Hour, CommentKeys: time.Second}} {
		if cfg.Validate() == nil {
			t.Errorf("%+v was accepted", cfg)
		}
	}
}
