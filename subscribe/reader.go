package subscribe

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

type aggregate struct {
	tenant int64
	kind   string
	id     event.ID
}

// message is a delivered event that is not yet acknowledged.
type message struct {
	jetstream.Msg
	term    context.Context // a call for the message may begin until it ends
	event   event.Event
	fault   error // why the event cannot be decoded
	seq     uint64
	stored  time.Time     // with seq, it identifies the message
	attempt int           // the number of the next attempt
	turn    chan struct{} // nil unless it is suspected; closed when it may be handled
	former  bool          // of a stream that was recreated, under r.mu: NATS would take an answer for that of a new message
}

func (m *message) aggregate() aggregate {
	return aggregate{m.event.TenantID, m.event.AggregateType, m.event.AggregateID}
}

const (
	perCall     = 16              // events in hand for each place, enough that no place waits for NATS
	pullWait    = 3 * time.Second // the wait of one request for more events
	settleEvery = 500 * time.Millisecond
	// The memory of events that wait behind a failing one of their aggregate, counted as 1 KiB each
	// and their payloads. Until then they take no room from other aggregates.
	maxParked = 8 << 20
)

// reader reads one stream.
type reader struct {
	*subscriber
	source
	reading, handling context.Context
	room              work.Signal // an event was finished
	consumer          jetstream.Consumer
	workers           sync.WaitGroup
	looking           sync.Mutex // held by sure

	mu      sync.Mutex
	created time.Time // of the stream, and up to where NATS has delivered it; for Bootstrap
	passed  uint64
	looked  time.Time // when the last look at the stream began
	undone  map[uint64]*message
	queues  map[aggregate][]*message // the first of each queue is being handled
	failing map[aggregate]bool       // the first of the queue has failed and will be tried again
	parked  struct{ events, bytes int }
	// Events that may end the process, in the order of their turns, and whether this process had a
	// guilty one.
	suspects  []*message
	condemned bool

	term    context.Context // this instance may begin calls until it ends: with reading, or with its turn to read in order
	endTerm context.CancelFunc
	// For InOrder.
	pulls  atomic.Uint64 // requests that began or ended: an odd number while NATS has one
	yield  atomic.Bool   // pass the turn to another instance
	others int           // instances that wait for a turn at this stream; see turns.go
	// Only the goroutine that reads changes them, with mu held.
	pin      string     // the id of this instance's turn to read
	latest   uint64     // the number of the last delivery
	behind   bool       // the previous turn may have unfinished events, or a delivery was lost
	held     []*message // events that wait until NATS has delivered those again
	missing  int        // unfinished events of the previous turn that NATS has not delivered again yet
	repeated bool       // NATS has delivered some of them again
}

// window is the largest number of events in hand.
func (r *reader) window() int { return perCall * r.Concurrency }

// run reads until ctx ends. It returns when every event in hand is handled or given back.
func (r *reader) run(ctx context.Context) {
	r.reading = ctx
	r.term, r.endTerm = context.WithCancel(ctx)
	keep, stop := context.WithCancel(context.WithoutCancel(ctx))
	var keeper sync.WaitGroup
	keeper.Go(func() { r.keep(keep) })
	for failures := 1; ctx.Err() == nil; failures++ {
		progress, err := r.session(ctx)
		if ctx.Err() != nil {
			break
		}
		if progress {
			failures = 1
		}
		if errors.Is(err, ErrFilter) || errors.Is(err, ErrOption) {
			r.end(err)
		}
		r.trouble(ctx, r.stream, err)
		work.Sleep(ctx, max(200*time.Millisecond, work.Retry(failures))) // a session asks NATS for much
	}
	r.giveBack()
	r.workers.Wait()
	stop()
	keeper.Wait()
}

// session pulls events until an error.
func (r *reader) session(ctx context.Context) (progress bool, err error) {
	if err := r.declare(ctx); err != nil {
		return false, err
	}
	r.trouble(ctx, r.stream, nil)
	if r.InOrder {
		r.giveBack() // the client no longer knows its turn
	}
	for {
		free := r.awaitRoom(ctx)
		if ctx.Err() != nil {
			return progress, nil
		}
		n, err := r.pull(ctx, free)
		progress = progress || n > 0
		switch {
		case ctx.Err() != nil:
			return progress, nil
		case err == nil && r.yield.CompareAndSwap(true, false):
			r.passTurn(ctx)
		case errors.Is(err, jetstream.ErrPinIDMismatch): // another instance has the turn
			r.giveBack()
		case err != nil:
			return progress, fmt.Errorf("read stream %s: %w", r.stream, err)
		}
		if err := r.settle(ctx); err != nil {
			return progress, err
		}
	}
}

