package endtoend_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/heads"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

const (
	leaseTTL  = 2 * time.Second
	linkDelay = 50 * time.Millisecond // each way, of a slow link
)

// line is the whole path: servers, a relay, the API's handler, and the instances of the consumers.
type line struct {
	t        *testing.T
	rng      *rand.Rand
	url      string        // for the parts: through toDB
	system   *pgxpool.Pool // of the test itself: through own
	own      *testkit.Proxy
	db       *testkit.DB   // of the primary
	pair     *testkit.Pair // nil if the test disturbs no PostgreSQL
	promoted bool          // the pair's standby is the primary
	quiet    sync.RWMutex  // keeps all callers of the API except its holder from starting a step
	nats     *testkit.Broker
	via      *testkit.Broker // nats for the parts: through toNATS
	toDB     *testkit.Proxy
	toNATS   *testkit.Proxy
	js       jetstream.JetStream
	store    *store.Store
	api      *pgxpool.Pool    // of store and handler
	kinds    *catalog.Catalog // of the truth
	handler  http.Handler
	clients  []client             // by tenant
	reg      *prometheus.Registry // the API's
	failed   atomic.Bool          // an error has occurred: nothing waits any longer
	refuse   atomic.Value         // the name of the consumer that refuses some aggregates
	relay    *part
	started  int
	running  map[string][]*part // instances by the name of the consumer
	pools    []*pgxpool.Pool    // of the parts
}

// part runs until the test stops or kills it.
type part struct {
	name   string // the application name of its connections
	cancel context.CancelFunc
	done   chan struct{} // closed when the part has ended
	err    error         // read it after done
	cut    func()
	odd    *odd
	reg    *prometheus.Registry // of an instance of a consumer
}

// stop returns the error of the part, also if the part has ended.
func (p *part) stop() error {
	p.cancel()
	<-p.done
	return p.err
}

func newLine(t *testing.T, rng *rand.Rand) *line {
	t.Helper()
	return newLineOn(t, rng, testkit.Postgres(t), nil)
}

// newPairedLine returns a line that knows the faults of PostgreSQL servers too.
func newPairedLine(t *testing.T, rng *rand.Rand) *line {
	t.Helper()
	pair := testkit.PostgresPair(t)
	return newLineOn(t, rng, pair.DB(t), pair)
}

func newLineOn(t *testing.T, rng *rand.Rand, db *testkit.DB, pair *testkit.Pair) *line {
	t.Helper()
	l := &line{t: t, rng: rng, db: db, pair: pair, own: testkit.NewProxy(t, host(t, db.URL)), nats: testkit.NATS(t),
		reg: prometheus.NewRegistry(), running: map[string][]*part{}}
	l.system = db.Through(t, l.own).Pool(t, postgres.RoleSystem)
	l.toDB, l.toNATS = testkit.NewProxy(t, host(t, db.URL)), testkit.NewProxy(t, host(t, l.nats.URL))
	over := db.Through(t, l.toDB)
	l.url, l.via = over.URL, l.nats.Through(t, l.toNATS)
	nc := l.nats.Connect(t)
	_, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), ledgerSQL+";"+aheadSQL)
	if err != nil {
		t.Fatal(err)
	}
	if l.js, err = jetstream.New(nc); err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), l.js, l.nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
		testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	pool := over.Pool(t, postgres.RoleAPI)
	l.api, l.store = pool, store.New(pool, nil)
	l.kinds = catalog.New(pool, catalog.Truth, testkit.Logger(t))
	if err := l.kinds.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	cfg := api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20, PageCacheBytes: 1 << 20,
		RequestTimeout: 20 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: time.Second}
	pages, ears := api.NewPages(cfg, l.reg), l.via.Connect(t)
	handler, err := api.New(cfg, api.Deps{Store: l.store, Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool, Kinds: l.kinds,
		Fleet: fleet.Projections(l.kinds.Now), Pages: pages, Streams: heads.Of(ears, l.via.Config()), Log: testkit.Logger(t), Reg: l.reg})
	if err != nil {
		t.Fatal(err)
	}
	l.handler = handler
	looks := run("looks at the outbox", handler.Run)
	listener := run("listener", func(ctx context.Context) error {
		return broker.Listen(ctx, ears, l.via.Config(), pages, testkit.Logger(t))
	})
	l.startRelay()
	for _, name := range consumerNames {
		l.start(name)
		l.start(name)
	}
	t.Cleanup(func() {
		for _, p := range append(slices.Concat(slices.Collect(maps.Values(l.running))...), l.relay, listener, looks) {
			if err := p.stop(); err != nil {
				t.Errorf("%s: %v", p.name, err)
			}
		}
		for _, pool := range l.pools {
			pool.Close()
		}
	})
	return l
}

