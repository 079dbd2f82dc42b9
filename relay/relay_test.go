package relay

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
		return
	}
	testkit.Main(m)
}

func testConfig() Config {
	return Config{BatchSize: 500, BatchBytes: 4 << 20, PollInterval: 20 * time.Millisecond, RoundInterval: 2 * time.Millisecond,
		PublishTimeout: 2 * time.Second, CheckInterval: 500 * time.Millisecond, DrainTimeout: 5 * time.Second,
		DatabaseTimeout: 10 * time.Second, Lease: lease.Config{TTL: 10 * time.Second}}
}

// newRelay returns a relay on pool's database, in the relays' role.
func newRelay(t *testing.T, pool *pgxpool.Pool, b *testkit.Broker) *Relay {
	t.Helper()
	pool = (&testkit.DB{URL: pool.Config().ConnString()}).Pool(t, postgres.RoleRelay)
	r, err := New(testConfig(), pool, b.Config(), testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// connected returns a writer of partition 0 with its own session, which runs nothing by itself.
func connected(t *testing.T, r *Relay) *writer {
	t.Helper()
	r.cfg.PublishTimeout = time.Minute // nothing repeats what fails because the machine is busy
	s, err := r.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.nc.Close)
	p, err := outbox.ReadPartition(t.Context(), r.pool, 0)
	if err != nil {
		t.Fatal(err)
	}
	return newWriter(s, p)
}

func TestTwoRelaysPublishEveryCommittedRowOnceAndInOrder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	start(t, newRelay(t, pool, b))
	start(t, newRelay(t, pool, b))
	rng := seeded(t)
	done := make(chan error, 4)
	for range 4 {
		seed := rng.Uint64()
		go func() { done <- appendPairs(t.Context(), pool, newRand(seed), 150) }()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	checkStream(t, t.Context(), pool, b)
}

func TestAPoisonRowHoldsBackItsAggregateAloneAndEndsInTheDLQ(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	var since time.Time // by the database's clock, before the attempt that the test waits for
	clock := func() {
		if err := pool.QueryRow(t.Context(), `SELECT now()`).Scan(&since); err != nil {
			t.Fatal(err)
		}
	}
	clock()
	before := insertRow(t, pool, 7, "created")
	poison := insertRow(t, pool, 7, "not a token")
	behind := insertRow(t, pool, 7, "edited")
	other := insertRow(t, pool, 8, "created")
	r := newRelay(t, pool, b)
	gauges := outbox.NewCollector(pool, testkit.Logger(t))
	start(t, r)

	// The row, wherever it is: in the outbox, or in the DLQ.
	row := func() (attempts, dead int, due time.Time) {
		if err := pool.QueryRow(t.Context(), `
			SELECT attempts, 0, available_at FROM outbox_messages WHERE id = $1 UNION ALL
			SELECT attempts, 1, available_at FROM outbox_messages_dlq WHERE id = $1`, poison).Scan(&attempts, &dead, &due); err != nil {
			t.Fatal(err)
		}
		return attempts, dead, due
	}
	testkit.Eventually(t, "the first attempt to fail and the others to be published", func() (bool, error) {
		var pending int
		err := pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending)
		attempts, _, _ := row()
		return pending == 2 && attempts == 1, err
	})
	var curve time.Duration
	for n := 1; n <= outbox.MaxAttempts+1; n++ {
		testkit.Eventually(t, "the next attempt, and its metrics", func() (bool, error) {
			attempts, _, _ := row()
			return attempts == n && testutil.ToFloat64(r.metrics.failures.WithLabelValues(otherEvents)) == float64(n), nil
		})
		_, dead, due := row()
		want := map[string]float64{"tidings_outbox_max_attempts": float64(n), "tidings_outbox_dlq_messages": float64(dead)}
		got := gather(t, gauges)
		for name := range want {
			if got[name] != want[name] {
				t.Errorf("after attempt %d, %s is %v: want %v", n, name, got[name], want[name])
			}
		}
		if n > outbox.MaxAttempts {
			if dead != 1 {
				t.Error("the row is not in the DLQ after its last attempt")
			}
			break
		}
		pause := time.Duration(min(n, 8)) * 30 * time.Second
		curve += pause
		var now time.Time
		if err := pool.QueryRow(t.Context(), `SELECT now()`).Scan(&now); err != nil {
			t.Fatal(err)
		}
		if dead != 0 || due.Before(since.Add(pause)) || due.After(now.Add(pause)) {
			t.Errorf("after attempt %d the row is due at %v, dead: %d; want %v after a moment between %v and %v",
				n, due, dead, pause, since, now)
		}
		clock()
		// As if the pause had passed.
		if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET available_at = inserted_at + interval '1 us' WHERE delayed
			AND processed_at IS NULL`); err != nil {
			t.Fatal(err)
		}
	}
	if curve != 26*time.Minute {
		t.Errorf("the pauses add up to %v: the pages say 26 minutes", curve)
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	var got []int64
	where := map[int64]int{}
	for i, m := range readStream(t, t.Context(), b) {
		got = append(got, m.OutboxID)
		where[m.OutboxID] = i
	}
	if len(got) != 3 || len(where) != 3 || where[before] > where[behind] {
		t.Errorf("published %v: want %d and %d in this order, and %d", got, before, behind, other)
	}
	var dead int
	var lastError string
	if err := pool.QueryRow(t.Context(), `SELECT attempts, last_error FROM outbox_messages_dlq WHERE id = $1`, poison).Scan(&dead,
		&lastError); err != nil {
		t.Fatal(err)
	}
	if dead != outbox.MaxAttempts+1 || !strings.Contains(lastError, "event_type") {
		t.Errorf("the DLQ has it with %d attempts and the error %q", dead, lastError)
	}
}

// gather returns the values of a collector's gauges, which have no labels.
func gather(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(c)
	return testkit.Series(t, reg)
}

func TestAMessageOverTheServersLimitIsPoisonAndNotAnOutage(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	insertRow(t, pool, 7, "created", `"`+strings.Repeat("x", 2<<20)+`"`)
	insertRow(t, pool, 8, "created")
	start(t, newRelay(t, pool, b))
	testkit.Eventually(t, "one row published and one failed", func() (bool, error) {
		var ok bool
		err := pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE processed_at IS NOT NULL) = 1 AND max(attempts) = 1
			FROM outbox_messages`).Scan(&ok)
		return ok, err
	})
}

