package relay

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// caughtUp returns a writer of partition 0 that has caught up. It runs nothing by itself.
func caughtUp(t *testing.T, r *Relay) *writer {
	t.Helper()
	w := connected(t, r)
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w
}

// claims returns what w claims next, beside the rows that it publishes.
func claims(t *testing.T, w *writer, publishing ...outbox.Row) outbox.Claimed {
	t.Helper()
	c, err := w.exchange(t.Context(), publishing, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func outboxIDs(rows []outbox.Row) (ids []int64) {
	for _, r := range rows {
		ids = append(ids, r.OutboxID)
	}
	return ids
}

func mostAttempts(t *testing.T, pool *pgxpool.Pool) (attempts int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT max(attempts) FROM outbox_messages`).Scan(&attempts); err != nil {
		t.Fatal(err)
	}
	return attempts
}

// TestOfTwoWritersOfAPartitionOnePublishes: both have claimed the same rows. The broker refuses the
// second publish, which costs no row an attempt. The second writer's catch-up then finds what the
// first one published.
func TestOfTwoWritersOfAPartitionOnePublishes(t *testing.T) {
	for name, from := range map[string]int{"one by one": singles, "as a batch": batches} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
			first, second := caughtUp(t, newRelay(t, pool, b)), caughtUp(t, newRelay(t, pool, b))
			first.pace.from, second.pace.from = from, from
			for n := range int64(3) {
				insertRow(t, pool, n+1, "created", `{"version": 1}`)
			}
			rows, same := claims(t, first).Rows, claims(t, second).Rows
			if _, err := first.publish(t.Context(), rows); err != nil {
				t.Fatal(err)
			}
			second.refusals = maxRefusals // from here on the relay suspects a row
			if _, err := second.publish(t.Context(), same); !errors.Is(err, errConflict) {
				t.Errorf("the second publish: %v, want errConflict", err)
			}
			if n := mostAttempts(t, pool); n > 0 {
				t.Errorf("the conflict costs a row %d attempts", n)
			}
			if err := second.catchUp(t.Context()); err != nil || second.tail != 3 {
				t.Errorf("the catch-up ends at %d, %v", second.tail, err)
			}
			checkStream(t, t.Context(), pool, b)
		})
	}
}

// TestAWriterClaimsFewRowsAfterFew: after a claim of few rows, a writer claims at most
// pipelineFrom, whatever it expects of payloads. If it finds more, it claims as many as it may.
func TestAWriterClaimsFewRowsAfterFew(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	w := caughtUp(t, newRelay(t, pool, b))
	for i, want := range []struct{ add, rows int }{{2, 2}, {0, 2}, {pipelineFrom, pipelineFrom}, {0, pipelineFrom + 2},
		{0, pipelineFrom + 2}} {
		for range want.add {
			insertRow(t, pool, 1, "created", `{"version": 1}`)
		}
		if n := len(claims(t, w).Rows); n != want.rows {
			t.Errorf("claim %d has %d rows, want %d", i, n, want.rows)
		}
		if w.limit != w.cfg.BatchSize {
			t.Errorf("after claim %d the limit is %d, want %d", i, w.limit, w.cfg.BatchSize)
		}
	}
}

// TestAWriterReadsTheStreamAfterARefusedPublish lets another writer publish the rows that a running
// one has claimed.
func TestAWriterReadsTheStreamAfterARefusedPublish(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	r := newRelay(t, pool, b)
	other, w := caughtUp(t, newRelay(t, pool, b)), connected(t, r)
	insertRow(t, pool, 1, "created", `{"version": 1}`)
	rows := claims(t, other).Rows
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var steps []string
	var once sync.Once
	r.step = func(step string) {
		switch step {
		case "after claim":
			once.Do(func() {
				if _, err := other.publish(t.Context(), rows); err != nil {
					t.Error(err)
				}
			})
		case "catch-up", "refused":
			if steps = append(steps, step); len(steps) == 3 {
				stop()
			}
		}
	}
	if err := w.run(ctx, t.Context()); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]string{"catch-up", "refused", "catch-up"}, steps); diff != "" {
		t.Errorf("steps (-want +got):\n%s", diff)
	}
	checkStream(t, t.Context(), pool, b)
}

// TestAWriterMarksWhatItPublishedBeforeItEnds: it ends while it publishes some rows and claims the
// next ones.
func TestAWriterMarksWhatItPublishedBeforeItEnds(t *testing.T) {
	for name, closes := range map[string]bool{"the relay stops": false, "the partition closes": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
			r := newRelay(t, pool, b)
			r.cfg.BatchSize = pipelineFrom
			w := caughtUp(t, r)
			if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				SELECT 1, 'post', g, 'created', '{"version": 1}' FROM generate_series(1, $1) g`, 6*pipelineFrom); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var once sync.Once
			r.step = func(step string) {
				if step != "after claim" {
					return
				}
				once.Do(func() {
					if !closes {
						stop()
					} else if _, err := outbox.Resize(t.Context(), pool, 2); err != nil {
						t.Error(err)
					}
				})
			}
			if err := w.rounds(ctx, t.Context()); closes != errors.Is(err, errClosed) || !closes && err != nil {
				t.Errorf("the rounds end with %v", err)
			}
			d := inspect(t, t.Context(), pool, b)
			if d.Messages == 0 || d.Messages == d.Rows || d.Pending != d.Rows-d.Messages || d.Unmarked+d.Duplicates+d.FalseMarks > 0 {
				t.Errorf("want some rows published and marked, and the others pending: %+v", d)
			}
			p, err := outbox.ReadPartition(t.Context(), pool, 0)
			if want := uint64(d.Messages); err != nil || p.Closed != closes || closes && p.Final != want+1 || !closes && p.Tail != want {
				t.Errorf("behind %d messages the partition is %+v, %v", d.Messages, p, err)
			}
		})
	}
}

