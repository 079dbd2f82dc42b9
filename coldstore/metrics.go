package coldstore

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts what is exported. A nil one counts nothing.
type Metrics struct {
	ranges, rows, bytes, failures prometheus.Counter
}

// NewMetrics registers the metrics of exports.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		ranges: prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_export_ranges_total", Help: "Ranges of the archive that were exported, again ones too."}),
		rows:   prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_export_rows_total", Help: "Rows of the archive that were exported."}),
		bytes:  prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_export_bytes_total", Help: "Bytes of the compressed segments that were written."}),
	}
	m.failures = prometheus.NewCounter(prometheus.CounterOpts{Name: "outbox_export_failures_total",
		Help: "Exports that failed, and exports that were found damaged before their range was dropped."})
	for _, c := range []prometheus.Collector{m.ranges, m.rows, m.bytes, m.failures} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("register the metrics of exports: %w", err)
		}
	}
	return m, nil
}

func (m *Metrics) exported(e Export) {
	if m == nil {
		return
	}
	m.ranges.Inc()
	m.rows.Add(float64(e.Rows))
	m.bytes.Add(float64(e.Bytes))
}

func (m *Metrics) failed() {
	if m != nil {
		m.failures.Inc()
	}
}
