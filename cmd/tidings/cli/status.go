package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/archive"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/relay"
)

// systemState is what `tidings status --json` prints, and what verify waits for.
type systemState struct {
	Outbox    outbox.Stats    `json:"outbox"`
	Stream    streamState     `json:"stream"`
	Consumers []consumerState `json:"consumers"`
	Leases    []leaseState    `json:"leases"`
}

type consumerState struct {
	consumers.ConsumerLag
	Paused *consumers.Paused `json:"paused,omitempty"`
}

type streamState struct {
	Name     string    `json:"name"`
	Messages uint64    `json:"messages"`
	Bytes    uint64    `json:"bytes"`
	FirstSeq uint64    `json:"first_seq"`
	LastSeq  uint64    `json:"last_seq"`
	LastTime time.Time `json:"last_time"`
	Refused  string    `json:"refused,omitempty"` // why no relay publishes to it, and what to run
}

// leaseState is what one instance of a kind holds.
type leaseState struct {
	Kind       string `json:"kind"`
	Owner      string `json:"owner"`
	Partitions []int  `json:"partitions"`
}

// system is a connection to everything that holds state.
type system struct {
	truth, projections *pgxpool.Pool
	nc                 *nats.Conn
	js                 jetstream.JetStream
	broker             broker.Config
}

// system connects to the servers, which must have this program's schemas.
func (p Process) system(ctx context.Context, data, name string) (_ *system, err error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, err
	}
	y := &system{broker: s.Broker}
	defer func() {
		if err != nil {
			y.close()
		}
	}()
	if y.truth, err = postgres.Open(ctx, s.DatabaseURL, s.Postgres, postgres.RoleSystem, name); err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, y.truth, migrations.Truth); err != nil {
		return nil, err
	}
	if y.projections, err = postgres.Open(ctx, s.ProjectionsDatabaseURL, s.Postgres, postgres.RoleSystem, name); err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, y.projections, migrations.Projections); err != nil {
		return nil, err
	}
	log, err := daemon.NewLogger(p.Stderr, "error")
	if err != nil {
		return nil, err
	}
	if y.nc, err = broker.Connect(s.Broker, name, log, nats.RetryOnFailedConnect(false), nats.MaxReconnects(0)); err != nil {
		return nil, err
	}
	if y.js, err = jetstream.New(y.nc); err != nil {
		return nil, fmt.Errorf("use JetStream: %w", err)
	}
	return y, nil
}

func (y *system) close() {
	if y.nc != nil {
		y.nc.Close()
	}
	if y.projections != nil {
		y.projections.Close()
	}
	if y.truth != nil {
		y.truth.Close()
	}
}

// state reads how everything stands, at a cost that does not grow with it.
func (y *system) state(ctx context.Context) (st systemState, err error) {
	if st.Outbox, err = outbox.ReadStats(ctx, y.truth); err != nil {
		return st, err
	}
	var found bool
	if st.Stream, found, err = y.stream(ctx); err != nil {
		return st, err
	}
	if err := relay.Check(ctx, y.truth, y.js, y.broker); errors.Is(err, relay.ErrStreamRefused) {
		st.Stream.Refused = err.Error()
	} else if err != nil {
		return st, err
	}
	lags := make([]consumers.ConsumerLag, len(consumerNames()))
	for i, name := range consumerNames() {
		lags[i].Consumer = name
	}
	if found {
		if lags, err = consumers.Lag(ctx, y.projections, y.js, y.broker, consumerNames()...); err != nil {
			return st, err
		}
	}
	pauses, err := consumers.Pauses(ctx, y.projections)
	if err != nil {
		return st, err
	}
	for _, l := range lags {
		c := consumerState{ConsumerLag: l}
		if p, ok := pauses[l.Consumer]; ok {
			c.Paused = &p
		}
		st.Consumers = append(st.Consumers, c)
	}
	if err := y.leases(ctx, &st, y.truth, relay.LeaseKind); err != nil {
		return st, err
	}
	for _, name := range consumerNames() {
		if err := y.leases(ctx, &st, y.projections, name); err != nil {
			return st, err
		}
	}
	return st, nil
}

// consumerProjections are what the consumers apply events to.
func consumerProjections() []consumers.Projection {
	return []consumers.Projection{followercounts.New(), threadcache.New(), archive.New()}
}

func consumerNames() (names []string) {
	for _, p := range consumerProjections() {
		names = append(names, p.Name())
	}
	return names
}

// stream reads the stream's state. There is none before the relay has met the broker for the first time.
func (y *system) stream(ctx context.Context) (st streamState, found bool, err error) {
	st.Name = y.broker.Stream
	ctx, cancel := context.WithTimeout(ctx, y.broker.Timeout)
	defer cancel()
	stream, err := y.js.Stream(ctx, y.broker.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return st, false, nil
	}
	if err != nil {
		return st, false, fmt.Errorf("look up stream %s: %w", y.broker.Stream, err)
	}
	i := stream.CachedInfo().State
	st.Messages, st.Bytes, st.FirstSeq, st.LastSeq, st.LastTime = i.Msgs, i.Bytes, i.FirstSeq, i.LastSeq, i.LastTime
	return st, true, nil
}

