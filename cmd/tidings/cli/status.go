package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
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
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// systemState is what `tidings status --json` prints, and what verify waits for.
type systemState struct {
	Away       []awayServer       `json:"unavailable,omitempty"`
	Blocked    []postgres.Blocked `json:"blocked,omitempty"` // sessions that wait for a lock, of both databases
	Outbox     *outbox.Stats      `json:"outbox,omitempty"`  // nil: its database is away
	Partitions []partitionState   `json:"partitions"`
	Consumers  []consumerState    `json:"consumers"`
	Leases     []leaseState       `json:"leases"`
	Unheld     []unheldState      `json:"unheld,omitempty"`
	Refusals   []refusalState     `json:"refusals,omitempty"`
	External   []broker.Durable   `json:"external_consumers,omitempty"` // subscribers' durable consumers; status alone lists them
	MoreOf     []string           `json:"more_external,omitempty"`      // streams that have more of them than are listed
	NotListed  string             `json:"external_unknown,omitempty"`   // why they are not known
	Jobs       []jobs.Lease       `json:"jobs,omitempty"`               // of the archiver that run, and who waits for whom
	PerSecond  *perSecond         `json:"per_second,omitempty"`         // since the look before; only while watching
}

// unheldState is which open partitions no instance of a kind holds.
type unheldState struct {
	Kind       string `json:"kind"`
	Partitions []int  `json:"partitions"`
}

// refusalState is an instance that could not serve a partition.
type refusalState struct {
	Kind      string    `json:"kind"`
	Partition int       `json:"partition"`
	By        string    `json:"by"`
	Until     time.Time `json:"until"` // it does not take the partition back before
}

// awayServer is a server that does not answer.
type awayServer struct {
	Server string `json:"server"`
	URL    string `json:"url"` // without its password
	Error  string `json:"error"`
}

type consumerState struct {
	consumers.ConsumerLag
	AsOf    *time.Time        `json:"as_of,omitempty"`       // every write that had committed by then is in; nil while the consumer is behind the streams
	Unknown string            `json:"lag_unknown,omitempty"` // why the lag is not known now; it is shown as 0
	Paused  *consumers.Paused `json:"paused,omitempty"`
}

// leaseState is what one instance of a kind holds.
type leaseState struct {
	Kind       string `json:"kind"`
	Owner      string `json:"owner"`
	Partitions []int  `json:"partitions"`
}

// system is a connection to everything that holds state. What is away is nil.
type system struct {
	truth, projections *pgxpool.Pool
	kinds              *kinds.Catalog // of the projections; loaded
	nc                 *nats.Conn
	js                 jetstream.JetStream
	broker             broker.Config
	away               []awayServer
}

// Names of the servers, as status prints them.
const (
	serverTruth       = "PostgreSQL"
	serverProjections = "PostgreSQL of the projections"
	serverNATS        = "NATS"
)

// system connects to the servers, which must have this program's schemas.
func (p Process) system(ctx context.Context, data, name string) (*system, error) {
	y, err := p.someSystem(ctx, data, name)
	if err != nil {
		return nil, err
	}
	if len(y.away) > 0 {
		y.close()
		return nil, errors.New(y.away[0].String())
	}
	return y, nil
}

// someSystem connects to those of the servers that answer. They must have this program's schemas.
func (p Process) someSystem(ctx context.Context, data, name string) (_ *system, err error) {
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
	if y.truth, err = y.database(ctx, serverTruth, s.DatabaseURL, s.Postgres, name, migrations.Truth); err != nil {
		return nil, err
	}
	if s.ProjectionsDatabaseURL != s.DatabaseURL || y.truth != nil {
		if y.projections, err = y.database(ctx, serverProjections, s.ProjectionsDatabaseURL, s.Postgres, name, migrations.Projections); err != nil {
			return nil, err
		}
	}
	log := daemon.CommandLogger(p.Stderr, slog.LevelError)
	if y.projections != nil {
		y.kinds = kinds.NewCatalog(y.projections, kinds.Projections, log)
		if err := y.kinds.Load(ctx); err != nil {
			return nil, err
		}
	}
	if err := s.Broker.Validate(); err != nil {
		return nil, err
	}
	if y.nc, err = broker.Connect(s.Broker, name, log, nats.RetryOnFailedConnect(false)); err != nil {
		y.away = append(y.away, awayServer{serverNATS, withoutPassword(s.Broker.URL), err.Error()})
		return y, nil
	}
	if y.js, err = jetstream.New(y.nc); err != nil {
		return nil, fmt.Errorf("use JetStream: %w", err)
	}
	return y, nil
}

