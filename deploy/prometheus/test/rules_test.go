// Package test evaluates the rules and the dashboards with Prometheus' engine. It is a separate
// module, so builds of Tidings do not need Prometheus.
package test

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

const rulesFile = "../rules.yml"

// interval is the time between two evaluations of the rules, and between two samples of a series.
const interval = 15 * time.Second

// healthy has the series of a fleet without problems, in promql's notation. Its API answers 1,000
// requests per second, of which one in 2,000 fails.
var healthy = []string{
	`tidings_build_info{binary="api",version="v1"} 1x600`,
	`tidings_build_info{binary="relay",version="v1"} 1x600`,
	`tidings_outbox_lag_seconds 2x600`, `tidings_outbox_max_attempts 0x600`, `tidings_outbox_dlq_messages 0x600`,
	`tidings_outbox_oldest_undelivered_seconds 2x600`,
	`tidings_outbox_failed_attempts_total{event_type="created"} 0x600`,
	`tidings_outbox_partitions_stuck 0x600`, `tidings_relay_partitions_waiting 0x600`, `tidings_outbox_below_floor_total 0x600`,
	`tidings_outbox_oldest_unarchived_seconds 90000x600`, `tidings_outbox_ranges_ahead 2x600`, `tidings_outbox_stray_messages 0x600`,
	`tidings_outbox_export_failures_total 0x600`,
	`tidings_relay_skipped_total{reason="foreign"} 0x600`, `tidings_consumer_skipped_total{consumer="c",reason="foreign"} 0x600`,
	`tidings_consumer_lag_seconds{consumer="c"} 1x600`, `tidings_consumer_offset_lag_seconds{consumer="c"} 1x600`,
	`tidings_consumer_partitions_held{consumer="c"} 1x600`,
	`tidings_consumer_partitions_stuck{consumer="c"} 0x600`, `tidings_consumer_partitions_waiting{consumer="c"} 0x600`,
	`tidings_consumer_dead_letters{consumer="c"} 0x600`,
	`tidings_consumer_offset_dead_letters{consumer="c"} 0x600`, `tidings_projection_differences_total{consumer="c"} 0x600`,
	`tidings_api_shed_requests_total{reason="requests"} 0x600`,
	// A subscriber of all events, of which one is always in hand, and one whose events are rare.
	`tidings_durable_pending_messages{consumer="m",stream="A"} 0x600`, `tidings_durable_pending_messages{consumer="r",stream="A"} 0x600`,
	`tidings_durable_unacknowledged_messages{consumer="m",stream="A"} 1x600`,
	`tidings_durable_waiting_pulls{consumer="m",stream="A"} 1x600`,
	`tidings_durable_waiting_pulls{consumer="r",stream="A"} 0x600`, `tidings_durable_idle_seconds{consumer="m",stream="A"} 0x600`,
	`tidings_durable_idle_seconds{consumer="r",stream="A"} 86400x600`,
	`tidings_durable_redelivered_messages{consumer="m",stream="A"} 1x600`,
	`tidings_durable_ack_floor{consumer="m",stream="A"} 99+100x600`, `tidings_durable_stream_sequence{consumer="m",stream="A"} 100+100x600`,
	`tidings_durable_ack_floor{consumer="r",stream="A"} 5x600`, `tidings_durable_stream_sequence{consumer="r",stream="A"} 100+100x600`,
	`tidings_postgres_blocked_sessions 0x600`, `tidings_stream_bytes{stream="EVENTS-0"} 70x600`,
	`tidings_stream_limit_bytes{stream="EVENTS-0"} 100x600`,
	// Two hours and 37 minutes more than 14 days after time 0, when the test begins.
	`tidings_tls_certificate_expires_timestamp_seconds{instance="a",use="api"} 1219000x600`, `tidings_api_tokens_expiring 0x600`,
	`tidings_nats_credentials_expires_timestamp_seconds{instance="a"} 1219000x600`,
	`tidings_nats_credentials_issued_timestamp_seconds{instance="a"} -6557000x600`,
	`tidings_jetstream_storage_bytes 70x600`, `tidings_jetstream_storage_limit_bytes 100x600`,
	`tidings_stream_replicas{stream="EVENTS-0"} 3x600`,
	`tidings_stream_current_replicas{stream="EVENTS-0"} 3x600`,
	`node_filesystem_avail_bytes{instance="a",mountpoint="/data",fstype="ext4"} 20x600`,
	`node_filesystem_size_bytes{instance="a",mountpoint="/data",fstype="ext4"} 100x600`,
	`tidings_job_runs_total{name="outbox-archive",outcome="failed"} 0x600`,
	`tidings_relay_heartbeats_total 0+0.25x600`, `tidings_path_latency_seconds_count{station="published"} 0+0.25x600`,
	`tidings_path_latency_seconds_count{consumer="c",station="applied"} 0+0.25x600`,
	`tidings_path_latency_seconds_bucket{consumer="c",station="applied",le="2.5"} 0+0.25x600`, // one a minute
	`tidings_api_requests_total{code="200"} 0+14992x600`, `tidings_api_requests_total{code="503"} 0+7x600`,
	`tidings_api_request_duration_seconds_count{route="r"} 0+15000x600`,
	`tidings_api_request_duration_seconds_bucket{route="r",le="0.5"} 0+14990x600`,
}

