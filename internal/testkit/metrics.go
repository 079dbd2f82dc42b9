package testkit

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Series returns the series of a registry by their names and the values of their labels, separated
// by spaces: `tidings_api_requests_total 404 GET none`. The value of a histogram is the number of
// its observations.
func Series(t testing.TB, from prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			all[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return all
}

// Metric returns the sum of a metric's series that have these values of labels. Without a label it
// requires a series.
func Metric(t testing.TB, from prometheus.Gatherer, name string, labels ...string) (sum float64) {
	t.Helper()
	found := len(labels) > 0
	for series, value := range Series(t, from) {
		words := strings.Fields(series)
		if words[0] == name && !slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(words[1:], l) }) {
			sum, found = sum+value, true
		}
	}
	if !found {
		t.Fatalf("no metric %s", name)
	}
	return sum
}
