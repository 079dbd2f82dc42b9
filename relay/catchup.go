package relay

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// catchUp brings the database up to date with the stream. It compares the two, reads the messages
// after the stored tail, marks their rows, and sets the writer's tail to the end of the stream. The
// writer calls it before the first claim and after anything but a plain publish ack.
func (w *writer) catchUp(ctx context.Context) error {
	start := time.Now()
	w.metrics.catchUps.Inc()
	defer func() { w.metrics.seconds.WithLabelValues(stageCatchUp).Observe(time.Since(start).Seconds()) }()
	stream, err := w.bind(ctx)
	if err != nil {
		return err
	}
	w.maxMessage = int(w.nc.MaxPayload())
	if stream.MaxMessage > 0 {
		w.maxMessage = min(w.maxMessage, stream.MaxMessage)
	}
	w.horizon, w.checkedTo, w.stored = horizon{floor: w.p.Floor}, w.p.Floor, w.p.Tail
	w.at("catch-up")
	mark := outbox.Mark{Created: w.p.Created, OldTail: w.p.Tail, NewTail: w.p.Tail}
	for mark.NewTail < stream.Last {
		final, err := w.read(ctx, &mark, stream.Last)
		if err != nil {
			return err
		}
		if err := w.record(ctx, mark); err != nil {
			return err
		}
		w.stored = mark.NewTail
		if final > 0 {
			return w.closed(ctx, final)
		}
		mark = outbox.Mark{Created: w.p.Created, OldTail: mark.NewTail, NewTail: mark.NewTail}
	}
	w.tail = w.stored
	w.doubt(loss{w.p.Number, true}).Clear()
	return nil
}

// bind returns the partition's stream, if it is the one that the database knows. It binds a
// partition without a stream to an empty one. It never recreates a missing stream, because an
// operator must decide about the loss.
func (w *writer) bind(ctx context.Context) (broker.Stream, error) {
	p, err := w.partition(ctx)
	if err != nil {
		return broker.Stream{}, err
	}
	bctx, cancel := w.forBroker(ctx)
	defer cancel()
	name, spec := w.broker.StreamName(p.Number), broker.Partition{Number: p.Number, FirstSlot: p.FirstSlot,
		LastSlot: p.LastSlot, After: p.After}
	var stream broker.Stream
	if p.Stream == "" {
		stream, err = broker.Declare(bctx, w.js, w.broker, spec, w.log)
	} else if stream, err = broker.ReadStream(bctx, w.js, w.broker, p.Number); err == nil && !w.declared {
		w.declared = true
		stream, err = broker.Declare(bctx, w.js, w.broker, spec, w.log)
	}
	if err == nil && p.Stream == "" {
		if stream.Last == 0 {
			dbCtx, cancel := w.forDB(ctx)
			defer cancel()
			if err := outbox.Bind(dbCtx, w.pool, p.Number, name, stream.Created); err != nil {
				return stream, err
			}
		}
		if p, err = w.partition(ctx); err != nil { // another relay may have been first
			return stream, err
		}
		if p.Stream != "" { // and have published and marked since
			stream, err = broker.ReadStream(bctx, w.js, w.broker, p.Number)
		}
	}
	w.p = p
	switch lost, err := refuse(name, p, stream, err); {
	case lost && !w.doubt(loss{partition: p.Number}).Sure(w.js):
		return stream, &brokerError{stageCatchUp, fmt.Errorf("%w that confirms a loss: %v", broker.ErrNoLeader, err)}
	case errors.Is(err, ErrStreamRefused):
		return stream, err
	case err != nil:
		return stream, &brokerError{stageCatchUp, err}
	}
	w.doubt(loss{partition: p.Number}).Clear()
	return stream, nil
}

// readAhead is the number of messages that a catch-up requests at a time. Over a slow link they
// share a round trip.
const readAhead = 64

