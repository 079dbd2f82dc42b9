package broker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
)

// Listener is told of events once they are stored. One goroutine calls its methods.
type Listener interface {
	// Begin says that from now on every event is heard that is stored behind those that last names: each stream's last one, by its name.
	Begin(last map[string]uint64)
	// Hear gets an event, with its stream and sequence. err says what of it cannot be read.
	Hear(e *event.Event, err error)
	// End says that events are missed until the next Begin.
	End()
}

const (
	liveQueue = 16 << 10    // messages that wait to be heard; more of them is a loss
	liveRetry = time.Second // between attempts to begin, and looks at a connection that says nothing
)

// Listen tells l of the events of one aggregate type as the stream republishes them to cfg.LivePrefix.>, over plain NATS, until ctx
// ends; it returns nil then. What is lost on the way is nobody's to send again: when the connection was lost, or events came faster
// than they were heard, l is told so, and begins anew. A server that is silent is noticed after two pings, and in a cluster a
// server may drop what it forwards: who must not miss an event for longer than that reads the stream.
func Listen(ctx context.Context, nc *nats.Conn, cfg Config, aggregate string, l Listener, log *slog.Logger) error {
	log = log.With("component", "live")
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	messages := make(chan *nats.Msg, liveQueue)
	sub, err := nc.ChanSubscribe(cfg.LivePrefix+".*."+aggregate+".*", messages)
	if err != nil {
		return fmt.Errorf("subscribe to %s.>: %w", cfg.LivePrefix, err)
	}
	defer func() { _ = sub.Unsubscribe() }() // the connection may be closed already
	status := nc.StatusChanged()
	defer nc.RemoveStatusListener(status) // this one: it is set to nil below
	retry := time.NewTicker(liveRetry)
	defer retry.Stop()
	h := &hearing{Listener: l, nc: nc, js: js, cfg: cfg, sub: sub, log: log}
	defer h.end()
	for due := true; ; {
		if h.keep(ctx, due) {
			due = false
		}
		select {
		case <-ctx.Done():
			return nil
		case _, open := <-status:
			if due = open; !open { // the connection is closed for good
				status = nil
			}
		case <-retry.C:
			due = true
		case m := <-messages:
			h.hear(m)
		}
	}
}

// hearing is a subscription with its listener.
type hearing struct {
	Listener
	nc      *nats.Conn
	js      jetstream.JetStream
	cfg     Config
	sub     *nats.Subscription
	log     *slog.Logger
	begun   bool
	refused bool // to begin, and that was logged
	since   history
	heard   map[string]uint64 // the last of each stream
}

// history is what a subscription went through. One that went through no more than this has missed nothing since.
type history struct {
	connected  bool
	reconnects uint64
	dropped    int
}

func (h *hearing) look() history {
	now := history{connected: h.nc.IsConnected(), reconnects: h.nc.Stats().Reconnects}
	now.dropped, _ = h.sub.Dropped() // fails when the connection is closed for good
	return now
}

func (h *hearing) end() {
	if h.begun {
		h.begun = false
		h.End()
	}
}

// keep ends the hearing when something was missed, and begins it when it is due, or has just ended. It reports whether it tried.
func (h *hearing) keep(ctx context.Context, due bool) (tried bool) {
	now := h.look()
	if h.begun && now != h.since {
		h.end()
		due = true
	}
	if h.begun || !due || !now.connected {
		return false
	}
	last, err := beginning(ctx, h.nc, h.js, h.cfg)
	switch {
	case err == nil && h.look() == now:
		h.heard = maps.Clone(last)
		h.begun, h.refused, h.since = true, false, now
		h.Begin(last)
	case err != nil && !h.refused && ctx.Err() == nil:
		h.refused = true
		h.log.WarnContext(ctx, "cannot listen to events, trying again", "err", err)
	}
	return true
}

// hear passes an event of ours on, once: after a change of leader a server may say it again.
func (h *hearing) hear(m *nats.Msg) {
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

// decodeLive reads an event as a stream republished it.
func decodeLive(m *nats.Msg) (event.Event, error) {
	e, err := event.Decode(m.Subject, m.Header, m.Data)
	seq, serr := strconv.ParseUint(m.Header.Get(jetstream.SequenceHeader), 10, 64)
	e.Stream, e.Seq = m.Header.Get(jetstream.StreamHeader), seq
	return e, errors.Join(err, serr)
}

// beginning returns each stream's last sequence once the subscription stands: what is stored behind them is heard.
func beginning(ctx context.Context, nc *nats.Conn, js jetstream.JetStream, cfg Config) (map[string]uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	if err := nc.FlushWithContext(ctx); err != nil {
		return nil, fmt.Errorf("flush the subscription: %w", err)
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
