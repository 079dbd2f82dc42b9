package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

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
			say := progress(cmd)
			for _, c := range cases {
				r, err := o.run(cmd.Context(), c, say)
				if err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
				if err := r.write(cmd.OutOrStdout()); err != nil {
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
// when it arrives, until ctx ends. begun returns the number of writes that have begun, in the order
// of their numbers.
type latencyCase struct {
	name     string
	parts    []string
	arrivals func(ctx context.Context, s *servers, js jetstream.JetStream, begun func() int, seen func(n int)) error
}

func (o latencyOptions) run(ctx context.Context, c latencyCase, say func(string, ...any)) (_ result, err error) {
	r := result{Case: c.name, Relays: 1}
	say("%s: starting servers", c.name)
	s, err := startServers(ctx, o.sync, slog.Default())
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	var children []*child
	defer func() {
		for _, c := range children {
			c.kill()
		}
	}()
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return r, err
	}
	defer closeJS()
	for _, part := range c.parts {
		child, err := startChild(s, part, leaseTTL, logTo(say))
		if err != nil {
			return r, err
		}
		children = append(children, child)
		if err := awaitStream(ctx, s, js); err != nil { // the relay creates it
			return r, err
		}
	}

	total := int(float64(o.rate) * o.duration.Seconds())
	if err := warmUp(ctx, s, total, len(c.parts) > 1); err != nil {
		return r, err
	}
	if o.heldSnapshot {
		r.Case += "-held-snapshot"
		if err := s.holdSnapshot(ctx); err != nil {
			return r, err
		}
	}
	before := make([]time.Duration, len(children))
	for i, c := range children {
		c.sample()
		before[i] = c.cpu
	}
	say("%s: %d writes per second for %s", c.name, o.rate, o.duration)
	if err := o.measure(ctx, c, s, js, &r, total); err != nil {
		return r, err
	}
	running := children
	children = nil
	if err := r.end(running, before, total); err != nil {
		return r, err
	}
	r.settings, err = s.settings(ctx)
	return r, err
}

// measure offers the writes, waits until all have arrived, and sets the times of r.
func (o latencyOptions) measure(ctx context.Context, c latencyCase, s *servers, js jetstream.JetStream, r *result, total int) error {
	ctx, cancel := context.WithTimeout(ctx, o.duration+time.Minute)
	defer cancel()
	nc, err := broker.Connect(s.broker, "bench writers", slog.Default())
	if err != nil {
		return err
	}
	defer nc.Close()
	waker := broker.NewWaker(nc, s.broker)
	go func() { _ = waker.Run(ctx) }() // returns nil when ctx ends
	a := &arrivals{stamps: make([]time.Time, total), took: make([]time.Duration, total), left: total, done: make(chan error, 2)}
	go func() { a.done <- c.arrivals(ctx, s, js, a.begunUpTo, a.seen) }()
	start := time.Now()
	written := make(chan error, 1)
	go func() {
		err := o.offer(ctx, s, waker, a)
		if err != nil {
			cancel()
		}
		written <- err
	}()
	err = <-a.done
	if err == nil {
		r.rate(total, time.Since(start))
		err = <-written
	} else {
		cancel()
		if werr := <-written; werr != nil && !errors.Is(werr, context.Canceled) {
			err = werr
		}
	}
	if err != nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		return fmt.Errorf("%d of %d writes arrived: %w", total-a.left, total, err)
	}
	r.P50, r.P95, r.P99 = quantiles(a.took)
	if o.duration >= 2*time.Minute {
		minute := total * int(time.Minute) / int(o.duration)
		_, _, r.FirstP99 = quantiles(a.took[:minute])
		_, _, r.LastP99 = quantiles(a.took[total-minute:])
	}
	return nil
}

// offer starts every write at its time, whether or not earlier ones are done, as long as a writer
// is free.
func (o latencyOptions) offer(ctx context.Context, s *servers, waker *broker.Waker, a *arrivals) error {
	g, ctx := errgroup.WithContext(ctx)
	work := make(chan int, len(a.stamps))
	for range o.writers {
		g.Go(func() error {
			for n := range work {
				a.begin(n)
				partition, err := write(ctx, s, n)
				if err != nil {
					return err
				}
				if o.wake {
					waker.Wake(partition)
				}
			}
			return nil
		})
	}
	start := time.Now()
	g.Go(func() error {
		defer close(work)
		for n := range a.stamps {
			if err := pause(ctx, time.Until(start.Add(time.Duration(float64(n)/float64(o.rate)*float64(time.Second))))); err != nil {
				return err
			}
			work <- n
		}
		return nil
	})
	return g.Wait()
}

