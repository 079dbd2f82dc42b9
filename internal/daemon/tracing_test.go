package daemon_test

import (
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/histogram"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tracing"
)

// TestTracesGoToTheCollectorThatIsNamed also checks that a scraper with OpenMetrics gets the trace
// as an exemplar.
func TestTracesGoToTheCollectorThatIsNamed(t *testing.T) {
	type export struct{ path, body string }
	exports := make(chan export, 1)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			body, _ = gzip.NewReader(r.Body)
		}
		b, err := io.ReadAll(body)
		if err != nil {
			t.Error(err)
		}
		exports <- export{r.URL.Path, string(b)}
	}))
	defer collector.Close()
	env := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": collector.URL, "OTEL_SERVICE_NAME": "site",
		"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test", "OTEL_TRACES_SAMPLER": ""}
	for name, value := range env { // the exporter reads the environment of the process
		t.Setenv(name, value)
	}
	ctx, stop, err := daemon.Trace(t.Context(), envconfig.MapLookuper(env), "api", testkit.Logger(t), nil)
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	took := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "took_seconds", Help: "Test.", Buckets: []float64{1}})
	reg.MustRegister(took)
	ctx, span := tracing.From(ctx).Request(ctx, "", http.MethodPut)
	histogram.Observe(ctx, took, 0.5)
	tracing.EndRequest(span, http.MethodPut, "/v1/follows/{a}", 503, 7)
	stop()
	got := <-exports
	for _, want := range []string{"PUT /v1/follows/{a}", "site", "deployment.environment.name", "tidings.tenant"} {
		if got.path != "/v1/traces" || !strings.Contains(got.body, want) {
			t.Errorf("%s lacks %s: %q", got.path, want, got.body)
		}
	}

	handler := daemon.NewOps("test", "127.0.0.1:0", reg, testkit.Logger(t)).Handler()
	scrape := func(accept string) string {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.Header.Set("Accept", accept)
		handler.ServeHTTP(w, r)
		return w.Body.String()
	}
	exemplar := `# {trace_id="` + span.SpanContext().TraceID().String() + `"} 0.5`
	if body := scrape("application/openmetrics-text; version=1.0.0"); !strings.Contains(body, exemplar) ||
		!strings.HasSuffix(body, "# EOF\n") {
		t.Errorf("%s is not in %s", exemplar, body)
	}
	if body := scrape("text/plain"); !strings.Contains(body, "took_seconds_count 1") || strings.Contains(body, "EOF") {
		t.Error(body)
	}
}

func TestWithoutACollectorNothingIsTraced(t *testing.T) {
	for name, env := range map[string]map[string]string{
		"nothing is set": {}, "an empty endpoint": {"OTEL_EXPORTER_OTLP_ENDPOINT": "", "OTEL_TRACES_SAMPLER_ARG": ""},
		"disabled": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "true"},
		"none":     {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"},
	} {
		ctx, stop, err := daemon.Trace(t.Context(), envconfig.MapLookuper(env), "api", testkit.Logger(t), nil)
		if err != nil || ctx != t.Context() {
			t.Errorf("%s: %v", name, err)
			continue
		}
		stop()
	}
	events := []event.Event{{TraceParent: "as it was"}, {}}
	var off *tracing.Tracer
	if n := testing.AllocsPerRun(100, func() {
		ctx, span := off.Request(t.Context(), "", http.MethodPut)
		off.Create(ctx, events).End()
		tracing.EndRequest(span, http.MethodPut, "", 200, 0)
	}); n > 0 || events[0].TraceParent != "as it was" || events[1].TraceParent != "" {
		t.Errorf("%v allocations, %+v", n, events)
	}
}

func TestTracingNamesEveryVariableThatIsWrong(t *testing.T) {
	env := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
		"OTEL_TRACES_EXPORTER": "zipkin", "OTEL_TRACES_SAMPLER": "some", "OTEL_TRACES_SAMPLER_ARG": "NaN", "TRACE_RELATION": "child"}
	_, _, err := daemon.Trace(context.Background(), envconfig.MapLookuper(env), "api", testkit.Logger(t), tracetest.NewInMemoryExporter())
	for name := range env {
		if err == nil || !strings.Contains(err.Error(), name+" is ") {
			t.Errorf("%v lacks %s", err, name)
		}
	}
}
