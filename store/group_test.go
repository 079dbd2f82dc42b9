package store_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

// cutConn is a connection that ends before it passes a message on.
type cutConn struct {
	net.Conn
	read, write func(b []byte) (cut bool)
}

func (c *cutConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.read(b[:n]) {
		return 0, errors.Join(io.ErrUnexpectedEOF, c.Close())
	}
	return n, err
}

func (c *cutConn) Write(b []byte) (int, error) {
	if c.write(b) {
		return 0, errors.Join(io.ErrClosedPipe, c.Close())
	}
	return c.Conn.Write(b)
}

// A connection that is cut at COMMIT leaves the writers without an answer. Whether or not the
// server had committed, each writer gets the correct outcome, and each change has one event.
func TestAnAnswerLostAtCommitIsFoundOut(t *testing.T) {
	t.Parallel()
	for name, marks := range map[string]struct{ read, write string }{
		"the server has committed": {read: "\x0bCOMMIT\x00"},
		"COMMIT never arrived":     {write: "commit\x00"},
	} {
		t.Run(name, func(t *testing.T) {
			var seen, cuts atomic.Int64
			every3rd := func(mark string) func([]byte) bool {
				return func(b []byte) bool {
					if mark == "" || !bytes.Contains(b, []byte(mark)) || seen.Add(1)%3 != 1 {
						return false
					}
					cuts.Add(1)
					return true
				}
			}
			db := testkit.Postgres(t)
			s := through(t, db, 4, func(c net.Conn) net.Conn {
				return &cutConn{Conn: c, read: every3rd(marks.read), write: every3rd(marks.write)}
			})
			f := fixture{s, db.Pool(t, postgres.RoleSystem)}
			f.follow(t, "1", "2")
			const n = 40
			var wg sync.WaitGroup
			for i := range int64(n) {
				wg.Go(func() {
					if out := f.follow(t, event.IDOf(100+i), "2"); !out.Changed || out.Edge.Version != 1 {
						t.Errorf("follow %d: %+v", i, out)
					}
				})
				wg.Go(func() {
					out := f.create(t, store.NewChild{Object: "1", AuthorID: "1", Body: "hello", Key: fmt.Sprint(i)})
					if !out.Changed || out.Replayed || out.Err != nil {
						t.Errorf("create %d: %+v", i, out)
					}
				})
			}
			wg.Wait()
			if cuts.Load() < 2 {
				t.Errorf("%d cuts", cuts.Load())
			}
			if got := len(f.events(t)); got != 1+2*n {
				t.Errorf("%d events, want %d", got, 1+2*n)
			}
		})
	}
}

// lateCommit is a network that lost the client but still carries its COMMIT. The COMMIT arrives
// after somebody has queried the outcome.
type lateCommit struct {
	net.Conn
	armed *atomic.Bool
	asked chan struct{}
	late  *sync.WaitGroup
}

func (c *lateCommit) Write(b []byte) (int, error) {
	if ends := bytes.Contains(b, []byte("rollback\x00")) || bytes.Contains(b, []byte("commit\x00")); ends && !c.armed.Load() {
		select {
		case c.asked <- struct{}{}:
		default:
		}
	}
	if !bytes.Contains(b, []byte("commit\x00")) || !c.armed.CompareAndSwap(true, false) {
		return c.Conn.Write(b)
	}
	server, message := c.Conn, bytes.Clone(b)
	c.Conn, _ = net.Pipe()
	c.late.Go(func() {
		defer server.Close()
		<-c.asked
		_, _ = server.Write(message)
		_, _ = server.Read(make([]byte, 1))
	})
	return 0, errors.Join(io.ErrClosedPipe, c.Conn.Close())
}

