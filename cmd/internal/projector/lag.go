package projector

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
)

// lagTimeout limits the reads of one scrape.
const lagTimeout = 3 * time.Second

type lagCollector struct {
	pool *pgxpool.Pool
	js   jetstream.JetStream
	cfg  broker.Config
	log  *slog.Logger

	lag, deadLetters *prometheus.Desc
}

// NewLagCollector returns a collector of the lag and dead letters of every consumer that has
// offsets. It reads the offsets and the streams at each scrape. Every consumer process exports all
// consumers, so a consumer without a running process remains visible.
func NewLagCollector(pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config, log *slog.Logger) prometheus.Collector {
	return &lagCollector{
		pool: pool, js: js, cfg: cfg, log: log.With("component", "lag"),
		lag: prometheus.NewDesc("tidings_consumer_offset_lag_seconds",
			"The lag of each consumer by its stored offsets, exported by every process that applies events. "+
				"So it exists even if the consumer does not run.",
			[]string{"consumer"}, nil),
		deadLetters: prometheus.NewDesc("tidings_consumer_offset_dead_letters",
			"Dead letters of the consumer (counted up to 10,000), even if no process of it runs.", []string{"consumer"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *lagCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.lag; ch <- c.deadLetters }

// Collect implements prometheus.Collector.
func (c *lagCollector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), lagTimeout)
	defer cancel()
	all, err := consumers.Lag(ctx, c.pool, c.js, c.cfg)
	if err != nil {
		c.log.WarnContext(ctx, "consumer lags left out of this scrape", "err", err)
		return
	}
	for _, l := range all {
		ch <- prometheus.MustNewConstMetric(c.lag, prometheus.GaugeValue, l.Seconds, l.Consumer)
		ch <- prometheus.MustNewConstMetric(c.deadLetters, prometheus.GaugeValue, float64(l.DeadLetters), l.Consumer)
	}
}
