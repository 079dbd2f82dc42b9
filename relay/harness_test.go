package relay

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// appendPairs commits n transactions of one follow pair each. Each writes the state row with its
// version first, then the outbox row, with the spec's plain SQL. It toggles the pair's status.
func appendPairs(ctx context.Context, pool *pgxpool.Pool, rng *rand.Rand, n int) error {
	for range n {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		err = appendSome(ctx, tx, rng)
		if err == nil && rng.IntN(10) > 0 {
			err = tx.Commit(ctx)
		} else if rerr := tx.Rollback(context.WithoutCancel(ctx)); err == nil {
			err = rerr
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// userID returns an id, which is a number or another text.
func userID(n int) event.ID {
	if n%3 == 0 {
		return event.ID(fmt.Sprintf("auth0|%d", n))
	}
	return event.IDOf(n)
}

func appendSome(ctx context.Context, tx pgx.Tx, rng *rand.Rand) error {
	pairs := map[[2]int]bool{}
	for range 1 + rng.IntN(3) {
		pairs[[2]int{1 + rng.IntN(5), 10 + rng.IntN(20)}] = true
	}
	for from := 1; from <= 5; from++ { // in key order, so that writers do not deadlock
		for to := 10; to < 30; to++ {
			if !pairs[[2]int{from, to}] {
				continue
			}
			var version int64
			if err := tx.QueryRow(ctx, `
				INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, $2)
				ON CONFLICT (tenant_id, follower_id, followee_id) DO UPDATE
				SET version = follows.version + 1, status = CASE follows.status WHEN 'ACTIVE' THEN 'REMOVED' ELSE 'ACTIVE' END
				RETURNING version`, userID(from), userID(to)).Scan(&version); err != nil {
				return err
			}
			if rng.IntN(20) == 0 { // a slow transaction, which others overtake
				if _, err := tx.Exec(ctx, `SELECT pg_sleep(0.02)`); err != nil {
					return err
				}
			}
			if _, err := tx.Exec(ctx, `
				INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				VALUES (1, 'follow', $2::text, 'created', jsonb_build_object('follower_id', $1::text, 'followee_id', $2::text,
				'version', $3::bigint))`,
				userID(from), userID(to), version); err != nil {
				return err
			}
		}
	}
	return nil
}

// streamed is a message as the tests read it.
type streamed struct {
	event.Event
	partition int
	before    uint64 // the sequence of the previous message of any kind
	foreign   bool
	version   int64
}

// readStream returns every message of all partitions, by partition and sequence, without closing
// messages.
func readStream(t *testing.T, ctx context.Context, b *testkit.Broker) (all []streamed) {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	var streams []broker.Stream
	testkit.Eventually(t, "all streams to have leaders", func() (bool, error) { // a broker may have just restarted
		streams, err = broker.Streams(ctx, js, b.Config())
		return err == nil, err
	})
	for _, stream := range streams {
		all = append(all, readPartition(t, ctx, js, stream)...)
	}
	return all
}

// readPartition reads only from the leader: a consumer may be on a broker that has just restarted.
func readPartition(t *testing.T, ctx context.Context, js jetstream.JetStream, stream broker.Stream) (all []streamed) {
	t.Helper()
	var before uint64
	for range stream.Messages { // not to stream.Last: a repair may have deleted that message
		var m *broker.Stored
		testkit.Eventually(t, fmt.Sprintf("the leader of stream %s to have a message behind %d", stream.Name, before),
			func() (_ bool, err error) {
				m, err = broker.Next(ctx, js, stream.Name, before+1)
				return m != nil, err
			})
		s := streamed{partition: stream.Number, before: before, foreign: !event.Ours(m.Header)}
		if !s.foreign {
			var err error
			if s.Event, err = event.Decode(m.Subject, m.Header, m.Data); err != nil {
				t.Fatal(err)
			}
		}
		s.Seq = m.Seq
		before = s.Seq
		if _, rest, ok := strings.Cut(string(m.Data), `"version": `); ok {
			s.version, _ = strconv.ParseInt(strings.TrimRight(rest[:strings.IndexAny(rest, ",}")], " "), 10, 64)
		}
		if !strings.HasSuffix(m.Subject, ".closed") {
			all = append(all, s)
		}
	}
	return all
}

// damage counts broken promises.
type damage struct {
	Rows, Messages int // committed, and on the stream

	Missing    int // rows without a message
	Duplicates int // further messages of a row
	Unknown    int // messages without a row
	Inversions int // pairs whose version does not rise by exactly one
	Gaps       int // missing sequences in a stream
	Unmarked   int // rows on the stream that are not marked with their sequence
	FalseMarks int // marked rows without a message
	Pending    int // unmarked rows
	BelowFloor int // rows that a relay found below a floor
}

// any reports whether a promise is broken.
func (d damage) any() bool {
	d.Rows, d.Messages = 0, 0
	return d != damage{}
}

// checkStream fails unless every committed row is on the stream exactly once and marked with its
// sequence. The versions of each pair and the sequences of each stream must rise by exactly one.
func checkStream(t *testing.T, ctx context.Context, pool *pgxpool.Pool, b *testkit.Broker) {
	t.Helper()
	if d := inspect(t, ctx, pool, b); d.any() {
		t.Errorf("the stream differs from the committed rows: %+v", d)
	}
}

// inspect compares the stream with the outbox.
func inspect(t *testing.T, ctx context.Context, pool *pgxpool.Pool, b *testkit.Broker) (d damage) {
	t.Helper()
	type row struct {
		ID        int64
		EventID   string
		Pair      string
		Version   int64
		StreamSeq *int64
		Partition *int
		Pending   bool
	}
	rows, _ := pool.Query(ctx, `
		SELECT id, event_id::text, aggregate_id || '<-' || coalesce(payload ->> 'follower_id', '?'),
		coalesce((payload ->> 'version')::bigint, 0), stream_seq, partition,
		       processed_at IS NULL
		  FROM outbox_messages ORDER BY id`)
	committed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		t.Fatal(err)
	}
	want := make(map[string]row, len(committed))
	for _, r := range committed {
		want[r.EventID] = r
	}
	versions, seen := map[string]int64{}, map[string]bool{}
	messages := readStream(t, ctx, b)
	for _, m := range messages {
		if m.Seq != m.before+1 {
			d.Gaps++
		}
		if m.foreign {
			continue
		}
		r, ok := want[m.ID]
		if !ok {
			d.Unknown++
			continue
		}
		if seen[m.ID] {
			d.Duplicates++
			continue
		}
		seen[m.ID] = true
		if r.StreamSeq == nil || uint64(*r.StreamSeq) != m.Seq || r.Partition == nil || *r.Partition != m.partition {
			d.Unmarked++
		}
		if r.Version != versions[r.Pair]+1 {
			d.Inversions++
		}
		versions[r.Pair] = r.Version
	}
	for _, r := range committed {
		if r.Pending {
			d.Pending++
		} else if !seen[r.EventID] {
			d.FalseMarks++
		}
	}
	d.Rows, d.Messages, d.Missing = len(want), len(messages), len(want)-len(seen)
	return d
}

// awaitDrained waits until no row is pending.
func awaitDrained(t *testing.T, ctx context.Context, pool *pgxpool.Pool, within time.Duration) {
	t.Helper()
	testkit.Eventually(t, "every row to be published", func() (bool, error) {
		var pending int
		if err := pool.QueryRow(ctx, `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending); err != nil {
			return false, nil // the server may be restarting: retry
		}
		return pending == 0, nil
	})
}

// start runs a relay. The returned function stops it and waits for its end.
func start(t *testing.T, r *Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := r.Run(ctx); err != nil {
			t.Errorf("relay: %v", err)
		}
	})
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			wg.Wait()
			if n := testutil.ToFloat64(r.metrics.belowFloor); n > 0 {
				t.Errorf("the relay found %v rows below a floor", n)
			}
		})
	}
	t.Cleanup(stop)
	return stop
}

func seeded(t *testing.T) *rand.Rand {
	seed, _ := testkit.Seed(t)
	return rand.New(rand.NewPCG(seed, seed))
}

func insertRow(t *testing.T, pool *pgxpool.Pool, aggregate int64, eventType string, extra ...string) (id int64) {
	t.Helper()
	payload := "{}"
	if len(extra) > 0 {
		payload = extra[0]
	}
	if err := pool.QueryRow(t.Context(), `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (1, 'post', $1, $2, $3::jsonb)
		RETURNING id`,
		event.IDOf(aggregate), eventType, payload).Scan(&id); err != nil {
		t.Fatal(fmt.Errorf("insert: %w", err))
	}
	return id
}