func (y *system) leases(ctx context.Context, st *systemState, pool *pgxpool.Pool, kind string) error {
	holders, err := lease.Holders(ctx, pool, kind)
	if err != nil {
		return err
	}
	for _, h := range holders {
		i := slices.IndexFunc(st.Leases, func(l leaseState) bool { return l.Kind == kind && l.Owner == h.Owner })
		if i < 0 {
			i = len(st.Leases)
			st.Leases = append(st.Leases, leaseState{Kind: kind, Owner: h.Owner})
		}
		st.Leases[i].Partitions = append(st.Leases[i].Partitions, h.Partition)
	}
	return nil
}

// lagging says what has not arrived everywhere yet; empty when everything has.
func (st systemState) lagging() []string {
	var all []string
	if st.Outbox.Pending > 0 {
		all = append(all, fmt.Sprintf("outbox: %s messages are not published", capped(st.Outbox.Pending, st.Outbox.PendingMax)))
	}
	for _, c := range st.Consumers {
		if c.Messages > 0 {
			line := fmt.Sprintf("%s: %s messages behind", c.Consumer, count(c.Messages))
			if c.Paused != nil {
				line += ", and paused"
			}
			all = append(all, line)
		}
	}
	return all
}

// deadLetters lists what waits for a person, apart from everything else.
func (st systemState) deadLetters() []string {
	var all []string
	if st.Outbox.DLQDepth > 0 {
		all = append(all, fmt.Sprintf("outbox: %s messages in the DLQ", count(int64(st.Outbox.DLQDepth))))
	}
	for _, c := range st.Consumers {
		if c.DeadLetters > 0 {
			all = append(all, fmt.Sprintf("%s: %s dead letters", c.Consumer, count(c.DeadLetters)))
		}
	}
	return all
}

func capped(n int, more bool) string {
	if more {
		return "more than " + count(int64(n))
	}
	return count(int64(n))
}

func (p Process) statusCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "status",
		Short: "Show lags, dead letters, the stream and who holds which leases",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			y, err := p.system(c.Context(), data, "status")
			if err != nil {
				return err
			}
			defer y.close()
			st, err := y.state(c.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return p.writeJSON(st)
			}
			return p.printState(st)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

func (p Process) printState(st systemState) error {
	consumerRows := [][]string{{"CONSUMER", "BEHIND", "LAG", "DEAD LETTERS", "PAUSED"}}
	for _, c := range st.Consumers {
		paused := "no"
		if c.Paused != nil {
			paused = fmt.Sprintf("since %s by %s", c.Paused.At.Format(time.RFC3339), cell(c.Paused.Actor))
		}
		consumerRows = append(consumerRows, []string{c.Consumer, count(c.Messages), seconds(c.Seconds), count(c.DeadLetters), paused})
	}
	leaseRows := [][]string{{"LEASES", "HOLDER", "PARTITIONS"}}
	for _, l := range st.Leases {
		leaseRows = append(leaseRows, []string{l.Kind, l.Owner, fmt.Sprintf("%d: %s", len(l.Partitions), ranges(l.Partitions))})
	}
	var refused error
	if st.Stream.Refused != "" {
		_, refused = fmt.Fprintf(p.Stdout, "Nothing is published: %s\n\n", st.Stream.Refused)
	}
	blank := func() error { _, err := fmt.Fprintln(p.Stdout); return err }
	return errors.Join(
		refused,
		p.table(
			[]string{"OUTBOX", "PENDING", "PUT OFF", "LAG", "DLQ", "MOST ATTEMPTS"},
			[]string{"", capped(st.Outbox.Pending, st.Outbox.PendingMax), count(int64(st.Outbox.Delayed)), seconds(st.Outbox.LagSeconds),
				count(int64(st.Outbox.DLQDepth)), count(int64(st.Outbox.MaxAttempts))}),
		blank(),
		p.table(
			[]string{"STREAM", "MESSAGES", "FIRST", "LAST", "MIB"},
			[]string{st.Stream.Name, count(int64(st.Stream.Messages)), count(int64(st.Stream.FirstSeq)), count(int64(st.Stream.LastSeq)),
				fmt.Sprintf("%.1f", float64(st.Stream.Bytes)/(1<<20))}),
		blank(),
		p.table(consumerRows...),
		blank(),
		p.table(leaseRows...),
	)
}

func seconds(s float64) string { return fmt.Sprintf("%.1f s", s) }

// ranges writes sorted numbers with runs drawn together: 0-3 7 9-31.
func ranges(numbers []int) string {
	var all []string
	for i := 0; i < len(numbers); {
		j := i
		for j+1 < len(numbers) && numbers[j+1] == numbers[j]+1 {
			j++
		}
		if i == j {
			all = append(all, fmt.Sprint(numbers[i]))
		} else {
			all = append(all, fmt.Sprintf("%d-%d", numbers[i], numbers[j]))
		}
		i = j + 1
	}
	return strings.Join(all, " ")
}
