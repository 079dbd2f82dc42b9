package prom

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// Metrics registers metrics with reg: tidings_consumer_* for Project, as for Tidings' own
// consumers, and tidings_subscriber_* for Handle.
func Metrics(reg prometheus.Registerer) subscribe.Option {
	return func(s *settings.Settings) {
		if reg != nil {
			s.Registry = registry{reg}
		}
	}
}

// registry is a settings.Registry. Projections register with it as with any Registerer.
type registry struct{ prometheus.Registerer }

// Handler implements settings.Registry.
func (r registry) Handler(subscriber string) (*settings.Metrics, error) {
	reg := r.Registerer // docs/metrics.md finds the label by this name
	reg = prometheus.WrapRegistererWith(prometheus.Labels{"subscriber": subscriber}, reg)
	handled := prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_subscriber_handled_total",
		Help: "Events handled and acknowledged."})
	failures := prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_subscriber_failures_total",
		Help: "Failed attempts that are retried."})
	foreign := prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_subscriber_foreign_total",
		Help: "Messages skipped because no relay wrote them."})
	dead := prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_subscriber_dead_letters_total",
		Help: "Events that became dead letters."})
	snapshots := prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_subscriber_snapshots_total",
		Help: "States of exports handled."})
	lag := prometheus.NewGauge(prometheus.GaugeOpts{Name: "tidings_subscriber_lag_messages",
		Help: "Events of all streams that no instance has acknowledged."})
	for _, c := range []prometheus.Collector{handled, failures, foreign, dead, snapshots, lag} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return &settings.Metrics{Handled: handled, Failures: failures, Foreign: foreign, Dead: dead, Snapshots: snapshots, Lag: lag}, nil
}