// read adds to mark the messages after its NewTail, up to last and at most a batch. final is the
// sequence of the closing message, or 0.
func (w *writer) read(ctx context.Context, mark *outbox.Mark, last uint64) (final uint64, err error) {
	for mark.NewTail < last && len(mark.Rows) < w.cfg.BatchSize {
		found, err := w.firstBetween(ctx, mark.NewTail+1, last)
		if err != nil {
			return 0, err
		}
		if len(found) == 0 {
			if err := w.proveGone(ctx, mark.NewTail+1, last); err != nil {
				return 0, err
			}
			mark.NewTail = last
		}
		for _, m := range found {
			if len(mark.Rows) == w.cfg.BatchSize {
				break
			}
			if m.Seq > mark.NewTail+1 {
				if err := w.proveGone(ctx, mark.NewTail+1, m.Seq-1); err != nil {
					return 0, err
				}
			}
			if event.Closes(m.Subject, m.Header) {
				if !w.p.Closing {
					return 0, refusal{fmt.Errorf("stream %s is closed, but this database went back to a time before that; "+
						"run `tidings restore`", w.p.Stream)}
				}
				return m.Seq, nil
			}
			mark.NewTail = m.Seq
			if !event.Ours(m.Header) {
				w.metrics.skipped.WithLabelValues(skipForeign).Inc()
				w.log.ErrorContext(ctx, "skipped a message on the stream that no relay wrote", "partition", w.p.Number,
					"stream_seq", m.Seq, "subject", m.Subject, "runbook", "StreamForeignMessages")
				continue
			}
			id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has parsed it
			mark.Rows = append(mark.Rows, outbox.Published{ID: id, EventID: m.Header.Get(event.HeaderID), Seq: m.Seq})
		}
	}
	return 0, nil
}

// proveGone returns nil if the messages from first to last, which no mark covers, are really gone:
// they were erased, or leaders have denied them for as long as broker.Doubt requires. Then they
// were deleted, or have expired. If one of them existed, its row would be pending after the
// catch-up, and the relay would publish it again.
func (w *writer) proveGone(ctx context.Context, first, last uint64) error {
	ctx, cancel := w.forBroker(ctx)
	defer cancel()
	erased, err := broker.Erased(ctx, w.js, w.broker, w.p.Stream, first, last)
	if err == nil && !erased && !w.doubt(loss{w.p.Number, true}).Sure(w.js) {
		err = fmt.Errorf("%w that confirms that it lacks the messages %d to %d", broker.ErrNoLeader, first, last)
	}
	if err != nil {
		return &brokerError{stageCatchUp, err}
	}
	return nil
}

// firstBetween returns the first messages between from and last, in order. It returns at least one
// if there are any.
func (w *writer) firstBetween(ctx context.Context, from, last uint64) ([]*broker.Stored, error) {
	ctx, cancel := w.forBroker(ctx)
	defer cancel()
	answers := make([]*broker.Stored, min(readAhead, last-from+1))
	g, ctx := errgroup.WithContext(ctx)
	for i := range answers {
		g.Go(func() (err error) {
			answers[i], err = broker.Next(ctx, w.js, w.p.Stream, from+uint64(i)) // if that message is gone, Next returns the one after it
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, &brokerError{stageCatchUp, err}
	}
	var found []*broker.Stored
	reached := from - 1
	for _, m := range answers {
		if m != nil && m.Seq > reached && m.Seq <= last {
			found, reached = append(found, m), m.Seq
		}
	}
	return found, nil
}

// record marks the rows of the messages that a catch-up read.
func (w *writer) record(ctx context.Context, mark outbox.Mark) error {
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	mark.Recorded = func() { w.at("in a transaction") }
	repeated, err := outbox.MarkCaughtUp(ctx, w.pool, w.p.Number, mark)
	switch {
	case errors.Is(err, outbox.ErrRowsMissing):
		return refusal{err}
	case errors.Is(err, outbox.ErrMarkFailed):
		return fmt.Errorf("%w: %w", errTailMoved, err)
	case err != nil:
		return err
	}
	w.metrics.caughtUp.Add(float64(len(mark.Rows) - len(repeated)))
	w.metrics.throughput.Add(float64(len(mark.Rows) - len(repeated)))
	for _, seq := range repeated {
		w.metrics.skipped.WithLabelValues(skipDuplicate).Inc()
		w.log.ErrorContext(ctx, "an event is on the stream twice; the first message counts", "partition", w.p.Number, "stream_seq", seq,
			"runbook", "StreamForeignMessages")
	}
	return nil
}
