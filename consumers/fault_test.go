package consumers_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// Instances under fault are child processes: the test binary again, with its configuration in
// childEnv.
const childEnv = "TIDINGS_TEST_CONSUMER"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
		return
	}
	testkit.Main(m)
}

// childConfig has the addresses of a child's servers, the duration of its leases, and the crash
// point at which the child sends a signal to itself. An empty Step means no signal.
type childConfig struct {
	DatabaseURL string
	Broker      broker.Config
	TTL         time.Duration
	Step        string
	Signal      syscall.Signal
}

// child runs an instance with childConfig. It exits when its standard input ends, so that it does
// not outlive the test.
func child() {
	var c childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &c); err != nil {
		panic(err)
	}
	testkit.EndWithTest(nil)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	pool, err := postgres.Open(ctx, c.DatabaseURL, postgres.Config{MaxConns: 8, ConnectTimeout: 30 * time.Second},
		postgres.RoleConsumer, name)
	if err != nil {
		panic(err)
	}
	nc, err := broker.Connect(c.Broker, name, log)
	if err != nil {
		panic(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		panic(err)
	}
	cfg := config()
	cfg.Lease.TTL = c.TTL
	in, err := consumers.New(cfg, consumers.Deps{Pool: pool, JetStream: js,
		Streams:  consumers.Streams{Name: c.Broker.Stream, Prefix: c.Broker.Prefix, Timeout: c.Broker.Timeout},
		Registry: prometheus.NewRegistry(), Log: log}, logbook{})
	if err != nil {
		panic(err)
	}
	in.SetStep(func(step string) {
		if step != c.Step {
			return
		}
		c.Step = "" // once
		testkit.SignalSelf(c.Signal)
	})
	if err := in.Run(ctx); err != nil {
		panic(err)
	}
	nc.Close()
	pool.Close()
}

// child starts an instance in its own process. The instance sends sig to itself at the crash point
// step.
func (r *rig) child(t *testing.T, ttl time.Duration, step string, sig syscall.Signal) *testkit.Process {
	t.Helper()
	cfg, err := json.Marshal(childConfig{DatabaseURL: r.url, Broker: r.cfg, TTL: ttl, Step: step, Signal: sig})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+string(cfg))
	return testkit.Spawn(t, "instance", cmd)
}

// steps are the crash points of a batch.
var steps = []string{"after collect", "after offsets", "before commit", "after commit"}

func TestAConsumerKilledAtAnyStepAppliesEverythingOnce(t *testing.T) {
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			want := r.flood(200)
			r.child(t, time.Second, step, syscall.SIGKILL).AwaitKilled()
			want = append(want, r.flood(100)...)
			r.run(r.system, logbook{})
			r.awaitLag(0)
			r.wantLines(want)
		})
	}
}

// TestAConsumerFrozenPastItsLeaseThawsWithoutEffect freezes an instance in its batch, with or
// without an open transaction, until another instance has applied the same events. Then the frozen
// one continues with its old batch.
func TestAConsumerFrozenPastItsLeaseThawsWithoutEffect(t *testing.T) {
	for _, step := range steps {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t), partitions)
			want := r.flood(200)
			victim := r.child(t, time.Second, step, syscall.SIGSTOP)
			victim.AwaitStopped()
			r.run(r.system, logbook{})
			want = append(want, r.flood(100)...)
			r.awaitLag(0)
			victim.Signal(syscall.SIGCONT)
			r.awaitShares("both to have their share", 2)
			want = append(want, r.flood(100)...)
			r.awaitLag(0)
			r.wantLines(want)
		})
	}
}

// partitions is the number of partitions in the tests of shares.
const partitions = 8

// awaitShares waits until the given number of instances holds all partitions, in shares that differ
// by at most one.
func (r *rig) awaitShares(what string, instances int) {
	r.t.Helper()
	begun := time.Now()
	testkit.Eventually(r.t, what, func() (bool, error) {
		holders, err := lease.Holders(context.Background(), r.system, name)
		if err != nil {
			return false, err
		}
		shares := map[string]int{}
		for _, h := range holders {
			shares[h.Owner]++
		}
		if len(holders) != partitions || len(shares) != instances {
			return false, fmt.Errorf("%d partitions are held: %v", len(holders), shares)
		}
		for _, n := range shares {
			if n < partitions/instances || n > (partitions+instances-1)/instances {
				return false, fmt.Errorf("shares of %v", shares)
			}
		}
		return true, nil
	})
	r.t.Logf("%s: after %s", what, time.Since(begun).Round(time.Millisecond))
}

// leasesOf returns how many leases name the process as their owner, also if they have expired.
func (r *rig) leasesOf(p *testkit.Process) (n int) {
	r.t.Helper()
	if err := r.system.QueryRow(context.Background(), `SELECT count(*) FROM leases WHERE kind = $1 AND owner LIKE '%-' || $2::text || '-%'`,
		name, fmt.Sprint(p.PID())).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

// deafConn passes all data until a commit is sent. It waits for the answer to the commit, and then
// drops the answer and the connection.
type deafConn struct {
	net.Conn
	armed, deaf bool // only the user of the connection reads and sets them
}

func (c *deafConn) Write(b []byte) (int, error) {
	c.deaf = c.armed && len(b) > 5 && bytes.HasPrefix(b[5:], []byte("commit")) // a simple query, behind its type and length
	return c.Conn.Write(b)
}

func (c *deafConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.deaf && n > 0 {
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

func TestACommitWhoseAnswerIsLostIsNotRepeated(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	cfg, err := pgxpool.ParseConfig(r.url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["role"] = string(postgres.RoleConsumer)
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &deafConn{Conn: conn}, err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	lost := 0
	in := r.run(pool, logbook{hook: func(_ context.Context, tx pgx.Tx, _ []event.Event) error {
		if lost < 3 {
			lost++
			tx.Conn().PgConn().Conn().(*deafConn).armed = true
		}
		return nil
	}})
	var want []line
	for range 5 {
		want = append(want, r.flood(50)...)
		r.awaitLag(0)
	}
	r.wantLines(want)
	if got := in.metric(t, "tidings_consumer_failures_total"); got < 3 {
		t.Errorf("%v batches failed, want 3", got)
	}
}