// minutely returns a counter that rises once a minute. The scrapes show each rise late by so many
// samples.
func minutely(series string, late int) []string {
	for i := range 600 {
		series += fmt.Sprintf(" %d", max(i-late, 0)/4)
	}
	return []string{series}
}

// cases has two sets of series per alert: sick ones make the alert fire, and near ones are just
// below its limits, so no alert may fire. Each replaces the series of healthy with the same name
// and labels. The value "_" means no sample.
var cases = map[string]struct {
	sick  []string
	fires time.Duration // when the alert fires first, from the beginning
	also  []string      // other alerts that fire with it for good reason
	near  []string
}{
	"OutboxLagHigh": {sick: []string{`tidings_outbox_lag_seconds 2x3 61x600`}, fires: 4*interval + 5*time.Minute,
		near: []string{`tidings_outbox_lag_seconds 2x3 61x19 2x3 61x19 2x600`}},
	"OutboxEventFails": {sick: []string{`tidings_outbox_failed_attempts_total{event_type="created"} 0x3 1x600`}, fires: 4 * interval,
		near: []string{`tidings_outbox_max_attempts 0x3 1x600`}}, // of a message that an operator moved to the DLQ
	"OutboxAttemptsExceeded": {sick: []string{`tidings_outbox_max_attempts 0x3 11x600`}, fires: 4 * interval},
	"OutboxDLQNotEmpty":      {sick: []string{`tidings_outbox_dlq_messages 0x3 1x600`}, fires: 4 * interval},
	"OutboxMetricsAbsent": {sick: []string{`tidings_outbox_lag_seconds 2x3 stale`}, fires: 4*interval + 5*time.Minute,
		near: []string{`tidings_outbox_lag_seconds 2x3 stale _x18 2x600`}},
	"RelayAbsent": {sick: []string{`tidings_build_info{binary="relay",version="v1"} 1x3 stale`}, fires: 4*interval + 2*time.Minute,
		near: []string{`tidings_build_info{binary="relay",version="v1"} 1x3 stale _x5 1x600`}},
	"OutboxPartitionStuck": {sick: []string{`tidings_outbox_partitions_stuck 0x3 1x600`}, fires: 4*interval + time.Minute,
		near: []string{`tidings_outbox_partitions_stuck 0x3 1x3 0x600`}},
	"StreamWaitsForLeader": {sick: []string{`tidings_relay_partitions_waiting 0x3 1x600`}, fires: 4*interval + time.Minute,
		near: []string{`tidings_relay_partitions_waiting 0x3 1x3 0x600`}},
	"OutboxUndelivered": {sick: []string{`tidings_outbox_oldest_undelivered_seconds 2x3 301x600`}, fires: 4*interval + time.Minute,
		near: []string{`tidings_outbox_oldest_undelivered_seconds 2x3 299x600`}},
	"StreamForeignMessages": {sick: []string{`tidings_consumer_skipped_total{consumer="c",reason="foreign"} 0x3 1x600`},
		fires: 4 * interval,
		near:  []string{`tidings_consumer_skipped_total{consumer="c",reason="unknown"} 0x3 1x600`}},
	"OutboxFoundBelowFloor": {sick: []string{`tidings_outbox_below_floor_total 0x3 1x600`}, fires: 4 * interval},
	"OutboxArchiveBehind": {sick: []string{`tidings_outbox_oldest_unarchived_seconds 90000x3 777601x600`}, fires: 4*interval + time.Hour,
		near: []string{`tidings_outbox_oldest_unarchived_seconds 777599x600`}},
	"OutboxRangesMissing": {sick: []string{`tidings_outbox_ranges_ahead 2x3 1x600`}, fires: 4*interval + 10*time.Minute,
		near: []string{`tidings_outbox_ranges_ahead 2x3 1x39 2x600`}},
	"OutboxExportFailing": {sick: []string{`tidings_outbox_export_failures_total 0x3 3x600`}, fires: 4 * interval,
		near: []string{`tidings_outbox_export_failures_total 0x3 1x600`}},
	"BlockedSessions": {sick: []string{`tidings_postgres_blocked_sessions 0x3 1x600`}, fires: 4*interval + time.Minute,
		near: []string{`tidings_postgres_blocked_sessions 0x3 1x3 0x600`}},
	"StreamNearlyFull": {sick: []string{`tidings_stream_bytes{stream="EVENTS-0"} 70x3 81x600`}, fires: 4*interval + 5*time.Minute,
		near: []string{`tidings_stream_bytes{stream="EVENTS-0"} 79x600`, `tidings_stream_bytes{stream="EVENTS-1"} 900x600`}},
	"StreamReplicaBehind": {sick: []string{`tidings_stream_current_replicas{stream="EVENTS-0"} 3x3 2x600`},
		fires: 4*interval + 10*time.Minute,
		near:  []string{`tidings_stream_current_replicas{stream="EVENTS-0"} 3x3 2x39 3x600`}},
	"DiskNearlyFull": {sick: []string{`node_filesystem_avail_bytes{instance="a",mountpoint="/data",fstype="ext4"} 20x3 9x600`},
		fires: 4*interval + 5*time.Minute,
		near: []string{`node_filesystem_avail_bytes{instance="a",mountpoint="/run",fstype="tmpfs"} 1x600`,
			`node_filesystem_size_bytes{instance="a",mountpoint="/run",fstype="tmpfs"} 100x600`}},
	"JobFailing": {sick: []string{`tidings_job_runs_total{name="outbox-archive",outcome="failed"} 0x3 3x600`}, fires: 4 * interval,
		near: []string{`tidings_job_runs_total{name="outbox-archive",outcome="failed"} 0x3 1x600`,
			`tidings_job_runs_total{name="outbox-archive",outcome="lost"} 0x3 9x600`}},
	"VersionsDiffer": {sick: []string{`tidings_build_info{binary="threadcache",version="v2"} _x3 1x600`}, fires: 3*interval + time.Hour,
		near: []string{`tidings_build_info{binary="threadcache",version="v2"} _x3 1x239 stale`}},
	"ApiAbsent": {sick: []string{`tidings_build_info{binary="api",version="v1"} 1x3 stale`}, fires: 4*interval + 2*time.Minute,
		near: []string{`tidings_build_info{binary="api",version="v1"} 1x3 stale _x5 1x600`}},
	// After an hour, one request in eleven begins to fail. 3m45s later, 0.6 % of all requests have
	// failed.
	"ApiErrors": {sick: []string{`tidings_api_requests_total{code="503"} 0+7x239 1680+1500x600`},
		fires: time.Hour + 3*time.Minute + 45*time.Second + 2*time.Minute,
		near:  []string{`tidings_api_requests_total{code="503"} 0+7x239 1680+1500x12 19680+7x600`}},
	"ApiSlow": {sick: []string{`tidings_api_request_duration_seconds_bucket{route="r",le="0.5"} 0+14990x239 3597600x600`},
		fires: time.Hour + 10*time.Minute + 45*time.Second,
		near: []string{`tidings_api_request_duration_seconds_bucket{route="/v1/comments:batch",le="0.5"} 0x600`,
			`tidings_api_request_duration_seconds_count{route="/v1/comments:batch"} 0+15000x600`}},
	// After ten minutes, all new heartbeats are late. 1m45s later, 14.4 % of all heartbeats are
	// late.
	"PathSlow": {sick: []string{`tidings_path_latency_seconds_bucket{consumer="c",station="applied",le="2.5"} 0+0.25x39 10x600`},
		fires: 11*time.Minute + 45*time.Second + 2*time.Minute, also: []string{"PathOftenSlow"},
		// The stations are scraped up to 45 s apart.
		near: slices.Concat(minutely(`tidings_relay_heartbeats_total`, 0),
			minutely(`tidings_path_latency_seconds_count{station="published"}`, 2),
			minutely(`tidings_path_latency_seconds_count{consumer="c",station="applied"}`, 3),
			minutely(`tidings_path_latency_seconds_bucket{consumer="c",station="applied",le="2.5"}`, 3))},
	// After twenty minutes, 13 of 100 new heartbeats are late. 17m15s later, 6 of 100 of all
	// heartbeats are late.
	"PathOftenSlow": {
		sick:  []string{`tidings_path_latency_seconds_bucket{consumer="c",station="applied",le="2.5"} 0+0.25x79 20+0.2175x600`},
		fires: 37*time.Minute + 15*time.Second + 2*time.Minute,
		near:  []string{`tidings_path_latency_seconds_bucket{consumer="c",station="applied",le="2.5"} 0+0.236x600`}}, // 5.6 of 100 are late
	"HeartbeatsDoNotArrive": {sick: []string{`tidings_path_latency_seconds_count{consumer="c",station="applied"} 0+0.25x39 10x600`},
		fires: 10*time.Minute + 5*time.Minute - interval + 2*time.Minute,
		near: []string{`tidings_path_latency_seconds_count{consumer="c",station="applied"} 0+0.25x39 10x23 16+0.25x600`,
			`tidings_path_latency_seconds_count{station="published"} 0x600`, `tidings_relay_heartbeats_total 0x600`}},
	"ApiOverloaded": {sick: []string{`tidings_api_shed_requests_total{reason="requests"} 0x3 0+150x600`}, fires: 7*interval + 5*time.Minute,
		near: []string{`tidings_api_shed_requests_total{reason="requests"} 0x3 0+14x600`}},
	"ConsumerLagHigh": {sick: []string{`tidings_consumer_offset_lag_seconds{consumer="c"} 1x3 61x600`}, fires: 4*interval + 5*time.Minute,
		near: []string{`tidings_consumer_lag_seconds{consumer="c"} 1x3 61x19 1x600`}},
	"ConsumerAbsent": {sick: []string{`tidings_consumer_offset_lag_seconds{consumer="gone"} 5x600`}, fires: 2 * time.Minute,
		near: []string{`tidings_consumer_partitions_held{consumer="c"} 1x3 stale _x5 1x600`}},
	"ConsumerPartitionStuck": {sick: []string{`tidings_consumer_partitions_stuck{consumer="c"} 0x3 1x600`}, fires: 4*interval + time.Minute,
		near: []string{`tidings_consumer_partitions_stuck{consumer="c"} 0x3 1x3 0x600`}},
	"ConsumerDeadLetters": {sick: []string{`tidings_consumer_offset_dead_letters{consumer="gone"} 0x3 1x600`}, fires: 4 * interval},
	"CertificateExpires": {sick: []string{`tidings_tls_certificate_expires_timestamp_seconds{instance="a",use="api"} 1209659x600`},
		fires: 4*interval + 10*time.Minute,
		near:  []string{`tidings_tls_certificate_expires_timestamp_seconds{instance="a",use="api"} 1219000x3 0x30 1219000x600`}},
	"CredentialsExpire": {sick: []string{`tidings_nats_credentials_expires_timestamp_seconds{instance="a"} 1209659x600`},
		fires: 4*interval + 10*time.Minute,
		// Credentials of a day, which somebody renews before their last quarter.
		near: []string{`tidings_nats_credentials_expires_timestamp_seconds{instance="a"} 66000x600`,
			`tidings_nats_credentials_issued_timestamp_seconds{instance="a"} -20400x600`}},
	"TokensExpire": {sick: []string{`tidings_api_tokens_expiring 0x3 1x600`}, fires: 4*interval + time.Hour,
		near: []string{`tidings_api_tokens_expiring 0x3 1x200 0x600`}},
	// Its program ends with an event in hand, and more follow.
	"SubscriberAbsent": {sick: []string{`tidings_durable_pending_messages{consumer="m",stream="A"} 0x3 0+100x600`,
		`tidings_durable_waiting_pulls{consumer="m",stream="A"} 1x3 0x600`,
		`tidings_durable_idle_seconds{consumer="m",stream="A"} 0x3 15+15x600`,
		`tidings_durable_ack_floor{consumer="m",stream="A"} 99+100x3 399x600`},
		fires: 24*interval + 5*time.Minute,
		// Programs that ask every few minutes, wait for events, and are late with a rare event.
		near: []string{`tidings_durable_waiting_pulls{consumer="m",stream="A"} 1x3 0x600`,
			`tidings_durable_idle_seconds{consumer="m",stream="A"} 299x600`,
			`tidings_durable_pending_messages{consumer="r",stream="A"} 0x3 1x19 0x600`}},
	// It does not acknowledge one event, and continues with others.
	"SubscriberLagHigh": {sick: []string{`tidings_durable_ack_floor{consumer="m",stream="A"} 99+100x3 399x600`},
		fires: 43*interval + 5*time.Minute,
		near: []string{`tidings_durable_ack_floor{consumer="m",stream="A"} 0x39 100+100x600`,
			`tidings_durable_pending_messages{consumer="r",stream="A"} 0x60 1x19 0x600`,
			`tidings_durable_waiting_pulls{consumer="r",stream="A"} 1x600`}},
	"SubscriberRedelivers": {sick: []string{`tidings_durable_redelivered_messages{consumer="m",stream="A"} 0x3 11x600`},
		fires: 4*interval + 10*time.Minute,
		near:  []string{`tidings_durable_redelivered_messages{consumer="m",stream="A"} 10x600`}},
	"ProjectionDrift": {sick: []string{`tidings_projection_differences_total{consumer="c"} 0x3 1x600`}, fires: 4 * interval},
}

