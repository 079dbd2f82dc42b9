package jobs

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// How a run ended.
const (
	outcomeOK      = "ok"
	outcomeFailed  = "failed"
	outcomeLost    = "lost"    // the lease; another instance goes on
	outcomeStopped = "stopped" // with its process
	outcomeWindow  = "window"  // its window was over; it goes on in the next
	outcomeTime    = "time"    // it had its time; it goes on after the others
)

type metrics struct {
	lastSuccess *prometheus.GaugeVec
	runs        *prometheus.CounterVec
	seconds     *prometheus.HistogramVec
	known       map[string]bool
}

func newMetrics(reg prometheus.Registerer, jobs []Job) (*metrics, error) {
	m := &metrics{
		lastSuccess: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "job_last_success_timestamp_seconds",
			Help: "When the job last did all it had to do, anywhere in the fleet or by command; absent until it has."}, []string{"name"}),
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "job_runs_total", Help: "Runs of scheduled jobs in this process, by how they ended."},
			[]string{"name", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "job_seconds", Help: "How long runs of scheduled jobs took in this process.",
			Buckets: prometheus.ExponentialBuckets(0.01, 4, 10)}, []string{"name"}),
		known: make(map[string]bool),
	}
	for _, j := range jobs {
		m.known[j.Name] = true
		m.seconds.WithLabelValues(j.Name)
		for _, outcome := range []string{outcomeOK, outcomeFailed, outcomeLost, outcomeStopped, outcomeWindow, outcomeTime} {
			m.runs.WithLabelValues(j.Name, outcome)
		}
	}
	for _, c := range []prometheus.Collector{m.lastSuccess, m.runs, m.seconds} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register the metrics of jobs: %w", err)
		}
	}
	return m, nil
}

// succeeded shows what the table says, so that every instance shows the same.
func (m *metrics) succeeded(last LastRun) {
	if m.known[last.Job] && !last.SucceededAt.IsZero() {
		m.lastSuccess.WithLabelValues(last.Job).Set(float64(last.SucceededAt.UnixMilli()) / 1000)
	}
}

func (m *metrics) ran(job, outcome string, took time.Duration) {
	m.runs.WithLabelValues(job, outcome).Inc()
	m.seconds.WithLabelValues(job).Observe(took.Seconds())
}
