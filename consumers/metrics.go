package consumers

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
)

// Reasons for passing over a message.
const (
	skipNotWanted = "not_wanted" // another aggregate of the catalogue
	skipUnknown   = "unknown"    // an aggregate type that the catalogue does not have
)

type metrics struct {
	applied     [event.Partitions]prometheus.Counter
	skipped     map[string]prometheus.Counter
	parked      prometheus.Counter
	deadLetters prometheus.Gauge
	batch       prometheus.Observer
	failures    prometheus.Counter
	held        prometheus.Gauge
	stuck       prometheus.Gauge
	paused      prometheus.Gauge
	lagMessages prometheus.Gauge
}

// newMetrics registers the metrics of one consumer; lagSeconds is asked at each scrape.
func newMetrics(reg prometheus.Registerer, consumer string, lagSeconds func() float64) (*metrics, error) {
	reg = prometheus.WrapRegistererWith(prometheus.Labels{"consumer": consumer}, reg)
	applied := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "consumer_applied_total", Help: "Events applied, by partition.",
	}, []string{"partition"})
	skipped := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "consumer_skipped_total", Help: "Messages passed over, by reason.",
	}, []string{"reason"})
	parked := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "consumer_parked_total", Help: "Events put into consumer_dead_letters by this instance.",
	})
	deadLetters := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "consumer_dead_letters", Help: "Rows of the consumer in consumer_dead_letters; 10000 means at least so many.",
	})
	batch := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "consumer_batch_seconds", Help: "Time from a batch's first statement to its commit.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
	})
	failures := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "consumer_failures_total", Help: "Reads and batches that failed and were done again.",
	})
	held := prometheus.NewGauge(prometheus.GaugeOpts{Name: "consumer_partitions_held", Help: "Partitions that this instance works on."})
	stuck := prometheus.NewGauge(prometheus.GaugeOpts{Name: "consumer_partitions_stuck", Help: "Partitions of this instance that need a person: see its log and /readyz."})
	paused := prometheus.NewGauge(prometheus.GaugeOpts{Name: "consumer_paused", Help: "1 while the consumer is paused and takes no events."})
	lagMessages := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "consumer_lag_messages", Help: "Messages on the stream that the consumer, all its instances together, has not applied.",
	})
	lag := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "consumer_lag_seconds",
		Help: "Age of the oldest message that the consumer, all its instances together, has not applied; time since the last successful look when looking fails.",
	}, lagSeconds)
	foreign := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "consumer_foreign_messages_total", Help: "Messages passed over: foreign ones, which no relay wrote, and duplicates of an event.",
	}, []string{"kind"})
	for _, c := range []prometheus.Collector{applied, skipped, foreign, parked, deadLetters, batch, failures, held, stuck, paused, lagMessages, lag} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	m := &metrics{
		skipped: make(map[string]prometheus.Counter), parked: parked, deadLetters: deadLetters, batch: batch, failures: failures,
		held: held, stuck: stuck, paused: paused, lagMessages: lagMessages,
	}
	for p := range m.applied {
		m.applied[p] = applied.WithLabelValues(event.PartitionKey(p))
	}
	for _, r := range []string{skipNotWanted, skipUnknown} {
		m.skipped[r] = skipped.WithLabelValues(r)
	}
	for _, kind := range []string{event.Foreign, event.Duplicate} {
		m.skipped[kind] = foreign.WithLabelValues(kind)
	}
	return m, nil
}
