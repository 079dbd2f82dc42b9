package status

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// Names of the servers, in Unavailable and in findings.
const (
	ServerTruth       = "PostgreSQL"
	ServerProjections = "PostgreSQL of the projections"
	ServerNATS        = "NATS"
)

// State is the state of an installation at one moment, as `tidings status --json` prints it.
type State struct {
	Unavailable []Unavailable      `json:"unavailable,omitempty"`
	Blocked     []postgres.Blocked `json:"blocked,omitempty"` // sessions of both databases that wait for a lock
	Unread      []Unread           `json:"unread,omitempty"`  // parts that are missing or incomplete, because a session locks a table
	Outbox      *outbox.Stats      `json:"outbox,omitempty"`  // nil: its database is unavailable, or a table is locked
	Partitions  []Partition        `json:"partitions"`
	Consumers   []Consumer         `json:"consumers"`
	Leases      []Lease            `json:"leases"`
	Unheld      []Unheld           `json:"unheld,omitempty"`
	Refusals    []Refusal          `json:"refusals,omitempty"`
	External    []broker.Durable   `json:"external_consumers,omitempty"` // subscribers' durable consumers; ReadExternal lists them
	MoreOf      []string           `json:"more_external,omitempty"`      // streams that have more of them than are listed
	NotListed   string             `json:"external_unknown,omitempty"`   // why External is incomplete
	Jobs        []jobs.Lease       `json:"jobs,omitempty"`               // jobs that run, and commands that wait for one
	PerSecond   *Rates             `json:"per_second,omitempty"`         // since the previous state; only with --watch
}

// IsUnavailable reports whether the server did not answer.
func (st State) IsUnavailable(server string) bool {
	return slices.ContainsFunc(st.Unavailable, func(a Unavailable) bool { return a.Server == server })
}

// Parts of the state that another session's lock can make unreadable.
const (
	PartOutbox         = "outbox"
	PartPartitions     = "partitions"
	PartConsumers      = "consumers"
	PartRelayLeases    = "leases of the relays"
	PartConsumerLeases = "leases of the consumers"
)

// Unread is a part of the state that is unknown, because another session locks a table.
type Unread struct {
	Part  string `json:"part"`
	Error string `json:"error"`
}

// String names the part and the reason.
func (u Unread) String() string {
	return u.Part + ": unknown, because another session locks a table (docs/runbook/BlockedSessions.md): " + u.Error
}

// IsUnread reports whether a lock made the part unreadable.
func (st State) IsUnread(part string) bool {
	return slices.ContainsFunc(st.Unread, func(u Unread) bool { return u.Part == part })
}

// Unheld lists the open partitions that no instance of a kind holds.
type Unheld struct {
	Kind       string `json:"kind"`
	Partitions []int  `json:"partitions"`
}

// String returns the partitions with their noun: "partition 3", "partitions 0-2 5".
func (u Unheld) String() string { return words.Partitions(u.Partitions) }

// Refusal is an instance that could not serve a partition.
type Refusal struct {
	Kind      string    `json:"kind"`
	Partition int       `json:"partition"`
	By        string    `json:"by"`
	Until     time.Time `json:"until"` // when it may take the partition again
}

// Unavailable is a server that does not answer.
type Unavailable struct {
	Server string `json:"server"`
	URL    string `json:"url"` // without its password
	Error  string `json:"error"`
}

// Consumer is a consumer with its lag, its dead letters and its pause.
type Consumer struct {
	consumers.ConsumerLag
	// AsOf is a time: the consumer has applied every write that committed before it. It is nil
	// while the consumer is behind.
	AsOf    *time.Time        `json:"as_of,omitempty"`
	Unknown string            `json:"lag_unknown,omitempty"` // why the lag is unknown now; its fields are then 0
	Paused  *consumers.Paused `json:"paused,omitempty"`
}

