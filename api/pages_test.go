package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// cached is an API with a page cache that listens to a stream. The test is the relay and the
// consumer.
type cached struct {
	fixture
	js  jetstream.JetStream
	cfg broker.Config
	set *kinds.Set // ownKinds
}

func openCached(t testing.TB, db *testkit.DB, b *testkit.Broker, bytes int64) cached {
	t.Helper()
	f := cached{fixture: fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}, cfg: b.Config(),
		set: testkit.Kinds(t, ownKinds)}
	a := new(applied)
	a.now.Store(f.set)
	own := []projections.Projection{followercounts.New(a.Now), threadcache.New(a.Now)}
	pool, cfg := db.Pool(t, postgres.RoleAPI), config()
	cfg.PageCacheBytes = bytes
	nc := b.Connect(t)
	var err error
	if f.js, err = jetstream.New(nc); err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), f.js, f.cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	pages := api.NewPages(cfg, f.reg)
	pages.KeepFor(time.Minute)
	f.Handler, err = api.New(cfg, api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
		Fleet: own, Kinds: a, Pages: pages, Log: testkit.Logger(t), Reg: f.reg})
	if err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- broker.Listen(ctx, nc, f.cfg, pages, testkit.Logger(t)) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	if _, err := f.system.Exec(t.Context(), `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of)
		VALUES ('followercounts', $1, 0, now())`, f.cfg.StreamName(0)); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f cached) publish(t *testing.T, follower, followee event.ID) event.Event {
	t.Helper()
	return f.publishEdge(t, f.set.Edges["follow"], event.Created, event.Edge{From: follower, To: followee, Version: 1})
}

func (f cached) publishEdge(t *testing.T, k kinds.Edge, eventType string, edge event.Edge) event.Event {
	t.Helper()
	now := event.Time{Time: time.Now()}
	edge.Status, edge.PositionedAt = event.StatusActive, now
	payload, err := edge.Encode(k.Names())
	if err != nil {
		t.Fatal(err)
	}
	return f.publishEvent(t, event.Event{AggregateType: k.Name, AggregateID: edge.To, Type: eventType, OccurredAt: now.Time,
		Payload: payload})
}

func (f cached) publishEvent(t *testing.T, e event.Event) event.Event {
	t.Helper()
	e.ID, e.TenantID, e.Version, e.OutboxID = uuid.NewString(), tenant, 1, 1
	ack, err := f.js.PublishMsg(t.Context(), &nats.Msg{Subject: e.Subject(f.cfg.Prefix, 0), Header: e.Headers(), Data: e.Payload})
	if err != nil {
		t.Fatal(err)
	}
	e.Seq = ack.Sequence
	return e
}

// reach moves the consumer's offset past an event that it does not want.
func (f cached) reach(t *testing.T, e event.Event) { t.Helper(); f.consume(t, e, nil) }

// apply does the consumer's work.
func (f cached) apply(t *testing.T, e event.Event) { t.Helper(); f.consume(t, e, []event.Event{e}) }

func (f cached) consume(t *testing.T, e event.Event, wanted []event.Event) {
	t.Helper()
	if err := postgres.InTx(t.Context(), f.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `UPDATE consumer_offsets SET last_processed_id = $1, as_of = now() WHERE partition_key = $2`,
			e.Seq, f.cfg.StreamName(0)); err != nil {
			return err
		}
		return followercounts.New(func() *kinds.Set { return f.set }).Apply(t.Context(), tx, wanted)
	}); err != nil {
		t.Fatal(err)
	}
}

// ask requests a list, and reports whether the answer came from memory.
func (f cached) ask(t testing.TB, path string) (body string, hit bool) {
	t.Helper()
	hits := func() float64 { t.Helper(); return testkit.Metric(t, f.reg, "tidings_api_page_cache_hits_total") }
	before := hits()
	a := f.do(t, "GET", path, "")
	if a.StatusCode != 200 {
		t.Fatalf("GET %s: %d %s", path, a.StatusCode, a.body)
	}
	return a.body, hits() > before
}

