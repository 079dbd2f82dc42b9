package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

// writer publishes one partition. Only its own goroutine may use its fields, except slots, wake
// and heard.
type writer struct {
	*session
	slots uint32 // one bit per slot
	wake  work.Signal

	p          outbox.Partition
	maxMessage int    // bytes
	tail       uint64 // the stream's last sequence, according to the last ack or catch-up
	stored     uint64 // the value of tail_seq in outbox_partitions
	horizon    horizon
	checkedTo  int64                     // BelowFloor has checked up to this id
	limit      int                       // rows of the next claim: fewer while payloads are large
	few        bool                      // the last claim had few rows, and no more were pending
	failures   int                       // in a row
	refusals   int                       // of the failures, publishes that a healthy broker refused
	failing    time.Time                 // time of the first of these failures
	heard      atomic.Pointer[time.Time] // when the stream's leader last answered; nil: never
	declared   bool                      // this writer has declared the stream

	nextDue, nextSample, nextCheck, nextFloorCheck, nextUnpark time.Time
}

const (
	pipelineFrom      = 64                     // from this many rows on, the relay claims the next ones during the publish
	dueEvery          = 100 * time.Millisecond // between claims of due delayed rows
	markWithin        = 20 * time.Millisecond  // the longest wait of a mark for the claim of the next wake-up
	floorEvery        = time.Second            // between samples of the horizon while there is nothing to mark
	floorCheckPeriods = 5                      // floorEvery periods per check below the floor
	floorCheckRows    = 10_000                 // most rows per such check
	unparkEvery       = 10 * time.Second       // between searches for parked rows that wait for no other row
	maxRefusals       = 3                      // refusals of a batch by a healthy broker before the relay sends its first row alone
	giveUpAfter       = 2                      // failures in a row to reach the broker
	refuseAfter       = 4                      // failures in a row to reach one stream's leader while other leaders answer
)

var (
	// ErrStreamRefused reports that a partition's stream is not the one to which this database
	// published, or lost part of it. A further publish would lose or duplicate events, so the relay
	// publishes nothing until an operator has decided.
	ErrStreamRefused = errors.New("relay: the stream does not match the events that this database has published")
	errTailMoved     = errors.New("relay: the stored tail differs from this relay's")
	errClosed        = errors.New("relay: the partition is closed")
)

// refusal is an ErrStreamRefused whose text is only the reason and the remedy.
type refusal struct{ error }

func (refusal) Is(target error) bool { return target == ErrStreamRefused }
func (r refusal) Unwrap() error      { return r.error }

func newWriter(s *session, p outbox.Partition) *writer {
	w := &writer{session: s, p: p, wake: work.NewSignal(), limit: s.cfg.BatchSize}
	for slot := p.FirstSlot; slot <= p.LastSlot; slot++ {
		w.slots |= 1 << slot
	}
	return w
}

// run publishes the partition. It returns nil when ctx ends or the partition is closed, and
// errUnreachable if the broker cannot be reached. Work in progress when ctx ends is finished within
// drain.
func (w *writer) run(ctx, drain context.Context) error {
	for ctx.Err() == nil {
		err := w.catchUp(drain)
		if err == nil {
			w.heard.Store(new(time.Now()))
			if w.setTrouble(w.p.Number, nil) {
				w.log.InfoContext(ctx, "partition resumed", "partition", w.p.Number, "tail", w.tail)
			}
			err = w.rounds(ctx, drain)
		}
		switch {
		case err == nil:
			return nil
		case errors.Is(err, errClosed):
			w.log.InfoContext(ctx, "partition closed", "partition", w.p.Number)
			return nil
		}
		if err := w.fail(ctx, err); err != nil {
			return err
		}
	}
	return nil
}

// outcome is what a writer does after an error, before it catches up.
type outcome struct {
	trouble bool          // the partition publishes nothing for now: `tidings status` says why
	stopped bool          // only an operator can change that
	quiet   bool          // nothing failed: it is neither counted nor logged
	move    bool          // another relay may reach the stream's leader
	wait    time.Duration // until the catch-up
	end     error         // ends the session: the next one tries another server
}

