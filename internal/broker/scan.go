package broker

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Scanning says what Scan reads.
type Scanning struct {
	Filter      string // of subjects; all that the stream has when empty
	From        uint64 // the first sequence
	HeadersOnly bool
}

// Scan calls fn with every message that was on a partition's stream when it began, in order, and with some that came since. A reader of
// a replicated stream may be served by a replica that is behind, and the leader of a moment may be one that nobody follows any more: so
// the end is what the leader says, and it is asked once more so late that it must have heard its replicas since the scan began.
func Scan(ctx context.Context, js jetstream.JetStream, cfg Config, partition int, what Scanning, fn func(*Stored) error) (Stream, error) {
	began := time.Now()
	stream, err := ReadStream(ctx, js, cfg, partition)
	if err != nil {
		return stream, err
	}
	if what.Filter == "" {
		what.Filter = ">"
	}
	if what.From, err = scanPass(ctx, js, stream, what, fn); err != nil {
		return stream, err
	}
	if stream.Replicas > 1 {
		sure := time.NewTimer(time.Until(began.Add(maxSilence)))
		defer sure.Stop()
		select {
		case <-ctx.Done():
			return stream, context.Cause(ctx)
		case <-sure.C:
		}
	}
	now, err := ReadStream(ctx, js, cfg, partition)
	if err != nil {
		return stream, err
	}
	if !now.Created.Equal(stream.Created) {
		return stream, fmt.Errorf("read stream %s: it was recreated meanwhile", stream.Name)
	}
	_, err = scanPass(ctx, js, now, what, fn)
	return stream, err
}

// scanPass reads up to the last message that the leader has now, and returns the sequence behind it.
func scanPass(ctx context.Context, js jetstream.JetStream, stream Stream, what Scanning, fn func(*Stored) error) (behind uint64, err error) {
	last, err := Last(ctx, js, stream.Name, what.Filter)
	if err != nil || last == nil || last.Seq < what.From {
		return what.From, err
	}
	consumer, err := js.OrderedConsumer(ctx, stream.Name, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{what.Filter}, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: max(what.From, 1),
		HeadersOnly: what.HeadersOnly, InactiveThreshold: time.Minute,
	})
	if err != nil {
		return 0, fmt.Errorf("read stream %s: %w", stream.Name, err)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(5000, 8<<20), jetstream.PullHeartbeat(time.Second), jetstream.PullExpiry(5*time.Second))
	if err != nil {
		return 0, fmt.Errorf("read stream %s: %w", stream.Name, err)
	}
	defer messages.Stop()
	for seq := uint64(0); seq < last.Seq; {
		m, meta, err := nextOf(ctx, messages)
		if err != nil {
			return 0, fmt.Errorf("read stream %s after %d: %w", stream.Name, seq, err)
		}
		seq = meta.Sequence.Stream
		if err := fn(&Stored{Seq: seq, Subject: m.Subject(), Header: m.Headers(), Data: m.Data(), Time: meta.Timestamp}); err != nil {
			return 0, err
		}
	}
	return last.Seq + 1, nil
}

// nextOf returns the next message. One that has expired since it was known to come ends the wait.
func nextOf(ctx context.Context, messages jetstream.MessagesContext) (jetstream.Msg, *jetstream.MsgMetadata, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	m, err := messages.Next(jetstream.NextContext(ctx))
	if err != nil {
		return nil, nil, err
	}
	meta, err := m.Metadata()
	return m, meta, err
}
