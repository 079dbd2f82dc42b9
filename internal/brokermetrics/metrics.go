package brokermetrics

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
)

// scrapeTimeout bounds the requests of one scrape.
const scrapeTimeout = 3 * time.Second

type collector struct {
	js  jetstream.JetStream
	cfg broker.Config
	log *slog.Logger

	messages, bytes, limit, replicas, current, used, allowed *prometheus.Desc
}

// NewCollector returns the sizes of the partitions' streams and the account's use of JetStream
// storage. It reads them from the servers at each scrape. It omits a stream without a leader.
func NewCollector(js jetstream.JetStream, cfg broker.Config, log *slog.Logger) prometheus.Collector {
	stream := []string{"stream"}
	return &collector{
		js: js, cfg: cfg, log: log.With("component", "broker"),
		messages: prometheus.NewDesc("tidings_stream_messages", "Messages in the stream.", stream, nil),
		bytes:    prometheus.NewDesc("tidings_stream_bytes", "Size of the stream's messages in bytes.", stream, nil),
		limit: prometheus.NewDesc("tidings_stream_limit_bytes",
			"Size limit of the stream in bytes; absent without a limit.", stream, nil),
		replicas: prometheus.NewDesc("tidings_stream_replicas", "Configured replicas of the stream.", stream, nil),
		current: prometheus.NewDesc("tidings_stream_current_replicas",
			"Current replicas of the stream, the leader included.", stream, nil),
		used: prometheus.NewDesc("tidings_jetstream_storage_bytes", "Size of all streams of the account on disk, in bytes.", nil, nil),
		allowed: prometheus.NewDesc("tidings_jetstream_storage_limit_bytes",
			"Limit of the account's size on disk, in bytes; absent without a limit.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.messages, c.bytes, c.limit, c.replicas, c.current, c.used, c.allowed} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	streams, err := broker.Streams(ctx, c.js, c.cfg)
	if err != nil {
		c.log.WarnContext(ctx, "streams left out of this scrape", "err", err)
	}
	for _, s := range streams {
		gauge(c.messages, float64(s.Messages), s.Name)
		gauge(c.bytes, float64(s.Bytes), s.Name)
		if s.MaxBytes > 0 {
			gauge(c.limit, float64(s.MaxBytes), s.Name)
		}
		gauge(c.replicas, float64(s.Replicas), s.Name)
		gauge(c.current, float64(s.Current), s.Name)
	}
	account, err := c.js.AccountInfo(ctx)
	if err != nil {
		c.log.WarnContext(ctx, "the account's storage left out of this scrape", "err", err)
		return
	}
	gauge(c.used, float64(account.Store))
	if account.Limits.MaxStore > 0 {
		gauge(c.allowed, float64(account.Limits.MaxStore))
	}
}

type credentials struct {
	file            string
	expires, issued *prometheus.Desc
}

// NewCredentials returns gauges of the life of the credentials in a file
// (broker.Config.Credentials). It reads the file at each scrape, as the next connection will, so it
// notices a replacement. It returns nothing for an empty name.
func NewCredentials(file string) prometheus.Collector {
	return credentials{file, prometheus.NewDesc("tidings_nats_credentials_expires_timestamp_seconds",
		"Expiry of the credentials in the file that the next connection reads; 0 if it cannot be read, absent if they never expire.",
		nil, nil), prometheus.NewDesc("tidings_nats_credentials_issued_timestamp_seconds",
		"Time at which these credentials were signed; 0 if the file cannot be read.", nil, nil)}
}

// Describe implements prometheus.Collector.
func (c credentials) Describe(ch chan<- *prometheus.Desc) { ch <- c.expires; ch <- c.issued }

// Collect implements prometheus.Collector.
func (c credentials) Collect(ch chan<- prometheus.Metric) {
	if c.file == "" {
		return
	}
	user, err := broker.ReadUser(c.file)
	gauge := func(d *prometheus.Desc, at time.Time) {
		seconds := 0.0
		if err == nil {
			seconds = float64(at.Unix())
		}
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, seconds)
	}
	if err != nil || !user.Expires.IsZero() {
		gauge(c.expires, user.Expires)
	}
	gauge(c.issued, user.Issued)
}
