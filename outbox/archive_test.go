package outbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// free is a lease that nobody else wants.
type free map[string]int64

func (free) Fence(context.Context, pgx.Tx) error { return nil }
func (f free) Count(what string, n int64)        { f[what] += n }

const archiveDay = 24 * time.Hour

func newArchive(t *testing.T, pool *pgxpool.Pool, batch int) *Archive {
	t.Helper()
	a, err := NewArchive(ArchiveConfig{Every: time.Hour, After: 7 * archiveDay, Keep: 90 * archiveDay, Batch: batch, Share: 100}, pool, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func archive(t *testing.T, a *Archive) free {
	t.Helper()
	counts := free{}
	if err := a.Run(t.Context(), counts); err != nil {
		t.Fatal(err)
	}
	return counts
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func scalar[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (v T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// fill adds n messages published age ago, whose months of occurrence are age ago too.
func fill(t *testing.T, pool *pgxpool.Pool, tenant int64, n int, age time.Duration) {
	t.Helper()
	exec(t, pool, `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, inserted_at, available_at, processed_at, stream_seq)
		SELECT $1, 'post', n, 'created', '{"n": 1}', now() - $3::interval, now() - $3::interval, now() - $3::interval, now() - $3::interval, n FROM generate_series(1, $2) n`, tenant, n, age)
}

// inOnePlace fails unless want events are in the outbox and the archive together, each in one of them.
func inOnePlace(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	const both = `(SELECT event_id, id FROM outbox_messages UNION ALL SELECT event_id, id FROM outbox_messages_archive) x`
	all, distinct := scalar[int](t, pool, `SELECT count(*) FROM `+both), scalar[int](t, pool, `SELECT count(DISTINCT event_id) FROM `+both)
	if all != want || distinct != want {
		t.Errorf("%d rows of %d events, want %d of each", all, distinct, want)
	}
}

func TestWhatWasPublishedLongAgoMovesAsItIsAndNothingElseDoes(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	exec(t, pool, `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, inserted_at, available_at, processed_at, stream_seq, trace_id, last_error, attempts)
		SELECT 1, 'post', n, t, '{"n": 1}', now() - occurred::interval, now() - inserted::interval, now() - inserted::interval + delay::interval, now() - processed::interval, n, 'trace', 'e', 1
		  FROM (VALUES (1, 'old',     '10 d',   '10 d', '0', '8 d'),
		               (2, 'pending', '10 d',   '10 d', '0', NULL),
		               (3, 'delayed', '10 d',   '10 d', '90 d', NULL),
		               (4, 'old, of 1999', '9999 d', '10 d', '0', '8 d'),
		               (5, 'old, of the future', '-400 d', '10 d', '0', '8 d'),
		               (6, 'late',    '10 d',   '10 d', '0', '1 d'),
		               (7, 'old',     '40 d',   '9 d',  '0', '8 d'),
		               (8, 'young',   '1 d',    '1 d',  '0', '1 d')) v(n, t, occurred, inserted, delay, processed)`)
	snapshot := func(table string) string {
		return scalar[string](t, pool, `SELECT coalesce(string_agg((to_jsonb(m) - '{behind,delayed,payload_bytes}'::text[])::text, E'\n' ORDER BY id), '') FROM `+table+` m WHERE event_type LIKE 'old%'`)
	}
	before := snapshot("outbox_messages")
	counts := archive(t, newArchive(t, pool, 3))
	if diff := cmp.Diff(before, snapshot("outbox_messages_archive")); diff != "" {
		t.Errorf("archived rows (-before +after):\n%s", diff)
	}
	if got := scalar[string](t, pool, `SELECT string_agg(event_type, ' ' ORDER BY id) FROM outbox_messages`); got != "pending delayed late young" {
		t.Errorf("left: %s", got)
	}
	if counts[CountArchived] != 4 || scalar[int](t, pool, `SELECT count(*) FROM outbox_messages_archive_default`) != 2 {
		t.Errorf("counted %v; want 4 rows archived, those of odd times in the default partition", counts)
	}
	if rows := scalar[int](t, pool, `SELECT sum(rows)::int FROM outbox_archive_months`); rows != 2 {
		t.Errorf("the months count %d rows, want 2", rows)
	}
	inOnePlace(t, pool, 8)
	if again := archive(t, newArchive(t, pool, 3)); len(again) > 0 {
		t.Errorf("a second run did %v", again)
	}
}

// age makes everything older by d, as if that time had passed.
func age(t *testing.T, pool *pgxpool.Pool, d time.Duration) {
	t.Helper()
	exec(t, pool, `UPDATE outbox_messages SET inserted_at = inserted_at - $1::interval, processed_at = processed_at - $1::interval`, d)
	exec(t, pool, `UPDATE outbox_archive_cursor SET swept_at = swept_at - $1::interval`, d)
}

func TestNothingIsLeftBehindForEver(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	const hours, perHour = 24 * 3, 40
	a := newArchive(t, pool, 30)
	a.cfg.After, a.cfg.Keep = 24*time.Hour, 30*archiveDay
	most := int64(0)
	for range hours {
		// Each hour some rows are written; most are published at once, some late, some not within the test.
		exec(t, pool, `
			INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, processed_at)
			SELECT 1, 'post', n, 'created', '{}', CASE WHEN (n * $1::bigint) % 7 > 1 THEN now() END FROM generate_series(1, $2) n`, int64(r.IntN(1000)+1), perHour)
		exec(t, pool, `
			UPDATE outbox_messages SET processed_at = now() WHERE processed_at IS NULL AND (id * $1::bigint) % 53 = 0`, int64(r.IntN(1000)+1))
		age(t, pool, time.Hour)
		archive(t, a)
		most = max(most, scalar[int64](t, pool, `SELECT count(*) FROM outbox_messages WHERE processed_at < now() - interval '50 h'`))
	}
	if most > 0 {
		t.Errorf("up to %d rows stayed for more than a day longer than they should, which is when a sweep meets them", most)
	}
	if scalar[int](t, pool, `SELECT count(*) FROM outbox_messages_archive`) < hours*perHour/3 {
		t.Error("the test archived hardly anything")
	}
	inOnePlace(t, pool, hours*perHour)
}

func TestWhatStaysForLongIsNotWalkedOverAtEveryRun(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 500, 10*archiveDay)
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, inserted_at, available_at)
		SELECT 1, 'post', n, 'created', '{}', now() - interval '10 d', now() + interval '300 d' FROM generate_series(1, 5000) n`)
	fill(t, pool, 1, 500, 10*archiveDay)
	fill(t, pool, 1, 5000, archiveDay)
	a := newArchive(t, pool, 100)
	slices := 0
	a.at = func(step string) {
		if step == "moved" {
			slices++
		}
	}
	if counts := archive(t, a); counts[CountArchived] != 1000 || slices > 65 {
		t.Errorf("the first run did %v in %d slices, want 1000 rows in about 61", counts, slices)
	}
	archive(t, a) // looks again at the range of the first
	slices = 0
	fill(t, pool, 1, 100, 10*archiveDay) // out of its time, and so the sweep's
	archive(t, a)
	if slices > 2 {
		t.Errorf("the third run took %d slices over rows that nothing can be done about", slices)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now() - interval '8 d', stream_seq = 1 WHERE processed_at IS NULL`)
	exec(t, pool, `UPDATE outbox_archive_cursor SET swept_at = now() - interval '25 h'`)
	if counts := archive(t, a); counts[CountArchived] != 5000 {
		t.Errorf("the sweep did %v, want the 5000 rows that were put off once", counts)
	}
}

// The database's clock was ahead for a while: what was written and what was noted then lies in the future.
func TestAClockThatWasAheadStopsNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 10, 10*archiveDay)
	fill(t, pool, 1, 40, -365*archiveDay)
	fill(t, pool, 1, 10, 10*archiveDay)
	exec(t, pool, `UPDATE outbox_archive_cursor SET swept_at = now() + interval '365 d'`)
	a := newArchive(t, pool, 10)
	plan, err := a.Plan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if counts := archive(t, a); counts[CountArchived] != 20 || plan[CountArchived] != 20 {
		t.Errorf("the run did %v and the plan was %v, want the 20 rows on both sides of what is of the future", counts, plan)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now() - interval '8 d', inserted_at = now() - interval '8 d', available_at = now() - interval '8 d'`)
	exec(t, pool, `UPDATE outbox_archive_cursor SET swept_at = now() + interval '300 d', rewalk = front`)
	if counts := archive(t, a); counts[CountArchived] != 40 {
		t.Errorf("a run whose last sweep ended in the future did %v, want the 40 rows that were passed over", counts)
	}
}

// TestAnArchiverKilledAtAnyStepLeavesEachRowInOnePlace ends the connections at the k-th step, for every k: to the database it is
// what SIGKILL is.
func TestAnArchiverKilledAtAnyStepLeavesEachRowInOnePlace(t *testing.T) {
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	fill(t, owner, 1, 100, 100*archiveDay) // for months that are dropped at once
	fill(t, owner, 1, 400, 20*archiveDay)
	exec(t, owner, `UPDATE outbox_messages SET occurred_at = now() + interval '130 d' WHERE id % 10 = 0`) // for the default partition
	const total = 500
	kills := 0
	for k := 1; ; k++ {
		pool, err := postgres.Open(t.Context(), db.URL, postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second}, postgres.RoleSystem, "killed")
		if err != nil {
			t.Fatal(err)
		}
		a := newArchive(t, pool, 50)
		a.cfg.Keep = 0
		step := 0
		a.at = func(name string) {
			if step++; step == 3 { // the next attempt gets a little further
				exec(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tidings killed' AND datname = current_database()`)
			}
		}
		err = a.Run(t.Context(), free{})
		pool.Close()
		inOnePlace(t, owner, total)
		if err == nil && step < 3 {
			break
		}
		if err != nil {
			kills++
		}
		if k > 100 {
			t.Fatal("it never gets done")
		}
	}
	if left := scalar[int](t, owner, `SELECT count(*) FROM outbox_messages`); kills < 5 || left > 0 {
		t.Errorf("%d kills, %d rows left", kills, left)
	}
	if rows, want := scalar[int](t, owner, `SELECT sum(rows)::int FROM outbox_archive_months`), scalar[int](t, owner,
		`SELECT count(*) FROM outbox_messages_archive WHERE tableoid <> 'outbox_messages_archive_default'::regclass`); rows != want {
		t.Errorf("the months count %d rows and hold %d", rows, want)
	}
}