func TestARowThatIsNotYetDueWaitsAndHoldsBackItsAggregate(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	var delayed int64
	if err := pool.QueryRow(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload,
		available_at)
		VALUES (1, 'post', 7, 'created', '{}', now() + interval '1 hour') RETURNING id`).Scan(&delayed); err != nil {
		t.Fatal(err)
	}
	behind := insertRow(t, pool, 7, "edited")
	other := insertRow(t, pool, 8, "created")
	start(t, newRelay(t, pool, b))
	testkit.Eventually(t, "the other aggregate's row, and the held one parked", func() (bool, error) {
		var ok bool
		err := pool.QueryRow(t.Context(), `SELECT (SELECT processed_at IS NOT NULL FROM outbox_messages WHERE id = $1)
			AND (SELECT delayed FROM outbox_messages WHERE id = $2)`,
			other, behind).Scan(&ok)
		return ok, err
	})
	if stats, err := outbox.ReadStats(t.Context(), pool); err != nil || stats.Pending != 2 || stats.Delayed != 2 || stats.LagSeconds != 0 {
		t.Errorf("stats are %+v, %v: want 2 pending, both delayed, no lag", stats, err)
	}
	if _, err := pool.Exec(t.Context(),
		`UPDATE outbox_messages SET available_at = inserted_at + interval '1 us' WHERE delayed`); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	var ids []int64
	for _, m := range readStream(t, t.Context(), b) {
		ids = append(ids, m.OutboxID)
	}
	if diff := cmp.Diff([]int64{other, delayed, behind}, ids); diff != "" {
		t.Errorf("stream (-want +got):\n%s", diff)
	}
}

func TestABrokerOutageBurnsNoAttempt(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATSProcess(t)
	r := newRelay(t, pool, b)
	start(t, r)
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	b.Kill(t)
	for i := range int64(20) {
		insertRow(t, pool, i, "created")
	}
	testkit.Eventually(t, "the relay to report that it is not ready",
		func() (bool, error) { return r.Ready(t.Context()) != nil, nil })
	b.Restart(t)
	awaitDrained(t, t.Context(), pool, time.Minute)
	var attempts int
	if err := pool.QueryRow(t.Context(), `SELECT max(attempts) FROM outbox_messages`).Scan(&attempts); err != nil || attempts != 0 {
		t.Errorf("%d attempts were counted (%v)", attempts, err)
	}
	if n := len(readStream(t, t.Context(), b)); n != 21 {
		t.Errorf("%d messages on the stream: want 21", n)
	}
}

func TestAStreamThatDoesNotContinueTheDatabaseIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		symptom string
		damage  func(t *testing.T, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config)
	}{
		"the stream is gone": {"is gone", func(t *testing.T, _ *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config) {
			if err := js.DeleteStream(t.Context(), cfg.StreamName(0)); err != nil {
				t.Fatal(err)
			}
		}},
		"the stream was recreated": {"was made at", func(t *testing.T, _ *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config) {
			if err := js.DeleteStream(t.Context(), cfg.StreamName(0)); err != nil {
				t.Fatal(err)
			}
			if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
				t.Fatal(err)
			}
		}},
		"the stream ends before the marks": {"ends at 1, its marks at 1000", func(t *testing.T, pool *pgxpool.Pool, _ jetstream.JetStream,
			_ broker.Config) {
			if _, err := pool.Exec(t.Context(), `UPDATE outbox_partitions SET tail_seq = 1000`); err != nil {
				t.Fatal(err)
			}
		}},
		"the database is new and the stream is not": {"of another database", func(t *testing.T, pool *pgxpool.Pool, _ jetstream.JetStream,
			_ broker.Config) {
			if _, err := pool.Exec(t.Context(), `UPDATE outbox_partitions SET stream = NULL, created = NULL, tail_seq = 0`); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			b := testkit.NATS(t)
			insertRow(t, pool, 1, "created")
			stop := start(t, newRelay(t, pool, b))
			awaitDrained(t, t.Context(), pool, time.Minute)
			stop()
			js, err := jetstream.New(b.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			c.damage(t, pool, js, b.Config())
			later := insertRow(t, pool, 2, "created")
			r := newRelay(t, pool, b)
			start(t, r)
			testkit.Eventually(t, "the relay to name the symptom and the repair", func() (bool, error) {
				err := r.Ready(t.Context())
				return errors.Is(err, ErrStreamRefused) && strings.Contains(err.Error(), c.symptom) &&
					strings.Contains(err.Error(), "tidings repair stream") && testutil.ToFloat64(r.metrics.stuck) == 1, nil
			})
			for _, m := range readStream(t, t.Context(), b) {
				if m.OutboxID == later {
					t.Errorf("row %d is message %d of the refused stream", later, m.Seq)
				}
			}
		})
	}
}

func TestADatabaseThatWentBackInTimeStopsThePartition(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	insertRow(t, pool, 1, "created")
	stop := start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, time.Minute)
	stop()
	// The row was published and marked. Then the database lost both, and assigned the id again.
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_partitions SET tail_seq = 0`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(),
		`UPDATE outbox_messages SET event_id = gen_random_uuid(), processed_at = NULL, stream_seq = NULL`); err != nil {
		t.Fatal(err)
	}
	r := newRelay(t, pool, b)
	if err := connected(t, r).catchUp(t.Context()); !errors.Is(err, ErrStreamRefused) || !errors.Is(err, outbox.ErrRowsMissing) {
		t.Errorf("got %v, want ErrStreamRefused and ErrRowsMissing", err)
	}
	running := newRelay(t, pool, b)
	start(t, running)
	testkit.Eventually(t, "a relay to stop the partition and to name the cause", func() (bool, error) {
		err := running.Ready(t.Context())
		return errors.Is(err, ErrStreamRefused) && errors.Is(err, outbox.ErrRowsMissing) &&
			testutil.ToFloat64(running.metrics.stuck) == 1, nil
	})
	var pending int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending); err != nil ||
		pending != 1 {
		t.Errorf("the row with the reused id was marked published (%v)", err)
	}
	if n := len(readStream(t, t.Context(), b)); n != 1 {
		t.Errorf("%d messages on the stream, want only the one from before", n)
	}
}

