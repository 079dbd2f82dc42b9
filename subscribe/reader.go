package subscribe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
)

type aggregate struct {
	tenant int64
	kind   string
	id     int64
}

// message is an event that is delivered and not yet acknowledged.
type message struct {
	jetstream.Msg
	term    context.Context // in which it may be handled
	event   event.Event
	fault   error // why it cannot be read
	seq     uint64
	attempt int // the next
}

func (m *message) aggregate() aggregate {
	return aggregate{m.event.TenantID, m.event.AggregateType, m.event.AggregateID}
}

const (
	perCall     = 16              // events in hand for each place: enough that none waits for NATS
	pullWait    = 3 * time.Second // of one request for more
	settleEvery = 500 * time.Millisecond
	order       = "order" // the group of a consumer that is pinned to one instance
	maxPending  = 100_000 // events that all instances together have in hand
)

// reader reads one stream.
type reader struct {
	*subscriber
	source
	reading, handling context.Context
	stop              context.CancelFunc
	room              chan struct{} // an event was finished
	consumer          jetstream.Consumer
	workers           sync.WaitGroup

	mu     sync.Mutex
	undone map[uint64]*message
	queues map[aggregate][]*message // the first is at work

	term    context.Context // in which this instance may begin calls: all of reading, or while it is the one that reads in order
	endTerm context.CancelFunc
	// InOrder; these are of the goroutine that reads.
	pin      string     // says that this instance is the one that reads
	behind   bool       // another instance was before, and may have had events in hand
	held     []*message // until those are here
	missing  int        // how many are not
	repeated bool       // some have come
}

// window is how many events are in hand at most.
func (r *reader) window() int { return perCall * r.concurrency }

