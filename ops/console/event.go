package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/redact"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
	"github.com/tidings/tidings/store"
)

const (
	eventRows   = 50
	tailWindows = 2               // of 20,000 ids, in which the tail looks for events that match
	brokerWait  = 2 * time.Second // limit for one message that a page reads from the stream
)

type eventPage struct {
	Tail    bool // the newest events, live
	Asked   bool // the reader searched or filtered
	Kinds   []string
	States  []outbox.State
	Rows    []outbox.Found
	Streams map[int]string
	Next    string
	Back    time.Time // how far back the search has read, if there is a next page
	Path    *eventPath
	Nothing string // what the search did not find
	Try     string
	Export  string // URL that searches an export for the event
	Trace   string // the trace whose events the page lists
	Child   string // URL of the child whose id the reader searched for
}

// eventPath is one event with its stations.
type eventPath struct {
	outbox.Found
	Stream   string
	Steps    []step
	TraceID  string
	TraceURL string
	Payload  string // empty unless the reader asked for it
	Actor    string // who wrote it; empty: the payload does not say it
	Exported bool   // read from an export
	Offers   []offer
	// The ids of the events of its aggregate before and after it; empty: none, or too far away.
	Before, Next string
	Far          int // how far away that is, in messages of the outbox
}

// offer is an act on the event in its state, with its input.
type offer struct {
	Act   string
	Label string // instead of the act's; empty: the act's
	In    url.Values
}

// step is a station of an event. Level is the class of its badge.
type step struct {
	Name, Level string
	At          time.Time
	By          bool          // At is an upper bound
	After       time.Duration // time since the event was written; 0: unknown, or before that
	From        time.Time     // when what the step waited for had happened; zero: the step has no bar
	X, W        int           // the place of its bar, of fallWidth
	Says        string
	URL, Link   string
}

// fallWidth is the width of the waterfall of an event.
const fallWidth = 400

var (
	sequenceForm  = regexp.MustCompile(`^([^/\s]+)[:#\s]\s*([0-9]{1,20})$`)
	aggregateForm = regexp.MustCompile(`^([^/]+)/([^/]+)$`)
	typeForm      = regexp.MustCompile(`^([a-z][a-z0-9_]*)\.([a-z][a-z0-9_]*)$`)
	traceForm     = regexp.MustCompile(`^(?:[0-9a-f]{2}-)?([0-9a-f]{32})(?:-[0-9a-f]{16}-[0-9a-f]{2})?$`)
)

// isTail reports whether the view of the event page follows the newest events. It then reads few
// rows, so that it can do so every second.
func isTail(v *view) bool {
	return v.query("q")+v.query("since")+v.query("until")+v.query("before") == ""
}

// eventData finds an event by its id, its outbox id or its sequence on a stream, and shows its
// path. Or it lists the events of an aggregate, of a trace, or of a kind, type, state and time.
func (c *Console) eventData(ctx context.Context, v *view) (any, error) {
	tenant, err := v.tenant()
	if err != nil {
		return nil, err
	}
	partitions, err := outbox.Partitions(ctx, c.deps.Truth)
	if err != nil {
		return nil, err
	}
	p := &eventPage{Streams: make(map[int]string), Tail: isTail(v), Kinds: c.kindNames(),
		States: []outbox.State{outbox.StatePending, outbox.StatePublished, outbox.StateDead}}
	for _, part := range partitions {
		p.Streams[part.Number] = part.Stream
	}
	q := v.query("q")
	p.Asked = !p.Tail || v.query("kind")+v.query("type")+v.query("state") != ""
	switch id, uerr := uuid.Parse(q); {
	case traceForm.MatchString(q):
		err = c.listEvents(ctx, v, p, tenant)
	case uerr == nil && len(q) == 36:
		if err = c.oneEvent(ctx, v, p, outbox.FindQuery{EventID: id.String(), TenantID: tenant}); err == nil && p.Path == nil {
			err = c.childOf(ctx, p, tenant, id.String())
		}
	case q != "" && strings.Trim(q, "0123456789") == "":
		n, perr := strconv.ParseInt(q, 10, 64)
		if perr != nil {
			return p, &inputError{"An outbox id is a 64-bit number."}
		}
		err = c.oneEvent(ctx, v, p, outbox.FindQuery{OutboxID: n, TenantID: tenant})
	case sequenceForm.MatchString(q):
		err = c.eventAt(ctx, v, p, partitions, tenant)
	default:
		err = c.listEvents(ctx, v, p, tenant)
	}
	return p, err
}

