package consumers_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections/followercounts"
)

// BenchmarkCatchUp has one instance of followercounts apply 100,000 follow events that are on the stream, from its start to a lag
// of 0. The servers of the tests do not sync to disk.
func BenchmarkCatchUp(b *testing.B) {
	const events, users = 100_000, 100_000
	r := rand.New(rand.NewPCG(1, 2))
	for name, pick := range map[string]func(n int64) (follower, followee int64){
		"random":       func(int64) (int64, int64) { return 1 + r.Int64N(users), 1 + users + r.Int64N(users) },
		"celebrity":    func(n int64) (int64, int64) { return 10 + n, 1 },
		"massfollower": func(n int64) (int64, int64) { return 1, 10 + n },
	} {
		b.Run(name, func(b *testing.B) {
			nats := testkit.NATS(b)
			js, err := jetstream.New(nats.Connect(b))
			if err != nil {
				b.Fatal(err)
			}
			cfg, ctx := nats.Config(), context.Background()
			if _, err := broker.Declare(ctx, js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(b)); err != nil {
				b.Fatal(err)
			}
			fill(b, js, cfg, events, pick)
			for b.Loop() {
				pool := testkit.Postgres(b).Pool(b, postgres.RoleSystem)
				conf := config()
				conf.BatchEvents = 4000
				c, err := consumers.New(conf, consumers.Deps{Pool: pool, JetStream: js, Broker: cfg, Registry: prometheus.NewRegistry(), Log: testkit.Logger(b)}, followercounts.New())
				if err != nil {
					b.Fatal(err)
				}
				ctx, stop := context.WithCancel(ctx)
				done := make(chan error, 1)
				start := time.Now()
				go func() { done <- c.Run(ctx) }()
				testkit.Eventually(b, 5*time.Minute, "a lag of 0", func() (bool, error) {
					all, err := consumers.Lag(ctx, pool, js, cfg, followercounts.Name)
					return err == nil && all[0].Messages == 0 && !all[0].AsOf.IsZero(), err
				})
				b.ReportMetric(events/time.Since(start).Seconds(), "events/s")
				stop()
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// fill puts events on an empty stream. Nobody else publishes, so the sequences are known beforehand.
func fill(b *testing.B, js jetstream.JetStream, cfg broker.Config, events int, pick func(int64) (int64, int64)) {
	b.Helper()
	for n := 1; n <= events; n++ {
		follower, followee := pick(int64(n))
		payload, err := json.Marshal(event.Follow{FollowerID: event.ID(follower), FolloweeID: event.ID(followee), Status: event.StatusActive, Version: 1,
			PositionedAt: event.Time{Time: time.Now()}, Actor: "bench"})
		if err != nil {
			b.Fatal(err)
		}
		e := event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: followee, Type: event.Created, Version: 1,
			OccurredAt: time.Now(), OutboxID: int64(n)}
		if _, err := js.PublishMsgAsync(&nats.Msg{Subject: e.Subject(cfg.Prefix, 0), Header: e.Headers(), Data: payload}); err != nil {
			b.Fatal(err)
		}
	}
	<-js.PublishAsyncComplete()
}
