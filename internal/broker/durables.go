package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Durable is a durable consumer of a stream. It is a subscriber's, because Tidings' own consumers
// keep their offsets in their database.
type Durable struct {
	Name        string  `json:"name"`
	Stream      string  `json:"stream"`
	Filter      string  `json:"filter,omitempty"` // the subjects of its messages; "": all, or several filters
	State       string  `json:"state"`            // CaughtUp, Working, Unserved or Redelivers
	Behind      uint64  `json:"behind"`           // messages not yet delivered to it
	Unacked     int     `json:"unacknowledged"`   // messages delivered to it and not yet acknowledged
	Redelivered int     `json:"redelivered"`      // those of Unacked that NATS has delivered more than once
	Waiting     int     `json:"waiting"`          // requests that wait for messages; 1 if NATS pushes to somebody
	Idle        float64 `json:"idle_seconds"`     // since its last delivery or acknowledgment; without one, since it was created
	Floor       uint64  `json:"ack_floor"`        // the stream's sequence up to which every message is acknowledged
	Last        uint64  `json:"stream_last"`      // the stream's last sequence
}

// States of a durable consumer.
const (
	CaughtUp   = "caught up"
	Working    = "working"
	Unserved   = "nobody serves it" // messages wait, and nobody has asked for them for IdleSeconds
	Redelivers = "redelivers"       // more than ManyRedelivered messages are delivered again and again
)

// Limits that the alerts of deploy/prometheus/rules.yml have too.
const (
	IdleSeconds     = 300
	ManyRedelivered = 10
)

// maxDurables is the limit of Durables for one stream.
const maxDurables = 256

// Durables returns the durable consumers of the streams that exist, in the order of streams and
// then by name. It stops after 256 of a stream in the server's order; more has the streams that
// have others. It asks the servers twice per stream. With an error it returns what it has read.
func Durables(ctx context.Context, js jetstream.JetStream, streams ...string) (all []Durable, more []string, err error) {
	for _, stream := range streams {
		some, others, err := durables(ctx, js, stream)
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return all, more, err
		}
		if all = append(all, some...); others {
			more = append(more, stream)
		}
	}
	return all, more, nil
}

func durables(ctx context.Context, js jetstream.JetStream, stream string) (all []Durable, more bool, err error) {
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return nil, false, fmt.Errorf("look up stream %s: %w", stream, unanswered(js, err))
	}
	ctx, end := context.WithCancel(ctx)
	list := s.ListConsumers(ctx)
	defer func() {
		end()
		for range list.Info() { // otherwise its goroutine waits for a reader forever
		}
	}()
	for c := range list.Info() {
		if c.Config.Durable == "" {
			continue
		}
		if len(all) == maxDurables {
			return all, true, nil
		}
		all = append(all, durableOf(c, stream, s.CachedInfo().State.LastSeq))
	}
	if err := list.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, false, fmt.Errorf("list the consumers of stream %s: %w", stream, unanswered(js, err))
	}
	slices.SortFunc(all, func(a, b Durable) int { return strings.Compare(a.Name, b.Name) })
	return all, false, nil
}

func durableOf(c *jetstream.ConsumerInfo, stream string, last uint64) Durable {
	d := Durable{Name: c.Name, Stream: stream, Filter: c.Config.FilterSubject, State: CaughtUp, Behind: c.NumPending,
		Unacked: c.NumAckPending, Redelivered: c.NumRedelivered, Waiting: c.NumWaiting, Floor: c.AckFloor.Stream, Last: last}
	if c.PushBound {
		d.Waiting = 1
	}
	if d.Unacked == 0 { // the floor of a new consumer does not say where it began
		d.Floor = max(d.Floor, c.Delivered.Stream)
	}
	active := c.Created
	for _, at := range []*time.Time{c.Delivered.Last, c.AckFloor.Last} { // a server forgets them when it restarts
		if at != nil && at.After(active) {
			active = *at
		}
	}
	d.Idle = max(0, c.TimeStamp.Sub(active).Seconds()) // by the server's clock
	switch {
	case d.Redelivered > ManyRedelivered:
		d.State = Redelivers
	case d.Behind == 0 && d.Unacked == 0:
	case d.Waiting == 0 && d.Idle > IdleSeconds:
		d.State = Unserved
	default:
		d.State = Working
	}
	return d
}

// Metadata of a durable consumer that Subscribe created.
const (
	// MetaFilter is the filter of the subscriber's consumers on the streams of partitions. A
	// consumer with it is kept: Declare creates the same one on each new stream.
	MetaFilter = "tidings-filter"
	// MetaOf names the stream's predecessors, as MetaAfter does on the stream, which a tenant
	// cannot read.
	MetaOf = "tidings-after"
)

// OrderGroup is the priority group of a durable consumer that one instance at a time reads.
const OrderGroup = "order"

// MaxUnacked is the largest number of events that all instances of a subscriber together have in
// hand.
const MaxUnacked = 100_000

