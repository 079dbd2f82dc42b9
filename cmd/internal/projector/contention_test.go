package projector_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/store"
)

// line is the path from the store to followercounts: one relay, and the instances that run starts.
type line struct {
	pool *pgxpool.Pool
	api  *pgxpool.Pool
	js   jetstream.JetStream
	cfg  broker.Config
}

const tenant = 1

func newLine(t *testing.T) line {
	t.Helper()
	db, b := testkit.Postgres(t), testkit.NATS(t)
	l := line{pool: db.Pool(t, postgres.RoleSystem), api: db.Pool(t, postgres.RoleAPI), cfg: b.Config()}
	l.js = system.Streams(t, b)
	system.Start(t, system.Relay(t, system.RelayConfig(), l.pool, l.cfg).Run)
	return l
}

// instance runs one instance of followercounts with small batches, so instances often meet on the
// same accounts.
func (l line) instance(t *testing.T) (stop func()) {
	t.Helper()
	cfg := system.ConsumerConfig()
	cfg.BatchEvents = 50
	c := system.Consumer(t, cfg, consumers.Deps{Pool: l.pool, JetStream: l.js}, l.cfg, followercounts.New(kinds.Builtin))
	return system.Start(t, c.Run)
}

// settle waits until every event is applied, and compares every edge and count with the truth.
func (l line) settle(t *testing.T) {
	t.Helper()
	system.AwaitPublished(t, l.pool)
	system.AwaitApplied(t, l.pool, l.js, l.cfg, followercounts.Name)
	if _, err := followercounts.New(kinds.Builtin).Verify(t.Context(), l.pool, l.pool,
		func(d projections.Difference) { t.Error(d) }); err != nil {
		t.Fatal(err)
	}
	var dead int
	if err := l.pool.QueryRow(t.Context(), `SELECT count(*) FROM consumer_dead_letters`).Scan(&dead); err != nil || dead > 0 {
		t.Errorf("%d dead letters, %v", dead, err)
	}
}

// TestAThousandTogglesOfOneEdgeEndInTheTruthsCount lets a thousand writers follow and unfollow one
// pair through the API at once.
func TestAThousandTogglesOfOneEdgeEndInTheTruthsCount(t *testing.T) {
	l := newLine(t)
	l.instance(t)
	l.instance(t)
	handler, err := api.New(api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20,
		RequestTimeout: 25 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: time.Second},
		api.Deps{Store: store.New(l.api, nil), Tokens: l.api, DLQ: outbox.NewDLQ(l.api, nil), Projections: l.api,
			Fleet: fleet.Projections(kinds.Builtin), Log: testkit.Logger(t), Reg: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	token, err := tokens.Create(t.Context(), l.pool, tenant, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 1000 {
		wg.Go(func() {
			method, want := http.MethodPut, 0
			if i%2 == 1 {
				method, want = http.MethodDelete, http.StatusNoContent
			}
			for try := 1; ; try++ {
				req := httptest.NewRequestWithContext(t.Context(), method, "/v1/follows/7/42", nil)
				req.Header.Set("Authorization", "Bearer "+token)
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, req)
				// So many writers wait for one row that the API refuses some with 503.
				if w.Code == http.StatusServiceUnavailable && try < 2000 {
					continue
				}
				if w.Code != want && (want != 0 || w.Code != http.StatusOK && w.Code != http.StatusCreated) {
					t.Errorf("%s: %d %s", method, w.Code, w.Body)
				}
				return
			}
		})
	}
	wg.Wait()
	l.settle(t)
	var version, events int64
	var active bool
	if err := l.pool.QueryRow(t.Context(), `SELECT version, status = 'ACTIVE', (SELECT count(*) FROM outbox_messages)
		FROM follows`).Scan(&version, &active, &events); err != nil {
		t.Fatal(err)
	}
	if version != events || version < 2 {
		t.Errorf("the pair has version %d after %d events", version, events)
	}
	var astray int
	if err := l.pool.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT (payload ->> 'version')::bigint AS version,
		row_number() OVER (ORDER BY stream_seq) AS n
		FROM outbox_messages) on_stream WHERE version <> n`).Scan(&astray); err != nil || astray > 0 {
		t.Errorf("%d events are on the stream out of the order of their versions, %v", astray, err)
	}
	want := followercounts.Counts{}
	if active {
		want.Incoming = 1
	}
	if err := postgres.InTenant(t.Context(), l.api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
		got, err := followercounts.ReadCounts(t.Context(), tx, []string{event.AggregateFollow}, []event.ID{"42"})
		if c := got[followercounts.Object{Kind: event.AggregateFollow, ID: "42"}]; c != want {
			t.Errorf("counts %v, want %v", c, want)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// TestInstancesThatMeetOnTheSameAccountsStayExact has one account that everybody follows and one
// that follows everybody, with removals between. Instances that start and stop apply the events.
func TestInstancesThatMeetOnTheSameAccountsStayExact(t *testing.T) {
	const celebrity, fan, others = 1, 2, 600
	l := newLine(t)
	leaves := l.instance(t)
	l.instance(t)
	s := store.New(l.api, nil)
	meta := store.Meta{Actor: "test"}
	rounds := make(chan int64, 3)
	var wg sync.WaitGroup
	for worker := range int64(4) {
		wg.Go(func() {
			for round := range int64(3) {
				for first := worker * 100; first < others; first += 400 {
					var follow, unfollow []store.EdgeWrite
					for n := first; n < min(first+100, others); n++ {
						writes := []store.EdgeWrite{{Meta: meta, From: event.IDOf(100 + n), To: event.IDOf(celebrity)},
							{Meta: meta, From: event.IDOf(fan), To: event.IDOf(100 + n)},
							{Meta: meta, From: event.IDOf(100 + n), To: event.IDOf(fan)},
							{Meta: meta, From: event.IDOf(celebrity), To: event.IDOf(100 + n)}}
						if (n+round)%3 == 2 {
							unfollow = append(unfollow, writes...)
						} else {
							follow = append(follow, writes...)
						}
					}
					if _, err := s.PutEdges(t.Context(), tenant, kinds.Builtin().Edges["follow"], follow); err != nil {
						t.Error(err)
					}
					if _, err := s.RemoveEdges(t.Context(), tenant, kinds.Builtin().Edges["follow"], unfollow); err != nil {
						t.Error(err)
					}
				}
				if worker == 0 {
					rounds <- round
				}
			}
		})
	}
	<-rounds
	leaves()
	l.instance(t)
	<-rounds
	l.instance(t)
	wg.Wait()
	l.settle(t)
	if err := postgres.InTenant(t.Context(), l.api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
		got, err := followercounts.ReadCounts(t.Context(), tx, []string{event.AggregateFollow},
			[]event.ID{event.IDOf(celebrity), event.IDOf(fan)})
		if len(got) != 2 {
			t.Errorf("counts of %d users", len(got))
		}
		for user, c := range got {
			if c.Incoming != others*2/3 || c.Outgoing != others*2/3 {
				t.Errorf("counts of %v are %v, want %d of both", user, c, others*2/3)
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var events int64
	if err := l.pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE event_type = $1`,
		event.Removed).Scan(&events); err != nil || events == 0 {
		t.Errorf("%d removals, %v", events, err)
	}
}