// childOf finds the child that has the id, for a reader who searches for its events.
func (c *Console) childOf(ctx context.Context, p *eventPage, tenant int64, id string) error {
	if tenant == 0 {
		p.Try += " For the id of a comment, enter its tenant."
		return nil
	}
	for _, k := range c.deps.Kinds.Now().AllChildren() {
		found, err := store.ReadChildren(ctx, c.deps.Truth, tenant, k, []string{id})
		if err != nil {
			return err
		}
		if child, is := found[id]; is {
			p.Nothing, p.Try = "This is the id of a "+k.Name+", and not of an event.", fmt.Sprintf(
				"Its events are in the aggregate %s/%s.", k.Name, child.Parent)
			p.Child = address("inspect", "tenant", tenant, "kind", k.Name, "id", id)
		}
	}
	return nil
}

// oneEvent shows the event that q finds.
func (c *Console) oneEvent(ctx context.Context, v *view, p *eventPage, q outbox.FindQuery) error {
	q.Limit, q.Payload = 1, true
	found, err := outbox.Find(ctx, c.deps.Truth, q)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return c.notFound(ctx, v, p, q)
	}
	p.Path, err = c.path(ctx, v, p, found[0])
	return err
}

// eventAt shows the event at a sequence of a stream. It reads the stream first, and the outbox if
// the stream no longer has the message.
func (c *Console) eventAt(ctx context.Context, v *view, p *eventPage, partitions []outbox.Partition, tenant int64) error {
	m := sequenceForm.FindStringSubmatch(v.query("q"))
	seq, err := strconv.ParseUint(m[2], 10, 64)
	if err != nil || seq == 0 {
		return &inputError{"A sequence is a positive 64-bit number."}
	}
	for _, part := range partitions {
		if part.Stream != m[1] {
			continue
		}
		if id := c.onStream(ctx, part.Stream, seq); id != "" {
			return c.oneEvent(ctx, v, p, outbox.FindQuery{EventID: id, TenantID: tenant})
		}
		found, err := outbox.FindPublished(ctx, c.deps.Truth, tenant, part, seq)
		if err != nil {
			return err
		}
		if len(found) > 0 {
			return c.oneEvent(ctx, v, p, outbox.FindQuery{EventID: found[0].ID, TenantID: tenant})
		}
		p.Nothing, p.Try = fmt.Sprintf("There is no event at sequence %d of %s.", seq, part.Stream),
			"The message may have expired, been erased, or be the stream's closing message. Search by id or by aggregate."
		return nil
	}
	return &inputError{fmt.Sprintf("There is no stream %.60q. Enter STREAM:SEQUENCE, for example %s-0:17.", m[1], c.deps.Broker.Stream)}
}

// onStream returns the id of the event at a sequence of the stream. It is empty if there is no
// event or the stream does not answer.
func (c *Console) onStream(ctx context.Context, stream string, seq uint64) string {
	if c.deps.JetStream == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, brokerWait)
	defer cancel()
	m, err := broker.Next(ctx, c.deps.JetStream, stream, seq)
	if err != nil || m == nil || m.Seq != seq {
		return ""
	}
	if id, err := uuid.Parse(m.Header.Get(event.HeaderID)); err == nil {
		return id.String()
	}
	return ""
}

// kindNames returns the names of all kinds of edges and of children.
func (c *Console) kindNames() (names []string) {
	set := c.deps.Kinds.Now()
	for _, e := range set.AllEdges() {
		names = append(names, e.Name)
	}
	for _, k := range set.AllChildren() {
		names = append(names, k.Name)
	}
	return names
}

