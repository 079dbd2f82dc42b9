package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/outbox"
)

// session is one connection to the broker and the work done over it.
type session struct {
	*Relay
	nc         *nats.Conn
	js         jetstream.JetStream
	closed     chan struct{} // by nc's end
	bound      outbox.Stream
	look       chan struct{} // asks for a look at the stream
	generation int64
	maxMessage int

	jobs chan job
	acks chan ack
	done chan outcome

	conns int64 // that the pool had opened when positions were last known to be this database's

	touched atomic.Uint32 // partitions that wake-ups named, a bit each
	wake    chan struct{}
}

// partition is what the scheduler knows of one partition. Nobody else touches it.
type partition struct {
	number   int
	known    bool     // at is what the last ack or catch-up said
	at       position // read before the rows that are published after it
	busy     bool     // a job is in flight
	more     bool     // the last claim was cut by its limit: claim again at once
	woken    bool     // somebody has committed rows
	failures int      // in a row
	refusals int      // of these, publishes that a healthy broker refused
	retryAt  time.Time
	stuck    bool // counted in the gauge
}

// job is work for a publisher: a batch to publish, or a catch-up when there is none.
type job struct {
	partition int
	at        position
	batch     *outbox.Batch
	alone     bool // one row, to find out whether it is the one that the broker refuses
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
	refused   bool // by a broker that is well: the fault may be a message's
}

// maxRefusals is how often in a row a healthy broker may refuse a partition's batch before its first row is sent alone.
const maxRefusals = 3

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

	if err := s.openConns(ctx); err != nil {
		return err
	}
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
	s.wake = make(chan struct{}, 1)
	if _, err := s.nc.Subscribe(broker.WakeSubject, s.onWake); err != nil {
		s.log.WarnContext(ctx, "no wake-ups: polling alone", "err", err)
	}
	for range s.cfg.Publishers {
		workers.Go(func() {
			for j := range s.jobs {
				s.work(pubCtx, dbCtx, j)
			}
		})
	}
	workers.Go(func() { s.marker(dbCtx) })
	gone := make(chan error, 1)
	watchCtx, unwatch := context.WithCancel(ctx)
	defer unwatch()
	leases.Go(func() { s.watch(watchCtx, gone) })

	parts, err := s.schedule(ctx, dbCtx, group, gone)
	unwatch()
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

