// Package histogram has the histograms of all parts: their buckets, and the traces of slow values.
// It is for packages with metrics. It is apart from internal/tracing, which subscribers' programs
// link: those have no use for Prometheus' library.
package histogram