// listEvents lists events, newest first.
func (c *Console) listEvents(ctx context.Context, v *view, p *eventPage, tenant int64) (err error) {
	q := outbox.SearchQuery{TenantID: tenant, AggregateType: v.query("kind"), EventType: v.query("type"),
		State: outbox.State(v.query("state")), Limit: eventRows}
	if p.Tail && (p.Asked || tenant != 0) { // without a filter, few rows fill the page
		q.Windows = tailWindows
	}
	if q.State != "" && !slices.Contains(p.States, q.State) {
		return &inputError{"state is pending, published or dead."}
	}
	switch text := v.query("q"); {
	case text == "":
	case traceForm.MatchString(text):
		q.TraceID = traceForm.FindStringSubmatch(text)[1]
		p.Trace = q.TraceID
	case typeForm.MatchString(text):
		m := typeForm.FindStringSubmatch(text)
		q.AggregateType, q.EventType = m[1], m[2]
	case aggregateForm.MatchString(text):
		m := aggregateForm.FindStringSubmatch(text)
		if q.AggregateID, err = event.ParseID(m[2]); err != nil {
			return &inputError{err.Error() + "."}
		}
		if q.AggregateType = m[1]; tenant == 0 {
			return &inputError{"Enter the tenant of the aggregate."}
		}
	default:
		return &inputError{"Search for an event's id (a UUID), an outbox id, STREAM:SEQUENCE, TYPE/ID of an aggregate, " +
			"a type such as comment.created, or a trace id."}
	}
	if q.Since, err = v.queryTime("since"); err != nil {
		return err
	}
	if q.Until, err = v.queryTime("until"); err != nil {
		return err
	}
	if q.Before, err = v.queryInt("before"); err != nil {
		return err
	}
	s, err := outbox.Search(ctx, c.deps.Truth, q)
	if err != nil {
		return err
	}
	if p.Rows = s.Found; s.Next != 0 {
		p.Next, p.Back = v.with("before", s.Next), s.Back
	}
	switch {
	case len(s.Found) > 0:
	case !p.Asked && s.Next == 0:
		p.Nothing, p.Try = "There are no events yet.", "A write appears here within a second."
	case p.Tail:
		p.Nothing, p.Try = "No event matches.", "A new one appears here within a second. Older ones are on the next page."
	case s.Next == 0:
		p.Nothing, p.Try = "No event matches.", "Widen the time or remove a filter. If only an export has the event, search by its id."
	}
	return nil
}

// notFound explains why an id has no row. Its range may be in an export only.
func (c *Console) notFound(ctx context.Context, v *view, p *eventPage, q outbox.FindQuery) error {
	p.Nothing, p.Try = "No such event is in the outbox, its archive or its DLQ.",
		"It may belong to another tenant, or an operator discarded it: the audit log and the history of dead letters record that."
	ids := []int64{q.OutboxID}
	if q.EventID != "" {
		var err error
		if ids, err = outbox.IDsOf(ctx, c.deps.Truth, q.EventID); err != nil {
			return err
		}
	}
	cold := coldstore.New(c.deps.Truth, "", nil, nil, nil)
	defer cold.Close()
	for _, id := range ids {
		place, ok, err := outbox.PlaceOf(ctx, c.deps.Truth, id)
		if err != nil || !ok || place.State != outbox.RangeGone {
			if err != nil {
				return err
			}
			continue
		}
		exports, err := cold.OfRange(ctx, place.From)
		if err != nil {
			return err
		}
		p.Try = fmt.Sprintf("Its range of ids was dropped at %s.", place.DroppedAt.UTC().Format(time.RFC3339))
		if len(exports) == 0 {
			p.Try += " No export has it."
			continue
		}
		if v.query("export") != "read" {
			p.Try += " An export may have it."
			p.Export = v.with("export", "read")
			continue
		}
		found, err := cold.Find(ctx, place.From, id, q.EventID)
		if err != nil {
			c.log.WarnContext(ctx, "export not read", "range", place.From, "err", err)
			return &problem{503, "The export cannot be read",
				"The API needs the right to read the exports' store. Run `tidings archive restore` where the archiver runs."}
		}
		if found == nil || q.TenantID != 0 && found.Row.TenantID != q.TenantID {
			p.Try += " Its export does not have the event."
			continue
		}
		p.Nothing, p.Try = "", ""
		if p.Path, err = c.path(ctx, v, p, rowOfExport(found.Row)); err == nil {
			p.Path.Exported = true
		}
		return err
	}
	return nil
}

