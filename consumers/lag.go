package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
)

// ConsumerLag is how far a consumer, all its instances together, is behind the stream.
type ConsumerLag struct {
	Consumer    string    `json:"consumer"`
	Messages    int64     `json:"lag_messages"`   // on the stream and not applied; exact
	Seconds     float64   `json:"lag_seconds"`    // since the oldest of them was stored
	Partitions  int       `json:"lag_partitions"` // that have any
	DeadLetters int64     `json:"dead_letters"`   // maxDeadLetters means at least so many
	AsOf        time.Time `json:"as_of"`          // everything on the stream up to then is applied; zero while nothing is known
	oldest      time.Time
	idle        []int     // partitions that had applied everything
	at          time.Time // when the offsets were read, by the database's clock
}

// maxDeadLetters bounds the count of dead letters.
const maxDeadLetters = 10000

// allOffsetsSQL reads where every consumer stands.
// Index: consumer_offsets_pkey: at most one row per consumer and partition.   Locks: none.
const allOffsetsSQL = `
SELECT /* consumers.all_offsets */ consumer_name, right(partition_key, 2)::int, last_processed_id, as_of, now()
  FROM consumer_offsets WHERE cardinality(@consumers::text[]) = 0 OR consumer_name = ANY(@consumers)`

// deadLettersSQL counts the dead letters of one consumer, up to a bound.
// Index: consumer_dead_letters_aggregate_idx.   Locks: none.
const deadLettersSQL = `
SELECT /* consumers.dead_letters */ count(*) FROM (SELECT FROM consumer_dead_letters WHERE consumer_name = @consumer LIMIT @most) d`

// Lag returns how far the named consumers are behind the stream, in their order; without names, every consumer that has
// offsets, by name. It is 0 messages exactly when all that was on the stream has been applied: the offsets are read first, then
// what follows them on the stream, so that what is applied meanwhile can only make it too high. It asks the database and the
// stream, never a running consumer, so it is right when none runs. Cost: one look-up per partition and offset that any of the
// consumers has there, some at a time, and for a consumer that is behind mostly one count. The pool is the projections' and
// acts as the system role.
func Lag(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config, names ...string) ([]ConsumerLag, error) {
	if names == nil {
		names = []string{}
	}
	offsets := make(map[string]*[event.Partitions]uint64)
	asOf := make(map[string]time.Time)
	seen := make(map[string]int)
	order := slices.Clone(names)
	for _, n := range names {
		offsets[n] = new([event.Partitions]uint64)
	}
	rows, _ := pool.Query(ctx, allOffsetsSQL, pgx.StrictNamedArgs{"consumers": names})
	var name string
	var partition int
	var offset int64
	var at, now time.Time
	if _, err := pgx.ForEachRow(rows, []any{&name, &partition, &offset, &at, &now}, func() error {
		if offsets[name] == nil {
			offsets[name] = new([event.Partitions]uint64)
			order = append(order, name)
		}
		offsets[name][partition] = uint64(offset)
		if seen[name]++; seen[name] == 1 || at.Before(asOf[name]) {
			asOf[name] = at.UTC()
		}
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the offsets of consumers: %w", err)
	}
	slices.Sort(order[len(names):])
	stream, err := js.Stream(ctx, cfg.Stream)
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	spots := make(map[spot]bool)
	for _, of := range offsets {
		for p, offset := range of {
			if offset < stream.CachedInfo().State.LastSeq {
				spots[spot{p, offset}] = true
			}
		}
	}
	next, err := nextAfter(ctx, stream, cfg, spots)
	if err != nil {
		return nil, err
	}
	all := make([]ConsumerLag, len(order))
	for i, name := range order {
		l := &all[i]
		l.Consumer, l.at = name, now
		if seen[name] == event.Partitions && asOf[name].Unix() > 0 {
			l.AsOf = asOf[name]
		}
		row := pool.QueryRow(ctx, deadLettersSQL, pgx.StrictNamedArgs{"consumer": name, "most": maxDeadLetters})
		if err := row.Scan(&l.DeadLetters); err != nil {
			return nil, fmt.Errorf("count the dead letters of %s: %w", name, err)
		}
		if err := l.measure(ctx, js, cfg, offsets[name], next); err != nil {
			return nil, fmt.Errorf("measure the lag of %s: %w", name, err)
		}
	}
	return all, nil
}

// lastSequences returns the sequence of each partition's last message; 0 where there is none.
func lastSequences(ctx context.Context, stream jetstream.Stream, cfg broker.Config) (last [event.Partitions]uint64, err error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxLookUps)
	for p := range last {
		g.Go(func() error {
			raw, err := stream.GetLastMsgForSubject(ctx, event.PartitionFilter(cfg.Prefix, p))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("look up the last message of %s: %w", event.PartitionKey(p), err)
			}
			last[p] = raw.Sequence
			return nil
		})
	}
	err = g.Wait() // before last is read
	return last, err
}

// spot is a place in a partition: behind a sequence.
type spot struct {
	partition int
	after     uint64
}

// maxLookUps bounds how many messages are looked up at once. Under load each waits for the stream's disk, and they wait together.
const maxLookUps = 16

