package heartbeat

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/histogram"
)

// The stations.
const (
	Published = "published" // a stream has stored it
	Applied   = "applied"   // a consumer has committed the offset after it
)

// Seconds is the histogram of one station. It is safe for concurrent use.
type Seconds struct{ prometheus.Histogram }

// NewSeconds returns the histogram of a station. consumer is the consumer at the station, or "".
// The alert rules count times below 2.5 s as good.
func NewSeconds(station, consumer string) Seconds {
	return Seconds{histogram.New(prometheus.HistogramOpts{
		Name: "tidings_path_latency_seconds", Help: "Time from the commit of a heartbeat to a station of its path.",
		ConstLabels: prometheus.Labels{"station": station, "consumer": consumer},
		Buckets:     []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600},
	})}
}

// Observe records a heartbeat that reached the station at that time. It ignores other events.
func (s Seconds) Observe(e *event.Event, at time.Time) {
	if e.AggregateType == event.AggregateHeartbeat && e.TenantID == event.SystemTenant {
		s.Histogram.Observe(max(at.Sub(e.OccurredAt).Seconds(), 0))
	}
}
