package system

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/relay"
)

// RelayConfig is of a relay that polls and checks often, so that tests do not wait. A test may
// change it.
func RelayConfig() relay.Config {
	return relay.Config{BatchSize: 100, BatchBytes: 1 << 20, PollInterval: 10 * time.Millisecond, RoundInterval: 2 * time.Millisecond,
		PublishTimeout: 5 * time.Second, CheckInterval: time.Second, DrainTimeout: 5 * time.Second, DatabaseTimeout: 10 * time.Second,
		Lease: lease.Config{TTL: 2 * time.Second}}
}

// Relay returns a relay that does not run yet, with metrics of its own.
func Relay(t testing.TB, cfg relay.Config, pool *pgxpool.Pool, to broker.Config) *relay.Relay {
	t.Helper()
	r, err := relay.New(cfg, pool, to, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// ConsumerConfig is of a consumer that polls often, so that tests do not wait. A test may change
// it.
func ConsumerConfig() consumers.Config {
	return consumers.Config{BatchEvents: 100, BatchBytes: 1 << 20, ApplyTimeout: 20 * time.Second, LagInterval: 200 * time.Millisecond,
		Recheck: 200 * time.Millisecond, Lease: lease.Config{TTL: 2 * time.Second}}
}

// Consumer returns a consumer of p that does not run yet. It fills in what deps lacks of the
// registry and the log.
func Consumer(t testing.TB, cfg consumers.Config, deps consumers.Deps, from broker.Config, p consumers.Projection) *consumers.Consumer {
	t.Helper()
	deps.Streams, deps.Log = consumers.Streams{Name: from.Stream, Prefix: from.Prefix, Timeout: from.Timeout}, testkit.Logger(t)
	if deps.Registry == nil {
		deps.Registry = prometheus.NewRegistry()
	}
	c, err := consumers.New(cfg, deps, p)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Start runs a part until the test ends or calls stop. stop returns after the part has ended, whose
// error fails the test.
func Start(t testing.TB, run func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("a part of the system: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// Streams connects to b, and declares the stream of the only partition that an empty database has.
func Streams(t testing.TB, b *testkit.Broker) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, b.Config(), broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	return js
}

// AwaitPublished waits until every row of the outbox is published.
func AwaitPublished(t testing.TB, truth *pgxpool.Pool) {
	t.Helper()
	testkit.Eventually(t, "everything to be published", func() (bool, error) {
		var waiting bool
		err := truth.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&waiting)
		return !waiting, err
	})
}

// AwaitApplied waits until the consumers with these names have applied everything that is
// published.
func AwaitApplied(t testing.TB, projections *pgxpool.Pool, js jetstream.JetStream, from broker.Config, names ...string) {
	t.Helper()
	testkit.Eventually(t, "everything to be applied", func() (bool, error) {
		lags, err := consumers.Lag(t.Context(), projections, js, from, names...)
		return err == nil && !slices.ContainsFunc(lags, func(l consumers.ConsumerLag) bool { return l.Messages > 0 }), err
	})
}
