package jobs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func at(text string) time.Time {
	t, err := time.Parse("2006-01-02 15:04:05", text)
	if err != nil {
		panic(err)
	}
	return t
}

func TestDue(t *testing.T) {
	hourly := Job{Every: time.Hour}
	nightly := Job{Every: 20 * time.Hour, Window: Window{From: 23 * time.Hour, To: 4 * time.Hour}}
	for _, c := range []struct {
		name string
		job  Job
		last LastRun
		now  string
		want bool
	}{
		{"one that never ran", hourly, LastRun{}, "2026-03-01 12:00:00", true},
		{"one that runs only by command", Job{}, LastRun{}, "2026-03-01 12:00:00", false},
		{"within the interval", hourly, LastRun{SucceededAt: at("2026-03-01 11:30:00")}, "2026-03-01 12:29:59", false},
		{"after the interval", hourly, LastRun{SucceededAt: at("2026-03-01 11:30:00")}, "2026-03-01 12:30:00", true},
		{"interrupted since", hourly, LastRun{SucceededAt: at("2026-03-01 10:00:00"), StartedAt: at("2026-03-01 11:00:00")},
			"2026-03-01 11:00:10", true},
		{"just failed", hourly, LastRun{FailedAt: at("2026-03-01 12:00:00")}, "2026-03-01 12:00:59", false},
		{"failed a while ago", hourly, LastRun{SucceededAt: at("2026-03-01 11:58:00"), FailedAt: at("2026-03-01 12:00:00")},
			"2026-03-01 12:01:00", true},
		{"failed before it succeeded", hourly, LastRun{SucceededAt: at("2026-03-01 12:00:00"), FailedAt: at("2026-03-01 11:00:00")},
			"2026-03-01 12:30:00", false},
		{"succeeded by a clock that was ahead", hourly, LastRun{SucceededAt: at("2027-03-01 12:00:00")}, "2026-03-01 12:00:00", true},
		{"succeeded a moment ahead", hourly, LastRun{SucceededAt: at("2026-03-01 12:00:03")}, "2026-03-01 12:00:00", false},
		{"succeeded after it failed by a clock that was ahead", hourly,
			LastRun{FailedAt: at("2027-03-01 12:00:00"), SucceededAt: at("2026-03-01 11:30:00")}, "2026-03-01 12:00:00", false},
		{"failed by a clock that was ahead", hourly, LastRun{FailedAt: at("2027-03-01 12:00:00")}, "2026-03-01 12:00:00", true},
		{"before its window", nightly, LastRun{}, "2026-03-01 22:59:59", false},
		{"in its window", nightly, LastRun{}, "2026-03-01 23:00:00", true},
		{"in its window, past midnight", nightly, LastRun{SucceededAt: at("2026-03-01 01:00:00")}, "2026-03-02 03:59:59", true},
		{"after its window", nightly, LastRun{}, "2026-03-02 04:00:00", false},
		{"in its window, done this night", nightly, LastRun{SucceededAt: at("2026-03-01 23:10:00")}, "2026-03-02 01:00:00", false},
	} {
		if got := c.job.due(c.last, at(c.now)); got != c.want {
			t.Errorf("%s: due is %v", c.name, got)
		}
	}
}

