package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
)

// foundEvent is a line of `tidings events find --json`.
type foundEvent struct {
	Where         string          `json:"where"`
	ID            int64           `json:"id,string"`
	EventID       string          `json:"event_id"`
	TenantID      int64           `json:"tenant_id,string"`
	AggregateType string          `json:"aggregate_type"`
	AggregateID   event.ID        `json:"aggregate_id"`
	EventType     string          `json:"event_type"`
	EventVersion  int             `json:"event_version"`
	OccurredAt    event.Time      `json:"occurred_at"`
	ProcessedAt   *event.Time     `json:"processed_at,omitempty"`
	Slot          int             `json:"slot"`
	Partition     *int            `json:"partition,omitempty"` // only of a published event, like stream and stream_seq
	Stream        string          `json:"stream,omitempty"`
	StreamSeq     uint64          `json:"stream_seq,omitempty,string"`
	Attempts      int             `json:"attempts"`
	LastError     string          `json:"last_error,omitempty"`
	TraceParent   string          `json:"traceparent,omitempty"`
	Payload       json.RawMessage `json:"payload,omitempty"`
	Path          []step          `json:"path,omitempty"` // with --trace
}

func foundEventOf(f outbox.Found, streams map[int]string) foundEvent {
	e := foundEvent{
		Where: f.Where, ID: f.OutboxID, EventID: f.ID, TenantID: f.TenantID, AggregateType: f.AggregateType,
		AggregateID: f.AggregateID, EventType: f.Type,
		EventVersion: f.Version, OccurredAt: event.Time{Time: f.OccurredAt}, Slot: f.Slot, StreamSeq: f.StreamSeq, Attempts: f.Attempts,
		LastError: f.LastError, TraceParent: f.TraceParent, Payload: f.Payload,
	}
	if f.Partition >= 0 {
		e.Partition, e.Stream = &f.Partition, streams[f.Partition]
	}
	if !f.ProcessedAt.IsZero() {
		e.ProcessedAt = &event.Time{Time: f.ProcessedAt}
	}
	return e
}

var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)

// findFlags has the flags of events find.
type findFlags struct {
	id, sequence, aggregate, since, until, spans string
	q                                            outbox.FindQuery
}

func (p Process) eventsFindCommand() *cobra.Command {
	var o findFlags
	c := p.command(command{
		use:   "find",
		short: "Find events in the outbox, its archive and its DLQ",
		long: `Find selects events in one of four ways: by --id (the outbox id, or the UUID in the header ce-id),
by --sequence on a stream, by --aggregate with --tenant, or by time. A search by time needs --since.

It searches the outbox, the archive and the DLQ. For an aggregate it reads the whole outbox, which
has no index for that: about two seconds per million messages. A search by time may miss events that
occurred more than ten minutes before or after their insert. To find an event of an export, run
tidings archive restore first. A message on the stream has its
outbox id in the header Tidings-Outbox-Id. The aggregate of a comment is its post (comment/42), that
of a follow is the followed user (follow/42).

With --id or --sequence, --trace shows the path of the event with times: the request, its creation,
the publish, and the work of the consumers. It reads the spans that tidings dev --trace writes.`,
		needs: needServers, json: onePer("event"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			return nil, o.find(ctx, s)
		},
	})
	c.Flags().StringVar(&o.id, "id", "", "an outbox id, or the UUID of an event")
	c.Flags().StringVar(&o.sequence, "sequence", "", "a sequence of a stream, as `STREAM/N`")
	c.Flags().StringVar(&o.q.EventType, "type", "", "only of this event type, such as created")
	c.Flags().StringVar(&o.aggregate, "aggregate", "", "an aggregate, as `TYPE/ID`; with --tenant")
	c.Flags().Int64Var(&o.q.TenantID, "tenant", 0, "only of this tenant")
	c.Flags().StringVar(&o.since, "since", "", "only events since then: a duration ago such as 24h, a date, or a time in RFC 3339")
	c.Flags().StringVar(&o.until, "until", "", "only events from before then, in the same forms")
	c.Flags().IntVar(&o.q.Limit, "limit", 50, "at most this many events, 1 to 10000: the earliest by time, else the lowest ids")
	c.Flags().BoolVar(&o.q.Payload, "payload", false, "show payloads too")
	c.Flags().StringVar(&o.spans, "trace", "", "show the path of the event too, from this `file` of spans; without =FILE from "+
		"the file of tidings dev")
	c.Flags().Lookup("trace").NoOptDefVal = traceDefault
	return c
}

// find prints the events that the flags select.
func (o *findFlags) find(ctx context.Context, s *session) error {
	if s.changed("tenant") && o.q.TenantID < 1 {
		return &usageError{errors.New("--tenant is a positive number; --type sent finds heartbeats, the events of tenant 0")}
	}
	if o.sequence != "" && o.id != "" {
		return &usageError{errors.New("--id and --sequence exclude each other")}
	}
	if o.sequence != "" {
		var err error
		if o.id, err = s.eventAt(ctx, s.data, o.sequence); err != nil {
			return err
		}
	}
	if err := parseFind(&o.q, o.id, o.aggregate, o.since, o.until, time.Now()); err != nil {
		return &usageError{err}
	}
	var file string
	if o.spans != "" {
		if o.id == "" {
			return &usageError{errors.New("--trace needs --id")}
		}
		var err error
		if file, err = s.pathFile(o.spans, s.data); err != nil {
			return err
		}
	}
	return s.findEvents(ctx, o.q, file)
}