// outcomeOf returns the outcome of an error that fail has counted. ofBroker reports a *brokerError.
func (w *writer) outcomeOf(err error, ofBroker bool) outcome {
	answered := time.Now().Add(-w.cfg.CheckInterval - w.cfg.PublishTimeout) // since then, every healthy leader has answered
	if answered.Before(w.failing) {
		answered = w.failing
	}
	unreachable := ofBroker && (!isRefusal(err) && w.failures >= giveUpAfter || w.refusals > maxRefusals+1)
	switch {
	case unreachable && errors.Is(err, broker.ErrNoLeader) && w.reaches(w, answered): // only this stream waits: the others continue
		return outcome{trouble: true, move: w.failures >= refuseAfter, wait: min(work.Retry(w.failures), maxReconnectDelay)}
	case unreachable:
		return outcome{trouble: true, end: fmt.Errorf("%w: partition %d: %w", errUnreachable, w.p.Number, err)}
	case (errors.Is(err, errTailMoved) || errors.Is(err, errConflict)) && w.failures == 1:
		return outcome{quiet: true} // another relay is at work, or the stream has a foreign message: catch up at once
	case errors.Is(err, broker.ErrMissing):
		return outcome{trouble: true, stopped: true, wait: maxReconnectDelay} // its owner is about to create it
	case errors.Is(err, ErrStreamRefused):
		return outcome{trouble: true, stopped: true, wait: work.MaxRetry}
	}
	return outcome{wait: work.Retry(w.failures)}
}

// fail counts and reports an error, and waits as long as its outcome requires. It returns
// errUnreachable after too many failures of the broker.
func (w *writer) fail(ctx context.Context, err error) error {
	if w.failures++; w.failures == 1 {
		w.failing = time.Now()
	}
	stage, unreached := stageClaim, (*brokerError)(nil)
	if errors.As(err, &unreached) {
		if stage = unreached.stage; isRefusal(err) {
			w.refusals++
		}
	}
	o := w.outcomeOf(err, unreached != nil)
	news := o.trouble && w.setTrouble(w.p.Number, err)
	switch {
	case o.stopped && news:
		w.metrics.errors.WithLabelValues(stageCatchUp).Inc()
		w.log.ErrorContext(ctx, "partition stopped until its stream is repaired", "partition", w.p.Number, "err", err,
			"runbook", "OutboxPartitionStuck")
	case !o.stopped && !o.quiet:
		w.failed(ctx, stage, w.p.Number, err)
	}
	if o.trouble {
		w.tell(ctx, err)
	}
	if o.move && w.group != nil {
		w.group.Refuse(w.p.Number)
	}
	if o.end == nil {
		work.Sleep(ctx, o.wait)
	}
	return o.end
}

// tell records why the partition publishes nothing, for `tidings status`.
func (w *writer) tell(ctx context.Context, err error) {
	dbCtx, cancel := w.forDB(ctx)
	defer cancel()
	if err := outbox.SaveTrouble(dbCtx, w.pool, outbox.Trouble{Partition: w.p.Number, Reason: err.Error(),
		Refused: errors.Is(err, ErrStreamRefused)}); err != nil && ctx.Err() == nil {
		w.log.WarnContext(ctx, "reason not stored, so `tidings status` lacks it", "partition", w.p.Number, "err", err)
	}
}

// rounds claims, publishes and marks. It returns nil when ctx ends, or the first error. After an
// error the outcome of the last publish may be unknown.
//
// The relay publishes few rows at once and marks them with the next claim. So a round costs one
// exchange with the database and one publish, and the relay pauses between rounds. If a wake-up
// began the round, another one probably begins the next, and the mark waits for it. Otherwise the
// relay has found the rows by polling. Then it polls again soon, because others may follow. While
// many rows wait, the relay publishes some and claims the next ones at the same time.
func (w *writer) rounds(ctx, drain context.Context) error {
	var (
		rows    []outbox.Row // claimed, not yet published
		mark    *outbox.Mark // of all rows published since the last exchange
		idle    = w.cfg.RoundInterval
		woken   bool // a wake-up ended the last wait
		closing bool
	)
	for {
		began := time.Now()
		stop := ctx.Err() != nil || closing
		if stop { // drop the claimed rows: the next holder claims them
			rows = nil
			if mark == nil && ctx.Err() != nil {
				return nil
			}
			if mark == nil {
				return w.close(drain)
			}
		}
		next, c, err := w.round(drain, rows, mark, !stop)
		if err != nil {
			return err
		}
		if mark = w.published(nil, next, rows); !stop {
			published := rows
			if rows, err = w.publishable(drain, &c); err != nil {
				return err
			}
			w.horizon.claimed(&c, published, rows)
			closing = c.Closing
		}
		if n := len(rows); n > 0 && n < pipelineFrom && !c.More && !closing {
			if next, err = w.publish(drain, rows); err != nil {
				return err
			}
			mark, rows = w.published(mark, next, rows), nil
		}
		if err := w.maintain(drain); err != nil {
			return err
		}
		if len(rows) > 0 || c.More || closing {
			idle = w.cfg.RoundInterval
			continue
		}
		if mark != nil && !woken {
			idle = w.cfg.RoundInterval
			work.Sleep(ctx, time.Until(began.Add(w.cfg.RoundInterval)))
			continue
		}
		if mark != nil {
			idle = min(max(w.markWithin, w.cfg.RoundInterval), w.cfg.PollInterval)
		}
		woken = w.awaitWork(ctx, began, idle)
		idle = min(max(2*idle, time.Millisecond), w.cfg.PollInterval)
	}
}

