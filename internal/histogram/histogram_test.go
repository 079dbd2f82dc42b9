package histogram_test

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/histogram"
)

func TestAHistogramHasClassicAndNativeBuckets(t *testing.T) {
	h := histogram.New(prometheus.HistogramOpts{Name: "x", Buckets: []float64{1, 2}})
	h.Observe(1.5)
	reg := prometheus.NewRegistry()
	reg.MustRegister(h)
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if got := all[0].GetMetric()[0].GetHistogram(); len(got.GetBucket()) != 2 || len(got.GetPositiveSpan()) != 1 {
		t.Errorf("%d classic buckets and %d native spans, want 2 and 1", len(got.GetBucket()), len(got.GetPositiveSpan()))
	}
}