// findEvents prints the events of the query, with their paths if file is not "".
func (s *session) findEvents(ctx context.Context, q outbox.FindQuery, file string) error {
	y, err := s.open(ctx, s.data, "events", needDatabases|orOutbox)
	if err != nil {
		return err
	}
	defer y.close()
	limit := q.Limit
	q.Limit++ // one more shows whether there are more
	began := time.Now()
	found, err := outbox.Find(ctx, y.Truth, q)
	if took := time.Since(began); q.AggregateID != "" && took >= time.Second {
		fmt.Fprintf(s.Stderr, "Read the outbox in %s.\n", took.Round(time.Second/10))
	}
	if errors.Is(err, outbox.ErrFindQuery) {
		return &usageError{errors.New("events find needs --id, --sequence, --aggregate with --tenant, or --since")}
	}
	if err != nil {
		return err
	}
	partitions, err := outbox.Partitions(ctx, y.Truth)
	if err != nil {
		return err
	}
	streams := make(map[int]string)
	for _, part := range partitions {
		streams[part.Number] = part.Stream
	}
	more := len(found) > limit
	if err := s.printFound(found[:min(len(found), limit)], streams, file, q.Payload); err != nil {
		return err
	}
	if len(found) == 0 {
		fmt.Fprintln(s.Stderr, "Nothing was found.")
	}
	if more {
		fmt.Fprintln(s.Stderr, "There are more: use a higher --limit.")
	}
	return nil
}

// eventAt returns the id of the event at a sequence of a stream. place is STREAM/N.
func (p Process) eventAt(ctx context.Context, data, place string) (id string, err error) {
	stream, text, _ := strings.Cut(place, "/")
	seq, err := strconv.ParseUint(text, 10, 64)
	if err != nil || stream == "" || seq == 0 {
		return "", &usageError{fmt.Errorf("--sequence is %q: want STREAM/N, such as EVENTS-0/42", place)}
	}
	y, err := p.open(ctx, data, "events", needAll|orOutbox)
	if err != nil {
		return "", err
	}
	defer y.close()
	if err := status.Retry(ctx, status.Patience, func() (err error) {
		id, err = broker.EventAt(ctx, y.JetStream, stream, seq)
		return err
	}); err != nil {
		return "", err
	}
	if id == "" {
		return "", fmt.Errorf("stream %s has no event at sequence %d: the message expired, was erased, does not exist yet, "+
			"or is not an event", stream, seq)
	}
	return id, nil
}

// parseAgeFlag reads the flag's time as parseAge does, or returns the zero time if it has none.
func parseAgeFlag(flag, value string, now time.Time) (t time.Time, err error) {
	if value == "" {
		return t, nil
	}
	if t, err = parseAge(value, now); err != nil {
		return t, fmt.Errorf("%s: %w", flag, err)
	}
	return t, nil
}

// parseFind reads and checks the values that package pflag cannot.
func parseFind(q *outbox.FindQuery, id, aggregate, since, until string, now time.Time) (err error) {
	if q.Limit < 1 || q.Limit > 10_000 || q.TenantID < 0 {
		return errors.New("--limit must be 1 to 10000, and --tenant a positive number")
	}
	if q.Since, err = parseAgeFlag("--since", since, now); err != nil {
		return err
	}
	if q.Until, err = parseAgeFlag("--until", until, now); err != nil {
		return err
	}
	switch {
	case id != "" && aggregate != "":
		return errors.New("--id and --aggregate exclude each other")
	case uuidForm.MatchString(id):
		q.EventID = id
	case id != "":
		parsed, err := event.ParseNumber(id)
		if err != nil {
			return fmt.Errorf("--id must be an outbox id or a UUID: %w", err)
		}
		q.OutboxID = int64(parsed)
	}
	if aggregate != "" {
		kind, text, ok := strings.Cut(aggregate, "/")
		id, err := event.ParseID(text)
		if !ok || kind == "" || err != nil {
			return fmt.Errorf("--aggregate is %q: want TYPE/ID", aggregate)
		}
		if q.TenantID == 0 {
			return errors.New("--aggregate needs --tenant")
		}
		q.AggregateType, q.AggregateID = kind, id
	}
	return nil
}

// printFound prints events, with their paths if file is not "".
func (s *session) printFound(found []outbox.Found, streams map[int]string, file string, payload bool) error {
	header := []string{"WHERE", "ID", "EVENT", "TENANT", "AGGREGATE", "TYPE", "SLOT", "OCCURRED", "PUBLISHED", "STREAM", "SEQUENCE"}
	if payload {
		header = append(header, "PAYLOAD")
	}
	rows := [][]string{header}
	var events []foundEvent
	for _, f := range found {
		e := foundEventOf(f, streams)
		if file != "" {
			if err := addPath(&e, file); err != nil {
				return err
			}
		}
		events = append(events, e)
		published, seq := "", ""
		stream := streams[f.Partition] // "" for partition -1, of an unpublished event
		if !f.ProcessedAt.IsZero() {
			published = f.ProcessedAt.UTC().Format(time.RFC3339)
		}
		if f.StreamSeq > 0 {
			seq = fmt.Sprint(f.StreamSeq)
		}
		row := []string{f.Where, fmt.Sprint(f.OutboxID), f.ID, fmt.Sprint(f.TenantID), aggregate(f.AggregateType, f.AggregateID),
			cell(f.Type), fmt.Sprint(f.Slot), f.OccurredAt.UTC().Format(event.TimeFormat), published, stream, seq}
		if payload {
			row = append(row, string(f.Payload))
		}
		rows = append(rows, row)
	}
	if err := s.print(lists(events, rowsOf(rows...))); err != nil || s.asJSON || file == "" {
		return err
	}
	for _, e := range events {
		if err := s.printPath(e, file); err != nil {
			return err
		}
	}
	return nil
}