// pull takes up to the given number of events as they arrive. Events that arrive after the end of
// ctx go back.
func (r *reader) pull(ctx context.Context, events int) (n int, err error) {
	wait := min(pullWait, r.Takeover/3)
	if r.behind {
		wait = min(wait, settleEvery)
	}
	pulling, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	opts := []jetstream.FetchOpt{jetstream.FetchContext(pulling)}
	if r.InOrder {
		opts = append(opts, jetstream.FetchPriorityGroup(broker.OrderGroup))
	}
	r.pulls.Add(1)
	defer r.pulls.Add(1)
	batch, err := r.consumer.Fetch(events, opts...)
	if err != nil {
		return 0, err
	}
	for m := range batch.Messages() {
		if n++; ctx.Err() != nil {
			_ = m.Nak() // if the Nak is lost, NATS delivers the message after AckWait
			continue
		}
		if err := r.take(ctx, m); err != nil {
			return n, err
		}
	}
	if err = batch.Error(); errors.Is(err, context.DeadlineExceeded) {
		err = nil // no more events in time
	}
	return n, err
}

// awaitRoom waits until there is room for some events, and returns their number. A reader in order
// requests at least one event now and then, to keep its turn.
func (r *reader) awaitRoom(ctx context.Context) int {
	late := time.NewTimer(r.Takeover / 3)
	defer late.Stop()
	for {
		r.mu.Lock()
		n := r.window() - len(r.undone)
		if r.parked.bytes <= maxParked {
			n += r.parked.events
		}
		r.mu.Unlock()
		switch {
		case r.repeated:
			return min(r.missing, r.window())
		case r.behind, r.InOrder && r.pin == "":
			return 1 // the first event tells whether the previous instance has unfinished ones
		}
		if n > 0 && n >= r.window()/4 {
			return n
		}
		select {
		case <-ctx.Done():
			return 0
		case <-late.C:
			return max(n, 1)
		case <-r.room:
		}
	}
}

// declare creates the durable consumer, or updates an existing one to the options. Its start never
// changes.
func (r *reader) declare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.Broker.Timeout)
	defer cancel()
	cfg := jetstream.ConsumerConfig{
		Durable: r.durable, FilterSubject: r.subject, AckPolicy: jetstream.AckExplicitPolicy, AckWait: r.Takeover,
		MaxAckPending: broker.MaxUnacked, MaxDeliver: -1,
		DeliverPolicy: jetstream.DeliverAllPolicy, Description: "Tidings subscriber " + r.Name,
	}
	if !r.Since.IsZero() && !r.again {
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &r.Since
	}
	if r.InOrder {
		cfg.PriorityPolicy, cfg.PriorityGroups, cfg.PinnedTTL = jetstream.PriorityPolicyPinned, []string{broker.OrderGroup}, r.Takeover
	}
	have, err := r.js.Consumer(ctx, r.stream, r.durable)
	if r.boot != nil && !r.again {
		if err := r.checkPosition(ctx, have, &cfg); err != nil {
			return err
		}
	}
	switch {
	case err == nil:
		was := have.CachedInfo().Config
		cfg.DeliverPolicy, cfg.OptStartTime, cfg.OptStartSeq = was.DeliverPolicy, was.OptStartTime, was.OptStartSeq
		if was.FilterSubject != cfg.FilterSubject || was.AckPolicy != cfg.AckPolicy {
			return fmt.Errorf("%w: the consumer %s of stream %s is not this subscriber's: its filter is %q, and not %q", ErrFilter,
				r.durable, r.stream, was.FilterSubject, cfg.FilterSubject)
		}
		if was.Metadata[broker.MetaFilter] != "" {
			r.kept.Store(true)
			r.consumer = have
			return r.fits(was)
		}
		if r.consumer = have; !sameSettings(was, cfg) {
			r.consumer, err = r.js.UpdateConsumer(ctx, r.stream, cfg)
		}
	case errors.Is(err, jetstream.ErrConsumerNotFound) && (r.Tenant > 0 || r.kept.Load()):
		return fmt.Errorf("%w: the relay creates %s on stream %s, or `tidings nats durable`", settings.ErrNoDurable, r.durable, r.stream)
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		r.consumer, err = r.js.CreateOrUpdateConsumer(ctx, r.stream, cfg)
	}
	if err != nil {
		return fmt.Errorf("declare consumer %s of stream %s: %w", r.durable, r.stream, err)
	}
	return nil
}