// onWake notes which partitions have new rows.
func (s *session) onWake(m *nats.Msg) {
	s.touched.Or(broker.DecodeWake(m.Data))
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func countBusy(parts map[int]*partition) (n int) {
	for _, p := range parts {
		if p.busy {
			n++
		}
	}
	return n
}

// schedule decides what is done next until ctx ends (nil), or the connection or the stream does. It returns the partitions as they are, some
// of them busy.
func (s *session) schedule(ctx, dbCtx context.Context, group *lease.Group, gone <-chan error) (map[int]*partition, error) {
	parts := make(map[int]*partition, event.Partitions)
	var (
		poll        = s.cfg.PollInterval // between claims that nobody asked for: halved when they find something, doubled when not
		nextPoll    = time.Now()
		lastClaim   time.Time
		next        chores
		claimErrors int
	)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		now := time.Now()
		held := group.Held()
		s.reconcile(parts, held)
		if err := s.keep(dbCtx, &next, parts, held); err != nil {
			s.failed(ctx, stageClaim, -1, err)
		}

		due := !now.Before(nextPoll)
		rested := now.Sub(lastClaim) >= minPoll
		wait := min(releaseEvery, s.floorEvery)
		var asks, alone []int
		for _, p := range parts {
			switch {
			case p.busy:
			case now.Before(p.retryAt):
				wait = min(wait, p.retryAt.Sub(now))
			case !p.known:
				p.busy = true
				s.jobs <- job{partition: p.number}
			case p.refusals >= maxRefusals:
				alone = append(alone, p.number)
			case due || claimErrors == 0 && (p.more || p.woken && rested):
				asks = append(asks, p.number)
			case p.woken:
				wait = min(wait, minPoll)
			}
		}
		if len(asks)+len(alone) > 0 {
			lastClaim = now
			found, err := s.claim(dbCtx, parts, asks, alone)
			switch {
			case err != nil:
				claimErrors++
				s.failed(ctx, stageClaim, -1, err)
				nextPoll = time.Now().Add(retryAfter(claimErrors))
			case due:
				claimErrors = 0
				if poll = min(poll*2, s.cfg.PollInterval); found {
					poll = max(poll/4, minPoll)
				}
				nextPoll = time.Now().Add(poll*3/4 + rand.N(poll/4+1))
			}
		}
		if until := time.Until(nextPoll); until > 0 {
			wait = min(wait, until)
		}

		timer.Reset(max(wait, 0))
		select {
		case <-ctx.Done():
			return parts, nil
		case <-s.closed:
			return parts, errors.New("relay: the connection to the broker ended")
		case err := <-gone:
			return parts, err
		case <-group.Changed():
		case <-timer.C:
		case <-s.wake:
			touched := s.touched.Swap(0)
			for _, p := range parts {
				p.woken = p.woken || touched&(1<<p.number) != 0
			}
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

// chores are when what is due now and then is due next.
type chores struct{ release, raise time.Time }

// keep does what is due now and then: rows that were put off and have fallen due, floors.
func (s *session) keep(ctx context.Context, next *chores, parts map[int]*partition, held []int) error {
	if len(held) == 0 {
		return nil
	}
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	now := time.Now()
	if now.After(next.release) {
		next.release = now.Add(releaseEvery)
		released, err := outbox.Release(ctx, s.pool, held, releaseLimit)
		if err != nil {
			return err
		}
		for _, n := range released {
			if p := parts[n]; p != nil {
				p.more = true
			}
		}
	}
	if now.After(next.raise) {
		next.raise = now.Add(s.floorEvery)
		return s.raise(ctx, parts, held)
	}
	return nil
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

// claim reads the due rows of the idle partitions, only the first one of those in alone, and hands each batch to a publisher.
// It reports whether it found any.
func (s *session) claim(ctx context.Context, parts map[int]*partition, asks, alone []int) (found bool, err error) {
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	for _, c := range []struct {
		asks  []int
		limit int
	}{{asks, s.cfg.BatchSize}, {alone, 1}} {
		if len(c.asks) == 0 {
			continue
		}
		start := time.Now()
		batches, err := outbox.Claim(ctx, s.pool, c.asks, c.limit, s.cfg.BatchBytes, claimBytes)
		if err != nil {
			return found, err
		}
		s.metrics.seconds.WithLabelValues(stageClaim).Observe(time.Since(start).Seconds())
		if s.reconnected(parts) {
			return false, nil // what was claimed may be on the stream
		}
		for _, n := range c.asks {
			parts[n].more, parts[n].woken = false, false
		}
		for i := range batches {
			p := parts[batches[i].Partition]
			p.busy = true
			s.jobs <- job{partition: p.number, at: p.at, batch: &batches[i], alone: p.refusals >= maxRefusals}
			found = true
		}
	}
	return found, nil
}

// openConns opens the connections that the session needs at once: each that is opened later stops everything for a catch-up.
func (s *session) openConns(ctx context.Context) error {
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	for range min(s.cfg.Publishers+3, int(s.pool.Config().MaxConns)-1) { // those that catch up or sift, the scheduler, the marker, the leases
		conn, err := s.pool.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("open connections: %w", err)
		}
		defer conn.Release()
	}
	s.conns = s.pool.Stat().NewConnsCount()
	return nil
}

// reconnected reports that the pool has opened a connection since it was last asked. Behind it may be a server that crashed or
// another one, which has lost the last marks: rows are pending again that are on the stream, and the tail that this session
// knows is the stream's. So nothing is published before each partition has been caught up.
func (s *session) reconnected(parts map[int]*partition) bool {
	now := s.pool.Stat().NewConnsCount()
	if now == s.conns {
		return false
	}
	s.conns = now
	for _, p := range parts {
		if !p.busy { // a busy one's mark finds another tail
			p.known = false
		}
	}
	return true
}

// finish takes a job's end into the partition's state.
func (s *session) finish(ctx context.Context, parts map[int]*partition, o outcome) {
	p := parts[o.partition]
	p.busy = false
	if o.err == nil {
		p.known, p.at, p.more = true, o.at, o.more || o.stage == stageCatchUp
		p.stuck, p.retryAt = false, time.Time{}
		if o.stage != stageCatchUp || p.refusals == 0 { // a catch-up that finds nothing does not end a row of refusals
			p.failures, p.refusals = 0, 0
		}
		return
	}
	p.known, p.more = false, false
	if o.refused {
		p.refusals++
	}
	p.failures++
	if (errors.Is(o.err, errTailMoved) || errors.Is(o.err, errConflict)) && p.failures == 1 {
		return // another relay is, or was, at work: look again at once
	}
	if errors.Is(o.err, errRepaired) {
		s.nc.Close()
	}
	select {
	case s.look <- struct{}{}:
	default:
	}
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
	seqs, err := s.publish(ctx, j.partition, j.at, rows)
	s.metrics.seconds.WithLabelValues(stagePublish).Observe(time.Since(start).Seconds())
	if err != nil {
		if errors.Is(err, errConflict) {
			s.metrics.conflicts.Inc()
		}
		if j.alone && isMessageFault(err) {
			err = errors.Join(err, s.fail(dbCtx, []outbox.Failure{{Row: rows[0], Error: err.Error()}}))
		}
		s.done <- outcome{partition: j.partition, err: err, stage: stagePublish, refused: isRefusal(err)}
		return
	}
	s.at("after ack")
	s.metrics.batchRows.Observe(float64(len(rows)))
	mark := outbox.Mark{Partition: j.partition, OldTail: j.at.tail, NewTail: seqs[len(seqs)-1], Rows: make([]outbox.Published, len(rows))}
	for i := range rows {
		mark.Rows[i] = outbox.Published{ID: rows[i].OutboxID, EventID: rows[i].ID, Seq: seqs[i]}
	}
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
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	var errs []error
	if len(failures) > 0 {
		errs = append(errs, s.fail(ctx, failures))
	}
	if len(b.Held) > 0 {
		errs = append(errs, outbox.Park(ctx, s.pool, b.Held))
	}
	return fit, errors.Join(errs...)
}

// fail counts the failures of rows that cannot be published as they are.
func (s *session) fail(ctx context.Context, failures []outbox.Failure) error {
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	_, dead, err := outbox.Fail(ctx, s.pool, failures)
	if err != nil {
		return err
	}
	s.metrics.dead.Add(float64(dead))
	for _, f := range failures {
		s.metrics.failed(&f.Row.Event)
		s.log.WarnContext(ctx, "outbox message cannot be published", "partition", f.Row.Partition, "id", f.Row.OutboxID,
			"event_id", f.Row.ID, "attempts", f.Row.Attempts+1, "err", f.Error)
	}
	return nil
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
	ctx, cancel := s.forDB(ctx)
	defer cancel()
	done, err := outbox.MarkPublished(ctx, s.pool, s.generation, marks)
	s.metrics.seconds.WithLabelValues(stageMark).Observe(time.Since(start).Seconds())
	s.at("after mark")
	s.doubled(ctx, done.Duplicates)
	own := make(map[int]bool, len(done.Held))
	for _, p := range done.Held {
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
