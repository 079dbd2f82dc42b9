package relay

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/histogram"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/outbox"
)

// Headers of the server that nats.go has no constants for (JetStream's atomic batch publish,
// ADR-50).
const (
	headerBatchID            = "Nats-Batch-Id"
	headerBatchSequence      = "Nats-Batch-Sequence"
	headerBatchCommit        = "Nats-Batch-Commit"
	headerExpectStream       = "Nats-Expected-Stream"
	headerExpectLastSequence = "Nats-Expected-Last-Sequence"
)

// errConflict reports a publish that named another last sequence than the stream's: somebody,
// perhaps this relay, has published.
var errConflict = errors.New("relay: the stream's last sequence is not the expected one")

// brokerError is a failure to reach the broker, or the broker's refusal.
type brokerError struct {
	stage string
	err   error
}

func (e *brokerError) Error() string { return e.err.Error() }
func (e *brokerError) Unwrap() error { return e.err }

// publish sends rows to the stream and returns their mark. It sends each row after the ack of the
// previous one, or all as one atomic batch, whichever the relay measures to be faster. If single
// rows take longer than measured, it sends the rest as one batch.
//
// After any error the outcome is unknown, and some rows may be on the stream: the caller must catch
// up.
func (w *writer) publish(ctx context.Context, rows []outbox.Row) (_ *outbox.Mark, err error) {
	w.at("after claim")
	dbCtx, cancel := w.forDB(ctx)
	naming, err := w.names.of(dbCtx, rows)
	cancel()
	if err != nil {
		return nil, err
	}
	ctx, spans := tracing.From(ctx).SendTo(ctx, w.p.Stream, w.p.Number, len(rows), func(yield func(*event.Event) bool) {
		for i := range rows {
			if !yield(&rows[i].Event) {
				return
			}
		}
	})
	defer func() { spans.End(err) }()
	mark := &outbox.Mark{OldTail: w.tail, NewTail: w.tail, Rows: make([]outbox.Published, 0, len(rows))}
	start := time.Now()
	began, alone := start, !w.pace.batch(len(rows))
	for sent := 0; sent < len(rows); {
		some := rows[sent:]
		if alone {
			some = some[:1]
		}
		first, err := w.send(ctx, mark.NewTail, some, naming)
		if err != nil {
			if errors.Is(err, errConflict) {
				w.metrics.conflicts.Inc()
			}
			if w.refusals >= maxRefusals && isMessageFault(err) {
				err = errors.Join(err, w.count(ctx, []outbox.Failure{{Row: rows[0], Error: err.Error()}}))
				w.refusals = 0
			}
			return nil, &brokerError{stagePublish, err}
		}
		for i := range some {
			mark.Rows = append(mark.Rows, outbox.Published{ID: some[i].OutboxID, EventID: some[i].ID, Seq: first + uint64(i)})
		}
		mark.NewTail = first + uint64(len(some)) - 1
		switch sent += len(some); {
		case !alone:
			w.pace.observe(len(some), len(some), time.Since(began))
		case sent == len(rows) || w.pace.turn(len(rows), time.Since(began)):
			w.pace.observe(sent, 1, time.Since(began))
			began, alone = time.Now(), false
		}
	}
	w.at("after ack")
	w.objects.offer(published{w.p.Stream, rows, mark.Rows, naming})
	took := time.Since(start)
	histogram.Observe(ctx, w.metrics.seconds.WithLabelValues(stagePublish), took.Seconds())
	w.metrics.batchRows.Observe(float64(len(rows)))
	return mark, nil
}

// published records that rows were published. It returns before and mark combined: the mark of all
// rows published since the last exchange.
func (w *writer) published(before, mark *outbox.Mark, rows []outbox.Row) *outbox.Mark {
	if mark == nil {
		return before
	}
	w.tail, w.failures, w.refusals = mark.NewTail, 0, 0
	now := time.Now()
	w.heard.Store(&now)
	for i := range rows {
		w.metrics.path.Observe(&rows[i].Event, now)
		if rows[i].Delayed { // the rows that wait behind it may become due
			w.nextUnpark = time.Time{}
		}
	}
	return before.Then(mark)
}

// send publishes the rows as one message or one atomic batch, and returns the sequence of the
// first. The server refuses them unless the stream ends at tail. naming is of names.of.
func (w *writer) send(ctx context.Context, tail uint64, rows []outbox.Row, naming map[string]event.Naming) (first uint64, err error) {
	ctx, cancel := w.forBroker(ctx)
	defer cancel()
	m, last := &nats.Msg{Header: make(nats.Header, 16)}, len(rows)-1 // one for all messages: the client copies each
	expect(m, w.p.Stream, tail)
	if last > 0 {
		m.Header.Set(headerBatchID, rand.Text())
	}
	for i := range rows {
		e := &rows[i].Event
		m.Subject, m.Data = e.Subject(w.broker.Prefix, w.p.Number), e.Payload
		e.SetHeaders(m.Header, naming[e.AggregateType])
		if last > 0 {
			m.Header.Set(headerBatchSequence, strconv.Itoa(i+1))
		}
		if i == last {
			break
		}
		if err := w.nc.PublishMsg(m); err != nil {
			return 0, fmt.Errorf("publish message %d of %d of partition %d: %w", i+1, len(rows), w.p.Number, err)
		}
		delete(m.Header, headerExpectStream) // only the first message of a batch carries the check
		delete(m.Header, headerExpectLastSequence)
	}
	if last > 0 {
		m.Header.Set(headerBatchCommit, "1")
	}
	w.at("before commit")
	return w.request(ctx, m, len(rows))
}

