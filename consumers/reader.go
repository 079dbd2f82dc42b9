package consumers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
)

var (
	// errMoved reports an offset that is not where this instance left it, because another instance
	// applied the same events. The other commit remains, this one is rolled back, and the reader
	// reads the offset again.
	errMoved = errors.New("consumers: another instance moved the offset")
	// errLetters reports that the consumer has dead letters, or that the batch may have some. These
	// store the headers of their messages, which sessions drop until then: they take a tenth of the
	// processor time. The batch is rolled back, and the reader reads it again with headers.
	errLetters = errors.New("consumers: dead letters need headers")
	// errNotYet reports a stream that waits: a predecessor is not applied to its end, or its
	// successors do not exist.
	errNotYet = errors.New("consumers: not yet")
	// errClosed reports a stream that has ended and is applied to its end.
	errClosed = errors.New("consumers: closed")
)

// stopError is the reason why the consumer cannot continue on a stream. An operator has to act.
type stopError struct {
	reason  error
	expired *Start // the position after which events expired; nil for other reasons
}

func (e *stopError) Error() string { return e.reason.Error() }
func (e *stopError) Unwrap() error { return e.reason }

// reader reads one partition's stream while this instance holds it. The readers of an instance are
// independent of each other.
type reader struct {
	c         *Consumer
	again     context.CancelFunc // ends the session, under c.mu; nil between sessions
	partition int
	name      string       // of the stream
	limit     atomic.Int64 // events of a batch
	quick     int          // full batches in a row that left most of their time
	doubt     broker.Doubt // until it is sure that events are lost
	foreign   bool         // the log already names a message that no relay wrote
	letters   bool         // the consumer had dead letters, so sessions keep headers
}

func (c *Consumer) newReader(partition int) *reader {
	r := &reader{c: c, partition: partition, name: c.broker.StreamName(partition)}
	r.limit.Store(int64(c.cfg.BatchEvents))
	c.metrics.applied.WithLabelValues(r.label()) // the series begins at 0
	return r
}

// run reads the stream until it is stopped, and finishes the batch in hand.
func (r *reader) run(ctx context.Context) {
	c := r.c
	defer c.clear(context.WithoutCancel(ctx), r.partition) // from now on another instance reports it
	for failures := 0; ctx.Err() == nil; {
		progress, err := r.session(ctx)
		if progress {
			failures = 0
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		if errors.Is(err, errLetters) {
			r.letters = true
			continue
		}
		failures++
		pause := work.Retry(failures)
		var stop *stopError
		switch {
		case errors.Is(err, errClosed):
			c.clear(ctx, r.partition)
			c.sampleNow.Notify() // to share its successors
			pause = min(pause, idle)
		case errors.Is(err, errNotYet):
			c.clear(ctx, r.partition)
			pause = min(pause, idle)
		case errors.As(err, &stop):
			c.trouble(ctx, r.partition, stuck, err)
			c.sampleNow.Notify()
			pause = c.cfg.Recheck
			if stop.expired != nil && c.deps.Expired != nil {
				c.deps.Expired(*stop.expired)
			}
		case isWaiting(err):
			c.trouble(ctx, r.partition, waiting, err)
			c.sampleNow.Notify()
			pause = min(pause, idle)
		default:
			c.trouble(ctx, r.partition, failing, err)
			c.sampleNow.Notify()
		}
		work.Sleep(ctx, pause)
	}
}

// errDoubt reports events that seem lost, but may only be unknown to a new leader.
var errDoubt = errors.New("consumers: the leader may be too young to know")

// isWaiting reports whether err means that no leader answers for the stream.
func isWaiting(err error) bool {
	return errors.Is(err, broker.ErrNoLeader) || errors.Is(err, errDoubt) || errors.Is(err, nats.ErrNoResponders) ||
		broker.IsLeaderless(err)
}

// lostError returns the error for events that the consumer can no longer read: errDoubt at first,
// and a stopError once the doubt is sure.
func (r *reader) lostError(reason error) error {
	if !r.doubt.Sure(r.c.deps.JetStream) {
		return fmt.Errorf("%w: %w", errDoubt, reason)
	}
	return &stopError{reason: fmt.Errorf("partition %d: %w", r.partition, reason)}
}

// expiredError is lostError for events of a stream that expired before the consumer read them.
func (r *reader) expiredError(after Start, reason error) error {
	err := r.lostError(fmt.Errorf("%w; %s", reason, r.c.deps.Remedy))
	if stop, ok := errors.AsType[*stopError](err); ok {
		stop.expired = &after
	}
	return err
}

// remedy returns the text that tells an operator how to recover lost events.
func (r *reader) remedy() string {
	return "run `tidings restore` if a database or a disk of NATS came back from a backup or a snapshot, else `tidings repair stream`; " +
		"if that has nothing to repair, " + r.c.deps.Remedy
}

// open reads the offset and the leader's description of the stream, and decides whether the
// consumer can continue from the offset.
func (r *reader) open(ctx context.Context) (o offset, s broker.Stream, err error) {
	c := r.c
	ctx, cancel := context.WithTimeout(ctx, c.broker.Timeout)
	defer cancel()
	all, err := readOffsets(ctx, c.deps.Pool, c.name)
	if err != nil {
		return o, s, err
	}
	o, begun := all[c.name][r.name]
	if o.Closed {
		return o, s, errClosed
	}
	s, err = broker.ReadStream(ctx, c.deps.JetStream, c.broker, r.partition)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound) && begun:
		return o, s, r.lostError(fmt.Errorf("stream %s is gone; the offset is %d; %s", r.name, o.Seq, r.remedy()))
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return o, s, errNotYet
	case err != nil:
		return o, s, err
	}
	if err := r.mayBegin(ctx, s, all[c.name], begun); err != nil {
		return o, s, err
	}
	reason, err := lost(ctx, c.deps.JetStream, o, s)
	if err != nil {
		return o, s, err
	}
	if reason == nil && o.Seq > 0 { // a consumer that applied the closing message has a closed offset
		final, err := broker.Closed(ctx, c.deps.JetStream, c.broker, s)
		if err != nil {
			return o, s, err
		}
		if 0 < final && final <= o.Seq {
			reason = fmt.Errorf("stream %s had lost events: its closing message is %d, and the offset is %d", s.Name, final, o.Seq)
		}
	}
	if reason != nil {
		return o, s, r.lostError(fmt.Errorf("%w; %s", reason, r.remedy()))
	}
	return o, s, nil
}

