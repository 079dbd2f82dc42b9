package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/outbox"
)

// session is one connection to the broker and the work done over it.
type session struct {
	*Relay
	nc         *nats.Conn
	js         jetstream.JetStream
	closed     chan struct{} // by nc's end
	generation int64
	maxMessage int

	jobs chan job
	acks chan ack
	done chan outcome
}

// partition is what the scheduler knows of one partition. Nobody else touches it.
type partition struct {
	number   int
	known    bool     // at is what the last ack or catch-up said
	at       position // read before the rows that are published after it
	busy     bool     // a job is in flight
	more     bool     // the last claim was cut by its limit: claim again at once
	failures int      // in a row
	retryAt  time.Time
	stuck    bool // counted in the gauge
}

// job is work for a publisher: a batch to publish, or a catch-up when there is none.
type job struct {
	partition int
	at        position
	batch     *outbox.Batch
}

// ack is a publish ack on its way to the marker.
type ack struct {
	job
	mark outbox.Mark
}

// outcome is a job's end. Its position counts unless err is set: then the partition's is unknown.
type outcome struct {
	partition int
	at        position
	more      bool
	err       error
	stage     string
}

const (
	minPoll      = 2 * time.Millisecond   // between claims while they find something
	releaseEvery = 250 * time.Millisecond // between looks for put-off rows that have fallen due
	releaseLimit = 1000                   // rows per partition and look
	claimBytes   = 16 << 20               // payload bytes per claim, over all partitions
)

// run publishes until ctx or the connection ends, finishes the work in hand and frees the leases. It returns nil after ctx.
func (s *session) run(ctx context.Context) error {
	// Two clocks: after ctx ends nothing is begun, and what is in hand has DrainTimeout. What waits for the broker also
	// ends with the connection; what is in the database's hands does not.
	dbCtx, cancelDB := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelDB()
	drained := context.AfterFunc(ctx, func() { time.AfterFunc(s.cfg.DrainTimeout, cancelDB) })
	defer drained()
	pubCtx, cancelPub := context.WithCancelCause(dbCtx)
	defer cancelPub(nil)

	group, err := lease.New(s.cfg.Lease, s.pool, LeaseKind, s.owner, event.Partitions, s.log)
	if err != nil {
		return err
	}
	leaseCtx, leave := context.WithCancel(dbCtx)
	var leases, workers sync.WaitGroup
	leases.Go(func() {
		if err := group.Run(leaseCtx); err != nil {
			s.log.ErrorContext(leaseCtx, "leases", "err", err)
		}
	})
	// At most one job per partition is in flight, so no send on these channels ever waits.
	s.jobs, s.acks, s.done = make(chan job, event.Partitions), make(chan ack, event.Partitions), make(chan outcome, event.Partitions)
	for range s.cfg.Publishers {
		workers.Go(func() {
			for j := range s.jobs {
				s.work(pubCtx, dbCtx, j)
			}
		})
	}
	workers.Go(func() { s.marker(dbCtx) })

	parts, err := s.schedule(ctx, dbCtx, group)
	if ctx.Err() == nil {
		cancelPub(err)
	}
	for busy := countBusy(parts); busy > 0; busy-- {
		<-s.done
	}
	close(s.jobs)
	close(s.acks)
	workers.Wait()
	leave()
	leases.Wait()
	s.metrics.partitions.Set(0)
	s.metrics.stuck.Set(0)
	return err
}

func countBusy(parts map[int]*partition) (n int) {
	for _, p := range parts {
		if p.busy {
			n++
		}
	}
	return n
}

