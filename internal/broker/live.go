package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
)

// Listener receives events as they are stored. One goroutine calls its methods.
type Listener interface {
	// Begin reports that Hear gets every event from now on. last has the last sequence of each
	// stream, by name; Hear gets the events after those.
	Begin(last map[string]uint64)
	// Hear gets an event with its stream and sequence. err reports the parts that cannot be
	// decoded.
	Hear(e *event.Event, err error)
	// End reports that events may be missed until the next Begin.
	End()
}

const (
	liveQueue = 16 << 10    // messages in the queue; if it overflows, events are lost
	liveRetry = time.Second // between attempts to begin, and between checks of a silent connection
)

// liveEvents is the subject of all events that the streams republish.
func (c Config) liveEvents() string { return c.LivePrefix + ".*.*.*" }

// Listen passes all events to l, as the streams republish them over plain NATS. It returns nil when
// ctx ends.
//
// NATS does not send lost events again. If the connection was lost, or events came faster than l
// handled them, Listen calls End and begins again. It detects a silent server after two pings. In a
// cluster a server may drop events that it forwards. A caller that must not miss an event for
// longer must read the stream.
func Listen(ctx context.Context, nc *nats.Conn, cfg Config, l Listener, log *slog.Logger) error {
	log = log.With("component", "live")
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	messages := make(chan *nats.Msg, liveQueue)
	sub, err := nc.ChanSubscribe(cfg.liveEvents(), messages)
	if err != nil {
		return fmt.Errorf("subscribe to %s: %w", cfg.liveEvents(), err)
	}
	defer func() { _ = sub.Unsubscribe() }() // the connection may be closed already
	status := nc.StatusChanged()
	defer nc.RemoveStatusListener(status) // evaluated now: status becomes nil below
	retry := time.NewTicker(liveRetry)
	defer retry.Stop()
	h := &liveSubscription{Listener: l, nc: nc, js: js, cfg: cfg, sub: sub, log: log}
	defer h.end()
	for due := true; ; {
		if h.keep(ctx, due) {
			due = false
		}
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-status:
			if due = open; !open { // the connection is closed forever
				status = nil
			}
		case <-retry.C:
			due = true
		case m := <-messages:
			h.hear(m)
		}
	}
}

// liveSubscription is a subscription with its listener.
type liveSubscription struct {
	Listener
	nc      *nats.Conn
	js      jetstream.JetStream
	cfg     Config
	sub     *nats.Subscription
	log     *slog.Logger
	begun   bool
	refused bool // an attempt to begin failed, and was logged
	since   history
	heard   map[string]uint64 // the last sequence of each stream
}

// history identifies what a subscription went through. If it has not changed, no event was missed.
type history struct {
	connected  bool
	reconnects uint64
	dropped    int
}

func (h *liveSubscription) sample() history {
	now := history{connected: h.nc.IsConnected(), reconnects: h.nc.Stats().Reconnects}
	now.dropped, _ = h.sub.Dropped() // fails if the connection is closed forever
	return now
}

func (h *liveSubscription) end() {
	if h.begun {
		h.begun = false
		h.End()
	}
}

// keep calls End if events were missed. It begins if that is due, or after such an End. It reports
// whether it tried.
func (h *liveSubscription) keep(ctx context.Context, due bool) (tried bool) {
	now := h.sample()
	if h.begun && now != h.since {
		h.end()
		due = true
	}
	if h.begun || !due || !now.connected {
		return false
	}
	last, err := beginning(ctx, h.nc, h.js, h.cfg)
	switch {
	case err == nil && h.sample() == now:
		h.heard = maps.Clone(last)
		h.begun, h.refused, h.since = true, false, now
		h.Begin(last)
	case err != nil && !h.refused && ctx.Err() == nil:
		h.refused = true
		h.log.WarnContext(ctx, "cannot listen to events; retrying", "err", err)
	}
	return true
}

// hear passes an event of ours on, once: after a change of the leader a server may repeat it.
func (h *liveSubscription) hear(m *nats.Msg) {
	if !h.begun || !event.Ours(m.Header) {
		return
	}
	e, err := decodeLive(m)
	if e.Seq > 0 && e.Seq <= h.heard[e.Stream] {
		return
	}
	h.heard[e.Stream] = e.Seq
	h.Hear(&e, err)
}

// decodeLive decodes an event that a stream republished.
func decodeLive(m *nats.Msg) (event.Event, error) {
	e, err := event.Decode(m.Subject, m.Header, m.Data)
	seq, serr := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	e.Stream, e.Seq = m.Header.Get(jetstream.StreamHeader), seq
	return e, errors.Join(err, serr)
}

// beginning returns each stream's last sequence after the subscription exists. So the subscription
// gets all later events.
func beginning(ctx context.Context, nc *nats.Conn, js jetstream.JetStream, cfg Config) (map[string]uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	if err := nc.FlushWithContext(ctx); err != nil {
		return nil, fmt.Errorf("flush the subscription: %w", err)
	}
	// The server's refusal of the subscription came before its answer to the flush.
	if err := nc.LastError(); errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), `"`+cfg.liveEvents()+`"`) {
		return nil, err
	}
	streams, err := Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	last := make(map[string]uint64)
	for _, s := range streams {
		last[s.Name] = s.Last
	}
	return last, nil
}
