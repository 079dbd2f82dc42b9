package tracing_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tracing"
)

// TestABatchHasSpansOfItsSampledEventsUpToABound checks both relations, with one slow event.
func TestABatchHasSpansOfItsSampledEventsUpToABound(t *testing.T) {
	var events []event.Event
	for i := range 300 { // every second event is sampled
		events = append(events, event.Event{ID: fmt.Sprint(i), TraceParent: fmt.Sprintf("00-%032x-%016x-%02x", i+1, i+1, i%2)})
	}
	events = append(events, event.Event{ID: "none"}, event.Event{ID: "no context",
		TraceParent: "00-00000000000000000000000000000000-0000000000000000-01"})
	for parent, want := range map[bool]int{false: 1, true: tracing.MaxLinks} {
		spans := tracetest.NewInMemoryExporter()
		provider := sdk.NewTracerProvider(sdk.WithSyncer(spans))
		ctx, b := tracing.New(provider, provider, parent, tracing.MaxLinks).ProcessOf(context.Background(), "consumer", "EVENTS-0", 0,
			len(events), func(yield func(*event.Event) bool) {
				for i := range events {
					if !yield(&events[i]) {
						return
					}
				}
			})
		b.Event(ctx, &events[1], time.Now().Add(-time.Second), time.Second, nil)
		b.End(errors.New("with a secret"))
		all := spans.GetSpans()
		if len(all) != want+1 {
			t.Fatalf("parent %v: %d spans, want %d and that of one event", parent, len(all), want)
		}
		slow, first := all[0], all[1]
		if slow.Parent.SpanID() != first.SpanContext.SpanID() || slow.EndTime.Sub(slow.StartTime) != time.Second || slow.Status.Code != 0 {
			t.Errorf("parent %v: %+v", parent, slow)
		}
		if n := len(first.Links); parent != (n == 0) || !parent && n != tracing.MaxLinks || first.Status.Description != "" {
			t.Errorf("parent %v: %d links, %+v", parent, n, first.Status)
		}
		if id := first.SpanContext.TraceID().String(); parent != (id == fmt.Sprintf("%032x", 2)) {
			t.Errorf("parent %v: the first span is of trace %s", parent, id)
		}
	}
}
