package consumers

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/heartbeat"
	"github.com/tidings/tidings/internal/histogram"
)

// Reasons for skipping a message.
const (
	skipNotWanted = "not_wanted" // the projection does not want this aggregate type of the catalog
	skipUnknown   = "unknown"    // the catalog does not have this aggregate type
	skipForeign   = "foreign"    // no relay wrote it
)

type metrics struct {
	applied     *prometheus.CounterVec
	skipped     map[string]prometheus.Counter
	parked      prometheus.Counter
	deadLetters prometheus.Gauge
	batch       prometheus.Observer
	failures    prometheus.Counter
	held        prometheus.Gauge
	stuck       prometheus.Gauge
	waiting     prometheus.Gauge
	paused      prometheus.Gauge
	lagMessages prometheus.Gauge
	path        heartbeat.Seconds
}

// newMetrics registers the metrics of one consumer. Each scrape calls lagSeconds.
func newMetrics(reg prometheus.Registerer, consumer string, lagSeconds func() float64) (*metrics, error) {
	plain := reg
	reg = prometheus.WrapRegistererWith(prometheus.Labels{"consumer": consumer}, reg)
	applied := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tidings_consumer_applied_total", Help: "Events applied, by partition.",
	}, []string{"partition"})
	skipped := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tidings_consumer_skipped_total",
		Help: "Messages skipped, by reason: foreign (no relay wrote them), unknown (an aggregate type that " +
			"this release does not know) or not_wanted (by this consumer).",
	}, []string{"reason"})
	parked := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "tidings_consumer_parked_total", Help: "Events put into consumer_dead_letters by this instance.",
	})
	deadLetters := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "tidings_consumer_dead_letters", Help: "Rows of the consumer in consumer_dead_letters; 10000 means 10,000 or more.",
	})
	batch := histogram.New(prometheus.HistogramOpts{
		Name: "tidings_consumer_batch_duration_seconds", Help: "Time from a batch's first statement to its commit.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
	})
	failures := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "tidings_consumer_failures_total", Help: "Reads and batches that failed and were retried.",
	})
	held := prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_consumer_partitions_held",
		Help: "Partitions that this instance works on."})
	stuck := prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_consumer_partitions_stuck",
		Help: "Partitions of this instance that need an operator: see its log and /readyz."})
	waiting := prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_consumer_partitions_waiting",
		Help: "Partitions of this instance whose stream has no leader that answers. They continue without an operator."})
	paused := prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_consumer_paused", Help: "1 while the consumer is paused."})
	lagMessages := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "tidings_consumer_lag_messages", Help: "Messages not yet applied, on the streams of the partitions that this instance holds.",
	})
	lag := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tidings_consumer_lag_seconds",
		Help: "Age of the oldest message not yet applied, on the streams of the partitions that this instance " +
			"holds. If a stream cannot be read, at least the time since the last successful read.",
	}, lagSeconds)
	path := heartbeat.NewSeconds(heartbeat.Applied, consumer)
	if err := plain.Register(path); err != nil {
		return nil, err
	}
	for _, c := range []prometheus.Collector{applied, skipped, parked, deadLetters, batch, failures, held, stuck, waiting,
		paused, lagMessages, lag} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	m := &metrics{
		applied: applied, skipped: make(map[string]prometheus.Counter), parked: parked, deadLetters: deadLetters,
		batch: batch, failures: failures,
		held: held, stuck: stuck, waiting: waiting, paused: paused, lagMessages: lagMessages, path: path,
	}
	for _, r := range []string{skipNotWanted, skipUnknown, skipForeign} {
		m.skipped[r] = skipped.WithLabelValues(r)
	}
	return m, nil
}