// schedule decides what is done next until ctx ends (nil) or the connection does. It returns the partitions as they are, some
// of them busy.
func (s *session) schedule(ctx, dbCtx context.Context, group *lease.Group) (map[int]*partition, error) {
	parts := make(map[int]*partition, event.Partitions)
	var (
		poll        = minPoll // grows while nothing is found
		nextClaim   = time.Now()
		nextRelease = time.Now()
		claimErrors int
	)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		held := group.Held()
		s.reconcile(parts, held)

		if now.After(nextRelease) && len(held) > 0 {
			released, err := outbox.Release(dbCtx, s.pool, held, releaseLimit)
			if err != nil {
				s.failed(ctx, stageClaim, -1, err)
			}
			nextRelease = now.Add(releaseEvery)
			if len(released) > 0 {
				nextClaim = now
			}
		}

		var asks []outbox.Ask
		wait := releaseEvery
		due := !now.Before(nextClaim)
		for _, p := range parts {
			switch {
			case p.busy:
			case now.Before(p.retryAt):
				wait = min(wait, p.retryAt.Sub(now))
			case !p.known:
				p.busy = true
				s.jobs <- job{partition: p.number}
			case due || p.more && claimErrors == 0:
				asks = append(asks, outbox.Ask{Partition: p.number})
			}
		}
		if len(asks) > 0 {
			found, err := s.claim(dbCtx, parts, asks)
			switch {
			case err != nil:
				claimErrors++
				s.failed(ctx, stageClaim, -1, err)
				nextClaim = time.Now().Add(retryAfter(claimErrors))
			case found:
				claimErrors, poll = 0, minPoll
				nextClaim = time.Now().Add(poll)
			case due:
				claimErrors = 0
				poll = min(poll*2, s.cfg.PollInterval)
				nextClaim = time.Now().Add(poll*3/4 + rand.N(poll/4+1))
			}
		}
		if until := time.Until(nextClaim); until > 0 {
			wait = min(wait, until)
		}

		timer.Reset(max(wait, 0))
		select {
		case <-ctx.Done():
			return parts, nil
		case <-s.closed:
			return parts, errors.New("relay: the connection to the broker ended")
		case <-group.Changed():
		case <-timer.C:
		case o := <-s.done:
			s.finish(ctx, parts, o)
			for more := true; more; { // all that has ended, so that one claim serves as many partitions as can be
				select {
				case o := <-s.done:
					s.finish(ctx, parts, o)
				default:
					more = false
				}
			}
		}
	}
}

// reconcile drops what is no longer held, once idle, and adds what is new.
func (s *session) reconcile(parts map[int]*partition, held []int) {
	have := make(map[int]bool, len(held))
	for _, n := range held {
		have[n] = true
		if parts[n] == nil {
			parts[n] = &partition{number: n}
		}
	}
	stuck := 0
	for n, p := range parts {
		if !have[n] && !p.busy {
			delete(parts, n)
		} else if p.stuck {
			stuck++
		}
	}
	s.metrics.partitions.Set(float64(len(held)))
	s.metrics.stuck.Set(float64(stuck))
}

// claim reads the due rows of the idle partitions and hands each batch to a publisher. It reports whether it found any.
func (s *session) claim(ctx context.Context, parts map[int]*partition, asks []outbox.Ask) (bool, error) {
	start := time.Now()
	batches, err := outbox.Claim(ctx, s.pool, asks, s.cfg.BatchSize, s.cfg.BatchBytes, claimBytes)
	if err != nil {
		return false, err
	}
	s.metrics.seconds.WithLabelValues(stageClaim).Observe(time.Since(start).Seconds())
	for _, a := range asks {
		parts[a.Partition].more = false
	}
	for i := range batches {
		p := parts[batches[i].Partition]
		p.busy = true
		s.jobs <- job{partition: p.number, at: p.at, batch: &batches[i]}
	}
	return len(batches) > 0, nil
}

// finish takes a job's end into the partition's state.
func (s *session) finish(ctx context.Context, parts map[int]*partition, o outcome) {
	p := parts[o.partition]
	p.busy = false
	if o.err == nil {
		p.known, p.at, p.more = true, o.at, o.more
		p.failures, p.stuck, p.retryAt = 0, false, time.Time{}
		return
	}
	p.known, p.more = false, false
	if errors.Is(o.err, errTailMoved) || errors.Is(o.err, errConflict) && p.failures == 0 {
		p.failures++
		return // another relay is, or was, at work: look again at once
	}
	p.failures++
	p.retryAt = time.Now().Add(retryAfter(p.failures))
	if errors.Is(o.err, ErrStreamRefused) {
		p.retryAt = time.Now().Add(maxRetry)
		if !p.stuck {
			p.stuck = true
			s.log.ErrorContext(ctx, "partition stopped until the stream is repaired", "partition", p.number, "err", o.err)
		}
		return
	}
	s.failed(ctx, o.stage, p.number, o.err)
}

// failed counts and logs an error that is waited out.
func (s *session) failed(ctx context.Context, stage string, partition int, err error) {
	s.metrics.errors.WithLabelValues(stage).Inc()
	if ctx.Err() == nil {
		s.log.WarnContext(ctx, "relay "+stage+", trying again", "partition", partition, "err", err)
	}
}

