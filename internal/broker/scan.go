package broker

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Scanning selects the messages that Scan reads.
type Scanning struct {
	Filter      string // subject filter; "" for all
	From        uint64 // the first sequence
	HeadersOnly bool
}

// Scan calls fn, in order, with every message that a partition's stream had when the scan began,
// and with some later ones.
//
// A lagging replica may serve a reader, and a leader may have lost its replicas without knowing. So
// the leader says where the stream ends. Scan asks it again so late that it must have heard from
// its replicas since the scan began.
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

// scanPass reads up to the leader's current last message, and returns the sequence after it.
func scanPass(ctx context.Context, js jetstream.JetStream, stream Stream, what Scanning,
	fn func(*Stored) error) (behind uint64, err error) {
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
	messages, err := consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(5000, 8<<20), jetstream.PullHeartbeat(time.Second),
		jetstream.PullExpiry(5*time.Second))
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

// nextOf returns the next message. It waits at most 30 s, because the message may have expired
// meanwhile.
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