func TestWindow(t *testing.T) {
	for _, c := range []struct {
		text, now string
		want      time.Duration
	}{
		{"", "2026-03-01 12:00:00", 1<<63 - 1},
		{"01:00-05:30", "2026-03-01 00:59:59", 0},
		{"01:00-05:30", "2026-03-01 01:00:00", 4*time.Hour + 30*time.Minute},
		{"01:00-05:30", "2026-03-01 05:30:00", 0},
		{"22:00-02:00", "2026-03-01 23:00:00", 3 * time.Hour},
		{"22:00-02:00", "2026-03-01 01:00:00", time.Hour},
		{"22:00-02:00", "2026-03-01 02:00:00", 0},
		{"00:00-24:00", "2026-03-01 23:00:00", time.Hour},
		{"12:00-24:00", "2026-03-01 11:00:00", 0},
	} {
		var w Window
		if err := w.UnmarshalText([]byte(c.text)); err != nil {
			t.Errorf("%q: %v", c.text, err)
		} else if got := w.left(at(c.now)); got != c.want || w.String() != c.text {
			t.Errorf("%q at %s: %s left, written %q, want %s", c.text, c.now, got, w, c.want)
		}
	}
	for _, text := range []string{"1-2", "01:00", "01:00-25:00", "24:00-01:00", "01:60-02:00", "01:00-01:00",
		"01:00-05:30 ", "-1:00-05:30"} {
		if err := new(Window).UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is taken for a window", text)
		}
	}
}

// holdByHand is the lease of an owner that froze just after the last renewal: no process renews it.
func holdByHand(t *testing.T, pool *pgxpool.Pool, owner string) *Hold {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `INSERT INTO leases (kind, partition, owner, epoch, expires_at)
		VALUES ('jobs', 0, $1, 7, now() - interval '1 s')`, owner); err != nil {
		t.Fatal(err)
	}
	return &Hold{pool: pool, kind: Kind, owner: owner, epoch: 7}
}

const sliceSQL = `INSERT INTO job_runs (job, owner, started_at) VALUES ($1, '', now())`

