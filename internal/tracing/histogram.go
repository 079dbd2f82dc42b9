package tracing

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// NewHistogram returns a histogram with the classic buckets of o, which the alert rules use, and
// with native buckets for servers that scrape those.
func NewHistogram(o prometheus.HistogramOpts) prometheus.Histogram {
	return prometheus.NewHistogram(native(o))
}

// NewHistogramVec is NewHistogram with labels.
func NewHistogramVec(o prometheus.HistogramOpts, labels []string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(native(o), labels)
}

// native adds native buckets: each is 10 % wider than the one before. Their number is bounded, and
// a histogram that reaches the bound starts over after an hour, or gets wider buckets.
func native(o prometheus.HistogramOpts) prometheus.HistogramOpts {
	o.NativeHistogramBucketFactor, o.NativeHistogramMaxBucketNumber, o.NativeHistogramMinResetDuration = 1.1, 160, time.Hour
	return o
}
