package api

import (
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

type metrics struct {
	requests   *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	overlaid   *prometheus.CounterVec
	limited    *prometheus.CounterVec
	operations *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "api_requests_total", Help: "Requests answered, by route pattern, method and status code.",
		}, []string{"route", "method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "api_request_seconds", Help: "Time from a request's headers to its answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"route", "method"}),
	}
	m.overlaid = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "api_overlaid_reads_total", Help: "Reads whose Tidings-Token the projection had not reached, answered with those entities taken from the truth.",
	}, []string{"consumer"})
	for _, consumer := range []string{followercounts.Name, threadcache.Name} {
		m.overlaid.WithLabelValues(consumer)
	}
	m.limited = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "api_rate_limited_total", Help: "Requests refused by a rate limit: reads or writes of a token, or what one user (author) makes.",
	}, []string{"kind"})
	for _, kind := range []string{policyRead, policyWrite, policyAuthor} {
		m.limited.WithLabelValues(kind)
	}
	m.operations = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "api_batch_operations_total", Help: "Operations of batches, by route, op (none: it could not be read) and status; the batch itself is a request of 200.",
	}, []string{"route", "op", "code"})
	reg.MustRegister(m.requests, m.seconds, m.overlaid, m.limited, m.operations)
	return m
}

// begin makes the series of a route start at 0.
func (m *metrics) begin(route, method string, status int) {
	m.requests.WithLabelValues(route, method, strconv.Itoa(status))
	m.seconds.WithLabelValues(route, method)
}

func (m *metrics) observe(route, method string, status int, took time.Duration) {
	if !slices.Contains(methods(), method) {
		method = "other" // the client's to choose
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	m.seconds.WithLabelValues(route, method).Observe(took.Seconds())
}

func methods() []string {
	return []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
}
