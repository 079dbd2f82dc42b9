package relay

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
)

// Headers of the server's own that nats.go has no constants for (JetStream's atomic batch publish, ADR-50).
const (
	headerBatchID            = "Nats-Batch-Id"
	headerBatchSequence      = "Nats-Batch-Sequence"
	headerBatchCommit        = "Nats-Batch-Commit"
	headerExpectStream       = "Nats-Expected-Stream"
	headerExpectLastSequence = "Nats-Expected-Last-Subject-Sequence"
	headerExpectLastSubject  = "Nats-Expected-Last-Subject-Sequence-Subject"
)

// errConflict reports a refused tail check or a duplicate: somebody, perhaps this relay, has published to the partition.
var errConflict = errors.New("relay: the partition's tail is elsewhere")

// atomicFrom is the number of rows from which they go as an atomic batch. The server stages each batch in files of its own,
// which costs as much as a dozen single publishes, however few rows it has (docs/performance.md).
const atomicFrom = 13

// publish sends the rows behind the tail check and returns their sequences: many as one atomic batch, a few one by one, each
// behind the one before. After any error the outcome is unknown, and some may be on the stream: catch up.
func (s *session) publish(ctx context.Context, partition int, at position, rows []outbox.Row) (seqs []uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.PublishTimeout)
	defer cancel()
	step := len(rows)
	if len(rows) < s.atomicFrom {
		step = 1
	}
	seqs = make([]uint64, 0, len(rows))
	for batch := range slices.Chunk(rows, step) {
		first, err := s.send(ctx, partition, at, batch)
		if err != nil {
			return nil, err
		}
		for i := range batch {
			seqs = append(seqs, first+uint64(i))
		}
		at = position{seqs[len(seqs)-1], seqs[len(seqs)-1]}
	}
	return seqs, nil
}

// send publishes the rows as one message or one atomic batch and returns the sequence of the first.
func (s *session) send(ctx context.Context, partition int, at position, rows []outbox.Row) (first uint64, err error) {
	batch := rand.Text()
	last := len(rows) - 1
	for i := range rows {
		e := &rows[i].Event
		m := &nats.Msg{Subject: e.Subject(s.broker.Prefix), Header: e.Headers(), Data: e.Payload}
		if i == 0 {
			m.Header[headerExpectStream] = []string{s.broker.Stream}
			m.Header[headerExpectLastSequence] = []string{strconv.FormatUint(at.expect, 10)}
			m.Header[headerExpectLastSubject] = []string{event.PartitionFilter(s.broker.Prefix, partition)}
			m.Header[event.HeaderPrev] = []string{strconv.FormatUint(at.tail, 10)}
			m.Header[event.HeaderGeneration] = []string{strconv.FormatInt(s.generation, 10)}
		}
		if last > 0 {
			m.Header[headerBatchID] = []string{batch}
			m.Header[headerBatchSequence] = []string{strconv.Itoa(i + 1)}
		}
		if i < last {
			if err := s.nc.PublishMsg(m); err != nil {
				return 0, fmt.Errorf("publish message %d of %d of partition %d: %w", i+1, len(rows), partition, err)
			}
			continue
		}
		if last > 0 {
			m.Header[headerBatchCommit] = []string{"1"}
		}
		s.at("before commit")
		answer, err := s.nc.RequestMsgWithContext(ctx, m)
		if err != nil {
			return 0, fmt.Errorf("publish %d messages of partition %d: %w", len(rows), partition, err)
		}
		return readAck(answer.Data, len(rows))
	}
	return 0, nil
}

// readAck reads a publish ack. Only a plain one for all the messages is a success: a duplicate, too, says that somebody
// published, not that this publish took effect.
func readAck(data []byte, count int) (first uint64, err error) {
	var ack struct {
		Seq       uint64              `json:"seq"`
		Count     int                 `json:"count"`
		Duplicate bool                `json:"duplicate"`
		Error     *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &ack); err != nil {
		return 0, fmt.Errorf("read the publish ack of %d messages: %w", count, err)
	}
	switch {
	case ack.Error != nil && conflictCodes[ack.Error.ErrorCode]:
		return 0, fmt.Errorf("publish %d messages: %w: %w", count, errConflict, ack.Error)
	case ack.Error != nil:
		return 0, fmt.Errorf("publish %d messages: %w", count, ack.Error)
	case ack.Duplicate:
		return 0, fmt.Errorf("publish %d messages: %w: duplicate", count, errConflict)
	case ack.Seq < uint64(count) || count > 1 && ack.Count != count:
		return 0, fmt.Errorf("publish %d messages: the ack is for %d ending at %d", count, ack.Count, ack.Seq)
	}
	return ack.Seq - uint64(count) + 1, nil
}

// conflictCodes are the server's errors for a tail that is elsewhere and for messages that it holds already. They differ in
// nothing but the metric: all of them mean that the outcome is unknown.
var conflictCodes = map[jetstream.ErrorCode]bool{
	10071: true, // wrong last sequence
	10164: true, // the same, from a replicated stream
	10158: true, // duplicate message id is in process
	10163: true, // the same for an expected sequence
	10201: true, // the batch contains a duplicate message id
}

// isRefusal reports that the server answered, and refused for another reason than the tail: the fault may be a message's.
func isRefusal(err error) bool {
	var api *jetstream.APIError
	return !errors.Is(err, errConflict) && (errors.As(err, &api) || isMessageFault(err))
}

// isMessageFault reports an error that only the message itself can cause: its size or its subject.
func isMessageFault(err error) bool {
	const messageTooLarge = 10054
	var api *jetstream.APIError
	return errors.Is(err, nats.ErrMaxPayload) || errors.Is(err, nats.ErrBadSubject) || errors.As(err, &api) && api.ErrorCode == messageTooLarge
}
