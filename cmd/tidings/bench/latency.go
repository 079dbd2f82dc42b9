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
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// latencyOptions are the flags of `tidings bench latency`.
type latencyOptions struct {
	rate, writers int
	duration, rtt time.Duration
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
		Long: `Latency offers follows at a fixed rate, whether or not earlier ones are done (open loop). The store
writes them in groups, as the API does. It measures the time of each write, from before its insert
until it arrives.
In the case subscriber it arrives when a JetStream consumer has the event. In the case projection it
arrives when the row of followercounts can be read; the command reads new rows every millisecond.
Like the API, the writers wake the relay after a commit. With --wake=false the relay finds the rows
by polling, like rows that plain SQL inserted.

relay_cpu_us_per_event and consumer_cpu_us_per_event are the processor time of these processes, and
relay_postgres_us_per_event and consumer_postgres_us_per_event that of their connections' backends.
delivery_us_per_event is the sum of the four. writers_postgres_us_per_event are the writers'
backends. Without a PostgreSQL on this machine, the backends are missing.

With --rtt there is a network between the servers and the processes under test. The writers and the
subscriber are next to the servers.

With --held-snapshot a snapshot that is older than the writes stays open during the run, so that
vacuum cannot remove any row. With a --duration of two minutes or more, the first and the last
minute have quantiles of their own.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.rate < 1 || o.writers < 1 || o.duration <= 0 || o.sync != syncAlways && o.sync != syncDefault {
				return errors.New("want --rate and --writers of 1 or more, a --duration above 0, and --broker-sync always or default")
			}
			if err := checkRTT(o.rtt); err != nil {
				return err
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
	f.IntVar(&o.writers, "writers", 8, "writers at once")
	f.DurationVar(&o.duration, "duration", 10*time.Second, "how long to write")
	f.StringVar(&o.sync, "broker-sync", syncAlways, syncWriting)
	f.StringVar(&o.only, "case", "", "run only this case: subscriber or projection")
	f.BoolVar(&o.heldSnapshot, "held-snapshot", false, "keep a snapshot from before the writes open")
	f.DurationVar(&o.rtt, "rtt", 0, "the round trip between the processes under test and the servers; 0 for no network")
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
	var env []string
	var err error
	if env, r.RTT, err = s.far(ctx, o.rtt); err != nil {
		return err
	}
	children, err := s.startChildren(c.parts, env...)
	if err != nil {
		return err
	}
	pool, err := postgres.Open(ctx, s.url, postgres.Config{MaxConns: o.writers + 1, ConnectTimeout: 5 * time.Second}, postgres.RoleAPI,
		partWriters)
	if err != nil {
		return err
	}
	defer pool.Close()
	waker, wake := broker.NewWaker(s.js.Conn(), s.broker), func(int) {}
	if o.wake {
		wake = waker.Wake
	}
	writes := follows{store.New(pool, wake)}
	total := int(float64(o.rate) * o.duration.Seconds())
	if err := warmUp(ctx, s, writes, total, len(c.parts) > 1); err != nil {
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
	before, err := s.backends(ctx)
	if err != nil {
		return err
	}
	s.say("%d writes per second for %s", o.rate, o.duration)
	if err := o.measure(ctx, s, c, &r, total, waker, writes); err != nil {
		return err
	}
	after, err := s.backends(ctx)
	if err != nil {
		return err
	}
	r.share(children, before, after, total)
	t, peak, err := stop(children...)
	if err != nil {
		return err
	}
	r.CatchUps, r.Conflicts, r.PeakRSS = &t.CatchUps, &t.Conflicts, peak
	return s.print(&r)
}

// share sets the processor times of r: of the processes under test since mark, and of the backends
// between two calls of backends.
func (r *result) share(children []*child, before, after map[string]time.Duration, events int) {
	own, backend := []**float64{&r.RelayCPU, &r.ConsumerCPU}, []**float64{&r.RelayPostgres, &r.ConsumerPostgres}
	all := time.Duration(0)
	for i, c := range children {
		*own[i] = perEvent(c.used(), events)
		all += c.used()
		if len(after) > 0 {
			took := after[c.part] - before[c.part]
			*backend[i] = perEvent(took, events)
			all += took
		}
	}
	if len(after) > 0 {
		r.Delivery, r.WritersPostgres = perEvent(all, events), perEvent(after[partWriters]-before[partWriters], events)
	}
}

// measure offers the writes, waits until all have arrived, and sets the times of r. The time of a
// write counts from when it was due.
func (o latencyOptions) measure(ctx context.Context, s *servers, c latencyCase, r *result, total int, waker *broker.Waker,
	writes follows) error {
	ctx, cancel := context.WithTimeout(ctx, o.duration+time.Minute)
	defer cancel()
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
		_, err := load.run(ctx, func(_, n int, _ time.Time) error { return writes.write(ctx, n) })
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
func warmUp(ctx context.Context, s *servers, f follows, total int, projected bool) error {
	const writes = 200
	for n := range writes {
		if err := f.write(ctx, total+n); err != nil {
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

// follows writes as the API does: the store commits the writes that wait together.
type follows struct{ *store.Store }

// partWriters is the name of the writers' connections.
const partWriters = "writers"

// write writes a follow and its event: follower n+1, one of 1,000 followees.
func (f follows) write(ctx context.Context, n int) error {
	kind, _ := kinds.Builtin().Edge(event.AggregateFollow)
	out, err := f.PutEdges(ctx, tenant, kind, []store.EdgeWrite{{Meta: store.Meta{Actor: "bench"}, From: followerID(n + 1),
		To: event.IDOf(n%1000 + 1_000_000_000)}})
	if err != nil {
		return err
	}
	return out[0].Err
}

// followed returns the event of a new follow. The writer of an event without an id chooses one.
func followed(follower, followee event.ID, at time.Time) (event.Event, error) {
	t := event.Time{Time: at}
	payload, err := json.Marshal(event.Follow{FollowerID: follower, FolloweeID: followee,
		Status: event.StatusActive, Version: 1, CreatedAt: t, PositionedAt: t, UpdatedAt: t, Actor: "bench"})
	return event.Event{TenantID: tenant, AggregateType: event.AggregateFollow, AggregateID: followee, Type: event.Created,
		Payload: payload}, err
}
