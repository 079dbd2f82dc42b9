//go:build faults

package subscribe_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/client/clienttest"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

// followers is a read model of one tenant's follows.
type followers struct {
	t      *testing.T
	c      *client.Client
	nc     *nats.Conn
	pool   *pgxpool.Pool
	log    *slog.Logger
	states atomic.Int32 // of exports, in committed or rolled back batches
	in     inChild
}

const followersSQL = `INSERT INTO follows VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (tenant_id, follower, followee) DO UPDATE
	SET created_at = excluded.created_at, version = excluded.version, active = excluded.active
	WHERE (follows.created_at, follows.version) < (excluded.created_at, excluded.version)`

func newFollowers(t *testing.T) *followers {
	tenant := clienttest.NewTenant(t)
	in := inChild{URL: tenant.URL, Token: tenant.Token(t), NATS: tenant.NATS, Database: clienttest.Database(t)}
	nc, err := nats.Connect(tenant.NATS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	pool, err := pgxpool.New(t.Context(), in.Database)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `CREATE TABLE follows (tenant_id bigint, follower text, followee text,
		created_at timestamptz NOT NULL, version bigint NOT NULL, active boolean NOT NULL, PRIMARY KEY (tenant_id, follower, followee));
`); err != nil {
		t.Fatal(err)
	}
	return &followers{t: t, c: tenant.Client(t, in.Token), nc: nc, pool: pool, log: testkit.Logger(t), in: in}
}

// childEnv makes this binary an instance of the projection, which kills itself.
const childEnv = "TIDINGS_TEST_PROJECTION"

// inChild has the addresses of a child, and the number of batches that it commits.
type inChild struct {
	URL, Token, NATS, Database string
	Batches                    int
	Handler                    bool // Handle, and calls instead of batches
}

func init() {
	if os.Getenv(childEnv) == "" {
		return
	}
	testkit.EndWithTest(nil)
	var in inChild
	err := json.Unmarshal([]byte(os.Getenv(childEnv)), &in)
	f := &followers{log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
	var errs [3]error
	f.c, errs[0] = client.New(in.URL, client.WithToken(in.Token))
	f.nc, errs[1] = nats.Connect(in.NATS)
	f.pool, errs[2] = pgxpool.New(context.Background(), in.Database)
	if err = errors.Join(append(errs[:], err)...); err == nil {
		run := f.project
		if in.Handler {
			run = f.handle
		}
		err = run(context.Background(), func() bool {
			if in.Batches--; in.Batches < 0 {
				testkit.SignalSelf(syscall.SIGKILL)
			}
			return false
		})
	}
	fmt.Fprintln(os.Stderr, "the projection ended:", err)
	os.Exit(1)
}

// killed starts an instance that kills itself in a transaction after some batches. It waits for the
// end.
func (f *followers) killed(batches int) {
	f.t.Helper()
	in := f.in
	in.Batches = batches
	text, err := json.Marshal(in)
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	testkit.Spawn(f.t, "projection", cmd).AwaitKilled()
}

// resize changes the number of partitions of the servers.
func (f *followers) resize(to int) {
	f.t.Helper()
	at, err := url.Parse(f.in.Database)
	if err != nil {
		f.t.Fatal(err)
	}
	at.Path = "/postgres" // clienttest's servers have the truth there
	pool, err := pgxpool.New(f.t.Context(), at.String())
	if err != nil {
		f.t.Fatal(err)
	}
	defer pool.Close()
	testkit.Eventually(f.t, "an earlier resize ends", func() (bool, error) {
		_, err := outbox.Resize(f.t.Context(), pool, to)
		return err == nil, err
	})
}

// write makes random changes of a few edges.
func (f *followers) write(ctx context.Context, rng *rand.Rand, n int) {
	for range n {
		from, to := client.IDOf(1+rng.IntN(20)), client.IDOf(21+rng.IntN(20))
		var err error
		if rng.IntN(4) == 0 {
			err = f.c.Follows.Remove(ctx, from, to)
		} else {
			_, err = f.c.Follows.Put(ctx, from, to)
		}
		if err != nil && ctx.Err() == nil && !client.HasCode(err, client.CodeNotFound) {
			f.t.Error(err)
			return
		}
	}
}

// project runs an instance. If dies returns true after a batch, its connection to the database ends
// before the commit.
func (f *followers) project(ctx context.Context, dies func() bool) error {
	return projector.Project(ctx, f.nc, f.pool, "followers", func(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
		for i := range batch {
			e, err := subscribe.Decode[event.Edge](kinds.Builtin(), &batch[i])
			if err != nil {
				return err
			}
			if batch[i].Stream == "" {
				f.states.Add(1)
			}
			if _, err := tx.Exec(ctx, followersSQL, batch[i].TenantID, e.From, e.To, e.CreatedAt.Time, e.Version, e.Active()); err != nil {
				return err
			}
		}
		if dies() {
			_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
			return err
		}
		return nil
	}, subscribe.Only(event.AggregateFollow), subscribe.Batch(17), subscribe.Log(f.log), subscribe.Takeover(1e9),
		projector.Bootstrap(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `TRUNCATE follows`)
			return err
		}, f.c),
		projector.Erased(func(ctx context.Context, tx pgx.Tx, tenant int64, person event.ID) error {
			_, err := tx.Exec(ctx, `DELETE FROM follows WHERE tenant_id = $1 AND $2 IN (follower, followee)`, tenant, person)
			return err
		}))
}

