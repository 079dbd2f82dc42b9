package consumers

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/work"
)

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	for i, sql := range append(deadTable.Statements(), offsetsSQL, beginSQL, moveSQL, succeedSQL, holdSQL, planSQL,
		lettersSQL, parkedSQL, parkSQL, deadLettersSQL, rebaseSQL, confirmSQL,
		actionsOnEventSQL, positionsSQL, lockOffsetSQL, leftSQL, parkedEventsSQL,
		removeSQL, keepSQL, pauseSQL, resumeSQL, pausesSQL,
		notPastSQL, sweepDeadLettersSQL, redactDeadLetterSQL, countErrorsSQL, blankErrorsSQL, forgetSQL, begunSQL, startSQL) {
		query, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, nil, sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, fmt.Sprintf("PREPARE s%d AS %s", i, query)); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// TestManyDeadLettersDoNotSlowABatch gives the planner no statistics of the dead letters, as if
// they had just been parked.
func TestManyDeadLettersDoNotSlowABatch(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
		       event_id, event_type, event_version, headers, payload, error)
		SELECT 'c', g, 'p00', 1, 'follow', CASE WHEN g % 10 = 0 THEN g ELSE 2 END, gen_random_uuid(), 'created', 1, '{}', '', 'x'
		FROM generate_series(1, 20000) g`); err != nil {
		t.Fatal(err)
	}
	const batch = 2000
	tenants, types, ids := make([]int64, batch), make([]string, batch), make([]event.ID, batch)
	for i := range batch {
		tenants[i], types[i], ids[i] = 1, event.AggregateFollow, event.IDOf(i+1)
	}
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), planSQL, planArgs(time.Minute, batch)); err != nil {
			return err
		}
		rows, _ := tx.Query(t.Context(), "EXPLAIN (ANALYZE, TIMING OFF) "+parkedSQL,
			pgx.StrictNamedArgs{"consumer": "c", "tenants": tenants, "types": types, "ids": ids})
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if text := strings.Join(plan, "\n"); !strings.Contains(text, "loops=2000") || strings.Contains(text, "rows=20000 loops") ||
			!strings.Contains(text, "actual rows=201 loops=1") {
			t.Errorf("want one probe for each aggregate, and 201 of them found:\n%s", text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestAConsumersProcessCollectsLess(t *testing.T) {
	percent := func() int {
		now := debug.SetGCPercent(100)
		debug.SetGCPercent(now)
		return now
	}
	before := percent()
	t.Cleanup(func() { debug.SetGCPercent(before) })
	for set, want := range map[string]int{"": 200, "100": 100} {
		t.Setenv("GOGC", set)
		debug.SetGCPercent(100)
		CollectLess()
		if got := percent(); got != want {
			t.Errorf("with GOGC=%q the percentage is %d, want %d", set, got, want)
		}
	}
}

func TestWhenABatchIsHandedOver(t *testing.T) {
	const bound, burst = 1000, 5
	for name, c := range map[string]struct {
		more     bool
		apart    time.Duration // between deliveries; 0 for a burst
		want     int
		at, busy time.Duration // since the first delivery; how long the database takes no batch
	}{
		"a burst is a batch once it has ended":   {want: burst, at: quiet},
		"a stream that never pauses is not held": {apart: 300 * time.Microsecond, want: 17, at: gather},
		"a batch grows while the database is busy": {apart: 300 * time.Microsecond, busy: 20 * time.Millisecond, want: 67,
			at: 20 * time.Millisecond},
		"far behind a batch is filled": {more: true, apart: 300 * time.Microsecond, want: bound,
			at: 999 * 300 * time.Microsecond},
		"far behind a batch does not wait for long": {more: true, want: burst, at: moreIsComing},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &reader{c: &Consumer{cfg: Config{BatchBytes: 1 << 40}}}
				r.limit.Store(bound)
				s := &session{reader: r}
				deliveries, batches := make(chan delivery), make(chan *batch)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				start := time.Now()
				go s.collect(ctx, 0, deliveries, batches)
				go func() {
					for n := uint64(1); c.apart > 0 || n <= burst; n++ {
						select {
						case <-ctx.Done():
							return
						case deliveries <- delivery{more: c.more, event: event.Event{Seq: n}}:
						}
						if c.apart > 0 {
							work.Sleep(ctx, c.apart)
						}
					}
				}()
				<-time.After(c.busy)
				b := <-batches
				if took := time.Since(start); len(b.deliveries) != c.want || b.to != uint64(c.want) || took != c.at {
					t.Errorf("%d deliveries up to %d after %s; want %d after %s", len(b.deliveries), b.to, took, c.want, c.at)
				}
			})
		})
	}
}

// TestEventsOneByOneWaitForNoOthers takes batches at once. After a batch of one event, the next
// event does not wait. After a larger batch it does.
func TestEventsOneByOneWaitForNoOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &reader{c: &Consumer{cfg: Config{BatchBytes: 1 << 40}}}
		r.limit.Store(100)
		deliveries, batches := make(chan delivery, 10), make(chan *batch)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go (&session{reader: r}).collect(ctx, 0, deliveries, batches)
		seq := uint64(0)
		for i, step := range []struct {
			events int
			wait   time.Duration
		}{{1, quiet}, {1, 0}, {1, 0}, {3, 0}, {1, quiet}, {1, 0}} {
			for range step.events {
				seq++
				deliveries <- delivery{event: event.Event{Seq: seq}}
			}
			start := time.Now()
			synctest.Wait() // the batch has them
			b := <-batches
			if took := time.Since(start); took != step.wait || len(b.deliveries) != step.events {
				t.Errorf("batch %d has %d events after %s; want %d after %s", i, len(b.deliveries), took, step.events, step.wait)
			}
		}
	})
}

func TestABatchThatTookTooLongIsHalvedAndGrowsAgain(t *testing.T) {
	r := &reader{c: &Consumer{cfg: Config{BatchEvents: 100, ApplyTimeout: time.Minute}}}
	r.limit.Store(100)
	for i, step := range []struct {
		took          time.Duration
		events, times int
		want          int64
	}{
		{time.Minute, 60, 1, 30}, {time.Minute, 30, 1, 15}, {time.Minute, 1, 2, 1},
		{16 * time.Second, 1, 100, 1}, {time.Second, 1, 9, 1}, {16 * time.Second, 1, 1, 1}, {time.Second, 1, 10, 2},
		{time.Second, 1, 100, 2},
		{time.Second, 2, 10, 4}, {time.Second, 4, 10, 8}, {time.Second, 8, 10, 16}, {time.Second, 16, 10, 32}, {time.Second, 32, 10, 64},
		{time.Second, 64, 10, 100}, {time.Second, 100, 100, 100},
	} {
		for range step.times {
			r.resize(step.took, step.events)
		}
		if r.limit.Load() != step.want {
			t.Errorf("step %d: %d events at most, want %d", i, r.limit.Load(), step.want)
		}
	}
}

func TestTheLagGrowsWhileNobodyLooks(t *testing.T) {
	l := lagClock{stale: 15 * time.Second}
	now := time.Now()
	at := func(d time.Duration) float64 { return l.seconds(now.Add(d)) }
	l.start(now)
	if got := at(10 * time.Second); got != 0 {
		t.Errorf("before the first measurement: %v", got)
	}
	l.set(now, 3*time.Second, false)
	if got := at(2 * time.Second); got != 5 {
		t.Errorf("2 s after a measured lag of 3 s: %v", got)
	}
	l.set(now, 0, false)
	if got := at(14 * time.Second); got != 0 {
		t.Errorf("14 s after a measured lag of 0: %v", got)
	}
	if got := at(60 * time.Second); got != 60 {
		t.Errorf("a minute after the last measurement: %v", got)
	}
	l.set(now.Add(time.Second), 0, true)
	if got := at(2 * time.Second); got != 2 {
		t.Errorf("1 s after an incomplete measurement, 2 s after a complete one: %v", got)
	}
}

func TestAnyTextCanBeParked(t *testing.T) {
	if got := cleanText("a\x00b\xff"); got != "a\uFFFDb\uFFFD" {
		t.Errorf("%q", got)
	}
}

// TestAConsumerThatIsBehindTakesFullBatches pauses the stream for less than moreIsComing. Such a
// pause splits no batch while the server reports many pending messages.
func TestAConsumerThatIsBehindTakesFullBatches(t *testing.T) {
	const events, bound = 1700, 500
	synctest.Test(t, func(t *testing.T) {
		r := &reader{c: &Consumer{cfg: Config{BatchBytes: 1 << 40}}}
		r.limit.Store(bound)
		deliveries, batches := make(chan delivery), make(chan *batch)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go (&session{reader: r}).collect(ctx, 0, deliveries, batches)
		go func() {
			for n := range events {
				if n%100 == 99 && n < events-farBehind {
					work.Sleep(ctx, moreIsComing-time.Millisecond)
				}
				select {
				case <-ctx.Done():
					return
				case deliveries <- delivery{more: events-n > farBehind, event: event.Event{Seq: uint64(n + 1)}}:
				}
			}
		}()
		for _, want := range []int{bound, bound, bound, events - 3*bound} {
			if b := <-batches; len(b.deliveries) != want {
				t.Errorf("a batch of %d events, want %d", len(b.deliveries), want)
			}
		}
	})
}
