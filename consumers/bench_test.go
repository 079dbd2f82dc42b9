package consumers_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
)

// BenchmarkCatchUp lets one instance of followercounts apply 100,000 follow events of a stream,
// from its start to a lag of 0. The servers of the tests do not sync to disk.
func BenchmarkCatchUp(b *testing.B) {
	const events, users = 100_000, 100_000
	r := rand.New(rand.NewPCG(1, 2))
	for name, pick := range map[string]func(n int64) (follower, followee event.ID){
		"random": func(int64) (event.ID, event.ID) {
			return event.IDOf(1 + r.Int64N(users)), event.IDOf(1 + users + r.Int64N(users))
		},
		"celebrity":    func(n int64) (event.ID, event.ID) { return event.IDOf(10 + n), "1" },
		"massfollower": func(n int64) (event.ID, event.ID) { return "1", event.IDOf(10 + n) },
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
				c, err := consumers.New(conf, consumers.Deps{Pool: pool, JetStream: js,
					Streams:  consumers.Streams{Name: cfg.Stream, Prefix: cfg.Prefix, Timeout: cfg.Timeout},
					Registry: prometheus.NewRegistry(), Log: testkit.Logger(b)}, followercounts.New(kinds.Builtin))
				if err != nil {
					b.Fatal(err)
				}
				ctx, stop := context.WithCancel(ctx)
				done := make(chan error, 1)
				start := time.Now()
				go func() { done <- c.Run(ctx) }()
				testkit.Eventually(b, "a lag of 0", func() (bool, error) {
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

// fill publishes events to an empty stream. It is the only publisher, so it knows the sequences
// beforehand.
func fill(b *testing.B, js jetstream.JetStream, cfg broker.Config, events int, pick func(int64) (event.ID, event.ID)) {
	b.Helper()
	for n := 1; n <= events; n++ {
		follower, followee := pick(int64(n))
		payload, err := json.Marshal(event.Follow{FollowerID: follower, FolloweeID: followee,
			Status: event.StatusActive, Version: 1, PositionedAt: event.Time{Time: time.Now()}, Actor: "bench"})
		if err != nil {
			b.Fatal(err)
		}
		e := event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: followee,
			Type: event.Created, Version: 1, OccurredAt: time.Now(), OutboxID: int64(n)}
		if _, err := js.PublishMsgAsync(&natsgo.Msg{Subject: e.Subject(cfg.Prefix, 0), Header: e.Headers(), Data: payload}); err != nil {
			b.Fatal(err)
		}
		if n%500 == 0 || n == events {
			<-js.PublishAsyncComplete()
		}
	}
}

// applied is a projection that calls done after it has applied events.
type applied struct {
	followercounts.Projection
	done func(events []event.Event)
}

func (a applied) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	err := a.Projection.Apply(ctx, tx, events)
	a.done(events)
	return err
}

// BenchmarkSteady lets one instance of followercounts apply 1,000 events/s. It measures the time
// from the publish to the end of the projection's work, and the processor time of this process.
// That time includes the publisher, which the case idle measures alone.
func BenchmarkSteady(b *testing.B) {
	for name, consume := range map[string]bool{"idle": false, "consume": true} {
		b.Run(name, func(b *testing.B) {
			const events, every = 10_000, time.Millisecond
			nats := testkit.NATSProcess(b)
			r := newRig(b, testkit.Postgres(b), nats)
			var mu sync.Mutex
			var waits []time.Duration
			if consume {
				reg := prometheus.NewRegistry()
				c, err := consumers.New(config(), consumers.Deps{Pool: r.system, JetStream: r.js,
					Streams: consumers.Streams{Name: r.cfg.Stream, Prefix: r.cfg.Prefix, Timeout: r.cfg.Timeout}, Registry: reg,
					Log: slog.New(slog.DiscardHandler)},
					applied{followercounts.New(kinds.Builtin), func(events []event.Event) {
						mu.Lock()
						defer mu.Unlock()
						for i := range events {
							waits = append(waits, time.Since(events[i].OccurredAt))
						}
					}})
				if err != nil {
					b.Fatal(err)
				}
				ctx, stop := context.WithCancel(context.Background())
				done := make(chan error, 1)
				go func() { done <- c.Run(ctx) }()
				defer func() {
					stop()
					if err := <-done; err != nil {
						b.Error(err)
					}
				}()
			}
			rng := rand.New(rand.NewPCG(1, 2))
			for b.Loop() {
				waits = nil
				before := processorTime(b)
				tick := time.NewTicker(every)
				for n := range events {
					<-tick.C
					e := follow(event.IDOf(1+rng.Int64N(100_000)), event.IDOf(100_001+rng.Int64N(100_000)), 1)
					e.OutboxID = int64(n + 1)
					if _, err := r.js.PublishMsgAsync(&natsgo.Msg{Subject: e.Subject(r.cfg.Prefix, 0), Header: e.Headers(),
						Data: e.Payload}); err != nil {
						b.Fatal(err)
					}
				}
				tick.Stop()
				b.ReportMetric(float64((processorTime(b)-before).Microseconds())/events, "cpu-us/event")
			}
			mu.Lock()
			defer mu.Unlock()
			if slices.Sort(waits); len(waits) > 0 {
				b.ReportMetric(float64(waits[len(waits)/2].Microseconds())/1000, "p50-ms")
				b.ReportMetric(float64(waits[len(waits)*99/100].Microseconds())/1000, "p99-ms")
			}
		})
	}
}

func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