// checkPosition sets the position of a new consumer. It makes an instance read exports if the
// stream no longer has the events after the consumer's position. have may be nil.
func (r *reader) checkPosition(ctx context.Context, have jetstream.Consumer, cfg *jetstream.ConsumerConfig) error {
	number, _ := r.Broker.Number(r.stream)
	st, err := broker.ReadStream(ctx, r.js, r.Broker, number)
	if err != nil {
		return err
	}
	after := r.boot.startOf(st).Seq
	if after > 0 {
		cfg.DeliverPolicy, cfg.OptStartSeq = jetstream.DeliverByStartSequencePolicy, after+1
	}
	if have != nil {
		after = max(after, have.CachedInfo().Delivered.Stream)
	}
	r.mu.Lock()
	created, passed := r.created, max(r.passed, after)
	if !created.Equal(st.Created) {
		passed = after
	}
	if created.IsZero() {
		created = st.Created
	}
	r.mu.Unlock()
	if err := r.boot.check(ctx, st, created, passed); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.created, r.passed = st.Created, passed
	return nil
}

// checkPassed is checkPosition for a reader that runs. Between two calls it cannot know whether
// NATS delivered a message before that expired, so it takes the position of the call before.
func (r *reader) checkPassed(ctx context.Context, st broker.Stream, delivered uint64) error {
	r.mu.Lock()
	created, passed := r.created, r.passed
	r.mu.Unlock()
	if !created.Equal(st.Created) { // checkPosition comes
		return nil
	}
	if err := r.boot.check(ctx, st, created, passed); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.created.Equal(st.Created) {
		r.passed = max(r.passed, delivered)
	}
	return nil
}

// sameSettings compares what the options set.
func sameSettings(a, b jetstream.ConsumerConfig) bool {
	return a.AckWait == b.AckWait && a.MaxAckPending == b.MaxAckPending && a.MaxDeliver == b.MaxDeliver &&
		a.PriorityPolicy == b.PriorityPolicy && a.PinnedTTL == b.PinnedTTL
}

// fits returns an error if the options do not fit a consumer that an operator created.
func (r *reader) fits(have jetstream.ConsumerConfig) error {
	if inOrder := have.PriorityPolicy == jetstream.PriorityPolicyPinned; have.AckWait != r.Takeover || inOrder != r.InOrder {
		return fmt.Errorf("%w: the consumer %s of stream %s was created with --ack-wait %s and --in-order=%t: "+
			"the options of Handle must say Takeover(%[4]s), and InOrder() or not", ErrOption, r.durable, r.stream, have.AckWait, inOrder)
	}
	return nil
}

// pending returns the number of events of the stream that no instance has handled yet.
func (r *reader) pending(ctx context.Context, st broker.Stream) (int, error) {
	pulls := r.pulls.Load()
	c, err := r.js.Consumer(ctx, r.stream, r.durable)
	if err != nil {
		return 0, err
	}
	i := c.CachedInfo()
	r.countOthers(i, pulls)
	if r.boot != nil {
		err = r.checkPassed(ctx, st, i.Delivered.Stream)
		r.trouble(ctx, "exports of "+r.stream, err)
	}
	return int(i.NumPending) + i.NumAckPending, err
}

// take adds a delivered message to those in hand.
func (r *reader) take(ctx context.Context, msg jetstream.Msg) error {
	meta, err := msg.Metadata()
	if err != nil {
		return err
	}
	r.count(meta.Sequence.Consumer)
	m := &message{Msg: msg, seq: meta.Sequence.Stream, stored: meta.Timestamp, attempt: int(meta.NumDelivered)}
	if r.again {
		m.event, m.fault = decodeLetter(msg)
	} else {
		if !event.Ours(msg.Headers()) {
			r.metrics.Foreign.Inc()
			r.Log.WarnContext(ctx, "skipping a message that no relay published", "stream", r.stream, "stream_seq", m.seq,
				"subject", msg.Subject())
			return msg.Ack()
		}
		m.event, m.fault = event.Decode(msg.Subject(), msg.Headers(), msg.Data())
		m.event.Stream, m.event.Seq = r.stream, m.seq
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if have := r.undone[m.seq]; have != nil && have.stored.Equal(m.stored) { // NATS did not get InProgress in time
		return nil
	} else if have != nil {
		r.disown(m.stored)
	}
	if pin := msg.Headers().Get("Nats-Pin-Id"); r.InOrder && pin != r.pin {
		r.endTurn()
		r.pin, r.behind = pin, true
		r.term, r.endTerm = context.WithCancel(r.reading)
	}
	m.term, r.undone[m.seq] = r.term, m
	if r.behind {
		r.repeated = r.repeated || meta.NumDelivered > 1
		r.held = append(r.held, m)
		return nil
	}
	r.dispatch(m)
	return nil
}

// count notices lost deliveries: their events come again after AckWait, so later ones wait for
// them.
func (r *reader) count(delivery uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.behind = r.behind || r.InOrder && delivery != r.latest+1
	r.latest = delivery
}

// disown makes the messages in hand that were stored before a time those of a former stream. Calls
// for them end as they may, without an answer to NATS. The caller holds r.mu.
func (r *reader) disown(before time.Time) {
	maps.DeleteFunc(r.undone, func(_ uint64, m *message) bool {
		m.former = m.stored.Before(before)
		return m.former
	})
	r.held = slices.DeleteFunc(r.held, func(m *message) bool { return m.former })
}

// lookedFor is how long a look at the stream vouches for it.
const lookedFor = 3 * settings.Recheck

// sure waits until the reader knows that the stream was not recreated meanwhile. A process that was
// frozen or cut off may have missed that, and its answer would be taken for that of a new message.
// It returns an error if Drain ends before, or the connection is closed.
func (r *reader) sure() error {
	if r.again {
		return nil
	}
	r.looking.Lock()
	defer r.looking.Unlock()
	for failures := 1; ; failures++ {
		r.mu.Lock()
		at, now := r.looked, time.Now()
		r.mu.Unlock()
		// The monotonic clock stops while the machine sleeps. A connection keeps answers for later.
		if r.js.Conn().IsConnected() && now.Sub(at) < lookedFor && now.Round(0).Sub(at.Round(0)) < lookedFor {
			return nil
		}
		st, err := r.look(r.handling)
		if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, jetstream.ErrConsumerNotFound) {
			return nil // there is nothing to take the answer for its own
		}
		if err == nil {
			r.logRecreated(r.handling, st)
			r.saw(now)
			return nil
		}
		if r.js.Conn().IsClosed() {
			return err
		}
		if err := work.Sleep(r.handling, work.Retry(failures)); err != nil {
			return err
		}
	}
}

