package fuzz_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// warnings returns a log without a line for each request.
func warnings(t *testing.T) *slog.Logger { return slog.New(quiet{testkit.Logger(t).Handler()}) }

type quiet struct{ slog.Handler }

func (quiet) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

func (q quiet) WithAttrs(all []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(all)} }

// tenants is the number of tenants: 1, 2 and so on, with one lane each.
const tenants = 4

// applied adds kinds with the features and names that the built-in ones lack.
const applied = `
objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players,
    attributes: {mood: {enum: [calm, loud], default: calm, filter: true}, volume: {type: integer, minimum: 0, maximum: 9}}}
  link: {plural: links, from: user, to: user, ends: [source_id, target_id], forward: links, reverse: linkers, self: true}
  praise: {plural: praises, from: user, to: lyric, ends: [fan_id, lyric_id], forward: praised_lyrics, reverse: fans, partitions: 2,
    attributes: {tone: {enum: [warm, dry], default: warm, filter: true}}}
children:
  lyric: {plural: lyrics, parent: song, moderated: true, one_per_author: true,
    attributes: {stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}, calm: {type: boolean, default: false}}}
  note: {plural: notes, parent: song, threaded: true}
`

// rig is the shared part of all lanes: two API processes on one database, and the processes that
// work on it beside them.
type rig struct {
	t       *testing.T
	system  *pgxpool.Pool
	catalog *catalog.Catalog
	fleet   []projections.Projection
	urls    []string // of the API processes
	stores  []*store.Store
	pages   []*api.Pages
	client  *http.Client
	board   *board
	flight  *flight
	total   *atomic.Int64 // requests
	refused *atomic.Int64 // with a documented 503
	mover   *mover
}

func newRig(t *testing.T) *rig {
	t.Helper()
	db := testkit.Postgres(t)
	r := &rig{t: t, system: db.Pool(t, postgres.RoleSystem), board: &board{}, flight: &flight{}, total: new(atomic.Int64),
		refused: new(atomic.Int64), client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}}}
	t.Cleanup(r.client.CloseIdleConnections)
	if _, err := catalog.Apply(t.Context(), catalog.Databases{Truth: r.system, Projections: r.system},
		catalog.Request{Kinds: testkit.Kinds(t, applied), Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	r.catalog = catalog.New(r.system, catalog.Truth, warnings(t))
	if err := r.catalog.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.fleet = fleet.Projections(r.catalog.Now)
	for range 2 {
		r.startAPI(db)
	}
	r.startMover(db)
	return r
}

// startAPI starts an API process with its own pools, caches and limits.
func (r *rig) startAPI(db *testkit.DB) {
	r.t.Helper()
	truth, projected, tokens := db.Pool(r.t, postgres.RoleAPI), db.Pool(r.t, postgres.RoleAPI), db.Pool(r.t, postgres.RoleAPI)
	cfg := api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20, PageCacheBytes: 1 << 20,
		RequestTimeout: 25 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: 20 * time.Second}
	reg, last := prometheus.NewRegistry(), map[string]uint64{}
	pages := api.NewPages(cfg, reg)
	for tenant := int64(1); tenant <= tenants; tenant++ {
		last[stream(tenant)] = 0
	}
	pages.Begin(last)
	s := store.New(truth, nil)
	h, err := api.New(cfg, api.Deps{Store: s, Tokens: tokens, DLQ: outbox.NewDLQ(truth, nil), Projections: projected, Kinds: r.catalog,
		Fleet: r.fleet, Pages: pages, Log: warnings(r.t), Reg: reg})
	if err != nil {
		r.t.Fatal(err)
	}
	server := httptest.NewServer(r.flight.watch(h))
	r.t.Cleanup(server.Close)
	r.urls, r.pages, r.stores = append(r.urls, server.URL), append(r.pages, pages), append(r.stores, s)
}