// awaitWork waits for a wake-up, at most for idle, and keeps rounds at least RoundInterval apart.
// It reports whether a wake-up came.
func (w *writer) awaitWork(ctx context.Context, began time.Time, idle time.Duration) (woken bool) {
	timer := time.NewTimer(idle*3/4 + rand.N(idle/4+1))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-w.wake:
		work.Sleep(ctx, time.Until(began.Add(w.cfg.RoundInterval)))
		return true
	}
	return false
}

// round publishes rows while it stores mark and claims the next rows. It returns the mark of the
// published rows.
func (w *writer) round(ctx context.Context, rows []outbox.Row, mark *outbox.Mark,
	claim bool) (published *outbox.Mark, c outbox.Claimed, err error) {
	var perr error
	done := make(chan struct{})
	if len(rows) > 0 {
		go func() {
			defer close(done)
			published, perr = w.publish(ctx, rows)
		}()
	} else {
		close(done)
	}
	c, err = w.exchange(ctx, rows, mark, claim)
	<-done
	return published, c, errors.Join(perr, err)
}

// exchange stores a mark and claims the next rows, except for those in publishing.
func (w *writer) exchange(ctx context.Context, publishing []outbox.Row, mark *outbox.Mark, claim bool) (outbox.Claimed, error) {
	now := time.Now()
	r := outbox.Round{Partition: w.p.Number, FirstSlot: w.p.FirstSlot, LastSlot: w.p.LastSlot, InFlight: make([]int64, len(publishing)),
		MaxBytes: w.cfg.BatchBytes, MaxMessage: w.maxMessage}
	for i := range publishing {
		r.InFlight[i] = publishing[i].OutboxID
	}
	r.Above, r.Open = w.horizon.begin()
	if claim {
		r.Few = w.few
		if r.Limit = w.limit; w.refusals >= maxRefusals {
			r.Limit = 1 // to find out whether the broker refuses this row
		}
		if r.Due = !now.Before(w.nextDue); r.Due {
			w.nextDue = now.Add(dueEvery)
		}
	}
	if mark == nil && !now.Before(w.nextSample) {
		mark = &outbox.Mark{OldTail: w.stored, NewTail: w.stored}
	}
	if mark != nil {
		w.nextSample = now.Add(w.floorEvery)
		mark.Created, mark.Floor = w.p.Created, w.horizon.floor
		r.Mark = mark
	}
	if mark != nil && len(mark.Rows) > 0 {
		w.at("before mark")
	}
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	c, err := outbox.Exchange(ctx, w.pool, r)
	if err != nil {
		if errors.Is(err, outbox.ErrMarkFailed) {
			err = fmt.Errorf("%w: %w", errTailMoved, err)
		}
		return c, err
	}
	w.at("after mark")
	w.metrics.seconds.WithLabelValues(stageClaim).Observe(time.Since(now).Seconds())
	if mark != nil {
		w.stored = mark.NewTail
		w.metrics.throughput.Add(float64(len(mark.Rows)))
	}
	switch {
	case c.Closed:
		return c, errClosed
	case c.Tail != w.stored:
		return c, w.tailMoved(c.Tail)
	}
	if claim {
		if !r.Few {
			w.adaptLimit(&c)
		}
		w.few = !c.More && len(c.Rows) < pipelineFrom
	}
	return c, nil
}

// adaptLimit lowers the claim's limit while payloads fill a publish, and raises it again
// afterwards.
func (w *writer) adaptLimit(c *outbox.Claimed) {
	if c.More && len(c.Rows) < w.limit {
		w.limit = max(1, len(c.Rows))
	} else {
		w.limit = min(2*w.limit, w.cfg.BatchSize)
	}
}