// firing evaluates the rules over the series for so long, and returns the time at which each alert
// first fired.
func firing(t *testing.T, series []string, long time.Duration) map[string]time.Duration {
	t.Helper()
	loader, err := promqltest.NewLazyLoader("load 15s\n  "+strings.Join(series, "\n  ")+"\n",
		promqltest.LazyLoaderOpts{EnableAtModifier: true, EnableNegativeOffset: true})
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	m := rules.NewManager(&rules.ManagerOptions{
		QueryFunc: rules.EngineQueryFunc(loader.QueryEngine(), loader.Storage()), Appendable: loader.Storage(), Queryable: loader.Storage(),
		Context: t.Context(), NotifyFunc: func(context.Context, string, ...*rules.Alert) {}, Logger: slog.New(slog.DiscardHandler),
		Parser: parser.NewParser(parser.Options{}),
	})
	groups, errs := m.LoadGroups(interval, labels.EmptyLabels(), "", nil, false, rulesFile)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	var alerting []*rules.AlertingRule
	for _, g := range groups {
		for _, r := range g.Rules() {
			if a, ok := r.(*rules.AlertingRule); ok {
				a.SetRestored(true)
				alerting = append(alerting, a)
			}
		}
	}
	// Groups of recording rules come first, because alerts read their results.
	names := slices.SortedFunc(maps.Keys(groups), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(groups[a].AlertingRules()), len(groups[b].AlertingRules())), cmp.Compare(a, b))
	})
	first := make(map[string]time.Duration)
	for at := time.Duration(0); at <= long; at += interval {
		now := time.Unix(0, 0).UTC().Add(at)
		loader.WithSamplesTill(now, func(err error) {
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range names {
				groups[name].Eval(loader.Context(), now)
				for _, r := range groups[name].Rules() {
					if err := r.LastError(); err != nil {
						t.Fatalf("%s at %s: %v", r.Name(), at, err)
					}
				}
			}
		})
		for _, a := range alerting {
			if _, known := first[a.Name()]; !known && a.State() == rules.StateFiring {
				first[a.Name()] = at
				of := make(map[string]bool) // what fires, but for the parts of one process
				for _, active := range a.ActiveAlerts() {
					id := labels.NewBuilder(active.Labels).Del("job", "part").Labels().String()
					if of[id] {
						t.Errorf("fires more than once: %s", id)
					}
					of[id] = true
				}
			}
		}
	}
	return first
}

