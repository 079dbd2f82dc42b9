package consumers

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
)

// ConsumerLag is how far a consumer, all its instances together, is behind the streams.
type ConsumerLag struct {
	Consumer    string    `json:"consumer"`
	Messages    int64     `json:"lag_messages"`           // on the streams and not applied, those included that were deleted since
	Seconds     float64   `json:"lag_seconds"`            // since the oldest of them was stored, by the servers' clocks
	Partitions  int       `json:"lag_partitions"`         // that have any
	DeadLetters int64     `json:"dead_letters"`           // maxDeadLetters means at least so many
	AsOf        time.Time `json:"as_of"`                  // everything on the streams up to then is applied; zero while nothing is known
	Lost        []string  `json:"lost_streams,omitempty"` // that are gone, or are not those that the consumer has read: it is behind by an unknown number
}

// maxDeadLetters bounds the count of dead letters.
const maxDeadLetters = 10000

// deadLettersSQL counts the dead letters of one consumer, up to a bound.
// Index: consumer_dead_letters_aggregate_idx.   Locks: none.
const deadLettersSQL = `
SELECT /* consumers.dead_letters */ count(*) FROM (SELECT FROM consumer_dead_letters WHERE consumer_name = @consumer LIMIT @most) d`

func countDeadLetters(ctx context.Context, pool *pgxpool.Pool, consumer string) (n int64, err error) {
	err = pool.QueryRow(ctx, deadLettersSQL, pgx.StrictNamedArgs{"consumer": consumer, "most": maxDeadLetters}).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count the dead letters of %s: %w", consumer, err)
	}
	return n, nil
}

// Lag returns how far the named consumers are behind the streams, in their order; without names, every consumer that has
// offsets, by name. It is 0 messages exactly when all that was on the streams has been applied: the offsets are read first, then
// what the leaders say of the streams, so that what is applied meanwhile can only make it too high. It asks the database and the
// leaders, never a running consumer, so it is right when none runs; while a stream has no leader it returns broker.ErrNoLeader. The pool
// is the projections' and acts as the system role. Offsets of other cells, whose streams have names that are not cfg's, are not counted.
func Lag(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config, names ...string) ([]ConsumerLag, error) {
	offsets, err := readOffsets(ctx, pool, names...)
	if err != nil {
		return nil, err
	}
	for _, of := range offsets {
		maps.DeleteFunc(of, func(stream string, _ offset) bool {
			_, ours := cfg.Number(stream)
			return !ours
		})
	}
	streams, err := broker.Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(offsets))
	}
	all := make([]ConsumerLag, len(names))
	for i, name := range names {
		l := &all[i]
		l.Consumer = name
		if at := asOf(offsets[name]); at.Unix() > 0 {
			l.AsOf = at
		}
		if l.DeadLetters, err = countDeadLetters(ctx, pool, name); err != nil {
			return nil, err
		}
		if err := l.measure(ctx, js, offsets[name], streams); err != nil {
			return nil, fmt.Errorf("measure the lag of %s: %w", name, err)
		}
	}
	return all, nil
}

func (l *ConsumerLag) measure(ctx context.Context, js jetstream.JetStream, offsets map[string]offset, streams []broker.Stream) error {
	now := time.Now()
	there := make(map[string]bool)
	for _, s := range streams {
		there[s.Name] = true
		now = s.At
		o := offsets[s.Name]
		if o.Closed {
			continue
		}
		if lost(o, s) != nil {
			l.Lost = append(l.Lost, s.Name)
			continue
		}
		n, age, _, err := behind(ctx, js, s, o.Seq)
		if err != nil {
			return err
		}
		if n > 0 {
			l.Messages += n
			l.Partitions++
			l.Seconds = max(l.Seconds, age.Seconds())
		}
	}
	for _, name := range slices.Sorted(maps.Keys(offsets)) {
		if !there[name] && !offsets[name].Closed {
			l.Lost = append(l.Lost, name)
		}
	}
	for _, name := range l.Lost {
		l.Messages++ // at least
		l.Partitions++
		l.Seconds = max(l.Seconds, now.Sub(offsets[name].AsOf).Seconds())
	}
	return nil
}

// behind returns how many messages of a stream lie behind an offset, and how old the first of them was when the stream was described.
// Messages that were deleted since count; found says that there is one that was not.
func behind(ctx context.Context, js jetstream.JetStream, s broker.Stream, offset uint64) (n int64, age time.Duration, found bool, err error) {
	if offset >= s.Last {
		return 0, 0, false, nil
	}
	next, err := broker.Next(ctx, js, s.Name, offset+1)
	if err != nil {
		return 0, 0, false, err
	}
	if next != nil {
		age = max(s.At.Sub(next.Time), 1)
	}
	return int64(s.Last - offset), age, next != nil, nil
}

// lost says why an offset means nothing on the stream of today; nil when it does.
func lost(o offset, s broker.Stream) error {
	switch {
	case o.Stream != "" && o.Created.UnixMicro() != 0 && !o.Created.Equal(s.Created):
		return fmt.Errorf("stream %s was recreated at %s, the offset %d belongs to the one of %s", s.Name, s.Created.Format(time.RFC3339Nano), o.Seq,
			o.Created.UTC().Format(time.RFC3339Nano))
	case o.Seq > s.Last:
		return fmt.Errorf("stream %s ends at %d, below the offset %d: it has lost events", s.Name, s.Last, o.Seq)
	}
	return nil
}

// lagClock turns looks at the lag into seconds at any time: a message that was not applied keeps ageing between looks. While a stream
// cannot be seen the lag is at least the time since all were, for nothing is known to have been applied; and so it is
// when looks have stopped coming.
type lagClock struct {
	stale time.Duration

	mu     sync.Mutex
	looked time.Time // when all streams were last seen
	oldest time.Time // zero when everything was applied
	blind  bool
}

func (l *lagClock) start(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looked = now
}

// set notes a look at a time, by this process's clock, and how old the oldest message was then.
func (l *lagClock) set(now time.Time, age time.Duration, blind bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blind, l.oldest = blind, time.Time{}
	if age > 0 {
		l.oldest = now.Add(-age)
	}
	if !blind {
		l.looked = now
	}
}

func (l *lagClock) fail() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blind = true
}

func (l *lagClock) seconds(now time.Time) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var lag time.Duration
	if !l.oldest.IsZero() {
		lag = now.Sub(l.oldest)
	}
	if unseen := now.Sub(l.looked); !l.looked.IsZero() && (l.blind || unseen > l.stale) {
		lag = max(lag, unseen)
	}
	return max(lag.Seconds(), 0)
}
