package relay

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
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

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// Relays under fault are child processes: the test binary runs itself again, and childEnv holds its
// configuration.
const childEnv = "TIDINGS_TEST_RELAY"

// childConfig has a child's servers, the TTL of its leases, and the signal that it sends itself at
// a crash point.
type childConfig struct {
	DatabaseURL string
	Broker      broker.Config
	TTL         time.Duration
	MaxConns    int
	AtomicFrom  int
	FloorEvery  time.Duration
	Patient     bool
	crash
}

// crash is a signal that a child sends itself when it reaches a crash point for the nth time; 0
// means 1. A child reads further ones from its standard input, as lines of JSON. An empty step
// cancels the last one. After the signal, the child logs that it reached Then.
type crash struct {
	Step   string
	Signal syscall.Signal
	Nth    int
	Then   string
}

// leaseTTL of the children: short, so that takeovers are fast. A heartbeat has half of it, so a
// machine that is slow now gets more.
var leaseTTL = testkit.Stretched(time.Second)

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, seed)) }

// crashPoint holds the next crash of a child.
type crashPoint struct {
	mu   sync.Mutex
	next crash
}

func (c *crashPoint) set(next crash) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next = next
}

func (c *crashPoint) at(step string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next.Step == "" || c.next.Step != step {
		return
	}
	if c.next.Nth--; c.next.Nth > 0 {
		return
	}
	sig := c.next.Signal
	c.next = crash{Step: c.next.Then}
	fmt.Fprintf(os.Stderr, "reached %q\n", step)
	if sig == 0 {
		return
	}
	testkit.SignalSelf(sig)
}