// Lease is the partitions that one instance of a kind holds.
type Lease struct {
	Kind       string `json:"kind"`
	Owner      string `json:"owner"`
	Partitions []int  `json:"partitions"`
}

// Sources are the servers that hold the state. Each pool acts as the system role; both may be one
// pool. A server that is unavailable is nil, and is in Unavailable. Sources are safe for concurrent
// use.
type Sources struct {
	Truth, Projections *pgxpool.Pool
	NATS               *nats.Conn
	JetStream          jetstream.JetStream // of NATS
	Broker             broker.Config
	Consumers          []string      // the names of the fleet's consumers, in the order of reports
	Unavailable        []Unavailable // servers that refused a connection
	OutboxAlone        bool          // Truth has only the outbox, and Projections is nil
}

// pingTimeout is how long Read waits for a database before it counts as unavailable.
const pingTimeout = 3 * time.Second

// present returns the sources that answer now.
func (src Sources) present(ctx context.Context) (Sources, error) {
	src.Unavailable = slices.Clone(src.Unavailable)
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
			src.Unavailable, *d.pool = append(src.Unavailable, NewUnavailable(d.server, (*d.pool).Config().ConnString(), err)), nil
		case err != nil:
			return src, fmt.Errorf("reach %s: %w", d.server, err)
		}
	}
	if src.NATS != nil && !src.NATS.IsConnected() {
		src.addUnavailable(cmp.Or(src.NATS.LastError(), nats.ErrDisconnected))
	}
	return src, nil
}

// addUnavailable records that NATS does not answer.
func (src *Sources) addUnavailable(err error) {
	src.Unavailable, src.JetStream = append(src.Unavailable, NewUnavailable(ServerNATS, src.Broker.URL, err)), nil
}

// lockWait is how long Read waits for a locked table before its part of the state counts as unread.
// After the first such part it waits for a quarter of the time.
const lockWait = 2 * time.Second

// WithShortLockTimeout returns a context for further reads of the same installation. Its statements
// wait for a lock only shortly.
func WithShortLockTimeout(ctx context.Context, st State) context.Context {
	if len(st.Unread) > 0 {
		return postgres.WithLockWait(ctx, lockWait/4)
	}
	return postgres.WithLockWait(ctx, lockWait)
}

// Read reads the state. Its cost does not grow with the number of events. A server that does not
// answer is in State.Unavailable, and its part of the state is missing or unknown. A part whose
// table another session locks is in State.Unread after lockWait. Read returns an error if a server
// answers with another one, or if ctx ends. After a transient error (postgres.IsTransient,
// broker.IsTransient) the next call may succeed. The state has no external consumers: ReadExternal
// adds them.
func Read(ctx context.Context, src Sources) (st State, err error) {
	if src, err = src.present(ctx); err != nil {
		return st, err
	}
	stop := src.watchBlocked(ctx)
	err = src.read(ctx, &st)
	blocked, berr := stop()
	if st.Blocked = blocked; err == nil {
		err = berr
	}
	return st, err
}

// read reads everything but the blocked sessions.
func (src Sources) read(ctx context.Context, st *State) (err error) {
	var delivered *time.Time // read before the offsets of the consumers
	if src.Truth != nil {
		if err := st.try(ctx, PartOutbox, func(ctx context.Context) (err error) {
			delivered, err = src.outbox(ctx, st)
			return err
		}); err != nil {
			return err
		}
	}
	if err := st.try(ctx, PartPartitions, func(ctx context.Context) (err error) {
		if st.Partitions, err = Partitions(ctx, src); broker.IsTransient(err) && ctx.Err() == nil && src.Truth != nil {
			src.addUnavailable(err)
			st.Partitions, err = Partitions(ctx, src)
		}
		return err
	}); err != nil {
		return err
	}
	if st.IsUnread(PartPartitions) {
		streams := src
		streams.Truth = nil
		if st.Partitions, err = Partitions(ctx, streams); err != nil {
			return err
		}
	}
	if src.Projections != nil {
		if err := st.try(ctx, PartConsumers, func(ctx context.Context) (err error) {
			st.Consumers, err = src.consumers(ctx, delivered)
			return err
		}); err != nil {
			return err
		}
	}
	if st.IsUnread(PartConsumers) {
		for _, name := range src.Consumers {
			st.Consumers = append(st.Consumers, Consumer{ConsumerLag: consumers.ConsumerLag{Consumer: name}, Unknown: "a table is locked"})
		}
	}
	st.Unavailable = src.Unavailable
	return src.holders(ctx, st)
}