// mayBegin returns nil once all predecessors of the stream are applied to their ends.
func (r *reader) mayBegin(ctx context.Context, s broker.Stream, offsets map[string]offset, begun bool) error {
	c := r.c
	for _, n := range s.After {
		before := c.broker.StreamName(n)
		if o, read := offsets[before]; o.Closed {
			continue
		} else if read {
			return errNotYet
		}
		switch _, err := broker.ReadStream(ctx, c.deps.JetStream, c.broker, n); {
		case err == nil:
			return errNotYet
		case !errors.Is(err, jetstream.ErrStreamNotFound):
			return err
		case !begun:
			return r.expiredError(Start{Stream: before},
				fmt.Errorf("stream %s, the predecessor of %s, is gone, and the consumer has not read it", before, s.Name))
		}
	}
	if !begun {
		c.sampleNow.Notify() // watch creates the offset
		return errNotYet
	}
	return nil
}

// proveErased returns nil if the messages from first to last, which the stream does not have, were
// all erased on purpose.
func (r *reader) proveErased(ctx context.Context, first, last uint64) error {
	c := r.c
	ctx, cancel := context.WithTimeout(ctx, c.broker.Timeout)
	defer cancel()
	next, err := broker.Next(ctx, c.deps.JetStream, r.name, first)
	if err != nil {
		return err
	}
	if next != nil && next.Seq <= last {
		return fmt.Errorf("message %d is on stream %s and was not delivered", next.Seq, r.name)
	}
	erased, err := broker.Erased(ctx, c.deps.JetStream, c.broker, r.name, first, last)
	if err != nil {
		return err
	}
	if erased {
		c.log.InfoContext(ctx, "skipping erased events", "stream", r.name, "first", first, "last", last)
		return nil
	}
	s, err := broker.ReadStream(ctx, c.deps.JetStream, c.broker, r.partition)
	switch {
	case err != nil:
		return err
	case first < s.First:
		return r.expiredError(Start{r.name, s.Created, first - 1}, fmt.Errorf(
			"messages %d to %d of stream %s expired or were purged before the consumer read them", first, min(last, s.First-1), r.name))
	}
	return r.lostError(fmt.Errorf("messages %d to %d of stream %s are missing, and not all of them were erased on purpose; %s",
		first, last, r.name, r.remedy()))
}

// successors returns the streams that continue a closed one, or errNotYet while the broker does not
// have all of them.
func (r *reader) successors(ctx context.Context, s broker.Stream) (next []broker.Stream, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.c.broker.Timeout)
	defer cancel()
	streams, err := broker.Streams(ctx, r.c.deps.JetStream, r.c.broker)
	if err != nil {
		return nil, err
	}
	slots := make(map[int]bool)
	for _, o := range streams {
		if slices.Contains(o.After, s.Number) {
			next = append(next, o)
			for slot := o.FirstSlot; slot <= o.LastSlot; slot++ {
				slots[slot] = true
			}
		}
	}
	for slot := s.FirstSlot; slot <= s.LastSlot; slot++ {
		if !slots[slot] {
			return nil, fmt.Errorf("%w: stream %s is closed, and no stream has its slot %d yet", errNotYet, s.Name, slot)
		}
	}
	return next, nil
}
