package endtoend_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/heads"
	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/cells"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// cell is a truth with its relay and its API.
type cell struct {
	name    string // the name of its streams
	db      *testkit.DB
	system  *pgxpool.Pool
	broker  broker.Config
	kinds   *catalog.Catalog
	store   *store.Store
	handler http.Handler
	relay   *part
}

// cellular is two cells, one projections database, and one set of consumers that read the streams
// of both cells.
type cellular struct {
	t         *testing.T
	cells     map[string]*cell
	projected *testkit.DB
	system    *pgxpool.Pool // of the projections
	nc        *nats.Conn
	js        jetstream.JetStream
	url       string // of NATS
	consumers map[string]*part
	metrics   map[string]*prometheus.Registry // by consumer: the metrics of its running process
}

var tuned = postgres.Config{MaxConns: 8, ConnectTimeout: 5 * time.Second, StatementTimeout: time.Minute}

func newCellular(t *testing.T, names ...string) *cellular {
	t.Helper()
	b := testkit.NATS(t)
	c := &cellular{t: t, projected: testkit.Postgres(t), url: b.URL, nc: b.Connect(t), cells: map[string]*cell{},
		consumers: map[string]*part{}, metrics: map[string]*prometheus.Registry{}}
	c.system = c.projected.Pool(t, postgres.RoleSystem)
	var err error
	if c.js, err = jetstream.New(c.nc); err != nil {
		t.Fatal(err)
	}
	base := b.Config()
	for _, name := range names {
		cfg := base
		// live subjects have a tenant and no partition, so the cells share them
		cfg.Stream, cfg.Prefix = base.Stream+"-"+name, base.Prefix+"-"+name
		c.addCell(cfg)
	}
	t.Cleanup(func() {
		running := slices.Collect(maps.Values(c.consumers))
		for _, x := range c.cells {
			running = append(running, x.relay)
		}
		for _, p := range running {
			if err := p.stop(); err != nil {
				t.Errorf("%s: %v", p.name, err)
			}
		}
	})
	for _, name := range consumerNames {
		c.start(name)
	}
	return c
}

func (c *cellular) addCell(cfg broker.Config) {
	c.t.Helper()
	db, log := testkit.Postgres(c.t), testkit.Logger(c.t)
	pool := db.Pool(c.t, postgres.RoleAPI)
	x := &cell{name: cfg.Stream, db: db, system: db.Pool(c.t, postgres.RoleSystem), broker: cfg, store: store.New(pool, nil),
		kinds: catalog.New(pool, catalog.Truth, log)}
	if err := x.kinds.Load(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	set := api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20, PageCacheBytes: 1 << 20,
		RequestTimeout: 20 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: time.Second}
	reg := prometheus.NewRegistry()
	pages := api.NewPages(set, reg)
	handler, err := api.New(set, api.Deps{Store: x.store, Tokens: pool, DLQ: outbox.NewDLQ(pool, nil),
		Projections: c.projected.Pool(c.t, postgres.RoleAPI), Kinds: x.kinds, Fleet: fleet.Projections(x.kinds.Now),
		Pages: pages, Streams: heads.Of(c.nc, cfg), Log: log, Reg: reg})
	if err != nil {
		c.t.Fatal(err)
	}
	x.handler = handler
	g, ctx := errgroup.WithContext(c.t.Context())
	g.Go(func() error { return handler.Run(ctx) }) // for as_of
	g.Go(func() error { return broker.Listen(ctx, c.nc, cfg, pages, log) })
	c.t.Cleanup(func() {
		if err := g.Wait(); err != nil {
			c.t.Error(err)
		}
	})
	c.cells[x.name] = x
	c.startRelay(x)
}

func (c *cellular) startRelay(x *cell) {
	c.t.Helper()
	label := "relay-" + x.name
	pool, err := postgres.Open(c.t.Context(), x.db.URL, tuned, postgres.RoleRelay, label)
	if err != nil {
		c.t.Fatal(err)
	}
	cfg := system.RelayConfig()
	cfg.DrainTimeout = time.Second
	r := system.Relay(c.t, cfg, pool, x.broker)
	x.relay = run(label, func(ctx context.Context) error {
		defer pool.Close()
		return r.Run(ctx)
	})
}

