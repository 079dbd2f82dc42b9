package endtoend_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	tenants = 2
	writers = 2                      // per tenant
	pace    = 15 * time.Millisecond  // between the writes of one writer
	slow    = 60 * time.Millisecond  // between the steps of the others, which are many requests
	rare    = 500 * time.Millisecond // between the runs of the archiver; each run takes every thread
	between = 80                     // writes between two faults
)

func TestWhatIsServedEqualsAModelOverAKillAndAResize(t *testing.T) {
	seed, _ := testkit.Seed(t)
	property(t, seed, newLine, []string{"kill", "resize"})
}

// property runs writers, walkers and readers of their own writes during the faults. The seed gives
// the order of the faults. In the end it compares everything.
func property(t *testing.T, seed uint64, start func(*testing.T, *rand.Rand) *line, faults []string) {
	rng := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, n)) }
	l := start(t, rng(0))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	// until repeats step until the faults are over. The first error ends everything.
	until := func(what string, pace time.Duration, count *atomic.Int64, step func() error) {
		wg.Go(func() {
			tick := time.NewTicker(pace)
			defer tick.Stop()
			for ctx.Err() == nil {
				l.quiet.RLock()
				err := step()
				l.quiet.RUnlock()
				if err != nil {
					l.failed.Store(true)
					t.Errorf("%s: %v", what, err)
					return
				}
				count.Add(1)
				select {
				case <-ctx.Done():
				case <-tick.C:
				}
			}
		})
	}
	var writes, own, walks atomic.Int64
	models, kindModels := make([]*model, tenants+1), make([][]*kindModel, tenants+1)
	var exporters []*exporter
	l.clients = make([]client, tenants+1)
	for tenant := int64(1); tenant <= tenants; tenant++ {
		token, err := tokens.Create(t.Context(), l.system, tenant, "tester", tokens.Roles(), time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		m, c := newModel(), client{ctx: t.Context(), handler: l.handler, token: token}
		models[tenant], l.clients[tenant] = m, c
		for n := range int64(writers) {
			w := &writer{client: c, m: m, rng: rng(uint64(100*tenant + n)), store: l.store, tenant: tenant, n: n}
			until(fmt.Sprintf("writer %d of tenant %d", n, tenant), pace, &writes, w.step)
		}
		s := &session{writer: writer{client: c, m: m, rng: rng(uint64(100*tenant + 50)), store: l.store, tenant: tenant, n: 50},
			tokens: map[string]string{}}
		until(fmt.Sprintf("reader of its own writes of tenant %d", tenant), slow, &own, s.step)
		shared, owned := newKindModel(), newKindModel()
		kindModels[tenant] = []*kindModel{shared, owned}
		for n := range int64(writers) {
			w := &kindWriter{client: c, m: shared, rng: rng(uint64(100*tenant + 20 + n)), store: l.store, set: l.kinds.Now, tenant: tenant,
				people: 20_000 + 1000*int(n), objects: []event.ID{"1", "a.b@example.com", idOf(3)}}
			until(fmt.Sprintf("writer %d of other kinds of tenant %d", n, tenant), pace, &writes, w.step)
		}
		o := &kindWriter{client: c, m: owned, rng: rng(uint64(100*tenant + 51)), store: l.store, set: l.kinds.Now, tenant: tenant}
		o.begin(30_000, 1000)
		until(fmt.Sprintf("reader of its own writes of other kinds of tenant %d", tenant), slow, &own, o.step)
		walker := &walker{client: c, m: m, kinds: shared, rng: rng(uint64(100*tenant + 60)), lived: map[string]map[string]bool{}}
		until(fmt.Sprintf("walker of tenant %d", tenant), slow, &walks, walker.step)
		x := &exporter{client: c, rng: rng(uint64(100*tenant + 70)), set: l.kinds.Now, tenant: tenant}
		exporters = append(exporters, x)
		until(fmt.Sprintf("exporter of tenant %d", tenant), slow, &walks, x.step)
	}
	archiver, runs := l.newMover(), atomic.Int64{}
	until("the archiver of comments", rare, &runs, func() error {
		err := archiver.Run(ctx, archiver)
		if ctx.Err() != nil || l.pair != nil && postgres.IsTransient(err) { // its next run continues
			return nil
		}
		return err
	})

	l.rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for _, what := range faults {
		at := writes.Load()
		testkit.Eventually(t, "writes between two faults",
			func() (bool, error) { return l.failed.Load() || writes.Load() >= at+between, nil })
		if l.failed.Load() {
			break
		}
		l.fault(what)
	}
	at, seen := writes.Load(), own.Load()
	testkit.Eventually(t, "writes after the faults", func() (bool, error) {
		return l.failed.Load() || writes.Load() >= at+between && own.Load() >= seen+5, nil
	})
	cancel()
	wg.Wait()
	l.settle()

	for tenant := int64(1); tenant <= tenants; tenant++ {
		if err := equalTenant(l.clients[tenant], models[tenant], rng(uint64(tenant))); err != nil {
			t.Errorf("tenant %d: %v", tenant, err)
		}
		for _, m := range kindModels[tenant] {
			if err := m.equal(l.clients[tenant], rng(uint64(tenant)), l.kinds.Now()); err != nil {
				t.Errorf("tenant %d: %v", tenant, err)
			}
		}
	}
	l.verify()
	l.joined(exporters)
	if _, err := store.CheckShelving(t.Context(), l.system, l.kinds.Now(), func(f store.ShelvingFlaw) { t.Error(f) }); err != nil {
		t.Error(err)
	}
	back, away := l.store.ThreadsReturned(), archiver.counts[store.CountThreadsShelved]
	if away == 0 || back == 0 { // some returned before they had left completely
		t.Errorf("%d threads went to the archive and %d came back", away, back)
	}
	t.Logf("%d steps of writers, %d reads of own writes, %d reads overlaid, %d walks, %d threads shelved, %d brought back",
		writes.Load(), own.Load(), l.overlaid(), walks.Load(), away, back)
}