// Subscription selects how Subscribe creates durable consumers.
type Subscription struct {
	AckWait time.Duration // NATS delivers an event again if it is not acknowledged in time
	InOrder bool          // one instance at a time reads a stream
	Since   time.Time     // begin with the events stored then; zero for the oldest ones
}

// Subscribe creates p's durable consumers. A program in p's account cannot do that, because the
// request names the subject to which NATS delivers. Consumers that exist get the settings and keep
// their positions. After an error call it again.
//
// The consumers of the stream of dead letters are the record of those that every other stream must
// have. So Subscribe creates that one first and then lists the streams: a stream that Declare
// creates later gets the consumer from there.
func Subscribe(ctx context.Context, js jetstream.JetStream, cfg Config, p Principal, s Subscription) (created []string, err error) {
	if cfg.Unmanaged {
		return nil, ErrUnmanaged
	}
	if err := p.Validate(); err != nil {
		return nil, err
	}
	durable := p.DurableName()
	if durable == "" {
		return nil, fmt.Errorf("%s has no durable consumer", p.Login())
	}
	if s.AckWait < time.Second {
		return nil, fmt.Errorf("the time to acknowledge is %s: want at least 1s", s.AckWait)
	}
	streams, err := Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	if len(streams) == 0 {
		return nil, errors.New("there is no stream yet: a relay creates the first one")
	}
	if err := DeclareDead(ctx, js, cfg, streams[0]); err != nil {
		return nil, err
	}
	base := jetstream.ConsumerConfig{Durable: durable, FilterSubject: cfg.DeadStream() + ".retry." + durable,
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: s.AckWait, MaxAckPending: MaxUnacked, MaxDeliver: -1,
		Description: "Tidings subscriber " + p.Login(), Metadata: map[string]string{MetaFilter: cfg.Prefix + ".*." + p.events()}}
	if s.InOrder {
		base.PriorityPolicy, base.PriorityGroups, base.PinnedTTL = jetstream.PriorityPolicyPinned, []string{OrderGroup}, s.AckWait
	}
	made, err := ensureDurable(ctx, js, cfg.DeadStream(), base, true, false)
	if err != nil {
		return nil, err
	}
	if made {
		created = append(created, cfg.DeadStream())
	}
	if streams, err = Streams(ctx, js, cfg); err != nil {
		return created, err
	}
	for _, stream := range streams { // predecessors first
		c := onStream(base, stream)
		if !s.Since.IsZero() {
			c.DeliverPolicy, c.OptStartTime = jetstream.DeliverByStartTimePolicy, &s.Since
		}
		if made, err = ensureDurable(ctx, js, stream.Name, c, true, false); err != nil {
			return created, err
		}
		if made {
			created = append(created, stream.Name)
		}
	}
	return created, nil
}

// keep creates the kept durable consumers on a new stream.
func keep(ctx context.Context, js jetstream.JetStream, cfg Config, s Stream) error {
	dead, err := js.Stream(ctx, cfg.DeadStream())
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", cfg.DeadStream(), unanswered(js, err))
	}
	list := dead.ListConsumers(ctx)
	var all []jetstream.ConsumerConfig
	for c := range list.Info() {
		if c.Config.Metadata[MetaFilter] != "" {
			all = append(all, c.Config)
		}
	}
	if err := list.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return fmt.Errorf("list the consumers of stream %s: %w", cfg.DeadStream(), unanswered(js, err))
	}
	for _, c := range all {
		if _, err := ensureDurable(ctx, js, s.Name, onStream(c, s), false, bool(cfg.Unmanaged)); err != nil {
			return err
		}
	}
	return nil
}

// onStream returns the consumer of a partition's stream that belongs to a consumer of the record.
func onStream(record jetstream.ConsumerConfig, s Stream) jetstream.ConsumerConfig {
	var after []string
	for _, n := range s.After {
		after = append(after, strconv.Itoa(n))
	}
	filter := record.Metadata[MetaFilter]
	return jetstream.ConsumerConfig{Durable: record.Durable, Description: record.Description, FilterSubject: filter,
		AckPolicy: record.AckPolicy, AckWait: record.AckWait, MaxAckPending: record.MaxAckPending, MaxDeliver: record.MaxDeliver,
		PriorityPolicy: record.PriorityPolicy, PriorityGroups: record.PriorityGroups, PinnedTTL: record.PinnedTTL,
		Metadata: map[string]string{MetaFilter: filter, MetaOf: strings.Join(after, " ")}}
}

