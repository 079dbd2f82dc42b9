package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// free is a lease without competitors.
type free map[string]int64

func (free) Fence(context.Context, pgx.Tx) error { return nil }
func (free) Continue() error                     { return nil }
func (f free) Count(what string, n int64)        { f[what] += n }

const archiveDay = 24 * time.Hour

func newArchive(t *testing.T, pool *pgxpool.Pool) *Archive {
	t.Helper()
	terms := func(context.Context) (Terms, error) { return Terms{After: 7 * archiveDay, Keep: 90 * archiveDay}, nil }
	a, err := NewArchive(ArchiveConfig{Every: time.Hour, RangeRows: 1000, RangeAge: archiveDay}, terms, pool, testkit.Logger(t),
		prometheus.NewRegistry())
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

func prepare(t *testing.T, a *Archive) free {
	t.Helper()
	counts := free{}
	if err := a.Prepare(t.Context(), counts); err != nil {
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

// fill inserts n messages of a tenant that were inserted and published age ago.
func fill(t *testing.T, pool *pgxpool.Pool, tenant int64, n int, age time.Duration) {
	t.Helper()
	exec(t, pool, `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, inserted_at, available_at,
		processed_at, stream_seq)
		SELECT $1, 'post', n, 'created', '{"n": 1}', now() - $3::interval, now() - $3::interval, now() - $3::interval, now() - $3::interval,
		n FROM generate_series(1, $2) n`, tenant, n, age)
}

// pass raises all floors above the last assigned id, as a relay does.
func pass(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = (`+lastIDSQL+`)`)
}

// leave ends the current range, and sets back the times of settled and archived ranges by age.
func leave(t *testing.T, pool *pgxpool.Pool, age time.Duration) {
	t.Helper()
	a := newArchive(t, pool)
	a.cfg.RangeAge = 0
	prepare(t, a) // ends the range
	pass(t, pool)
	prepare(t, a) // creates the next ranges, and records that the old one is settled
	older(t, pool, age)
}

func older(t *testing.T, pool *pgxpool.Pool, age time.Duration) {
	t.Helper()
	exec(t, pool, `UPDATE outbox_ranges SET settled_at = settled_at - $1::interval, archived_at = archived_at - $1::interval`, age)
}

// inOnePlace fails unless exactly want events are in the outbox and the archive together, each in
// one of them.
func inOnePlace(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	const both = `(SELECT event_id, id FROM outbox_messages UNION ALL SELECT event_id, id FROM outbox_messages_archive) x`
	all, distinct := scalar[int](t, pool, `SELECT count(*) FROM `+both), scalar[int](t, pool, `SELECT count(DISTINCT event_id) FROM `+both)
	if all != want || distinct != want {
		t.Errorf("%d rows of %d events, want %d of each", all, distinct, want)
	}
}

func counts(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return scalar[string](t, pool, `SELECT format('outbox %s, of these default %s, archive %s, kept %s', (SELECT count(*)
		FROM outbox_messages),
		(SELECT count(*) FROM outbox_messages WHERE tableoid = 'outbox_messages_default'::regclass), (SELECT count(*)
		FROM outbox_messages_archive), (SELECT count(*) FROM outbox_messages_kept))`)
}

func TestARangeBecomesTheArchivesAndNoRowIsCopied(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 2000, 10*archiveDay)
	snapshot := func(table string) string {
		return scalar[string](t, pool, `SELECT string_agg(m::text || tableoid::regclass || ctid, E'\n' ORDER BY id) FROM `+table+` m`)
	}
	before := snapshot("outbox_messages")
	a := newArchive(t, pool)
	if got := prepare(t, a); got[CountCut] != 1 || got[CountMade] != 1 {
		t.Errorf("a range that is old enough: %v, want it ended and one more created, so that two are ahead of the current one", got)
	}
	if got := prepare(t, a); len(got) > 0 {
		t.Errorf("a range that has ended, and an empty next one: %v", got)
	}
	fill(t, pool, 1, 5, time.Minute) // in the next range
	if got := archive(t, a); len(got) > 0 {
		t.Errorf("before a floor has passed the range: %v", got)
	}
	pass(t, pool)
	if got := archive(t, a); len(got) > 0 {
		t.Errorf("a range that has just settled: %v", got)
	}
	older(t, pool, 7*archiveDay)
	plan, _, err := a.Plan(t.Context())
	if got := archive(t, a); err != nil || got[CountArchived] != 1 || plan[CountArchived] != 1 {
		t.Errorf("archived %v, planned %v, %v", got, plan, err)
	}
	if diff := cmp.Diff(before, snapshot("outbox_messages_archive")); diff != "" {
		t.Errorf("the rows, their table or their places (-before +archived):\n%s", diff)
	}
	if got, want := counts(t, pool), "outbox 5, of these default 0, archive 2000, kept 0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := archive(t, a); len(got) > 0 {
		t.Errorf("a second run did %v", got)
	}
	all, _, err := Ranges(t.Context(), pool)
	if err != nil || len(all) != 4 || all[0].State != RangeArchived || !all[0].Indexed || all[1].State != RangeOpen ||
		all[0].FirstAt.IsZero() {
		t.Errorf("%+v, %v", all, err)
	}
	if got := prepare(t, a); len(got) > 0 {
		t.Errorf("two ranges are ahead of the current one: %v", got)
	}
}

// PostgreSQL reports that it scans no table when it attaches a range. It adopts the primary key and
// builds no index.
func TestArchivingReadsNoRowOfTheRange(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 100, 10*archiveDay)
	leave(t, pool, 0)
	cfg, err := pgx.ParseConfig(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	var said []string
	cfg.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { said = append(said, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	indexes := func() string {
		return scalar[string](t, pool, `SELECT string_agg(indexrelid::text, ' ' ORDER BY indexrelid) FROM pg_index
			WHERE indrelid = 'outbox_messages_1'::regclass`)
	}
	before := indexes()
	if _, err := conn.Exec(t.Context(), `SET client_min_messages = debug1; SELECT outbox_range_archive(1, 10)`); err != nil {
		t.Fatal(err)
	}
	if want := `partition constraint for table "outbox_messages_1" is implied by existing constraints`; !slices.Contains(said, want) ||
		before != indexes() {
		t.Errorf("PostgreSQL reported %q, want %q; the indexes were %s and are %s", said, want, before, indexes())
	}
}

// A delayed row and the rows parked behind it leave their range under their ids. So the order of
// their aggregate holds.
func TestWhatWaitsPinsNoRangeAndKeepsItsOrder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 100, 10*archiveDay)
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'post', 7, 'first', '{}', now() + interval '1 year')`)
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'post', 7, 'second', '{}')`)
	round := Round{FirstSlot: 0, LastSlot: 31, Limit: 10, Due: true, MaxBytes: 1 << 20, MaxMessage: 1 << 20}
	claim := func() Claimed {
		t.Helper()
		c, err := Exchange(t.Context(), pool, round)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if c := claim(); len(c.Rows) != 0 || len(c.Held) != 1 {
		t.Fatalf("claimed %+v", c)
	} else if err := Park(t.Context(), pool, c.Held); err != nil {
		t.Fatal(err)
	}
	leave(t, pool, 8*archiveDay)
	a := newArchive(t, pool)
	if got := archive(t, a); got[CountArchived] != 1 {
		t.Fatalf("archived %v", got)
	}
	if got, want := counts(t, pool), "outbox 2, of these default 2, archive 100, kept 0"; got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'post', 7, 'third', '{}')`)
	if round.Above = 102; len(claim().Held) != 1 {
		t.Error("the delayed rows do not hold the later ones")
	}
	exec(t, pool, `UPDATE outbox_messages SET available_at = inserted_at + interval '1 ms' WHERE id = 101`)
	if _, err := Unpark(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	c := claim()
	var types []string
	for _, r := range c.Rows {
		types = append(types, r.Type)
	}
	if !slices.Equal(types, []string{"first", "second"}) {
		t.Fatalf("claimed %v when the first row was due", types)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now() - interval '8 days' WHERE id <= 102`)
	if got := archive(t, a); got[CountLate] != 2 {
		t.Errorf("archived %v, want the rows that were published late", got)
	}
	if got, want := counts(t, pool), "outbox 1, of these default 0, archive 102, kept 0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A row that is published after its range was dropped gets its range again.
func TestWhatIsPublishedAfterItsRangeWasDroppedIsArchivedAndDroppedInTurn(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 100, 10*archiveDay)
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'post', 7, 'first', '{}', now() + interval '1 year')`)
	leave(t, pool, 8*archiveDay)
	a := newArchive(t, pool)
	archive(t, a)
	older(t, pool, 91*archiveDay)
	if got := archive(t, a); got[CountDropped] != 1 {
		t.Fatalf("dropped %v", got)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now() - interval '8 days' WHERE id = 101`)
	if got := archive(t, a); got[CountLate] != 1 || counts(t, pool) != "outbox 0, of these default 0, archive 1, kept 0" {
		t.Errorf("archived %v: %s", got, counts(t, pool))
	}
	older(t, pool, 91*archiveDay)
	if got := archive(t, a); got[CountDropped] != 1 || counts(t, pool) != "outbox 0, of these default 0, archive 0, kept 0" {
		t.Errorf("dropped %v: %s", got, counts(t, pool))
	}
}

func TestARangeWithPendingRowsOrTooManyThatWaitStays(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 10, 10*archiveDay)
	leave(t, pool, 8*archiveDay)
	exec(t, pool, `UPDATE outbox_messages SET processed_at = NULL WHERE id = 5`) // as a repair does
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = 4`)
	a := newArchive(t, pool)
	if got := archive(t, a); len(got) > 0 || scalar[bool](t, pool, `SELECT settled_at IS NOT NULL FROM outbox_ranges WHERE from_id = 1`) {
		t.Errorf("archived %v, although a floor was lowered", got)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now() WHERE id = 5`)
	exec(t, pool, `INSERT INTO outbox_messages (id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		SELECT n, gen_random_uuid(), 1, 'post', n, 'later', '{}', now() + interval '1 year' FROM generate_series(1001, $1) n`,
		1001+mostWaiting)
	pass(t, pool)
	prepare(t, a)
	older(t, pool, 8*archiveDay)
	if got := archive(t, a); len(got) > 0 {
		t.Errorf("archived %v, with more delayed rows than may move under the lock", got)
	}
	exec(t, pool, `DELETE FROM outbox_messages WHERE id = 1001`)
	if got := archive(t, a); got[CountArchived] != 1 {
		t.Errorf("archived %v", got)
	}
	inOnePlace(t, pool, 10+mostWaiting)
}

// TestARangeIsSettledOnceEveryFloorHasPassedIt: the floor of a closed partition does not count.
func TestARangeIsSettledOnceEveryFloorHasPassedIt(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	resize(t, pool, 2, "1:0-15<0 2:16-31<0")
	closeAt(t, pool, 0, 0, 1)
	fill(t, pool, 1, 10, 10*archiveDay)
	leave(t, pool, 8*archiveDay)
	a := newArchive(t, pool)
	settled := func() bool {
		t.Helper()
		exec(t, pool, `UPDATE outbox_ranges SET settled_at = NULL`)
		prepare(t, a)
		return scalar[bool](t, pool, `SELECT settled_at IS NOT NULL FROM outbox_ranges WHERE from_id = 1`)
	}
	const move = `SELECT outbox_range_archive(1, 10)`
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = 4 WHERE partition IN (0, 2)`)
	if settled() {
		t.Error("the range is settled, although a floor is below its end")
	}
	if got := scalar[string](t, pool, move); got != "pending" {
		t.Errorf("the range is %s, want pending", got)
	}
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = 1000000000 WHERE partition = 2`)
	if !settled() {
		t.Error("the range is not settled")
	}
	if got := scalar[string](t, pool, move); got != "archived" {
		t.Errorf("the range is %s, want archived", got)
	}
}

// TestAnArchiverCutOffAtAnyStepLeavesEachRowInOnePlace ends the connections at the k-th step, for
// every k. The database sees the same as with SIGKILL.
func TestAnArchiverCutOffAtAnyStepLeavesEachRowInOnePlace(t *testing.T) {
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	total := 0
	for range 3 {
		fill(t, owner, 1, 100, 20*archiveDay)
		exec(t, owner, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
			VALUES (1, 'post', 7, 'later', '{}', now() + interval '1 year')`)
		leave(t, owner, 0)
		total += 101
	}
	older(t, owner, 8*archiveDay)
	kills := 0
	for k := 1; ; k++ {
		pool, err := postgres.Open(t.Context(), db.URL, postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second},
			postgres.RoleSystem, "killed")
		if err != nil {
			t.Fatal(err)
		}
		a := newArchive(t, pool)
		step := 0
		a.at = func(string) {
			if step++; step == 1+k%3 { // also within a transaction; the next attempt gets one step further
				exec(t, owner, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tidings killed'
					AND datname = current_database()`)
			}
		}
		err = a.Run(t.Context(), free{})
		pool.Close()
		inOnePlace(t, owner, total)
		if err == nil && step == 0 {
			break
		}
		if err != nil {
			kills++
		}
		if k > 100 {
			t.Fatal("the run never completes")
		}
	}
	if got, want := counts(t, owner), "outbox 3, of these default 3, archive 300, kept 0"; kills < 4 || got != want {
		t.Errorf("%d kills, %s, want %s", kills, got, want)
	}
	if left := scalar[int](t, owner, `SELECT count(*) FROM outbox_ranges WHERE state = 'ARCHIVED' AND NOT indexed`); left > 0 {
		t.Errorf("%d ranges lack an index", left)
	}
}

func TestTwoArchiversAtOnceUnderAHeldSnapshotMoveEachRangeOnce(t *testing.T) {
	pg := testkit.PostgresProcess(t)
	pool := pg.DB(t).Pool(t, postgres.RoleSystem)
	for range 4 {
		fill(t, pool, 1, 500, 10*archiveDay)
		leave(t, pool, 0)
	}
	older(t, pool, 8*archiveDay)
	held, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Rollback(context.WithoutCancel(t.Context())) }() // read only
	if _, err := held.Exec(t.Context(), `SELECT count(*) FROM follows`); err != nil {
		t.Fatal(err)
	}
	var g errgroup.Group
	did := [2]free{{}, {}}
	for i := range did {
		a := newArchive(t, pool)
		g.Go(func() error { return a.Run(t.Context(), did[i]) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if sum := did[0][CountArchived] + did[1][CountArchived]; sum != 4 {
		t.Errorf("both runs together archived %d ranges: %v", sum, did)
	}
	inOnePlace(t, pool, 2000)
	var seen int
	if err := held.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT event_id FROM outbox_messages UNION ALL SELECT event_id
		FROM outbox_messages_archive) x`).Scan(&seen); err != nil || seen != 2000 {
		t.Errorf("the snapshot sees %d rows, %v", seen, err)
	}
}

// Writers, claims and marks continue while ranges are created, ended, archived and dropped. Each
// event is published once, in order.
func TestWritersAndClaimsGoOnWhileRangesComeAndGo(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	created := time.Unix(1, 0)
	exec(t, pool, `UPDATE outbox_partitions SET stream = 's', created = $1`, created)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var g errgroup.Group
	written := 0
	over := make(chan struct{}) // closed after the commit of the last write
	g.Go(func() error {
		defer close(over)
		for ctx.Err() == nil {
			err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
				return Append(t.Context(), tx, slices.Repeat([]event.Event{newEvent(event.IDOf(written%5), `{}`)}, 3))
			})
			if err != nil {
				return fmt.Errorf("write: %w", err)
			}
			written += 3
		}
		return nil
	})
	published := map[string]bool{}
	g.Go(func() error {
		r := Round{LastSlot: 31, Limit: 500, MaxBytes: 1 << 20, MaxMessage: 1 << 20}
		var sample Horizon
		tail := uint64(0)
		for idle := 0; idle < 5; {
			c, err := Exchange(t.Context(), pool, r)
			if err != nil {
				return fmt.Errorf("claim: %w", err)
			}
			m := Mark{Created: created, OldTail: tail}
			for _, row := range c.Rows {
				if published[row.ID] {
					return fmt.Errorf("event %s was claimed twice", row.ID)
				}
				published[row.ID] = true
				tail++
				m.Rows = append(m.Rows, Published{ID: row.OutboxID, EventID: row.ID, Seq: tail})
			}
			xmin := c.Xmax
			if len(c.Running) > 0 {
				xmin = c.Running[0]
			}
			if sample.XID != 0 && xmin >= sample.XID {
				r.Above = max(r.Above, min(sample.LastID, c.Upto))
			}
			m.NewTail, m.Floor = tail, r.Above
			marked, err := Exchange(t.Context(), pool, Round{LastSlot: 31, Mark: &m})
			if err != nil {
				return fmt.Errorf("mark: %w", err)
			}
			if sample = marked.Sample; len(c.Rows) == 0 {
				select {
				case <-over:
					idle++
				default:
				}
			}
		}
		return nil
	})
	a := newArchive(t, pool)
	a.ask, a.cfg.RangeAge = func(context.Context) (Terms, error) { return Terms{Keep: 90 * archiveDay}, nil }, 0
	a.cfg.RangeRows = 100_000 // more than the writers write while this machine is busy elsewhere
	g.Go(func() error {       // with its own lease
		for ctx.Err() == nil {
			if err := a.Prepare(t.Context(), free{}); err != nil {
				return err
			}
		}
		return nil
	})
	moved := free{}
	for deadline := time.Now().Add(time.Minute); moved[CountArchived] < 6; {
		if err := a.Run(t.Context(), moved); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a minute: %v", moved)
		}
	}
	stop()
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if len(published) != written {
		t.Errorf("%d events written, %d published", written, len(published))
	}
	inOnePlace(t, pool, written)
	if strays := scalar[int](t, pool,
		`SELECT count(*) FROM outbox_messages WHERE tableoid = 'outbox_messages_default'::regclass`); strays > 0 {
		t.Errorf("%d rows have no range", strays)
	}
}