// host returns the host and port of an address.
func host(t *testing.T, raw string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u.Host
}

// aheadSQL makes a clock that is two hours ahead, for jobs that act on rows of an hour ago.
const aheadSQL = `
CREATE SCHEMA ahead;
CREATE FUNCTION ahead.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.now() + interval ''2 hours''';
GRANT USAGE ON SCHEMA ahead TO tidings_system`

// mover shelves threads of comments as soon as they are written, and counts them.
type mover struct {
	*store.Shelver
	pool *pgxpool.Pool

	mu     sync.Mutex
	counts map[string]int64
}

func (l *line) newMover() *mover {
	l.t.Helper()
	pool, err := postgres.OpenWith(l.t.Context(), l.url,
		postgres.Config{MaxConns: 2, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute}, postgres.RoleSystem, "mover",
		map[string]string{"search_path": "ahead, pg_catalog, public"})
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(pool.Close)
	m := &mover{pool: pool, counts: map[string]int64{}}
	if m.Shelver, err = store.NewShelver(pool, func(context.Context) (time.Duration, error) { return time.Hour, nil }, l.kinds.Now,
		testkit.Logger(l.t), nil); err != nil {
		l.t.Fatal(err)
	}
	return m
}

func (m *mover) Fence(context.Context, pgx.Tx) error { return nil } // there is only one mover
func (m *mover) Continue() error                     { return nil }

func (m *mover) Count(what string, n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.counts[what] += n
}

var consumerNames = []string{followercounts.Name, threadcache.Name, history.Name}

// projection returns the projection of a consumer. now returns the kinds in force.
func projection(name string, now func() *kinds.Set) projections.Projection {
	all := fleet.Projections(now)
	return all[slices.IndexFunc(all, func(p projections.Projection) bool { return p.Name() == name })]
}

func run(name string, fn func(context.Context) error) *part {
	ctx, cancel := context.WithCancel(context.Background())
	p := &part{name: name, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.err = fn(ctx)
	}()
	return p
}

func (l *line) startRelay() {
	l.t.Helper()
	cfg := system.RelayConfig()
	cfg.PublishTimeout = 2 * time.Second
	l.relay = run("relay", system.Relay(l.t, cfg, l.open("relay", 8), l.via.Config()).Run)
}

// open returns a pool of a part.
func (l *line) open(name string, conns int) *pgxpool.Pool {
	l.t.Helper()
	pool, err := postgres.Open(l.t.Context(), l.url, postgres.Config{MaxConns: conns, ConnectTimeout: 5 * time.Second,
		StatementTimeout: time.Minute}, postgres.RoleSystem, name)
	if err != nil {
		l.t.Fatal(err)
	}
	l.pools = append(l.pools, pool)
	return pool
}

// start starts an instance of a consumer with its own connections. Batches are small, so there are
// many.
func (l *line) start(name string) {
	l.t.Helper()
	l.started++
	label := fmt.Sprintf("%s-%d", name, l.started)
	pool, nc := l.open(label, 4), l.via.Connect(l.t)
	js, err := jetstream.New(nc)
	if err != nil {
		l.t.Fatal(err)
	}
	catalog := catalog.New(pool, catalog.Projections, testkit.Logger(l.t)) // the consumer reloads it when it meets an unknown kind
	o := &odd{Projection: projection(name, catalog.Now), refuse: &l.refuse, rng: rand.New(rand.NewPCG(l.rng.Uint64(), 1)),
		past: map[string][]event.Event{}}
	cfg := system.ConsumerConfig()
	cfg.BatchEvents = 50 + l.rng.IntN(150)
	reg := prometheus.NewRegistry()
	deps := consumers.Deps{Pool: pool, Kinds: catalog, JetStream: js, Registry: reg}
	p := run(label, system.Consumer(l.t, cfg, deps, l.nats.Config(), o).Run)
	p.odd, p.cut, p.reg = o, nc.Close, reg
	l.running[name] = append(l.running[name], p)
}