// The transaction outlives the connection, and commits after its outcome was queried.
func TestACommitThatArrivesLateIsWaitedFor(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	var armed atomic.Bool
	var late sync.WaitGroup
	asked := make(chan struct{})
	f := fixture{through(t, db, 4, func(c net.Conn) net.Conn { return &lateCommit{c, &armed, asked, &late} }),
		db.Pool(t, postgres.RoleSystem)}
	f.follow(t, "1", "2")
	armed.Store(true)
	if out := f.follow(t, "3", "2"); !out.Changed || out.Edge.Version != 1 {
		t.Errorf("%+v", out)
	}
	late.Wait()
	if n := len(f.events(t)); n != 2 || armed.Load() {
		t.Errorf("%d events, want 2", n)
	}
}

// Somebody holds more locks than writes that run alone have connections. Only writers of the locked
// entities wait.
func TestLockedEntitiesHoldBackTheirOwnWritersAlone(t *testing.T) {
	t.Parallel()
	const (
		early, late = 6, 5
		locked      = early + late
		promised    = 150 * time.Millisecond // docs/faults.md
	)
	db := testkit.Postgres(t)
	f := fixture{through(t, db, 4, func(c net.Conn) net.Conn { return c }), db.Pool(t, postgres.RoleSystem)}
	for i := range int64(locked) {
		f.follow(t, event.IDOf(1+i), "100")
		f.unfollow(t, event.IDOf(1+i), "100")
	}
	lock, err := f.system.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(t.Context()) // committed below
	if _, err := lock.Exec(t.Context(), `SELECT FROM follows FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	var blocked, free sync.WaitGroup
	var changed atomic.Int64
	for i := range int64(40) {
		blocked.Go(func() {
			if f.follow(t, event.IDOf(1+i%early), "100").Changed {
				changed.Add(1)
			}
		})
		for j := range int64(5) {
			free.Go(func() {
				if out := f.follow(t, event.IDOf(1000+5*i+j), "2"); !out.Changed {
					t.Errorf("%+v", out)
				}
			})
		}
	}
	free.Wait() // before the locks are released; otherwise this waits forever
	// Each round has one more writer of a locked entity, and others come while it holds up the
	// group.
	var next atomic.Int64
	round := func() (slowest time.Duration) {
		took := make([]time.Duration, 8)
		for i := range took {
			free.Go(func() {
				began := time.Now()
				f.follow(t, event.IDOf(2000+next.Add(1)), "2")
				took[i] = time.Since(began)
			})
		}
		free.Wait()
		return slices.Max(took)
	}
	var alone, beside []time.Duration
	for i := range int64(late) {
		alone = append(alone, round())
		groups := f.Stats().Groups
		blocked.Go(func() {
			if f.follow(t, event.IDOf(1+early+i), "100").Changed {
				changed.Add(1)
			}
		})
		testkit.Eventually(t, "a group with a locked entity", func() (bool, error) { return f.Stats().Groups > groups, nil })
		beside = append(beside, round())
	}
	if bound := promised + slices.Max(alone); slices.Min(beside) > bound { // a busy machine delays some rounds, a long wait all of them
		t.Errorf("writes of other entities took %s, and %s before: want %s at most", beside, alone, bound)
	}
	if n := changed.Load(); n != 0 {
		t.Errorf("%d writes of locked entities", n)
	}
	if err := lock.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	blocked.Wait()
	if stats, n := f.Stats(), changed.Load(); n != locked || stats.Alone == 0 || stats.Waiting != 0 {
		t.Errorf("%d changes, want %d; %+v", n, locked, stats)
	}
	if got := int64(len(f.events(t))); got != 2*locked+200+next.Load()+locked {
		t.Errorf("%d events", got)
	}
}

func TestAWriteThatTheDatabaseRefusesFailsAlone(t *testing.T) {
	t.Parallel()
	f := open(t)
	const n = 60
	var wg sync.WaitGroup
	for i := range int64(n) {
		wg.Go(func() {
			w := store.EdgeWrite{Meta: meta(), From: event.IDOf(10 + i), To: "2"}
			poison := i%20 == 7
			if poison {
				w.TraceParent = "\x00" // invalid as PostgreSQL text
			}
			out, err := f.PutEdges(t.Context(), tenant, follows, []store.EdgeWrite{w})
			if poison != (err != nil) || !poison && !out[0].Changed {
				t.Errorf("follow %d: %+v, %v", i, out, err)
			}
		})
	}
	wg.Wait()
	if got := len(f.events(t)); got != n-3 {
		t.Errorf("%d events, want %d", got, n-3)
	}
	if stats := f.Stats(); stats.Groups >= stats.Grouped || stats.Alone == 0 {
		t.Errorf("no write was grouped, or none failed: %+v", stats)
	}
}

// Two processes write the same few entities at random, single and in slices. There is no deadlock,
// and each writer's outcomes agree with the events.
func TestRandomWritersOfTheSameEntitiesAgreeWithTheEvents(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	stores := []fixture{on(t, db), on(t, db)}
	f := stores[0]
	var comments []event.Child
	for range 5 {
		comments = append(comments, f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "0"}))
	}
	froms := []event.ID{"2", "10", "B", "a.b@example.com", "auth0|1"}
	seed, _ := testkit.Seed(t)
	type entity struct {
		id      string
		version int64
	}
	var mu sync.Mutex
	said := map[entity]int{} // how many writers were told that they made the version
	changed := func(id string, version int64) {
		mu.Lock()
		defer mu.Unlock()
		said[entity{id, version}]++
	}
	var wg sync.WaitGroup
	for worker := range uint64(24) {
		r := rand.New(rand.NewPCG(seed, worker))
		s := stores[worker%2]
		wg.Go(func() {
			for i := range 25 {
				n := 1
				if r.IntN(8) == 0 {
					n = 1 + r.IntN(5)
				}
				var pairs []store.EdgeWrite
				var edits []store.ChildEdit
				for range n {
					pairs = append(pairs, store.EdgeWrite{Meta: meta(), From: froms[r.IntN(len(froms))], To: "100"})
					edits = append(edits, store.ChildEdit{Meta: meta(), ID: comments[r.IntN(len(comments))].ID,
						Body: new(fmt.Sprint(worker, i, r.IntN(2)))})
				}
				var err error
				var out []store.EdgeOutcome
				var edited []store.ChildOutcome
				switch r.IntN(3) {
				case 0:
					out, err = s.PutEdges(t.Context(), tenant, follows, pairs)
				case 1:
					out, err = s.RemoveEdges(t.Context(), tenant, follows, pairs)
				default:
					edited, err = s.EditChildren(t.Context(), tenant, commentKind, edits)
				}
				if err != nil {
					t.Error(err)
					return
				}
				for _, o := range out {
					if o.Changed {
						changed(o.Edge.From.String(), o.Edge.Version)
					}
				}
				for _, o := range edited {
					if o.Changed {
						changed(o.Child.ID, o.Child.Version)
					}
				}
			}
		})
	}
	wg.Wait()
	last := map[string]int64{}
	for _, e := range f.events(t) {
		id, _ := e.Payload["follower_id"].(string)
		if id == "" {
			id = e.Payload["comment_id"].(string)
		}
		version := int64(e.Payload["version"].(float64))
		if version != last[id]+1 {
			t.Fatalf("seed %d: %s: version %d after %d", seed, id, version, last[id])
		}
		last[id] = version
		if e.Type == event.Created && !strings.Contains(e.Aggregate, event.AggregateFollow) {
			continue // of the fixture
		}
		if n := said[entity{id, version}]; n != 1 {
			t.Errorf("seed %d: %d writers were told that they made version %d of %s", seed, n, version, id)
		}
		delete(said, entity{id, version})
	}
	if len(said) > 0 {
		t.Errorf("seed %d: without an event: %v", seed, said)
	}
	conn, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	// A backend reports its counts when it ends, or after a second without work.
	testkit.Eventually(t, "the server has counted the transactions", func() (bool, error) {
		var commits, deadlocks int64
		var data string
		err := conn.QueryRow(t.Context(), `SELECT xact_commit, deadlocks, current_setting('data_directory') FROM pg_stat_database
			WHERE datname = current_database()`).Scan(&commits, &deadlocks, &data)
		if deadlocks > 0 {
			log, logErr := os.ReadFile(filepath.Join(filepath.Dir(data), "postgres.log")) // it names the statements
			t.Fatalf("seed %d: %d deadlocks\n%s%v", seed, deadlocks, log, logErr)
		}
		return commits > 50, err
	})
}

// Thirty tenants write at once through a pool that has one connection for groups. Their writes
// share transactions, each tenant sees only its own rows, and a failed write of one does not stop
// the others.
func TestWritesOfManyTenantsShareATransaction(t *testing.T) {
	t.Parallel()
	const tenants, each = 30, 3
	db := testkit.Postgres(t)
	pool, err := postgres.Open(t.Context(), db.URL, postgres.Config{MaxConns: 4, ConnectTimeout: 5 * time.Second}, postgres.RoleAPI, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	system := db.Pool(t, postgres.RoleSystem)
	s := store.New(pool, nil)
	meta := store.Meta{Actor: "tester"}
	follow := func(tenant int64, follower event.ID) store.EdgeOutcome {
		out, err := s.PutEdges(t.Context(), tenant, follows, []store.EdgeWrite{{Meta: meta, From: follower, To: "1000000"}})
		if err != nil {
			t.Errorf("tenant %d: %v", tenant, err)
			return store.EdgeOutcome{}
		}
		return out[0]
	}
	// Another session locks a row of tenant 7. All other tenants have a row with the same key.
	follow(7, "1")
	if _, err := s.RemoveEdges(t.Context(), 7, follows, []store.EdgeWrite{{Meta: meta, From: "1", To: "1000000"}}); err != nil {
		t.Fatal(err)
	}
	lock, err := system.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock.Exec(t.Context(), `SELECT FROM edges WHERE tenant_id = 7 FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	var wg, locked sync.WaitGroup
	for tenant := int64(1); tenant <= tenants; tenant++ {
		for n := range int64(each) {
			group := &wg
			if tenant == 7 && n == 0 {
				group = &locked
			}
			group.Go(func() {
				out := follow(tenant, event.IDOf(1+n))
				if want := int64(1); !out.Changed || tenant != 7 && out.Edge.Version != want {
					t.Errorf("tenant %d, follower %d: %+v", tenant, 1+n, out)
				}
			})
			wg.Go(func() {
				out, err := s.CreateChildren(t.Context(), tenant, commentKind,
					[]store.NewChild{{Meta: meta, Object: "5", AuthorID: event.IDOf(1 + n), Body: fmt.Sprint(tenant), Key: fmt.Sprint(n)}})
				if err != nil || out[0].Err != nil || !out[0].Changed {
					t.Errorf("tenant %d, comment %d: %+v %v", tenant, n, out, err)
				}
			})
		}
	}
	wg.Wait() // also for the other writes of tenant 7
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	locked.Wait()
	var wrong, events int
	if err := system.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM generate_series(1, $1) tenant
		WHERE (SELECT count(*) FROM edges e WHERE e.tenant_id = tenant AND e.status = 'ACTIVE') <> $2
		           OR (SELECT count(*) FROM children c WHERE c.tenant_id = tenant AND c.body = tenant::text) <> $2),
		       (SELECT count(*) FROM outbox_messages)`, tenants, each).Scan(&wrong, &events); err != nil {
		t.Fatal(err)
	}
	if wrong > 0 || events != 2+2*tenants*each {
		t.Errorf("%d tenants lack their writes; %d events, want %d", wrong, events, 2+2*tenants*each)
	}
	if got := s.Stats(); got.Grouped < 2*got.Groups {
		t.Errorf("%d writes in %d transactions: none was shared", got.Grouped, got.Groups)
	}
}