// handle runs an instance of a handler that keeps the same read model, and calls dies after each
// call.
func (f *followers) handle(ctx context.Context, dies func() bool) error {
	var mu sync.Mutex
	return subscribe.Handle(ctx, f.nc, "cache", "follow.*", func(ctx context.Context, e subscribe.Event[event.Edge]) error {
		if e.Type == subscribe.Snapshot {
			f.states.Add(1)
		}
		_, err := f.pool.Exec(ctx, followersSQL, e.TenantID, e.Data.From, e.Data.To, e.Data.CreatedAt.Time, e.Data.Version, e.Data.Active())
		mu.Lock()
		defer mu.Unlock()
		dies()
		return err
	}, subscribe.Bootstrap(f.c), subscribe.Takeover(1e9), subscribe.Concurrency(2), subscribe.Log(f.log))
}

// settle waits until the read model equals the truth.
func (f *followers) settle() {
	f.t.Helper()
	testkit.Eventually(f.t, "the read model equals the truth", func() (bool, error) {
		type edge struct {
			version int64
			active  bool
		}
		want, tenant := make(map[[2]string]edge), int64(0)
		x := f.c.Follows.Export()
		for s, err := range x.All(f.t.Context()) {
			if err != nil {
				return false, err
			}
			e := event.Event{AggregateType: event.AggregateFollow, AggregateID: event.ID(s.Subject), Type: event.Created, Version: 1,
				Payload: s.Data}
			d, err := subscribe.Decode[event.Edge](kinds.Builtin(), &e)
			if err != nil {
				return false, err
			}
			want[[2]string{string(d.From), string(d.To)}] = edge{d.Version, d.Active()}
		}
		tenant = x.Head().Tenant
		got := make(map[[2]string]edge)
		rows, _ := f.pool.Query(f.t.Context(), `SELECT follower, followee, version, active FROM follows WHERE tenant_id = $1`, tenant)
		var k [2]string
		var e edge
		if _, err := pgx.ForEachRow(rows, []any{&k[0], &k[1], &e.version, &e.active}, func() error {
			got[k] = e
			return nil
		}); err != nil {
			return false, err
		}
		if !maps.Equal(want, got) {
			return false, fmt.Errorf("%d edges, want %d", len(got), len(want))
		}
		return len(want) > 100, nil
	})
}

// TestAProjectionBeginsWithExportsAndContinuesOnTheStreams kills instances at random batches while
// clients write.
func TestAProjectionBeginsWithExportsAndContinuesOnTheStreams(t *testing.T) {
	f := newFollowers(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	f.write(t.Context(), rng, 400)
	writing, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	other := rand.New(rand.NewPCG(seed, 1))
	writers.Go(func() {
		for writing.Err() == nil {
			f.write(writing, other, 10)
		}
	})
	for range 25 {
		ctx, kill := context.WithCancel(t.Context())
		left := new(atomic.Int32)
		left.Store(int32(rng.IntN(6)))
		var instances sync.WaitGroup
		for range 1 + rng.IntN(2) {
			instances.Go(func() {
				if err := f.project(ctx, func() bool {
					if left.Add(-1) >= 0 {
						return false
					}
					time.AfterFunc(0, kill) // after the connection, whose end it must not hide
					return true
				}); err != nil {
					t.Error(err)
				}
			})
		}
		instances.Wait()
		kill()
	}
	stop()
	writers.Wait()
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.project(ctx, func() bool { return false }) }()
	f.settle()
	end()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if f.states.Load() < 100 { // of some 250
		t.Errorf("apply had %d states of exports", f.states.Load())
	}
}