// ensureDurable creates a durable consumer if the stream has none of that name. Otherwise it gives
// that one the settings of c, with update, and keeps its position. With unmanaged it creates none
// and returns ErrMissing.
func ensureDurable(ctx context.Context, js jetstream.JetStream, stream string, c jetstream.ConsumerConfig,
	update, unmanaged bool) (created bool, err error) {
	fail := func(err error) (bool, error) {
		return false, fmt.Errorf("create consumer %s of stream %s: %w", c.Durable, stream, unanswered(js, err))
	}
	have, err := js.Consumer(ctx, stream, c.Durable)
	if unmanaged && errors.Is(err, jetstream.ErrConsumerNotFound) {
		return false, fmt.Errorf("consumer %s of stream %s does not exist; `tidings nats durable` creates it with NATS_MANAGE=true: %w",
			c.Durable, stream, ErrMissing)
	}
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		if _, err = js.CreateConsumer(ctx, stream, c); err == nil {
			return true, nil
		}
		if !errors.Is(err, jetstream.ErrConsumerExists) { // another process was faster
			return fail(err)
		}
		have, err = js.Consumer(ctx, stream, c.Durable)
	}
	if err != nil {
		return fail(err)
	}
	was := have.CachedInfo().Config
	record := was.Metadata[MetaFilter]
	switch {
	case was.FilterSubject != c.FilterSubject, record != "" && record != c.Metadata[MetaFilter]:
		return fail(fmt.Errorf("one with the filter %q exists", cmp.Or(record, was.FilterSubject)))
	case !update:
		return false, nil
	}
	c.DeliverPolicy, c.OptStartTime = was.DeliverPolicy, was.OptStartTime
	if _, err := js.UpdateConsumer(ctx, stream, c); err != nil {
		return fail(err)
	}
	return false, nil
}

// The bounds of the stream of dead letters: of one subscriber, and of all together. A letter beyond
// them waits in its subscriber, which then handles nothing else of that stream's partition.
const (
	maxLetters     = 10_000
	maxLetterBytes = 1 << 30
)

// dead returns the stream of subscribers' dead letters.
func (c Config) dead(replicas int, tags []string) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: c.DeadStream(), Description: "Tidings: events that subscribers could not handle",
		Subjects: []string{c.DeadStream() + ".*.*"},
		Storage:  jetstream.FileStorage, Replicas: replicas, Placement: Placement(tags), AllowDirect: true,
		Discard: jetstream.DiscardNew, DenyPurge: true, // letters are deleted one by one
		// A subscriber's login may store any letter, and shares the disk with the events of all
		// tenants.
		MaxMsgsPerSubject: maxLetters, DiscardNewPerSubject: true, MaxBytes: maxLetterBytes,
	}
}

// DeclareDead creates the stream of subscribers' dead letters, with the replicas and the placement
// of a partition's stream.
func DeclareDead(ctx context.Context, js jetstream.JetStream, cfg Config, events Stream) error {
	_, err := js.Stream(ctx, cfg.DeadStream())
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound) && bool(cfg.Unmanaged):
		err = missing("stream " + cfg.DeadStream())
	case errors.Is(err, jetstream.ErrStreamNotFound):
		_, err = js.CreateStream(ctx, cfg.dead(max(events.Replicas, 1), events.Tags))
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			err = nil // another process was faster
		}
	}
	if err != nil {
		return fmt.Errorf("declare the stream of dead letters, %s: %w", cfg.DeadStream(), err)
	}
	return nil
}

// StreamsOf returns the streams as a subscriber's durable consumers describe them, for an account
// that can read no more. Last is above 0 if the stream may have had events. Streams without that
// consumer are missing.
func StreamsOf(ctx context.Context, js jetstream.JetStream, cfg Config, durable string) (all []Stream, err error) {
	names := js.StreamNames(ctx, jetstream.WithStreamListSubject(cfg.Prefix+".>"))
	for name := range names.Name() {
		n, ok := cfg.Number(name)
		if !ok {
			continue
		}
		c, err := js.Consumer(ctx, name, durable)
		if errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look up consumer %s of stream %s: %w", durable, name, unanswered(js, err))
		}
		i := c.CachedInfo()
		s := Stream{Partition: Partition{Number: n}, Name: name, Created: i.Created, Last: max(i.Delivered.Stream, i.NumPending)}
		for _, f := range strings.Fields(i.Config.Metadata[MetaOf]) {
			before, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("%w: %s in the metadata of consumer %s is %.80q", ErrStreamShape, MetaOf, durable, f)
			}
			s.After = append(s.After, before)
		}
		all = append(all, s)
	}
	if err := names.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) {
		return nil, fmt.Errorf("list the streams of %s.>: %w", cfg.Prefix, unanswered(js, err))
	}
	slices.SortFunc(all, func(a, b Stream) int { return a.Number - b.Number })
	return all, nil
}

// DeclareBootstraps creates the key-value bucket that records the exports of subscribers, with the
// replicas and the placement of a partition's stream. A key is the name of the durable consumers.
func DeclareBootstraps(ctx context.Context, js jetstream.JetStream, cfg Config, events Stream) (jetstream.KeyValue, error) {
	bucket := cfg.Stream + "-bootstrap"
	kv, err := js.KeyValue(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket: bucket, Description: "Tidings: how far subscribers have read exports", Storage: jetstream.FileStorage,
			Replicas: max(events.Replicas, 1), Placement: Placement(events.Tags),
		})
		if errors.Is(err, jetstream.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, bucket) // another process was faster
		}
	}
	if err != nil {
		return nil, fmt.Errorf("declare the record of exports, %s: %w", bucket, unanswered(js, err))
	}
	return kv, nil
}
