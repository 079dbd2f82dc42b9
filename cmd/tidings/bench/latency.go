package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

// latencyOptions are the flags of `tidings bench latency`.
type latencyOptions struct {
	rate, writers int
	duration      time.Duration
	sync          string
	only          string
	wake          bool
	heldSnapshot  bool
}

func latencyCommand() *cobra.Command {
	var o latencyOptions
	cmd := &cobra.Command{
		Use: "latency", Args: cobra.NoArgs,
		Short: "Measure the time from a write to a subscriber and to a projection, at a steady rate",
		Long: `Latency offers transactions of one follow and its event at a fixed rate, whether or not earlier ones
are done (open loop). It measures the time of each write, from before its insert until it arrives.
In the case subscriber it arrives when a JetStream consumer has the event. In the case projection it
arrives when the row of followercounts can be read; the command reads new rows every millisecond.
Like the API, the writers wake the relay after a commit. With --wake=false the relay finds the rows
by polling, like rows that plain SQL inserted.

relay_cpu_us_per_event and consumer_cpu_us_per_event are the processor time of these processes,
without that of PostgreSQL and NATS.

With --held-snapshot a snapshot that is older than the writes stays open during the run, so that
vacuum cannot remove any row. With a --duration of two minutes or more, the first and the last
minute have quantiles of their own.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rate < 1 || o.writers < 1 || o.duration <= 0 || o.sync != syncAlways && o.sync != syncDefault {
				return errors.New("want --rate and --writers of 1 or more, a --duration above 0, and --broker-sync always or default")
			}
			cases := []latencyCase{{"subscriber", []string{partRelay}, atSubscriber},
				{"projection", []string{partRelay, partFollowerCounts}, atProjection}}
			if o.only != "" {
				cases = slices.DeleteFunc(cases, func(c latencyCase) bool { return c.name != o.only })
				if len(cases) == 0 {
					return fmt.Errorf("--case is %q: want subscriber or projection", o.only)
				}
			}
			for _, c := range cases {
				if err := onServers(cmd, c.name, o.sync, func(ctx context.Context, s *servers) error {
					return o.run(ctx, s, c)
				}); err != nil {
					return err
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.rate, "rate", 1000, "writes per second")
	f.IntVar(&o.writers, "writers", 8, "connections that write")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long to write")
	f.StringVar(&o.sync, "broker-sync", syncAlways, syncWriting)
	f.StringVar(&o.only, "case", "", "run only this case: subscriber or projection")
	f.BoolVar(&o.heldSnapshot, "held-snapshot", false, "keep a snapshot from before the writes open")
	f.BoolVar(&o.wake, "wake", true, "wake the relay after each commit, as the API does")
	return cmd
}

// latencyCase is a place at which writes arrive. arrivals calls seen with the number of each write
// when it arrives, until ctx ends. due returns how many writes are due, in the order of their
// numbers.
type latencyCase struct {
	name     string
	parts    []string
	arrivals func(ctx context.Context, s *servers, due func() int, seen func(n int)) error
}

func (o latencyOptions) run(ctx context.Context, s *servers, c latencyCase) error {
	r := result{Case: c.name, Relays: 1}
	if err := s.declare(ctx, 1); err != nil {
		return err
	}
	children, err := s.startChildren(c.parts)
	if err != nil {
		return err
	}
	total := int(float64(o.rate) * o.duration.Seconds())
	if err := warmUp(ctx, s, total, len(c.parts) > 1); err != nil {
		return err
	}
	if o.heldSnapshot {
		r.Case += "-held-snapshot"
		if err := s.holdSnapshot(ctx); err != nil {
			return err
		}
	}
	for _, c := range children {
		c.mark()
	}
	s.say("%d writes per second for %s", o.rate, o.duration)
	if err := o.measure(ctx, s, c, &r, total); err != nil {
		return err
	}
	for i, to := range []**float64{&r.RelayCPU, &r.ConsumerCPU}[:len(children)] {
		*to = perEvent(children[i].used(), total)
	}
	t, peak, err := stop(children...)
	if err != nil {
		return err
	}
	r.CatchUps, r.Conflicts, r.PeakRSS = &t.CatchUps, &t.Conflicts, peak
	return s.print(&r)
}

// measure offers the writes, waits until all have arrived, and sets the times of r. The time of a
// write counts from when it was due.
func (o latencyOptions) measure(ctx context.Context, s *servers, c latencyCase, r *result, total int) error {
	ctx, cancel := context.WithTimeout(ctx, o.duration+time.Minute)
	defer cancel()
	waker := broker.NewWaker(s.js.Conn(), s.broker)
	load := workload{workers: o.writers, rate: float64(o.rate), calls: total, start: time.Now()}
	took, left, arrived := make([]time.Duration, total), total, make(chan struct{})
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return waker.Run(ctx) }) // returns nil when ctx ends
	g.Go(func() error {
		err := c.arrivals(ctx, s, func() int { return min(int(time.Since(load.start).Seconds()*load.rate)+1, total) }, func(n int) {
			if n >= total || took[n] != 0 { // the numbers from total on belong to the warm-up
				return
			}
			took[n] = time.Since(load.due(n))
			if left--; left == 0 {
				r.rate(total, time.Since(load.start))
				close(arrived)
			}
		})
		if left == 0 {
			return nil // the end of ctx ends it
		}
		return fmt.Errorf("%d of %d writes arrived: %w", total-left, total, err)
	})
	g.Go(func() error {
		_, err := load.run(ctx, func(_, n int, _ time.Time) error {
			partition, err := write(ctx, s, n)
			if err == nil && o.wake {
				waker.Wake(partition)
			}
			return err
		})
		if err != nil {
			return err
		}
		select {
		case <-arrived:
		case <-ctx.Done():
		}
		cancel()
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	r.quantiles = quantilesOf(took)
	if o.duration >= 2*time.Minute {
		minute := total * int(time.Minute) / int(o.duration)
		r.FirstP99, r.LastP99 = quantilesOf(took[:minute]).P99, quantilesOf(took[total-minute:]).P99
	}
	return nil
}

// warmUp writes to every partition and waits until these writes have arrived. Then all leases are
// held and statements prepared.
func warmUp(ctx context.Context, s *servers, total int, projected bool) error {
	const writes = 200
	for n := range writes {
		if _, err := write(ctx, s, total+n); err != nil {
			return err
		}
	}
	return await(ctx, 20*time.Millisecond, 0, func() (bool, error) {
		published, err := s.published(ctx)
		if err != nil || !published || !projected {
			return published, err
		}
		var edges int
		err = s.pool.QueryRow(ctx, `SELECT count(*) FROM edge_lists`).Scan(&edges)
		return edges == writes, err
	})
}

// atSubscriber reports a write when a JetStream consumer has its event.
func atSubscriber(ctx context.Context, s *servers, _ func() int, seen func(int)) error {
	consumer, err := s.js.OrderedConsumer(ctx, s.broker.StreamName(0), jetstream.OrderedConsumerConfig{InactiveThreshold: time.Minute})
	if err != nil {
		return err
	}
	it, err := consumer.Messages()
	if err != nil {
		return err
	}
	defer it.Stop()
	for {
		m, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			return err
		}
		var f event.Follow
		if err := json.Unmarshal(m.Data(), &f); err != nil {
			return err
		}
		n, err := strconv.Atoi(string(f.FollowerID))
		if err != nil {
			return err
		}
		seen(n - 1)
	}
}

// visibleSQL reads the followers that have an edge in the projection, from the lowest missing one
// to the highest that is due.
const visibleSQL = `SELECT from_id FROM edge_lists
 WHERE tenant_id = 1 AND kind = 'follow' AND from_id BETWEEN @lowest::text AND @highest::text`

// atProjection reports a write when its row can be read from the projection.
func atProjection(ctx context.Context, s *servers, due func() int, seen func(int)) error {
	conn, err := s.pool.Acquire(ctx) // kept, so that reads do not wait for the writers' connections
	if err != nil {
		return err
	}
	defer conn.Release()
	there := map[int]bool{}
	for lowest := 1; ; {
		if highest := due(); lowest <= highest {
			rows, _ := conn.Query(ctx, visibleSQL, pgx.StrictNamedArgs{"lowest": followerID(lowest), "highest": followerID(highest)})
			found, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			for _, id := range found {
				n, err := strconv.Atoi(id)
				if err != nil {
					return err
				}
				if !there[n] {
					there[n] = true
					seen(n - 1)
				}
			}
			for there[lowest] {
				delete(there, lowest)
				lowest++
			}
		}
		if err := work.Sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// followerID returns the id of the n-th follower. All have the same length, so they are in the
// order of their numbers.
func followerID(n int) event.ID { return event.ID(fmt.Sprintf("%010d", n)) }

// write runs one transaction with a follow and its event: follower n+1, one of 1,000 followees. It
// returns the event's slot.
func write(ctx context.Context, s *servers, n int) (slot int, err error) {
	follower, followee := followerID(n+1), event.IDOf(n%1000+1_000_000_000)
	e, err := followed(follower, followee, time.Now())
	if err != nil {
		return 0, err
	}
	events := []event.Event{e}
	err = postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, $2)`,
			follower, followee); err != nil {
			return err
		}
		return outbox.Append(ctx, tx, events)
	})
	return events[0].Slot, err
}

// followed returns the event of a new follow. The writer of an event without an id chooses one.
func followed(follower, followee event.ID, at time.Time) (event.Event, error) {
	t := event.Time{Time: at}
	payload, err := json.Marshal(event.Follow{FollowerID: follower, FolloweeID: followee,
		Status: event.StatusActive, Version: 1, CreatedAt: t, PositionedAt: t, UpdatedAt: t, Actor: "bench"})
	return event.Event{TenantID: tenant, AggregateType: event.AggregateFollow, AggregateID: followee, Type: event.Created,
		Payload: payload}, err
}
