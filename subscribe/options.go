package subscribe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
)

var (
	// ErrName reports an invalid name of a subscriber.
	ErrName = errors.New("subscribe: a name has 1 to 32 letters, digits, - and _, and begins with a letter")
	// ErrType reports a type of events that no kind has, or whose payload does not match the
	// handler's type.
	ErrType = errors.New("subscribe: no such type of events")
	// ErrOption reports an option that the function does not have, or whose value is out of bounds.
	// It also reports a Takeover or InOrder other than that of the durable consumer of an
	// operator.
	ErrOption = errors.New("subscribe: the option does not apply")
	// ErrFilter reports a subscriber that exists and has another filter: another Only, or a durable
	// consumer of the same name with other subjects.
	ErrFilter = errors.New("subscribe: the subscriber exists with another filter")
	// ErrNoStreams reports a NATS server that answers but has no stream of events. It is the wrong
	// server, or no relay has run yet.
	ErrNoStreams = errors.New("subscribe: there are no streams of events")
	// ErrTables reports a database without the tables that a projection needs, or with tables of an
	// older release. Call Migrate.
	ErrTables = errors.New("subscribe: the tables are missing or older than this release; call subscribe.Migrate")
	// ErrClosed reports a connection to NATS that its client has closed for good. Connect with
	// nats.IgnoreAuthErrorAbort() and nats.MaxReconnects(-1), which leave few reasons for that, and
	// restart the process.
	ErrClosed = broker.ErrClosed
	// ErrStuck reports a function of yours that did not return after its context had ended. Its
	// event was not acknowledged. Its goroutine cannot be ended, so end the process.
	ErrStuck = errors.New("subscribe: a function did not return after its context had ended; restart the process")
)

// errNoDurable reports that a tenant has no durable consumers yet.
var errNoDurable = errors.New("subscribe: there are no durable consumers of this subscriber")

// Option changes a default of Handle and HandlerDeadLetters, or of Project, DeadLetters and Lag. An
// option of only one of these groups says so, and the other one returns ErrOption.
type Option func(*settings)

// The functions whose options exist.
const (
	ofHandle  = "Handle"
	ofProject = "Project"
)

// optionOf returns an option that only one of the functions has.
func optionOf(function, name string, set Option) Option {
	return func(s *settings) {
		if s.function != function {
			s.refused = append(s.refused, fmt.Errorf("%w: %s is an option of %s, not of %s", ErrOption, name, function, s.function))
		}
		set(s)
	}
}

type settings struct {
	name      string
	function  string // of which these are the options
	refused   []error
	streams   consumers.Streams
	kinds     *kinds.Set
	upstreams []*upstreams.Upstream
	log       *slog.Logger
	registry  prometheus.Registerer
	health    *Health
	tenant    int64 // of the account of the connection; 0 if it is none of a tenant

	only    map[string]bool // for Project: the aggregate types; nil for all
	timeout time.Duration   // of one call of the function
	batch   int             // for Project

	concurrency int // this and the following are for Handle
	attempts    int
	takeover    time.Duration
	drain       time.Duration
	inOrder     bool
	since       time.Time
	pause       func(attempt int) time.Duration
}

// Streams names the streams of an installation that sets NATS_STREAM or NATS_SUBJECT_PREFIX. The
// defaults are EVENTS and events.
func Streams(name, prefix string) Option {
	return func(s *settings) { s.streams.Name, s.streams.Prefix = name, prefix }
}

// Tenant makes Handle work in a tenant's NATS account (`tidings nats`), as the subscriber of that
// tenant with that name. It reads the tenant's events through the durable consumers that `tidings
// nats durable` created.
func Tenant(id int64) Option {
	return optionOf(ofHandle, "Tenant", func(s *settings) { s.tenant = id })
}

// Kinds names the kinds of an installation that has more than the built-in ones. kindfile.Extend
// reads the file of `tidings kinds apply`.
func Kinds(all *kinds.Set) Option { return func(s *settings) { s.kinds = all } }

