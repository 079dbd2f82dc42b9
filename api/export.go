package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/tidings/tidings/event"
	bounds "github.com/tidings/tidings/internal/shares" // shares is the name of a kind
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

const exportPage = 500 // states per transaction

// StreamHead describes the stream of a partition in the broker.
type StreamHead struct {
	Created time.Time
	First   uint64 // the oldest sequence, or the next one of an empty stream
}

// Streams returns the streams of the partitions by name. If err is not nil, a stream that is
// missing in all may exist.
type Streams func(ctx context.Context) (all map[string]StreamHead, err error)

// ExportHead is the first line of every answer of an export.
type ExportHead struct {
	Kind    string           `json:"kind" doc:"The aggregate type of the events." example:"follow"`
	Tenant  event.Number     `json:"tenant" example:"1"`
	BeganAt event.Time       `json:"began_at" format:"date-time"`
	Cursor  string           `json:"cursor" doc:"Resumes this export, together with the value of after in any ExportState."`
	Streams []ExportPosition `json:"streams" nullable:"false" doc:"Where to continue: read each stream after its sequence. Read the stream of any partition with a higher number than these from its beginning."`
}

// ExportPosition is the position up to which an export covers a stream.
type ExportPosition struct {
	Partition int         `json:"partition" doc:"The number of the partition." example:"0"`
	Stream    string      `json:"stream,omitempty" doc:"The name of the stream; absent before it exists." example:"EVENTS-0"`
	Created   *event.Time `json:"created,omitempty" format:"date-time" doc:"When the stream was created."`
	Sequence  string      `json:"sequence" doc:"A decimal 64-bit number, as a string. 0: read the stream from its beginning." example:"1042"`
}

// ExportState is a line of an export: the whole state of an entity, as in its last event, without
// the actor.
type ExportState struct {
	After   string          `json:"after" doc:"The position of this line: resumes the export after it." example:"7,42"`
	Type    string          `json:"type" doc:"The ce-type of an event with this state." example:"tidings.follow.created.v1"`
	Subject string          `json:"subject" doc:"ce-subject: the aggregate's id." example:"42"`
	Data    json.RawMessage `json:"data" doc:"The payload of the event; actor is empty."`
}

// ExportEnd is the last line of an answer. An answer without it was interrupted.
type ExportEnd struct {
	End     string   `json:"end" enum:"more,done,problem" doc:"more: resume after the last state. done: the export is complete. problem: resume as after more, or as the problem says." example:"more"`
	Problem *Problem `json:"problem,omitempty"`
}

type exportHeadLine struct {
	Export ExportHead `json:"export"`
}

type exportInput struct {
	Cursor string `query:"cursor" doc:"The cursor of an earlier answer of this export: continues it, with the same streams."`
	After  string `query:"after" doc:"The value of after in a line: continues after that line."`
	Lines  int    `query:"lines" default:"10000" minimum:"1" maximum:"100000" doc:"At most this many states. An answer may have fewer: the server ends it before a timeout."`
}

// exportMark is an export in a cursor. A stream is its number, its creation in microseconds and its
// sequence. All names of streams have one prefix.
type exportMark struct {
	At       int64       `json:"t"`
	Erasures int64       `json:"e"`
	Prefix   string      `json:"n"`
	Streams  [][3]uint64 `json:"s"`
}

func markOf(e store.Export) (exportMark, error) {
	m := exportMark{At: e.At.UnixMicro(), Erasures: e.Erasures, Streams: [][3]uint64{}}
	for _, p := range e.Streams {
		at := [3]uint64{uint64(p.Partition), 0, p.Seq}
		if p.Stream != "" {
			prefix, ok := strings.CutSuffix(p.Stream, "-"+strconv.Itoa(p.Partition))
			if !ok || m.Prefix != "" && prefix != m.Prefix {
				return m, fmt.Errorf("partition %d is on the stream %q, which is not named by its number", p.Partition, p.Stream)
			}
			m.Prefix, at[1] = prefix, uint64(p.Created.UnixMicro())
		}
		m.Streams = append(m.Streams, at)
	}
	return m, nil
}

func (m exportMark) export() store.Export {
	e := store.Export{At: time.UnixMicro(m.At).UTC(), Erasures: m.Erasures}
	for _, at := range m.Streams {
		p := outbox.Position{Partition: int(at[0]), Seq: at[2]}
		if at[1] != 0 {
			p.Stream, p.Created = m.Prefix+"-"+strconv.Itoa(p.Partition), time.UnixMicro(int64(at[1])).UTC()
		}
		e.Streams = append(e.Streams, p)
	}
	return e
}

// exporter exports the entities of one aggregate type.
type exporter struct {
	*server
	kind     string
	erasable bool
	page     func(ctx context.Context, tenant int64, e store.Export, after store.ExportPlace, limit int) ([]store.Exported, error)
}