// A writer always finds a range: the default one takes rows until there are ranges again, and
// empties by itself.
func TestTheDefaultRangeCatchesWhatHasNoRangeAndEmptiesByItself(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	exec(t, db.Pool(t, postgres.RoleOwner), `SELECT setval('outbox_messages_id_seq', 150000100)`)
	fill(t, pool, 1, 10, 10*archiveDay)
	stats := func() Stats {
		t.Helper()
		s, err := ReadStats(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := stats(); s.Strays != 10 || s.RangesAhead != 0 {
		t.Errorf("without a range: %+v", s)
	}
	a := newArchive(t, pool)
	if got := prepare(t, a); got[CountMade] != 2 {
		t.Errorf("created %v", got)
	}
	if s := stats(); s.Strays != 0 || s.RangesAhead != 2 {
		t.Errorf("with ranges again: %+v", s)
	}
	appendRows(t, pool, newEvent("1", `{}`)) // below the new ranges
	if got, want := counts(t, pool), "outbox 11, of these default 11, archive 0, kept 0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got := archive(t, a); got[CountLate] != 10 {
		t.Errorf("archived %v", got)
	}
	if got, want := counts(t, pool), "outbox 1, of these default 1, archive 10, kept 0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	inOnePlace(t, pool, 11)
}

// A range may be empty, because its rows were delayed or went to the DLQ. It moves like any other,
// with and without holds.
func TestAnEmptyRangeIsArchivedAndDropped(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'post', 7, 'later', '{}', now() + interval '1 year')`)
	leave(t, pool, 8*archiveDay)
	a := newArchive(t, pool)
	if got := archive(t, a); got[CountArchived] != 1 || counts(t, pool) != "outbox 1, of these default 1, archive 0, kept 0" {
		t.Fatalf("archived %v: %s", got, counts(t, pool))
	}
	if _, err := AddHold(t.Context(), pool, ArchiveHold{TenantID: 2, Reason: "r", CreatedBy: "a"}); err != nil {
		t.Fatal(err)
	}
	older(t, pool, 91*archiveDay)
	if got := archive(t, a); got[CountDropped] != 1 {
		t.Errorf("with a hold of a tenant without rows in the range: %v", got)
	}
}

// The clock was a year ahead for a while. Its times count from the next run on, not from next year.
func TestAClockThatWasAheadPinsNoRange(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a := newArchive(t, pool)
	fill(t, pool, 1, 10, -365*archiveDay)
	if got := prepare(t, a); got[CountCut] != 1 {
		t.Errorf("a range whose first message is in the future: %v, want it ended", got)
	}
	pass(t, pool)
	exec(t, pool, `UPDATE outbox_ranges SET settled_at = now() + interval '1 year' WHERE from_id = 1`)
	prepare(t, a)
	older(t, pool, 8*archiveDay)
	if got := archive(t, a); got[CountArchived] != 1 {
		t.Errorf("a range that settled in the future, a week later: %v", got)
	}
	exec(t, pool, `UPDATE outbox_ranges SET archived_at = now() + interval '1 year' WHERE from_id = 1`)
	archive(t, a)
	older(t, pool, 91*archiveDay)
	if got := archive(t, a); got[CountDropped] != 1 {
		t.Errorf("a range that was archived in the future, 91 days later: %v", got)
	}
}

// A session that reads the outbox for hours keeps ranges from leaving it. The archive still drops
// its expired ranges.
func TestAStepThatFailsHoldsUpNoOther(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	archived(t, pool, 10, time.Now())
	fill(t, pool, 1, 10, 10*archiveDay)
	leave(t, pool, 0)
	older(t, pool, 91*archiveDay)
	exec(t, db.Pool(t, postgres.RoleOwner), `REVOKE EXECUTE ON FUNCTION outbox_range_archive FROM tidings_system`)
	did := free{}
	if err := newArchive(t, pool).Run(t.Context(), did); err == nil || did[CountArchived] != 0 || did[CountDropped] != 1 {
		t.Errorf("did %v, %v; want an error, and the archive's range dropped", did, err)
	}
}

func TestARunWhoseLeaseIsLostMovesNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 100, 10*archiveDay)
	leave(t, pool, 8*archiveDay)
	a := newArchive(t, pool)
	fences := 0
	if err := a.Run(t.Context(), lost{free{}, func() bool { fences++; return fences > 1 }}); !errors.Is(err, errLostHere) {
		t.Errorf("the run ended with %v", err)
	}
	if got, want := counts(t, pool), "outbox 100, of these default 0, archive 0, kept 0"; got != want {
		t.Errorf("%s, want %s", got, want)
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

// archived fills a range with n rows of each of two tenants that occurred on a day, and archives
// it.
func archived(t *testing.T, pool *pgxpool.Pool, n int, at time.Time) {
	t.Helper()
	for tenant := range int64(2) {
		fill(t, pool, tenant+1, n, 10*archiveDay)
	}
	exec(t, pool, `UPDATE outbox_messages SET occurred_at = $1, processed_at = now() - interval '100 days'`, at)
	leave(t, pool, 8*archiveDay)
	if got := archive(t, newArchive(t, pool)); got[CountArchived] != 1 {
		t.Fatalf("archived %v", got)
	}
}

func TestARangePastItsTimeIsDroppedUnlessAHoldKeepsIt(t *testing.T) {
	july := time.Date(2026, 7, 15, 0, 0, 0, 0, time.UTC)
	month := time.Date(2026, 7, 1, 0, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		hold           *ArchiveHold
		want, released string
	}{
		"no hold":                    {nil, "archive 0, kept 0", "archive 0, kept 0"},
		"of everything":              {&ArchiveHold{}, "archive 20, kept 0", "archive 0, kept 0"},
		"of its month":               {&ArchiveHold{From: month, To: month}, "archive 20, kept 0", "archive 0, kept 0"},
		"of another month":           {&ArchiveHold{From: month.AddDate(0, 1, 0)}, "archive 0, kept 0", "archive 0, kept 0"},
		"of a tenant":                {&ArchiveHold{TenantID: 2}, "archive 0, kept 10", "archive 0, kept 0"},
		"of a tenant in the month":   {&ArchiveHold{TenantID: 1, From: month, To: month}, "archive 0, kept 10", "archive 0, kept 0"},
		"of a tenant that has none":  {&ArchiveHold{TenantID: 3}, "archive 0, kept 0", "archive 0, kept 0"},
		"of a tenant, another month": {&ArchiveHold{TenantID: 1, To: month.AddDate(0, -1, 0)}, "archive 0, kept 0", "archive 0, kept 0"},
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			archived(t, pool, 10, july)
			a := newArchive(t, pool)
			var id int64
			if c.hold != nil {
				c.hold.Reason, c.hold.CreatedBy = "r", "a"
				h, err := AddHold(t.Context(), pool, *c.hold)
				if err != nil {
					t.Fatal(err)
				}
				id = h.ID
			}
			older(t, pool, 89*archiveDay)
			if got := archive(t, a); len(got) > 0 {
				t.Errorf("before its time: %v", got)
			}
			older(t, pool, 2*archiveDay)
			for range 2 {
				archive(t, a)
				if got := counts(t, pool); got != "outbox 0, of these default 0, "+c.want {
					t.Errorf("%s, want %s", got, c.want)
				}
			}
			if id != 0 {
				if err := ReleaseHold(t.Context(), pool, id, "a", "test"); err != nil {
					t.Fatal(err)
				}
			}
			plan, _, err := a.Plan(t.Context())
			if kept := fmt.Sprintf("kept %d", plan[CountKeptDropped]); err != nil || !strings.HasSuffix(c.want, kept) {
				t.Errorf("the plan after the release: %s, %v, want those of %s", kept, err, c.want)
			}
			archive(t, a)
			if got := counts(t, pool); got != "outbox 0, of these default 0, "+c.released {
				t.Errorf("after the release: %s, want %s", got, c.released)
			}
		})
	}
}

func TestARangeThatMayNotBeDroppedStays(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	archived(t, pool, 10, time.Now())
	older(t, pool, 91*archiveDay)
	a := newArchive(t, pool)
	asked, may := []int64{}, false
	a.BeforeDrop(func(_ context.Context, r Range) (bool, string, error) {
		asked = append(asked, r.From)
		return may, "the test says so", nil
	})
	if got := archive(t, a); got[CountDropped] != 0 || !slices.Equal(asked, []int64{1}) {
		t.Errorf("dropped %v, checked %v", got, asked)
	}
	may = true
	if got := archive(t, a); got[CountDropped] != 1 {
		t.Errorf("dropped %v", got)
	}
}

func TestArchiveConfig(t *testing.T) {
	ok := ArchiveConfig{RangeRows: 1000, RangeAge: time.Hour}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*ArchiveConfig){
		"every": func(c *ArchiveConfig) { c.Every = -1 }, "rows": func(c *ArchiveConfig) { c.RangeRows = 999 },
		"age": func(c *ArchiveConfig) { c.RangeAge = time.Second },
	} {
		c := ok
		if change(&c); c.Validate() == nil {
			t.Errorf("%s is out of bounds but accepted", name)
		}
	}
}