// child is a relay process that obeys childConfig. It ends with its standard input, so that none
// outlives the test.
func child() {
	var c childConfig
	if err := json.Unmarshal([]byte(os.Getenv(childEnv)), &c); err != nil {
		panic(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	pool, err := postgres.Open(ctx, c.DatabaseURL, postgres.Config{MaxConns: c.MaxConns, ConnectTimeout: 2 * time.Second},
		postgres.RoleRelay, "relay")
	if err != nil {
		panic(err)
	}
	cfg := testConfig()
	cfg.Lease.TTL = c.TTL
	if c.Patient {
		cfg.PublishTimeout = time.Minute
	}
	r, err := New(cfg, pool, c.Broker, log, prometheus.NewRegistry())
	if err != nil {
		panic(err)
	}
	point := &crashPoint{next: c.crash}
	r.step, r.pace.from, r.floorEvery = point.at, c.AtomicFrom, c.FloorEvery
	testkit.EndWithTest(func(message json.RawMessage) {
		var next crash
		if err := json.Unmarshal(message, &next); err != nil {
			panic(err)
		}
		point.set(next)
	})
	if err := r.Run(ctx); err != nil {
		panic(err)
	}
	pool.Close()
}

// fleet is an outbox with writers, a broker, and relays in separate processes.
type fleet struct {
	t      *testing.T
	url    string
	pool   *pgxpool.Pool
	b      *testkit.Broker
	binary string // runs as a relay if the environment says so: this binary or a mutant of it

	writers sync.WaitGroup
	quiet   sync.RWMutex                    // keeps all writers except its holder from starting
	write   func(func(ctx context.Context)) // adds a writer that ends with ctx
	stop    context.CancelFunc
	written atomic.Int64

	belowFloor atomic.Int64 // rows that the relays report below a floor
	refused    atomic.Int64 // how often a relay refused a stream
}

func newFleet(t *testing.T, db *testkit.DB) *fleet { return seededFleet(t, db, seeded(t)) }

func seededFleet(t *testing.T, db *testkit.DB, rng *rand.Rand) *fleet {
	return fleetOn(t, db, testkit.NATSProcess(t), rng)
}

func fleetOn(t *testing.T, db *testkit.DB, b *testkit.Broker, rng *rand.Rand) *fleet {
	f := &fleet{t: t, url: db.URL, pool: db.Pool(t, postgres.RoleSystem), b: b, binary: os.Args[0]}
	ctx, stop := context.WithCancel(t.Context())
	f.stop = stop
	f.write = func(writer func(ctx context.Context)) { f.writers.Go(func() { writer(ctx) }) }
	for range 3 {
		rng := newRand(rng.Uint64())
		f.write(func(ctx context.Context) {
			for ctx.Err() == nil {
				f.quiet.RLock()
				// Commit to the end: otherwise the server might commit after the test has read the
				// outbox.
				err := appendPairs(context.WithoutCancel(ctx), f.pool, rng, 5)
				f.quiet.RUnlock()
				if err == nil {
					f.written.Add(5)
				} // otherwise the server is unavailable or the test is over: the transaction counts only if its rows exist
				select {
				case <-ctx.Done():
				case <-time.After(10 * time.Millisecond): // leaves processor time to the relays
				}
			}
		})
	}
	t.Cleanup(func() { stop(); f.writers.Wait() })
	return f
}

// resize requests a number of partitions.
func (f *fleet) resize(to int) {
	f.t.Helper()
	if _, err := outbox.Resize(f.t.Context(), f.pool, to); err != nil {
		f.t.Fatal(err)
	}
}

// links are the proxies between a relay and its servers.
type links struct{ db, nats *testkit.Proxy }

func (f *fleet) links() links {
	f.t.Helper()
	return links{db: testkit.NewProxy(f.t, parse(f.t, f.url).Host), nats: testkit.NewProxy(f.t, parse(f.t, f.b.URL).Host)}
}

func parse(t *testing.T, raw string) *url.URL {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// withHost returns a server's address with the address of p in place of its host.
func withHost(t *testing.T, raw string, p *testkit.Proxy) string {
	t.Helper()
	u := parse(t, raw)
	u.Host = p.Addr()
	return u.String()
}

// options configures a relay process; the zero value is the default.
type options struct {
	crash
	ttl        time.Duration // 0: leaseTTL
	maxConns   int           // 0: 8
	atomicFrom int           // 0: as measured
	floorEvery time.Duration // 0: the default
	patient    bool          // its publishes outlast a freeze, so that it sends them when it thaws
	via        links         // nil: a direct connection
}

// batches makes every publish of more than one row an atomic batch; singles makes none.
const batches, singles = 2, 1 << 20

// relay starts a relay process that sends itself sig at the crash point step, or never if step is
// empty.
func (f *fleet) relay(step string, sig syscall.Signal) *process {
	f.t.Helper()
	return f.start(options{crash: crash{Step: step, Signal: sig}})
}

// start starts a relay process.
func (f *fleet) start(o options) *process {
	f.t.Helper()
	c := childConfig{DatabaseURL: f.url, Broker: f.b.Config(), TTL: cmp.Or(o.ttl, leaseTTL), MaxConns: cmp.Or(o.maxConns, 8),
		AtomicFrom: o.atomicFrom, FloorEvery: cmp.Or(o.floorEvery, floorEvery), Patient: o.patient, crash: o.crash}
	if o.via != (links{}) {
		c.DatabaseURL, c.Broker.URL = withHost(f.t, f.url, o.via.db), withHost(f.t, f.b.URL, o.via.nats)
	}
	cfg, err := json.Marshal(c)
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command(f.binary)
	cmd.Env = append(os.Environ(), childEnv+"="+string(cfg))
	cmd.Stderr = counter{&f.belowFloor, &f.refused}
	return &process{testkit.Spawn(f.t, "relay", cmd), f.t}
}

type process struct {
	*testkit.Process
	t *testing.T
}

// counter counts a relay's reports of rows below a floor and of refused streams.
type counter struct{ belowFloor, refused *atomic.Int64 }

func (c counter) Write(p []byte) (int, error) {
	c.belowFloor.Add(int64(bytes.Count(p, []byte(`msg="a row below the floor`))))
	c.refused.Add(int64(bytes.Count(p, []byte(`msg="partition stopped until`))))
	return len(p), nil
}

// arm tells the relay where to crash next. The relay may have ended meanwhile.
func (p *process) arm(c crash) { p.Tell(c) }

// stop stops the relay, which then has nothing left to do. It must end cleanly.
func (p *process) stop() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	if code := p.AwaitEnd(); code != 0 {
		p.t.Errorf("the relay ended with exit code %d", code)
	}
}

// awaitReached waits until the process, once it has thawed, has reached the step after its crash.
func (p *process) awaitReached(step string) {
	p.t.Helper()
	if step == "" {
		return
	}
	reached := fmt.Sprintf("reached %q", step)
	testkit.Eventually(p.t, "the thawed relay to log: "+reached, func() (bool, error) { return p.logged(reached), nil })
}

// logged reports that the end of the process's log has text.
func (p *process) logged(text string) bool { return strings.Contains(p.Log(), text) }

// awaitTakeover waits until some relay has published all rows committed by now.
func (f *fleet) awaitTakeover() {
	f.t.Helper()
	var upTo int64
	if err := f.pool.QueryRow(f.t.Context(), `SELECT coalesce(max(id), 0) FROM outbox_messages`).Scan(&upTo); err != nil {
		f.t.Fatal(err)
	}
	testkit.Eventually(f.t, "the other relays to take over", func() (bool, error) {
		var pending int
		err := f.pool.QueryRow(f.t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND id <= $1`,
			upTo).Scan(&pending)
		return pending == 0, err
	})
}

// check stops the writers, waits for the relays, and verifies every promise.
func (f *fleet) check() {
	f.t.Helper()
	testkit.Eventually(f.t, "enough transactions to be written",
		func() (bool, error) { return f.written.Load() >= 50, nil })
	f.stop()
	f.writers.Wait()
	awaitDrained(f.t, f.t.Context(), f.pool, time.Minute)
	checkStream(f.t, f.t.Context(), f.pool, f.b)
	if n := f.belowFloor.Load(); n > 0 {
		f.t.Errorf("the relays found %d rows below a floor", n)
	}
}

// The victim's lease would last for ten minutes, but relays of its host do not wait for the end.
func TestARelayKilledAfterItsAckDoublesNothing(t *testing.T) {
	t.Parallel()
	killed(t, options{crash: crash{Step: "after ack"}, ttl: 10 * time.Minute})
}

// killed kills relays, one after the other, and checks what two others make of it.
func killed(t *testing.T, victims ...options) {
	f := newFleet(t, testkit.Postgres(t))
	for _, o := range victims {
		o.Signal = syscall.SIGKILL
		f.start(o).AwaitKilled()
	}
	f.relay("", 0)
	f.relay("", 0)
	f.awaitTakeover()
	f.check()
}

func TestARelayFrozenWithItsClaimThawsWithoutEffect(t *testing.T) {
	t.Parallel()
	frozen(t, options{crash: crash{Step: "after claim", Then: "refused"}})
}

// frozen freezes a relay past its lease, and thaws it when another has published its rows. It
// compares stream and rows after the end of the thawed relay, so whatever that relay still tried
// has ended too.
func frozen(t *testing.T, o options) {
	f := newFleet(t, testkit.Postgres(t))
	o.Signal, o.patient = syscall.SIGSTOP, true
	victim := f.start(o)
	victim.AwaitStopped()
	f.relay("", 0)
	f.awaitTakeover()
	victim.Signal(syscall.SIGCONT)
	victim.awaitReached(o.Then)
	f.awaitTakeover()
	victim.stop()
	f.check()
}

// TestAFrozenRelayPublishesAnEventThatIsInTheDLQMeanwhile: the stream has got nothing since, so it
// accepts the event.
func TestAFrozenRelayPublishesAnEventThatIsInTheDLQMeanwhile(t *testing.T) {
	t.Parallel()
	f := newFleet(t, testkit.Postgres(t))
	f.stop()
	f.writers.Wait()
	if _, err := f.pool.Exec(t.Context(), `DELETE FROM outbox_messages`); err != nil {
		t.Fatal(err)
	}
	late := insertRow(t, f.pool, 7, "created", `{"version": 1, "follower_id": 1}`)
	victim := f.relay("after claim", syscall.SIGSTOP)
	victim.AwaitStopped()
	row := outbox.Row{Event: event.Event{OutboxID: late}, Attempts: outbox.MaxAttempts}
	if err := f.pool.QueryRow(t.Context(), `UPDATE outbox_messages SET attempts = $2 WHERE id = $1 RETURNING event_id::text`,
		late, row.Attempts).Scan(&row.ID); err != nil {
		t.Fatal(err)
	}
	if _, dead, err := outbox.Fail(t.Context(), f.pool, []outbox.Failure{{Row: row, Error: "refused"}}); err != nil || dead != 1 {
		t.Fatalf("%d messages moved to the DLQ: %v", dead, err)
	}
	other := f.relay("", 0)
	testkit.Eventually(t, "the other relay to take over", func() (free bool, err error) {
		err = f.pool.QueryRow(t.Context(), `SELECT epoch > 1 FROM leases WHERE kind = $1 AND partition = 0`, LeaseKind).Scan(&free)
		return free, err
	})
	victim.Signal(syscall.SIGCONT)
	testkit.Eventually(t, "the event to be on the stream", func() (bool, error) { return len(readStream(t, t.Context(), f.b)) == 1, nil })
	after := insertRow(t, f.pool, 7, "edited", `{"version": 2, "follower_id": 1}`)
	awaitDrained(t, t.Context(), f.pool, time.Minute)
	const duplicate = "an event is on the stream twice"
	testkit.Eventually(t, "a relay to report the duplicate", func() (bool, error) {
		return victim.logged(duplicate) || other.logged(duplicate), nil
	})
	request := outbox.DLQRequest{DLQFilter: outbox.DLQFilter{IDs: []int64{late}}, Limit: 1, Actor: "ann"}
	did, err := outbox.NewDLQ(f.pool, nil).Retry(t.Context(), request)
	if err != nil || len(did) != 1 {
		t.Fatalf("%+v, %v", did, err)
	}
	awaitDrained(t, t.Context(), f.pool, time.Minute)
	got := readStream(t, t.Context(), f.b)
	if len(got) != 3 || got[0].OutboxID != late || got[1].OutboxID != after || got[2].OutboxID != did[0].NewID || got[2].ID != got[0].ID {
		t.Errorf("on the stream: %+v, want message %d, then %d, then the first one's event as %d", got, late, after, did[0].NewID)
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

// TestMarksThatACrashTakesBackAreMadeAgain kills PostgreSQL before it writes some commits to disk.
// A round's commit does not wait for the disk.
func TestMarksThatACrashTakesBackAreMadeAgain(t *testing.T) {
	// a process that writes a page first writes the commits of its rows
	server := testkit.PostgresProcess(t, "bgwriter_lru_maxpages=0", "autovacuum=off")
	db, b := server.DB(t), testkit.NATS(t)
	pool := db.Pool(t, postgres.RoleSystem)
	server.HoldWAL(t, db)
	r := newRelay(t, pool, b)
	r.cfg.Lease.TTL = 10 * time.Minute // a renewal would write the marks to disk
	stop := start(t, r)
	if err := appendPairs(t.Context(), pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	server.Kill(t)
	stop()
	server.Restart(t)
	pool.Reset()
	var pending int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending); err != nil ||
		pending == 0 {
		t.Fatalf("%d marks were lost: %v", pending, err)
	}
	if _, err := pool.Exec(t.Context(),
		`WITH m AS (DELETE FROM lease_members) UPDATE leases SET owner = '', expires_at = '-infinity'`); err != nil {
		t.Fatal(err)
	}
	start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, time.Minute)
	checkStream(t, t.Context(), pool, b)
}

// loseMarksSQL undoes up to 20 marks of each open partition, as a failover to a lagging standby
// does. Rows on the stream are then pending again.
const loseMarksSQL = `
WITH back AS (
  UPDATE outbox_partitions p SET tail_seq = greatest(p.tail_seq - 20, 0), floor_id = 0 WHERE final_seq IS NULL
  RETURNING partition, tail_seq)
UPDATE outbox_messages m SET processed_at = NULL, stream_seq = NULL, partition = NULL
  FROM back WHERE m.partition = back.partition AND m.stream_seq > back.tail_seq`

// loseMarks makes the database lose marks of an idle relay, so that no further mark detects it,
// while an open transaction holds the floor down. It runs binary, and returns the damage.
func loseMarks(t *testing.T, binary string) damage {
	t.Helper()
	f := newFleet(t, testkit.PostgresProcess(t).DB(t))
	f.binary = binary
	tx, err := f.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	f.start(options{floorEvery: time.Minute})
	testkit.Eventually(t, "some transactions to be written", func() (bool, error) { return f.written.Load() >= 50, nil })
	f.stop()
	f.writers.Wait()
	awaitDrained(t, t.Context(), f.pool, time.Minute)
	f.last(300 * time.Millisecond) // the stream refuses a duplicate within 100 ms
	if _, err := f.pool.Exec(t.Context(), loseMarksSQL); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), f.pool, time.Minute)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	return inspect(t, t.Context(), f.pool, f.b)
}

func TestMarksThatTheDatabaseLosesAreMadeAgain(t *testing.T) {
	t.Parallel()
	if d := loseMarks(t, os.Args[0]); d.any() {
		t.Errorf("the stream differs from the committed rows: %+v", d)
	}
}
