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

// session is one connection to the broker, which never reconnects, and the writers that publish
// over it.
type session struct {
	*Relay
	nc      *nats.Conn
	js      jetstream.JetStream
	closed  chan struct{} // closed when nc ends
	relayed chan error    // why a writer gave up: it cannot reach the broker
	layout  chan struct{} // signals a change of the partitions
	group   *lease.Group  // the leases; nil in tests

	mu       sync.Mutex
	writers  map[int]*writer
	assigned bool // assign has succeeded at least once
}

// layoutEvery is the time between two reads of the partitions.
const layoutEvery = time.Second

// errUnreachable reports that the broker does not answer or cannot accept publishes. The session
// ends and frees its leases for a relay that reaches the broker. The next session tries another
// server.
var errUnreachable = errors.New("relay: the broker does not accept publishes")

// connect opens a session with the next server of the configured URLs.
func (r *Relay) connect(ctx context.Context) (*session, error) {
	s := &session{Relay: r, closed: make(chan struct{}), relayed: make(chan error, 1), layout: make(chan struct{}, 1),
		writers: make(map[int]*writer)}
	cfg := r.broker
	cfg.Timeout = min(cfg.Timeout, r.cfg.PublishTimeout)
	urls := strings.Split(cfg.URL, ",") // never the same server twice in a row: it may be frozen or cut off
	r.sessions++
	cfg.URL = urls[r.sessions%len(urls)]
	var err error
	s.nc, err = broker.Connect(cfg, r.owner, r.base,
		nats.RetryOnFailedConnect(false), nats.NoReconnect(),
		// A blocked write holds the connection's lock and ignores contexts. Its default limit is a
		// minute.
		nats.FlusherTimeout(r.cfg.PublishTimeout),
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
	if _, err := s.js.AccountInfo(ctx); err != nil { // a server without its cluster does not answer
		r.setLeaderless(s.nc.ConnectedClusterName() != "" && broker.IsTransient(err))
		s.nc.Close()
		return nil, fmt.Errorf("reach JetStream: %w", err)
	}
	r.setLeaderless(false)
	if _, err := s.nc.Subscribe(broker.WakeSubject, s.onWake); err != nil {
		s.log.WarnContext(ctx, "no wake-ups from writers: the relay polls", "err", err)
	}
	return s, nil
}

// run publishes until ctx or the connection ends. Then it finishes the work in progress and frees
// the leases. It returns nil if ctx ended.
func (s *session) run(ctx context.Context) error {
	// Shutdown has two clocks: after ctx ends no new work begins, and the work in progress has
	// DrainTimeout.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	drained := context.AfterFunc(ctx, func() { time.AfterFunc(s.cfg.DrainTimeout, cancel) })
	defer drained()
	var err error
	if s.group, err = lease.New(s.cfg.Lease, s.pool, LeaseKind, s.owner, s.base); err != nil {
		return err
	}
	s.setLeases(s.group)
	defer s.setLeases(nil)
	leaseCtx, leave := context.WithCancel(work)
	var leases, writers sync.WaitGroup
	leases.Go(func() {
		if err := s.group.Run(leaseCtx); err != nil {
			s.log.WarnContext(leaseCtx, "leases not released: they expire", "err", err)
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

// share runs a writer for each partition that this relay holds. It returns nil when ctx ends, or an
// error when the broker is lost.
func (s *session) share(ctx, work context.Context, writers *sync.WaitGroup) error {
	look := time.NewTicker(layoutEvery)
	defer look.Stop()
	for {
		if err := s.assign(ctx, work, writers); err != nil {
			s.failed(ctx, stageClaim, -1, err)
		}
		if s.group.Err() != nil { // the group logs it
			s.metrics.errors.WithLabelValues(stageLease).Inc()
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

// assign starts and stops writers so that each held partition has one.
func (s *session) assign(ctx, work context.Context, writers *sync.WaitGroup) error {
	dbCtx, cancel := s.forDB(ctx)
	defer cancel()
	all, err := outbox.Partitions(dbCtx, s.pool)
	if err != nil {
		s.stop(s.group.Held()) // stop the writers of lost partitions even if the database is unavailable
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
	if s.assigned { // before that, this session has yet to take over the leases of the previous one
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

// forget clears the troubles of partitions that this relay does not hold: their holders report
// them.
func (r *Relay) forget(held []int) {
	r.mu.Lock()
	others := slices.DeleteFunc(slices.Collect(maps.Keys(r.trouble)), func(n int) bool { return slices.Contains(held, n) })
	r.mu.Unlock()
	for _, n := range others {
		r.setTrouble(n, nil)
	}
}

// reaches reports whether the leader of another partition's stream has answered since the given
// time. If so, the connection works.
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

// stop ends the writers of all partitions that are not held.
func (s *session) stop(held []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n, w := range s.writers {
		if !slices.Contains(held, n) {
			w.end()
		}
	}
}

// ended records that a writer has ended.
func (s *session) ended(w *writer, err error) {
	s.mu.Lock()
	delete(s.writers, w.p.Number)
	s.mu.Unlock()
	// Its trouble remains until a later session reaches the stream, or another relay holds the
	// partition.
	if errors.Is(err, errUnreachable) {
		select {
		case s.relayed <- err:
		default:
		}
		return
	}
	s.setTrouble(w.p.Number, nil)
	select { // its partition was closed or lost, so another partition may be ready
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

// failed counts and logs an error after which the relay retries.
func (s *session) failed(ctx context.Context, stage string, partition int, err error) {
	s.metrics.errors.WithLabelValues(stage).Inc()
	if ctx.Err() == nil {
		s.log.WarnContext(ctx, "step failed; retrying", "step", stage, "partition", partition, "err", err)
	}
}