// look reads the stream as subscriber.list does.
func (r *reader) look(ctx context.Context) (st broker.Stream, err error) {
	if r.Tenant == 0 {
		number, _ := r.Broker.Number(r.stream)
		return broker.ReadStream(ctx, r.js, r.Broker, number)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Broker.Timeout)
	defer cancel()
	c, err := r.js.Consumer(ctx, r.stream, r.durable)
	if err == nil {
		st.Name, st.Created = r.stream, c.CachedInfo().Created
	}
	return st, err
}

// saw records a look at the stream that began at a time.
func (r *reader) saw(at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.looked = at
}

// answer answers NATS for a message in hand.
func (r *reader) answer(m *message, how func() error) error {
	if err := r.sure(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.former {
		return nil
	}
	return how()
}

// dispatch queues a message behind those of its aggregate. The caller holds r.mu.
func (r *reader) dispatch(m *message) {
	a := m.aggregate()
	r.suspect(m)
	q, busy := r.queues[a]
	r.queues[a] = append(q, m)
	if !busy {
		r.workers.Go(func() { r.work(a) })
	}
	if r.failing[a] {
		r.park(1, m)
	}
}

// park counts messages that wait behind a failing one, or with -1 no longer do. The caller holds
// r.mu.
func (r *reader) park(by int, all ...*message) {
	for _, m := range all {
		r.parked.events += by
		r.parked.bytes += by * (1<<10 + len(m.Data()))
	}
}

// failed makes room for other aggregates while a message waits for its next attempt.
func (r *reader) failed(m *message) {
	a := m.aggregate()
	r.mu.Lock()
	if !r.failing[a] {
		r.failing[a] = true
		r.park(1, r.queues[a][1:]...)
	}
	r.mu.Unlock()
	r.room.Notify()
}

// work handles the messages of an aggregate until the queue is empty. It gives back messages whose
// term ends before.
func (r *reader) work(a aggregate) {
	for {
		r.mu.Lock()
		m := r.queues[a][0]
		r.mu.Unlock()
		finished := r.handle(m.term, m)
		r.mu.Lock()
		if !finished && !m.former {
			_ = m.Nak() // if the Nak is lost, NATS delivers the message after AckWait
		}
		if !m.former { // with the Nak, as the message may come again at once
			delete(r.undone, m.seq)
		}
		r.release(m)
		rest := r.queues[a][1:]
		if r.failing[a] {
			delete(r.failing, a)
			r.park(-1, rest...)
		}
		if len(rest) == 0 {
			delete(r.queues, a)
		} else {
			r.queues[a] = rest
		}
		r.mu.Unlock()
		r.room.Notify()
		if len(rest) == 0 {
			return
		}
	}
}

// keep reports the messages in hand to NATS as in progress, until ctx ends.
func (r *reader) keep(ctx context.Context) {
	for work.Sleep(ctx, r.Takeover/3) == nil {
		r.mu.Lock()
		for _, m := range r.undone {
			_ = m.InProgress() // after a failure the next one comes soon
		}
		r.mu.Unlock()
	}
}