// equalTenant compares everything that the API serves for a tenant.
func equalTenant(c client, m *model, rng *rand.Rand) error {
	var errs []error
	for post := range m.posts {
		errs = append(errs, equalPost(c, m, rng, post, -1))
	}
	errs = append(errs, equalWalk(c, "/v1/moderation/pending", 1+rng.IntN(50), nil, m.list("", pending)))
	all := m.users()
	for i, user := range all {
		if testkit.Number(user) < fans || testkit.Number(user) >= 10_000 || i%20 == 0 {
			errs = append(errs, equalUser(c, m, rng, user), equalAuthor(c, m, rng, user))
		}
	}
	for len(all) > 0 {
		n := min(len(all), 20)
		errs = append(errs, equalRelations(c, m, rng, all[:n]))
		all = all[n:]
	}
	return errors.Join(errs...)
}

// verify also compares the projections with the truth. It searches for dead letters, and for events
// that the consumers themselves applied twice. (A replay applies events in their place; they never
// get those.)
func (l *line) verify() {
	l.t.Helper()
	report := func(d projections.Difference) { l.t.Error(d) }
	for _, p := range fleet.Projections(l.kinds.Now) {
		if _, err := p.Verify(l.t.Context(), l.system, l.system, report); err != nil {
			l.t.Error(err)
		}
	}
	var dead int
	if err := l.system.QueryRow(l.t.Context(), `SELECT count(*) FROM consumer_dead_letters`).Scan(&dead); err != nil || dead > 0 {
		l.t.Errorf("%d dead letters, %v", dead, err)
	}
	var once, more int
	if err := l.system.QueryRow(l.t.Context(),
		`SELECT count(*) FILTER (WHERE times = 1), count(*) FILTER (WHERE times > 1) FROM delivered`).Scan(&once, &more); err != nil ||
		once == 0 || more > 0 {
		l.t.Errorf("%d events were applied once, %d more than once, %v", once, more, err)
	}
}

// overlaid returns the number of reads that overlaid writes which the projection had not applied.
func (l *line) overlaid() int {
	return int(testkit.Metric(l.t, l.reg, "tidings_api_overlaid_reads_total"))
}

// walker walks over lists during writes, page by page. It remembers the rows that it has seen and
// that no writer removes.
type walker struct {
	client
	m     *model
	kinds *kindModel
	rng   *rand.Rand
	lived map[string]map[string]bool // by list: rows that no writer removes
}

func (w *walker) step() error {
	limit := 5 + w.rng.IntN(40)
	if path := fmt.Sprintf("/v1/users/%d/followers", celebrity); w.rng.IntN(4) == 0 {
		rows, _, err := walk[edge](w.client, path, limit, nil)
		var ids []string
		for _, r := range rows {
			ids = append(ids, r.User)
		}
		return errors.Join(err, w.met(path, ids, func(id string) bool { return testkit.Number(event.ID(id)) >= fans }))
	}
	if path := "/v1/conversations/1/messages?order=" + []string{"oldest", "newest"}[w.rng.IntN(2)]; w.rng.IntN(3) == 0 {
		rows, _, err := walk[struct {
			ID string `json:"message_id"`
		}](w.client, path, limit, nil)
		var ids []string
		for _, r := range rows {
			ids = append(ids, r.ID)
		}
		return errors.Join(err, w.met(path, ids, w.kinds.kept))
	}
	path := "/v1/posts/1/comments?order=" + []string{"oldest", "newest", "threaded"}[w.rng.IntN(3)]
	rows, _, err := walk[comment](w.client, path, limit, nil)
	var ids []string
	for _, r := range rows {
		ids = append(ids, r.ID)
	}
	return errors.Join(err, w.met(path, ids, w.m.kept))
}

// met compares one walk with the rows that existed before it began.
func (w *walker) met(list string, ids []string, stays func(id string) bool) error {
	seen := map[string]bool{}
	for _, id := range ids {
		if seen[id] {
			return fmt.Errorf("%s: %s comes twice in one walk", list, id)
		}
		seen[id] = true
	}
	for id := range w.lived[list] {
		if !seen[id] {
			return fmt.Errorf("%s: the walk of %d rows lacks %s, which existed before it", list, len(ids), id)
		}
	}
	if w.lived[list] == nil {
		w.lived[list] = map[string]bool{}
	}
	for id := range seen {
		if stays(id) {
			w.lived[list][id] = true
		}
	}
	return nil
}
