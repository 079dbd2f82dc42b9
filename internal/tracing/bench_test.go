package tracing_test

import (
	"context"
	"net/http"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tracing"
)

// BenchmarkWay measures the cost of the spans of one event, from its request to two consumers,
// without their export.
func BenchmarkWay(b *testing.B) {
	provider := func(s sdk.Sampler) *sdk.TracerProvider { return sdk.NewTracerProvider(sdk.WithSampler(s)) }
	on := provider(sdk.AlwaysSample())
	for _, c := range []struct {
		name string
		t    *tracing.Tracer
	}{
		{"off", nil},
		{"sampled-out", tracing.New(provider(sdk.ParentBased(sdk.TraceIDRatioBased(0))), on, false, tracing.MaxLinks)},
		{"sampled", tracing.New(on, on, false, tracing.MaxLinks)},
	} {
		b.Run(c.name, func(b *testing.B) {
			ctx := tracing.With(context.Background(), c.t)
			b.ReportAllocs()
			for b.Loop() {
				rctx, span := tracing.From(ctx).Request(ctx, "", http.MethodPut)
				events := []event.Event{{AggregateType: event.AggregateFollow, Type: event.Created, TraceParent: tracing.TraceParent(rctx)}}
				tracing.From(ctx).Create(ctx, events).End()
				tracing.EndRequest(span, http.MethodPut, "/v1/follows/{follower_id}/{followee_id}", http.StatusCreated, 1)
				one := func(yield func(*event.Event) bool) { yield(&events[0]) }
				_, sent := c.t.SendTo(ctx, "EVENTS-0", 0, 1, one)
				sent.End(nil)
				for range 2 {
					_, processed := c.t.ProcessOf(ctx, "followercounts", "EVENTS-0", 0, 1, one)
					processed.End(nil)
				}
			}
		})
	}
}