// start runs the process of a consumer. It reads the streams of all cells, and compares with the
// truth of the first cell.
func (c *cellular) start(name string) {
	c.t.Helper()
	var streams []string
	for _, x := range c.cells {
		streams = append(streams, x.broker.Stream+":"+x.broker.Prefix)
	}
	first := c.cells[slices.Min(slices.Collect(maps.Keys(c.cells)))]
	var cfg projector.Config
	if err := envconfig.ProcessWith(c.t.Context(), &envconfig.Config{Target: &cfg, Lookuper: envconfig.MapLookuper(map[string]string{
		"DATABASE_URL": first.db.URL, "PROJECTIONS_DATABASE_URL": c.projected.URL, "NATS_URL": c.url, "NATS_STREAM": first.name,
		"NATS_SUBJECT_PREFIX": first.broker.Prefix,
		"NATS_CELLS":          strings.Join(streams, ","), "LEASE_TTL": leaseTTL.String(), "CONSUMER_LAG_INTERVAL": "200ms",
		"CONSUMER_BATCH_EVENTS": "50", "VERIFY_INTERVAL": "100ms", "POSTGRES_MAX_CONNS": "8",
	})}); err != nil {
		c.t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	c.metrics[name] = reg
	c.consumers[name] = run(name, func(ctx context.Context) error {
		consumer := projector.Part(cfg, func(now func() *kinds.Set) projections.Projection { return projection(name, now) })
		return consumer(ctx, daemon.NewOps(name, "127.0.0.1:0", reg, slog.Default()).Host("", slog.Default()))
	})
}

// kill closes the connections of a process to a database in the middle of its work, and ends the
// process.
func (c *cellular) kill(p *part, system *pgxpool.Pool) {
	c.t.Helper()
	if _, err := system.Exec(c.t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1
		AND datname = current_database()`, p.name); err != nil {
		c.t.Fatal(err)
	}
	if err := p.stop(); err != nil {
		c.t.Errorf("%s: %v", p.name, err)
	}
}

// assign puts a tenant into a cell. Requests are routed by this row, and each truth knows its
// tenants by it.
func (c *cellular) assign(tenant int64, cell string) {
	c.t.Helper()
	if _, err := c.system.Exec(c.t.Context(), `INSERT INTO tenant_cells VALUES ($1, $2) ON CONFLICT (tenant_id) DO UPDATE
		SET cell = excluded.cell`, tenant, cell); err != nil {
		c.t.Fatal(err)
	}
}

// door is a tenant's host name. It routes each request to the API of the tenant's cell, by the
// table.
type door struct {
	c      *cellular
	tenant int64
}

func (d door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var name string
	err := d.c.system.QueryRow(r.Context(), `SELECT cell FROM tenant_cells WHERE tenant_id IN ($1, 0) ORDER BY tenant_id DESC LIMIT 1`,
		d.tenant).Scan(&name)
	if err != nil {
		http.Error(w, err.Error(), http.StatusMisdirectedRequest)
		return
	}
	d.c.cells[name].handler.ServeHTTP(w, r)
}

func (c *cellular) deps(x *cell) verify.Deps {
	return verify.Deps{Sources: status.Sources{Truth: x.system, Projections: c.system, NATS: c.nc, JetStream: c.js, Broker: x.broker,
		Consumers: consumerNames}, Fleet: fleet.Projections(x.kinds.Now), Kinds: x.kinds.Now}
}

// verify compares the projections with the truth of each cell. Every event must be applied before.
func (c *cellular) verify() {
	c.t.Helper()
	for name, x := range c.cells {
		r, err := verify.Run(c.t.Context(), c.deps(x), verify.Options{Wait: 2 * time.Minute, Limit: 5})
		if err != nil || !r.OK {
			c.t.Errorf("verify %s: %q %+v, %v", name, r.Why, r.Projections, err)
		}
		st, err := status.Await(c.t.Context(), c.deps(x).Sources, time.Minute, // a lease ends if the machine stalls for leaseTTL
			func(st status.State) bool { return len(st.Unheld) == 0 && len(st.Lagging()) == 0 })
		if err != nil || len(st.Unheld) > 0 || len(st.Lagging()) > 0 {
			c.t.Errorf("status of %s: no process holds %v, lagging %q, %v", name, st.Unheld, st.Lagging(), err)
		}
	}
}

// movableSQL lists the tables of a truth with rows of a tenant that move with it, and their columns
// that are not computed.
const movableSQL = `
SELECT c.relname, string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
 WHERE c.relname IN ('edges', 'children', 'children_archive', 'archived_threads', 'child_keys', 'threads', 'threads_purged',
 'edge_removals', 'erasures') AND c.relkind IN ('r', 'p')
   AND c.relnamespace = current_schema()::regnamespace GROUP BY 1 ORDER BY 1`

// readOnlySQL takes the writing roles from a tenant's tokens. revokeSQL revokes the tokens when the
// tenant has moved.
const (
	readOnlySQL = `UPDATE api_tokens SET roles = ARRAY(SELECT unnest(roles) INTERSECT SELECT unnest('{read,export}'::text[]))
		WHERE tenant_id = $1`
	revokeSQL = `UPDATE api_tokens SET revoked_at = now() WHERE tenant_id = $1`
)

// await waits until a write gets one status, and a read another.
func (c *cellular) await(r *resident, write, read int) {
	c.t.Helper()
	testkit.Eventually(c.t, fmt.Sprintf("%d for a write and %d for a read of tenant %d", write, read, r.tenant),
		func() (bool, error) {
			return r.client.call(http.MethodDelete, "/v1/follows/999999/999998", "").status == write &&
				r.client.call(http.MethodGet, "/v1/users/1/counts", "").status == read, nil
		})
}

// move moves a tenant from one cell to another, step by step as docs/adr/0018-cells.md says.
func (c *cellular) move(r *resident, from, to *cell) {
	c.t.Helper()
	ctx, tenant := c.t.Context(), r.tenant
	a, b := from.db.Pool(c.t, postgres.RoleOwner), to.db.Pool(c.t, postgres.RoleOwner)
	if err := copyRows(ctx, a, b, "api_tokens", "token_hash, tenant_id, name, roles, created_at, expires_at, revoked_at, replaced_at, "+
		"rate_read, rate_write", tenant); err != nil {
		c.t.Fatal(err)
	}
	if _, err := a.Exec(ctx, readOnlySQL, tenant); err != nil {
		c.t.Fatal(err)
	}
	c.await(r, http.StatusForbidden, http.StatusOK)
	if st, err := status.Await(ctx, c.deps(from).Sources, time.Minute, status.State.Settled); err != nil || !st.Settled() {
		c.t.Fatalf("not all of tenant %d is applied: %q, %v", tenant, st.Lagging(), err)
	}
	for _, sequence := range []string{"object_version_id", "child_archive_id"} {
		var last int64
		if err := a.QueryRow(ctx, `SELECT nextval($1::regclass)`, sequence).Scan(&last); err != nil {
			c.t.Fatal(err)
		}
		if _, err := b.Exec(ctx, `SELECT setval($1::regclass, $2) WHERE $2 > nextval($1::regclass)`, sequence, last); err != nil {
			c.t.Fatalf("raise %s: %v", sequence, err)
		}
	}
	rows, _ := a.Query(ctx, movableSQL)
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Name, Columns string }])
	if err != nil || len(tables) != 9 {
		c.t.Fatalf("%d tables, %v", len(tables), err)
	}
	for _, x := range tables {
		if err := copyRows(ctx, a, b, x.Name, x.Columns, tenant); err != nil {
			c.t.Fatalf("copy %s: %v", x.Name, err)
		}
	}
	if _, err := a.Exec(ctx, revokeSQL, tenant); err != nil {
		c.t.Fatal(err)
	}
	c.await(r, http.StatusUnauthorized, http.StatusUnauthorized) // the former truth accepts no token
	c.assign(tenant, to.name)
	c.await(r, http.StatusNoContent, http.StatusOK)
}

func copyRows(ctx context.Context, from, to *pgxpool.Pool, table, columns string, tenant int64) error {
	var data bytes.Buffer
	out := func(conn *pgxpool.Conn) error {
		_, err := conn.Conn().PgConn().CopyTo(ctx, &data,
			fmt.Sprintf("COPY (SELECT %s FROM %s WHERE tenant_id = %d) TO STDOUT", columns, table, tenant))
		return err
	}
	in := func(conn *pgxpool.Conn) error {
		_, err := conn.Conn().PgConn().CopyFrom(ctx, &data, fmt.Sprintf("COPY %s (%s) FROM STDIN", table, columns))
		return err
	}
	if err := from.AcquireFunc(ctx, out); err != nil {
		return err
	}
	return to.AcquireFunc(ctx, in)
}

// resident is a tenant with its model.
type resident struct {
	tenant int64
	client client
	m      *model
	places int // number of calls of write so far
}

// write runs writers and a reader of its own writes for each tenant. Each act runs after a number
// of further steps. It ends when the steps after the last act are done.
func (c *cellular) write(seed uint64, all []*resident, of func(*resident) *cell, acts ...func()) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var steps atomic.Int64
	var failed atomic.Bool
	for _, r := range all {
		rng := rand.New(rand.NewPCG(seed, uint64(r.tenant)))
		w := &writer{client: r.client, m: r.m, rng: rng, store: of(r).store, tenant: r.tenant, n: int64(2 * r.places)}
		s := &session{writer: writer{client: r.client, m: r.m, rng: rand.New(rand.NewPCG(seed+1, uint64(r.tenant))), store: of(r).store,
			tenant: r.tenant, n: int64(50 + r.places)}, tokens: map[string]string{}}
		r.places++
		for what, step := range map[string]func() error{"writer": w.step, "reader of its own writes": s.step} {
			wg.Go(func() {
				tick := time.NewTicker(pace)
				defer tick.Stop()
				for ctx.Err() == nil {
					if err := step(); err != nil {
						failed.Store(true)
						c.t.Errorf("%s of tenant %d: %v", what, r.tenant, err)
						return
					}
					steps.Add(1)
					select {
					case <-ctx.Done():
					case <-tick.C:
					}
				}
			})
		}
	}
	for _, act := range append(acts, func() {}) {
		at := steps.Load()
		testkit.Eventually(c.t, "writes in all cells",
			func() (bool, error) { return failed.Load() || steps.Load() >= at+60, nil })
		act()
	}
	cancel()
	wg.Wait()
}

// compared waits until a process has compared all rows of a table with the truth of its cell, at
// rest. It requires no difference: rows of other truths do not count.
func (c *cellular) compared(name, table string) {
	c.t.Helper()
	var rows int64
	if err := c.system.QueryRow(c.t.Context(), `SELECT count(*) FROM `+table).Scan(&rows); err != nil {
		c.t.Fatal(err)
	}
	verified := func() float64 {
		return testkit.Metric(c.t, c.metrics[name], "tidings_projection_verified_entities_total", name)
	}
	drift := func() float64 {
		return testkit.Metric(c.t, c.metrics[name], "tidings_projection_differences_total", name)
	}
	before, at := drift(), verified()
	testkit.Eventually(c.t, "comparisons with the truth while all runs",
		func() (bool, error) { return verified() >= at+float64(2*rows), nil })
	if n := drift() - before; n > 0 {
		c.t.Errorf("%s: %v differences from one truth", name, n)
	}
}

// awaitAsOf waits until as_of reports that reads include every write, by the clock and the streams
// of the tenant's cell.
func (c *cellular) awaitAsOf(r *resident) {
	c.t.Helper()
	written := time.Now()
	testkit.Eventually(c.t, fmt.Sprintf("as_of of tenant %d to pass", r.tenant), func() (bool, error) {
		var counts struct {
			AsOf time.Time `json:"as_of"`
		}
		err := r.client.read(http.MethodGet, "/v1/users/1/counts", "", &counts)
		return counts.AsOf.After(written), err
	})
}

// refusals tries operations that would treat one truth as all of them.
func (c *cellular) refusals(x *cell) {
	c.t.Helper()
	ctx, p := c.t.Context(), projection(consumerNames[0], x.kinds.Now)
	foreign := projections.Key{Type: "follow", TenantID: 3, Aggregate: "1", Other: "2"}
	if err := verify.RepairKeys(ctx, c.deps(x), p, foreign); !errors.Is(err, cells.ErrShared) {
		c.t.Errorf("repair of a tenant of another truth: %v", err)
	}
	if _, err := replay.Run(ctx, replay.Deps{URL: c.projected.URL, Postgres: tuned, Truth: x.system, JetStream: c.js, Broker: x.broker,
		Log: testkit.Logger(c.t)}, p, replay.Options{From: replay.Truth}); !errors.Is(err, cells.ErrShared) {
		c.t.Errorf("replay by one truth: %v", err)
	}
	every := upkeep.Default()
	every.FollowHistoryAfter = upkeep.Span(time.Nanosecond)
	list, err := upkeep.Jobs(upkeep.Config{Retention: upkeep.RetentionConfig{Every: time.Hour},
		OutboxArchive: outbox.ArchiveConfig{Every: time.Hour, RangeRows: 1000, RangeAge: time.Hour}},
		upkeep.Deps{Truth: x.system, Projections: c.system, Cell: x.name, Kinds: x.kinds.Now, Registry: prometheus.NewRegistry(),
			Log: testkit.Logger(c.t)}, func(context.Context) (upkeep.Settings, error) {
			return every, nil
		})
	if err != nil {
		c.t.Fatal(err)
	}
	retention := list[slices.IndexFunc(list, func(j jobs.Job) bool { return j.Name == "retention" })]
	if _, err := retention.Plan(ctx); !errors.Is(err, cells.ErrShared) {
		c.t.Errorf("retention by one truth: %v", err)
	}
}