// publishable returns the rows of a claim that can be published, in order. It counts a failure for
// a row that fails validation, and holds back the later rows of its aggregate. It delays the rows
// that are already held.
func (w *writer) publishable(ctx context.Context, c *outbox.Claimed) ([]outbox.Row, error) {
	var failures []outbox.Failure
	failed := map[outbox.Aggregate]bool{}
	fit := c.Rows[:0]
	for _, r := range c.Rows {
		key := r.Aggregate()
		if len(failed) > 0 && failed[key] {
			c.Leave(r.OutboxID)
			continue
		}
		err := r.Validate(w.maxMessage)
		if r.Oversize > 0 { // the claim left its payload out
			err = &event.InvalidError{Field: "payload", Reason: fmt.Sprintf("has %d bytes: the limit of a message is %d",
				r.Oversize, w.maxMessage)}
		}
		if err != nil {
			failed[key] = true
			failures = append(failures, outbox.Failure{Row: r, Error: err.Error()})
			continue
		}
		fit = append(fit, r)
	}
	if len(failures) > 0 {
		if err := w.count(ctx, failures); err != nil {
			return nil, err
		}
	}
	if len(c.Held) > 0 {
		ctx, cancel := w.forDB(ctx)
		defer cancel()
		if err := outbox.Park(ctx, w.pool, c.Held); err != nil {
			return nil, err
		}
	}
	return fit, nil
}

// count records the failures of rows that cannot be published in their current form.
func (w *writer) count(ctx context.Context, failures []outbox.Failure) error {
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	_, dead, err := outbox.Fail(ctx, w.pool, failures)
	if err != nil {
		return err
	}
	if dead > 0 {
		w.nextUnpark = time.Time{}
		w.log.ErrorContext(ctx, "outbox messages are in the DLQ; the later ones of their aggregates are published", "partition", w.p.Number,
			"messages", dead, "runbook", "OutboxDLQNotEmpty")
	}
	w.metrics.dead.Add(float64(dead))
	for _, f := range failures {
		w.metrics.failed(&f.Row.Event)
		w.log.WarnContext(ctx, "outbox message cannot be published", "partition", w.p.Number, "id", f.Row.OutboxID,
			"event_id", f.Row.ID, "tenant", f.Row.TenantID, "attempts", f.Row.Attempts+1, "err", f.Error)
	}
	return nil
}

// maintain does the periodic work between rounds.
func (w *writer) maintain(ctx context.Context) error {
	now := time.Now()
	due := func(next *time.Time, every time.Duration) bool {
		if now.Before(*next) {
			return false
		}
		*next = now.Add(every)
		return true
	}
	if due(&w.nextCheck, w.cfg.CheckInterval) {
		if err := w.check(ctx); err != nil {
			return err
		}
	}
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	if w.p.FirstSlot == 0 && due(&w.nextUnpark, unparkEvery) { // one relay does this for all partitions
		if _, err := outbox.Unpark(ctx, w.pool); err != nil {
			return err
		}
	}
	if due(&w.nextFloorCheck, floorCheckPeriods*w.floorEvery) {
		return w.checkBelowFloor(ctx)
	}
	return nil
}

// checkBelowFloor searches the last rows below the floor for a pending one. No such row can exist.
// If checkBelowFloor finds one, the proof of the floor is wrong: the relay counts the row, logs an
// error and publishes it.
func (w *writer) checkBelowFloor(ctx context.Context) error {
	floor := w.horizon.floor
	id, half, tail, err := outbox.BelowFloor(ctx, w.pool, w.p, w.checkedTo, floor, floorCheckRows)
	switch {
	case err != nil:
		return err
	case tail != w.stored:
		return w.tailMoved(tail)
	case id == 0:
		w.checkedTo = half // check the upper half again: a row may be committed late
		return nil
	}
	w.metrics.belowFloor.Inc()
	w.log.ErrorContext(ctx, "a row below the floor is pending: the relay publishes it now", "partition", w.p.Number, "id", id,
		"floor", floor, "runbook", "OutboxFoundBelowFloor")
	w.horizon, w.checkedTo = horizon{floor: id - 1}, id-1
	return nil
}

// tailMoved returns the error for a stored tail that this writer did not store.
func (w *writer) tailMoved(tail uint64) error {
	return fmt.Errorf("%w: partition %d is marked up to sequence %d, and this relay marked up to %d", errTailMoved,
		w.p.Number, tail, w.stored)
}

// check compares the stream with the state in which this writer left it.
func (w *writer) check(ctx context.Context) error {
	ctx, cancel := w.forBroker(ctx)
	defer cancel()
	stream, err := broker.ReadStream(ctx, w.js, w.broker, w.p.Number)
	if errors.Is(err, jetstream.ErrStreamNotFound) || err == nil && (!stream.Created.Equal(w.p.Created) || stream.Last != w.tail) {
		return errTailMoved // the catch-up finds the cause
	}
	if err != nil {
		return &brokerError{stageCatchUp, err}
	}
	w.heard.Store(new(time.Now()))
	return nil
}

// partition reads the partition from the database.
func (w *writer) partition(ctx context.Context) (outbox.Partition, error) {
	ctx, cancel := w.forDB(ctx)
	defer cancel()
	p, err := outbox.ReadPartition(ctx, w.pool, w.p.Number)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && p.Closed {
		return p, errClosed
	}
	return p, err
}
