package replay

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
)

// streamsState describes the streams and their contents.
type streamsState struct {
	all      []broker.Stream // by partition
	messages uint64
	missing  string // why they may lack published events that were not erased; empty if they have every event
}

// readStreams returns an error if a stream of the known partitions is gone, unless the partition is
// closed.
func readStreams(ctx context.Context, js jetstream.JetStream, cfg broker.Config, known []outbox.Partition) (s streamsState, err error) {
	if s.all, err = broker.Streams(ctx, js, cfg); err != nil {
		return s, err
	}
	for _, p := range known {
		if !p.Closed && p.Stream != "" && !slices.ContainsFunc(s.all, func(s broker.Stream) bool { return s.Number == p.Number }) {
			return s, fmt.Errorf("stream %s is gone: run `tidings repair stream --dry-run` first", p.Stream)
		}
	}
	if len(s.all) == 0 {
		return s, fmt.Errorf("no stream of %s exists: start a relay, which creates it", cfg.Stream)
	}
	there, held := make(map[int]bool), make(map[int]bool)
	for _, stream := range s.all {
		s.messages += stream.Messages
		there[stream.Number] = true
		for slot := stream.FirstSlot; slot <= stream.LastSlot; slot++ {
			held[slot] = true
		}
	}
	if len(held) < event.Slots {
		return s, fmt.Errorf("only %d of %d slots have a stream, so a stream is lost: run `tidings repair stream`", len(held), event.Slots)
	}
	for _, stream := range s.all {
		if s.missing, err = missing(ctx, js, cfg, stream, there); s.missing != "" || err != nil {
			return s, err
		}
	}
	return s, nil
}

// missing returns why a stream or its predecessors may lack events. A partition that replaces a
// lost one has only the events that the database still had.
func missing(ctx context.Context, js jetstream.JetStream, cfg broker.Config, s broker.Stream, there map[int]bool) (string, error) {
	if s.Repaired {
		return fmt.Sprintf("stream %s was lost, and %s replaces it", streamNames(cfg, s.After), s.Name), nil
	}
	for _, n := range s.After {
		if !there[n] {
			return fmt.Sprintf("stream %s, the predecessor of %s, is gone", cfg.StreamName(n), s.Name), nil
		}
	}
	if s.First <= 1 {
		return "", nil
	}
	erased, err := broker.Erased(ctx, js, cfg, s.Name, 1, s.First-1)
	if erased || err != nil {
		return "", err
	}
	return fmt.Sprintf("stream %s begins at %d", s.Name, s.First), nil
}

func streamNames(cfg broker.Config, partitions []int) string {
	var names []string
	for _, n := range partitions {
		names = append(names, cfg.StreamName(n))
	}
	return strings.Join(names, " and ")
}

// checkSame returns an error unless the streams are those from the beginning of the replay, and
// perhaps streams of a resize.
func (s streamsState) checkSame(now []broker.Stream) error {
	known := make(map[int]broker.Stream)
	for _, stream := range s.all {
		known[stream.Number] = stream
	}
	for _, stream := range now {
		before, is := known[stream.Number]
		if is && !before.Created.Equal(stream.Created) || !is && stream.Repaired {
			return fmt.Errorf("stream %s was recreated, or replaces a lost one, during the replay: run it again", stream.Name)
		}
		delete(known, stream.Number)
	}
	for _, stream := range known {
		return fmt.Errorf("stream %s was lost during the replay: run it again", stream.Name)
	}
	return nil
}

func (s streamsState) choose(want Source) (Source, string, error) {
	switch {
	case want == Truth:
		return Truth, "as requested", nil
	case want != Auto && want != Stream:
		return "", "", fmt.Errorf("replay from %q: want %s, %s or %s", want, Stream, Truth, Auto)
	case s.missing == "":
		return Stream, fmt.Sprintf("%s every event", has(s.all)), nil
	case want == Stream:
		return "", "", fmt.Errorf("replay from the stream: %s, so events may be missing; replay from the truth", s.missing)
	}
	return Truth, s.missing, nil
}

func has(all []broker.Stream) string {
	if len(all) == 1 {
		return "stream " + all[0].Name + " has"
	}
	return fmt.Sprintf("%d streams have", len(all))
}

// setOffsetsSQL creates the offsets from which the new tables follow the streams. Locks: only the
// new rows.
const setOffsetsSQL = `
INSERT /* replay.set_offsets */ INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created, closed)
SELECT @consumer, t.key, t.tail, t.at, t.created, t.closed
  FROM unnest(@keys::text[], @tails::bigint[], @ats::timestamptz[], @createds::timestamptz[], @closed::boolean[])
         AS t(key, tail, at, created, closed)`

// setOffsets makes the new tables follow each stream from its end before the truth is read. Later
// changes of the truth are on the streams after that end. An event whose change the truth already
// had changes nothing. A replay from the stream does not call setOffsets, so its consumer reads
// each stream from its beginning.
func (r *replay) setOffsets(ctx context.Context) error {
	now, err := broker.Streams(ctx, r.deps.JetStream, r.deps.Broker)
	if err != nil {
		return err
	}
	if err := r.streams.checkSame(now); err != nil {
		return err
	}
	args := streamArgs(now)
	args["consumer"] = r.name + suffix
	ats, closed := make([]time.Time, len(now)), make([]bool, len(now))
	for i, s := range now {
		if closed[i], err = broker.Ended(ctx, r.deps.JetStream, r.deps.Broker, s, now); err != nil {
			return err
		}
		ats[i] = s.At
	}
	args["ats"], args["closed"] = ats, closed
	if _, err := r.pool.Exec(ctx, setOffsetsSQL, args); err != nil {
		return fmt.Errorf("set the first offsets of the new tables: %w", err)
	}
	return nil
}

// streamArgs returns the names, last sequences and creation times of streams.
func streamArgs(all []broker.Stream) pgx.StrictNamedArgs {
	keys, tails, createds := make([]string, len(all)), make([]int64, len(all)), make([]time.Time, len(all))
	for i, s := range all {
		keys[i], tails[i], createds[i] = s.Name, int64(s.Last), s.Created
	}
	return pgx.StrictNamedArgs{"keys": keys, "tails": tails, "createds": createds}
}

// The bounds of a batch of the truth's entities.
const (
	truthEvents = 4000
	truthBytes  = 8 << 20
)

// readTruth applies the truth's entities. It reads the next batch while the database works on one.
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