const exportDescription = "Returns all states of the tenant and the positions at which the streams continue, for a projection that needs " +
	"more than the streams keep. The answer is one line of `ExportHead`, one `ExportState` per state, and an `ExportEnd`. To resume, " +
	"also after an interrupted answer, send the `cursor` of the first line and the `after` of the last `ExportState`. When the export " +
	"is complete, read each stream after its sequence."

// How a reader discards the events that the export includes.
const (
	exportNewerEdge = "Keep `created_at` and `version` with each state. Discard events with an earlier `created_at`, or with the " +
		"same one and no higher version."
	exportNewer = "Keep the version with each state, and discard events whose version is not higher."
)

func (s *server) exportRoutes() {
	edge := func(k kinds.Edge) *exporter {
		return &exporter{s, k.Name, store.ErasesEdges(k),
			func(ctx context.Context, tenant int64, e store.Export, after store.ExportPlace, limit int) ([]store.Exported, error) {
				return s.store.ExportEdges(ctx, tenant, k, e, after, limit)
			}}
	}
	child := func(k kinds.Child) *exporter {
		return &exporter{s, k.Name, false,
			func(ctx context.Context, tenant int64, e store.Export, after store.ExportPlace, limit int) ([]store.Exported, error) {
				return s.store.ExportChildren(ctx, tenant, k, e, after, limit)
			}}
	}
	for _, k := range s.kinds.AllEdges() {
		s.exportRoute(k.Plural, exportNewerEdge+" Ordered by origin and target; includes removed edges.", "7,42", edge(k))
	}
	for _, k := range s.kinds.AllChildren() {
		order, place := "Ordered by "+k.Parent+"; includes deleted and erased ones.", "5,"+exampleUUID
		if k.Threaded {
			order = "Ordered by " + k.Parent + ", then in the order of the thread; includes deleted and erased ones."
			place = "5,0632f8a0000000abcd2345"
		}
		s.exportRoute(k.Plural, exportNewer+" "+order, place, child(k))
	}
	s.exportRoute("threads", exportNewer+" The settings of threads of every kind, ordered by object and kind.", "5,"+event.AggregateComment,
		&exporter{s, event.AggregateThread, false, s.store.ExportSettings})
}

func (s *server) exportRoute(plural, order, place string, x *exporter) {
	r := route{
		method: http.MethodGet, path: "/v1/" + plural + ":export", id: "export-" + dashed(plural), tag: capital(plural),
		role: tokens.RoleExport, status: http.StatusOK,
		summary: "Export all " + plural + " of the tenant", description: exportDescription + " " + order, streams: true,
		codes: []string{codeCursorInvalid, codeExportOutdated, codeErasing},
	}
	register(s, r, x.export)
	op := s.operation(r.method, r.path)
	for _, p := range op.Parameters {
		if p.Name == "after" {
			p.Schema.Examples = []any{place}
		}
	}
	registry := s.api.OpenAPI().Components.Schemas
	for _, line := range []reflect.Type{reflect.TypeFor[ExportHead](), reflect.TypeFor[ExportState](), reflect.TypeFor[ExportEnd]()} {
		registry.Schema(line, true, line.Name())
	}
	op.Responses["200"].Content = map[string]*huma.MediaType{ndjson: {
		Schema: &huma.Schema{Type: huma.TypeString, Description: "Lines of JSON. The first is an object with the member export, an " +
			"ExportHead. The last is an ExportEnd. All others are ExportStates."},
		Example: `{"export":{"kind":"` + x.kind + `","tenant":"1","began_at":"` + exampleTime +
			`","cursor":"QeB8tJ0vJ8G7nTq0T3mJ1n","streams":[{"partition":0,"stream":"EVENTS-0","created":"` + exampleTime +
			`","sequence":"1042"}]}}` + "\n" + `{"end":"done"}` + "\n",
	}}
}

func (x *exporter) list(tenant int64) list { return list{tenant: tenant, name: "export of " + x.kind} }

// export answers as many states as one request has time for. Each page is a transaction of its own.
// No transaction is open while lines are sent.
func (x *exporter) export(ctx context.Context, in *exportInput) (*batchOutput, error) {
	tenant := callerOf(ctx).TenantID
	after, err := store.ParsePlace(in.After)
	if err != nil {
		return nil, x.noPlace(err)
	}
	e, err := x.begin(ctx, tenant, in.Cursor)
	if err != nil {
		return nil, err
	}
	mark, err := markOf(e)
	if err != nil {
		return nil, err
	}
	cursor, err := x.cursors.encode(x.list(tenant), mark)
	if err != nil {
		return nil, err
	}
	out := &exporting{exporter: x, e: e, tenant: tenant, token: callerOf(ctx).Limits, left: in.Lines, after: after,
		until: time.Now().Add(x.cfg.RequestTimeout / 2)}
	if err := out.read(ctx); err != nil {
		return nil, x.noPlace(err)
	}
	head := ExportHead{Kind: x.kind, Tenant: event.Number(tenant), BeganAt: event.Time{Time: e.At}, Cursor: cursor, Streams: positionsOf(e)}
	return &batchOutput{func(hctx huma.Context) {
		r, w := humago.Unwrap(hctx)
		hctx.SetHeader("Content-Type", ndjson)
		hctx.SetStatus(http.StatusOK)
		if r.Method == http.MethodHead {
			return
		}
		out.answer(ctx, w, head)
	}}, nil
}

