package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
)

// position is where a partition stands after a catch-up.
type position struct {
	tail   uint64 // what outbox_partitions says: the last sequence that was published
	expect uint64 // what the tail check must name: the same, 0 once that message has expired, or that of a foreign message behind it
}

// catchUp reads what the stream holds of the partition after the stored tail, marks those rows, and returns where the
// partition stands. It is run before the first claim of a partition and after anything but a plain ack.
func (s *session) catchUp(ctx context.Context, partition int) (position, error) {
	s.metrics.catchUps.Inc()
	filter := event.PartitionFilter(s.broker.Prefix, partition)
	tail, generation, err := s.tail(ctx, partition)
	if err != nil {
		return position{}, err
	}
	if generation != s.generation {
		return position{}, fmt.Errorf("%w: partition %d is of generation %d, this session of %d", errRepaired, partition, generation, s.generation)
	}
	state, err := s.stateOf(ctx, filter)
	if err != nil {
		return position{}, err
	}
	switch {
	case state.last == tail:
		return position{tail, tail}, nil
	case state.last < tail && tail >= state.first:
		return position{}, fmt.Errorf("%w: partition %d ends at %d, its marks at %d", ErrStreamRefused, partition, state.last, tail)
	case state.last < tail: // the last message has expired, and the stream says 0 for the partition
		return position{tail, state.last}, nil
	}
	s.at("catch-up")
	if tail, err = s.markFrom(ctx, filter, partition, tail, state.last); err != nil {
		return position{}, err
	}
	return position{tail, state.last}, nil
}

func (s *session) tail(ctx context.Context, partition int) (tail uint64, generation int64, err error) {
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	return outbox.Tail(ctx, s.pool, partition)
}

func (s *session) markOne(ctx context.Context, m outbox.Mark) (held outbox.Marked, err error) {
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	return outbox.MarkPublished(ctx, s.pool, s.generation, []outbox.Mark{m})
}

// errTailMoved reports that another relay moved the stored tail meanwhile: the catch-up begins again.
var errTailMoved = errors.New("relay: the stored tail moved during the catch-up")

// errRepaired reports that the stream is being repaired, or was: the session ends, and the next one begins with what is true then.
var errRepaired = errors.New("relay: the stream was repaired meanwhile")

// markFrom marks the rows whose messages stand after tail up to last, in bounded steps, and returns the new tail. A foreign message moves
// no tail: Tidings-Prev goes on to name events alone, and whoever takes it off the stream again harms nothing.
func (s *session) markFrom(ctx context.Context, filter string, partition int, tail, last uint64) (uint64, error) {
	consumer, err := s.js.OrderedConsumer(ctx, s.broker.Stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: tail + 1,
		HeadersOnly: true, InactiveThreshold: 30 * time.Second, NamePrefix: fmt.Sprintf("relay-catchup-p%02d-%d", partition, time.Now().UnixNano()),
	})
	if err != nil {
		return 0, fmt.Errorf("read partition %d from %d: %w", partition, tail+1, err)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(s.cfg.BatchSize), jetstream.PullExpiry(5*time.Second), jetstream.PullHeartbeat(time.Second))
	if err != nil {
		return 0, fmt.Errorf("read partition %d from %d: %w", partition, tail+1, err)
	}
	defer messages.Stop()
	m := outbox.Mark{Partition: partition, OldTail: tail, NewTail: tail}
	var strays []uint64
	for read := tail; read < last; {
		msg, err := next(ctx, messages, s.cfg.PublishTimeout)
		if err != nil {
			return 0, fmt.Errorf("read partition %d after %d: %w", partition, read, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return 0, fmt.Errorf("read partition %d after %d: %w", partition, read, err)
		}
		read = meta.Sequence.Stream
		if event.Ours(msg.Headers()) {
			e, _ := event.Decode(msg.Subject(), msg.Headers(), nil) // a damaged one is published all the same
			m.NewTail, m.Rows = read, append(m.Rows, outbox.Published{ID: e.OutboxID, EventID: e.ID, Seq: read})
		} else {
			strays = append(strays, read)
		}
		if len(m.Rows) == 0 || len(m.Rows) < s.cfg.BatchSize && read < last {
			continue
		}
		done, err := s.markOne(ctx, m)
		switch {
		case errors.Is(err, outbox.ErrRowsMissing):
			return 0, fmt.Errorf("%w: %w", ErrStreamRefused, err)
		case err != nil:
			return 0, err
		case len(done.Held) == 0:
			return 0, errTailMoved
		}
		s.doubled(ctx, done.Duplicates)
		s.metrics.caughtUp.Add(float64(len(m.Rows) - done.Duplicates))
		m = outbox.Mark{Partition: partition, OldTail: m.NewTail, NewTail: m.NewTail, Rows: m.Rows[:0]}
	}
	s.strayed(ctx, partition, strays)
	return m.NewTail, nil
}

// strayed counts the foreign messages of a partition that this relay has not counted yet.
func (s *session) strayed(ctx context.Context, partition int, seqs []uint64) {
	i, _ := slices.BinarySearch(seqs, s.strays[partition]+1)
	if seqs = seqs[i:]; len(seqs) == 0 {
		return
	}
	s.strays[partition] = seqs[len(seqs)-1]
	s.metrics.foreign[event.Foreign].Add(float64(len(seqs)))
	s.log.WarnContext(ctx, "skipped messages that no relay wrote; `tidings repair stream --delete-foreign` takes them off", "stream", s.broker.Stream,
		"partition", partition, "messages", len(seqs), "first", seqs[0], "last", seqs[len(seqs)-1])
}

// doubled counts messages of events that are on the stream already.
func (s *session) doubled(ctx context.Context, n int) {
	if n > 0 {
		s.metrics.foreign[event.Duplicate].Add(float64(n))
		s.log.WarnContext(ctx, "skipped messages of events that the stream holds already: the first one counts", "stream", s.broker.Stream, "messages", n)
	}
}

// next returns the next message, or an error after the timeout: an ordered consumer that misses its server tries for ever.
func next(ctx context.Context, messages jetstream.MessagesContext, timeout time.Duration) (jetstream.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return messages.Next(jetstream.NextContext(ctx))
}