// expect makes the server refuse m, and the batch that it begins, unless the stream ends at tail.
func expect(m *nats.Msg, stream string, tail uint64) {
	m.Header[headerExpectStream] = []string{stream}
	m.Header[headerExpectLastSequence] = []string{strconv.FormatUint(tail, 10)}
}

// closing returns the message that closes a partition's stream if the stream ends at tail.
func closing(cfg broker.Config, partition int, tail uint64) *nats.Msg {
	subject, headers := event.ClosingMessage(cfg.Prefix, partition)
	m := &nats.Msg{Subject: subject, Header: headers}
	expect(m, cfg.StreamName(partition), tail)
	return m
}

// request sends the last message of a publish of count messages, and returns the sequence of the
// first. Only a plain ack for all of them is a success.
func (w *writer) request(ctx context.Context, m *nats.Msg, count int) (first uint64, err error) {
	answer, err := w.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		return 0, fmt.Errorf("publish %d messages of partition %d: %w", count, w.p.Number, err)
	}
	first, err = readAck(answer.Data, count)
	if api := (*jetstream.APIError)(nil); errors.As(err, &api) {
		w.at("refused")
	}
	return first, err
}

// readAck returns the sequence of the first of count messages from a publish ack.
func readAck(data []byte, count int) (first uint64, err error) {
	var ack struct {
		Seq   uint64              `json:"seq"`
		Count int                 `json:"count"`
		Error *jetstream.APIError `json:"error"`
	}
	if err := json.Unmarshal(data, &ack); err != nil {
		return 0, fmt.Errorf("read the publish ack of %d messages: %w", count, err)
	}
	switch {
	case ack.Error != nil && conflictCodes[ack.Error.ErrorCode]:
		return 0, fmt.Errorf("publish %d messages: %w: %w", count, errConflict, ack.Error)
	case ack.Error != nil && isFull(ack.Error):
		return 0, fmt.Errorf("publish %d messages: %w: %w", count, errFull, ack.Error)
	case ack.Error != nil:
		return 0, fmt.Errorf("publish %d messages: %w", count, ack.Error)
	case ack.Seq < uint64(count) || count > 1 && ack.Count != count:
		return 0, fmt.Errorf("publish %d messages: the ack covers %d messages and ends at sequence %d", count, ack.Count, ack.Seq)
	}
	return ack.Seq - uint64(count) + 1, nil
}

// errFull reports that a limit of NATS was reached, or its disk is full.
var errFull = errors.New("NATS has no room for them: raise the limit or free space (docs/runbook/StreamNearlyFull.md)")

// isFull reports an error of the server about missing room (nats-server, server/errors.json).
func isFull(err *jetstream.APIError) bool {
	switch err.ErrorCode {
	case 10002, 10023, 10028, 10047: // limits of the account, insufficient resources, memory, storage
		return true
	case 10077: // a store failed, for any reason
		return err.Description == "maximum bytes exceeded" || err.Description == "maximum messages exceeded"
	}
	return false
}

// close publishes the closing message and records that the partition is closed. No relay publishes
// after that message.
func (w *writer) close(ctx context.Context) error {
	m := closing(w.broker, w.p.Number, w.tail)
	w.at("before closing")
	bctx, cancel := w.forBroker(ctx)
	defer cancel()
	final, err := w.request(bctx, m, 1)
	if err != nil {
		return &brokerError{stagePublish, err}
	}
	w.at("after closing")
	return w.closed(ctx, final)
}

// closed records that the stream ends with the closing message at final.
func (w *writer) closed(ctx context.Context, final uint64) error {
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	done, err := outbox.Close(ctx, w.pool, w.p.Number, w.stored, final)
	if err != nil {
		return err
	}
	if !done {
		return errTailMoved
	}
	return errClosed
}

// conflictCodes are the server's errors for a stream that ends elsewhere. Only the metric treats
// them differently from other errors: after all of them the outcome is unknown.
var conflictCodes = map[jetstream.ErrorCode]bool{
	10071: true, // wrong last sequence
	10164: true, // the same, from a replicated stream
	10163: true, // an expected sequence is in process
}

// isRefusal reports that the server refused a publish, but not because of the last sequence. The
// cause may be a message.
func isRefusal(err error) bool {
	var api *jetstream.APIError
	return !errors.Is(err, errConflict) && (errors.As(err, &api) && api.Code < 500 || isMessageFault(err))
}

// isMessageFault reports an error that only the message itself can cause, by its size or its
// subject.
func isMessageFault(err error) bool {
	const messageTooLarge = 10054
	var api *jetstream.APIError
	return errors.Is(err, nats.ErrMaxPayload) || errors.Is(err, nats.ErrBadSubject) ||
		errors.As(err, &api) && api.ErrorCode == messageTooLarge
}
