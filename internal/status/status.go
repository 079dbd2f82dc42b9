package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/jobs"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// Names of the servers, in Away and in findings.
const (
	ServerTruth       = "PostgreSQL"
	ServerProjections = "PostgreSQL of the projections"
	ServerNATS        = "NATS"
)

// State is how a whole installation is at one moment, as `tidings status --json` prints it.
type State struct {
	Away       []Away             `json:"unavailable,omitempty"`
	Blocked    []postgres.Blocked `json:"blocked,omitempty"` // sessions that wait for a lock, of both databases
	Outbox     *outbox.Stats      `json:"outbox,omitempty"`  // nil: its database is away
	Partitions []Partition        `json:"partitions"`
	Consumers  []Consumer         `json:"consumers"`
	Leases     []Lease            `json:"leases"`
	Unheld     []Unheld           `json:"unheld,omitempty"`
	Refusals   []Refusal          `json:"refusals,omitempty"`
	External   []broker.Durable   `json:"external_consumers,omitempty"` // subscribers' durable consumers; ReadExternal lists them
	MoreOf     []string           `json:"more_external,omitempty"`      // streams that have more of them than are listed
	NotListed  string             `json:"external_unknown,omitempty"`   // why they are not known
	Jobs       []jobs.Lease       `json:"jobs,omitempty"`               // of the archiver that run, and who waits for whom
	PerSecond  *Rates             `json:"per_second,omitempty"`         // since the state before; only while watching
}

// IsAway reports whether the server did not answer.
func (st State) IsAway(server string) bool {
	return slices.ContainsFunc(st.Away, func(a Away) bool { return a.Server == server })
}

// Unheld is which open partitions no instance of a kind holds.
type Unheld struct {
	Kind       string `json:"kind"`
	Partitions []int  `json:"partitions"`
}

// Refusal is an instance that could not serve a partition.
type Refusal struct {
	Kind      string    `json:"kind"`
	Partition int       `json:"partition"`
	By        string    `json:"by"`
	Until     time.Time `json:"until"` // it does not take the partition back before
}

// Away is a server that does not answer.
type Away struct {
	Server string `json:"server"`
	URL    string `json:"url"` // without its password
	Error  string `json:"error"`
}

// Consumer is a consumer's lag and dead letters, and whether it is paused.
type Consumer struct {
	consumers.ConsumerLag
	AsOf    *time.Time        `json:"as_of,omitempty"`       // every write that had committed by then is in; nil while the consumer is behind the streams
	Unknown string            `json:"lag_unknown,omitempty"` // why the lag is not known now; it is shown as 0
	Paused  *consumers.Paused `json:"paused,omitempty"`
}

// Lease is what one instance of a kind holds.
type Lease struct {
	Kind       string `json:"kind"`
	Owner      string `json:"owner"`
	Partitions []int  `json:"partitions"`
}

// Sources are what holds state. A pool acts as the system role; that of the projections may be that of the truth. What is away is nil, and in Away.
// They are safe for concurrent use.
type Sources struct {
	Truth, Projections *pgxpool.Pool
	NATS               *nats.Conn
	JetStream          jetstream.JetStream // of NATS
	Broker             broker.Config
	Consumers          []string // the names of the fleet's consumers, in the order in which reports have them
	Away               []Away   // what could not be connected to
}

// pingTimeout is for how long Read waits for a database before it is away.
const pingTimeout = 3 * time.Second

// present returns the sources that answer now.
func (src Sources) present(ctx context.Context) (Sources, error) {
	src.Away = slices.Clone(src.Away)
	for _, d := range []struct {
		server string
		pool   **pgxpool.Pool
	}{{ServerTruth, &src.Truth}, {ServerProjections, &src.Projections}} {
		if *d.pool == nil {
			continue
		}
		ping, cancel := context.WithTimeout(ctx, pingTimeout)
		err := (*d.pool).Ping(ping)
		cancel()
		switch {
		case ctx.Err() != nil:
			return src, context.Cause(ctx)
		case postgres.IsTransient(err):
			src.Away, *d.pool = append(src.Away, NewAway(d.server, (*d.pool).Config().ConnString(), err)), nil
		case err != nil:
			return src, fmt.Errorf("reach %s: %w", d.server, err)
		}
	}
	if src.NATS != nil && !src.NATS.IsConnected() {
		src.away(cmp.Or(src.NATS.LastError(), nats.ErrDisconnected))
	}
	return src, nil
}

// away notes that NATS does not answer.
func (src *Sources) away(err error) {
	src.Away, src.JetStream = append(src.Away, NewAway(ServerNATS, src.Broker.URL, err)), nil
}

