package samples

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, sql := range []string{nextSQL, recordSQL, readSQL} {
		testkit.Prepare(t, pool, sql)
	}
}

// ago inserts a sample of the installation.
func ago(t *testing.T, pool *pgxpool.Pool, d time.Duration, figures map[string]float64) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `INSERT INTO samples (at, source, version, figures)
		VALUES (date_bin('10 s', now() - make_interval(secs => @ago), 'epoch'), '', '1', @figures)`,
		pgx.StrictNamedArgs{"ago": d.Seconds(), "figures": figures}); err != nil {
		t.Fatal(err)
	}
}

func count(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM samples`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestOneOfManyProcessesSamplesAMoment(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := t.Context()
	at, due, err := Next(ctx, pool, Installation)
	if err != nil || !due || at.UnixNano()%int64(Every) != 0 {
		t.Fatalf("the moment is %s, due %t, %v", at, due, err)
	}
	var g sync.WaitGroup
	var first testCounter
	for i := range 8 {
		g.Go(func() {
			is, err := Record(ctx, pool, Sample{at, Installation, "1", map[string]float64{"by": float64(i)}})
			first.add(t, is, err)
		})
	}
	g.Wait()
	if all, err := Read(ctx, pool, at.Add(-Every)); err != nil || len(all) != 1 || first.n != 1 || len(all[0].Figures) != 1 {
		t.Errorf("%+v, %v; %d of eight processes recorded the moment", all, err, first.n)
	}
	if is, err := Record(ctx, pool, Sample{at, "api-1", "1", map[string]float64{Requests: 1}}); !is || err != nil {
		t.Errorf("another source at that moment: %t, %v", is, err)
	}
	// Another process reads nothing at a moment that has its sample.
	read := false
	s := Sampler{Pool: pool, Read: func(context.Context) (map[string]float64, error) { read = true; return nil, nil }}
	if _, err := pool.Exec(ctx, `INSERT INTO samples SELECT date_bin('10 s', now(), 'epoch') + n * interval '10 s', '', '1', '{}'
		FROM generate_series(1, 3) n`); err != nil { // so that the moment may end meanwhile
		t.Fatal(err)
	}
	if err := s.sample(ctx); err != nil || read {
		t.Errorf("a sampled moment is read again: %t, %v", read, err)
	}
}

type testCounter struct {
	mu sync.Mutex
	n  int
}

func (c *testCounter) add(t *testing.T, is bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		t.Error(err)
	}
	if is {
		c.n++
	}
}

// A process that is frozen between its read and its write wakes up later.
func TestAMomentExpires(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	at, _, err := Next(t.Context(), pool, Installation)
	if err != nil {
		t.Fatal(err)
	}
	if is, err := Record(t.Context(), pool, Sample{at.Add(-2 * Every), Installation, "1", nil}); is || err != nil || count(t, pool) != 0 {
		t.Errorf("a sample that is 20 seconds late: %t, %v, %d rows", is, err, count(t, pool))
	}
}

func TestTheTableKeepsADay(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `INSERT INTO samples
		SELECT date_bin('10 s', now(), 'epoch') - n * interval '10 s', '', '1', '{}' FROM generate_series(1, 20000) n`); err != nil {
		t.Fatal(err)
	}
	s := Sampler{Pool: pool, Read: func(context.Context) (map[string]float64, error) { return map[string]float64{}, nil }}
	if err := s.sample(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := count(t, pool); n < 8630 || n > 8641 {
		t.Errorf("%d rows, want those of a day", n)
	}
	day := NewDay(pool)
	if err := day.Refresh(t.Context()); err != nil || day.moments < 8630 {
		t.Errorf("%d moments, %v", day.moments, err)
	}
}

func TestAFailedReadLeavesAGap(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	failed := errors.New("away")
	s := Sampler{Pool: pool, Read: func(context.Context) (map[string]float64, error) { return nil, failed }}
	if err := s.sample(t.Context()); !errors.Is(err, failed) || count(t, pool) != 0 {
		t.Errorf("%v, %d rows", err, count(t, pool))
	}
}

func TestTheAPIWritesItsOwnSamplesAlone(t *testing.T) {
	db := testkit.Postgres(t)
	pool, ctx := db.Pool(t, postgres.RoleAPI), t.Context()
	system := db.Pool(t, postgres.RoleSystem)
	ago(t, system, Kept+time.Minute, map[string]float64{})
	ago(t, system, Kept/2, map[string]float64{Pending: 1})
	s := Sampler{Pool: pool, Source: "api-1", Version: "1", Log: testkit.Logger(t),
		Read: func(context.Context) (map[string]float64, error) { return map[string]float64{Requests: 5}, nil }}
	for range 2 { // the second time at the same moment, unless that ends meanwhile
		if err := s.sample(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, system); n < 2 || n > 3 {
		t.Errorf("%d rows, want the API's and that of the last day", n)
	}
	s.Source = Installation
	if err := s.sample(ctx); !postgres.IsPermission(err) {
		t.Errorf("the API writes a sample of the installation: %v", err)
	}
	for _, sql := range []string{`UPDATE samples SET figures = '{}'`, `SELECT figures FROM samples LIMIT 1 FOR UPDATE`} {
		if _, err := pool.Exec(ctx, sql); !postgres.IsPermission(err) {
			t.Errorf("%s as the API: %v", sql, err)
		}
	}
	if n := count(t, pool); n != 0 {
		t.Errorf("the API sees %d samples", n)
	}
}

func TestADayReadsEachSampleOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	day := NewDay(pool)
	ago(t, pool, 40*time.Second, map[string]float64{Pending: 1})
	ago(t, pool, 30*time.Second, map[string]float64{Pending: 2})
	ago(t, pool, -time.Hour, map[string]float64{Pending: 9}) // of a clock that was ahead
	refresh := func() {
		t.Helper()
		day.read = time.Time{}
		if err := day.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	refresh()
	ago(t, pool, 20*time.Second, map[string]float64{Pending: 3})
	refresh()
	refresh()
	if diff := cmp.Diff([]float64{1, 2, 3}, day.Largest(Pending, day.Window(Every, 3))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