func TestAPageIsNotKeptBetweenItsEventAndItsProjection(t *testing.T) {
	t.Parallel()
	f := openCached(t, testkit.Postgres(t), testkit.NATS(t), 1<<20)
	const followers, following = "/v1/users/42/followers", "/v1/users/8/following"
	f.apply(t, f.publish(t, "7", "42"))
	for _, path := range []string{followers, following} {
		testkit.Eventually(t, "the page to be kept", func() (bool, error) {
			_, hit := f.ask(t, path)
			return hit, nil
		})
	}
	e := f.publish(t, "8", "42") // it changes both pages
	for _, path := range []string{followers, following} {
		testkit.Eventually(t, "the page to be dropped", func() (bool, error) {
			_, hit := f.ask(t, path)
			return !hit, nil
		})
		for range 20 {
			if body, hit := f.ask(t, path); hit || strings.Contains(body, `"8"`) || strings.Contains(body, `"42"`) {
				t.Fatalf("before the projection has the event: from memory is %t, %s", hit, body)
			}
		}
	}
	f.apply(t, e)
	for path, want := range map[string]string{followers: `"user_id":"8"`, following: `"user_id":"42"`} {
		if body, hit := f.ask(t, path); hit || !strings.Contains(body, want) {
			t.Fatalf("once the projection has the event: from memory is %t, %s", hit, body)
		}
		if body, hit := f.ask(t, path); !hit || !strings.Contains(body, want) {
			t.Errorf("after that: from memory is %t, %s", hit, body)
		}
	}
	if _, hit := f.ask(t, followers+"?limit=1"); hit {
		t.Error("a page of another limit comes from memory")
	}
	body, _ := f.ask(t, followers+"?limit=1")
	_, next, _ := strings.Cut(body, `"next":"`)
	next, _, _ = strings.Cut(next, `"`)
	for range 5 {
		if body, hit := f.ask(t, followers+"?limit=1&cursor="+next); hit || !strings.Contains(body, `"7"`) {
			t.Errorf("a later page: from memory is %t, %s", hit, body)
		}
	}
	foreign := f
	foreign.token = f.newToken(t, 2, "foreigner", tokens.RoleRead)
	for range 5 {
		if body, _ := foreign.ask(t, followers); !strings.Contains(body, `"items":[]`) {
			t.Fatalf("another tenant is shown %s", body)
		}
	}
}

// TestPagesOfEveryKindAreKeptUntilTheirEvents is about both lists of each kind of edges. One kind
// has other names and comes from a file.
func TestPagesOfEveryKindAreKeptUntilTheirEvents(t *testing.T) {
	t.Parallel()
	f := openCached(t, testkit.Postgres(t), testkit.NATS(t), 1<<20)
	foreign := f
	foreign.token = f.newToken(t, 2, "foreigner", tokens.RoleRead)
	kept := func(path string) {
		t.Helper()
		testkit.Eventually(t, path+" is kept", func() (bool, error) {
			_, hit := f.ask(t, path)
			return hit, nil
		})
	}
	for _, k := range f.set.AllEdges() {
		attributes := func(role string) json.RawMessage {
			if len(k.Attributes) == 0 {
				return nil
			}
			return json.RawMessage(`{"role":"` + role + `"}`)
		}
		from, to := event.ID("7-"+k.Name), event.ID("42-"+k.Name)
		others := [2]event.ID{to + "0", to + "1"}
		if k.ToChild {
			const id = "0196b2d4-7c00-7000-8000-00000000000"
			to, others = id+"1", [2]event.ID{id + "2", id + "3"}
		}
		paths := []string{fmt.Sprintf("/v1/%s/%s/%s", f.set.Plural(k.To), to, k.Reverse),
			fmt.Sprintf("/v1/%s/%s/%s", f.set.Plural(k.From), from, k.Forward)}
		f.apply(t, f.publishEdge(t, k, event.Created, event.Edge{From: from, To: to, Version: 1, Attributes: attributes("first")}))
		for _, path := range paths {
			kept(path)
		}
		comment := f.publishEvent(t, event.Event{AggregateType: event.AggregateComment, AggregateID: to, Type: event.Created,
			OccurredAt: time.Now(), Payload: []byte("{}")})
		f.reach(t, comment)
		later := f.publishEdge(t, k, event.Created, event.Edge{From: from + "0", To: others[0], Version: 1}) // of other lists
		f.apply(t, later)
		late := fmt.Sprintf("/v1/%s/%s/%s", f.set.Plural(k.To), later.AggregateID, k.Reverse)
		kept(late) // so both events were heard
		for _, path := range paths {
			if body, hit := f.ask(t, path); !hit {
				t.Errorf("%s is not from memory after events of others: %s", path, body)
			}
		}
		for range 5 {
			if body, hit := foreign.ask(t, paths[0]); strings.Contains(body, k.Name) || hit && !strings.Contains(body, `"items":[]`) {
				t.Errorf("another tenant is shown %s", body)
			}
		}
		if name, ok := k.Filter(); ok {
			value := k.Attributes[name].Enum[0]
			for range 5 {
				if body, hit := f.ask(t, paths[0]+"?"+name+"="+fmt.Sprint(value)); hit || !strings.Contains(body, `"items":[]`) {
					t.Errorf("with a filter: from memory is %t, %s", hit, body)
				}
			}
		}
		eventType, edge := event.Updated, event.Edge{From: from, To: to, Version: 2, Attributes: attributes("second")}
		if len(k.Attributes) == 0 {
			eventType, edge = event.Created, event.Edge{From: from, To: others[1], Version: 1}
			paths = paths[1:]
		}
		e := f.publishEdge(t, k, eventType, edge)
		for _, path := range paths {
			testkit.Eventually(t, path+" is dropped", func() (bool, error) {
				_, hit := f.ask(t, path)
				return !hit, nil
			})
		}
		f.apply(t, e)
		for _, path := range paths {
			want := string(edge.To)
			if len(k.Attributes) > 0 {
				want = `"role":"second"`
			}
			kept(path)
			if body, hit := f.ask(t, path); !hit || !strings.Contains(body, want) {
				t.Errorf("%s: from memory is %t, %s, want %s", path, hit, body, want)
			}
		}
	}
}