// with returns the series of a healthy fleet. Series of others replace those with the same name and
// labels.
func with(others ...string) []string {
	id := func(series string) string { // the name and labels: no label here has a space
		before, _, _ := strings.Cut(series, " ")
		return before
	}
	all := slices.Clone(others)
	for _, h := range healthy {
		if !slices.ContainsFunc(others, func(o string) bool { return id(o) == id(h) }) {
			all = append(all, h)
		}
	}
	return all
}

// TestAnAlertOfAProcessComesOnce has the series of serve, each part of which exports its
// credentials.
func TestAnAlertOfAProcessComesOnce(t *testing.T) {
	var series []string
	for _, part := range []string{"api", "relay", "archiver"} {
		for metric, value := range map[string]string{"tidings_nats_credentials_expires_timestamp_seconds": "86400x600",
			"tidings_nats_credentials_issued_timestamp_seconds": "-6557000x600"} {
			series = append(series, fmt.Sprintf(`%s{instance="a",job="%s",part="%[2]s"} %[3]s`, metric, part, value))
		}
	}
	if got := firing(t, with(series...), time.Hour); len(got) == 0 {
		t.Error("nothing fires")
	}
}

func TestNothingFiresWhileTheFleetIsHealthy(t *testing.T) {
	if got := firing(t, with(), 2*time.Hour); len(got) > 0 {
		t.Errorf("these alerts fire: %v", got)
	}
}