// begin returns the beginning of the export: now, or the cursor's if the streams still have the
// messages after it.
func (x *exporter) begin(ctx context.Context, tenant int64, cursor string) (store.Export, error) {
	if cursor == "" {
		return x.store.BeginExport(ctx, tenant, x.erasable)
	}
	var m exportMark
	if err := x.cursors.decode(x.list(tenant), cursor, &m); err != nil {
		return store.Export{}, err
	}
	e := m.export()
	if x.streams == nil {
		return e, nil
	}
	// If the broker is unavailable, the reader finds a gap itself, as it does after the export.
	have, err := x.streams(ctx)
	for _, p := range e.Streams {
		now, ok := have[p.Stream]
		switch {
		case p.Stream == "" || !ok && err != nil:
		case !ok || !now.Created.Equal(p.Created) || now.First > p.Seq+1:
			return e, x.problems.problem(codeExportOutdated,
				fmt.Sprintf("the stream %s no longer has the messages after sequence %d", p.Stream, p.Seq))
		}
	}
	return e, nil
}

func (x *exporter) noPlace(err error) error {
	if !errors.Is(err, store.ErrInvalid) {
		return err
	}
	return x.problems.problem(codeValidation, "validation failed",
		FieldError{Detail: "expected the after of a line of this export", Parameter: "after"})
}

func positionsOf(e store.Export) []ExportPosition {
	all := []ExportPosition{}
	for _, p := range e.Streams {
		at := ExportPosition{Partition: p.Partition, Stream: p.Stream, Sequence: strconv.FormatUint(p.Seq, 10)}
		if p.Stream != "" {
			at.Created = &event.Time{Time: p.Created}
		}
		all = append(all, at)
	}
	return all
}

// exporting is one answer in progress.
type exporting struct {
	*exporter
	e      store.Export
	tenant int64
	token  string
	left   int // states that the answer may still have
	after  store.ExportPlace
	until  time.Time
	page   []store.Exported
	last   bool // page is the last one
}

// read reads the next page. At most bounds.Exports pages of a tenant are read at once.
func (x *exporting) read(ctx context.Context) error {
	type reader struct{ tenant int64 }
	leave, err := x.overlays.enter(ctx, reader{x.tenant}, int(bounds.Exports.Tenant.N))
	if err != nil {
		return err
	}
	defer leave()
	limit := min(exportPage, x.left)
	if x.page, err = x.exporter.page(ctx, x.tenant, x.e, x.after, limit); err != nil {
		return err
	}
	x.last = len(x.page) < limit
	x.left -= len(x.page)
	if n := len(x.page); n > 0 {
		x.after = x.page[n-1].Place
	}
	return nil
}

// answer writes lines until the export is complete or its time is over. A client that does not read
// keeps its place behind the gate until the write deadline at most.
func (x *exporting) answer(ctx context.Context, w http.ResponseWriter, head ExportHead) {
	control := http.NewResponseController(w)
	if deadline, ok := ctx.Deadline(); ok {
		_ = control.SetWriteDeadline(deadline.Add(batchLinger)) // the writer of a test has no deadline
	}
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(exportHeadLine{head}) // the writer keeps its error for Flush
	for {
		if !x.send(enc) {
			x.end(ctx, enc, x.problems.problem(codeOverloaded, ""))
			break
		}
		if out.Flush() != nil {
			return
		}
		_ = control.Flush() // a writer without Flush sends it later
		if x.last {
			_ = enc.Encode(ExportEnd{End: "done"})
			break
		}
		if x.left == 0 || time.Now().After(x.until) {
			_ = enc.Encode(ExportEnd{End: "more"})
			break
		}
		if err := x.read(ctx); err != nil {
			x.end(ctx, enc, err)
			break
		}
	}
	_ = out.Flush() // on an error the client has gone
}

// send writes the page. It reports false if there is no memory for it.
func (x *exporting) send(enc *json.Encoder) bool {
	var size int64
	for _, s := range x.page {
		size += int64(len(s.Event.Payload))
	}
	memory := x.gate.bodies.Hold(x.tenant, x.token)
	if size > smallBody && !memory.Take(size) {
		x.gate.refused(shedBodies)
		return false
	}
	defer memory.Release()
	for i := range x.page {
		s := &x.page[i]
		_ = enc.Encode(ExportState{After: s.Place.String(), Type: s.Event.CloudEventsType(),
			Subject: s.Event.AggregateID.String(), Data: s.Event.Payload})
	}
	x.page = nil
	return true
}

func (x *exporting) end(ctx context.Context, enc *json.Encoder, err error) {
	p, _ := x.problems.of(x.toProblem(ctx, err))
	p.RequestID = requestID(ctx)
	_ = enc.Encode(ExportEnd{End: "problem", Problem: p})
}
