package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/pglocal"
)

// options are the flags.
type options struct {
	seconds  float64
	rate     int
	backlog  int
	rounds   int
	settle   time.Duration
	sync     bool
	relayBin string
	dir      string
	say      func(format string, args ...any)
}

// result is one run.
type result struct {
	Peer     string  `json:"peer"`
	Scenario string  `json:"scenario"`
	Round    int     `json:"round"`
	Rate     float64 `json:"events_per_second"` // from the start of the load, or the first message of a drain, to the last message
	Start    float64 `json:"start_seconds"`     // from the start of a drain's relay to its first message
	RelayCPU float64 `json:"relay_us_per_event"`
	PostCPU  float64 `json:"postgres_us_per_event"` // including the writers' statements
	Restarts int     `json:"restarts"`              // of relays that ended by themselves
	verdict
	Notes []string `json:"notes,omitempty"`
}

// String returns a line of progress.
func (r result) String() string {
	return fmt.Sprintf("%-9s %-9s %d: lost %d, stuck %d, doubled %d, inverted %d, invented %d, stalled %.1f s, "+
		"p50 %.1f ms, p99 %.0f ms, start %.1f s, %.0f/s %s", r.Scenario, r.Peer, r.Round, r.Lost, r.Stuck, r.Doubled, r.Inverted,
		r.Invented, r.Stalled.Seconds(), ms(r.P50), ms(r.P99), max(0, r.Start), r.Rate, strings.Join(r.Notes, "; "))
}

// run is one peer in one scenario.
type run struct {
	o       options
	p       peer
	s       scenario
	began   time.Time
	loaded  time.Time // the end of the load
	servers []*pglocal.Server
	broker  *broker
	pool    *pgxpool.Pool
	url     string
	js      jetstream.JetStream
	load    *load
	relays  []*relayProcess
	log     tail
	poison  map[change]bool
	notes   []string
	undo    []func() error
}

func (r *run) note(format string, args ...any) {
	r.notes = append(r.notes, fmt.Sprintf(format, args...))
}

// measure runs a peer in a scenario. shared is the server of scenarios that do not need a pair.
func measure(ctx context.Context, o options, p peer, s scenario, shared *pglocal.Server) (res result, err error) {
	r := &run{o: o, p: p, s: s, poison: make(map[change]bool)}
	defer func() {
		for _, fn := range slices.Backward(r.undo) {
			if uerr := fn(); uerr != nil {
				o.say("%s in %s: clean up: %v", p.name, s.name, uerr)
			}
		}
		if err != nil {
			err = fmt.Errorf("%s in %s: %w\n%s", p.name, s.name, err, r.log.String())
		}
	}()
	if err := r.prepare(ctx, shared); err != nil {
		return res, err
	}
	if s.drain {
		return r.drain(ctx)
	}
	return r.underLoad(ctx)
}

func (r *run) prepare(ctx context.Context, shared *pglocal.Server) error {
	dir, err := os.MkdirTemp(r.o.dir, r.p.name+"-")
	if err != nil {
		return err
	}
	r.undo = append(r.undo, func() error { return os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // if root runs this, PostgreSQL runs as another user and needs access
		return err
	}
	r.servers = []*pglocal.Server{shared}
	if r.s.pair {
		primary, standby, err := startPair(ctx, dir)
		for _, s := range []*pglocal.Server{primary, standby} {
			if s != nil {
				r.undo = append(r.undo, s.Abort)
			}
		}
		if err != nil {
			return fmt.Errorf("start a pair: %w", err)
		}
		r.servers = []*pglocal.Server{primary, standby}
	}
	name := "peers_" + strings.ToLower(rand.Text()[:10])
	one, err := newDatabase(ctx, r.servers[0], name)
	if err != nil {
		return err
	}
	if !r.s.pair {
		r.undo = append(r.undo, func() error { return dropDatabase(context.WithoutCancel(ctx), shared, name) })
	}
	if r.url, err = anyHost(name, r.servers...); err != nil {
		return err
	}
	if r.pool, err = openPool(ctx, r.url); err != nil {
		return err
	}
	r.undo = append(r.undo, func() error { r.pool.Close(); return nil })
	if err := r.p.prepare(ctx, r.pool, one); err != nil {
		return fmt.Errorf("create the tables: %w", err)
	}
	if _, err := r.pool.Exec(ctx, truthSchema); err != nil {
		return err
	}
	if err := r.connect(ctx, dir); err != nil {
		return fmt.Errorf("the broker: %w", err)
	}
	fn, err := r.p.append(r.pool)
	if err != nil {
		return err
	}
	r.load = &load{pool: r.pool, append: fn, rate: r.o.rate, seconds: r.o.seconds, entities: r.s.entities, request: r.s.request,
		sent: make(map[change]time.Time)}
	return nil
}

// connect starts the broker, and creates the stream if the peer's relay does not.
func (r *run) connect(ctx context.Context, dir string) (err error) {
	if r.broker, err = startBroker(dir, r.o.sync, r.s.maxPayload); err != nil {
		return err
	}
	r.undo = append(r.undo, func() error { r.broker.kill(); return nil })
	nc, err := nats.Connect(r.broker.url, natsOptions()...)
	if err != nil {
		return err
	}
	r.undo = append(r.undo, func() error { nc.Close(); return nil })
	if r.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(2*time.Second)); err != nil || r.p.declares {
		return err
	}
	_, err = r.js.CreateStream(ctx, jetstream.StreamConfig{Name: r.p.stream, Subjects: []string{peerSubject},
		Storage: jetstream.FileStorage, Duplicates: r.s.window})
	return err
}