func TestAPartitionWhoseLastMessageExpiredGoesOn(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	insertRow(t, pool, 1, "created")
	stop := start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, time.Minute)
	stop()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), b.Config().StreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Expire(t, stream, 0)
	insertRow(t, pool, 1, "edited")
	start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, time.Minute)
	messages := readStream(t, t.Context(), b)
	if len(messages) != 1 || messages[0].Seq != 2 {
		t.Errorf("got %+v: want message 2", messages)
	}
}

func TestOnlyAPlainAckIsASuccess(t *testing.T) {
	for name, c := range map[string]struct {
		answer   string
		count    int
		first    uint64
		conflict bool
	}{
		"one message stored":             {`{"stream":"EVENTS","seq":7}`, 1, 7, false},
		"a batch stored":                 {`{"stream":"EVENTS","seq":9,"batch":"b","count":3}`, 3, 7, false},
		"a batch of another size is not": {`{"stream":"EVENTS","seq":9,"batch":"b","count":2}`, 3, 0, false},
		"a wrong last sequence is not":   {`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 5"}}`, 1, 0, true},
		"on a replicated stream neither": {`{"error":{"code":400,"err_code":10164}}`, 3, 0, true},
		"an incomplete batch is not":     {`{"error":{"code":400,"err_code":10176}}`, 3, 0, false},
		"a full stream is not":           {`{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}}`, 1, 0, false},
		"an answer of another kind":      {`+OK`, 1, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			first, err := readAck([]byte(c.answer), c.count)
			if first != c.first || (err == nil) != (c.first > 0) || errors.Is(err, errConflict) != c.conflict {
				t.Errorf("got %d, %v", first, err)
			}
		})
	}
}

