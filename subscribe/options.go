package subscribe

import (
	"errors"
	"log/slog"
	"time"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

var (
	// ErrName reports an invalid name of a subscriber.
	ErrName = settings.ErrName
	// ErrType reports a type of events that no kind or upstream of the options Kinds and Upstreams
	// has, or whose payload does not match the handler's type. It says nothing about the
	// installation, because NATS has no list of what that declares.
	ErrType = settings.ErrType
	// ErrOption reports an option that the function does not have, or whose value is out of bounds.
	// It also reports a Takeover or InOrder other than that of the durable consumer of an
	// operator.
	ErrOption = settings.ErrOption
	// ErrFilter reports a subscriber that exists and has another filter: another Only, or a durable
	// consumer of the same name with other subjects.
	ErrFilter = errors.New("subscribe: the subscriber exists with another filter")
	// ErrNoStreams reports a NATS server that answers but has no stream of events. It is the wrong
	// server, or no relay has run yet.
	ErrNoStreams = settings.ErrNoStreams
	// ErrClosed reports a connection to NATS that its client has closed for good. Connect with
	// nats.IgnoreAuthErrorAbort() and nats.MaxReconnects(-1), which leave few reasons for that, and
	// restart the process.
	ErrClosed = broker.ErrClosed
	// ErrStuck reports a function of yours that did not return after its context had ended. Its
	// event was not acknowledged. Its goroutine cannot be ended, so end the process.
	ErrStuck = settings.ErrStuck
)

// Option changes a default of Handle and HandlerDeadLetters, or of projector.Project, DeadLetters
// and Lag. An option of only one of these groups says so, and the other one returns ErrOption.
type Option = settings.Option

// Health reports the state of a subscriber. The zero value is ready for use. Health is safe for
// concurrent use.
type Health = settings.Health

// Streams names the streams of an installation that sets NATS_STREAM or NATS_SUBJECT_PREFIX. The
// defaults are EVENTS and events.
func Streams(name, prefix string) Option {
	return func(s *settings.Settings) { s.Broker.Stream, s.Broker.Prefix = name, prefix }
}

// Tenant makes Handle work in a tenant's NATS account (`tidings nats`), as the subscriber of that
// tenant with that name. It reads the tenant's events through the durable consumers that `tidings
// nats durable` created.
func Tenant(id int64) Option {
	return settings.Of(settings.Handle, "Tenant", func(s *settings.Settings) { s.Tenant = id })
}

// Kinds names the kinds of an installation that has more than the built-in ones. kindfile.Extend
// reads the file of `tidings kinds apply`.
func Kinds(all *kinds.Set) Option { return func(s *settings.Settings) { s.Kinds = all } }

// Upstreams names the declarations of events that your services append to the outbox themselves
// (docs/upstream.md). kindfile.ReadUpstream reads the file of `tidings upstream add`. Their
// payloads are your structs, or json.RawMessage.
func Upstreams(declared ...*upstreams.Upstream) Option {
	return func(s *settings.Settings) { s.Upstreams = append(s.Upstreams, declared...) }
}

// Log sets the logger. The default is slog.Default().
func Log(log *slog.Logger) Option { return func(s *settings.Settings) { s.Log = log } }

// Report connects h to the subscriber, so h.Ready can serve a readiness probe.
func Report(h *Health) Option { return func(s *settings.Settings) { s.Health = h } }

// Timeout bounds one call of your function. When it is over, the call's context ends and the call
// has failed. The default is one minute.
func Timeout(d time.Duration) Option { return func(s *settings.Settings) { s.Timeout = d } }

// Only makes Project deliver only the events of these aggregate types (names of kinds and
// upstreams, and "thread").
func Only(aggregateTypes ...string) Option {
	return settings.Of(settings.Project, "Only", func(s *settings.Settings) {
		s.Only = make(map[string]bool)
		for _, t := range aggregateTypes {
			s.Only[t] = true
		}
	})
}

// Batch is the largest number of events that Project delivers at once: 1 to 20,000. The default is
// 4,000.
func Batch(events int) Option {
	return settings.Of(settings.Project, "Batch", func(s *settings.Settings) { s.Batch = events })
}

// Concurrency is the number of calls of a handler that may run at once, per instance (default 16).
// An instance has one call at a time for an aggregate. Without InOrder, another instance may handle
// an event of that aggregate meanwhile. With InOrder, no other instance begins one before NATS has
// the acknowledgment, or this instance was silent for Takeover.
func Concurrency(n int) Option {
	return settings.Of(settings.Handle, "Concurrency", func(s *settings.Settings) { s.Concurrency = n })
}

// Attempts is the number of attempts after which an event becomes a dead letter. The default is 10.
func Attempts(n int) Option {
	return settings.Of(settings.Handle, "Attempts", func(s *settings.Settings) { s.Attempts = n })
}

// Takeover is the silence after which others take over an instance's work (default 10 seconds,
// minimum 1 second). Slow functions are fine: the instance reports life while they run. It is
// JetStream's AckWait for Handle, and the duration of a lease for Project.
func Takeover(d time.Duration) Option { return func(s *settings.Settings) { s.Takeover = d } }

// Drain is the time that running calls get after the context of Handle has ended. The default is 20
// seconds.
func Drain(d time.Duration) Option {
	return settings.Of(settings.Handle, "Drain", func(s *settings.Settings) { s.Drain = d })
}

// InOrder lets one instance at a time read a partition. So each aggregate's events come in the
// order of the stream, no matter which instance handles them. Instances share the partitions
// evenly, and those beyond the number of partitions stand by (docs/adr/0029). When an instance
// joins, each partition that moves to it pauses for up to Takeover.
func InOrder() Option {
	return settings.Of(settings.Handle, "InOrder", func(s *settings.Settings) { s.InOrder = true })
}

// Since makes a new subscriber begin with the events stored at t or later, instead of the oldest
// ones of the streams. It changes nothing for a subscriber that exists.
func Since(t time.Time) Option {
	return settings.Of(settings.Handle, "Since", func(s *settings.Settings) { s.Since = t })
}

// Bootstrap makes a new subscriber begin with the states of exports, for entities that are older
// than the streams' events. Then Handle reads the streams where the exports end. Each client reads
// the export of its tenant; its token needs the role export. The type of events must be KIND.*, of
// a kind that the API exports.
//
// fn gets each state as an event of the type Snapshot, also of removed and deleted entities. It has
// no ID, Stream, Seq and OccurredAt. States come at least once, and in no order with events: an
// event may be older than a state that fn has had, and a state older than an event. So keep the
// version that you have, and ignore lower ones. Of an edge, compare (created_at, version).
//
// Handle retries a state after BackOff until fn returns nil, also after a Permanent error, and
// Health says why it waits. A state does not become a dead letter, because an erasure could not
// find it: no stream has it.
//
// One instance exports, and the others wait. If it dies, another one continues after Takeover. If
// events expire before NATS delivers them, or a stream is recreated, an instance reads new exports,
// and fn gets all states again. Handle continues with the events meanwhile. It returns the API's
// error if that refuses, for example a token.
func Bootstrap(clients ...*client.Client) Option {
	return settings.Of(settings.Handle, "Bootstrap", func(s *settings.Settings) {
		s.Bootstrap = make([]settings.OpenExport, len(clients))
		for i, c := range clients {
			if c == nil {
				continue // out of bounds
			}
			s.Bootstrap[i] = func(plural, cursor, after string, opts ...client.Option) settings.Export {
				return c.Export(plural, opts...).Resume(cursor, after)
			}
		}
	})
}

// BackOff sets the wait after a failed attempt, by the number of that attempt. The default doubles
// from 1 second to 1 minute.
func BackOff(pause func(attempt int) time.Duration) Option {
	return settings.Of(settings.Handle, "BackOff", func(s *settings.Settings) { s.Pause = pause })
}