// rowOfExport converts a row of an export to the row that the table had.
func rowOfExport(r coldstore.Row) outbox.Found {
	moment := func(s string) time.Time {
		t, _ := time.Parse(time.RFC3339Nano, s) // the zero time for values without a time, such as infinity
		return t
	}
	f := outbox.Found{Event: event.Event{ID: r.EventID, TenantID: r.TenantID, AggregateType: r.AggregateType,
		AggregateID: r.AggregateID,
		Type:        r.EventType, Version: int(r.EventVersion),
		OccurredAt: moment(r.OccurredAt), Payload: r.Payload, Slot: int(r.Slot), OutboxID: r.ID}, Where: "export", Partition: -1,
		ProcessedAt: moment(r.ProcessedAt), Attempts: int(r.Attempts), InsertedAt: moment(r.InsertedAt)}
	if r.Partition != nil {
		f.Partition = int(*r.Partition)
	}
	if r.StreamSeq != nil {
		f.StreamSeq = uint64(*r.StreamSeq)
	}
	if r.LastError != nil {
		f.LastError = *r.LastError
	}
	if r.TraceID != nil {
		f.TraceParent = *r.TraceID
	}
	return f
}

// traceID returns the trace id of a traceparent (W3C Trace Context), or "".
func traceID(parent string) string {
	if sc := tracing.Parse(parent); sc.IsValid() {
		return sc.TraceID().String()
	}
	return ""
}

// path collects the stations of an event.
func (c *Console) path(ctx context.Context, v *view, p *eventPage, f outbox.Found) (*eventPath, error) {
	e := &eventPath{Found: f, Stream: p.Streams[f.Partition], TraceID: traceID(f.TraceParent)}
	if e.TraceID != "" && c.cfg.TraceURL != "" {
		e.TraceURL = strings.ReplaceAll(c.cfg.TraceURL, "{trace_id}", url.PathEscape(e.TraceID))
	}
	if v.query("payload") == "show" && v.mayReadPayloads() {
		e.Payload = string(f.Payload)
	}
	e.add(step{Name: "Occurred", Level: "ok", At: f.OccurredAt})
	e.add(step{Name: "Written", Level: "ok", At: f.InsertedAt,
		Says: fmt.Sprintf("to the outbox as message %d, slot %d", f.OutboxID, f.Slot)})
	for _, part := range []func(context.Context, *eventPath) error{c.operators, c.publishing, c.applying, c.archiving, c.beside} {
		if err := part(ctx, e); err != nil {
			return nil, err
		}
	}
	e.fall()
	if k, ok := c.deps.Kinds.Now().Child(f.AggregateType); ok && len(f.Payload) > 0 && redact.IsRedacted(k.Names(), f.Type, f.Payload) {
		e.add(step{Name: "Redacted", Level: "warn", Says: "an erasure removed a person's text from the payload"})
	}
	var wrote struct {
		Actor string `json:"actor"`
	}
	if json.Unmarshal(f.Payload, &wrote) == nil { // an upstream's actor may be anything
		e.Actor = wrote.Actor
	}
	e.Found.Payload = nil
	return e, nil
}

func (e *eventPath) add(s step) {
	if s.At.After(e.InsertedAt) {
		s.After = s.At.Sub(e.InsertedAt)
	}
	if s.Level == "ok" && s.At.IsZero() {
		s.Says = strings.TrimPrefix(s.Says+", at an unknown time", ", ")
	}
	e.Steps = append(e.Steps, s)
}

// fall places the bars of the steps between the write and the last step whose time is known. The
// bar of a step with an upper bound goes beyond that.
func (e *eventPath) fall() {
	var whole time.Duration
	for _, s := range e.Steps {
		if !s.From.IsZero() && !s.By {
			whole = max(whole, s.After)
		}
	}
	whole += whole / 4
	for i := range e.Steps {
		s := &e.Steps[i]
		from, to := max(s.From.Sub(e.InsertedAt), 0), s.After
		if s.By {
			to = whole
		}
		if s.From.IsZero() || to < from || whole == 0 {
			continue
		}
		at := func(d time.Duration) int { return int(d.Seconds() / whole.Seconds() * fallWidth) }
		s.X = at(from)
		s.W = max(at(to)-s.X, 2)
	}
}

// FallWidth returns the width of the waterfall, for the template.
func (step) FallWidth() int { return fallWidth }

// offer offers an act on the event.
func (e *eventPath) offer(act string, in ...any) {
	e.Offers = append(e.Offers, offer{Act: act, In: values(append(in, "tenant", e.TenantID)...)})
}

