package relay

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/heartbeat"
	"github.com/tidings/tidings/internal/histogram"
)

type metrics struct {
	throughput prometheus.Counter
	failures   *prometheus.CounterVec // event_type
	dead       prometheus.Counter
	partitions prometheus.Gauge
	stuck      prometheus.Gauge
	waiting    prometheus.Gauge
	skipped    *prometheus.CounterVec // reason
	belowFloor prometheus.Counter
	catchUps   prometheus.Counter
	caughtUp   prometheus.Counter
	conflicts  prometheus.Counter
	errors     *prometheus.CounterVec   // stage
	seconds    *prometheus.HistogramVec // stage
	batchRows  prometheus.Histogram
	heartbeats prometheus.Counter
	dropped    prometheus.Counter
	path       heartbeat.Seconds

	mu    sync.Mutex
	types map[string]bool // labels of failures
}

// otherEvents is the label for event types beyond maxEventTypes, and for those that no subject can
// have. Kinds and upstreams declare few types, but rows of an operator may have any.
const otherEvents = "other"

const maxEventTypes = 2000

// Why a message of the stream does not count.
const (
	skipForeign   = "foreign"   // no relay wrote it
	skipDuplicate = "duplicate" // an earlier message has the same event, and that one counts
)

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		throughput: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_published_total",
			Help: "Outbox messages published and marked by this relay."}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tidings_outbox_failed_attempts_total",
			Help: "Failed attempts of outbox messages that cannot be published as they are."}, []string{"event_type"}),
		dead: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_dead_total",
			Help: "Outbox messages moved to the DLQ."}),
		partitions: prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_relay_partitions_held",
			Help: "Partitions that this relay holds."}),
		stuck: prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_outbox_partitions_stuck",
			Help: "Partitions to which relays publish nothing, because the stream and the database disagree."}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_relay_partitions_waiting",
			Help: "Partitions of this relay whose stream has no leader with a quorum. The value is 1 if the whole " +
				"cluster has no leader: then no relay holds a partition."}),
		skipped: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tidings_relay_skipped_total",
			Help: "Messages on a stream that the relay skipped: foreign (no relay wrote them) or duplicate (a second " +
				"message of an event)."},
			[]string{"reason"}),
		belowFloor: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_outbox_below_floor_total",
			Help: "Rows found pending below a partition's floor. Must remain 0."}),
		catchUps: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_relay_catch_ups_total",
			Help: "Catch-ups started: one per partition taken over, and one per unknown outcome."}),
		caughtUp: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_relay_rows_caught_up_total",
			Help: "Outbox messages that a catch-up found on the stream."}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_relay_conflicts_total",
			Help: "Publishes that the tail check refused."}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "tidings_relay_errors_total",
			Help: "Errors by stage: claim, publish, catch-up, heartbeat, or lease (counted each second in which the relay " +
				"cannot renew its leases, so it publishes nothing). None of them loses or doubles an event."}, []string{"stage"}),
		seconds: histogram.NewVec(prometheus.HistogramOpts{Name: "tidings_relay_stage_duration_seconds",
			Help:    "Time of one piece of work by stage: claim, publish, catch-up or heartbeat.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 2, 15)}, []string{"stage"}),
		batchRows: histogram.New(prometheus.HistogramOpts{Name: "tidings_relay_publish_rows", Help: "Rows per publish.",
			Buckets: []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000}}),
		heartbeats: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_relay_heartbeats_total",
			Help: "Heartbeats that this relay has written into the outbox."}),
		dropped: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_relay_live_dropped_total",
			Help: "Events that this relay stored on a stream, and did not publish for the plain subscribers of their objects " +
				"(NATS_LIVE_OBJECTS)."}),
		path: heartbeat.NewSeconds(heartbeat.Published, ""), types: make(map[string]bool),
	}
	for _, t := range append(event.EventTypes(), otherEvents) {
		m.failures.WithLabelValues(t)
		m.types[t] = true
	}
	for _, reason := range []string{skipForeign, skipDuplicate} {
		m.skipped.WithLabelValues(reason)
	}
	for _, stage := range []string{stageClaim, stagePublish, stageCatchUp, stageHeartbeat} {
		m.errors.WithLabelValues(stage)
		m.seconds.WithLabelValues(stage)
	}
	m.errors.WithLabelValues(stageLease)
	reg.MustRegister(m.throughput, m.failures, m.dead, m.partitions, m.stuck, m.waiting, m.skipped, m.belowFloor, m.catchUps, m.caughtUp,
		m.conflicts, m.errors, m.seconds, m.batchRows, m.heartbeats, m.dropped, m.path)
	return m
}

// The stages of the pipeline, as the metrics name them.
const (
	stageClaim   = "claim" // includes the marks of the rows published before
	stagePublish = "publish"
	stageCatchUp = "catch-up"

	stageHeartbeat = "heartbeat" // not part of the pipeline
	stageLease     = "lease"
)

func (m *metrics) failed(e *event.Event) {
	label := e.AggregateType + "." + e.Type
	m.mu.Lock()
	if !m.types[label] && (len(m.types) >= maxEventTypes || !event.IsType(label)) {
		label = otherEvents
	}
	m.types[label] = true
	m.mu.Unlock()
	m.failures.WithLabelValues(label).Inc()
}
