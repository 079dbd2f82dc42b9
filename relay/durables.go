package relay

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"regexp"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

const (
	durablesEvery  = 15 * time.Second
	durablesWithin = 10 * time.Second // a cluster waits up to 4 s for a server that does not answer
	durablesDenied = 5 * time.Minute  // each refused request is an error in the logs
	maxDurables    = 500              // that are exported, of all streams together
)

// durables are the durable consumers that a relay exports by virtue of its lease of a partition.
type durables struct {
	partition  int
	all        map[[2]string]broker.Durable // by labels: the consumer, its stream
	incomplete int                          // streams with consumers that all lacks
}

// durablesOf bounds what is exported. Whoever creates a consumer chooses its name.
func durablesOf(partition int, list []broker.Durable, more []string) *durables {
	d := &durables{partition: partition, all: make(map[[2]string]broker.Durable)}
	for _, c := range list {
		labels := [2]string{label(c.Name), c.Stream}
		if _, taken := d.all[labels]; len(d.all) < maxDurables && !taken {
			d.all[labels] = c
		} else if !slices.Contains(more, c.Stream) {
			more = append(more, c.Stream)
		}
	}
	d.incomplete = len(more)
	return d
}

var (
	plainName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	notPlain  = regexp.MustCompile(`[^A-Za-z0-9_-]`)
)

// label returns the name of a consumer as a label: as it is, or shortened and with a hash.
func label(name string) string {
	if plainName.MatchString(name) {
		return name
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name)) // never fails
	return fmt.Sprintf("%.48s~%08x", notPlain.ReplaceAllString(name, "_"), h.Sum32())
}

// watchDurables reads the durable consumers until ctx ends, while this relay holds the lowest
// partition to which relays publish. So one relay asks the servers and exports the answer.
func (s *session) watchDurables(ctx context.Context) {
	for wait := time.Duration(0); work.Sleep(ctx, wait) == nil; {
		wait = s.durablesEvery
		now, err := s.readDurables(ctx)
		if err != nil && ctx.Err() == nil {
			if errors.Is(s.nc.LastError(), nats.ErrPermissionViolation) {
				wait = durablesDenied
			}
			s.log.WarnContext(ctx, "cannot list the durable consumers; retrying", "wait", wait, "err", err)
		}
		s.setDurables(now)
	}
}

// readDurables returns nil if another relay exports them.
func (s *session) readDurables(ctx context.Context) (*durables, error) {
	ctx, cancel := context.WithTimeout(ctx, durablesWithin)
	defer cancel()
	all, err := outbox.Partitions(ctx, s.pool)
	if err != nil {
		return nil, err
	}
	active := outbox.Active(all)
	if len(active) == 0 || !slices.Contains(s.group.Held(), active[0].Number) {
		return nil, nil
	}
	var streams []string
	for _, p := range slices.Backward(all) { // if not all fit, those of the newest streams
		streams = append(streams, s.broker.StreamName(p.Number))
	}
	list, more, err := broker.Durables(ctx, s.js, append(streams, s.broker.DeadStream())...)
	if err != nil {
		return nil, err
	}
	return durablesOf(active[0].Number, list, more), nil
}

func (r *Relay) setDurables(now *durables) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.durables = now
}

type durableGauge struct {
	desc *prometheus.Desc
	of   func(broker.Durable) float64
}

// durablesCollector exports the durable consumers that a relay has read, until its lease ends.
type durablesCollector struct {
	relay      *Relay
	gauges     []durableGauge
	incomplete *prometheus.Desc
}

func newDurables(r *Relay) prometheus.Collector {
	labels := []string{"consumer", "stream"}
	return &durablesCollector{r, []durableGauge{
		{prometheus.NewDesc("tidings_durable_pending_messages",
			"Messages not yet delivered to a subscriber's durable consumer.", labels, nil),
			func(d broker.Durable) float64 { return float64(d.Behind) }},
		{prometheus.NewDesc("tidings_durable_unacknowledged_messages",
			"Messages delivered to a durable consumer and not yet acknowledged.", labels, nil),
			func(d broker.Durable) float64 { return float64(d.Unacked) }},
		{prometheus.NewDesc("tidings_durable_redelivered_messages",
			"Messages that a durable consumer has not acknowledged, and that NATS has delivered more than once.", labels, nil),
			func(d broker.Durable) float64 { return float64(d.Redelivered) }},
		{prometheus.NewDesc("tidings_durable_waiting_pulls",
			"Requests for messages that wait; 1 if NATS pushes the messages to somebody. 0: nobody asks.", labels, nil),
			func(d broker.Durable) float64 { return float64(d.Waiting) }},
		{prometheus.NewDesc("tidings_durable_idle_seconds",
			"Time since the last delivery to a durable consumer or its last acknowledgment. Without one, and after a restart of "+
				"its server, since it was created.", labels, nil),
			func(d broker.Durable) float64 { return d.Idle }},
		{prometheus.NewDesc("tidings_durable_ack_floor",
			"Sequence of the stream up to which a durable consumer has acknowledged everything.", labels, nil),
			func(d broker.Durable) float64 { return float64(d.Floor) }},
		{prometheus.NewDesc("tidings_durable_stream_sequence", "Last sequence of a durable consumer's stream.", labels, nil),
			func(d broker.Durable) float64 { return float64(d.Last) }},
	}, prometheus.NewDesc("tidings_durable_incomplete_streams",
		"Streams with durable consumers that are not exported. The relay that holds the lowest partition exports up to 500.",
		nil, nil)}
}

// Describe implements prometheus.Collector.
func (c *durablesCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range c.gauges {
		ch <- g.desc
	}
	ch <- c.incomplete
}

// Collect implements prometheus.Collector.
func (c *durablesCollector) Collect(ch chan<- prometheus.Metric) {
	c.relay.mu.Lock()
	now, leases := c.relay.durables, c.relay.leases
	c.relay.mu.Unlock()
	if now == nil || leases == nil || !slices.Contains(leases.Held(), now.partition) {
		return
	}
	for labels, d := range now.all {
		for _, g := range c.gauges {
			ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.of(d), labels[:]...)
		}
	}
	ch <- prometheus.MustNewConstMetric(c.incomplete, prometheus.GaugeValue, float64(now.incomplete))
}