// beside finds the events of the aggregate before and after the event.
func (c *Console) beside(ctx context.Context, e *eventPath) (err error) {
	e.Far = outbox.NeighborIDs
	e.Before, e.Next, err = outbox.Neighbors(ctx, c.deps.Truth, e.Event)
	return err
}

// operators adds what people did with the event.
func (c *Console) operators(ctx context.Context, e *eventPath) error {
	did, err := c.desk.ActionsOn(ctx, e.TenantID, e.ID)
	for _, d := range did {
		s := step{Name: map[string]string{"retry": "Retried", "discard": "Discarded", "retry_waiting": "Retried while it waited",
			"kill": "Moved to the DLQ"}[d.Action], Level: "info", At: d.At,
			Says: "by " + d.Actor}
		if d.Consumer != "" {
			s.Name += " for " + d.Consumer
		}
		if d.Reason != "" {
			s.Says += ": " + d.Reason
		}
		if d.Error != "" {
			s.Level, s.Says = "warn", s.Says+"; then it failed again: "+d.Error
		}
		e.add(s)
	}
	return err
}

// publishing adds how the event reached its stream, or why it has not.
func (c *Console) publishing(ctx context.Context, e *eventPath) error {
	if e.Attempts > 0 && e.Where != outbox.InDLQ {
		e.add(step{Name: "Failed", Level: "warn", Says: fmt.Sprintf("to be published, %d of %d times: %s", e.Attempts,
			outbox.MaxAttempts, e.LastError)})
	}
	switch {
	case e.Where == outbox.InDLQ:
		e.add(step{Name: "Dead", Level: "bad", At: e.DeadAt, From: e.InsertedAt,
			Says: fmt.Sprintf("after %d attempts: %s", e.Attempts, e.LastError), Link: "Dead letter",
			URL: address("dead-letters/letter", "source", deadletter.Outbox, "id", e.OutboxID)})
		e.offer(actRetryDead, "source", deadletter.Outbox, "id", e.OutboxID)
		e.offer(actDiscardDead, "source", deadletter.Outbox, "id", e.OutboxID)
	case !e.ProcessedAt.IsZero() && e.Partition < 0:
		e.add(step{Name: "Published", Level: "ok", At: e.ProcessedAt, From: e.InsertedAt,
			Says: "to a stream that is no longer known"})
	case !e.ProcessedAt.IsZero() && e.StreamSeq == 0:
		e.add(step{Name: "Published", Level: "warn", At: e.ProcessedAt, From: e.InsertedAt,
			Says: "to " + e.Stream + ", from which it was erased"})
	case !e.ProcessedAt.IsZero():
		e.add(step{Name: "Published", Level: "ok", At: e.ProcessedAt, From: e.InsertedAt,
			Says: fmt.Sprintf("to %s at sequence %d", e.Stream, e.StreamSeq)})
	default:
		w, err := outbox.GetWaiting(ctx, c.deps.Truth, e.OutboxID)
		switch {
		case errors.Is(err, outbox.ErrNotWaiting):
			e.add(step{Name: "Pending", Level: "info", Says: "a relay publishes it next"})
		case err != nil:
			return err
		case w.Behind != 0:
			e.offer(actKill, "id", e.OutboxID)
			e.add(step{Name: "Waiting", Level: "warn", Says: fmt.Sprintf("behind message %d of its aggregate", w.Behind),
				URL: address("event", "q", w.Behind), Link: fmt.Sprint("Message ", w.Behind)})
		default:
			if w.DueIn > 0 {
				e.offer(actRetryWaiting, "id", e.OutboxID)
				e.offer(actKill, "id", e.OutboxID)
			}
			e.add(step{Name: "Waiting", Level: "warn", At: w.AvailableAt,
				Says: "until this time: its next attempt, or the time that its writer chose"})
		}
	}
	return nil
}