func TestEveryAlertFiresAtItsTimeAndNotNearBy(t *testing.T) {
	known := make(map[string]bool)
	groups, err := rulefmt.ParseFile(rulesFile, false, model.UTF8Validation, parser.NewParser(parser.Options{}),
		slog.New(slog.DiscardHandler))
	if len(err) > 0 {
		t.Fatal(err)
	}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			if r.Alert != "" {
				known[r.Alert] = true
				if _, ok := cases[r.Alert]; !ok {
					t.Errorf("the alert %s has no case", r.Alert)
				}
			}
		}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if !known[name] {
				t.Fatal("rules.yml has no such alert")
			}
			got := firing(t, with(c.sick...), c.fires+5*time.Minute)
			if at, ok := got[name]; !ok || at != c.fires {
				t.Errorf("it fires at %s (it fires at all: %t), want %s", at, ok, c.fires)
			}
			for other := range got {
				if other != name && !slices.Contains(c.also, other) {
					t.Errorf("%s fires too", other)
				}
			}
			if len(c.near) == 0 {
				return // no value lies between 0, which is healthy, and 1, which fires
			}
			if got := firing(t, with(c.near...), c.fires+15*time.Minute); len(got) > 0 {
				t.Errorf("just below its limits, these alerts fire: %v", got)
			}
		})
	}
}
