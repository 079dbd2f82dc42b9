package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// ErrUnknownMessages reports messages on the stream that have no row: this database went back in time, and they tell of writes
// that it no longer has. Nothing was repaired; RepairOptions.DeleteUnknown takes them off the stream.
var ErrUnknownMessages = errors.New("relay: the stream holds messages of writes that this database no longer has")

// RepairOptions say what a repair may do.
type RepairOptions struct {
	DryRun        bool // only look
	DeleteUnknown bool // take messages without a row off the stream
	DeleteForeign bool // take messages that no relay wrote off the stream
}

// RepairReport says what a repair found and did.
type RepairReport struct {
	Stream     string         `json:"stream"`
	MadeAnew   bool           `json:"made_anew"`  // it is not the stream that this database published to
	Healthy    bool           `json:"healthy"`    // nothing was to be done
	Repaired   bool           `json:"repaired"`   // the rest was done
	Generation int64          `json:"generation"` // of the stream afterwards
	Messages   int64          `json:"messages"`   // on the stream
	Marked     int64          `json:"marked"`     // rows that now say where their message is
	Republish  int64          `json:"republish"`  // rows whose message is missing: the relay publishes them again
	Unknown    int64          `json:"unknown"`    // messages without a row
	Foreign    int64          `json:"foreign"`    // messages that no relay wrote: everybody skips them
	Duplicates int64          `json:"duplicates"` // messages of an event that an earlier one has: the first counts
	Behind     int            `json:"behind"`     // partitions whose last messages are gone: their marks move back
	Deleted    int64          `json:"deleted"`    // of the unknown and the foreign ones
	Created    time.Time      `json:"created"`    // when the stream was made
	Tails      map[int]uint64 `json:"-"`          // last sequence of each partition, for the consumers' offsets
}

// Repair makes the stream and the database agree again, from what the rows say: messages that are missing are published again by
// the relays, in their order, under a new generation. Erased rows never are. It may run while relays do, and may be repeated
// after it was interrupted at any point: relays refuse the stream until it is done.
func Repair(ctx context.Context, pool *pgxpool.Pool, cfg broker.Config, log *slog.Logger, o RepairOptions) (_ RepairReport, err error) {
	nc, err := broker.Connect(cfg, "repair", log)
	if err != nil {
		return RepairReport{}, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return RepairReport{}, err
	}
	// First without touching anything: a stream that is well stays as it is.
	p := repairer{pool: pool, cfg: cfg, js: js}
	report, err := p.pass(ctx, o, true)
	if err != nil || report.Healthy || o.DryRun {
		return report, err
	}
	// Then for good: relays of the old generation can no longer mark, and end.
	report.Generation++
	if err := outbox.Fence(ctx, pool, report.Generation); err != nil {
		return report, err
	}
	p.generation = report.Generation
	return p.pass(ctx, o, false)
}

type repairer struct {
	pool       *pgxpool.Pool
	cfg        broker.Config
	js         jetstream.JetStream
	generation int64
}