func TestTwoArchiversAtOnceUnderAHeldSnapshotMoveEachRowOnce(t *testing.T) {
	pg := testkit.PostgresProcess(t)
	pool := pg.DB(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 5000, 10*archiveDay)
	held, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Rollback(context.WithoutCancel(t.Context())) }() // it only read
	var seen int
	if err := held.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&seen); err != nil || seen != 5000 {
		t.Fatal(seen, err)
	}
	exec(t, pool, `SELECT outbox_archive_make_month(m::date) FROM unnest($1::date[]) m`, newArchive(t, pool, 100).cfg.wanted(time.Now()))
	var g errgroup.Group
	counts := [2]free{{}, {}}
	for i := range counts {
		a := newArchive(t, pool, 100)
		g.Go(func() error { return a.Run(t.Context(), counts[i]) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if sum := counts[0][CountArchived] + counts[1][CountArchived]; sum != 5000 {
		t.Errorf("both together archived %d rows: %v", sum, counts)
	}
	inOnePlace(t, pool, 5000)
	if err := held.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT event_id FROM outbox_messages UNION ALL SELECT event_id FROM outbox_messages_archive) x`).Scan(&seen); err != nil || seen != 5000 {
		t.Errorf("the snapshot sees %d rows, %v", seen, err)
	}
}

func TestARunWhoseLeaseIsLostMovesNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 100, 10*archiveDay)
	a := newArchive(t, pool, 10)
	archived := 0
	err := a.Run(t.Context(), lost{free{}, func() bool { archived++; return archived > 10 }})
	if !errors.Is(err, errLostHere) {
		t.Errorf("the run ended with %v", err)
	}
	inOnePlace(t, pool, 100)
	if left := scalar[int](t, pool, `SELECT count(*) FROM outbox_messages`); left == 0 {
		t.Error("everything was moved")
	}
}

var errLostHere = errors.New("lost")

type lost struct {
	free
	now func() bool
}

func (l lost) Fence(context.Context, pgx.Tx) error {
	if l.now() {
		return errLostHere
	}
	return nil
}

func TestWantedMonths(t *testing.T) {
	names := func(c ArchiveConfig, now string) string {
		at, err := time.Parse(time.RFC3339, now)
		if err != nil {
			t.Fatal(err)
		}
		all := c.wanted(at)
		return fmt.Sprint(len(all), " ", all[0].Format("2006-01"), " ", all[len(all)-1].Format("2006-01"))
	}
	for _, c := range []struct {
		keep      time.Duration
		now, want string
	}{
		{90 * archiveDay, "2026-03-31T12:00:00Z", "6 2025-12 2026-05"},
		{90 * archiveDay, "2026-03-31T23:30:00-05:00", "6 2026-01 2026-06"}, // which is April in UTC
		{8 * archiveDay, "2026-12-20T00:00:00Z", "3 2026-12 2027-02"},
		{0, "2026-03-31T12:00:00Z", "27 2024-03 2026-05"},
		{9999 * archiveDay, "2026-03-31T12:00:00Z", "27 2024-03 2026-05"},
	} {
		if got := names(ArchiveConfig{Keep: c.keep}, c.now); got != c.want {
			t.Errorf("kept for %s, at %s: %s, want %s", c.keep, c.now, got, c.want)
		}
	}
}

// archived adds n rows to the archive as if they had been moved: occurred at the time, published so long ago.
func archived(t *testing.T, pool *pgxpool.Pool, tenant int64, n int, at time.Time, published time.Duration) {
	t.Helper()
	exec(t, pool, `
		INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at, attempts, event_id, inserted_at, slot)
		SELECT coalesce((SELECT max(id) FROM outbox_messages_archive), 0) + n, $1, 'post', n, 'created', 1, '{}', $3, $3, now() - $4::interval, 0, gen_random_uuid(), $3, 0 FROM generate_series(1, $2) n`,
		tenant, n, at, published)
	exec(t, pool, `UPDATE outbox_archive_months SET rows = rows + $2, last_processed_at = greatest(last_processed_at, now() - $3::interval) WHERE month = date_trunc('month', $1::timestamptz AT TIME ZONE 'UTC')`, at, n, published)
}

func byTenant(t *testing.T, pool *pgxpool.Pool) map[int64]int64 {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT tenant_id, count(*) FROM outbox_messages_archive GROUP BY 1`)
	got := map[int64]int64{}
	var tenant, n int64
	if _, err := pgx.ForEachRow(rows, []any{&tenant, &n}, func() error { got[tenant] = n; return nil }); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestAMonthIsMadeOverRowsOfTheDefaultPartition(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	next := monthOf(time.Now()).AddDate(0, 1, 0)
	archived(t, pool, 1, 30, next, 0)
	archived(t, pool, 1, 30, next.AddDate(0, 1, 0).Add(-time.Microsecond), 0)
	archived(t, pool, 1, 5, next.AddDate(5, 0, 0), 0)
	if counts := archive(t, newArchive(t, pool, 7)); counts[CountMonthsMade] < 6 {
		t.Errorf("did %v", counts)
	}
	if left := scalar[int](t, pool, `SELECT count(*) FROM outbox_messages_archive_default`); left != 5 {
		t.Errorf("%d rows in the default partition, want those 5 of no month", left)
	}
	months, err := Months(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range months {
		if want := map[bool]int64{true: 60}[m.From.Equal(next)]; !m.Default && m.Rows != want || m.Bytes == 0 {
			t.Errorf("month %s has %d rows in %d bytes, want %d", m.Name(), m.Rows, m.Bytes, want)
		}
	}
	if got := scalar[int](t, pool, `SELECT count(*) FROM outbox_messages_archive WHERE occurred_at >= $1 AND occurred_at < $2`, next, next.AddDate(0, 1, 0)); got != 60 {
		t.Errorf("the month shows %d rows", got)
	}
}

func TestMonthsPastTheirTimeGoUnlessHeld(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a := newArchive(t, pool, 7)
	now := time.Now()
	first := monthOf(now.Add(-100*archiveDay)).AddDate(0, -1, 0) // ended more than 90 days ago
	late := first.AddDate(0, -1, 0)
	held := late.AddDate(0, -1, 0)
	for _, m := range []time.Time{first, late, held} {
		exec(t, pool, makeMonthSQL, pgx.StrictNamedArgs{"month": m})
	}
	for tenant := int64(1); tenant <= 3; tenant++ {
		archived(t, pool, tenant, 20, first, 95*archiveDay)
		archived(t, pool, tenant, 20, held, 95*archiveDay)
		archived(t, pool, tenant, 20, late.AddDate(-3, 0, 0), 95*archiveDay) // in the default partition
	}
	archived(t, pool, 1, 20, late, 80*archiveDay) // published later than it occurred, and kept as much longer
	var holds []ArchiveHold
	for _, h := range []ArchiveHold{
		{From: held, To: held, Reason: "case 7", CreatedBy: "ann"},
		{TenantID: 2, Reason: "audit", CreatedBy: "bob"},
	} {
		added, err := AddHold(t.Context(), pool, h)
		if err != nil {
			t.Fatal(err)
		}
		holds = append(holds, added)
	}
	plan, err := a.Plan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	counts := archive(t, a)
	want := free{CountMonthsMade: int64(len(a.cfg.wanted(now))), CountMonthShrunk: 1, CountRowsDropped: 40}
	if diff := cmp.Diff(want, counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	if plan[CountRowsDropped] != 40 || plan[CountMonthsMade] != want[CountMonthsMade] {
		t.Errorf("planned %v", plan)
	}
	if diff := cmp.Diff(map[int64]int64{1: 40, 2: 60, 3: 20}, byTenant(t, pool)); diff != "" {
		t.Errorf("rows by tenant (-want +got):\n%s", diff)
	}
	if again := archive(t, a); len(again) > 0 {
		t.Errorf("a second run did %v", again)
	}

	for _, h := range holds {
		if err := ReleaseHold(t.Context(), pool, h.ID, "ann"); err != nil {
			t.Error(err)
		}
	}
	if err := ReleaseHold(t.Context(), pool, holds[0].ID, "ann"); !errors.Is(err, ErrNoHold) {
		t.Errorf("released twice: %v", err)
	}
	refuse := true
	asked := map[string]bool{}
	a.BeforeDrop(func(_ context.Context, m Month) (bool, string, error) {
		asked[m.Name()] = true
		return !refuse, "it is not exported", nil
	})
	if counts := archive(t, a); len(counts) > 0 {
		t.Errorf("against the word of who was to be asked the run did %v", counts)
	}
	if diff := cmp.Diff(map[string]bool{first.Format("2006-01"): true, held.Format("2006-01"): true, "default": true}, asked); diff != "" {
		t.Errorf("asked about (-want +got):\n%s", diff)
	}
	refuse = false
	if diff := cmp.Diff(free{CountMonthDropped: 2, CountRowsDropped: 20}, archive(t, a)); diff != "" {
		t.Errorf("counts once nothing is held (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[int64]int64{1: 20}, byTenant(t, pool)); diff != "" {
		t.Errorf("rows by tenant at the end (-want +got):\n%s", diff)
	}
}

func TestNobodyWaitsLongForAMonthThatIsDropped(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a := newArchive(t, pool, 100)
	past := monthOf(time.Now().Add(-100*archiveDay)).AddDate(0, -1, 0)
	exec(t, pool, makeMonthSQL, pgx.StrictNamedArgs{"month": past})
	exec(t, pool, `SELECT outbox_archive_make_month(m::date) FROM unnest($1::date[]) m`, a.cfg.wanted(time.Now()))
	reader, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Rollback(context.WithoutCancel(t.Context())) }() // it only read
	if _, err := reader.Exec(t.Context(), `SELECT count(*) FROM outbox_messages_archive`); err != nil {
		t.Fatal(err)
	}
	refused := make(chan struct{}, lockTries)
	a.at = func(step string) {
		if step == "lock refused" {
			refused <- struct{}{}
		}
	}
	var g errgroup.Group
	counts := free{}
	g.Go(func() error { return a.Run(t.Context(), counts) })
	slowest := time.Duration(0)
	for tries := 0; tries < 2; {
		start := time.Now()
		if scalar[int](t, pool, `SELECT count(*) FROM outbox_messages_archive`); time.Since(start) > slowest {
			slowest = time.Since(start)
		}
		select {
		case <-refused:
			tries++
		default:
		}
	}
	if slowest > 10*lockWait {
		t.Errorf("a reader waited for %s behind a drop that waits for at most %s", slowest, lockWait)
	}
	if err := reader.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil || counts[CountMonthDropped] != 1 {
		t.Errorf("the run did %v, %v", counts, err)
	}
}

func TestArchiveConfig(t *testing.T) {
	ok := ArchiveConfig{After: time.Hour, Keep: time.Hour, Batch: 1, Share: 1}
	for name, change := range map[string]func(*ArchiveConfig){
		"ok": func(*ArchiveConfig) {}, "for ever": func(c *ArchiveConfig) { c.Keep = 0 },
	} {
		c := ok
		if change(&c); c.Validate() != nil {
			t.Errorf("%s: %v", name, c.Validate())
		}
	}
	for name, change := range map[string]func(*ArchiveConfig){
		"every": func(c *ArchiveConfig) { c.Every = -1 }, "after": func(c *ArchiveConfig) { c.After = 0 },
		"kept for less than after": func(c *ArchiveConfig) { c.Keep = time.Minute }, "batch": func(c *ArchiveConfig) { c.Batch = 0 }, "share": func(c *ArchiveConfig) { c.Share = 101 },
	} {
		c := ok
		if change(&c); c.Validate() == nil {
			t.Errorf("%s is out of bounds and accepted", name)
		}
	}
}