// Read reads how everything is, at a cost that does not grow with it. A server that does not answer is in State.Away, and what it would say is
// left out or unknown. An error is of a server that answered first, or of ctx; a transient one (postgres.IsTransient, broker.IsTransient) may be
// gone with the next call. External consumers are left out: ReadExternal adds them.
func Read(ctx context.Context, src Sources) (st State, err error) {
	if src, err = src.present(ctx); err != nil {
		return st, err
	}
	var delivered *time.Time // before the consumers are asked
	if src.Truth != nil {
		stats, err := outbox.ReadStats(ctx, src.Truth)
		if err != nil {
			return st, err
		}
		st.Outbox = &stats
		d, err := outbox.ReadDelivered(ctx, src.Truth)
		if err != nil {
			return st, err
		}
		at := d.Whole().UTC()
		delivered = &at
	}
	if st.Blocked, err = src.blocked(ctx); err != nil {
		return st, err
	}
	if st.Partitions, err = Partitions(ctx, src); broker.IsTransient(err) && ctx.Err() == nil && src.Truth != nil {
		src.away(err)
		st.Partitions, err = Partitions(ctx, src)
	}
	if err != nil {
		return st, err
	}
	if src.Projections != nil {
		if st.Consumers, err = src.consumers(ctx, delivered); err != nil {
			return st, err
		}
	}
	st.Away = src.Away
	return st, src.holders(ctx, &st)
}

// holders reads which instance holds what, and which jobs run.
func (src Sources) holders(ctx context.Context, st *State) (err error) {
	if src.Truth != nil {
		if err := src.leases(ctx, st, src.Truth, relay.LeaseKind, relay.LeaseKind); err != nil {
			return err
		}
		st.name()
		if st.Jobs, err = jobs.Leases(ctx, src.Truth); err != nil {
			return err
		}
	}
	if src.Projections != nil {
		for _, name := range src.Consumers {
			if err := src.leases(ctx, st, src.Projections, name, consumers.LeaseKind(name, src.Broker.Stream)); err != nil {
				return err
			}
		}
	}
	st.unheld(src)
	return nil
}

// blocked returns which sessions wait for a lock.
func (src Sources) blocked(ctx context.Context) (all []postgres.Blocked, err error) {
	pools := []*pgxpool.Pool{src.Truth, src.Projections}
	if src.Truth != nil && src.Projections != nil && SameDatabase(src.Truth, src.Projections) {
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

// SameDatabase reports whether two pools are of one database.
func SameDatabase(a, b *pgxpool.Pool) bool {
	x, y := a.Config().ConnConfig, b.Config().ConnConfig
	return x.Host == y.Host && x.Port == y.Port && x.Database == y.Database
}

// consumers reads the lags and the pauses. All that had been committed at delivered was on the streams before.
func (src Sources) consumers(ctx context.Context, delivered *time.Time) (all []Consumer, err error) {
	unknown, lags := "NATS is unavailable", []consumers.ConsumerLag(nil)
	if src.JetStream != nil {
		unknown = ""
		lags, err = consumers.Lag(ctx, src.Projections, src.JetStream, src.Broker, src.Consumers...)
		if broker.IsTransient(err) {
			unknown, lags = daemon.Plain(err), nil
		} else if err != nil {
			return nil, err
		}
	}
	if unknown != "" {
		for _, name := range src.Consumers {
			lags = append(lags, consumers.ConsumerLag{Consumer: name})
		}
	}
	pauses, err := consumers.Pauses(ctx, src.Projections)
	if err != nil {
		return nil, err
	}
	for _, l := range lags {
		c := Consumer{ConsumerLag: l, Unknown: unknown}
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
func (st *State) unheld(src Sources) {
	kinds := []string{}
	if src.Truth != nil {
		kinds = append(kinds, relay.LeaseKind)
	}
	if src.Projections != nil {
		kinds = append(kinds, src.Consumers...)
	}
	for _, kind := range kinds {
		var none []int
		for _, p := range st.Partitions {
			held := slices.ContainsFunc(st.Leases, func(l Lease) bool { return l.Kind == kind && slices.Contains(l.Partitions, p.Partition) })
			if p.State == Open && !held {
				none = append(none, p.Partition)
			}
		}
		if len(none) > 0 {
			st.Unheld = append(st.Unheld, Unheld{kind, none})
		}
	}
}

// leases reads who holds and who refuses what under a kind of leases, which the state calls by a name.
func (src Sources) leases(ctx context.Context, st *State, pool *pgxpool.Pool, kind, leases string) error {
	holders, err := lease.Holders(ctx, pool, leases)
	if err != nil {
		return err
	}
	for _, h := range holders {
		i := slices.IndexFunc(st.Leases, func(l Lease) bool { return l.Kind == kind && l.Owner == h.Owner })
		if i < 0 {
			i = len(st.Leases)
			st.Leases = append(st.Leases, Lease{Kind: kind, Owner: h.Owner})
		}
		st.Leases[i].Partitions = append(st.Leases[i].Partitions, h.Partition)
	}
	refusals, err := lease.Refusals(ctx, pool, leases)
	if err != nil {
		return err
	}
	for _, r := range refusals {
		st.Refusals = append(st.Refusals, Refusal{kind, r.Partition, r.By, r.Until.UTC()})
	}
	return nil
}

// ReadExternal adds the durable consumers of the streams to a state that Read returned, as far as the servers say.
func ReadExternal(ctx context.Context, src Sources, st *State) error {
	for _, p := range st.Partitions {
		if src.JetStream == nil || p.Replicas == 0 || st.IsAway(ServerNATS) {
			continue
		}
		all, more, err := broker.Durables(ctx, src.JetStream, p.Stream)
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