// lane returns the lane of a tenant.
func (r *rig) lane(ctx context.Context, tenant int64, seed uint64) *lane {
	r.t.Helper()
	dice := rand.NewPCG(seed, uint64(tenant))
	l := &lane{rig: r, ctx: ctx, tenant: tenant, seed: seed, dice: dice, rng: rand.New(dice), m: newModel(), kinds: r.catalog.Now(),
		requests: new(atomic.Int64), did: map[string]int{}, sent: map[authorKey]newChild{}}
	for token, roles := range map[*string][]string{&l.all: tokens.Roles(), &l.reader: {tokens.RoleRead}} {
		var err error
		if *token, err = tokens.Create(r.t.Context(), r.system, tenant, fmt.Sprintf("%s %d roles", l.mark(), len(roles)), roles,
			time.Time{}); err != nil {
			r.t.Fatal(err)
		}
	}
	return l
}

// flight records which requests have ended.
type flight struct{ ends sync.Map } // chan struct{} by request id

func (f *flight) await(id string) <-chan struct{} {
	c := make(chan struct{})
	f.ends.Store(id, c)
	return c
}

func (f *flight) watch(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get("X-Request-Id")
		defer func() {
			if c, ok := f.ends.LoadAndDelete(id); ok {
				close(c.(chan struct{}))
			}
		}()
		h.ServeHTTP(w, r)
	})
}

// aheadSQL makes a clock that is two hours ahead, so that for the archiver all rows are old.
const aheadSQL = `
CREATE SCHEMA ahead;
CREATE FUNCTION ahead.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.now() + interval ''2 hours''';
GRANT USAGE ON SCHEMA ahead TO tidings_system`

// mover shelves threads as soon as they are written. Removers remove the edges that
// were requested.
type mover struct {
	*store.Shelver
	removers []*store.Remover
	archived atomic.Int64 // threads
}

func (m *mover) Fence(context.Context, pgx.Tx) error { return nil } // there is only one mover

func (m *mover) Continue() error { return nil }

func (m *mover) Count(what string, n int64) {
	if what == store.CountThreadsShelved {
		m.archived.Add(n)
	}
}

func (r *rig) startMover(db *testkit.DB) {
	r.t.Helper()
	if _, err := db.Pool(r.t, postgres.RoleOwner).Exec(r.t.Context(), aheadSQL); err != nil {
		r.t.Fatal(err)
	}
	pool, err := postgres.OpenWith(r.t.Context(), db.URL,
		postgres.Config{MaxConns: 2, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute}, postgres.RoleSystem, "mover",
		map[string]string{"search_path": "ahead, pg_catalog, public"})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(pool.Close)
	r.mover = &mover{}
	if r.mover.Shelver, err = store.NewShelver(pool, func(context.Context) (time.Duration, error) { return time.Hour, nil },
		r.catalog.Now, warnings(r.t), nil); err != nil {
		r.t.Fatal(err)
	}
	for range 2 {
		remover, err := store.NewRemover(r.system, nil, r.catalog.Now, warnings(r.t), prometheus.NewRegistry())
		if err != nil {
			r.t.Fatal(err)
		}
		r.mover.removers = append(r.mover.removers, remover)
	}
}

// between is the number of requests between two runs of the archiver.
const between = 800

// archive runs until ctx ends.
func (m *mover) archive(ctx context.Context, requests *atomic.Int64) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for next := int64(between); ctx.Err() == nil; {
		if requests.Load() >= next {
			next += between
			if err := m.Run(ctx, m); err != nil && ctx.Err() == nil {
				return fmt.Errorf("archive: %w", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	return nil
}

// shared is a path, a cursor or an id of one tenant, for other tenants to try.
type shared struct {
	path, cursor string // a list with one of its cursors
	token        string
	kind         string // of a child
	object       event.ID
	id, slug     string
}

// board holds the latest shared values of each tenant.
type board struct {
	mu  sync.Mutex
	all [tenants + 1][]shared
}

func (b *board) put(tenant int64, s shared) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all[tenant] = append(b.all[tenant], s); len(b.all[tenant]) > 100 {
		b.all[tenant] = b.all[tenant][50:]
	}
}

// find returns a shared value of another tenant that fulfills want.
func (b *board) find(not int64, n int, want func(shared) bool) (shared, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range tenants {
		tenant := 1 + (n+i)%tenants
		if int64(tenant) == not {
			continue
		}
		for j := range b.all[tenant] {
			if s := b.all[tenant][(n+j)%len(b.all[tenant])]; want(s) {
				return s, true
			}
		}
	}
	return shared{}, false
}
