package tracing

import (
	"context"
	"iter"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/tidings/tidings/event"
)

// MaxLinks is the default limit of links in a span: that of OpenTelemetry's SDKs.
const MaxLinks = 128

// Tracer makes spans. It is safe for concurrent use. A nil Tracer makes none.
type Tracer struct {
	traces trace.Tracer // its sampler decides which traces are recorded
	linked trace.Tracer // records the spans of batches with a sampled event
	parent bool
	links  int
}

// New returns a Tracer. The provider traces samples requests, and events that begin a trace. The
// provider linked makes the spans of batches that have an event of a sampled trace, and should
// record all of them.
//
// With parent, a batch has a span for each event, in the event's own trace, and no links. links is
// the maximum number of sampled events of a batch that get a link or a span.
func New(traces, linked trace.TracerProvider, parent bool, links int) *Tracer {
	version := trace.WithSchemaURL(semconv.SchemaURL)
	return &Tracer{traces: traces.Tracer(scope, version), linked: linked.Tracer(scope, version), parent: parent, links: links}
}

type key struct{}

// With returns a context in which t makes the spans.
func With(ctx context.Context, t *Tracer) context.Context { return context.WithValue(ctx, key{}, t) }

// From returns the Tracer of a context, or nil.
func From(ctx context.Context) *Tracer {
	t, _ := ctx.Value(key{}).(*Tracer)
	return t
}

// standard reads and writes traceparents.
var standard propagation.TraceContext

const traceParent = "traceparent"

// Parse parses a W3C traceparent. For any other text it returns an invalid span context.
func Parse(s string) trace.SpanContext {
	return trace.SpanContextFromContext(standard.Extract(context.Background(), propagation.MapCarrier{traceParent: s}))
}

// IsTraceParent reports whether s is a traceparent of W3C Trace Context level 1, which has 55
// characters.
func IsTraceParent(s string) bool { return len(s) == 55 && Parse(s).IsValid() }

// sampled reads the flag of a text that may be a traceparent.
func sampled(s string) bool {
	if len(s) != 55 {
		return false
	}
	c := s[54]
	if c >= 'a' {
		c -= 'a' - 10 - '0'
	}
	return (c-'0')&1 == 1
}

// TraceParent returns the traceparent of the span in ctx, or "" if there is no span.
func TraceParent(ctx context.Context) string {
	c := propagation.MapCarrier{}
	standard.Inject(ctx, c)
	return c[traceParent]
}

// Request begins the span of a request. traceparent is the request's header, or empty.
func (t *Tracer) Request(ctx context.Context, traceparent, method string) (context.Context, trace.Span) {
	if t == nil {
		return ctx, noop.Span{}
	}
	return t.traces.Start(trace.ContextWithRemoteSpanContext(ctx, Parse(traceparent)), requestName(method, ""),
		trace.WithSpanKind(trace.SpanKindServer))
}

// EndRequest ends the span of a request. method and route are from a bounded set. route is "" and
// tenant 0 if unknown.
func EndRequest(span trace.Span, method, route string, status int, tenant int64) {
	if !span.IsRecording() {
		return
	}
	span.SetName(requestName(method, route))
	span.SetAttributes(requestAttributes(method, route, status, tenant)...)
	if status >= 500 {
		span.SetStatus(codes.Error, "")
	}
	span.End()
}

// Creation is the spans of events that are being written.
type Creation struct {
	events []event.Event
	spans  []trace.Span // by event; nil if not recorded
}

// Create begins a span for each event, in the trace of its TraceParent or in a new trace. It sets
// TraceParent to the span's context. An event whose trace is not sampled keeps its TraceParent.
func (t *Tracer) Create(ctx context.Context, events []event.Event) (c Creation) {
	if t == nil {
		return c
	}
	for i := range events {
		e := &events[i]
		if e.TraceParent != "" && !sampled(e.TraceParent) {
			continue
		}
		parent := Parse(e.TraceParent)
		if e.TraceParent != "" && !parent.IsValid() {
			continue
		}
		_, span := t.traces.Start(trace.ContextWithRemoteSpanContext(ctx, parent), createName(e),
			trace.WithSpanKind(trace.SpanKindProducer))
		e.TraceParent = TraceParent(trace.ContextWithSpan(ctx, span))
		if !span.IsRecording() {
			continue
		}
		if c.spans == nil {
			c.events, c.spans = events, make([]trace.Span, len(events))
		}
		c.spans[i] = span
	}
	return c
}

