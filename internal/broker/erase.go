package broker

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// MetaErased names what was erased from the beginning of the stream: ranges of sequences, "1-4 11-12". A hole elsewhere speaks for itself,
// but what is missing at the beginning looks like what has expired, and whoever has not read that has missed events.
const MetaErased = "erased"

// maxErasedRanges bounds MetaErased. Ranges join where nothing has expired between them; the oldest go first.
const maxErasedRanges = 100

// Range is a range of sequences.
type Range struct{ First, Last uint64 }

// ErasedRanges are the sequences that were erased from the beginning of a stream with this metadata, rising.
func ErasedRanges(metadata map[string]string) (all []Range) {
	for _, field := range strings.Fields(metadata[MetaErased]) {
		var r Range
		if n, err := fmt.Sscanf(field, "%d-%d", &r.First, &r.Last); err == nil && n == 2 {
			all = append(all, r)
		}
	}
	return all
}

// ErasedAll reports whether all of the sequences from first to last were erased from the beginning of the stream.
func ErasedAll(metadata map[string]string, first, last uint64) bool {
	for _, r := range ErasedRanges(metadata) {
		if r.First <= first && last <= r.Last {
			return true
		}
	}
	return false
}

// Doomed is a message to erase, by its sequence and its Nats-Msg-Id: a sequence alone may name another message of another stream.
type Doomed struct {
	Seq   uint64
	MsgID string
}

// Erase takes messages off the stream and has the server overwrite them in its files. Messages that are not there, or are others, are left
// alone. It returns how many it erased. A server that encrypts its store does not overwrite. Cost: the server writes a message's file of up
// to 8 MiB anew for each.
func Erase(ctx context.Context, js jetstream.JetStream, cfg Config, messages []Doomed) (n int, err error) {
	if len(messages) == 0 {
		return 0, nil
	}
	stream, err := js.Stream(ctx, cfg.Stream)
	if err != nil {
		return 0, fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	doomed := make(map[uint64]bool, len(messages))
	for _, m := range messages {
		raw, err := stream.GetMsg(ctx, m.Seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("read message %d of stream %s: %w", m.Seq, cfg.Stream, err)
		}
		doomed[m.Seq] = raw.Header.Get(nats.MsgIdHdr) == m.MsgID
	}
	if err := noteHead(ctx, js, stream, cfg, doomed); err != nil { // before: afterwards nobody could tell
		return 0, err
	}
	for _, m := range messages {
		if !doomed[m.Seq] {
			continue
		}
		if err := stream.SecureDeleteMsg(ctx, m.Seq); err != nil {
			if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				if _, gone := stream.GetMsg(ctx, m.Seq); errors.Is(gone, jetstream.ErrMsgNotFound) {
					continue // it has expired meanwhile
				}
			}
			return n, fmt.Errorf("erase message %d of stream %s: %w", m.Seq, cfg.Stream, err)
		}
		n++
	}
	return n, nil
}

// noteHead adds to the stream's metadata what of the messages stands at its beginning.
func noteHead(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream, cfg Config, doomed map[uint64]bool) error {
	info, err := stream.Info(ctx)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", cfg.Stream, err)
	}
	first := info.State.FirstSeq
	next := first
	for doomed[next] {
		raw, err := stream.GetMsg(ctx, next+1, jetstream.WithGetMsgSubject(cfg.subjects()))
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			next = info.State.LastSeq + 1
		case err != nil:
			return fmt.Errorf("look up what follows %d in stream %s: %w", next, cfg.Stream, err)
		default:
			next = raw.Sequence
		}
	}
	if next == first {
		return nil
	}
	if err := SetMetadata(ctx, js, stream, MetaErased, func(old string) string { return addRange(old, Range{first, next - 1}) }); err != nil {
		return fmt.Errorf("note what is erased from the beginning of stream %s: %w", cfg.Stream, err)
	}
	return nil
}

// addRange adds a range, which begins where the stream does, to the text of MetaErased.
func addRange(text string, add Range) string {
	ranges := ErasedRanges(map[string]string{MetaErased: text})
	if n := len(ranges); n > 0 && ranges[n-1].Last+1 >= add.First {
		ranges[n-1].Last = max(ranges[n-1].Last, add.Last)
	} else {
		ranges = append(ranges, add)
	}
	ranges = ranges[max(0, len(ranges)-maxErasedRanges):]
	var all []string
	for _, r := range ranges {
		all = append(all, fmt.Sprintf("%d-%d", r.First, r.Last))
	}
	return strings.Join(all, " ")
}