// database connects to a database, which must have this program's schema. It returns nil when the server is away.
func (y *system) database(ctx context.Context, server, url string, cfg postgres.Config, name string, schema migrations.Set) (*pgxpool.Pool, error) {
	pool, err := postgres.Open(ctx, url, cfg, postgres.RoleSystem, name)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); postgres.IsTransient(err) {
		pool.Close()
		y.away = append(y.away, awayServer{server, withoutPassword(url), err.Error()})
		return nil, nil
	}
	if err := migrations.Check(ctx, pool, schema); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func (a awayServer) String() string {
	return fmt.Sprintf("%s is unavailable (%s): %s", a.Server, a.URL, strings.Join(strings.Fields(a.Error), " ")) // on one line
}

// withoutPassword writes where servers are, without how to log in.
func withoutPassword(urls string) string {
	var all []string
	for one := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" {
			return "its address is not a URL, and may have a password"
		}
		u.User, u.RawQuery = nil, ""
		all = append(all, u.String())
	}
	return strings.Join(all, ",")
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

// state reads how everything is, as far as the servers are there, at a cost that does not grow with it.
func (y *system) state(ctx context.Context) (st systemState, err error) {
	st.Away = y.away
	var delivered *time.Time // before the consumers are asked
	if y.truth != nil {
		stats, err := outbox.ReadStats(ctx, y.truth)
		if err != nil {
			return st, err
		}
		st.Outbox = &stats
		d, err := outbox.ReadDelivered(ctx, y.truth)
		if err != nil {
			return st, err
		}
		at := d.Whole().UTC()
		delivered = &at
	}
	if st.Blocked, err = y.blocked(ctx); err != nil {
		return st, err
	}
	if st.Partitions, err = y.partitions(ctx); err != nil {
		return st, err
	}
	if y.projections != nil {
		if st.Consumers, err = y.consumers(ctx, delivered); err != nil {
			return st, err
		}
	}
	if y.truth != nil {
		if err := y.leases(ctx, &st, y.truth, relay.LeaseKind); err != nil {
			return st, err
		}
		st.name()
		if st.Jobs, err = jobs.Leases(ctx, y.truth); err != nil {
			return st, err
		}
	}
	if y.projections != nil {
		for _, name := range fleet.Names() {
			if err := y.leases(ctx, &st, y.projections, name); err != nil {
				return st, err
			}
		}
	}
	st.unheld(y)
	return st, nil
}