// Upstreams names the declarations of events that your services append to the outbox themselves
// (docs/upstream.md). kindfile.ReadUpstream reads the file of `tidings upstream add`. Their
// payloads are your structs, or json.RawMessage.
func Upstreams(declared ...*upstreams.Upstream) Option {
	return func(s *settings) { s.upstreams = append(s.upstreams, declared...) }
}

// Log sets the logger. The default is slog.Default().
func Log(log *slog.Logger) Option { return func(s *settings) { s.log = log } }

// Metrics registers metrics with reg: tidings_consumer_* for Project, as for Tidings' own
// consumers, and tidings_subscriber_* for Handle.
func Metrics(reg prometheus.Registerer) Option { return func(s *settings) { s.registry = reg } }

// Report makes h report the state of the subscriber.
func Report(h *Health) Option { return func(s *settings) { s.health = h } }

// Timeout bounds one call of your function. When it is over, the call's context ends and the call
// has failed. The default is one minute.
func Timeout(d time.Duration) Option { return func(s *settings) { s.timeout = d } }

// Only makes Project deliver only the events of these aggregate types (names of kinds and
// upstreams, and "thread").
func Only(aggregateTypes ...string) Option {
	return optionOf(ofProject, "Only", func(s *settings) {
		s.only = make(map[string]bool)
		for _, t := range aggregateTypes {
			s.only[t] = true
		}
	})
}

// Batch is the largest number of events that Project delivers at once: 1 to 20,000. The default is
// 4,000.
func Batch(events int) Option {
	return optionOf(ofProject, "Batch", func(s *settings) { s.batch = events })
}

// Concurrency is the number of calls of a handler that may run at once in this instance. The
// default is 16. An instance handles one event of an aggregate at a time; other instances may
// handle another one meanwhile, unless InOrder is set.
func Concurrency(n int) Option {
	return optionOf(ofHandle, "Concurrency", func(s *settings) { s.concurrency = n })
}

// Attempts is the number of attempts after which an event becomes a dead letter. The default is 10.
func Attempts(n int) Option {
	return optionOf(ofHandle, "Attempts", func(s *settings) { s.attempts = n })
}

// Takeover is the time without a sign of life after which other instances get an instance's work.
// It is at least 1 second. It is JetStream's AckWait for Handle, and the duration of a lease for
// Project. The default is 10 seconds. A function may take longer, because the instance sends these
// signs while the function runs.
func Takeover(d time.Duration) Option { return func(s *settings) { s.takeover = d } }

// Drain is the time that running calls get after the context of Handle has ended. The default is 20
// seconds.
func Drain(d time.Duration) Option {
	return optionOf(ofHandle, "Drain", func(s *settings) { s.drain = d })
}

// InOrder lets one instance at a time read a partition. So each aggregate's events come in the
// order of the stream, no matter which instance handles them. The other instances stand by.
func InOrder() Option {
	return optionOf(ofHandle, "InOrder", func(s *settings) { s.inOrder = true })
}

// Since makes a new subscriber begin with the events stored at t or later, instead of the oldest
// ones of the streams. It changes nothing for a subscriber that exists.
func Since(t time.Time) Option {
	return optionOf(ofHandle, "Since", func(s *settings) { s.since = t })
}

// BackOff sets the wait after a failed attempt, by the number of that attempt. The default doubles
// from 1 second to 1 minute.
func BackOff(pause func(attempt int) time.Duration) Option {
	return optionOf(ofHandle, "BackOff", func(s *settings) { s.pause = pause })
}

func backOff(attempt int) time.Duration { return min(time.Second<<min(attempt-1, 6), time.Minute) }