// applying adds the state of each consumer that wants the event.
func (c *Console) applying(ctx context.Context, e *eventPath) error {
	if e.Stream == "" || e.StreamSeq == 0 {
		return nil
	}
	at, err := consumers.Positions(ctx, c.deps.Projections, e.Stream)
	if err != nil {
		return err
	}
	for _, projection := range c.deps.Fleet {
		if !projection.Wants(e.AggregateType) {
			continue
		}
		s := step{Name: "Not read by " + projection.Name(), Level: "warn",
			Says: "it has not begun this stream, or a replay from the truth rebuilt it since"}
		for _, p := range at {
			switch {
			case p.Consumer != projection.Name():
			case p.Closed, p.Seq >= e.StreamSeq:
				s = step{Name: "Applied by " + p.Consumer, Level: "ok", At: p.At, By: p.Seq != e.StreamSeq, From: e.ProcessedAt}
			default:
				s = step{Name: "Not yet applied by " + p.Consumer, Level: "info",
					Says: fmt.Sprintf("it is at sequence %d, %s behind", p.Seq, num(e.StreamSeq-p.Seq))}
			}
		}
		for l, err := range c.desk.Reader(deadletter.Consumers).List(ctx, deadletter.Filter{Consumer: projection.Name(),
			TenantID: e.TenantID, AggregateType: e.AggregateType, AggregateID: e.AggregateID, EventID: e.ID}, 1) {
			if err != nil {
				return err
			}
			s = step{Name: "Parked by " + projection.Name(), Level: "bad", At: l.DeadAt, From: e.ProcessedAt, Says: l.Error,
				Link: "Dead letter", URL: address("dead-letters/letter", "source", deadletter.Consumers, "id", l.ID)}
			if l.First {
				in := values("source", deadletter.Consumers, "id", l.ID, "tenant", e.TenantID)
				e.Offers = append(e.Offers, offer{actRetryDead, "Retry for " + projection.Name(), in},
					offer{actDiscardDead, "Discard for " + projection.Name(), in})
			}
		}
		e.add(s)
	}
	return nil
}

// archiving adds what happened to the event's range of ids.
func (c *Console) archiving(ctx context.Context, e *eventPath) error {
	place, ok, err := outbox.PlaceOf(ctx, c.deps.Truth, e.OutboxID)
	if err != nil || !ok || place.State == outbox.RangeOpen || e.Where == outbox.InDLQ {
		return err
	}
	e.add(step{Name: "Archived", Level: "ok", At: place.ArchivedAt,
		Says: fmt.Sprintf("with the messages %d to %d", place.From, place.To-1)})
	cold := coldstore.New(c.deps.Truth, "", nil, nil, nil)
	defer cold.Close()
	exports, err := cold.OfRange(ctx, place.From)
	if err != nil {
		return err
	}
	for _, x := range exports {
		s := step{Name: "Exported", Level: "ok", Says: "as " + x.ID}
		if x.ExportedAt != nil {
			s.At = *x.ExportedAt
		}
		if x.StaleAt != nil {
			s.Level, s.Says = "warn", s.Says+", which is stale"
		}
		e.add(s)
	}
	if place.State == outbox.RangeGone {
		s := step{Name: "Dropped", Level: "info", At: place.DroppedAt, Says: "from the archive"}
		if e.Where == outbox.InArchive {
			s.Says += "; a hold keeps this event, or it was restored"
		}
		e.add(s)
	}
	return nil
}

var (
	fingerprintForm = regexp.MustCompile(`^[0-9a-f]{12}$`)
	objectForm      = regexp.MustCompile(`^([a-z][a-z0-9_]*) (\S+)$`)
)

// find leads from the search in the header to the page that knows what the reader typed. The page
// of events takes everything else, and names what it takes.
func (c *Console) find(v *view) error {
	http.Redirect(v.w, v.r, c.place(v, v.query("q")), http.StatusSeeOther)
	return nil
}

// place returns the URL at which text is found: a page by its name, a token by its fingerprint, an
// object by its kind and id, or an event.
func (c *Console) place(v *view, text string) string {
	for _, p := range c.pages {
		if p.group != "" && v.may(p) && strings.EqualFold(p.title, text) {
			return root + p.path
		}
	}
	tenant := v.query("tenant")
	switch m := objectForm.FindStringSubmatch(text); {
	case text == "":
		return root
	case fingerprintForm.MatchString(text):
		return address("tokens", "all", "yes") + "#t-" + text
	case m != nil:
		return address("inspect", "kind", m[1], "id", m[2], "tenant", tenant)
	}
	return address("event", "q", text, "tenant", tenant)
}