// try reads one part. If another session locks a table of it, try adds the part to Unread.
func (st *State) try(ctx context.Context, part string, read func(context.Context) error) error {
	err := read(WithShortLockTimeout(ctx, *st))
	if !postgres.IsLockTimeout(err) {
		return err
	}
	st.Unread = append(st.Unread, Unread{part, err.Error()})
	return nil
}

// outbox reads the outbox's figures. Every write that had committed at the returned time is on the
// streams.
func (src Sources) outbox(ctx context.Context, st *State) (*time.Time, error) {
	stats, err := outbox.ReadStats(ctx, src.Truth)
	if err != nil {
		return nil, err
	}
	st.Outbox = &stats
	d, err := outbox.ReadDelivered(ctx, src.Truth)
	if err != nil {
		return nil, err
	}
	at := d.Whole().UTC()
	return &at, nil
}

// holders reads the leases of relays and consumers, and the running jobs.
func (src Sources) holders(ctx context.Context, st *State) error {
	if src.Truth != nil {
		if err := st.try(ctx, PartRelayLeases, func(ctx context.Context) (err error) {
			if st.Jobs, err = jobs.Leases(ctx, src.Truth); err != nil {
				return err
			}
			return src.leases(ctx, st, src.Truth, relay.LeaseKind, relay.LeaseKind)
		}); err != nil {
			return err
		}
		st.name()
	}
	if src.Projections != nil {
		if err := st.try(ctx, PartConsumerLeases, func(ctx context.Context) error {
			for _, name := range src.Consumers {
				if err := src.leases(ctx, st, src.Projections, name, consumers.LeaseKind(name, src.Broker.Stream)); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	st.unheld(src)
	return nil
}

// watchBlocked reads the sessions that wait for a lock, now and repeatedly until stop. The reads of
// Read may be the only ones that wait. stop returns each wait once, and for each blocker one wait
// of this program.
func (src Sources) watchBlocked(ctx context.Context) (stop func() ([]postgres.Blocked, error)) {
	var all []postgres.Blocked
	var err error
	ended, end := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			var some []postgres.Blocked
			if some, err = src.blocked(ctx); err != nil {
				return
			}
			for _, b := range some {
				same := func(a postgres.Blocked) bool {
					return a.By.PID == b.By.PID && (a.PID == b.PID || a.Application == b.Application && src.own(a.Application))
				}
				if i := slices.IndexFunc(all, same); i >= 0 {
					all[i] = b
				} else {
					all = append(all, b)
				}
			}
			select {
			case <-end:
				return
			case <-time.After(lockWait / 8):
			}
		}
	}()
	return func() ([]postgres.Blocked, error) {
		close(end)
		<-ended
		return all, err
	}
}

// blocked returns the sessions that wait for a lock.
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

// own reports whether the sessions of src have the application_name.
func (src Sources) own(name string) bool {
	return slices.ContainsFunc([]*pgxpool.Pool{src.Truth, src.Projections}, func(pool *pgxpool.Pool) bool {
		return pool != nil && pool.Config().ConnConfig.RuntimeParams["application_name"] == name
	})
}

// SameDatabase reports whether two pools are of one database.
func SameDatabase(a, b *pgxpool.Pool) bool {
	x, y := a.Config().ConnConfig, b.Config().ConnConfig
	return x.Host == y.Host && x.Port == y.Port && x.Database == y.Database
}

// consumers reads the lags and the pauses. Every write that had committed at delivered was on the
// streams by then.
func (src Sources) consumers(ctx context.Context, delivered *time.Time) (all []Consumer, err error) {
	unknown, lags := "NATS is unavailable", []consumers.ConsumerLag(nil)
	if src.JetStream != nil {
		unknown = ""
		_, err = broker.Confirm(ctx, src.JetStream, func(ctx context.Context) (_ broker.Stream, lost bool, err error) {
			lags, err = consumers.Lag(ctx, src.Projections, src.JetStream, src.Broker, src.Consumers...)
			return broker.Stream{}, slices.ContainsFunc(lags, func(l consumers.ConsumerLag) bool { return len(l.Lost) > 0 }), err
		})
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

// unheld records, for each kind, the open partitions that no instance holds.
func (st *State) unheld(src Sources) {
	kinds := []string{}
	if src.Truth != nil && !st.IsUnread(PartRelayLeases) {
		kinds = append(kinds, relay.LeaseKind)
	}
	if src.Projections != nil && !st.IsUnread(PartConsumerLeases) {
		kinds = append(kinds, src.Consumers...)
	}
	for _, kind := range kinds {
		var none []int
		for _, p := range st.Partitions {
			held := slices.ContainsFunc(st.Leases, func(l Lease) bool {
				return l.Kind == kind && slices.Contains(l.Partitions, p.Partition)
			})
			if kind == relay.LeaseKind && p.Trouble != "" {
				continue // a relay that cannot publish frees its lease for others
			}
			if p.State == Open && !held {
				none = append(none, p.Partition)
			}
		}
		if len(none) > 0 {
			st.Unheld = append(st.Unheld, Unheld{kind, none})
		}
	}
}

// leases reads the holders and the refusals of the leases with the kind leases. The state lists
// them under the name kind.
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

// ReadExternal adds the durable consumers of the streams to a state that Read returned. If NATS
// cannot answer, State.NotListed has the reason.
func ReadExternal(ctx context.Context, src Sources, st *State) (err error) {
	if src.JetStream == nil || st.IsUnavailable(ServerNATS) {
		return nil
	}
	var streams []string
	for _, p := range st.Partitions {
		if p.Replicas > 0 {
			streams = append(streams, p.Stream)
		}
	}
	st.External, st.MoreOf, err = broker.Durables(ctx, src.JetStream, append(streams, src.Broker.DeadStream())...)
	if broker.IsTransient(err) {
		st.NotListed, err = daemon.Plain(err), nil
	}
	return err
}

// Rates is how many events per second were published and applied between two states.
type Rates struct {
	Published float64            `json:"published"`
	Applied   map[string]float64 `json:"applied"` // by consumer
}

// Moved returns the rates between two states; now was read the time apart after before. A value
// that is unknown in one of the states counts as unchanged.
func Moved(before, now State, apart time.Duration) *Rates {
	last := make(map[int]uint64)
	for _, p := range before.Partitions {
		last[p.Partition] = p.LastSeq
	}
	var published float64
	for _, p := range now.Partitions {
		if was, known := last[p.Partition]; known && p.LastSeq > was {
			published += float64(p.LastSeq - was)
		}
	}
	behind := make(map[string]int64)
	for _, c := range before.Consumers {
		if c.Unknown == "" {
			behind[c.Consumer] = c.Messages
		}
	}
	r := &Rates{Published: published / apart.Seconds(), Applied: make(map[string]float64)}
	for _, c := range now.Consumers {
		if was, known := behind[c.Consumer]; known && c.Unknown == "" {
			r.Applied[c.Consumer] = max(published+float64(was-c.Messages), 0) / apart.Seconds()
		}
	}
	return r
}
