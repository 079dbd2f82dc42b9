package jobs

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/histogram"
)

// Outcomes of a run.
const (
	outcomeOK      = "ok"
	outcomeFailed  = "failed"
	outcomeLost    = "lost"    // another instance took the lease and continues
	outcomeStopped = "stopped" // its process stopped
	outcomeWindow  = "window"  // its window ended; it resumes in the next
	outcomeTime    = "time"    // it reached its time limit; it resumes after the others
)

type metrics struct {
	lastSuccess *prometheus.GaugeVec
	runs        *prometheus.CounterVec
	seconds     *prometheus.HistogramVec
	known       map[string]bool
}

func newMetrics(reg prometheus.Registerer, jobs []Job) (*metrics, error) {
	m := &metrics{
		lastSuccess: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "tidings_job_last_success_timestamp_seconds",
			Help: "Time of the job's last complete run, in any process or by command. Absent before the first one."}, []string{"name"}),
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tidings_job_runs_total",
			Help: "Runs of scheduled jobs in this process, by outcome: ok, failed, lost (another process continues), " +
				"stopped (the process ended), window (the job's window ended), time (its time limit was reached)."},
			[]string{"name", "outcome"}),
		seconds: histogram.NewVec(prometheus.HistogramOpts{Name: "tidings_job_run_duration_seconds",
			Help:    "How long runs of scheduled jobs took in this process.",
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

// succeeded sets the metric from the table, so that every instance exports the same value.
func (m *metrics) succeeded(last LastRun) {
	if m.known[last.Job] && !last.SucceededAt.IsZero() {
		m.lastSuccess.WithLabelValues(last.Job).Set(float64(last.SucceededAt.UnixMilli()) / 1000)
	}
}

func (m *metrics) ran(job, outcome string, took time.Duration) {
	m.runs.WithLabelValues(job, outcome).Inc()
	m.seconds.WithLabelValues(job).Observe(took.Seconds())
}