// nextAfter looks up the message that follows at each spot. Spots that none follows are left out.
func nextAfter(ctx context.Context, stream jetstream.Stream, cfg broker.Config, spots map[spot]bool) (map[spot]*jetstream.RawStreamMsg, error) {
	var mu sync.Mutex
	next := make(map[spot]*jetstream.RawStreamMsg)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxLookUps)
	for s := range spots {
		g.Go(func() error {
			raw, err := stream.GetMsg(ctx, s.after+1, jetstream.WithGetMsgSubject(event.PartitionFilter(cfg.Prefix, s.partition)))
			if errors.Is(err, jetstream.ErrMsgNotFound) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("look up what follows %d in %s: %w", s.after, event.PartitionKey(s.partition), err)
			}
			raw.Data, raw.Header = nil, nil
			mu.Lock()
			defer mu.Unlock()
			next[s] = raw
			return nil
		})
	}
	return next, g.Wait()
}

// behind is a partition with messages that are not applied: those from next on, and none of its messages between offset and next.
type behind struct {
	partition    int
	offset, next uint64
}

func (l *ConsumerLag) measure(ctx context.Context, js jetstream.JetStream, cfg broker.Config, offsets *[event.Partitions]uint64,
	next map[spot]*jetstream.RawStreamMsg) error {
	var lagging []behind
	for p, offset := range offsets {
		raw := next[spot{p, offset}]
		if raw == nil {
			l.idle = append(l.idle, p)
			continue
		}
		lagging = append(lagging, behind{p, offset, raw.Sequence})
		if l.oldest.IsZero() || raw.Time.Before(l.oldest) {
			l.oldest = raw.Time
		}
	}
	l.Partitions = len(lagging)
	if !l.oldest.IsZero() {
		l.Seconds = max(time.Since(l.oldest).Seconds(), 0)
	}
	for start, group := range groups(lagging) {
		n, err := count(ctx, js, cfg, start, group)
		if err != nil {
			return err
		}
		l.Messages += int64(n)
	}
	return nil
}

// groups puts together partitions whose messages from one common sequence on are just those that are not applied: the sequence
// is above each offset and not above each next message. One instance applies in stream order, so its partitions are one group.
func groups(lagging []behind) map[uint64][]int {
	slices.SortFunc(lagging, func(a, b behind) int { return int(int64(a.next) - int64(b.next)) })
	all := make(map[uint64][]int)
	for len(lagging) > 0 {
		start := lagging[0].next
		var rest []behind
		for _, b := range lagging {
			if b.offset < start {
				all[start] = append(all[start], b.partition)
			} else {
				rest = append(rest, b)
			}
		}
		lagging = rest
	}
	return all
}

// count asks the stream how many messages some partitions have from start on, through a consumer that reads none.
func count(ctx context.Context, js jetstream.JetStream, cfg broker.Config, start uint64, partitions []int) (uint64, error) {
	filters := make([]string, len(partitions))
	for i, p := range partitions {
		filters[i] = event.PartitionFilter(cfg.Prefix, p)
	}
	consumer, err := js.CreateConsumer(ctx, cfg.Stream, jetstream.ConsumerConfig{
		FilterSubjects: filters, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: start,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, HeadersOnly: true, InactiveThreshold: inactiveThreshold,
	})
	if err != nil {
		return 0, fmt.Errorf("count from %d: %w", start, err)
	}
	info := consumer.CachedInfo()
	if err := js.DeleteConsumer(ctx, cfg.Stream, info.Name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return 0, fmt.Errorf("count from %d: remove the consumer: %w", start, err)
	}
	return info.NumPending, nil
}

// lagClock turns looks at the lag into seconds at any time: a message that was not applied keeps ageing between looks, and when
// looks fail for long the lag is at least the time since the last one, for nothing is known to have been applied.
type lagClock struct {
	stale time.Duration

	mu     sync.Mutex
	looked time.Time
	oldest time.Time // zero when everything was applied
}

func (l *lagClock) start(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looked = now
}

func (l *lagClock) set(now, oldest time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looked, l.oldest = now, oldest
}

func (l *lagClock) seconds(now time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lag time.Duration
	if !l.oldest.IsZero() {
		lag = now.Sub(l.oldest)
	}
	if unseen := now.Sub(l.looked); !l.looked.IsZero() && unseen > l.stale {
		lag = max(lag, unseen)
	}
	return max(lag.Seconds(), 0)
}

// watchLag keeps the lag metrics up to date, whether or not this instance consumes anything.
func (c *Consumer) watchLag(ctx context.Context) {
	tick := time.NewTicker(c.cfg.LagInterval)
	defer tick.Stop()
	for {
		if err := c.lookAtLag(ctx); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "measuring the lag, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (c *Consumer) lookAtLag(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.deps.Broker.Timeout)
	defer cancel()
	now := time.Now()
	all, err := Lag(ctx, c.deps.Pool, c.deps.JetStream, c.deps.Broker, c.name)
	if err != nil {
		return err
	}
	c.metrics.lagMessages.Set(float64(all[0].Messages))
	c.metrics.deadLetters.Set(float64(all[0].DeadLetters))
	c.lag.set(now, all[0].oldest)
	return confirm(ctx, c.deps.Pool, c.name, all[0].idle, all[0].at)
}