// TestAProjectionBeginsAgainWhenEventsExpire lets events expire while the projection is down.
func TestAProjectionBeginsAgainWhenEventsExpire(t *testing.T) {
	f := newFollowers(t)
	rng := rand.New(rand.NewPCG(1, 2))
	f.write(t.Context(), rng, 300)
	run := func() (stop func()) {
		ctx, end := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- f.project(ctx, func() bool { return false }) }()
		return func() {
			end()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	stop := run()
	f.settle()
	stop()
	before := f.states.Load()
	f.write(t.Context(), rng, 100)
	js, err := jetstream.New(f.nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "EVENTS-0")
	if err != nil {
		t.Fatal(err)
	}
	testkit.Expire(t, stream, 0)
	f.write(t.Context(), rng, 50)
	stop = run()
	f.settle()
	f.write(t.Context(), rng, 50)
	f.settle()
	stop()
	if f.states.Load() == before {
		t.Error("the projection read no export again")
	}
}

// TestAProjectionIsReadyAfterItWasFilledAgain has an API that fails for a moment.
func TestAProjectionIsReadyAfterItWasFilledAgain(t *testing.T) {
	x := newExporting(t, 1)
	pool := x.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	health := &subscribe.Health{}
	run := func() *running {
		return x.start(func(ctx context.Context) error {
			return projector.Project(ctx, x.nc, pool, "search", func(context.Context, pgx.Tx, []event.Event) error { return nil },
				subscribe.Only("follow"), subscribe.Takeover(time.Second), subscribe.Report(health), subscribe.Log(testkit.Logger(t)),
				projector.Bootstrap(noClear, x.client), projector.Erased(noErased))
		})
	}
	ready := func() {
		t.Helper()
		x.await("readiness", func() (bool, error) {
			err := health.Ready(t.Context())
			return err == nil, err
		})
	}
	x.write(1, 2)
	p := run()
	ready()
	stopped(t, p)
	x.write(3, 4)
	x.expire(0, 4)
	x.refuses.Store(http.StatusInternalServerError)
	p = run()
	x.await("the failure of the API", func() (bool, error) {
		err := health.Ready(t.Context())
		return err != nil && strings.Contains(err.Error(), "refused"), nil
	})
	x.refuses.Store(0)
	ready()
	stopped(t, p)
}

// TestAProjectionIsKilledInItsExportsOverResizes kills the process of the projection by SIGKILL,
// while clients write and the partitions are resized: before the first state is committed, within
// the exports, and on the streams.
func TestAProjectionIsKilledInItsExportsOverResizes(t *testing.T) {
	f := newFollowers(t)
	f.killedOverResizes(f.project, 6)
}

// TestAHandlerIsKilledInItsExportsOverResizes does the same with Handle, at random calls.
func TestAHandlerIsKilledInItsExportsOverResizes(t *testing.T) {
	f := newFollowers(t)
	f.in.Handler = true
	f.killedOverResizes(f.handle, 120)
}

func (f *followers) killedOverResizes(run func(ctx context.Context, dies func() bool) error, most int) {
	t := f.t
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng, other := rand.New(rand.NewPCG(seed, 0)), rand.New(rand.NewPCG(seed, 1))
	f.write(t.Context(), rng, 400)
	writing, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	writers.Go(func() {
		for writing.Err() == nil {
			f.write(writing, other, 10)
		}
	})
	partitions := map[int]int{2: 2, 4: 4, 6: 1}
	for round := range 8 {
		if to := partitions[round]; to > 0 {
			f.resize(to)
		}
		f.killed(rng.IntN(most))
	}
	stop()
	writers.Wait()
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- run(ctx, func() bool { return false }) }()
	f.settle()
	end()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
