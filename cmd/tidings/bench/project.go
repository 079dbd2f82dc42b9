package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
)

// projectOptions are the flags of `tidings bench project`.
type projectOptions struct {
	events, users int
	cases         []string
	consumer      string
	partitions    int
	instances     []int
	sync          string
	within        time.Duration
}

// projectCases return the pair of the n-th follow event (from 1), by case.
func projectCases(users int64) map[string]func(r *rand.Rand, n int64) (follower, followee int64) {
	return map[string]func(r *rand.Rand, n int64) (int64, int64){
		"random":       func(r *rand.Rand, _ int64) (int64, int64) { return 1 + r.Int64N(users), 1 + users + r.Int64N(users) },
		"celebrity":    func(_ *rand.Rand, n int64) (int64, int64) { return 1 + n, 1 },
		"massfollower": func(_ *rand.Rand, n int64) (int64, int64) { return 1, 1 + n },
	}
}

func projectCommand() *cobra.Command {
	var o projectOptions
	cmd := &cobra.Command{
		Use: "project", Args: cobra.NoArgs,
		Short: "Measure how fast a consumer catches up, and check the result",
		Long: `Project fills the streams of --partitions with follow events and starts --instances of the consumer.
It measures the time from their start until they have applied the last event. In the case random,
each follow leads from any of --users to any of as many others. In the case celebrity, everyone
follows one user. In the case massfollower, one user follows everyone. Afterwards the command
compares the result with the events: every account's counts, or with --consumer archiver every
pair's history. missing is the number of accounts or pairs with a wrong result.

Several numbers of --instances are measured one after the other, on servers of their own. For
example, --consumer archiver --partitions 2 --instances 1,2 shows the effect of a second archiver.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cases := projectCases(int64(o.users))
			if o.events < 1 || o.users < 1 || o.sync != syncAlways && o.sync != syncDefault ||
				slices.ContainsFunc(o.cases, func(c string) bool { return cases[c] == nil }) {
				return errors.New("want --events and --users of 1 or more, --broker-sync always or default, --cases of random, " +
					"celebrity, massfollower")
			}
			if o.consumer != followercounts.Name && o.consumer != history.Name || o.partitions < 1 || o.partitions > event.Slots ||
				slices.ContainsFunc(o.instances, func(n int) bool { return n < 1 || n > o.partitions }) {
				return errors.New(
					"want --consumer followercounts or archiver, --partitions of 1 to 32, --instances of 1 up to --partitions")
			}
			for _, name := range o.cases {
				for _, n := range o.instances {
					r, err := o.run(cmd.Context(), name, cases[name], n, progress(cmd))
					if err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					if err := r.write(cmd.OutOrStdout()); err != nil {
						return err
					}
					if *r.Missing > 0 {
						return fmt.Errorf("%s: %s has wrong rows of %d accounts or pairs", name, o.consumer, *r.Missing)
					}
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.events, "events", 200_000, "events on the streams")
	f.IntVar(&o.users, "users", 100_000, "users on each side of the case random")
	f.StringSliceVar(&o.cases, "cases", []string{"random", "celebrity", "massfollower"}, "the cases to run")
	f.StringVar(&o.consumer, "consumer", followercounts.Name, "the consumer: followercounts or archiver")
	f.IntVar(&o.partitions, "partitions", 1, "streams of the events, 1 to 32")
	f.IntSliceVar(&o.instances, "instances", []int{1},
		"the number of instances of the consumer, each a process; several numbers are measured one after the other")
	f.StringVar(&o.sync, "broker-sync", syncDefault, syncReading)
	f.DurationVar(&o.within, "within", 10*time.Minute, giveUp)
	return cmd
}

func (o projectOptions) run(ctx context.Context, name string, pick func(*rand.Rand, int64) (int64, int64), instances int,
	say func(string, ...any)) (_ result, err error) {
	r := result{Case: name, Consumer: o.consumer, Instances: instances, Partitions: o.partitions}
	say("%s: starting servers", name)
	s, err := startServers(ctx, o.sync, slog.Default())
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return r, err
	}
	defer closeJS()
	for n := range o.partitions {
		p := broker.Partition{Number: n, FirstSlot: event.Slots * n / o.partitions, LastSlot: event.Slots*(n+1)/o.partitions - 1}
		if _, err := broker.Declare(ctx, js, s.broker, p, slog.Default()); err != nil {
			return r, err
		}
	}
	say("%s: publishing %d events", name, o.events)
	want, err := o.fill(ctx, s, js, pick)
	if err != nil {
		return r, err
	}

	say("%s: catching up", name)
	took, err := o.catchUp(ctx, s, instances, &r, say)
	if err != nil {
		return r, err
	}
	r.rate(o.events, took)
	wrong, err := o.wrong(ctx, s, want)
	if err != nil {
		return r, err
	}
	r.Missing = &wrong
	r.settings, err = s.settings(ctx)
	return r, err
}

// catchUp starts the instances and returns the time until they have applied all events.
func (o projectOptions) catchUp(ctx context.Context, s *servers, instances int, r *result,
	say func(string, ...any)) (time.Duration, error) {
	start := time.Now()
	all := make([]*child, instances)
	for i := range all {
		c, err := startChild(s, o.consumer, leaseTTL, logTo(say))
		if err != nil {
			return 0, err
		}
		defer c.kill()
		all[i] = c
	}
	for {
		for _, c := range all {
			c.sample()
		}
		applied, err := o.applied(ctx, s)
		if err != nil {
			return 0, err
		}
		if applied {
			break
		}
		if time.Since(start) > o.within {
			return 0, fmt.Errorf("not caught up after %s", o.within)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return 0, err
		}
	}
	took, peak := time.Since(start), 0.0
	for _, c := range all {
		if _, err := c.stop(); err != nil {
			return 0, err
		}
		peak = max(peak, c.peak)
	}
	r.PeakRSS = ptr(round(peak, 1))
	return took, nil
}

// fill publishes the events with the relay's headers. It returns the counts that they give to each
// account, and the number of distinct pairs.
func (o projectOptions) fill(ctx context.Context, s *servers, js jetstream.JetStream,
	pick func(*rand.Rand, int64) (int64, int64)) (want projected, err error) {
	type pair struct{ follower, followee int64 }
	var (
		r     = rand.New(rand.NewPCG(1, 2))
		pairs = make([]pair, o.events)
		seen  = make(map[pair]bool, o.events)
	)
	want.counts = make(map[int64]followercounts.Counts)
	for i := range pairs {
		p := &pairs[i]
		p.follower, p.followee = pick(r, int64(i+1))
		if seen[*p] {
			continue // a repeated event changes no count
		}
		seen[*p] = true
		a, b := want.counts[p.follower], want.counts[p.followee]
		a.Outgoing++
		b.Incoming++
		want.counts[p.follower], want.counts[p.followee] = a, b
	}
	want.pairs = len(seen)
	for i, p := range pairs {
		now := time.Now()
		e := event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: p.followee,
			Type: event.Created, Version: 1, OccurredAt: now, OutboxID: int64(i + 1)}
		t := event.Time{Time: now}
		payload, err := json.Marshal(event.Follow{FollowerID: event.ID(p.follower), FolloweeID: event.ID(p.followee),
			Status: event.StatusActive, Version: 1, CreatedAt: t, PositionedAt: t, UpdatedAt: t, Actor: "bench"})
		if err != nil {
			return want, err
		}
		msg := &nats.Msg{Subject: e.Subject(s.broker.Prefix, int(p.followee)%o.partitions), Header: e.Headers(), Data: payload}
		if _, err := js.PublishMsgAsync(msg, jetstream.WithStallWait(time.Minute)); err != nil {
			return want, err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return want, ctx.Err()
	}
	stored, err := countStored(ctx, js, s.broker)
	if err == nil && stored != o.events {
		err = fmt.Errorf("the stream holds %d of %d events", stored, o.events)
	}
	return want, err
}

// applied reports whether the consumer has applied the last event of every stream.
func (o projectOptions) applied(ctx context.Context, s *servers) (applied bool, err error) {
	err = s.pool.QueryRow(ctx, `SELECT coalesce(sum(last_processed_id), 0) >= $2 FROM consumer_offsets WHERE consumer_name = $1`,
		o.consumer, o.events).Scan(&applied)
	return applied, err
}

// projected is the expected content of the read tables.
type projected struct {
	counts map[int64]followercounts.Counts // by account
	pairs  int                             // each with one version in its history
}

// wrong counts the accounts, or with the archiver the pairs, whose read tables differ from want.
func (o projectOptions) wrong(ctx context.Context, s *servers, want projected) (n int, err error) {
	if o.consumer == followercounts.Name {
		return wrongCounts(ctx, s, want.counts)
	}
	err = s.pool.QueryRow(ctx, `SELECT abs($1 - count(*) FILTER (WHERE version = 1 AND version_state = 'LATEST'))
		+ count(*) FILTER (WHERE version <> 1) FROM follow_history`, want.pairs).Scan(&n)
	return n, err
}

// wrongCounts counts the accounts whose counts differ from want.
func wrongCounts(ctx context.Context, s *servers, want map[int64]followercounts.Counts) (wrong int, err error) {
	rows, _ := s.pool.Query(ctx, `SELECT object_id, incoming, outgoing FROM edge_counts`)
	var user int64
	var c followercounts.Counts
	right := 0
	if _, err := pgx.ForEachRow(rows, []any{&user, &c.Incoming, &c.Outgoing}, func() error {
		if want[user] != c {
			wrong++
		} else {
			right++
		}
		return nil
	}); err != nil {
		return 0, err
	}
	return max(wrong, len(want)-right), nil
}