var subscriberName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,31}$`)

func settingsOf(name, function string, opts []Option) (*settings, error) {
	s := &settings{
		name: name, function: function, kinds: kinds.Builtin(), log: slog.Default(), timeout: time.Minute, batch: 4000,
		concurrency: 16, attempts: 10, takeover: 10 * time.Second, drain: 20 * time.Second, pause: backOff,
	}
	for _, o := range opts {
		o(s)
	}
	if s.registry == nil {
		s.registry = prometheus.NewRegistry()
	}
	s.streams = consumers.Streams{Name: cmp.Or(s.streams.Name, "EVENTS"), Prefix: cmp.Or(s.streams.Prefix, "events"),
		Timeout: 5 * time.Second}
	if !subscriberName.MatchString(name) {
		return nil, fmt.Errorf("%w: %.80q", ErrName, name)
	}
	errs := s.refused
	for what, bad := range map[string]bool{
		"Timeout": s.timeout <= 0, "Batch": s.batch < 1 || s.batch > 20000, "Concurrency": s.concurrency < 1, "Attempts": s.attempts < 1,
		"Takeover": s.takeover < time.Second, "Drain": s.drain < 0, "Tenant": s.tenant < 0, "BackOff": s.pause == nil, "Log": s.log == nil,
		"Kinds": s.kinds == nil, "Upstreams": slices.Contains(s.upstreams, nil),
	} {
		if bad {
			errs = append(errs, fmt.Errorf("%w: the value of %s is out of bounds", ErrOption, what))
		}
	}
	if s.tenant > 0 && !s.since.IsZero() {
		errs = append(errs, fmt.Errorf("%w: Since has no effect with Tenant: give `tidings nats durable` the flag --since", ErrOption))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, s.checkOnly()
}

func (s *settings) broker() broker.Config {
	return broker.Config{Stream: s.streams.Name, Prefix: s.streams.Prefix, Timeout: s.streams.Timeout}
}

// awaitStreams returns the streams as list does. It waits while NATS is unavailable, and for the
// durable consumers of a tenant.
func (s *settings) awaitStreams(ctx context.Context, js jetstream.JetStream,
	list func(context.Context) ([]broker.Stream, error)) ([]broker.Stream, error) {
	for {
		qctx, cancel := context.WithTimeout(ctx, s.streams.Timeout)
		all, err := list(qctx)
		cancel()
		if err == nil && len(all) == 0 && s.tenant > 0 {
			err = fmt.Errorf("%w: run `tidings nats durable --name %s --tenant %d`", errNoDurable, s.name, s.tenant)
		}
		switch {
		case err == nil && len(all) == 0:
			return nil, fmt.Errorf("%w: %s has no stream named %s-<number>", ErrNoStreams,
				js.Conn().ConnectedUrlRedacted(), s.streams.Name)
		case err == nil, ctx.Err() != nil:
			return all, nil
		case errors.Is(err, nats.ErrConnectionClosed):
			return nil, ErrClosed
		case !broker.IsTransient(err) && !errors.Is(err, errNoDurable):
			return nil, err
		}
		s.health.set(func(context.Context) error { return err })
		s.log.WarnContext(ctx, "waiting for NATS", "err", err)
		if work.Sleep(ctx, assignInterval) != nil {
			return nil, nil
		}
	}
}

// watch returns a channel that gets ErrClosed if the connection is closed for good before ctx ends.
func watch(ctx context.Context, nc *nats.Conn) <-chan error {
	closed := make(chan error, 1)
	go func() {
		if err := broker.Watch(ctx, nc); err != nil {
			closed <- err
		}
	}()
	return closed
}

// Health reports the state of a subscriber. The zero value is ready for use. Health is safe for
// concurrent use.
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

// Ready returns nil while the subscriber does its work, and otherwise the reason why it does not.
// It suits a readiness probe.
func (h *Health) Ready(ctx context.Context) error {
	h.mu.Lock()
	ready := h.ready
	h.mu.Unlock()
	if ready == nil {
		return errors.New("subscribe: not started")
	}
	return ready(ctx)
}
