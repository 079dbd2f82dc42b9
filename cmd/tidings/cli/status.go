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

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// systemState is what `tidings status --json` prints, and what verify waits for.
type systemState struct {
	Outbox     outbox.Stats     `json:"outbox"`
	Partitions []partitionState `json:"partitions"`
	Consumers  []consumerState  `json:"consumers"`
	Leases     []leaseState     `json:"leases"`
}

type consumerState struct {
	consumers.ConsumerLag
	Unknown string            `json:"lag_unknown,omitempty"` // why the lag is not known now; it is shown as 0
	Paused  *consumers.Paused `json:"paused,omitempty"`
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
	kinds              *kinds.Catalog // of the projections; loaded
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
	y.kinds = kinds.NewCatalog(y.projections, kinds.Projections, log)
	if err := y.kinds.Load(ctx); err != nil {
		return nil, err
	}
	if y.nc, err = broker.Connect(s.Broker, name, log, nats.RetryOnFailedConnect(false)); err != nil {
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
	if st.Partitions, err = y.partitions(ctx); err != nil {
		return st, err
	}
	unknown := ""
	lags, err := consumers.Lag(ctx, y.projections, y.js, y.broker, fleet.Names()...)
	if broker.IsTransient(err) {
		unknown, lags = err.Error(), nil
		for _, name := range fleet.Names() {
			lags = append(lags, consumers.ConsumerLag{Consumer: name})
		}
	} else if err != nil {
		return st, err
	}
	pauses, err := consumers.Pauses(ctx, y.projections)
	if err != nil {
		return st, err
	}
	for _, l := range lags {
		c := consumerState{ConsumerLag: l, Unknown: unknown}
		if p, ok := pauses[l.Consumer]; ok {
			c.Paused = &p
		}
		st.Consumers = append(st.Consumers, c)
	}
	if err := y.leases(ctx, &st, y.truth, relay.LeaseKind); err != nil {
		return st, err
	}
	st.name()
	for _, name := range fleet.Names() {
		if err := y.leases(ctx, &st, y.projections, name); err != nil {
			return st, err
		}
	}
	return st, nil
}

const (
	// patience is how long a command that does not wait for anything else waits for a broker that cannot answer now: longer than an
	// election takes.
	patience      = 10 * time.Second
	awaitInterval = 200 * time.Millisecond
)

// await reads the state until it is as wanted, for so long at most, and returns the last one. While the broker cannot answer it asks again,
// as long as it waits, and never for less than patience.
func (y *system) await(ctx context.Context, wait time.Duration, wanted func(systemState) bool) (st systemState, err error) {
	began := time.Now()
	for {
		st, err = y.state(ctx)
		left := wait - time.Since(began)
		if !broker.IsTransient(err) && (err != nil || wanted(st)) || ctx.Err() != nil {
			return st, err
		}
		if err != nil || !st.seen() {
			left = max(wait, patience) - time.Since(began)
		}
		if left <= 0 {
			return st, err
		}
		select {
		case <-ctx.Done():
			return st, context.Cause(ctx)
		case <-time.After(awaitInterval):
		}
	}
}

// seen reports whether the streams and the lags of all consumers are known.
func (st systemState) seen() bool {
	return !slices.ContainsFunc(st.Partitions, func(p partitionState) bool { return p.NoLeader != "" }) &&
		!slices.ContainsFunc(st.Consumers, func(c consumerState) bool { return c.Unknown != "" })
}

// settled reports whether everything has arrived everywhere.
func (st systemState) settled() bool { return len(st.lagging()) == 0 }

// retry runs fn again while the broker cannot answer, for so long at most.
func retry(ctx context.Context, wait time.Duration, fn func() error) error {
	for began := time.Now(); ; {
		err := fn()
		if !broker.IsTransient(err) || time.Since(began) > wait || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(awaitInterval):
		}
	}
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
	for _, p := range st.Partitions {
		if p.Refused+p.NoLeader != "" {
			all = append(all, fmt.Sprintf("partition %d: %s", p.Partition, p.Refused+p.NoLeader))
		}
	}
	for _, c := range st.Consumers {
		if c.Unknown != "" {
			all = append(all, c.Consumer+": "+c.Unknown)
		}
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
		Short: "Show lags, dead letters, the partitions and who holds which leases",
		Long: `Status shows what waits and where. While a stream has no leader it looks again for some seconds, as long as an election takes, and then
shows what it knows.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			y, err := p.system(c.Context(), data, "status")
			if err != nil {
				return err
			}
			defer y.close()
			st, err := y.await(c.Context(), patience, systemState.seen)
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
		paused, behind := "no", count(c.Messages)
		if c.Unknown != "" {
			behind = "unknown"
		}
		if c.Paused != nil {
			paused = fmt.Sprintf("since %s by %s", c.Paused.At.Format(time.RFC3339), cell(c.Paused.Actor))
		}
		consumerRows = append(consumerRows, []string{c.Consumer, behind, seconds(c.Seconds), count(c.DeadLetters), paused})
	}
	leaseRows := [][]string{{"LEASES", "HOLDER", "PARTITIONS"}}
	for _, l := range st.Leases {
		leaseRows = append(leaseRows, []string{l.Kind, l.Owner, fmt.Sprintf("%d: %s", len(l.Partitions), ranges(l.Partitions))})
	}
	notes := strings.Builder{}
	for _, p := range st.Partitions {
		switch {
		case p.Refused != "":
			fmt.Fprintf(&notes, "Nothing is published to partition %d: %s\n", p.Partition, p.Refused)
		case p.NoLeader != "":
			fmt.Fprintf(&notes, "Partition %d waits for a leader of its stream: %s\n", p.Partition, p.NoLeader)
		}
	}
	for _, c := range st.Consumers {
		if c.Unknown != "" {
			fmt.Fprintf(&notes, "The lag of %s is not known: %s\n", c.Consumer, c.Unknown)
		}
		if len(c.Lost) > 0 {
			fmt.Fprintf(&notes, "%s has lost events of %s: run `tidings replay --consumer %s`\n", c.Consumer, strings.Join(c.Lost, ", "), c.Consumer)
		}
	}
	if notes.Len() > 0 {
		notes.WriteByte('\n')
	}
	_, noted := fmt.Fprint(p.Stdout, notes.String())
	blank := func() error { _, err := fmt.Fprintln(p.Stdout); return err }
	return errors.Join(
		noted,
		p.table(
			[]string{"OUTBOX", "PENDING", "PUT OFF", "LAG", "DLQ", "MOST ATTEMPTS"},
			[]string{"", capped(st.Outbox.Pending, st.Outbox.PendingMax), count(int64(st.Outbox.Delayed)), seconds(st.Outbox.LagSeconds),
				count(int64(st.Outbox.DLQDepth)), count(int64(st.Outbox.MaxAttempts))}),
		blank(),
		p.table(partitionRows(st.Partitions, false)...),
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