// kill ends an instance in the middle of its work. It closes the connections first, so that the
// current batch fails.
func (l *line) kill(name string) {
	l.t.Helper()
	p := l.running[name][0]
	l.running[name] = l.running[name][1:]
	p.cut()
	p.odd.cut.Store(true)
	if _, err := l.system.Exec(l.t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`,
		p.name); err != nil {
		l.t.Fatal(err)
	}
	if err := p.stop(); err != nil {
		l.t.Errorf("%s: %v", p.name, err)
	}
}

// ledgerSQL creates the ledger of deliveries: how often a committed transaction applied each event.
const ledgerSQL = `
CREATE TABLE delivered (consumer text, event_id text, times int NOT NULL DEFAULT 1, PRIMARY KEY (consumer, event_id));
GRANT SELECT, INSERT, UPDATE ON delivered TO tidings_system`

var errRefused = errors.New("refused for a while")

// deliveredSQL records a batch in the ledger.
const deliveredSQL = `
INSERT INTO delivered AS d (consumer, event_id) SELECT $1, id FROM unnest($2::text[]) AS id ORDER BY id
    ON CONFLICT (consumer, event_id) DO UPDATE SET times = d.times + 1`

// odd is a projection that loses its connection in the middle of a batch, or gets events twice or
// old events again. Old ones come with the offset of their own stream held: another instance may
// work on the others at the same time.
type odd struct {
	consumers.Projection
	cut atomic.Bool // the next batch loses its connection before its commit

	refuse *atomic.Value // the name of the consumer for which every fourth aggregate is poison

	mu   sync.Mutex
	rng  *rand.Rand
	past map[string][]event.Event // by stream
}

func (o *odd) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.refuse.Load() == o.Name() && slices.ContainsFunc(events, func(e event.Event) bool {
		return testkit.Number(e.AggregateID)%4 == 1
	}) {
		return event.Permanent(errRefused)
	}
	if err := o.Projection.Apply(ctx, tx, events); err != nil {
		return err
	}
	var ids []string
	for i := range events {
		ids = append(ids, events[i].ID)
	}
	if _, err := tx.Exec(ctx, deliveredSQL, o.Name(), ids); err != nil {
		return err
	}
	past := o.past[events[0].Stream]
	switch o.rng.IntN(4) {
	case 0:
		if err := o.Projection.Apply(ctx, tx, events); err != nil {
			return fmt.Errorf("apply once more: %w", err)
		}
	case 1:
		if err := o.Projection.Apply(ctx, tx, past); err != nil {
			return fmt.Errorf("apply old events: %w", err)
		}
	}
	if past = append(past, events...); len(past) > 40 {
		o.rng.Shuffle(len(past), func(i, j int) { past[i], past[j] = past[j], past[i] })
		past = past[:20]
	}
	o.past[events[0].Stream] = past
	if o.cut.CompareAndSwap(true, false) {
		return tx.Conn().PgConn().Conn().Close()
	}
	return nil
}

// fault does something to the line that must not stop it.
func (l *line) fault(what string) {
	l.t.Helper()
	name := consumerNames[l.rng.IntN(len(consumerNames))]
	l.t.Logf("fault: %s (%s)", what, name)
	switch what {
	case "kill":
		l.kill(name)
		l.start(name)
	case "kill all":
		l.kill(name)
		l.kill(name)
		l.pass(time.Duration(100+l.rng.IntN(900)) * time.Millisecond)
		l.start(name)
		l.start(name)
	case "cut":
		for _, p := range l.running[name] {
			p.odd.cut.Store(true)
		}
	case "pause":
		if _, err := consumers.Pause(l.t.Context(), l.system, name, consumers.Paused{Actor: "test", Reason: what}); err != nil {
			l.t.Fatal(err)
		}
		at := l.overlaid()
		testkit.Eventually(l.t, "reads of own writes, or events, that the consumer has not applied", func() (bool, error) {
			if name != history.Name {
				return l.failed.Load() || l.overlaid() >= at+2, nil
			}
			lags, err := consumers.Lag(l.t.Context(), l.system, l.js, l.nats.Config(), name) // no read overlays its tables
			return l.failed.Load() || slices.ContainsFunc(lags, func(lag consumers.ConsumerLag) bool { return lag.Messages > 20 }), err
		})
		if _, err := consumers.Resume(l.t.Context(), l.system, name); err != nil {
			l.t.Fatal(err)
		}
	case "slow":
		for _, link := range []*testkit.Proxy{l.toDB, l.toNATS} {
			link.Slow(linkDelay)
			defer link.Heal()
		}
		l.pass(3 * time.Second) // a request takes up to a second
	case "freeze":
		pg := l.pair.PG
		if l.promoted {
			pg = l.pair.Standby
		}
		pg.Freeze(l.t)
		l.pass(time.Duration(500+l.rng.IntN(2000)) * time.Millisecond) // leases may end
		pg.Thaw(l.t)
	case "failover":
		l.failOver()
	case "full":
		l.fullStreams()
	case "operators":
		l.operators(name)
	case "restart":
		p := l.running[name][0]
		l.running[name] = l.running[name][1:]
		if err := p.stop(); err != nil {
			l.t.Errorf("%s: %v", p.name, err)
		}
		l.start(name)
	case "relay":
		if err := l.relay.stop(); err != nil {
			l.t.Errorf("relay: %v", err)
		}
		l.pass(time.Duration(l.rng.IntN(500)) * time.Millisecond)
		l.startRelay()
	case "resize":
		to := []int{1, 2, 4}[l.rng.IntN(3)]
		added, err := outbox.Resize(l.t.Context(), l.system, to)
		if err != nil && !errors.Is(err, outbox.ErrResizing) {
			l.t.Fatal(err)
		}
		l.t.Logf("to %d: %d new partitions, %v", to, len(added), err)
	case "kinds":
		if a := l.reader().call(http.MethodGet, "/v1/songs/1/counts", ""); a.status != http.StatusNotFound {
			l.t.Fatalf("before the kind exists: %d %s", a.status, a.body)
		}
		if _, err := catalog.Apply(l.t.Context(), catalog.Databases{Truth: l.system, Projections: l.system},
			catalog.Request{Kinds: testkit.Kinds(l.t, ownKinds), Actor: "test"}); err != nil {
			l.t.Fatal(err)
		}
		testkit.Eventually(l.t, "routes of the kinds that were applied", func() (bool, error) {
			return l.reader().call(http.MethodGet, "/v1/songs/1/counts", "").status == http.StatusOK, nil
		})
	case "replay":
		if name == history.Name { // a record: a replay never rebuilds it
			name = threadcache.Name
		}
		from := []replay.Source{replay.Stream, replay.Truth}[l.rng.IntN(2)]
		report, err := replay.Run(l.t.Context(), replay.Deps{URL: l.url,
			Postgres: postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute},
			Truth:    l.system, JetStream: l.js, Broker: l.nats.Config(), Log: testkit.Logger(l.t)}, projection(name, l.kinds.Now),
			replay.Options{From: from})
		if err != nil || !report.Switched {
			l.t.Errorf("replay %s from %s: %+v, %v", name, from, report, err)
		}
	default:
		l.t.Fatalf("no fault %q", what)
	}
}

// reader returns a client of one tenant that only reads.
func (l *line) reader() client { return l.clients[1] }

// pass lets the other parts work for a while.
func (l *line) pass(d time.Duration) {
	select {
	case <-time.After(d):
	case <-l.t.Context().Done():
	}
}

// settle waits until the consumers have applied every write.
func (l *line) settle() {
	l.t.Helper()
	testkit.Eventually(l.t, "everything to be applied", func() (bool, error) {
		var waiting bool
		if err := l.system.QueryRow(l.t.Context(),
			`SELECT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&waiting); err != nil || waiting {
			return false, err
		}
		lags, err := consumers.Lag(l.t.Context(), l.system, l.js, l.nats.Config(), consumerNames...)
		for _, lag := range lags {
			if lag.Messages > 0 {
				return false, err
			}
		}
		return err == nil, err
	})
}