// TestTheMarkOfAWokenWriterWaitsForTheNextWakeUp: then a steady row costs one exchange with the
// database. Without a wake-up for it, the mark waits for markWithin, and it never waits after rows
// that polling has found. The rows are added between two steps of the writer.
func TestTheMarkOfAWokenWriterWaitsForTheNextWakeUp(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	r := newRelay(t, pool, b)
	// a wake-up that is there already comes before the end of such an interval
	r.markWithin, r.cfg.PollInterval, r.cfg.RoundInterval = time.Hour, time.Hour, 100*time.Millisecond
	w := caughtUp(t, r)
	const rows = 6
	exchanges, added, published, done := 0, 1, 0, make(chan struct{})
	insertRow(t, pool, 1, "created")
	add := func() {
		added++
		if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, 'post', $1::int, 'created', '{}')`, added); err != nil {
			t.Error(err)
		}
		w.wake.Notify()
	}
	r.step = func(step string) {
		switch {
		case step == "after mark":
			if exchanges++; published == 1 && added == 1 { // polling found row 1, and this was its mark
				exchanges = 0
				add()
			}
		case step == "after ack":
			if published++; published == rows {
				close(done)
			} else if published > 1 {
				add()
			}
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- w.rounds(ctx, t.Context()) }()
	select {
	case <-done:
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(testkit.Stretched(30 * time.Second)):
		t.Fatal("the rows are not published")
	}
	for start := time.Now(); time.Since(start) < 3*r.cfg.RoundInterval; {
		if d := inspect(t, t.Context(), pool, b); d.Messages != rows || d.Pending != 1 || d.Unmarked != 1 {
			t.Errorf("want %d messages, of which the last waits for its mark: %+v", rows, d)
			break
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got, want := exchanges, rows-1+1; got != want { // one for each row after the first, and one at the end
		t.Errorf("%d rows took %d exchanges with the database, want %d", rows-1, got, want)
	}
	if d := inspect(t, t.Context(), pool, b); d.Pending+d.Unmarked+d.Duplicates+d.FalseMarks > 0 {
		t.Errorf("a writer that stops leaves %+v", d)
	}
}

// TestAMarkWaitsNoLongerThanThePollInterval: in that time a relay finds rows without a wake-up.
func TestAMarkWaitsNoLongerThanThePollInterval(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	r := newRelay(t, pool, b)
	r.markWithin = time.Hour
	w := caughtUp(t, r)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- w.rounds(ctx, t.Context()) }()
	for n := range int64(20) { // some wake-up is quicker than polling
		insertRow(t, pool, n+1, "created")
		w.wake.Notify()
		testkit.Eventually(t, "a row without a further wake-up to be marked", func() (bool, error) {
			stats, err := outbox.ReadStats(t.Context(), pool)
			return stats.Pending == 0, err
		})
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestAWriterClaimsBesideWhatItPublishes: not the same rows again, and only one while the broker
// refuses some row.
func TestAWriterClaimsBesideWhatItPublishes(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	w := caughtUp(t, newRelay(t, pool, b))
	insertRow(t, pool, 1, "created")
	rows := claims(t, w).Rows
	next := []int64{insertRow(t, pool, 2, "created"), insertRow(t, pool, 3, "created")}
	if got := outboxIDs(claims(t, w, rows...).Rows); !slices.Equal(got, next) {
		t.Errorf("beside %v the writer claims %v, want %v", outboxIDs(rows), got, next)
	}
	w.refusals = maxRefusals
	if got := outboxIDs(claims(t, w, rows...).Rows); !slices.Equal(got, next[:1]) {
		t.Errorf("after %d refusals it claims %v, want %v", maxRefusals, got, next[:1])
	}
}

// TestAWriterNoticesAnotherTail: the database has lost the writer's marks, so their rows are
// pending again.
func TestAWriterNoticesAnotherTail(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	w := caughtUp(t, newRelay(t, pool, b))
	insertRow(t, pool, 1, "created", `{"version": 1}`)
	mark, err := w.publish(t.Context(), claims(t, w).Rows)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.exchange(t.Context(), nil, w.published(nil, mark, nil), true); err != nil {
		t.Fatal(err)
	}
	w.nextSample = time.Now().Add(time.Hour) // no mark of this writer finds out
	if _, err := pool.Exec(t.Context(), loseMarksSQL); err != nil {
		t.Fatal(err)
	}
	if c, err := w.exchange(t.Context(), nil, nil, true); !errors.Is(err, errTailMoved) {
		t.Errorf("the writer claims %v, %v: want errTailMoved", outboxIDs(c.Rows), err)
	}
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	checkStream(t, t.Context(), pool, b)
}

// TestARowThatCannotBePublishedKeepsTheNextOfItsAggregate: from the publish and from the floor.
func TestARowThatCannotBePublishedKeepsTheNextOfItsAggregate(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	w := caughtUp(t, newRelay(t, pool, b))
	insertRow(t, pool, 7, "not a token")
	behind, other := insertRow(t, pool, 7, "edited"), insertRow(t, pool, 8, "created")
	c := claims(t, w)
	rows, err := w.publishable(t.Context(), &c)
	if got := outboxIDs(rows); err != nil || !slices.Equal(got, []int64{other}) {
		t.Errorf("%v can be published, %v: want %d", got, err, other)
	}
	if c.Upto != behind-1 {
		t.Errorf("no row is left up to %d, want %d", c.Upto, behind-1)
	}
	if n := mostAttempts(t, pool); n != 1 {
		t.Errorf("%d attempts are counted", n)
	}
}

// TestACatchUpReadsTheEndOfTheStream: what is behind the marks decides.
func TestACatchUpReadsTheEndOfTheStream(t *testing.T) {
	t.Parallel()
	send := func(t *testing.T, w *writer, m *nats.Msg) {
		t.Helper()
		if _, err := w.nc.RequestMsgWithContext(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		do    func(t *testing.T, w *writer)
		want  error
		final uint64 // of the closed partition
	}{
		"a message that no relay wrote": {func(t *testing.T, w *writer) {
			send(t, w, &nats.Msg{Subject: w.broker.Prefix + ".0.x", Data: []byte("hello")})
		}, nil, 0},
		"a closing message that the database forgot": {func(t *testing.T, w *writer) {
			send(t, w, closing(w.broker, 0, 0))
		}, ErrStreamRefused, 0},
		"the messages of another database": {func(t *testing.T, w *writer) {
			send(t, w, &nats.Msg{Subject: w.broker.Prefix + ".0.x", Data: []byte("hello")})
			if _, err := w.pool.Exec(t.Context(), `UPDATE outbox_partitions SET stream = NULL, created = NULL`); err != nil {
				t.Fatal(err)
			}
		}, ErrStreamRefused, 0},
		"the closing message": {func(t *testing.T, w *writer) {
			send(t, w, closing(w.broker, 0, 0))
			if _, err := outbox.Resize(t.Context(), w.pool, 2); err != nil {
				t.Fatal(err)
			}
		}, errClosed, 1},
		"a closing message that another relay has recorded": {func(t *testing.T, w *writer) {
			if _, err := outbox.Resize(t.Context(), w.pool, 2); err != nil {
				t.Fatal(err)
			}
			if done, err := outbox.Close(t.Context(), w.pool, 0, 0, 7); err != nil || !done {
				t.Fatal(done, err)
			}
		}, errClosed, 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
			r := newRelay(t, pool, b)
			w := caughtUp(t, r)
			r.pool = pool // a relay may not resize
			c.do(t, w)
			if err := w.catchUp(t.Context()); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			p, err := outbox.ReadPartition(t.Context(), pool, 0)
			if err != nil || p.Final != c.final || p.Closed != (c.final > 0) {
				t.Errorf("the partition is %+v, %v", p, err)
			}
			if c.want == nil && (w.tail != 1 || p.Tail != 1) {
				t.Errorf("the tail is %d, the stored one %d: want 1", w.tail, p.Tail)
			}
		})
	}
}

// TestAPartitionIsClosedAtItsTail: a relay that marked up to another sequence closes nothing.
func TestAPartitionIsClosedAtItsTail(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	w := caughtUp(t, newRelay(t, pool, b))
	if _, err := outbox.Resize(t.Context(), pool, 2); err != nil {
		t.Fatal(err)
	}
	w.stored = 5
	if err := w.closed(t.Context(), 6); !errors.Is(err, errTailMoved) {
		t.Errorf("got %v, want errTailMoved", err)
	}
}

// TestAnIdleWriterChecksItsStream: against what it left there.
func TestAnIdleWriterChecksItsStream(t *testing.T) {
	t.Parallel()
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	w := caughtUp(t, newRelay(t, pool, b))
	if err := w.check(t.Context()); err != nil {
		t.Error(err)
	}
	m := &nats.Msg{Subject: w.broker.Prefix + ".0.x"}
	if _, err := w.nc.RequestMsgWithContext(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if err := w.check(t.Context()); !errors.Is(err, errTailMoved) {
		t.Errorf("a message more: %v, want errTailMoved", err)
	}
	if err := w.js.DeleteStream(t.Context(), w.p.Stream); err != nil {
		t.Fatal(err)
	}
	if err := w.check(t.Context()); !errors.Is(err, errTailMoved) {
		t.Errorf("without the stream: %v, want errTailMoved", err)
	}
}

func TestAStreamIsRefusedUnlessItContinuesThePartition(t *testing.T) {
	made := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	bound := outbox.Partition{Stream: "EVENTS-0", Created: made, Tail: 5}
	for name, c := range map[string]struct {
		p             outbox.Partition
		stream        broker.Stream
		err           error
		refused, lost bool
	}{
		"it ends at the marks":     {bound, broker.Stream{Created: made, Last: 5}, nil, false, false},
		"it ends behind the marks": {bound, broker.Stream{Created: made, Last: 6}, nil, false, false},
		"neither is known":         {outbox.Partition{}, broker.Stream{}, broker.ErrNoLeader, false, false},
		"it ends before the marks": {bound, broker.Stream{Created: made, Last: 4}, nil, true, true},
		"it was recreated":         {bound, broker.Stream{Created: made.Add(time.Microsecond), Last: 5}, nil, true, true},
		"it is gone":               {bound, broker.Stream{}, jetstream.ErrStreamNotFound, true, true},
		"the database is new":      {outbox.Partition{}, broker.Stream{Created: made, Last: 1}, nil, true, false},
		"another name": {outbox.Partition{Stream: "OTHER-0", Created: made, Tail: 5}, broker.Stream{Created: made, Last: 5}, nil,
			true, false},
		"a repair was interrupted": {outbox.Partition{Stream: "EVENTS-0", Created: time.Unix(0, 0).UTC(), Tail: 5, Closing: true},
			broker.Stream{Created: time.Unix(0, 0).UTC(), Last: 5}, nil, true, false},
		"it is not one for events": {bound, broker.Stream{}, broker.ErrStreamShape, true, false},
		"it has no leader":         {bound, broker.Stream{}, broker.ErrNoLeader, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			lost, err := refuse("EVENTS-0", c.p, c.stream, c.err)
			if errors.Is(err, ErrStreamRefused) != c.refused || lost != c.lost || !c.refused && !errors.Is(err, c.err) {
				t.Errorf("lost: %t, %v", lost, err)
			}
		})
	}
}