func TestPagesAreReadFromTheDatabaseWhileTheBrokerIsAway(t *testing.T) {
	t.Parallel()
	b := testkit.NATSProcess(t)
	f := openCached(t, testkit.Postgres(t), b, 1<<20)
	const path = "/v1/users/42/followers"
	f.apply(t, f.publish(t, "7", "42"))
	kept := func() (bool, error) {
		_, hit := f.ask(t, path)
		return hit, nil
	}
	testkit.Eventually(t, "the page to be kept", kept)
	b.Kill(t)
	testkit.Eventually(t, "the page to be dropped", func() (bool, error) {
		hit, err := kept()
		return !hit, err
	})
	for range 10 {
		if body, hit := f.ask(t, path); hit || !strings.Contains(body, `"7"`) {
			t.Fatalf("without a broker: from memory is %t, %s", hit, body)
		}
	}
	b.Restart(t)
	testkit.Eventually(t, "the page to be kept again", kept)
	f.apply(t, f.publish(t, "8", "42"))
	testkit.Eventually(t, "the new follower", func() (bool, error) {
		body, _ := f.ask(t, path)
		return strings.Contains(body, `"8"`), nil
	})
}

// BenchmarkFirstPage requests the first page of 50 of an account with 100,000 followers through the
// handler, from memory and from the database.
func BenchmarkFirstPage(b *testing.B) {
	for name, bytes := range map[string]int64{"hit": 1 << 20, "miss": 0} {
		b.Run(name, func(b *testing.B) {
			db := testkit.Postgres(b)
			f := openCached(b, db, testkit.NATS(b), bytes)
			if _, err := f.system.Exec(b.Context(), `INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version,
				positioned_at)
				SELECT 1, 'follow', g, 1, true, 1, timestamptz '2026-01-01' + g * interval '1 s'
		FROM generate_series(100001, 200000) g`); err != nil {
				b.Fatal(err)
			}
			if _, err := db.Pool(b, postgres.RoleOwner).Exec(b.Context(), `VACUUM ANALYZE edge_lists`); err != nil {
				b.Fatal(err)
			}
			const path = "/v1/users/1/followers"
			testkit.Eventually(b, "a page", func() (bool, error) {
				_, hit := f.ask(b, path)
				return hit || bytes == 0, nil
			})
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				f.do(b, "GET", path, "")
				times = append(times, time.Since(start))
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Microseconds()), "p50-us")
			b.ReportMetric(float64(times[len(times)*99/100].Microseconds()), "p99-us")
		})
	}
}
