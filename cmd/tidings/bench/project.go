package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
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
	ids           string
	form          idForm
}

// pick returns the numbers of the pair of the n-th follow event (from 1).
type pick func(r *rand.Rand, n int64) (follower, followee int64)

// projectCases return the pairs, by case.
func projectCases(users int64) map[string]pick {
	return map[string]pick{
		"random": func(r *rand.Rand, _ int64) (int64, int64) {
			return 1 + r.Int64N(users), 1 + users + r.Int64N(users)
		},
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
consumer_cpu_us_per_event is the processor time of the instances, and consumer_postgres_us_per_event
that of their PostgreSQL backends.

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
			var err error
			if o.form, err = formOf(o.ids); err != nil {
				return err
			}
			for _, name := range o.cases {
				for _, n := range o.instances {
					r := result{Case: name, Consumer: o.consumer, Instances: n, Partitions: o.partitions, IDs: o.form}
					if err := onServers(cmd, name, o.sync, func(ctx context.Context, s *servers) error {
						return o.run(ctx, s, cases[name], &r)
					}); err != nil {
						return err
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
	idsFlag(cmd, &o.ids)
	f.StringVar(&o.sync, "broker-sync", syncDefault, syncReading)
	f.DurationVar(&o.within, "within", 10*time.Minute, giveUp)
	return cmd
}

func (o projectOptions) run(ctx context.Context, s *servers, next pick, r *result) error {
	if err := s.declare(ctx, o.partitions); err != nil {
		return err
	}
	s.say("publishing %d events", o.events)
	want, err := o.fill(ctx, s, next)
	if err != nil {
		return err
	}

	s.say("catching up")
	start := time.Now()
	children, err := s.startChildren(slices.Repeat([]string{o.consumer}, r.Instances))
	if err != nil {
		return err
	}
	if err := await(ctx, 10*time.Millisecond, o.within, func() (bool, error) { return o.applied(ctx, s) }); err != nil {
		return fmt.Errorf("catch up: %w", err)
	}
	r.rate(o.events, time.Since(start))
	backends, err := s.backends(ctx)
	if err != nil {
		return err
	}
	var cpu time.Duration
	for _, c := range children {
		cpu += c.used()
	}
	r.ConsumerCPU = perEvent(cpu, o.events)
	if backends != nil {
		r.ConsumerPostgres = perEvent(backends[o.consumer], o.events)
	}
	if _, r.PeakRSS, err = stop(children...); err != nil {
		return err
	}
	wrong, err := o.wrong(ctx, s, want)
	if err != nil {
		return err
	}
	r.Missing = &wrong
	if err := s.print(r); err != nil {
		return err
	}
	if wrong > 0 {
		return fmt.Errorf("%s has wrong rows of %d accounts or pairs", o.consumer, wrong)
	}
	return nil
}

// fill publishes the events with the relay's headers. It returns the counts that they give to each
// account, and the number of distinct pairs.
func (o projectOptions) fill(ctx context.Context, s *servers,
	next pick) (want projected, err error) {
	type pair struct {
		follower, followee event.ID
		number             int64 // of the followee
	}
	var (
		r     = rand.New(rand.NewPCG(1, 2))
		pairs = make([]pair, o.events)
		seen  = make(map[pair]bool, o.events)
	)
	want.counts = make(map[event.ID]followercounts.Counts)
	for i := range pairs {
		p := &pairs[i]
		follower, followee := next(r, int64(i+1))
		p.follower, p.followee, p.number = o.form.of(follower), o.form.of(followee), followee
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
		e, err := followed(p.follower, p.followee, time.Now())
		if err != nil {
			return want, err
		}
		e.ID, e.Version, e.OccurredAt, e.OutboxID = uuid.NewString(), 1, time.Now(), int64(i+1)
		msg := &nats.Msg{Subject: e.Subject(s.broker.Prefix, int(p.number)%o.partitions), Header: e.Headers(), Data: e.Payload}
		if _, err := s.js.PublishMsgAsync(msg, jetstream.WithStallWait(time.Minute)); err != nil {
			return want, err
		}
	}
	select {
	case <-s.js.PublishAsyncComplete():
	case <-ctx.Done():
		return want, ctx.Err()
	}
	stored, err := s.stored(ctx)
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
	counts map[event.ID]followercounts.Counts // by account
	pairs  int                                // each with one version in its history
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
func wrongCounts(ctx context.Context, s *servers, want map[event.ID]followercounts.Counts) (wrong int, err error) {
	rows, _ := s.pool.Query(ctx, `SELECT object_id, incoming, outgoing FROM edge_counts`)
	var user event.ID
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
