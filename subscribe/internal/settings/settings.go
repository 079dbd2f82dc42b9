package settings

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
)

// The errors that package subscribe exports and describes.
var (
	ErrName      = errors.New("subscribe: a name has 1 to 32 letters, digits, - and _, and begins with a letter")
	ErrType      = errors.New("subscribe: no such type of events")
	ErrOption    = errors.New("subscribe: the option does not apply")
	ErrNoStreams = errors.New("subscribe: there are no streams of events")
	ErrStuck     = errors.New("subscribe: a function did not return after its context had ended; restart the process")
)

// Recheck is the time between two looks at what a subscriber waits for.
const Recheck = time.Second

// ErrNoDurable reports that a tenant has no durable consumers yet.
var ErrNoDurable = errors.New("subscribe: there are no durable consumers of this subscriber")

// The functions whose options exist.
const (
	Handle  = "Handle"
	Project = "Project"
)

// Option changes a default.
type Option func(*Settings)

// Of returns an option that only one of the functions has.
func Of(function, name string, set Option) Option {
	return func(s *Settings) {
		if s.function != function {
			s.refused = append(s.refused, fmt.Errorf("%w: %s is an option of %s, not of %s", ErrOption, name, function, s.function))
		}
		set(s)
	}
}

// Settings are what the options set.
type Settings struct {
	Name      string
	function  string // of which these are the options
	refused   []error
	Broker    broker.Config // of which the names and the timeout matter
	Kinds     *kinds.Set
	Upstreams []*upstreams.Upstream
	Log       *slog.Logger
	Registry  Registry
	Health    *Health
	Tenant    int64 // of the account of the connection; 0 if it is none of a tenant

	Only    map[string]bool // for Project: the aggregate types; nil for all
	Timeout time.Duration   // of one call of the function
	Batch   int             // this and the following are for Project
	Fill    any             // the options of package projector alone

	Concurrency int // this and the following are for Handle
	Attempts    int
	Takeover    time.Duration
	Drain       time.Duration
	InOrder     bool
	Since       time.Time
	Pause       func(attempt int) time.Duration
	Bootstrap   []OpenExport      // nil without the option
	Step        func(step string) // nil but in fault tests: called at the named crash points
}

func backOff(attempt int) time.Duration { return min(time.Second<<min(attempt-1, 6), time.Minute) }

