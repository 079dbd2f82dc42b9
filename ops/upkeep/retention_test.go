package upkeep

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestTheRetentionJobWorksUnderTheLeaseAndOnlyWhereATimeIsSet(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO threads (tenant_id, object, metadata) VALUES (1, '{"post_id": "5", "version": 1}',
		'{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}');
		INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id) VALUES
		  (1, 'comment', 7, 'old', 'x', '01990000-0000-7000-8000-000000000000'),
		  (1, 'comment', 7, 'new', 'x', 'ffff0000-0000-7000-8000-000000000000');
		INSERT INTO follows (tenant_id, follower_id, followee_id, status, version) VALUES (1, 7, 42, 'REMOVED', 2);
		INSERT INTO follow_history (tenant_id, object, metadata) VALUES
		  (1, '{"follower_id": "7", "followee_id": "42", "version": 1}',
		  '{"version_id": 1, "version_state": "ARCHIVED", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}'),
		  (1, '{"follower_id": "7", "followee_id": "42", "version": 2}',
		  '{"version_id": 2, "version_state": "DELETED", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`); err != nil {
		t.Fatal(err)
	}
	run := func(s Settings, stolen bool) (counts map[string]int64, err error) {
		t.Helper()
		job, err := retention(RetentionConfig{Every: time.Hour},
			Deps{Truth: pool, Projections: pool, Kinds: kinds.Builtin, Registry: prometheus.NewRegistry(),
				Log: slog.New(slog.DiscardHandler)}, fixed(s))
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
	if counts, err := run(Settings{}, false); len(counts) > 0 || err != nil {
		t.Errorf("without a time: %v, %v", counts, err)
	}
	hour := Span(time.Hour)
	all := Settings{ThreadsAfter: hour, CommentHistoryAfter: hour, FollowHistoryAfter: hour, CommentKeysKeep: hour}
	job, err := retention(RetentionConfig{Every: time.Hour},
		Deps{Truth: pool, Projections: pool, Kinds: kinds.Builtin, Registry: prometheus.NewRegistry()},
		fixed(Settings{ThreadsAfter: hour, FollowHistoryAfter: hour}))
	if err != nil {
		t.Fatal(err)
	}
	plan, err := job.Plan(t.Context())
	if diff := cmp.Diff(map[string]int64{"threads expired": 1, "threads purged": 0, "follow_history expired": 0,
		"follow_history purged": 1}, plan.Counts); diff != "" || err != nil {
		t.Errorf("the plan (-want +got): %v\n%s", err, diff)
	}
	if counts, err := run(all, true); !errors.Is(err, jobs.ErrLost) || len(counts) > 0 {
		t.Errorf("with a lease that another session took: %v, %v", counts, err)
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
		if err := (Settings{OutboxArchiveKeep: Span(c.keep)}).KeepsForStreams(c.maxAge); (err == nil) != c.ok {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestSettingsOutOfBoundsAreRefusedAndTheOthersAreKeptWithWhoAndWhy(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if s, last, err := Read(t.Context(), pool); err != nil || s != Default() || last != (Changed{}) || s.Validate() != nil {
		t.Errorf("before the first change: %+v, %+v, %v", s, last, err)
	}
	for name, value := range map[string]string{
		"outbox_archive_after": "1s", "outbox_archive_keep": "1h", "outbox_archive_export_url": "ftp://x", "comment_archive_after": "1m",
		"comment_history_after": "-1h", "follow_history_after": "1s", "threads_after": "1m", "comment_keys_keep": "1 year",
	} {
		i := slices.IndexFunc(All, func(t Setting) bool { return t.Name == name })
		if _, err := Write(t.Context(), pool, "ann", "", func(s *Settings) error { return All[i].Set(s, value) }); err == nil {
			t.Errorf("%s=%s was accepted", name, value)
		}
	}
	for n, t2 := range All {
		value := "2000h0m0s"
		if t2.text != nil {
			value = "file:///tmp/x"
		}
		if _, err := Write(t.Context(), pool, "ann", fmt.Sprint("why ", n),
			func(s *Settings) error { return t2.Set(s, value) }); err != nil {
			t.Error(err)
		}
		s, last, err := Read(t.Context(), pool)
		if err != nil || t2.Of(s) != value || last.By != "ann" || last.Reason != fmt.Sprint("why ", n) || last.At.IsZero() {
			t.Errorf("%s: %+v, %+v, %v", t2.Name, s, last, err)
		}
	}
	var versions int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM archive_settings`).Scan(&versions); err != nil || versions != len(All) {
		t.Errorf("%d versions are kept, want %d: %v", versions, len(All), err)
	}
}

// TestNoJobBeginsASliceOnceItsTimeIsUp gives work to every job that can make others wait. With no
// time left, no job does any work. With enough time, each of them does.
func TestNoJobBeginsASliceOnceItsTimeIsUp(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, sql := range []string{
		`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, inserted_at, available_at,
			processed_at, stream_seq)
		 SELECT 1, 'post', 7, 'created', '{}', at, at, at, at, 1 FROM (SELECT now() - interval '10 days' AS at) x`,
		`SELECT outbox_range_cut(50000001)`,
		`UPDATE outbox_partitions SET floor_id = 50000000`,
		`UPDATE outbox_ranges SET settled_at = now() - interval '10 d' WHERE from_id = 1`,
		`SELECT outbox_range_archive(1, 0)`,
		`UPDATE outbox_ranges SET archived_at = now() - interval '100 d' WHERE from_id = 1`,
		`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body, updated_at)
			VALUES (1, gen_random_uuid(), 1, '00000001', '0000000000000000000001', 1, 'x', now() - interval '1 year')`,
		`INSERT INTO follow_history (tenant_id, object, metadata)
			VALUES (1, '{"follower_id": "7", "followee_id": "42", "version": 2}',
			'{"version_id": 2, "version_state": "DELETED", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	s := Default()
	s.OutboxExportURL, s.FollowHistoryAfter, s.CommentKeysKeep = "file://"+t.TempDir(), Span(time.Hour), Span(time.Hour)
	cfg := Config{OutboxArchive: outbox.ArchiveConfig{Every: time.Hour, RangeRows: 1000, RangeAge: time.Hour},
		CommentArchiveEvery: time.Hour, Retention: RetentionConfig{Every: time.Hour}}
	list, err := Jobs(cfg, Deps{Truth: pool, Projections: pool, Kinds: kinds.Builtin, Registry: prometheus.NewRegistry(),
		Log: testkit.Logger(t)}, fixed(s))
	if err != nil {
		t.Fatal(err)
	}
	if err := jobs.WithLease(t.Context(), pool, "test", func(ctx context.Context, h *jobs.Hold) error {
		for _, j := range list {
			if j.OwnLease { // it makes no other job wait
				continue
			}
			j.MaxRun = time.Nanosecond
			if counts, err := h.Run(ctx, j); !errors.Is(err, jobs.ErrTimeUp) || len(counts) > 0 {
				t.Errorf("%s, without time: %v, %v", j.Name, counts, err)
			}
			j.MaxRun = 0
			// The archive waits for the export.
			if counts, err := h.Run(ctx, j); err != nil || len(counts) == 0 && j.Name != outbox.ArchiveJob {
				t.Errorf("%s, with all its time: %v, %v", j.Name, counts, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