// blocked returns which sessions wait for a lock.
func (y *system) blocked(ctx context.Context) (all []postgres.Blocked, err error) {
	pools := []*pgxpool.Pool{y.truth, y.projections}
	if y.truth != nil && y.projections != nil && sameDatabase(y.truth, y.projections) {
		pools = pools[:1]
	}
	for _, pool := range pools {
		if pool == nil {
			continue
		}
		some, err := postgres.ReadBlocked(ctx, pool)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func sameDatabase(a, b *pgxpool.Pool) bool {
	x, y := a.Config().ConnConfig, b.Config().ConnConfig
	return x.Host == y.Host && x.Port == y.Port && x.Database == y.Database
}

// consumers reads the lags and the pauses. All that had been committed at delivered was on the streams before.
func (y *system) consumers(ctx context.Context, delivered *time.Time) (all []consumerState, err error) {
	unknown, lags := "NATS is unavailable", []consumers.ConsumerLag(nil)
	if y.js != nil {
		unknown = ""
		lags, err = consumers.Lag(ctx, y.projections, y.js, y.broker, fleet.Names()...)
		if broker.IsTransient(err) {
			unknown, lags = daemon.Plain(err), nil
		} else if err != nil {
			return nil, err
		}
	}
	if unknown != "" {
		for _, name := range fleet.Names() {
			lags = append(lags, consumers.ConsumerLag{Consumer: name})
		}
	}
	pauses, err := consumers.Pauses(ctx, y.projections)
	if err != nil {
		return nil, err
	}
	for _, l := range lags {
		c := consumerState{ConsumerLag: l, Unknown: unknown}
		if p, ok := pauses[l.Consumer]; ok {
			c.Paused = &p
		}
		if unknown == "" && l.Messages == 0 {
			c.AsOf = delivered
		}
		all = append(all, c)
	}
	return all, nil
}

// unheld notes of which open partitions nobody holds the lease, by kind.
func (st *systemState) unheld(y *system) {
	kinds := []string{}
	if y.truth != nil {
		kinds = append(kinds, relay.LeaseKind)
	}
	if y.projections != nil {
		kinds = append(kinds, fleet.Names()...)
	}
	for _, kind := range kinds {
		var none []int
		for _, p := range st.Partitions {
			held := slices.ContainsFunc(st.Leases, func(l leaseState) bool { return l.Kind == kind && slices.Contains(l.Partitions, p.Partition) })
			if p.State == stateOpen && !held {
				none = append(none, p.Partition)
			}
		}
		if len(none) > 0 {
			st.Unheld = append(st.Unheld, unheldState{kind, none})
		}
	}
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

// seen reports whether the streams and the lags of all consumers are known, or as much as can be known while a server is away.
func (st systemState) seen() bool {
	if len(st.Away) > 0 {
		return true
	}
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
	refusals, err := lease.Refusals(ctx, pool, kind)
	if err != nil {
		return err
	}
	for _, r := range refusals {
		st.Refusals = append(st.Refusals, refusalState{kind, r.Partition, r.By, r.Until.UTC()})
	}
	return nil
}

// subscribers lists the durable consumers of the streams, as far as the servers say.
func (y *system) subscribers(ctx context.Context, st *systemState) error {
	for _, p := range st.Partitions {
		if y.js == nil || p.Replicas == 0 {
			continue
		}
		all, more, err := broker.Durables(ctx, y.js, p.Stream)
		switch {
		case broker.IsTransient(err):
			st.NotListed = daemon.Plain(err)
			return nil
		case err != nil && !errors.Is(err, jetstream.ErrStreamNotFound):
			return err
		}
		if st.External = append(st.External, all...); more {
			st.MoreOf = append(st.MoreOf, p.Stream)
		}
	}
	return nil
}

// lagging says what has not arrived everywhere yet; empty when everything has.
func (st systemState) lagging() []string {
	var all []string
	if st.Outbox != nil && st.Outbox.Pending > 0 {
		all = append(all, pending(*st.Outbox))
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
			line := fmt.Sprintf("%s: %s behind", c.Consumer, messages(c.Messages))
			if c.Paused != nil {
				line += ", and paused"
			}
			all = append(all, line)
		}
	}
	return all
}

// pending says what is not published, and what it waits for.
func pending(o outbox.Stats) string {
	noun := "messages are"
	if o.Pending == 1 {
		noun = "message is"
	}
	line := fmt.Sprintf("outbox: %s %s not published", capped(o.Pending, o.PendingMax), noun)
	var waits []string
	if o.Retrying > 0 {
		waits = append(waits, count(int64(o.Retrying))+" of them after a failure, until the next attempt")
	}
	if n := o.Delayed - o.Retrying; n > 0 {
		waits = append(waits, count(int64(n))+" of them for a time that its writer asked for, or behind another one")
	}
	if len(waits) > 0 {
		line += "; " + strings.Join(waits, " and ") + ": `tidings outbox list` shows them"
	}
	return line
}

// deadLetters lists what waits for a person, apart from everything else.
func (st systemState) deadLetters() []string {
	var all []string
	if st.Outbox != nil && st.Outbox.DLQDepth > 0 {
		all = append(all, fmt.Sprintf("outbox: %s in the DLQ", messages(int64(st.Outbox.DLQDepth))))
	}
	for _, c := range st.Consumers {
		if c.DeadLetters > 0 {
			noun := "dead letters"
			if c.DeadLetters == 1 {
				noun = "dead letter"
			}
			all = append(all, fmt.Sprintf("%s: %s %s", c.Consumer, count(c.DeadLetters), noun))
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
		data          string
		asJSON, watch bool
	)
	c := &cobra.Command{
		Use:   "status",
		Short: "Show lags, dead letters, the partitions, who holds which leases and who blocks whom",
		Long: `Status shows what waits and where. While a stream has no leader it looks again for some seconds, as long as an election takes, and then
shows what it knows. When PostgreSQL or NATS is unavailable, it names the server, shows what the other one says, and ends with exit code 3.
With --watch it shows everything anew each second, with how many events were published and applied, until it is stopped.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			show := p.printState
			if asJSON {
				show = func(st systemState) error { return p.writeJSON(st) }
			}
			if watch {
				return p.watch(c.Context(), data, show)
			}
			st, err := p.look(c.Context(), data)
			if err != nil {
				return err
			}
			if err := show(st); err != nil {
				return err
			}
			if len(st.Away) > 0 {
				return errAway
			}
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, with --watch one per second")
	c.Flags().BoolVar(&watch, "watch", false, "show it anew each second")
	dataFlag(c, &data)
	return c
}

func (p Process) printState(st systemState) error {
	consumerRows := [][]string{{"CONSUMER", "BEHIND", "LAG", "DEAD LETTERS", "PAUSED"}}
	if st.PerSecond != nil {
		consumerRows[0] = append(consumerRows[0], "APPLIED/S")
	}
	for _, c := range st.Consumers {
		paused, behind, lag, dead := "no", count(c.Messages), seconds(c.Seconds), count(c.DeadLetters)
		if c.Unknown != "" {
			behind, lag, dead = "unknown", "unknown", "unknown"
		}
		if c.Paused != nil {
			paused = fmt.Sprintf("since %s by %s", c.Paused.At.Format(time.RFC3339), cell(c.Paused.Actor))
		}
		row := []string{c.Consumer, behind, lag, dead, paused}
		if st.PerSecond != nil {
			row = append(row, count(int64(st.PerSecond.Applied[c.Consumer])))
		}
		consumerRows = append(consumerRows, row)
	}
	leaseRows := [][]string{{"LEASES", "HOLDER", "PARTITIONS"}}
	for _, l := range st.Leases {
		leaseRows = append(leaseRows, []string{l.Kind, l.Owner, fmt.Sprintf("%d: %s", len(l.Partitions), ranges(l.Partitions))})
	}
	outboxRows := [][]string{{"OUTBOX", "PENDING", "WAITING", "FOR RETRY", "LAG", "DLQ", "MOST ATTEMPTS"}}
	if o := st.Outbox; o != nil {
		outboxRows = append(outboxRows, []string{"", capped(o.Pending, o.PendingMax), count(int64(o.Delayed)), count(int64(o.Retrying)), seconds(o.LagSeconds),
			count(int64(o.DLQDepth)), count(int64(o.MaxAttempts))})
	} else {
		outboxRows = append(outboxRows, []string{"", "unknown", "unknown", "unknown", "unknown", "unknown", "unknown"})
	}
	if st.PerSecond != nil {
		outboxRows[0], outboxRows[1] = append(outboxRows[0], "PUBLISHED/S"), append(outboxRows[1], count(int64(st.PerSecond.Published)))
	}
	externalRows := [][]string{{"EXTERNAL CONSUMER", "STREAM", "BEHIND", "UNACKNOWLEDGED"}}
	for _, e := range st.External {
		externalRows = append(externalRows, []string{e.Name, e.Stream, count(int64(e.Behind)), count(int64(e.Unacked))})
	}
	notes := strings.Join(st.notes(), "\n")
	if notes != "" {
		notes += "\n\n"
	}
	_, noted := fmt.Fprint(p.Stdout, notes)
	blank := func() error { _, err := fmt.Fprintln(p.Stdout); return err }
	tables := [][][]string{outboxRows, partitionRows(st.Partitions, false), consumerRows, leaseRows}
	if len(st.Jobs) > 0 {
		tables = append(tables, jobLeaseRows(st.Jobs))
	}
	if len(externalRows) > 1 {
		tables = append(tables, externalRows)
	}
	errs := []error{noted}
	for n, rows := range tables {
		if n > 0 {
			errs = append(errs, blank())
		}
		errs = append(errs, p.table(rows...))
	}
	return errors.Join(errs...)
}

// notes says what needs attention, a line each.
func (st systemState) notes() (notes []string) {
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	for _, a := range st.Away {
		note("%s", a)
	}
	for _, b := range st.Blocked {
		note("Blocked: %s", b)
	}
	if st.Outbox != nil && st.Outbox.Retrying > 0 {
		note("%s failed and will be retried: `tidings outbox list` shows why and when.", messages(int64(st.Outbox.Retrying)))
	}
	for _, p := range st.Partitions {
		switch {
		case p.Refused != "":
			note("Nothing is published to partition %d: %s", p.Partition, p.Refused)
		case p.NoLeader != "":
			note("Partition %d waits for a leader of its stream: %s", p.Partition, p.NoLeader)
		case p.State == stateOpen && p.Replicas == 0 && p.Unknown == "":
			note("Partition %d has no stream yet: the first relay that holds it makes %s.", p.Partition, p.Stream)
		}
	}
	for _, u := range st.Unheld {
		if c := slices.IndexFunc(st.Consumers, func(c consumerState) bool { return c.Consumer == u.Kind }); c >= 0 && st.Consumers[c].Paused != nil {
			continue
		}
		noun := "partition"
		if len(u.Partitions) > 1 {
			noun = "partitions"
		}
		note("No running %s holds %s %s: start one, or look into its log.", u.Kind, noun, ranges(u.Partitions))
	}
	for _, r := range st.Refusals {
		note("%s could not serve partition %d of %s, and does not take it back before %s: look into its log.", r.By, r.Partition, r.Kind, r.Until.Format(time.RFC3339))
	}
	for _, stream := range st.MoreOf {
		note("Stream %s has more external consumers than are listed.", stream)
	}
	if st.NotListed != "" {
		note("The external consumers are not known: %s", st.NotListed)
	}
	for _, c := range st.Consumers {
		if c.Unknown != "" && len(st.Away) == 0 {
			note("The lag of %s is not known: %s", c.Consumer, c.Unknown)
		}
		if len(c.Lost) > 0 {
			note("%s has lost events of %s: run `tidings replay --consumer %s`", c.Consumer, strings.Join(c.Lost, ", "), c.Consumer)
		}
	}
	return notes
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
