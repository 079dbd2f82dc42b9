package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
)

// latencyOptions are the flags of `tidings bench latency`.
type latencyOptions struct {
	rate, writers int
	duration      time.Duration
	sync          string
	wake          bool
}

func latencyCommand() *cobra.Command {
	var o latencyOptions
	cmd := &cobra.Command{
		Use: "latency", Args: cobra.NoArgs,
		Short: "Time from a write to its event at a subscriber, at a steady rate",
		Long: `Offers single-event transactions at a fixed rate, whether or not earlier ones are done (open loop), and times each from before its
insert until a JetStream consumer has its event. As the API does, the writers wake the relay after a commit; --wake=false leaves it
to the relay's polling, as with rows inserted by plain SQL.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rate < 1 || o.writers < 1 || o.duration <= 0 || o.sync != syncAlways && o.sync != syncDefault {
				return errors.New("want --rate and --writers of 1 or more, a --duration, --broker-sync always or default")
			}
			r, err := o.subscriber(cmd.Context(), func(format string, args ...any) { cmd.PrintErrf(format+"\n", args...) })
			if err != nil {
				return err
			}
			return r.write(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.rate, "rate", 1000, "writes per second")
	f.IntVar(&o.writers, "writers", 8, "connections that write")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long to write")
	f.StringVar(&o.sync, "broker-sync", syncAlways, "the broker syncs to disk: always or default")
	f.BoolVar(&o.wake, "wake", true, "wake the relay after each commit, as the API does")
	return cmd
}

// subscriber measures the case of that name.
func (o latencyOptions) subscriber(ctx context.Context, say func(string, ...any)) (_ result, err error) {
	r := result{Case: "subscriber", Relays: 1}
	say("%s: starting servers", r.Case)
	s, err := startServers(ctx, o.sync, slog.Default())
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	c, err := startChild(s, leaseTTL, logTo(say))
	if err != nil {
		return r, err
	}
	defer c.kill()
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return r, err
	}
	defer closeJS()
	for { // until the relay has declared the stream
		if _, err := js.Stream(ctx, s.broker.Stream); err == nil {
			break
		} else if !errors.Is(err, jetstream.ErrStreamNotFound) {
			return r, err
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return r, err
		}
	}
	consumer, err := js.OrderedConsumer(ctx, s.broker.Stream, jetstream.OrderedConsumerConfig{InactiveThreshold: time.Minute})
	if err != nil {
		return r, err
	}
	it, err := consumer.Messages()
	if err != nil {
		return r, err
	}
	defer it.Stop()

	nc, err := broker.Connect(s.broker, "bench writers", slog.Default())
	if err != nil {
		return r, err
	}
	defer nc.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	waker := broker.NewWaker(nc)
	go func() { _ = waker.Run(ctx) }() // returns nil when ctx ends

	say("%s: %d writes per second for %s", r.Case, o.rate, o.duration)
	total := int(float64(o.rate) * o.duration.Seconds())
	work := make(chan int, total)
	failed := make(chan error, o.writers)
	var writers sync.WaitGroup
	for range o.writers {
		writers.Go(func() {
			for n := range work {
				partition, err := write(ctx, s, n)
				if err != nil {
					failed <- err
					return
				}
				if o.wake {
					waker.Wake(partition)
				}
			}
		})
	}
	start := time.Now()
	go func() {
		defer close(work)
		for n := range total {
			if pause(ctx, time.Until(start.Add(time.Duration(float64(n)/float64(o.rate)*float64(time.Second))))) != nil {
				return
			}
			work <- n
		}
	}()
	times := make([]time.Duration, 0, total)
	limit, stop := context.WithTimeout(ctx, o.duration+30*time.Second)
	defer stop()
	for len(times) < total {
		m, err := it.Next(jetstream.NextContext(limit))
		if err != nil {
			select {
			case err = <-failed:
			default:
			}
			return r, fmt.Errorf("%d of %d events arrived: %w", len(times), total, err)
		}
		var p struct {
			At int64 `json:"at,string"`
		}
		if err := json.Unmarshal(m.Data(), &p); err != nil {
			return r, err
		}
		times = append(times, time.Since(time.Unix(0, p.At)))
	}
	r.rate(total, time.Since(start))
	r.percentiles(times)
	writers.Wait()
	t, err := c.stop()
	if err != nil {
		return r, err
	}
	r.CatchUps, r.Conflicts, r.PeakRSS = &t.CatchUps, &t.Conflicts, ptr(round(c.peak, 1))
	r.settings, err = s.settings(ctx)
	return r, err
}

// write is one transaction of a state row and its event, stamped before it begins.
func write(ctx context.Context, s *servers, n int) (partition int, err error) {
	payload, err := json.Marshal(map[string]any{"at": fmt.Sprint(time.Now().UnixNano()), "follower_id": fmt.Sprint(n + 1), "followee_id": fmt.Sprint(n%1000 + 1_000_000_000)})
	if err != nil {
		return 0, err
	}
	events := []event.Event{{TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: int64(n%1000 + 1_000_000_000), Type: event.Created, Payload: payload}}
	err = postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, $2)`, n+1, n%1000+1_000_000_000); err != nil {
			return err
		}
		return outbox.Append(ctx, tx, events)
	})
	return events[0].Partition, err
}
