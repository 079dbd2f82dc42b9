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

// catchUp compares the stream with what the database knows of it, reads what it holds behind the stored tail, marks those rows, and
// leaves the writer where the stream ends. It is run before the first claim of a partition and after anything but a plain ack.
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
	w.horizon, w.looked, w.stored = horizon{floor: w.p.Floor}, w.p.Floor, w.p.Tail
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
	return nil
}

// bind returns the partition's stream, which is the one that the database knows. A partition that has met no stream yet is bound to an
// empty one; a stream that is gone is never made anew: its loss is to be decided on.
func (w *writer) bind(ctx context.Context) (broker.Stream, error) {
	p, err := w.partition(ctx)
	if err != nil {
		return broker.Stream{}, err
	}
	bctx, cancel := w.forBroker(ctx)
	defer cancel()
	name, spec := w.broker.StreamName(p.Number), broker.Partition{Number: p.Number, FirstSlot: p.FirstSlot, LastSlot: p.LastSlot, After: p.After}
	var stream broker.Stream
	if p.Stream == "" {
		stream, err = broker.Declare(bctx, w.js, w.broker, spec, w.log)
	} else if stream, err = broker.ReadStream(bctx, w.js, w.broker, p.Number); err == nil && !w.declared {
		w.declared = true
		stream, err = broker.Declare(bctx, w.js, w.broker, spec, w.log)
	}
	if err == nil && p.Stream == "" && stream.Last == 0 {
		dbCtx, cancel := w.forDB(ctx)
		defer cancel()
		if err := outbox.Bind(dbCtx, w.pool, p.Number, name, stream.Created); err != nil {
			return stream, err
		}
		if p, err = w.partition(ctx); err != nil { // another relay may have been first
			return stream, err
		}
	}
	w.p = p
	switch lost, err := refuse(name, p, stream, err); {
	case lost && !w.doubt(p.Number).Sure(w.js):
		return stream, &brokerError{stageCatchUp, fmt.Errorf("%w that confirms a loss: %v", broker.ErrNoLeader, err)}
	case errors.Is(err, ErrStreamRefused):
		return stream, err
	case err != nil:
		return stream, &brokerError{stageCatchUp, err}
	}
	w.doubt(p.Number).Clear()
	return stream, nil
}

// readAhead is how many messages a catch-up asks for at a time. Over a slow link these share a round trip.
const readAhead = 64

// read adds to mark the messages behind it, up to last and as many as fill a batch. final is the sequence of the closing message.
func (w *writer) read(ctx context.Context, mark *outbox.Mark, last uint64) (final uint64, err error) {
	for mark.NewTail < last && len(mark.Rows) < w.cfg.BatchSize {
		found, err := w.ahead(ctx, mark.NewTail+1, last)
		if err != nil {
			return 0, err
		}
		if len(found) == 0 { // deleted, or expired
			mark.NewTail = last
		}
		for _, m := range found {
			if len(mark.Rows) == w.cfg.BatchSize {
				break
			}
			if event.Closes(m.Subject, m.Header) {
				if !w.p.Closing {
					return 0, fmt.Errorf("%w: stream %s is closed, and this database went back to before that", ErrStreamRefused, w.p.Stream)
				}
				return m.Seq, nil
			}
			mark.NewTail = m.Seq
			if !event.Ours(m.Header) {
				w.metrics.skipped.WithLabelValues(event.Foreign).Inc()
				w.log.ErrorContext(ctx, "a message on the stream that no relay of ours wrote is passed over", "partition", w.p.Number, "stream_seq", m.Seq, "subject", m.Subject,
					"runbook", "StreamForeignMessages")
				continue
			}
			id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has read it
			mark.Rows = append(mark.Rows, outbox.Published{ID: id, EventID: m.Header.Get(event.HeaderID), Seq: m.Seq})
		}
	}
	return 0, nil
}

// ahead returns the first messages from a sequence on, in their order, up to last. Some are always returned if there are any.
func (w *writer) ahead(ctx context.Context, from, last uint64) ([]*broker.Stored, error) {
	ctx, cancel := w.forBroker(ctx)
	defer cancel()
	answers := make([]*broker.Stored, min(readAhead, last-from+1))
	g, ctx := errgroup.WithContext(ctx)
	for i := range answers {
		g.Go(func() (err error) {
			answers[i], err = broker.Next(ctx, w.js, w.p.Stream, from+uint64(i)) // the one behind it where that one is gone
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

// record marks what was read.
func (w *writer) record(ctx context.Context, mark outbox.Mark) error {
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	repeated, err := outbox.MarkCaughtUp(ctx, w.pool, w.p.Number, mark)
	switch {
	case errors.Is(err, outbox.ErrRowsMissing):
		return fmt.Errorf("%w: %w", ErrStreamRefused, err)
	case errors.Is(err, outbox.ErrMarkFailed):
		return fmt.Errorf("%w: %w", errTailMoved, err)
	case err != nil:
		return err
	}
	w.metrics.caughtUp.Add(float64(len(mark.Rows) - len(repeated)))
	w.metrics.throughput.Add(float64(len(mark.Rows) - len(repeated)))
	for _, seq := range repeated {
		w.metrics.skipped.WithLabelValues(event.Duplicate).Inc()
		w.log.ErrorContext(ctx, "an event is on the stream twice: the first message counts", "partition", w.p.Number, "stream_seq", seq, "runbook", "StreamForeignMessages")
	}
	return nil
}