// pass reads the whole stream, compares, and unless it only looks, repairs.
func (p *repairer) pass(ctx context.Context, o RepairOptions, look bool) (report RepairReport, err error) {
	report.Stream = p.cfg.Stream
	bound, marks, known, err := outbox.BoundStream(ctx, p.pool)
	if err != nil {
		return report, err
	}
	stream, err := p.js.Stream(ctx, p.cfg.Stream)
	gone := errors.Is(err, jetstream.ErrStreamNotFound)
	if gone && look {
		stream, err = nil, nil
	} else if gone {
		stream, err = broker.EnsureStream(ctx, p.js, p.cfg)
	}
	if err != nil {
		return report, fmt.Errorf("look up stream %s: %w", p.cfg.Stream, err)
	}
	var info jetstream.StreamInfo
	streamGeneration := int64(0)
	if stream != nil {
		info = *stream.CachedInfo()
		if streamGeneration, err = strconv.ParseInt(info.Config.Metadata[broker.MetaGeneration], 10, 64); err != nil {
			return report, fmt.Errorf("%w: stream %s has no generation in its metadata", broker.ErrStreamShape, p.cfg.Stream)
		}
	}
	report.Created = info.Created.UTC().Truncate(time.Microsecond)
	report.MadeAnew = !known || stream == nil || bound.Name != p.cfg.Stream || !bound.Created.Equal(report.Created)
	report.Generation = max(bound.Generation, streamGeneration, p.generation)
	first := info.State.FirstSeq
	if report.MadeAnew {
		first = 0
	}

	r, err := outbox.BeginRepair(ctx, p.pool)
	if err != nil {
		return report, err
	}
	defer func() { err = errors.Join(err, r.Close(ctx)) }()
	strays, err := p.read(ctx, stream, info.State, r)
	if err != nil {
		return report, err
	}
	report.Foreign = int64(len(strays))
	if o.DeleteForeign && !o.DryRun { // no row tells of them, and no tail or offset names them
		if report.Deleted, err = p.deleteForeign(ctx, strays); err != nil {
			return report, err
		}
	}
	found, err := r.Compare(ctx, first)
	if err != nil {
		return report, err
	}
	report.Tails = r.Tails()
	report.Messages, report.Marked, report.Republish, report.Unknown = found.Messages, found.Unmarked, found.Missing, found.UnknownOf
	report.Duplicates = found.Duplicates
	if !report.MadeAnew {
		for partition, mark := range marks { // as they were before the stream was read
			if report.Tails[partition] < mark && mark >= first { // it has not expired, so somebody deleted it
				report.Behind++
			}
		}
	}
	// Rows that are on the stream and not marked are a catch-up's everyday work.
	report.Healthy = !report.MadeAnew && bound.Generation == streamGeneration && p.generation == 0 && found.Missing == 0 && found.UnknownOf == 0 && report.Behind == 0
	if report.Healthy || look && (o.DryRun || found.UnknownOf == 0 || o.DeleteUnknown) {
		return report, nil
	}
	if found.UnknownOf > 0 {
		if !o.DeleteUnknown {
			return report, fmt.Errorf("%w: %d of %d, the first at %d; --delete-unknown takes them off the stream", ErrUnknownMessages, found.UnknownOf, found.Messages, found.Unknown[0])
		}
		if err := r.UnknownSeqs(ctx, func(seq uint64) error {
			if err := stream.DeleteMsg(ctx, seq); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
				return fmt.Errorf("delete message %d: %w", seq, err)
			}
			report.Deleted++
			return nil
		}); err != nil {
			return report, err
		}
	}
	if err := r.Apply(ctx, first, outbox.Stream{Name: p.cfg.Stream, Created: report.Created, Generation: report.Generation}); err != nil {
		return report, err
	}
	report.Tails = r.Tails()
	// Last, because relays go on once both say the same.
	generation := strconv.FormatInt(report.Generation, 10)
	if err := broker.SetMetadata(ctx, p.js, stream, broker.MetaGeneration, func(string) string { return generation }); err != nil {
		return report, fmt.Errorf("begin generation %d of stream %s: %w", report.Generation, p.cfg.Stream, err)
	}
	report.Repaired = true
	return report, nil
}

// deleteForeign takes messages off the stream, some at a time.
func (p *repairer) deleteForeign(ctx context.Context, strays []broker.Doomed) (deleted int64, err error) {
	for some := range slices.Chunk(strays, 1000) {
		n, err := broker.Erase(ctx, p.js, p.cfg, some)
		deleted += int64(n)
		if err != nil {
			return deleted, err
		}
	}
	return deleted, nil
}

// read hands every message of the stream to r, and returns the foreign ones.
func (p *repairer) read(ctx context.Context, stream jetstream.Stream, state jetstream.StreamState, r *outbox.Repair) (strays []broker.Doomed, err error) {
	if stream == nil || state.Msgs == 0 {
		return nil, nil
	}
	consumer, err := p.js.OrderedConsumer(ctx, p.cfg.Stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverAllPolicy, HeadersOnly: true, InactiveThreshold: time.Minute,
	})
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", p.cfg.Stream, err)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(5000), jetstream.PullHeartbeat(time.Second), jetstream.PullExpiry(5*time.Second))
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", p.cfg.Stream, err)
	}
	defer messages.Stop()
	for seq, pending := uint64(0), uint64(1); pending > 0 && seq < state.LastSeq; {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("read stream %s after %d: %w", p.cfg.Stream, seq, err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s after %d: %w", p.cfg.Stream, seq, err)
		}
		seq, pending = meta.Sequence.Stream, meta.NumPending
		if !event.Ours(m.Headers()) {
			strays = append(strays, broker.Doomed{Seq: seq, MsgID: m.Headers().Get(event.HeaderMsgID)})
			continue
		}
		e, err := event.Decode(m.Subject(), m.Headers(), nil)
		if err != nil && e.Partition == 0 && !strings.HasPrefix(m.Subject(), p.cfg.Prefix+"."+event.PartitionKey(0)+".") {
			return nil, fmt.Errorf("message %d of stream %s has our headers on the subject %.200q: take it off by hand: %w", seq, p.cfg.Stream, m.Subject(), err)
		}
		if err := r.Saw(ctx, outbox.OnStream{Seq: seq, Partition: e.Partition, ID: e.OutboxID, EventID: e.ID}); err != nil {
			return nil, err
		}
	}
	return strays, nil
}
