package subscribe_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

// propagating adds the trace context to a request, as the transport of otelhttp does.
type propagating struct{}

func (propagating) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	propagation.TraceContext{}.Inject(r.Context(), propagation.HeaderCarrier(r.Header))
	return http.DefaultTransport.RoundTrip(r)
}

// TestTracesGoOnInWhatEventsCause checks that a handler has the context of the event's creation,
// and that its requests may carry it. The batches of a projection are in the program's own spans.
func TestTracesGoOnInWhatEventsCause(t *testing.T) {
	const creation = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	spans := tracetest.NewInMemoryExporter()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(sdk.NewTracerProvider(sdk.WithSyncer(spans)))
	defer otel.SetTracerProvider(before)

	headers := make(chan string, 10)
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		headers <- r.Header.Get("traceparent")
		w.WriteHeader(http.StatusBadRequest)
	}))
	defer api.Close()
	c, err := client.New(api.URL, client.WithToken("secret"), client.WithHTTPClient(&http.Client{Transport: propagating{}}))
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, 1)
	pool := r.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	traced, plain := follow("1", "2", 1), follow("2", "2", 1)
	traced.TraceParent = creation
	r.publish(traced, plain)
	h := r.start(func(ctx context.Context) error {
		return subscribe.Handle(ctx, r.nc, "mailer", "follow.created", func(ctx context.Context, e subscribe.Event[event.Edge]) error {
			if sc := trace.SpanContextFromContext(ctx); sc.IsRemote() != (e.TraceParent != "") || sc.IsSampled() != sc.IsRemote() {
				t.Errorf("the context of %q is %+v", e.TraceParent, sc)
			}
			_, _ = c.Likes.Put(ctx, "7", "42") // refused
			return nil
		}, subscribe.Log(testkit.Logger(t)))
	})
	for _, want := range []string{creation, ""} {
		if got := <-headers; got != want {
			t.Errorf("the handler's request has the traceparent %q, want %q", got, want)
		}
	}
	if err := h.stop(); err != nil {
		t.Error(err)
	}
	p := r.start(func(ctx context.Context) error {
		return projector.Project(ctx, r.nc, pool, "search", func(ctx context.Context, _ pgx.Tx, events []event.Event) error {
			sampled := slices.ContainsFunc(events, func(e event.Event) bool { return e.TraceParent != "" })
			if got := trace.SpanFromContext(ctx).IsRecording(); got != sampled {
				t.Errorf("of %d events one is sampled: %t; the projection is in a span: %t", len(events), sampled, got)
			}
			return nil
		}, subscribe.Log(testkit.Logger(t)))
	})
	r.await("a span of the projection", func() (bool, error) { return len(spans.GetSpans()) > 0, nil })
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	for _, s := range spans.GetSpans() {
		if s.Name != "process "+r.cfg.StreamName(0) || len(s.Links) != 1 || s.Links[0].SpanContext.SpanID().String() != "00f067aa0ba902b7" {
			t.Errorf("%+v", s)
		}
	}
}
