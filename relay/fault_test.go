package relay

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// Relays under fault are child processes: the test binary again, told by childEnv what to be.
const childEnv = "TIDINGS_TEST_RELAY"

// childConfig tells a child where its servers are and at which crash point to send itself which signal.
type childConfig struct {
	DatabaseURL string
	Broker      broker.Config
	Step        string
	Signal      syscall.Signal
}

// leaseTTL of the children: short, so that a takeover does not take the test's time.
const leaseTTL = time.Second

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

// child is a relay process that obeys childConfig.
func child() {
	var c childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &c); err != nil {
		panic(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	pool, err := postgres.Open(ctx, c.DatabaseURL, postgres.Config{MaxConns: 8, ConnectTimeout: 2 * time.Second}, postgres.RoleSystem, "relay")
	if err != nil {
		panic(err)
	}
	cfg := testConfig()
	cfg.Lease.TTL = leaseTTL
	r, err := New(cfg, pool, c.Broker, log, prometheus.NewRegistry())
	if err != nil {
		panic(err)
	}
	var once sync.Once
	r.step = func(step string) {
		if c.Step != "" && step == c.Step {
			once.Do(func() {
				if err := syscall.Kill(os.Getpid(), c.Signal); err != nil {
					panic(err)
				}
			})
		}
	}
	if err := r.Run(ctx); err != nil {
		panic(err)
	}
	pool.Close()
}

// fleet is an outbox with writers on it, a broker, and relays in processes of their own.
type fleet struct {
	t    *testing.T
	url  string
	pool *pgxpool.Pool
	b    *testkit.Broker

	writers sync.WaitGroup
	stop    context.CancelFunc
	written atomic.Int64
}

func newFleet(t *testing.T, db *testkit.DB) *fleet {
	f := &fleet{t: t, url: db.URL, pool: db.Pool(t, postgres.RoleSystem), b: testkit.NATSProcess(t)}
	ctx, stop := context.WithCancel(t.Context())
	f.stop = stop
	rng := seeded(t)
	for range 3 {
		rng := newRand(rng.Uint64())
		f.writers.Go(func() {
			for ctx.Err() == nil {
				if err := appendPairs(ctx, f.pool, rng, 5); err == nil {
					f.written.Add(5)
				} // else the server is away, or the test is over: the transaction counts only if its rows are there
			}
		})
	}
	t.Cleanup(func() { stop(); f.writers.Wait() })
	return f
}

// relay starts a relay process that sends itself sig at the crash point step; none when step is empty.
func (f *fleet) relay(step string, sig syscall.Signal) *process {
	f.t.Helper()
	cfg, err := json.Marshal(childConfig{DatabaseURL: f.url, Broker: f.b.Config(), Step: step, Signal: sig})
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+string(cfg))
	var out strings.Builder
	cmd.Stderr = &out
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	p := &process{t: f.t, cmd: cmd, ended: make(chan struct{})}
	go func() { _ = cmd.Wait(); close(p.ended) }() // how it ended is what the tests caused
	f.t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		<-p.ended
		if f.t.Failed() {
			f.t.Logf("relay %d at %q:\n%s", cmd.Process.Pid, step, out.String())
		}
	})
	return p
}

type process struct {
	t     *testing.T
	cmd   *exec.Cmd
	ended chan struct{}
}

// awaitEnd waits until the process is gone.
func (p *process) awaitEnd() {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		p.t.Fatalf("relay %d does not end", p.cmd.Process.Pid)
	}
}

// awaitStopped waits until the process has stopped itself.
func (p *process) awaitStopped() {
	p.t.Helper()
	testkit.Eventually(p.t, 20*time.Second, "the relay to freeze", func() (bool, error) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
		if err != nil {
			return false, err
		}
		_, after, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(after, "T"), nil
	})
}

func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// awaitTakeover waits until everything that is committed now has been published by somebody.
func (f *fleet) awaitTakeover() {
	f.t.Helper()
	var upTo int64
	if err := f.pool.QueryRow(f.t.Context(), `SELECT coalesce(max(id), 0) FROM outbox_messages`).Scan(&upTo); err != nil {
		f.t.Fatal(err)
	}
	testkit.Eventually(f.t, 30*time.Second, "the other relays to take over", func() (bool, error) {
		var pending int
		err := f.pool.QueryRow(f.t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND id <= $1`, upTo).Scan(&pending)
		return pending == 0, err
	})
}

// check stops the writers, waits for the relays, and checks every promise.
func (f *fleet) check() {
	f.t.Helper()
	f.stop()
	f.writers.Wait()
	awaitDrained(f.t, f.t.Context(), f.pool, 40*time.Second)
	checkStream(f.t, f.t.Context(), f.pool, f.b)
	if f.written.Load() < 50 {
		f.t.Errorf("only %d transactions were written", f.written.Load())
	}
}

func TestARelayKilledAtAnyStepLosesAndDoublesNothing(t *testing.T) {
	for _, step := range []string{"after claim", "before commit", "after ack", "after mark"} {
		t.Run(step, func(t *testing.T) {
			f := newFleet(t, testkit.Postgres(t))
			victim := f.relay(step, syscall.SIGKILL)
			victim.awaitEnd()
			f.relay("", 0)
			f.relay("", 0)
			f.awaitTakeover()
			f.check()
		})
	}
}

func TestARelayKilledDuringCatchUpLosesAndDoublesNothing(t *testing.T) {
	f := newFleet(t, testkit.Postgres(t))
	f.relay("after ack", syscall.SIGKILL).awaitEnd()
	f.relay("catch-up", syscall.SIGKILL).awaitEnd()
	f.relay("", 0)
	f.awaitTakeover()
	f.check()
}

func TestARelayFrozenPastItsLeaseThawsWithoutEffect(t *testing.T) {
	for _, step := range []string{"after claim", "before commit", "after ack"} {
		t.Run(step, func(t *testing.T) {
			f := newFleet(t, testkit.Postgres(t))
			victim := f.relay(step, syscall.SIGSTOP)
			victim.awaitStopped()
			f.relay("", 0)
			f.awaitTakeover() // its lease has run out and another has published what it held
			victim.signal(syscall.SIGCONT)
			f.awaitTakeover()
			f.check()
		})
	}
}

func TestTheBrokerIsKilledAndRestarted(t *testing.T) {
	f := newFleet(t, testkit.Postgres(t))
	f.relay("", 0)
	f.relay("", 0)
	f.awaitTakeover()
	for range 2 {
		f.b.Kill(t)
		f.b.Restart(t)
		f.awaitTakeover()
	}
	f.check()
}

func TestPostgreSQLIsShutDownAtOnceAndRestarted(t *testing.T) {
	server := testkit.PostgresProcess(t)
	f := newFleet(t, server.DB(t))
	f.relay("", 0)
	f.relay("", 0)
	f.awaitTakeover()
	server.Restart(t)
	testkit.Eventually(t, 20*time.Second, "PostgreSQL to answer", func() (bool, error) { return f.pool.Ping(t.Context()) == nil, nil })
	f.awaitTakeover()
	f.check()
}
