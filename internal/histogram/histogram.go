package histogram

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
)

// Observe observes v, with the trace of ctx as its exemplar if the trace is sampled.
func Observe(ctx context.Context, o prometheus.Observer, v float64) {
	if sc := trace.SpanContextFromContext(ctx); sc.IsSampled() {
		if with, ok := o.(prometheus.ExemplarObserver); ok {
			with.ObserveWithExemplar(v, prometheus.Labels{"trace_id": sc.TraceID().String()})
			return
		}
	}
	o.Observe(v)
}

// New returns a histogram with the classic buckets of o, which the alert rules use, and with native
// buckets for servers that scrape those.
func New(o prometheus.HistogramOpts) prometheus.Histogram {
	return prometheus.NewHistogram(native(o))
}

// NewVec is New with labels.
func NewVec(o prometheus.HistogramOpts, labels []string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(native(o), labels)
}

// native adds native buckets: each is 10 % wider than the one before. Their number is bounded, and
// a histogram that reaches the bound starts over after an hour, or gets wider buckets.
func native(o prometheus.HistogramOpts) prometheus.HistogramOpts {
	o.NativeHistogramBucketFactor, o.NativeHistogramMaxBucketNumber, o.NativeHistogramMinResetDuration = 1.1, 160, time.Hour
	return o
}