// work does one job: it catches the partition up, or publishes its batch. Whatever happens, it ends in done, or in acks and
// through the marker in done.
func (s *session) work(ctx, dbCtx context.Context, j job) {
	start := time.Now()
	if j.batch == nil {
		at, err := s.catchUp(ctx, j.partition)
		s.metrics.seconds.WithLabelValues(stageCatchUp).Observe(time.Since(start).Seconds())
		s.done <- outcome{partition: j.partition, at: at, err: err, stage: stageCatchUp}
		return
	}
	s.at("after claim")
	rows, err := s.sift(dbCtx, j.batch)
	if err != nil {
		s.failed(ctx, stageClaim, j.partition, err) // the rows that are fit go on; the others are met again
	}
	if len(rows) == 0 {
		s.done <- outcome{partition: j.partition, at: j.at, more: j.batch.More && err == nil, stage: stagePublish}
		return
	}
	first, err := s.publish(ctx, j.partition, j.at, rows)
	s.metrics.seconds.WithLabelValues(stagePublish).Observe(time.Since(start).Seconds())
	if err != nil {
		if errors.Is(err, errConflict) {
			s.metrics.conflicts.Inc()
		}
		s.done <- outcome{partition: j.partition, err: err, stage: stagePublish}
		return
	}
	s.at("after ack")
	s.metrics.batchRows.Observe(float64(len(rows)))
	mark := outbox.Mark{Partition: j.partition, OldTail: j.at.tail, Rows: make([]outbox.Published, len(rows))}
	for i := range rows {
		mark.Rows[i] = outbox.Published{ID: rows[i].OutboxID, EventID: rows[i].ID, Seq: first + uint64(i)}
	}
	mark.NewTail = first + uint64(len(rows)) - 1
	j.batch.Rows = nil // their payloads are on the stream
	s.acks <- ack{j, mark}
}

// sift returns the rows that are fit to be published, in order. A row that fails validation has its failure counted and holds
// back the later rows of its aggregate; rows that are held already are parked.
func (s *session) sift(ctx context.Context, b *outbox.Batch) ([]outbox.Row, error) {
	type aggregate struct {
		tenant int64
		typ    string
		id     int64
	}
	var failures []outbox.Failure
	failed := map[aggregate]bool{}
	fit := b.Rows[:0]
	for _, r := range b.Rows {
		key := aggregate{r.TenantID, r.AggregateType, r.AggregateID}
		if len(failed) > 0 && failed[key] {
			continue
		}
		if err := r.Validate(s.maxMessage); err != nil {
			failed[key] = true
			failures = append(failures, outbox.Failure{Row: r, Error: err.Error()})
			continue
		}
		fit = append(fit, r)
	}
	var errs []error
	if len(failures) > 0 {
		_, dead, err := outbox.Fail(ctx, s.pool, failures)
		errs = append(errs, err)
		if err == nil {
			s.metrics.dead.Add(float64(dead))
			for _, f := range failures {
				s.metrics.failed(&f.Row.Event)
				s.log.WarnContext(ctx, "outbox message cannot be published", "partition", b.Partition, "id", f.Row.OutboxID,
					"event_id", f.Row.ID, "attempts", f.Row.Attempts+1, "err", f.Error)
			}
		}
	}
	if len(b.Held) > 0 {
		errs = append(errs, outbox.Park(ctx, s.pool, b.Held))
	}
	return fit, errors.Join(errs...)
}

// marker records publish acks: all that have gathered, in one transaction.
func (s *session) marker(ctx context.Context) {
	for a := range s.acks {
		gathered := []ack{a}
		for more := true; more; {
			select {
			case a, ok := <-s.acks:
				if more = ok; ok {
					gathered = append(gathered, a)
				}
			default:
				more = false
			}
		}
		s.mark(ctx, gathered)
	}
}

func (s *session) mark(ctx context.Context, gathered []ack) {
	start := time.Now()
	marks := make([]outbox.Mark, len(gathered))
	for i, a := range gathered {
		marks[i] = a.mark
	}
	held, err := outbox.MarkPublished(ctx, s.pool, s.generation, marks)
	s.metrics.seconds.WithLabelValues(stageMark).Observe(time.Since(start).Seconds())
	s.at("after mark")
	own := make(map[int]bool, len(held))
	for _, p := range held {
		own[p] = true
	}
	for _, a := range gathered {
		o := outcome{partition: a.partition, stage: stageMark}
		switch {
		case err != nil:
			o.err = err
		case !own[a.partition]:
			o.err = fmt.Errorf("mark partition %d: %w", a.partition, errTailMoved)
		default:
			s.metrics.throughput.Add(float64(len(a.mark.Rows)))
			o.at, o.more = position{a.mark.NewTail, a.mark.NewTail}, a.batch.More
		}
		s.done <- o
	}
}