// arrivals records when each write began and how long it took to arrive.
type arrivals struct {
	done chan error // gets nil when all writes have arrived, or the error of a search for them

	mu          sync.Mutex
	stamps      []time.Time
	took        []time.Duration
	left, begun int
}

func (a *arrivals) begin(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stamps[n] = time.Now()
	a.begun = max(a.begun, n+1)
}

func (a *arrivals) begunUpTo() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.begun
}

func (a *arrivals) seen(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n >= len(a.took) || a.took[n] != 0 { // the numbers from len(a.took) on belong to the warm-up
		return
	}
	a.took[n] = time.Since(a.stamps[n])
	if a.left--; a.left == 0 {
		a.done <- nil
	}
}

// end stops the processes and sets the figures of their memory and processor time. before is their
// processor time before the writes.
func (r *result) end(children []*child, before []time.Duration, total int) error {
	var peak float64
	for i, c := range children {
		c.sample()
		cpu := perEvent(c.cpu-before[i], total)
		t, err := c.stop()
		if err != nil {
			for _, c := range children[i:] {
				c.kill()
			}
			return err
		}
		peak = max(peak, c.peak)
		if i == 0 {
			r.CatchUps, r.Conflicts, r.RelayCPU = &t.CatchUps, &t.Conflicts, cpu
		} else {
			r.ConsumerCPU = cpu
		}
	}
	r.PeakRSS = ptr(round(peak, 1))
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
	for {
		var pending, edges int
		if err := s.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL),
			(SELECT count(*) FROM edge_lists)`).Scan(&pending, &edges); err != nil {
			return err
		}
		if pending == 0 && (!projected || edges == writes) {
			return nil
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

func awaitStream(ctx context.Context, s *servers, js jetstream.JetStream) error {
	for {
		_, err := js.Stream(ctx, s.broker.StreamName(0))
		if !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// atSubscriber reports a write when a JetStream consumer has its event.
func atSubscriber(ctx context.Context, s *servers, js jetstream.JetStream, _ func() int, seen func(int)) error {
	consumer, err := js.OrderedConsumer(ctx, s.broker.StreamName(0), jetstream.OrderedConsumerConfig{InactiveThreshold: time.Minute})
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
		seen(int(f.FollowerID) - 1)
	}
}

// visibleSQL reads the followers that have an edge in the projection, from the lowest missing one
// to the highest that has begun.
const visibleSQL = `SELECT from_id FROM edge_lists
 WHERE tenant_id = 1 AND kind = 'follow' AND from_id BETWEEN @lowest::bigint AND @highest::bigint`

// atProjection reports a write when its row can be read from the projection.
func atProjection(ctx context.Context, s *servers, _ jetstream.JetStream, begun func() int, seen func(int)) error {
	conn, err := s.pool.Acquire(ctx) // kept, so that reads do not wait for the writers' connections
	if err != nil {
		return err
	}
	defer conn.Release()
	there := map[int64]bool{}
	for lowest := int64(1); ; {
		if highest := int64(begun()); lowest <= highest {
			rows, _ := conn.Query(ctx, visibleSQL, pgx.StrictNamedArgs{"lowest": lowest, "highest": highest})
			found, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			if err != nil {
				return err
			}
			for _, id := range found {
				if !there[id] {
					there[id] = true
					seen(int(id) - 1)
				}
			}
			for there[lowest] {
				delete(there, lowest)
				lowest++
			}
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// write runs one transaction with a follow and its event: follower n+1, one of 1,000 followees. It
// returns the event's slot.
func write(ctx context.Context, s *servers, n int) (slot int, err error) {
	follower, followee := int64(n+1), int64(n%1000+1_000_000_000)
	now := event.Time{Time: time.Now()}
	payload, err := json.Marshal(event.Follow{FollowerID: event.ID(follower), FolloweeID: event.ID(followee),
		Status: event.StatusActive, Version: 1, CreatedAt: now, PositionedAt: now, UpdatedAt: now, Actor: "bench"})
	if err != nil {
		return 0, err
	}
	events := []event.Event{{TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: followee,
		Type: event.Created, Payload: payload}}
	err = postgres.InTx(ctx, s.pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, $2)`,
			follower, followee); err != nil {
			return err
		}
		return outbox.Append(ctx, tx, events)
	})
	return events[0].Slot, err
}
