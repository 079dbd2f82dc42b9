package api

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/histogram"
	"github.com/tidings/tidings/store"
)

type metrics struct {
	requests   *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	overlaid   *prometheus.CounterVec
	limited    *prometheus.CounterVec
	operations *prometheus.CounterVec
	shed       *prometheus.CounterVec
	traffic    traffic
}

func newMetrics(reg prometheus.Registerer, truth *store.Store, consumers []string) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tidings_api_requests_total", Help: "Requests answered, by route pattern, method and status code.",
		}, []string{"route", "method", "code"}),
		seconds: histogram.NewVec(prometheus.HistogramOpts{
			Name: "tidings_api_request_duration_seconds", Help: "Time from the headers of a request to its answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"route", "method"}),
	}
	m.overlaid = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tidings_api_overlaid_reads_total", Help: "Reads whose Tidings-Token was ahead of the projection. The API added the " +
			"entities from the truth to the answer.",
	}, []string{"consumer"})
	for _, consumer := range consumers {
		m.overlaid.WithLabelValues(consumer)
	}
	m.limited = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tidings_api_rate_limited_requests_total",
		Help: "Requests refused by a rate limit: reads or writes of a token, writes of one user " +
			"(author), or unknown tokens of one address (unknown).",
	}, []string{"kind"})
	for _, kind := range []string{policyRead, policyWrite, policyAuthor, policyToken} {
		m.limited.WithLabelValues(kind)
	}
	m.operations = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tidings_api_batch_operations_total",
		Help: "Operations of batches, by route, operation and status; op is none for an unreadable operation. " +
			"The batch itself counts as one request with status 200.",
	}, []string{"route", "op", "code"})
	m.shed = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tidings_api_shed_requests_total",
		Help: "Requests refused as overloaded, by reason: requests (too many at once), tokens (too many to look up), " +
			"tenant (too many of one tenant), bodies (too large in total), writes (too many wait), arrived (too many of one tenant " +
			"arrive or are answered), documents (too many without a token).",
	}, []string{"reason"})
	for _, reason := range []string{shedRequests, shedTokens, shedTenant, shedBodies, shedWrites, shedArrived, shedDocuments} {
		m.shed.WithLabelValues(reason)
	}
	returned := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "tidings_thread_archive_returned_threads_total",
		Help: "Threads whose return from the shelf this process completed. Sum all API processes and archivers.",
	}, func() float64 { return float64(truth.ThreadsReturned()) })
	reg.MustRegister(m.requests, m.seconds, m.overlaid, m.limited, m.operations, m.shed, returned)
	return m
}

// queues registers the metrics of requests behind the gate and of writes that wait for a group.
func (m *metrics) queues(reg prometheus.Registerer, g *gate, stats func() store.Stats) {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	counter := func(name, help string, value func(store.Stats) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help}, func() float64 { return float64(value(stats())) })
	}
	reg.MustRegister(
		gauge("tidings_api_requests_in_progress", "Requests in progress.",
			func() float64 { inside, _ := g.state(); return float64(inside) }),
		gauge("tidings_api_request_limit", "The current limit of concurrent requests.",
			func() float64 { _, limit := g.state(); return limit }),
		gauge("tidings_api_body_bytes", "Memory of bodies and answers over 64 KiB.", func() float64 { return float64(g.bodies.Held()) }),
		gauge("tidings_api_slow_tenants", "Tenants with a lower limit because their own requests are slow.",
			func() float64 { return float64(g.slowTenants()) }),
		gauge("tidings_api_writes_waiting", "Single writes that wait for a shared transaction.",
			func() float64 { return float64(stats().Waiting) }),
		counter("tidings_api_write_groups_total", "Transactions of grouped single writes.", func(s store.Stats) int64 { return s.Groups }),
		counter("tidings_api_grouped_writes_total", "Single writes that shared a transaction with others.",
			func(s store.Stats) int64 { return s.Grouped }),
		counter("tidings_api_writes_alone_total", "Single writes that ran alone after their shared transaction failed.",
			func(s store.Stats) int64 { return s.Alone }),
	)
}

// begin creates the series of a route, so that they start at 0.
func (m *metrics) begin(route, method string, status int) {
	m.requests.WithLabelValues(route, method, strconv.Itoa(status))
	m.seconds.WithLabelValues(route, method)
}

func (m *metrics) observe(ctx context.Context, route, method string, status int, took time.Duration) {
	method = label(method)
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	histogram.Observe(ctx, m.seconds.WithLabelValues(route, method), took.Seconds())
	m.traffic.add(took)
}

// label returns the method for metrics and traces. A client may send any method, so unknown ones
// become "other".
func label(method string) string {
	if !slices.Contains(methods(), method) {
		return "other"
	}
	return method
}

func methods() []string {
	return []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}
}

// A bucket of traffic is a tenth wider than the one before it. The first ends at 0.1 ms, and the
// last has everything above 16 s.
const (
	trafficFirst   = 100 * time.Microsecond
	trafficGrowth  = 1.1
	trafficBuckets = 128
)

// traffic counts the requests of this process and their durations. It is safe for concurrent use.
// The metrics have more detail; this is what the console draws.
type traffic struct {
	requests atomic.Int64
	took     [trafficBuckets]atomic.Int64 // since the last call of sample
}

func (t *traffic) add(took time.Duration) {
	i := 0
	if took > trafficFirst {
		i = min(int(math.Ceil(math.Log(float64(took)/float64(trafficFirst))/math.Log(trafficGrowth))), trafficBuckets-1)
	}
	t.requests.Add(1)
	t.took[i].Add(1)
}

// sample returns the number of requests since the start, and the duration that 99 of 100 requests
// did not exceed since the last call, to a tenth. It is 0 without a request.
func (t *traffic) sample() (requests int64, p99 time.Duration) {
	requests = t.requests.Load()
	var counts [trafficBuckets]int64
	var all int64
	for i := range counts {
		counts[i] = t.took[i].Swap(0)
		all += counts[i]
	}
	slow := all / 100 // requests that may take longer
	for i := trafficBuckets - 1; i >= 0 && all > 0; i-- {
		if slow -= counts[i]; slow < 0 {
			return requests, time.Duration(float64(trafficFirst) * math.Pow(trafficGrowth, float64(i)))
		}
	}
	return requests, 0
}
