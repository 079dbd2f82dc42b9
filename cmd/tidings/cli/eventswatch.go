package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
)

func (p Process) eventsWatchCommand() *cobra.Command {
	var w eventWatch
	c := p.command(command{
		use:   "watch",
		short: "Print events as the streams store them",
		long: `Watch prints each event after its stream has stored it: the stream and the sequence, the tenant, the
kind and the type, the aggregate's id and the payload. Ctrl-C ends it.

It starts with the next event: tidings events find shows earlier ones. It uses plain NATS, so it can
miss events when the connection breaks. It then prints a note to stderr and continues. A program
that must not miss an event subscribes durably (docs/subscribe.md).`,
		name: "events", needs: needAll | orOutbox, json: onePer("event"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			w.session = s
			w.ctx, w.stop = context.WithCancel(ctx)
			defer w.stop()
			err := broker.Listen(w.ctx, s.NATS, s.Broker, &w, daemon.CommandLogger(s.Stderr, slog.LevelError))
			return nil, errors.Join(err, w.err)
		},
	})
	c.Flags().Int64Var(&w.tenant, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&w.kind, "kind", "", "only of this `kind` or upstream")
	c.Flags().StringVar(&w.eventType, "type", "", "only of this event type, such as created")
	c.Flags().IntVar(&w.limit, "limit", 0, "at most this many events, then the command ends; 0 for no limit")
	return c
}

// watchedEvent is a line of `tidings events watch --json`.
type watchedEvent struct {
	EventID       string          `json:"event_id"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   event.ID        `json:"aggregate_id"`
	EventType     string          `json:"event_type"`
	EventVersion  int             `json:"event_version"`
	OccurredAt    event.Time      `json:"occurred_at"`
	Stream        string          `json:"stream"`
	StreamSeq     uint64          `json:"stream_seq,string"`
	Payload       json.RawMessage `json:"payload"`
}

// eventWatch prints the events that it receives. It implements broker.Listener.
type eventWatch struct {
	*session
	tenant    int64
	kind      string
	eventType string
	limit     int
	ctx       context.Context
	stop      context.CancelFunc
	printed   int
	err       error // the first error of a write to stdout
}

func (w *eventWatch) Begin(map[string]uint64) { fmt.Fprintln(w.Stderr, "Waiting for events.") }

func (w *eventWatch) End() {
	if w.ctx.Err() == nil {
		fmt.Fprintln(w.Stderr, "The connection to NATS broke: events may be missing here.")
	}
}

func (w *eventWatch) Hear(e *event.Event, err error) {
	if w.ctx.Err() != nil || w.tenant != 0 && e.TenantID != w.tenant || w.eventType != "" && e.Type != w.eventType ||
		w.kind != "" && e.AggregateType != w.kind {
		return
	}
	if err != nil {
		fmt.Fprintf(w.Stderr, "Cannot decode an event of %s: %s\n", e.Stream, visible(err.Error()))
		return
	}
	if w.asJSON {
		w.err = w.writeJSON(watchedEvent{e.ID, e.TenantID, e.AggregateType, e.AggregateID, e.Type, e.Version,
			event.Time{Time: e.OccurredAt}, e.Stream, e.Seq, e.Payload})
	} else {
		_, w.err = fmt.Fprintf(w.Stdout, "%s/%d  tenant %d  %s.%s  %s  %s\n", e.Stream, e.Seq, e.TenantID, cell(e.AggregateType),
			cell(e.Type), e.AggregateID, visible(string(e.Payload)))
	}
	if w.printed++; w.printed == w.limit || w.err != nil {
		w.stop()
	}
}