var subscriberName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,31}$`)

// New returns the settings of a function. It returns ErrName, ErrOption and ErrType (of Only).
func New(name, function string, opts []Option) (*Settings, error) {
	s := &Settings{
		Name: name, function: function, Kinds: kinds.Builtin(), Log: slog.Default(), Registry: Unmeasured{}, Timeout: time.Minute,
		Batch: 4000, Concurrency: 16, Attempts: 10, Takeover: 10 * time.Second, Drain: 20 * time.Second, Pause: backOff,
	}
	for _, o := range opts {
		o(s)
	}
	s.Broker.Stream, s.Broker.Prefix = cmp.Or(s.Broker.Stream, "EVENTS"), cmp.Or(s.Broker.Prefix, "events")
	s.Broker.Timeout = 5 * time.Second
	if !subscriberName.MatchString(name) {
		return nil, fmt.Errorf("%w: %.80q", ErrName, name)
	}
	errs := s.refused
	for what, bad := range map[string]bool{
		"Timeout": s.Timeout <= 0, "Batch": s.Batch < 1 || s.Batch > 20000, "Concurrency": s.Concurrency < 1, "Attempts": s.Attempts < 1,
		"Takeover": s.Takeover < time.Second, "Drain": s.Drain < 0, "Tenant": s.Tenant < 0, "BackOff": s.Pause == nil, "Log": s.Log == nil,
		"Bootstrap": s.Bootstrap != nil && (len(s.Bootstrap) == 0 || slices.ContainsFunc(s.Bootstrap, OpenExport.isNone)),
		"Kinds":     s.Kinds == nil, "Upstreams": slices.Contains(s.Upstreams, nil),
	} {
		if bad {
			errs = append(errs, fmt.Errorf("%w: the value of %s is out of bounds", ErrOption, what))
		}
	}
	if s.Tenant > 0 && !s.Since.IsZero() {
		errs = append(errs, fmt.Errorf("%w: Since has no effect with Tenant: give `tidings nats durable` the flag --since", ErrOption))
	}
	if s.Bootstrap != nil && (s.Tenant > 0 || !s.Since.IsZero()) {
		errs = append(errs, fmt.Errorf("%w: Bootstrap creates the durable consumers where the exports end, so not with Tenant or Since",
			ErrOption))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, s.checkOnly()
}

// AwaitStreams returns the streams as list does. It waits while NATS is unavailable, and for the
// durable consumers of a tenant.
func (s *Settings) AwaitStreams(ctx context.Context, js jetstream.JetStream,
	list func(context.Context) ([]broker.Stream, error)) ([]broker.Stream, error) {
	for {
		qctx, cancel := context.WithTimeout(ctx, s.Broker.Timeout)
		all, err := list(qctx)
		cancel()
		if err == nil && len(all) == 0 && s.Tenant > 0 {
			err = fmt.Errorf("%w: run `tidings nats durable --name %s --tenant %d`", ErrNoDurable, s.Name, s.Tenant)
		}
		switch {
		case err == nil && len(all) == 0:
			return nil, fmt.Errorf("%w: %s has no stream named %s-<number>", ErrNoStreams,
				js.Conn().ConnectedUrlRedacted(), s.Broker.Stream)
		case err == nil, ctx.Err() != nil:
			return all, nil
		case errors.Is(err, nats.ErrConnectionClosed):
			return nil, broker.ErrClosed
		case !broker.IsTransient(err) && !errors.Is(err, ErrNoDurable):
			return nil, err
		}
		if nc := js.Conn(); !nc.IsConnected() { // the timeout of the request says less
			err = fmt.Errorf("no connection to %s: %w", strings.Join(nc.Servers(), ", "), cmp.Or(nc.LastError(), err))
		}
		SetReady(s.Health, func(context.Context) error { return err })
		s.Log.WarnContext(ctx, "waiting for NATS", "err", err)
		if work.Sleep(ctx, Recheck) != nil {
			return nil, nil
		}
	}
}

// Watch returns a channel that gets ErrClosed if the connection is closed for good before ctx ends.
func Watch(ctx context.Context, nc *nats.Conn) <-chan error {
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

// SetReady replaces what h reports, unless h is nil.
func SetReady(h *Health, ready func(context.Context) error) {
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

// TypesOf returns the event types of a kind or an upstream; nil if there is none of that name.
func (s *Settings) TypesOf(aggregateType string) []string {
	if _, ok := s.Kinds.Edge(aggregateType); ok {
		return event.EdgeEvents
	}
	if _, ok := s.Kinds.Child(aggregateType); ok {
		return event.ChildEvents
	}
	switch aggregateType {
	case event.AggregateThread:
		return event.ThreadEvents
	case event.AggregatePerson:
		return event.PersonEvents
	case event.AggregateHeartbeat:
		return []string{event.Sent}
	}
	for _, u := range s.Upstreams {
		if u.Name == aggregateType {
			return slices.Sorted(maps.Keys(u.Events))
		}
	}
	return nil
}

// checkOnly returns ErrType if Only names an aggregate type without events, or none.
func (s *Settings) checkOnly() error {
	if s.Only != nil && len(s.Only) == 0 {
		return fmt.Errorf("%w: Only names no aggregate type", ErrType)
	}
	for _, t := range slices.Sorted(maps.Keys(s.Only)) {
		if s.TypesOf(t) == nil {
			return fmt.Errorf("%w: Only(%.80q): %w", ErrType, t, ErrUndeclared(t))
		}
	}
	return nil
}

// ErrUndeclared returns the part of ErrType that names an aggregate type.
func ErrUndeclared(aggregateType string) error {
	return fmt.Errorf("this program knows no kind or upstream %.40q; name those of your installation with the options Kinds and Upstreams",
		aggregateType)
}

// grace is the longest time that a function gets to return after its context has ended.
const grace = 5 * time.Second

// InTime calls fn. If fn has not returned some time after the end of ctx, late gets its error
// later.
func InTime(ctx context.Context, timeout time.Duration, fn func() error) (late <-chan error, err error) {
	done := make(chan error, 1)
	go func() { done <- guard(fn) }()
	select {
	case err = <-done:
		return nil, err
	case <-ctx.Done():
	}
	select {
	case err = <-done:
		return nil, err
	case <-time.After(min(grace, timeout)):
		return done, nil
	}
}

// guard calls fn, and returns a panic as an error.
func guard(fn func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	return fn()
}
