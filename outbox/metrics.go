package outbox

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// scrapeTimeout bounds the query of one scrape. Without an answer in that time the scrape lacks
// these gauges, and the alert OutboxMetricsAbsent reports it.
const scrapeTimeout = 3 * time.Second

type collector struct {
	pool *pgxpool.Pool
	log  *slog.Logger

	lag, undelivered, dlq, attempts, pending, archiveOldest, ranges, archiveRanges, ahead, strays *prometheus.Desc
}

// NewCollector returns the outbox's gauges. It reads them from the database at each scrape, at a
// cost that does not grow with the backlog. The relay and the archiver both export them, so a dead
// relay does not hide the backlog.
func NewCollector(pool *pgxpool.Pool, log *slog.Logger) prometheus.Collector {
	return &collector{
		pool: pool, log: log.With("component", "outbox"),
		lag: prometheus.NewDesc("tidings_outbox_lag_seconds",
			"Age of the oldest due unpublished outbox message of all partitions; 0 if there is none.", nil, nil),
		undelivered: prometheus.NewDesc("tidings_outbox_oldest_undelivered_seconds",
			"Time since the insert of the oldest unpublished outbox message; 0 if there is none. It includes retried messages "+
				"and those behind them, and a scheduled message once its time has come.", nil, nil),
		dlq: prometheus.NewDesc("tidings_outbox_dlq_messages", "Messages in the outbox's DLQ (counted up to 100,000).", nil, nil),
		attempts: prometheus.NewDesc("tidings_outbox_max_attempts",
			"The most failed attempts of any message, pending or in the DLQ.", nil, nil),
		pending: prometheus.NewDesc("tidings_outbox_pending_messages",
			"Messages not yet published (counted up to 100,000 that are due and 100,000 that wait).", nil, nil),
		archiveOldest: prometheus.NewDesc("tidings_outbox_oldest_unarchived_seconds",
			"Time since the oldest published message outside the archive was published, estimated from some rows "+
				"of the oldest range; 0 if there is none.", nil, nil),
		ranges: prometheus.NewDesc("tidings_outbox_ranges",
			"Ranges of ids of the outbox, those created in advance included.", nil, nil),
		archiveRanges: prometheus.NewDesc("tidings_outbox_archive_ranges", "Ranges of ids that the archive consists of.", nil, nil),
		ahead:         prometheus.NewDesc("tidings_outbox_ranges_ahead", "Ranges created in advance, without ids in use.", nil, nil),
		strays: prometheus.NewDesc("tidings_outbox_stray_messages",
			"Messages in the default range, above the last range (counted up to 100,000).", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.lag, c.undelivered, c.dlq, c.attempts, c.pending, c.archiveOldest, c.ranges,
		c.archiveRanges, c.ahead, c.strays} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	s, err := ReadStats(ctx, c.pool)
	if err != nil {
		c.log.WarnContext(ctx, "outbox gauges left out of this scrape", "err", err)
		return
	}
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	gauge(c.lag, s.LagSeconds)
	gauge(c.undelivered, s.Undelivered)
	gauge(c.dlq, float64(s.DLQDepth))
	gauge(c.attempts, float64(s.MaxAttempts))
	gauge(c.pending, float64(s.Pending))
	gauge(c.archiveOldest, s.ArchiveOldestSeconds)
	gauge(c.ranges, float64(s.Ranges))
	gauge(c.archiveRanges, float64(s.ArchiveRanges))
	gauge(c.ahead, float64(s.RangesAhead))
	gauge(c.strays, float64(s.Strays))
}
