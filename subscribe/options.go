package subscribe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/kinds"
)

var (
	// ErrName reports a subscriber's name that is not 1 to 32 letters, digits, - and _, beginning with a letter.
	ErrName = errors.New("subscribe: a name has 1 to 32 letters, digits, - and _, and begins with a letter")
	// ErrType reports a type of events that no kind has, or one whose payload is another than the handler's.
	ErrType = errors.New("subscribe: no such type of events")
	// ErrNoStreams reports a NATS server that answers and has no stream of events: it is another one, or no relay has run there yet.
	ErrNoStreams = errors.New("subscribe: there are no streams of events")
	// ErrTables reports a database without the tables that a projection needs, or with those of an older release. Call Migrate.
	ErrTables = errors.New("subscribe: the tables are missing or older than this release; call subscribe.Migrate")
	// ErrClosed reports a connection to NATS that its client has given up for good. Connect with nats.IgnoreAuthErrorAbort() and nats.MaxReconnects(-1), which leave few reasons for
	// that, and restart the process.
	ErrClosed = broker.ErrClosed
	// ErrStuck reports a function of yours that did not return after its context had ended. Its event was not acknowledged. The goroutine is lost, so end the process.
	ErrStuck = errors.New("subscribe: a function did not return after its context had ended; restart the process")
)

// Option changes a default of Handle, Project, DeadLetters or Lag.
type Option func(*settings)

type settings struct {
	name     string
	streams  consumers.Streams
	kinds    *kinds.Set
	upstream []string
	log      *slog.Logger
	registry prometheus.Registerer
	health   *Health

	only    map[string]bool // of Project: the aggregate types; nil for all
	timeout time.Duration   // of one call of the function
	batch   int             // of Project

	concurrency int // these are of Handle
	attempts    int
	takeover    time.Duration
	drain       time.Duration
	inOrder     bool
	since       time.Time
	pause       func(attempt int) time.Duration
}

// Streams names the streams of an installation with NATS_STREAM or NATS_SUBJECT_PREFIX of its own. The defaults are EVENTS and events.
func Streams(name, prefix string) Option {
	return func(s *settings) { s.streams.Name, s.streams.Prefix = name, prefix }
}

// Kinds says which kinds there are, for an installation with more than the built-in ones: kinds.Builtin().Extend reads the file of `tidings kinds apply`.
func Kinds(all *kinds.Set) Option { return func(s *settings) { s.kinds = all } }

// Upstream names the aggregate types of events that services of yours append to the outbox themselves (docs/upstream.md). Their payloads are structs of yours, or json.RawMessage.
func Upstream(aggregateTypes ...string) Option {
	return func(s *settings) { s.upstream = aggregateTypes }
}

// Log sends what happens to log, instead of to slog.Default().
func Log(log *slog.Logger) Option { return func(s *settings) { s.log = log } }

// Metrics registers metrics at reg: consumer_* for Project, as of Tidings' own consumers, and subscriber_* for Handle.
func Metrics(reg prometheus.Registerer) Option { return func(s *settings) { s.registry = reg } }

// Report has h say how the subscriber is.
func Report(h *Health) Option { return func(s *settings) { s.health = h } }

// Timeout bounds one call of your function: its context ends then, and the call has failed. The default is a minute.
func Timeout(d time.Duration) Option { return func(s *settings) { s.timeout = d } }

// Only has Project deliver the events of these aggregate types (names of kinds, and "thread") and no others.
func Only(aggregateTypes ...string) Option {
	return func(s *settings) {
		s.only = make(map[string]bool)
		for _, t := range aggregateTypes {
			s.only[t] = true
		}
	}
}

// Batch is how many events Project delivers at once at most: 1 to 20,000. The default is 4,000.
func Batch(events int) Option { return func(s *settings) { s.batch = events } }

// Concurrency is how many calls of a handler run at once in this process. The default is 16. Events of one aggregate never do.
func Concurrency(n int) Option { return func(s *settings) { s.concurrency = n } }

// Attempts is how often a handler gets an event before it becomes a dead letter. The default is 10.
func Attempts(n int) Option { return func(s *settings) { s.attempts = n } }

// Takeover is how long an instance may give no sign of life before others get its work, 1 second at least: JetStream's AckWait for Handle, and the time of a lease for
// Project. The default is 10 seconds. A function may take longer: the instance gives the signs by itself.
func Takeover(d time.Duration) Option { return func(s *settings) { s.takeover = d } }

