package replay

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
)

// streamState is which stream there is, and what it has.
type streamState struct {
	name        string
	created     time.Time // to the microsecond, as offsets have it
	generation  int64
	first, last uint64
	messages    uint64
	erasedFirst bool // all that is missing at its beginning was erased
}

func readStream(ctx context.Context, js jetstream.JetStream, cfg broker.Config) (s streamState, err error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	stream, err := js.Stream(ctx, cfg.Stream)
	if err != nil {
		return s, fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	info := stream.CachedInfo()
	s = streamState{
		name: cfg.Stream, created: info.Created.UTC().Truncate(time.Microsecond), generation: 1,
		first: info.State.FirstSeq, last: info.State.LastSeq, messages: info.State.Msgs,
	}
	s.erasedFirst = s.first > 1 && broker.ErasedAll(info.Config.Metadata, 1, s.first-1)
	if text := info.Config.Metadata[broker.MetaGeneration]; text != "" {
		if s.generation, err = strconv.ParseInt(text, 10, 64); err != nil {
			return s, fmt.Errorf("the generation of stream %s is %.80q", cfg.Stream, text)
		}
	}
	return s, nil
}

func (s streamState) sameAs(other streamState) bool {
	return s.created.Equal(other.created) && s.generation == other.generation
}

// missing says why the stream may lack events that once were on it, and that were not erased. A partition whose history has expired starts as one that is
// new, so only the stream's first sequence proves anything; and a repair brings back what the outbox still has, no more.
func (s streamState) missing() string {
	switch {
	case s.generation != 1:
		return fmt.Sprintf("stream %s was repaired: it is of generation %d", s.name, s.generation)
	case s.first > 1 && !s.erasedFirst:
		return fmt.Sprintf("stream %s begins at %d", s.name, s.first)
	}
	return ""
}

func (s streamState) choose(want Source) (Source, string, error) {
	missing := s.missing()
	switch {
	case want == Truth:
		return Truth, "as asked for", nil
	case want != Auto && want != Stream:
		return "", "", fmt.Errorf("replay from %q: want %s, %s or %s", want, Stream, Truth, Auto)
	case missing == "":
		return Stream, fmt.Sprintf("stream %s has every event", s.name), nil
	case want == Stream:
		return "", "", fmt.Errorf("replay from the stream: %s, so that events may be missing; replay from the truth", missing)
	}
	return Truth, missing, nil
}

// tails returns the sequence of each partition's last message. One whose messages have all expired ends where the truth says that
// it was published to: the next message will name that as the one before it.
func (r *replay) tails(ctx context.Context) (all [event.Partitions]uint64, err error) {
	for p := range all { // first, so that what is published meanwhile is on the stream
		tail, generation, err := outbox.Tail(ctx, r.deps.Truth, p)
		if err != nil {
			return all, err
		}
		if generation == r.stream.generation {
			all[p] = tail
		}
	}
	stream, err := r.lookUpStream(ctx)
	if err != nil {
		return all, err
	}
	for p := range all {
		if all[p], err = r.lastOf(ctx, stream, p, all[p]); err != nil {
			return all, err
		}
	}
	return all, nil
}

func (r *replay) lookUpStream(ctx context.Context) (jetstream.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, r.deps.Broker.Timeout)
	defer cancel()
	stream, err := r.deps.JetStream.Stream(ctx, r.deps.Broker.Stream)
	if err != nil {
		return nil, fmt.Errorf("look up stream %s: %w", r.deps.Broker.Stream, err)
	}
	return stream, nil
}

// lastOf returns the sequence of a partition's last message, or none when the stream has no message of it. The timeout is for one answer:
// a busy broker gives all of them, though not all of them in that time.
func (r *replay) lastOf(ctx context.Context, stream jetstream.Stream, p int, none uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, r.deps.Broker.Timeout)
	defer cancel()
	raw, err := stream.GetLastMsgForSubject(ctx, event.PartitionFilter(r.deps.Broker.Prefix, p))
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return none, nil
	}
	if err != nil {
		return none, fmt.Errorf("look up the last message of %s: %w", event.PartitionKey(p), err)
	}
	return raw.Sequence, nil
}

// setOffsetsSQL says from where the new tables follow the stream.
// Locks: none but the new rows.
const setOffsetsSQL = `
INSERT /* replay.set_offsets */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, generation, stream_created)
SELECT @consumer, t.key, t.tail, @generation, @created FROM unnest(@keys::text[], @tails::bigint[]) AS t(key, tail)`

// setOffsets starts at the beginning of the stream, or, from the truth, at where each partition ends before the truth is read:
// whatever changes the truth later is on the stream after that, and what is in both changes nothing twice.
func (r *replay) setOffsets(ctx context.Context, from Source) error {
	var ends [event.Partitions]uint64
	if from == Truth {
		var err error
		if ends, err = r.tails(ctx); err != nil {
			return err
		}
	}
	keys, seqs := partitionArgs(ends)
	if _, err := r.pool.Exec(ctx, setOffsetsSQL, pgx.StrictNamedArgs{
		"consumer": r.name + suffix, "keys": keys, "tails": seqs, "generation": r.stream.generation, "created": r.stream.created,
	}); err != nil {
		return fmt.Errorf("set the first offsets of the new tables: %w", err)
	}
	return nil
}

func partitionArgs(seqs [event.Partitions]uint64) (keys []string, values []int64) {
	for p, seq := range seqs {
		keys, values = append(keys, event.PartitionKey(p)), append(values, int64(seq))
	}
	return keys, values
}

// The bounds of a batch of the truth's entities.
const (
	truthEvents = 4000
	truthBytes  = 8 << 20
)

// readTruth applies the truth's entities, the next batch being read while the database works on one.
func (r *replay) readTruth(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	batches := make(chan []event.Event)
	g.Go(func() error {
		defer close(batches)
		var batch []event.Event
		size := 0
		send := func() error {
			select {
			case batches <- batch:
				batch, size = nil, 0
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		for e, err := range r.p.Truth(ctx, r.deps.Truth) {
			if err != nil {
				return err
			}
			batch = append(batch, e)
			if size += len(e.Payload); len(batch) == truthEvents || size >= truthBytes {
				if err := send(); err != nil {
					return err
				}
			}
		}
		if len(batch) == 0 {
			return nil
		}
		return send()
	})
	g.Go(func() error {
		for batch := range batches {
			if err := postgres.InTx(ctx, r.pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return r.p.Apply(ctx, tx, batch) }); err != nil {
				return fmt.Errorf("apply %d entities of the truth to %s: %w", len(batch), r.name, err)
			}
			r.events.Add(int64(len(batch)))
			r.opts.Progress(Progress{Step: "reading the truth", Done: r.events.Load()})
			r.opts.at(ctx, "page")
		}
		return nil
	})
	return g.Wait()
}
