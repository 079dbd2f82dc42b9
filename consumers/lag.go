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

// ConsumerLag is the distance of a consumer, with all its instances, behind the streams.
type ConsumerLag struct {
	Consumer    string    `json:"consumer"`
	Messages    int64     `json:"lag_messages"`   // on the streams and not applied, including messages deleted since
	Seconds     float64   `json:"lag_seconds"`    // since the oldest of them was stored, by the NATS servers' clocks
	Partitions  int       `json:"lag_partitions"` // partitions with such messages
	DeadLetters int64     `json:"dead_letters"`   // maxDeadLetters means that many or more
	AsOf        time.Time `json:"as_of"`          // everything stored up to then is applied; zero before the first run
	// Lost are streams that are gone, or are not those that the consumer has read: it is behind by
	// an unknown number.
	Lost []string `json:"lost_streams,omitempty"`
}

// maxDeadLetters bounds the count of dead letters.
const maxDeadLetters = 10000

// deadLettersSQL counts the dead letters of one consumer, up to a bound.
// Index: consumer_dead_letters_aggregate_idx. Locks: none.
const deadLettersSQL = `
SELECT /* consumers.dead_letters */ count(*) FROM (SELECT FROM consumer_dead_letters WHERE consumer_name = @consumer LIMIT @most) d`

func countDeadLetters(ctx context.Context, pool *pgxpool.Pool, consumer string) (n int64, err error) {
	err = pool.QueryRow(ctx, deadLettersSQL, pgx.StrictNamedArgs{"consumer": consumer, "most": maxDeadLetters}).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count the dead letters of %s: %w", consumer, err)
	}
	return n, nil
}

// Lag returns how far the named consumers are behind the streams, in the order of names. Without
// names it returns every consumer that has offsets, by name.
//
// The lag is 0 messages exactly when the consumer has applied everything on the streams. Lag reads
// the offsets first and then the leaders' descriptions of the streams, so events that are applied
// meanwhile can only make the result too high. It reads the database and the leaders, never a
// running consumer, so it is right when no consumer runs. While a stream has no leader, it returns
// broker.ErrNoLeader. The pool is the projections' and acts as the system role. Lag ignores offsets
// of other cells, whose streams do not have cfg's name.
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
		reason, err := lost(ctx, js, o, s)
		if err != nil {
			return err
		}
		if reason != nil {
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

// behind returns the number of messages of a stream after an offset, and the age of the first of
// them at s.At. The number includes messages that were deleted since. found reports that at least
// one still exists.
func behind(ctx context.Context, js jetstream.JetStream, s broker.Stream,
	offset uint64) (n int64, age time.Duration, found bool, err error) {
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

// lost returns the reason why an offset does not fit the current stream, or nil if it fits. err
// means that the stream's leader did not answer.
//
// A stream that lost its end and has grown again has another message at the offset, stored at
// another time. The time identifies the message. The event's ID does not: the same event may have
// its old sequence again behind events that the consumer has not read. A message that is gone
// proves nothing: it was erased or has expired.
func lost(ctx context.Context, js jetstream.JetStream, o offset, s broker.Stream) (reason, err error) {
	switch {
	case o.Stream != "" && o.Created.UnixMicro() != 0 && !o.Created.Equal(s.Created):
		return fmt.Errorf("stream %s was recreated at %s; the offset %d belongs to the stream created at %s", s.Name,
			s.Created.Format(time.RFC3339Nano), o.Seq, o.Created.UTC().Format(time.RFC3339Nano)), nil
	case o.Seq > s.Last:
		return fmt.Errorf("stream %s ends at %d, below the offset %d: it has lost events", s.Name, s.Last, o.Seq), nil
	case o.Seq == 0 || o.Stored.Unix() <= 0:
		return nil, nil
	}
	m, err := broker.Next(ctx, js, s.Name, o.Seq)
	if err != nil || m == nil || m.Seq != o.Seq || m.Time.Truncate(time.Microsecond).Equal(o.Stored.Truncate(time.Microsecond)) {
		return nil, err
	}
	return fmt.Errorf("message %d of stream %s was stored at %s, and the one that the consumer applied at %s: it has lost events", o.Seq,
		s.Name, m.Time.UTC().Format(time.RFC3339Nano), o.Stored.UTC().Format(time.RFC3339Nano)), nil
}

// lagClock computes the lag in seconds at any time: a message that is not applied continues to age
// between two measurements. While a stream cannot be read, the lag is at least the time since all
// streams were read, because no progress is known. The same applies when no measurement has come
// for longer than stale.
type lagClock struct {
	stale time.Duration

	mu     sync.Mutex
	readAt time.Time // when all streams were last read
	oldest time.Time // zero when everything was applied
	blind  bool
}

func (l *lagClock) start(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.readAt = now
}

// set records a measurement: its time by this process's clock, and the age of the oldest message at
// that time. blind means that at least one stream could not be read.
func (l *lagClock) set(now time.Time, age time.Duration, blind bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blind, l.oldest = blind, time.Time{}
	if age > 0 {
		l.oldest = now.Add(-age)
	}
	if !blind {
		l.readAt = now
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
	if unseen := now.Sub(l.readAt); !l.readAt.IsZero() && (l.blind || unseen > l.stale) {
		lag = max(lag, unseen)
	}
	return max(lag.Seconds(), 0)
}