// Drain is how long handlers at work have after the context of Handle has ended. The default is 20 seconds.
func Drain(d time.Duration) Option { return func(s *settings) { s.drain = d } }

// InOrder has one instance at a time read a partition, so that each aggregate's events come in the order of the stream, whichever instance handles them; the others stand by.
func InOrder() Option { return func(s *settings) { s.inOrder = true } }

// Since has a new subscriber begin with the events stored at t or later, instead of the oldest that the streams have. It changes nothing for a subscriber that exists.
func Since(t time.Time) Option { return func(s *settings) { s.since = t } }

// BackOff says how long to wait before the attempt after this one, which failed. The default doubles from 1 second to 1 minute.
func BackOff(pause func(attempt int) time.Duration) Option {
	return func(s *settings) { s.pause = pause }
}

func backOff(attempt int) time.Duration { return min(time.Second<<min(attempt-1, 6), time.Minute) }

var subscriberName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,31}$`)

func settingsOf(name string, opts []Option) (*settings, error) {
	s := &settings{
		name: name, kinds: kinds.Builtin(), log: slog.Default(), timeout: time.Minute, batch: 4000,
		concurrency: 16, attempts: 10, takeover: 10 * time.Second, drain: 20 * time.Second, pause: backOff,
	}
	for _, o := range opts {
		o(s)
	}
	if s.registry == nil {
		s.registry = prometheus.NewRegistry()
	}
	s.streams = consumers.Streams{Name: cmp.Or(s.streams.Name, "EVENTS"), Prefix: cmp.Or(s.streams.Prefix, "events"), Timeout: 5 * time.Second}
	if !subscriberName.MatchString(name) {
		return nil, fmt.Errorf("%w: %.80q", ErrName, name)
	}
	var errs []error
	for what, bad := range map[string]bool{
		"Timeout": s.timeout <= 0, "Batch": s.batch < 1 || s.batch > 20000, "Concurrency": s.concurrency < 1, "Attempts": s.attempts < 1,
		"Takeover": s.takeover < time.Second, "Drain": s.drain < 0,
	} {
		if bad {
			errs = append(errs, fmt.Errorf("subscribe: %s is out of bounds", what))
		}
	}
	return s, errors.Join(errs...)
}

func (s *settings) broker() broker.Config {
	return broker.Config{Stream: s.streams.Name, Prefix: s.streams.Prefix, Timeout: s.streams.Timeout}
}

// lookUp returns the streams, once a server has answered: one that is away is waited for.
func (s *settings) lookUp(ctx context.Context, js jetstream.JetStream) ([]broker.Stream, error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		qctx, cancel := context.WithTimeout(ctx, s.streams.Timeout)
		all, err := broker.Streams(qctx, js, s.broker())
		cancel()
		switch {
		case err == nil && len(all) == 0:
			return nil, fmt.Errorf("%w: %s has none of the names %s-<number>", ErrNoStreams, js.Conn().ConnectedUrlRedacted(), s.streams.Name)
		case err == nil, ctx.Err() != nil:
			return all, nil
		case errors.Is(err, nats.ErrConnectionClosed):
			return nil, ErrClosed
		case !broker.IsTransient(err):
			return nil, err
		}
		s.health.set(func(context.Context) error { return err })
		s.log.WarnContext(ctx, "waiting for NATS", "err", err)
		select {
		case <-ctx.Done():
			return nil, nil
		case <-tick.C:
		}
	}
}

// watch returns what gets ErrClosed when the connection is closed for good before ctx ends.
func watch(ctx context.Context, nc *nats.Conn) <-chan error {
	closed := make(chan error, 1)
	go func() {
		if err := broker.Watch(ctx, nc); err != nil {
			closed <- err
		}
	}()
	return closed
}

// Health says how a subscriber is. The zero value is ready for use, by several goroutines.
type Health struct {
	mu    sync.Mutex
	ready func(context.Context) error
}

func (h *Health) set(ready func(context.Context) error) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready = ready
}

// Ready returns nil while the subscriber does its work, and otherwise why it does not: as a readiness probe wants it.
func (h *Health) Ready(ctx context.Context) error {
	h.mu.Lock()
	ready := h.ready
	h.mu.Unlock()
	if ready == nil {
		return errors.New("subscribe: not started")
	}
	return ready(ctx)
}
