package coldstore

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics counts exports. A nil Metrics counts nothing.
type Metrics struct {
	ranges, rows, bytes, failures prometheus.Counter
}

// NewMetrics registers the metrics of exports.
func NewMetrics(reg prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		ranges: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_export_ranges_total",
			Help: "Exported ranges of the archive, repeated exports included."}),
		rows: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_export_rows_total",
			Help: "Exported rows of the archive."}),
		bytes: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_export_bytes_total",
			Help: "Bytes of written compressed segments."}),
	}
	m.failures = prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_export_failures_total",
		Help: "Failed exports, and exports found damaged before the drop of their range."})
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