func openPool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 20
	return pgxpool.NewWithConfig(ctx, cfg)
}

// addRelay starts another relay. The end of the run kills it.
func (r *run) addRelay() error {
	p := &relayProcess{log: &r.log, command: func() (*exec.Cmd, error) {
		self, err := os.Executable()
		cmd := exec.Command(self, "relay", r.p.name)
		if r.p.relay == nil {
			cmd = exec.Command(r.o.relayBin)
		}
		cmd.Env = append(os.Environ(), "DATABASE_URL="+r.url, "NATS_URL="+r.broker.url, "LEASE_TTL=2s", "HEARTBEAT_INTERVAL=0",
			"OPS_ADDR=127.0.0.1:0", "LOG_LEVEL=warn")
		return cmd, err
	}}
	if err := p.start(); err != nil {
		return err
	}
	r.relays = append(r.relays, p)
	r.undo = append(r.undo, func() error { p.kill(); return nil })
	return nil
}

// serveRelay is the child process of a relay that has no binary of its own.
func serveRelay(ctx context.Context, name string) error {
	p, err := peerNamed(name)
	if err != nil {
		return err
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	pool, err := openPool(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	nc, err := nats.Connect(os.Getenv("NATS_URL"), natsOptions()...)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	return p.relay(ctx, pool, js, os.Getenv("NATS_URL"))
}

// messages returns how many messages the stream has.
func (r *run) messages(ctx context.Context) (uint64, error) {
	s, err := r.js.Stream(ctx, r.p.stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, nil // the relay has not created it yet
	}
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.Msgs, nil
}

// settled waits until the outbox has nothing unpublished, except for poison, or the time for that
// is over. A peer that then still has something is stuck, or has lost it.
func (r *run) settled(ctx context.Context) {
	if err := await(ctx, cmp.Or(r.s.settle, r.o.settle), "end of the backlog", func() (bool, error) {
		left, err := r.p.waiting(ctx, r.pool)
		sleep(ctx, 100*time.Millisecond)
		return err == nil && len(left) <= len(r.poison), err
	}); err != nil {
		r.note("%v", err)
	}
	sleep(ctx, time.Second) // for messages of a relay that is late
}

func (r *run) underLoad(ctx context.Context) (result, error) {
	for range r.s.relays {
		if err := r.addRelay(); err != nil {
			return result{}, err
		}
	}
	// The first event comes when the relay works, so the start of a process is no part of the load.
	if _, err := r.load.write(ctx, "1", padding, nil); err != nil {
		return result{}, err
	}
	if err := await(ctx, 30*time.Second, "first message", func() (bool, error) {
		n, err := r.messages(ctx)
		return n > 0, err
	}); err != nil {
		return result{}, err
	}
	relays, postgres := r.relayTime(), r.postgresTime()
	delete(r.load.sent, change{"1", 1}) // its delay is that of the start
	r.began = time.Now()
	fault := make(chan error, 1)
	go func() {
		if r.s.fault == nil {
			fault <- nil
			return
		}
		fault <- r.s.fault(ctx, r)
	}()
	bounded, cancel := context.WithTimeout(ctx, time.Duration(r.o.seconds*float64(time.Second))+30*time.Second)
	defer cancel()
	r.load.run(bounded)
	r.loaded = time.Now()
	if err := <-fault; err != nil {
		return result{}, fmt.Errorf("the fault: %w", err)
	}
	r.settled(ctx)
	return r.conclude(ctx, r.relayTime()-relays, r.postgresTime()-postgres)
}

func (r *run) drain(ctx context.Context) (result, error) {
	if err := r.load.backlog(ctx, r.o.backlog); err != nil {
		return result{}, err
	}
	if _, err := r.pool.Exec(ctx, `CHECKPOINT; ANALYZE`); err != nil {
		return result{}, err
	}
	postgres := r.postgresTime()
	r.began = time.Now()
	if err := r.addRelay(); err != nil {
		return result{}, err
	}
	if err := await(ctx, 3*time.Minute, "end of the drain", func() (bool, error) {
		n, err := r.messages(ctx)
		return n >= uint64(r.o.backlog), err
	}); err != nil {
		r.note("%v", err)
	}
	r.settled(ctx)
	return r.conclude(ctx, r.relayTime(), r.postgresTime()-postgres)
}

func (r *run) relayTime() (sum time.Duration) {
	for _, p := range r.relays {
		sum += p.used()
	}
	return sum
}

func (r *run) postgresTime() (sum time.Duration) {
	for _, s := range r.servers {
		sum += treeTime(s.PID())
	}
	return sum
}

// conclude reads the stream and the truth, and judges.
func (r *run) conclude(ctx context.Context, relays, postgres time.Duration) (res result, err error) {
	e := evidence{sent: r.load.sent, poison: r.poison, loaded: r.loaded, end: time.Now()}
	if e.waiting, err = r.p.waiting(ctx, r.pool); err != nil {
		return res, err
	}
	if e.committed, err = committed(ctx, r.pool); err != nil {
		return res, err
	}
	if e.stream, err = r.read(ctx); err != nil {
		return res, fmt.Errorf("read the stream: %w", err)
	}
	res = result{Peer: r.p.name, Scenario: r.s.name, verdict: judge(e), Notes: r.notes}
	for _, p := range r.relays {
		p.mu.Lock()
		res.Restarts += p.restarts
		p.mu.Unlock()
	}
	if n := len(e.stream); n > 0 {
		first, last := e.stream[0].at, e.stream[n-1].at
		if res.Start = first.Sub(r.began).Seconds(); !r.s.drain {
			first = r.began
		}
		res.Rate = float64(n) / last.Sub(first).Seconds()
		res.RelayCPU = float64(relays.Microseconds()) / float64(n)
		res.PostCPU = float64(postgres.Microseconds()) / float64(n)
	}
	return res, nil
}

// read returns all messages of the stream.
func (r *run) read(ctx context.Context) ([]stored, error) {
	s, err := r.js.Stream(ctx, r.p.stream)
	if err != nil {
		return nil, err
	}
	left := s.CachedInfo().State.Msgs
	if left == 0 {
		return nil, nil
	}
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy})
	if err != nil {
		return nil, err
	}
	all := make([]stored, 0, left)
	for uint64(len(all)) < left {
		batch, err := c.Fetch(int(min(left-uint64(len(all)), 5_000)), jetstream.FetchMaxWait(10*time.Second))
		if err != nil {
			return nil, err
		}
		got := 0
		for m := range batch.Messages() {
			meta, err := m.Metadata()
			if err != nil {
				return nil, err
			}
			var e stored
			if err := json.Unmarshal(m.Data(), &e.change); err != nil {
				return nil, fmt.Errorf("message %d: %w", meta.Sequence.Stream, err)
			}
			e.at = meta.Timestamp
			all = append(all, e)
			got++
		}
		if err := batch.Error(); err != nil || got == 0 {
			return nil, fmt.Errorf("after %d of %d messages: %w", len(all), left, errors.Join(err, io.ErrUnexpectedEOF))
		}
	}
	return all, nil
}

// buildRelay builds the relay's binary in dir, from the tree that has this module.
func buildRelay(ctx context.Context, dir string) (string, error) {
	where, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/tidings/tidings").Output()
	if err != nil {
		return "", fmt.Errorf("build the relay, or name its binary with --relay: find this repository: %w", err)
	}
	binary := filepath.Join(dir, "relay")
	cmd := exec.CommandContext(ctx, "go", "build", "-C", strings.TrimSpace(string(where)), "-o", binary, "./cmd/relay")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the relay, or name its binary with --relay: %w: %s", err, out)
	}
	return binary, nil
}