func TestPlainSubscribersGetWhatIsStored(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	nc := b.Connect(t)
	live := make(chan *nats.Msg, 10)
	if _, err := nc.ChanSubscribe(b.Config().LivePrefix+".>", live); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	start(t, newRelay(t, pool, b))
	insertRow(t, pool, 1, "created")
	select {
	case m := <-live:
		if !strings.HasSuffix(m.Subject, ".t1.post.created") || m.Header.Get("Nats-Sequence") != "1" {
			t.Errorf("got %s %v", m.Subject, m.Header)
		}
	case <-time.After(time.Minute):
		t.Error("no message on live.> within a minute")
	}
}

func TestConfigurationOutOfBoundsIsRefused(t *testing.T) {
	err := Config{}.Validate()
	for _, name := range []string{"RELAY_BATCH_SIZE", "RELAY_BATCH_BYTES", "RELAY_POLL_INTERVAL", "RELAY_PUBLISH_TIMEOUT",
		"RELAY_CHECK_INTERVAL", "RELAY_DRAIN_TIMEOUT", "RELAY_DATABASE_TIMEOUT", "LEASE_TTL"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("the error does not name %s: %v", name, err)
		}
	}
	if err := testConfig().Validate(); err != nil {
		t.Error(err)
	}
}

func TestAWakeUpEndsTheRestOfTheWriterOfItsSlot(t *testing.T) {
	pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
	woken := connected(t, newRelay(t, pool, b))
	s := woken.session
	woken = newWriter(s, outbox.Partition{FirstSlot: 0, LastSlot: 15})
	other := newWriter(s, outbox.Partition{Number: 1, FirstSlot: 16, LastSlot: 31})
	for n, w := range []*writer{woken, other} {
		s.writers.Start(t.Context(), n, w, func(ctx context.Context) { <-ctx.Done() })
	}
	if err := s.nc.FlushTimeout(time.Minute); err != nil { // the broker has the subscription
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	w := broker.NewWaker(b.Connect(t), b.Config())
	go func() { _ = w.Run(ctx) }() // returns nil
	for range 3 {
		w.Wake(15)
		if woken.awaitWork(ctx, time.Now(), time.Hour); ctx.Err() != nil {
			t.Fatal("the wake-up of slot 15 does not end the rest of its writer within a minute")
		}
	}
	if len(other.wake) > 0 {
		t.Error("the wake-up of slot 15 wakes the writer of slots 16 to 31")
	}
}

func TestARowThatTheBrokerAloneRefusesIsFoundAndTheOthersGoOn(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	start(t, newRelay(t, pool, b))
	insertRow(t, pool, 1, "created")
	awaitDrained(t, t.Context(), pool, time.Minute)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), b.Config().StreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	limited := stream.CachedInfo().Config
	limited.MaxMsgSize = 10_000 // the session does not notice, because it validates by the limit that it read at its start
	if _, err := js.UpdateStream(t.Context(), limited); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	const sql = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, $1, 1, $2, to_jsonb($3::text))`
	for i, size := range []int{1, 20_000, 2} { // one claim: only the second row is of aggregate post/1
		typ := "post"
		if i != 1 {
			typ = "other"
		}
		if _, err := tx.Exec(t.Context(), sql, typ, "created", strings.Repeat("x", size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "only the large row to be delayed", func() (bool, error) {
		var ok bool
		err := pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE processed_at IS NULL) = 1 AND max(attempts) = 1
			AND max(last_error) LIKE '%limit%' FROM outbox_messages`).Scan(&ok)
		return ok, err
	})
}

func TestMarksThatTheDatabaseLosesAreFoundAgainBeforeAnythingIsPublished(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	b := testkit.NATS(t)
	r := newRelay(t, pool, b)
	var err error
	if r.pool, err = postgres.Open(t.Context(), db.URL, postgres.Config{MaxConns: 8, ConnectTimeout: 30 * time.Second},
		postgres.RoleRelay, "relay under test"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.pool.Close)
	start(t, r)
	for n := range int64(40) {
		insertRow(t, pool, n+1, "created")
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	// As after a crash or a failover: connections end, and the restored database is older.
	err = pgx.BeginFunc(t.Context(), owner, func(tx pgx.Tx) error {
		for _, sql := range []string{
			`LOCK TABLE outbox_messages, outbox_partitions IN ACCESS EXCLUSIVE MODE`,
			`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL`,
			`UPDATE outbox_partitions SET tail_seq = 0`,
		} {
			if _, err := tx.Exec(t.Context(), sql); err != nil {
				return err
			}
		}
		tag, err := tx.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
			AND application_name = 'tidings relay under test'`)
		if tag.RowsAffected() == 0 {
			t.Error("the relay has no connections")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	if got := len(readStream(t, t.Context(), b)); got != 40 {
		t.Errorf("%d messages of 40 rows", got)
	}
}
