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
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

// session is one connection to the broker, which never reconnects, and the writers that publish
// over it.
type session struct {
	*Relay
	nc       *nats.Conn
	js       jetstream.JetStream
	lost     chan error   // why the session ends: nc has ended, or a writer cannot reach the broker
	group    *lease.Group // the leases; nil in tests
	writers  work.Crew[int, *writer]
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
	s := &session{Relay: r, lost: make(chan error, 1)}
	s.writers.Ended = work.NewSignal()
	cfg := r.broker
	cfg.Timeout = min(cfg.Timeout, r.cfg.PublishTimeout)
	urls := strings.Split(cfg.URL, ",") // never the same server twice in a row: it may be frozen or cut off
	r.sessions++
	cfg.URL = urls[r.sessions%len(urls)]
	var err error
	s.nc, s.js, err = broker.Open(cfg, r.owner, r.base,
		nats.RetryOnFailedConnect(false), nats.NoReconnect(),
		// A blocked write holds the connection's lock and ignores contexts. Its default limit is a
		// minute.
		nats.FlusherTimeout(r.cfg.PublishTimeout),
		nats.ClosedHandler(func(*nats.Conn) { s.lose(errors.New("relay: the connection to the broker ended")) }))
	if err != nil {
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
func (s *session) run(ctx context.Context) (err error) {
	drain, cancel := work.Drain(ctx, s.cfg.DrainTimeout)
	defer cancel()
	if s.group, err = lease.New(s.cfg.Lease, s.pool, LeaseKind, s.owner, s.base); err != nil {
		return err
	}
	s.setLeases(s.group)
	defer s.setLeases(nil)
	s.group.While(drain, func() {
		watch, stop := context.WithCancel(ctx)
		var watching sync.WaitGroup
		watching.Go(func() { s.watchDurables(watch) })
		err = s.share(ctx, drain)
		stop()
		watching.Wait()
		s.writers.Close()
	})
	s.metrics.partitions.Set(0)
	return err
}

// share runs a writer for each partition that this relay holds. It returns nil when ctx ends, or an
// error when the broker is lost.
func (s *session) share(ctx, drain context.Context) error {
	look := time.NewTicker(layoutEvery)
	defer look.Stop()
	for len(s.lost) == 0 {
		if err := s.assign(ctx, drain); err != nil {
			s.failed(ctx, stageClaim, -1, err)
		}
		if s.group.Err() != nil { // the group logs it
			s.metrics.errors.WithLabelValues(stageLease).Inc()
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-s.lost:
			return err
		case <-s.group.Changed():
		case <-s.writers.Ended: // its partition was closed or lost, so another partition may be ready
		case <-look.C:
		}
	}
	return <-s.lost
}

// lose ends the session.
func (s *session) lose(err error) {
	select {
	case s.lost <- err:
	default:
	}
}

// assign starts and stops writers so that each held partition has one.
func (s *session) assign(ctx, drain context.Context) error {
	dbCtx, cancel := s.forDB(ctx)
	defer cancel()
	all, err := outbox.Partitions(dbCtx, s.pool)
	if err != nil {
		s.writers.Keep(s.group.Held()) // stop the writers of lost partitions even if the database is unavailable
		return err
	}
	active := make(map[int]outbox.Partition)
	for _, p := range outbox.Active(all) {
		active[p.Number] = p
	}
	s.group.Share(slices.Collect(maps.Keys(active)))
	held := slices.DeleteFunc(s.group.Held(), func(n int) bool { _, is := active[n]; return !is })
	s.metrics.partitions.Set(float64(len(held)))
	if s.assigned { // before that, this session has yet to take over the leases of the previous one
		s.forget(held)
	}
	s.assigned = true
	s.writers.Assign(ctx, held, func(n int) (*writer, func(context.Context)) {
		w := newWriter(s, active[n])
		return w, func(ctx context.Context) { s.ended(w, w.run(ctx, drain)) }
	})
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
// time. If so, the connection works. Both times are monotonic: a wall clock that is set back would
// keep a session that reaches nothing.
func (s *session) reaches(besides *writer, since time.Time) bool {
	for w := range s.writers.All {
		if at := w.heard.Load(); w != besides && at != nil && at.After(since) {
			return true
		}
	}
	return false
}

// ended records that a writer has ended. The trouble of one that cannot reach the broker remains
// until a later session reaches the stream, or another relay holds the partition.
func (s *session) ended(w *writer, err error) {
	if errors.Is(err, errUnreachable) {
		s.lose(err)
	} else {
		s.setTrouble(w.p.Number, nil)
	}
}

// onWake wakes the writers of the slots that have new rows.
func (s *session) onWake(m *nats.Msg) {
	touched := broker.DecodeWake(m.Data, s.broker)
	for w := range s.writers.All {
		if touched&w.slots != 0 {
			w.wake.Notify()
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