// run reads until ctx ends, and returns when all in hand is handled or given back.
func (r *reader) run(ctx context.Context) {
	keep, stop := context.WithCancel(context.WithoutCancel(ctx))
	var keeper sync.WaitGroup
	keeper.Go(func() { r.keep(keep) })
	for attempt := 1; ctx.Err() == nil; attempt++ {
		progress, err := r.session(ctx)
		if ctx.Err() != nil {
			break
		}
		if progress {
			attempt = 1
		}
		r.trouble(ctx, r.stream, err)
		sleep(ctx, min(100*time.Millisecond<<min(attempt, 6), 5*time.Second))
	}
	r.giveBack()
	r.workers.Wait()
	stop()
	keeper.Wait()
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// session pulls events until something fails.
func (r *reader) session(ctx context.Context) (progress bool, err error) {
	if err := r.declare(ctx); err != nil {
		return false, err
	}
	r.trouble(ctx, r.stream, nil)
	if r.inOrder {
		r.giveBack() // the client does not know of its turn any more
	}
	for {
		free := r.free(ctx)
		if ctx.Err() != nil {
			return progress, nil
		}
		n, err := r.pull(ctx, free)
		progress = progress || n > 0
		switch {
		case ctx.Err() != nil:
			return progress, nil
		case errors.Is(err, jetstream.ErrPinIDMismatch): // another instance reads now
			r.giveBack()
		case err != nil:
			return progress, fmt.Errorf("read stream %s: %w", r.stream, err)
		}
		if err := r.settle(ctx); err != nil {
			return progress, err
		}
	}
}

// pull takes up to so many events, as they come. What has come when ctx ends goes back.
func (r *reader) pull(ctx context.Context, events int) (n int, err error) {
	wait := min(pullWait, r.takeover/3)
	if r.behind {
		wait = min(wait, settleEvery)
	}
	pulling, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	opts := []jetstream.FetchOpt{jetstream.FetchContext(pulling)}
	if r.inOrder {
		opts = append(opts, jetstream.FetchPriorityGroup(order))
	}
	batch, err := r.consumer.Fetch(events, opts...)
	if err != nil {
		return 0, err
	}
	for m := range batch.Messages() {
		if n++; ctx.Err() != nil {
			_ = m.Nak() // if it is lost, NATS delivers the message after AckWait
			continue
		}
		if err := r.take(ctx, m); err != nil {
			return n, err
		}
	}
	if err = batch.Error(); errors.Is(err, context.DeadlineExceeded) {
		err = nil // that was all
	}
	return n, err
}

// free waits until there is room for some events, and returns for how many. A reader in order asks for one at least now and then, to stay the one that reads.
func (r *reader) free(ctx context.Context) int {
	late := time.NewTimer(r.takeover / 3)
	defer late.Stop()
	for {
		r.mu.Lock()
		n := r.window() - len(r.undone)
		r.mu.Unlock()
		switch {
		case r.repeated:
			return min(r.missing, r.window())
		case r.behind, r.inOrder && r.pin == "":
			return 1 // the first tells whether there are others before it
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

// declare makes the durable consumer, or brings the one that exists up to the options. Where it begins never changes.
func (r *reader) declare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.streams.Timeout)
	defer cancel()
	cfg := jetstream.ConsumerConfig{
		Durable: r.durable, FilterSubject: r.subject, AckPolicy: jetstream.AckExplicitPolicy, AckWait: r.takeover, MaxAckPending: maxPending, MaxDeliver: -1,
		DeliverPolicy: jetstream.DeliverAllPolicy, Description: "Tidings subscriber " + r.name,
	}
	if !r.since.IsZero() && !r.again {
		cfg.DeliverPolicy, cfg.OptStartTime = jetstream.DeliverByStartTimePolicy, &r.since
	}
	if r.inOrder {
		cfg.PriorityPolicy, cfg.PriorityGroups, cfg.PinnedTTL = jetstream.PriorityPolicyPinned, []string{order}, r.takeover
	}
	have, err := r.js.Consumer(ctx, r.stream, r.durable)
	switch {
	case err == nil:
		was := have.CachedInfo().Config
		cfg.DeliverPolicy, cfg.OptStartTime = was.DeliverPolicy, was.OptStartTime
		if was.FilterSubject != cfg.FilterSubject || was.AckPolicy != cfg.AckPolicy {
			return fmt.Errorf("the consumer %s of stream %s is not this subscriber's: its filter is %q", r.durable, r.stream, was.FilterSubject)
		}
		r.consumer, err = r.js.UpdateConsumer(ctx, r.stream, cfg)
	case errors.Is(err, jetstream.ErrConsumerNotFound):
		r.consumer, err = r.js.CreateOrUpdateConsumer(ctx, r.stream, cfg)
	}
	if err != nil {
		return fmt.Errorf("declare consumer %s of stream %s: %w", r.durable, r.stream, err)
	}
	return nil
}

// pending returns how many events are not handled, by any instance.
func (r *reader) pending(ctx context.Context) (int, error) {
	c, err := r.js.Consumer(ctx, r.stream, r.durable)
	if err != nil {
		return 0, err
	}
	i := c.CachedInfo()
	return int(i.NumPending) + i.NumAckPending, nil
}

// take takes in a message.
func (r *reader) take(ctx context.Context, msg jetstream.Msg) error {
	meta, err := msg.Metadata()
	if err != nil {
		return err
	}
	m := &message{Msg: msg, seq: meta.Sequence.Stream, attempt: int(meta.NumDelivered)}
	if r.again {
		m.event, m.fault = decodeLetter(msg)
	} else {
		if !event.Ours(msg.Headers()) {
			r.metrics.foreign.Inc()
			r.log.WarnContext(ctx, "skipping a message that no relay of ours published", "stream", r.stream, "stream_seq", m.seq, "subject", msg.Subject())
			return msg.Ack()
		}
		m.event, m.fault = event.Decode(msg.Subject(), msg.Headers(), msg.Data())
		m.event.Stream, m.event.Seq = r.stream, m.seq
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.undone[m.seq] != nil { // it came again, because NATS did not hear that we are at it
		return nil
	}
	if pin := msg.Headers().Get("Nats-Pin-Id"); r.inOrder && pin != r.pin {
		r.pin, r.behind = pin, true
		r.endTerm()
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

// dispatch has a message handled behind those of its aggregate. It is called under r.mu.
func (r *reader) dispatch(m *message) {
	a := m.aggregate()
	q, busy := r.queues[a]
	r.queues[a] = append(q, m)
	if !busy {
		r.workers.Go(func() { r.work(a) })
	}
}

// work handles the messages of an aggregate until there are none. Those whose term ends before go back.
func (r *reader) work(a aggregate) {
	for {
		r.mu.Lock()
		m := r.queues[a][0]
		r.mu.Unlock()
		finished := r.handle(m.term, m)
		r.mu.Lock()
		if !finished {
			_ = m.Nak() // if it is lost, NATS delivers the message after AckWait
		}
		delete(r.undone, m.seq)
		rest := r.queues[a][1:]
		if len(rest) == 0 {
			delete(r.queues, a)
		} else {
			r.queues[a] = rest
		}
		r.mu.Unlock()
		select {
		case r.room <- struct{}{}:
		default:
		}
		if len(rest) == 0 {
			return
		}
	}
}

// keep tells NATS of what is in hand that it is, until ctx ends.
func (r *reader) keep(ctx context.Context) {
	tick := time.NewTicker(r.takeover / 3)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.mu.Lock()
		for _, m := range r.undone {
			_ = m.InProgress() // the next one is soon
		}
		r.mu.Unlock()
	}
}

// giveBack ends this instance's turn to read in order: what is not at work goes to the one whose turn it is.
func (r *reader) giveBack() {
	r.endTerm()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.held {
		_ = m.Nak()
		delete(r.undone, m.seq)
	}
	r.pin, r.held, r.behind, r.missing, r.repeated = "", nil, false, 0, false
}

// settle lets the events go that were held when this instance became the one that reads in order, once those are here that the one before it had in hand and did
// not acknowledge. NATS delivers them again when AckWait is over.
func (r *reader) settle(ctx context.Context) error {
	if !r.behind {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.streams.Timeout)
	defer cancel()
	i, err := r.consumer.Info(ctx)
	if err != nil {
		return fmt.Errorf("look at consumer %s of stream %s: %w", r.durable, r.stream, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.missing = i.NumAckPending - len(r.undone); r.missing > 0 {
		return nil
	}
	slices.SortFunc(r.held, func(a, b *message) int { return cmp.Compare(a.seq, b.seq) })
	for _, m := range r.held {
		r.dispatch(m)
	}
	r.held, r.behind, r.missing, r.repeated = nil, false, 0, false
	return nil
}
