package relay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/outbox"
)

// session is one connection to the broker, which never reconnects, and the partitions that are published over it.
type session struct {
	*Relay
	nc      *nats.Conn
	js      jetstream.JetStream
	closed  chan struct{} // by nc's end
	relayed chan error    // why a writer gave up: it cannot reach the broker
	layout  chan struct{} // the partitions have changed: look at once
	group   *lease.Group  // of the leases; nil in tests

	mu       sync.Mutex
	writers  map[int]*writer
	assigned bool // at least once
}

// layoutEvery is between looks at which partitions there are.
const layoutEvery = time.Second

// errUnreachable reports that the broker does not answer, or cannot: the session ends, its leases are freed for a relay that can reach
// it, and the next session asks another server.
var errUnreachable = errors.New("relay: the broker does not take what is published")

// connect opens a session.
func (r *Relay) connect(ctx context.Context) (*session, error) {
	s := &session{Relay: r, closed: make(chan struct{}), relayed: make(chan error, 1), layout: make(chan struct{}, 1), writers: make(map[int]*writer)}
	cfg := r.broker
	cfg.Timeout = min(cfg.Timeout, r.cfg.PublishTimeout)
	urls := strings.Split(cfg.URL, ",") // never the same twice in a row: it may be frozen, or cut off from the others
	r.sessions++
	cfg.URL = urls[r.sessions%len(urls)]
	var err error
	s.nc, err = broker.Connect(cfg, r.owner, r.base,
		nats.RetryOnFailedConnect(false), nats.NoReconnect(),
		nats.FlusherTimeout(r.cfg.PublishTimeout), // a write that blocks holds the connection's lock, heeds no context, and by default waits a minute
		nats.ClosedHandler(func(*nats.Conn) { close(s.closed) }))
	if err != nil {
		return nil, err
	}
	if s.js, err = jetstream.New(s.nc); err != nil {
		s.nc.Close()
		return nil, err
	}
	ctx, cancel := r.forBroker(ctx)
	defer cancel()
	if _, err := s.js.AccountInfo(ctx); err != nil { // a server that is cut off from its cluster does not answer
		r.setLeaderless(s.nc.ConnectedClusterName() != "" && broker.IsTransient(err))
		s.nc.Close()
		return nil, fmt.Errorf("ask for JetStream: %w", err)
	}
	r.setLeaderless(false)
	return s, nil
}

// run publishes until ctx or the connection ends, finishes the work in hand and frees the leases. It returns nil after ctx.
func (s *session) run(ctx context.Context) error {
	// Two clocks: after ctx ends nothing is begun, and what is in hand has DrainTimeout.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	drained := context.AfterFunc(ctx, func() { time.AfterFunc(s.cfg.DrainTimeout, cancel) })
	defer drained()
	var err error
	if s.group, err = lease.New(s.cfg.Lease, s.pool, LeaseKind, s.owner, s.base); err != nil {
		return err
	}
	if _, err := s.nc.Subscribe(broker.WakeSubject, s.onWake); err != nil {
		s.log.WarnContext(ctx, "no wake-ups: polling alone", "err", err)
	}
	leaseCtx, leave := context.WithCancel(work)
	var leases, writers sync.WaitGroup
	leases.Go(func() {
		if err := s.group.Run(leaseCtx); err != nil {
			s.log.WarnContext(leaseCtx, "leaving the leases failed, they expire by themselves", "err", err)
		}
	})
	err = s.share(ctx, work, &writers)
	s.stop(nil)
	writers.Wait()
	leave()
	leases.Wait()
	s.metrics.partitions.Set(0)
	return err
}

// share runs a writer for each partition that this relay holds, until ctx ends (nil) or the broker is lost.
func (s *session) share(ctx, work context.Context, writers *sync.WaitGroup) error {
	look := time.NewTicker(layoutEvery)
	defer look.Stop()
	for {
		if err := s.assign(ctx, work, writers); err != nil {
			s.failed(ctx, stageClaim, -1, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.closed:
			return errors.New("relay: the connection to the broker ended")
		case err := <-s.relayed:
			return err
		case <-s.group.Changed():
		case <-s.layout:
		case <-look.C:
		}
	}
}

// assign starts and stops writers so that they are those of the partitions held.
func (s *session) assign(ctx, work context.Context, writers *sync.WaitGroup) error {
	dbCtx, cancel := s.forDB(ctx)
	defer cancel()
	all, err := outbox.Partitions(dbCtx, s.pool)
	if err != nil {
		s.stop(s.group.Held()) // of what is no longer held nothing is begun, whatever the database says
		return err
	}
	active := outbox.Active(all)
	var numbers []int
	for _, p := range active {
		numbers = append(numbers, p.Number)
	}
	s.group.Share(numbers)
	held := slices.DeleteFunc(s.group.Held(), func(n int) bool { return !slices.Contains(numbers, n) })
	s.stop(held)
	s.metrics.partitions.Set(float64(len(held)))
	if s.assigned { // else the leases that the session before had are yet to be taken again
		s.forget(held)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.assigned = true
	for _, p := range active {
		if !slices.Contains(held, p.Number) || s.writers[p.Number] != nil {
			continue
		}
		w := newWriter(s, p)
		s.writers[p.Number] = w
		ctx, end := context.WithCancel(ctx)
		w.end = end
		writers.Go(func() {
			defer end()
			s.ended(w, w.run(ctx, work))
		})
	}
	return nil
}

// forget drops the troubles of partitions that are not held: they are other relays' to report.
func (r *Relay) forget(held []int) {
	r.mu.Lock()
	others := slices.DeleteFunc(slices.Collect(maps.Keys(r.trouble)), func(n int) bool { return slices.Contains(held, n) })
	r.mu.Unlock()
	for _, n := range others {
		r.setTrouble(n, nil)
	}
}

// reaches reports whether the leader of another partition's stream has answered since then: the connection works.
func (s *session) reaches(besides *writer, since time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.writers {
		if w != besides && w.heard.Load() > since.UnixNano() {
			return true
		}
	}
	return false
}

// stop tells the writers of partitions that are not held to end.
func (s *session) stop(held []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, w := range s.writers {
		if !slices.Contains(held, n) {
			w.end()
		}
	}
}

// ended takes a writer's end.
func (s *session) ended(w *writer, err error) {
	s.mu.Lock()
	delete(s.writers, w.p.Number)
	s.mu.Unlock()
	if errors.Is(err, errUnreachable) { // its trouble stays until a later session has reached the stream, or another relay holds the partition
		select {
		case s.relayed <- err:
		default:
		}
		return
	}
	s.setTrouble(w.p.Number, nil)
	select { // its partition was closed, or is another's: others may be ready to begin
	case s.layout <- struct{}{}:
	default:
	}
}

// onWake wakes the writers of the slots that have new rows.
func (s *session) onWake(m *nats.Msg) {
	touched := broker.DecodeWake(m.Data, s.broker)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.writers {
		if touched&w.slots != 0 {
			w.wakeUp()
		}
	}
}

// failed counts and logs an error that is waited out.
func (s *session) failed(ctx context.Context, stage string, partition int, err error) {
	s.metrics.errors.WithLabelValues(stage).Inc()
	if ctx.Err() == nil {
		s.log.WarnContext(ctx, "a step failed, trying again", "step", stage, "partition", partition, "err", err)
	}
}
