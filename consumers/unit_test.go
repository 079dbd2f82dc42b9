package consumers

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	for i, sql := range []string{progressSQL, openOffsetsSQL, readOffsetsSQL, moveOffsetsSQL, planSQL, parkedSQL, parkSQL, allOffsetsSQL, deadLettersSQL, rebaseSQL, confirmSQL,
		listDeadLettersSQL, getDeadLetterSQL, lockOffsetSQL, leftSQL, parkedEventsSQL, removeSQL, keepSQL, pauseSQL, resumeSQL, pausesSQL,
		notPastSQL, sweepDeadLettersSQL, redactDeadLetterSQL} {
		query, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, nil, sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, fmt.Sprintf("PREPARE s%d AS %s", i, query)); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// TestManyDeadLettersDoNotSlowABatch has the planner know nothing of them, as when they have just come.
func TestManyDeadLettersDoNotSlowABatch(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id, event_type, event_version,
		       headers, payload, error)
		SELECT 'c', g, 'p00', 1, 'follow', CASE WHEN g % 10 = 0 THEN g ELSE 2 END, gen_random_uuid(), 'created', 1, '{}', '', 'x' FROM generate_series(1, 20000) g`); err != nil {
		t.Fatal(err)
	}
	const batch = 2000
	tenants, types, ids := make([]int64, batch), make([]string, batch), make([]int64, batch)
	for i := range batch {
		tenants[i], types[i], ids[i] = 1, event.AggregateFollow, int64(i+1)
	}
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), planSQL, planArgs(time.Minute)); err != nil {
			return err
		}
		rows, _ := tx.Query(t.Context(), "EXPLAIN (ANALYZE, TIMING OFF) "+parkedSQL, pgx.StrictNamedArgs{"consumer": "c", "tenants": tenants, "types": types, "ids": ids})
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if text := strings.Join(plan, "\n"); !strings.Contains(text, "loops=2000") || strings.Contains(text, "rows=20000 loops") || !strings.Contains(text, "actual rows=201 loops=1") {
			t.Errorf("want one probe for each aggregate, and 201 of them found:\n%s", text)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestPartitionsAreCountedFromOneStartWhereThatIsExact(t *testing.T) {
	for name, c := range map[string]struct {
		lagging []behind
		want    map[uint64][]int
	}{
		"nothing is behind":                      {nil, map[uint64][]int{}},
		"one instance applies in stream order":   {[]behind{{1, 90, 101}, {2, 10, 105}, {3, 100, 103}}, map[uint64][]int{101: {1, 3, 2}}},
		"a stuck partition is counted by itself": {[]behind{{1, 90, 101}, {2, 5, 7}, {3, 100, 103}}, map[uint64][]int{7: {2}, 101: {1, 3}}},
	} {
		if diff := cmp.Diff(c.want, groups(c.lagging)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// endless is a stream on which another message always follows at once, with pending more behind it, until ctx ends.
type endless struct {
	ctx context.Context
	jetstream.MessagesContext
	jetstream.Msg
	seq, pending uint64
}

func (e *endless) Next(...jetstream.NextOpt) (jetstream.Msg, error) {
	e.seq++
	return e, e.ctx.Err()
}

func (e *endless) Metadata() (*jetstream.MsgMetadata, error) {
	return &jetstream.MsgMetadata{Sequence: jetstream.SequencePair{Stream: e.seq}, NumPending: e.pending}, nil
}
func (e *endless) Subject() string { return "events.p00.t1.follow.created" }
func (e *endless) Headers() nats.Header {
	return nats.Header{event.HeaderSource: {event.Source}, event.HeaderID: {"8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3c"}, event.HeaderOutboxID: {"1"}}
}
func (e *endless) Data() []byte { return []byte("{}") }

func TestABatchIsFilledOnlyFarBehind(t *testing.T) {
	for pending, bound := range map[uint64]int{0: 1 << 24, 1: 1 << 24, farBehind: 1000} { // the first is out of reach, however late its batch is taken
		s := &session{
			c:         &Consumer{cfg: Config{BatchEvents: bound, BatchBytes: 1 << 40}, deps: Deps{Broker: broker.Config{Prefix: "events"}}},
			positions: map[int]*position{0: {origin: origin{generation: 1}}},
		}
		ctx, cancel := context.WithCancel(t.Context())
		batches, done := make(chan *batch), make(chan error)
		go func() { done <- s.collectAll(ctx, &endless{ctx: ctx, pending: pending}, batches) }()
		b := <-batches
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if full := b.taken == bound; full != (pending == farBehind) {
			t.Errorf("with %d messages still to come a batch has %d", pending, b.taken)
		}
	}
}

func TestThePartitionIsReadFromTheSubject(t *testing.T) {
	for subject, want := range map[string]int{
		"events.p00.t1.follow.created": 0, "events.p31.t1.follow.created": 31, "events.p32.t1.follow.created": -1, "events.p7.t1.follow.created": -1,
		"events.p-1.t1.follow.created": -1, "events.p07": -1, "events.pxx.t1": -1, "other.p07.t1.follow.created": -1,
	} {
		got, ok := partitionOf("events", subject)
		if !ok {
			got = -1
		}
		if got != want {
			t.Errorf("%s: %d, want %d", subject, got, want)
		}
	}
}

func TestTheLagGrowsWhileNobodyLooks(t *testing.T) {
	l := lagClock{stale: 15 * time.Second}
	now := time.Now()
	at := func(d time.Duration) float64 { return l.seconds(now.Add(d)) }
	l.start(now)
	if got := at(10 * time.Second); got != 0 {
		t.Errorf("before the first look: %v", got)
	}
	l.set(now, now.Add(-3*time.Second))
	if got := at(2 * time.Second); got != 5 {
		t.Errorf("2 s after a look that found 3 s: %v", got)
	}
	l.set(now, time.Time{})
	if got := at(14 * time.Second); got != 0 {
		t.Errorf("14 s after a look that found nothing: %v", got)
	}
	if got := at(60 * time.Second); got != 60 {
		t.Errorf("a minute after the last look: %v", got)
	}
}

func TestAnyTextCanBeParked(t *testing.T) {
	if got := clean("a\x00b\xff"); got != "a\uFFFDb\uFFFD" {
		t.Errorf("%q", got)
	}
}
