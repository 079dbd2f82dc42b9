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
)

// projectOptions are the flags of `tidings bench project`.
type projectOptions struct {
	events, users int
	cases         []string
	sync          string
	within        time.Duration
}

// projectCases are who follows whom, by the number of the event (from 1).
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
		Short: "Let followercounts catch up with a stream of follows, and check every count",
		Long: `Fills a stream with follow events, starts followercounts and times from its start until it has applied the last one. Case random: any of
--users follows any of as many others. Case celebrity: everybody follows one. Case massfollower: one follows everybody. Afterwards
every account's counts are compared with what the events make them: missing says how many are wrong.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cases := projectCases(int64(o.users))
			if o.events < 1 || o.users < 1 || o.sync != syncAlways && o.sync != syncDefault || slices.ContainsFunc(o.cases, func(c string) bool { return cases[c] == nil }) {
				return errors.New("want --events and --users of 1 or more, --broker-sync always or default, --cases of random, celebrity, massfollower")
			}
			for _, name := range o.cases {
				r, err := o.run(cmd.Context(), name, cases[name], progress(cmd))
				if err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				if err := r.write(cmd.OutOrStdout()); err != nil {
					return err
				}
				if *r.Missing > 0 {
					return fmt.Errorf("%s: the counts of %d accounts are wrong", name, *r.Missing)
				}
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.events, "events", 200_000, "events on the stream")
	f.IntVar(&o.users, "users", 100_000, "users on each side of the case random")
	f.StringSliceVar(&o.cases, "cases", []string{"random", "celebrity", "massfollower"}, "which cases")
	f.StringVar(&o.sync, "broker-sync", syncDefault, "the broker syncs to disk: always (before each ack) or default (every two minutes); events are only read")
	f.DurationVar(&o.within, "within", 10*time.Minute, "give up after this long")
	return cmd
}

func (o projectOptions) run(ctx context.Context, name string, pick func(*rand.Rand, int64) (int64, int64), say func(string, ...any)) (_ result, err error) {
	r := result{Case: name}
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
	if _, err := broker.Declare(ctx, js, s.broker, broker.Partition{LastSlot: event.Slots - 1}, slog.Default()); err != nil {
		return r, err
	}
	say("%s: publishing %d events", name, o.events)
	want, err := o.fill(ctx, s, js, pick)
	if err != nil {
		return r, err
	}

	say("%s: catching up", name)
	start := time.Now()
	c, err := startChild(s, partFollowerCounts, leaseTTL, logTo(say))
	if err != nil {
		return r, err
	}
	defer c.kill()
	for {
		c.sample()
		applied, err := o.applied(ctx, s)
		if err != nil {
			return r, err
		}
		if applied {
			break
		}
		if time.Since(start) > o.within {
			return r, fmt.Errorf("not caught up after %s", o.within)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return r, err
		}
	}
	r.rate(o.events, time.Since(start))
	if _, err := c.stop(); err != nil {
		return r, err
	}
	r.PeakRSS = ptr(round(c.peak, 1))
	wrong, err := wrongCounts(ctx, s, want)
	if err != nil {
		return r, err
	}
	r.Missing = &wrong
	r.settings, err = s.settings(ctx)
	return r, err
}

// fill publishes the events as the relay does, one at a time: nobody else publishes, so the sequences are known beforehand. It
// returns what they make of every account.
func (o projectOptions) fill(ctx context.Context, s *servers, js jetstream.JetStream, pick func(*rand.Rand, int64) (int64, int64)) (
	want map[int64]followercounts.Counts, err error) {
	type pair struct{ follower, followee int64 }
	var (
		r     = rand.New(rand.NewPCG(1, 2))
		pairs = make([]pair, o.events)
		seen  = make(map[pair]bool, o.events)
	)
	want = make(map[int64]followercounts.Counts)
	for i := range pairs {
		p := &pairs[i]
		p.follower, p.followee = pick(r, int64(i+1))
		if seen[*p] {
			continue // a repeated event counts nothing
		}
		seen[*p] = true
		a, b := want[p.follower], want[p.followee]
		a.Outgoing++
		b.Incoming++
		want[p.follower], want[p.followee] = a, b
	}
	for i, p := range pairs {
		now := time.Now()
		e := event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: p.followee, Type: event.Created, Version: 1,
			OccurredAt: now, OutboxID: int64(i + 1)}
		t := event.Time{Time: now}
		payload, err := json.Marshal(event.Follow{FollowerID: event.ID(p.follower), FolloweeID: event.ID(p.followee), Status: event.StatusActive, Version: 1,
			CreatedAt: t, PositionedAt: t, UpdatedAt: t, Actor: "bench"})
		if err != nil {
			return nil, err
		}
		msg := &nats.Msg{Subject: e.Subject(s.broker.Prefix, 0), Header: e.Headers(), Data: payload}
		if _, err := js.PublishMsgAsync(msg, jetstream.WithStallWait(time.Minute)); err != nil {
			return nil, err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	stored, err := countStored(ctx, js, s.broker)
	if err == nil && stored != o.events {
		err = fmt.Errorf("the stream holds %d of %d events", stored, o.events)
	}
	return want, err
}

// applied says whether the projection has applied the last event.
func (o projectOptions) applied(ctx context.Context, s *servers) (applied bool, err error) {
	err = s.pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM consumer_offsets WHERE consumer_name = $1 AND last_processed_id >= $2)`,
		followercounts.Name, o.events).Scan(&applied)
	return applied, err
}

// wrongCounts counts the accounts whose counts are not what the events make them.
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