// End ends the spans of committed events, which have their ids. Without this call no span is
// recorded. So do not call it if the transaction failed.
func (c Creation) End() {
	for i, span := range c.spans {
		if span != nil {
			span.SetAttributes(createAttributes(&c.events[i])...)
			span.End()
		}
	}
}

// Batch is the spans of events that are sent or processed together. The zero Batch has none.
type Batch struct {
	t     *Tracer
	place place
	spans []trace.Span
	ids   []string // the events of the spans, if each event has a span
}

// SendTo begins the spans of a publish of count events.
func (t *Tracer) SendTo(ctx context.Context, stream string, partition, count int, events iter.Seq[*event.Event]) (context.Context, Batch) {
	return t.batch(ctx, place{operation: Send, stream: stream, partition: partition}, count, events)
}

// ProcessOf begins the spans of a consumer's transaction with count events.
func (t *Tracer) ProcessOf(ctx context.Context, consumer, stream string, partition, count int,
	events iter.Seq[*event.Event]) (context.Context, Batch) {
	return t.batch(ctx, place{operation: Process, stream: stream, partition: partition, consumer: consumer}, count, events)
}

// batch returns ctx with the span of the batch, or with the first of its spans.
func (t *Tracer) batch(ctx context.Context, p place, count int, events iter.Seq[*event.Event]) (context.Context, Batch) {
	if t == nil {
		return ctx, Batch{}
	}
	var links []trace.Link
	var ids []string
	for e := range events {
		if !sampled(e.TraceParent) {
			continue
		}
		if sc := Parse(e.TraceParent); sc.IsValid() {
			links, ids = append(links, trace.Link{SpanContext: sc}), append(ids, e.ID)
		}
		if len(links) == t.links {
			break
		}
	}
	if len(links) == 0 {
		return ctx, Batch{}
	}
	b := Batch{t: t, place: p}
	attributes := trace.WithAttributes(p.attributes(count)...)
	if !t.parent {
		ctx, span := t.linked.Start(ctx, p.name(), trace.WithNewRoot(), trace.WithSpanKind(p.kind()), trace.WithLinks(links...), attributes)
		b.spans = []trace.Span{span}
		return ctx, b
	}
	b.ids = ids
	for i, l := range links {
		_, span := t.linked.Start(trace.ContextWithRemoteSpanContext(ctx, l.SpanContext), p.name(),
			trace.WithSpanKind(p.kind()), attributes)
		span.SetAttributes(messageID(&event.Event{ID: ids[i]}))
		b.spans = append(b.spans, span)
	}
	return trace.ContextWithSpan(ctx, b.spans[0]), b
}

// Event records that one event of the batch was slow, or failed with err.
func (b Batch) Event(ctx context.Context, e *event.Event, began time.Time, took time.Duration, err error) {
	for i, span := range b.spans {
		if b.ids != nil && b.ids[i] != e.ID {
			continue
		}
		options := []trace.SpanStartOption{trace.WithTimestamp(began), trace.WithSpanKind(b.place.kind()),
			trace.WithAttributes(append(b.place.attributes(1), messageID(e))...)}
		if sc := Parse(e.TraceParent); b.ids == nil && sc.IsSampled() {
			options = append(options, trace.WithLinks(trace.Link{SpanContext: sc}))
		}
		_, child := b.t.linked.Start(trace.ContextWithSpan(ctx, span), b.place.name(), options...)
		fail(child, err)
		child.End(trace.WithTimestamp(began.Add(took)))
	}
}

// End ends the spans. err is the error of the batch; it may have succeeded nevertheless.
func (b Batch) End(err error) {
	for _, span := range b.spans {
		fail(span, err)
		span.End()
	}
}

func fail(span trace.Span, err error) {
	if err != nil {
		span.SetAttributes(errorType(err))
		span.SetStatus(codes.Error, "")
	}
}