func TestAHolderThatThawsCommitsNothingOnceAnotherHasTheLease(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := t.Context()
	frozen := holdByHand(t, pool, "frozen")

	// The lease has expired in the middle of a transaction. No process takes it before the
	// transaction ends.
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	if err := frozen.Fence(ctx, tx); err != nil {
		t.Fatal(err)
	}
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SET LOCAL lock_timeout = 300; UPDATE leases SET expires_at = now() - interval '1 s' WHERE kind = 'jobs'`)
		return err
	}); err != nil {
		t.Errorf("renewing waits for the slice: %v", err)
	}
	early, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	err = withLease(early, pool, Kind, "successor", leaseTTL, testkit.Logger(t), func(context.Context, *Hold) error {
		t.Error("another owner took the lease in the middle of a slice")
		return nil
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if _, err := tx.Exec(ctx, sliceSQL, "in time"); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}

	err = withLease(ctx, pool, Kind, "successor", leaseTTL, testkit.Logger(t), func(ctx context.Context, h *Hold) error {
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if err := frozen.Fence(ctx, tx); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, sliceSQL, "late")
			return err
		})
		if !errors.Is(err, ErrLost) {
			t.Errorf("the slice of a holder that thawed: %v, want ErrLost", err)
		}
		_, err = h.Run(ctx, Job{Name: "successor", Run: func(context.Context, *Hold) error { return nil }})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	runs, _, err := LastRuns(ctx, pool)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, r := range runs {
		names = append(names, r.Job)
	}
	if diff := gocmp.Diff([]string{"in time", "successor"}, names); diff != "" {
		t.Errorf("slices committed (-want +got):\n%s", diff)
	}
}

func TestInAnotherDatabaseALaterHolderShutsTheEarlierOut(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, c := range []struct {
		epoch int64
		want  error
	}{{7, nil}, {7, nil}, {8, nil}, {7, ErrLost}, {8, nil}} {
		err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			return (&Hold{kind: Kind, epoch: c.epoch}).FenceElsewhere(t.Context(), tx)
		})
		if !errors.Is(err, c.want) {
			t.Errorf("epoch %d: %v, want %v", c.epoch, err, c.want)
		}
	}
}

func TestAJobEndsWhenItsLeaseIsTaken(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	err := withLease(t.Context(), pool, Kind, "a", 500*time.Millisecond, testkit.Logger(t), func(ctx context.Context, h *Hold) error {
		_, err := h.Run(ctx, Job{Name: "long", Run: func(ctx context.Context, _ *Hold) error {
			if _, err := pool.Exec(ctx, `UPDATE leases SET owner = 'other', epoch = epoch + 1, expires_at = now() + interval '1 min'
				WHERE kind = 'jobs'`); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(30 * time.Second):
				return errors.New("nobody told the job")
			}
		}})
		return err
	})
	if !errors.Is(err, ErrLost) {
		t.Errorf("the job ended with %v, want ErrLost", err)
	}
}

func newRunner(t *testing.T, pool *pgxpool.Pool, jobs ...Job) *Runner {
	t.Helper()
	r, err := New(pool, jobs, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestOfTwoRunnersOneRunsWhatIsDue(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ran := make(chan string, 10)
	runner := func(name string) *Runner {
		return newRunner(t, pool, Job{Name: "work", Every: time.Hour, Run: func(context.Context, *Hold) error {
			ran <- name
			return nil
		}})
	}
	a, b := runner("a"), runner("b")
	g, ctx := errgroup.WithContext(t.Context())
	for _, r := range []*Runner{a, b} {
		g.Go(func() error { return r.runOnce(ctx, r.lanes[0]) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if len(ran) != 1 {
		t.Errorf("the job ran %d times, want once", len(ran))
	}
	if _, err := pool.Exec(t.Context(), `UPDATE job_runs SET succeeded_at = succeeded_at - interval '1 h'`); err != nil {
		t.Fatal(err)
	}
	if err := a.runOnce(t.Context(), a.lanes[0]); err != nil {
		t.Fatal(err)
	}
	if len(ran) != 2 {
		t.Errorf("an hour later the job has run %d times, want twice", len(ran))
	}
}

func TestWhatCameOfARunIsKept(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	failing := newRunner(t, pool,
		Job{Name: "bad", Every: time.Hour, Run: func(_ context.Context, h *Hold) error {
			h.Count("rows", 2)
			return errors.New("no luck")
		}},
		Job{Name: "good", Every: time.Hour, Run: func(_ context.Context, h *Hold) error {
			h.Count("rows", 2)
			h.Count("rows", 3)
			return nil
		}},
		Job{Name: "never", Run: func(context.Context, *Hold) error { t.Error("a job without an interval ran"); return nil }})
	if err := failing.runOnce(t.Context(), failing.lanes[0]); err == nil {
		t.Error("runOnce returned no error for a failed job")
	}
	runs, now, err := LastRuns(t.Context(), pool)
	if err != nil || len(runs) != 2 {
		t.Fatalf("job_runs has %v, %v", runs, err)
	}
	bad, good := runs[0], runs[1]
	if bad.LastError != "job bad: no luck" || !bad.SucceededAt.IsZero() || bad.FailedAt.Before(bad.StartedAt) || bad.Counts["rows"] != 2 {
		t.Errorf("job_runs has %+v of the failed run", bad)
	}
	if good.LastError != "" || !good.FailedAt.IsZero() || good.SucceededAt.Before(good.StartedAt) || good.SucceededAt.After(now) ||
		good.Counts["rows"] != 5 {
		t.Errorf("job_runs has %+v of the run that succeeded", good)
	}
}

func TestTheEndOfItsWindowCutsAJobShortAndItIsDueInTheNext(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	job := Job{Name: "nightly", Every: time.Hour, Run: func(ctx context.Context, _ *Hold) error { <-ctx.Done(); return ctx.Err() }}
	r := newRunner(t, pool, job)
	for _, left := range []time.Duration{0, 500 * time.Millisecond} { // the end of the first comes before the start is recorded
		err := withLease(t.Context(), pool, Kind, "a", leaseTTL, testkit.Logger(t), func(ctx context.Context, h *Hold) error {
			return r.run(ctx, h, job, left)
		})
		if err != nil {
			t.Errorf("with %s left: %v", left, err)
		}
		if _, due, err := r.isDue(t.Context(), job); err != nil || !due {
			t.Errorf("with %s left: due is %v, %v", left, due, err)
		}
	}
}

// TestARunThatHasHadItsTimeLeavesTheOthersTheirTurnAndGoesOnAfterThem runs an endless job and a
// short one in the same lane.
func TestARunThatHasHadItsTimeLeavesTheOthersTheirTurnAndGoesOnAfterThem(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	var did []string
	endless := true
	r := newRunner(t, pool,
		Job{Name: "giant", Every: time.Hour, MaxRun: 20 * time.Millisecond, Run: func(ctx context.Context, h *Hold) error {
			if err := h.Part(ctx, "first", func() error { did = append(did, "giant first"); return nil }); err != nil {
				return err
			}
			return h.Part(ctx, "second", func() error {
				did = append(did, "giant second")
				for endless {
					if err := h.Continue(); err != nil {
						return errors.Join(nil, fmt.Errorf("a slice: %w", err))
					}
				}
				return nil
			})
		}},
		Job{Name: "short", Every: time.Hour, Run: func(context.Context, *Hold) error { did = append(did, "short"); return nil }})
	for range 3 {
		if err := r.runOnce(t.Context(), r.lanes[0]); err != nil {
			t.Fatal(err)
		}
		endless = len(did) < 4
	}
	if diff := gocmp.Diff([]string{"giant first", "giant second", "short", "giant second", "giant second"}, did); diff != "" {
		t.Errorf("what ran (-want +got):\n%s", diff)
	}
	if err := r.runOnce(t.Context(), r.lanes[0]); err != nil || len(did) != 5 {
		t.Errorf("when both have ended: %v, %q", err, did)
	}
	other := errors.New("no luck")
	if !onlyTimeUp(errors.Join(ErrTimeUp, fmt.Errorf("x: %w", ErrTimeUp))) || onlyTimeUp(errors.Join(ErrTimeUp, other)) || onlyTimeUp(nil) {
		t.Error("onlyTimeUp hides another error beside the time limit")
	}
}

// journal keeps the lines of a logger. Any goroutine may read them.
type journal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

func TestThoseWhoWaitForAJobSayForWhom(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	var log journal
	g, ctx := errgroup.WithContext(t.Context())
	running, release := make(chan struct{}), make(chan struct{})
	giant := newRunner(t, pool, Job{Name: "giant", Every: time.Hour, Run: func(ctx context.Context, _ *Hold) error {
		close(running)
		select {
		case <-ctx.Done():
		case <-release:
		}
		return nil
	}})
	g.Go(func() error { return giant.runOnce(ctx, giant.lanes[0]) })
	<-running
	ran := false
	short, err := New(pool, []Job{{Name: "short", Every: time.Hour, Run: func(context.Context, *Hold) error { ran = true; return nil }}},
		slog.New(slog.NewTextHandler(&log, nil)), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	g.Go(func() error { return short.runOnce(ctx, short.lanes[0]) })
	testkit.Eventually(t, "the waiting job is listed", func() (bool, error) {
		all, err := Leases(ctx, pool)
		return err == nil && len(all) == 1 && all[0].Job == "giant" && strings.HasPrefix(all[0].Holder, "job-giant-") &&
			!all[0].Since.IsZero() && len(all[0].Waiting) == 1 && strings.HasPrefix(all[0].Waiting[0], "job-short-"), err
	})
	testkit.Eventually(t, "the log has the wait",
		func() (bool, error) { return strings.Contains(log.String(), "waiter="), nil })
	close(release)
	if err := g.Wait(); err != nil || !ran {
		t.Fatal(err, ran)
	}
	if text := log.String(); !strings.Contains(text, "waiter=job-short-") || !strings.Contains(text, "holder=job-giant-") ||
		!strings.Contains(text, " job=giant ") {
		t.Errorf("the log lacks the waiter, the holder or the job:\n%s", text)
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{
		"epoch": epochSQL, "fence": fenceSQL, "fence elsewhere": fenceElsewhereSQL, "start": startSQL, "part": partSQL, "leases": leasesSQL,
		"end": endSQL, "last runs": lastRunsSQL,
	} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
}
