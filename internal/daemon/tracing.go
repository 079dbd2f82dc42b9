package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"time"

	"github.com/sethvargo/go-envconfig"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/tidings/tidings/internal/tracing"
)

// TraceConfig is the part of the environment of tracing that Trace checks. The OpenTelemetry SDK
// reads more variables from the environment of the process (docs/tracing.md).
type TraceConfig struct {
	// Endpoint is the http or https URL of a collector. Tracing is off if neither it nor
	// TracesEndpoint is set.
	Endpoint       string  `env:"OTEL_EXPORTER_OTLP_ENDPOINT"`
	TracesEndpoint string  `env:"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"`                 // the same, with the path
	Protocol       string  `env:"OTEL_EXPORTER_OTLP_PROTOCOL, default=http/protobuf"` // or http/json
	Exporter       string  `env:"OTEL_TRACES_EXPORTER, default=otlp"`                 // or none
	Disabled       bool    `env:"OTEL_SDK_DISABLED, default=false"`                   // true: no tracing
	Sampler        string  `env:"OTEL_TRACES_SAMPLER, default=parentbased_always_on"` // a key of samplers
	Ratio          float64 `env:"OTEL_TRACES_SAMPLER_ARG, default=1"`                 // for the samplers with a ratio, 0..1
	Service        string  `env:"OTEL_SERVICE_NAME"`                                  // tidings-BINARY when empty
	Relation       string  `env:"TRACE_RELATION, default=link"`                       // from send and process to create: link or parent
}

// notEmpty is an environment in which an empty variable counts as not set, as OpenTelemetry defines
// it.
type notEmpty struct{ envconfig.Lookuper }

// Lookup implements envconfig.Lookuper.
func (e notEmpty) Lookup(name string) (string, bool) {
	value, _ := e.Lookuper.Lookup(name)
	return value, value != ""
}

const parentRelation = "parent"

// samplers returns the samplers by their names in OpenTelemetry.
func (c TraceConfig) samplers() map[string]sdk.Sampler {
	on, off, ratio := sdk.AlwaysSample(), sdk.NeverSample(), sdk.TraceIDRatioBased(c.Ratio)
	return map[string]sdk.Sampler{
		"always_on": on, "always_off": off, "traceidratio": ratio,
		"parentbased_always_on": sdk.ParentBased(on), "parentbased_always_off": sdk.ParentBased(off),
		"parentbased_traceidratio": sdk.ParentBased(ratio),
	}
}

// Validate returns an error that lists every value out of bounds.
func (c TraceConfig) Validate() error {
	var errs []error
	for name, value := range map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.Endpoint,
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": c.TracesEndpoint} {
		if u, err := url.Parse(value); value != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
			errs = append(errs, fmt.Errorf("%s is not an http or https URL", name)) // without the value: it may contain a password
		}
	}
	if c.Protocol != "http/protobuf" && c.Protocol != "http/json" {
		errs = append(errs, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL is %q: want http/protobuf or http/json", c.Protocol))
	}
	if c.Exporter != "otlp" && c.Exporter != "none" {
		errs = append(errs, fmt.Errorf("OTEL_TRACES_EXPORTER is %q: want otlp or none", c.Exporter))
	}
	if c.samplers()[c.Sampler] == nil {
		errs = append(errs, fmt.Errorf("OTEL_TRACES_SAMPLER is %q: want always_on, always_off or traceidratio, "+
			"or one of these with the prefix parentbased_", c.Sampler))
	}
	if !(c.Ratio >= 0 && c.Ratio <= 1) {
		errs = append(errs, fmt.Errorf("OTEL_TRACES_SAMPLER_ARG is %v: want 0..1", c.Ratio))
	}
	if c.Relation != "link" && c.Relation != parentRelation {
		errs = append(errs, fmt.Errorf("TRACE_RELATION is %q: want link or parent", c.Relation))
	}
	return errors.Join(errs...)
}

// on reports whether spans are sent to a collector.
func (c TraceConfig) on() bool {
	return cmp.Or(c.Endpoint, c.TracesEndpoint) != "" && !c.Disabled && c.Exporter == "otlp"
}

const (
	stopTracing = 5 * time.Second        // time limit of the last export
	fileEvery   = 200 * time.Millisecond // between two exports to an exporter of the caller
)

// Trace returns a context that makes spans (tracing.From) and sends them to the collector that env
// names. Without a collector it returns ctx. If to is not nil, spans go to that exporter instead,
// at once and with all their links. stop exports the remaining spans.
func Trace(ctx context.Context, env envconfig.Lookuper, binary string, log *slog.Logger, to sdk.SpanExporter,
) (_ context.Context, stop func(), err error) {
	var cfg TraceConfig
	if err := Configure(ctx, notEmpty{env}, &cfg); err != nil {
		return ctx, nil, err
	}
	if err := cfg.Validate(); err != nil {
		return ctx, nil, err
	}
	limits := sdk.NewSpanLimits()
	var processor sdk.SpanProcessor
	switch {
	case to != nil:
		limits.LinkCountLimit = math.MaxInt32
		processor = sdk.NewBatchSpanProcessor(to, sdk.WithBatchTimeout(fileEvery))
	case cfg.on():
		exporter, err := otlptracehttp.New(ctx)
		if err != nil {
			return ctx, nil, fmt.Errorf("export spans: %w", err)
		}
		processor = sdk.NewBatchSpanProcessor(exporter)
	default:
		return ctx, func() {}, nil
	}
	log = log.With("component", "tracing")
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("spans were not exported", "err", err) }))
	describe := []resource.Option{resource.WithTelemetrySDK(),
		resource.WithAttributes(semconv.ServiceVersion(Version()), semconv.ServiceName("tidings-"+binary)), resource.WithFromEnv()}
	if cfg.Service != "" {
		describe = append(describe, resource.WithAttributes(semconv.ServiceName(cfg.Service)))
	}
	who, err := resource.New(ctx, describe...)
	if err != nil {
		return ctx, nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	if limits.LinkCountLimit < 1 { // the SDK then has no limit
		limits.LinkCountLimit = tracing.MaxLinks
	}
	provider := func(sampler sdk.Sampler) *sdk.TracerProvider {
		return sdk.NewTracerProvider(sdk.WithSpanProcessor(processor), sdk.WithResource(who), sdk.WithRawSpanLimits(limits),
			sdk.WithSampler(sampler))
	}
	t := tracing.New(provider(cfg.samplers()[cfg.Sampler]), provider(sdk.AlwaysSample()),
		cfg.Relation == parentRelation, limits.LinkCountLimit)
	stop = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTracing)
		defer cancel()
		if err := processor.Shutdown(ctx); err != nil {
			log.Warn("the last spans were not exported", "err", err)
		}
	}
	return tracing.With(ctx, t), stop, nil
}
