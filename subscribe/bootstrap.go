package subscribe

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// Snapshot is the Type of an event with a state of an export (Bootstrap). Its payload is the whole
// state of an entity, as that of the entity's last event.
const Snapshot = "snapshot"

// bootstrap gives the states of exports to a handler. A record in NATS has how far it is, so any
// instance continues after a crash.
//
//	no record ──▶ states are handled ──▶ durable consumers at the ends of the exports ──▶ events are handled
//	                      ▲                                                                      │
//	                      └────────── events expired, or a stream was recreated ◀────────────────┘
//
// Every change of the record compares and swaps. So an instance that was frozen, and has lost its
// claim, repeats calls at most. The positions are in the record before any durable consumer is
// created, so a second instance creates the same one.
type bootstrap struct {
	*subscriber
	kv       jetstream.KeyValue
	handling context.Context // of the calls
	owner    string          // the name of this instance in the record
	joined   atomic.Bool     // there are durable consumers, so readers may start

	observed uint64 // the revision of another instance's record, and when it was new; for run alone
	since    time.Time

	mu       sync.Mutex
	record   progress
	revision uint64 // of record; 0 if there is none
}

// progress is the record of a subscriber's exports.
type progress struct {
	Owner   string        `json:"owner,omitempty"`   // the instance that reads exports; empty if all are read
	Exports []exported    `json:"exports,omitempty"` // until all are read
	Starts  map[int]start `json:"starts,omitempty"`  // by partition: where the streams that existed continue after the exports
	Joined  bool          `json:"joined,omitempty"`  // the durable consumers were created
}

// exported is how far the export of a tenant is handled.
type exported struct {
	Tenant  int64                   `json:"tenant,string"`
	Cursor  string                  `json:"cursor"`
	After   string                  `json:"after,omitempty"`
	Done    bool                    `json:"done,omitempty"`
	Streams []client.ExportPosition `json:"streams"`
}

// start is the position up to which the exports cover a stream.
type start struct {
	Created time.Time `json:"created"`
	Seq     uint64    `json:"sequence,string"`
	Whole   bool      `json:"whole,omitempty"` // the stream had ended before the exports began
}

var (
	errClaim    = errors.New("subscribe: another instance reads the exports")
	errOutdated = errors.New("subscribe: the exports no longer join the streams")
	errUnjoined = errors.New("subscribe: the first exports are not handled yet")
)

// checkBootstrap returns ErrOption if the API exports no states for the type of events.
func checkBootstrap(s *settings.Settings, eventType string) error {
	kind, of, _ := strings.Cut(eventType, ".")
	if s.Bootstrap != nil && (of != "*" || settings.PluralOf(s.Kinds, kind) == "") {
		return fmt.Errorf("%w: Bootstrap needs the events KIND.* of a kind that the API exports, not %.80q", ErrOption, eventType)
	}
	return nil
}

// newBootstrap returns nil without the option Bootstrap.
func (s *subscriber) newBootstrap(ctx, handling context.Context, first broker.Stream) (*bootstrap, error) {
	if s.Bootstrap == nil {
		return nil, nil
	}
	b := &bootstrap{subscriber: s, handling: handling, owner: rand.Text()}
	if _, err := b.exists(ctx); errors.Is(err, ErrOption) { // its credentials may not create the bucket
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, s.Broker.Timeout)
	defer cancel()
	var err error
	b.kv, err = broker.DeclareBootstraps(ctx, s.js, s.Broker, first)
	return b, err
}

// run reads exports whenever the record says so, until ctx ends.
func (b *bootstrap) run(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; {
		err := b.step(ctx)
		if ctx.Err() != nil {
			return
		}
		if settings.IsRefused(err) || errors.Is(err, ErrOption) {
			b.end(err)
			return
		}
		if errors.Is(err, errClaim) {
			err = nil
		}
		b.trouble(ctx, "exports", err)
		if failures++; err == nil {
			failures = 0
			work.Sleep(ctx, settings.Recheck)
			continue
		}
		work.Sleep(ctx, work.Retry(failures))
	}
}

// step reads exports if this instance has to.
func (b *bootstrap) step(ctx context.Context) error {
	if err := b.read(ctx); err != nil {
		return err
	}
	at, revision := b.state()
	b.at("read")
	if !b.joined.Load() && (revision == 0 || at.Joined) {
		exists, err := b.exists(ctx)
		if err == nil && exists && revision == 0 { // another instance may have begun since
			err = b.read(ctx)
			if _, now := b.state(); err == nil && now > 0 {
				return nil
			}
		}
		switch {
		case err != nil:
			return err
		case exists:
			b.joined.Store(true)
			if revision == 0 {
				b.Log.InfoContext(ctx, "the subscriber exists, and continues without exports")
			}
		case at.Owner == "": // a new subscriber, or one whose durable consumers were deleted
			if err := b.save(ctx, func(p *progress) { *p = progress{Owner: b.owner} }); err != nil {
				return err
			}
		}
	}
	mine, err := b.claim(ctx)
	if mine && err == nil {
		b.at("claimed")
		err = b.exportAll(ctx)
	}
	return err
}

// claim reports whether this instance reads exports. It takes over the claim of an instance without
// a sign of life.
func (b *bootstrap) claim(ctx context.Context) (mine bool, err error) {
	at, revision := b.state()
	switch {
	case at.Owner == "" || at.Owner == b.owner:
		return at.Owner != "", nil
	case revision != b.observed:
		b.observed, b.since = revision, time.Now()
		return false, nil
	case time.Since(b.since) < b.Takeover:
		return false, nil
	}
	return true, b.save(ctx, func(p *progress) { p.Owner = b.owner })
}

// at is a crash point of the fault tests.
func (b *bootstrap) at(step string) {
	if b.Step != nil {
		b.Step(step)
	}
}

func (b *bootstrap) state() (at progress, revision uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.record, b.revision
}

// read reads the record. A replica may answer with an older one, which changes nothing.
func (b *bootstrap) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, b.Broker.Timeout)
	defer cancel()
	b.mu.Lock()
	defer b.mu.Unlock()
	entry, err := b.kv.Get(ctx, b.durable)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		b.record, b.revision = progress{}, 0
		return nil
	}
	var at progress
	if err == nil && entry.Revision() > b.revision {
		if err = json.Unmarshal(entry.Value(), &at); err == nil {
			b.record, b.revision = at, entry.Revision()
		}
	}
	if err != nil {
		return fmt.Errorf("read the record of the exports of %s: %w", b.durable, err)
	}
	return nil
}

// save changes the record, also after the end of ctx. It returns errClaim if another instance has
// changed it.
func (b *bootstrap) save(ctx context.Context, change func(*progress)) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.Broker.Timeout)
	defer cancel()
	b.mu.Lock()
	defer b.mu.Unlock()
	at, revision := b.record, b.revision
	at.Exports = slices.Clone(at.Exports)
	change(&at)
	value, err := json.Marshal(at)
	if err != nil {
		return err
	}
	if revision == 0 {
		revision, err = b.kv.Create(ctx, b.durable, value)
	} else {
		revision, err = b.kv.Update(ctx, b.durable, value, revision)
	}
	if broker.IsConflict(err) {
		return errClaim
	}
	if err != nil {
		return fmt.Errorf("record the exports of %s: %w", b.durable, err)
	}
	b.record, b.revision = at, revision
	return nil
}

// exists reports whether the subscriber has a durable consumer on any stream.
func (b *bootstrap) exists(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, b.Broker.Timeout)
	defer cancel()
	streams, err := b.list(ctx)
	for _, st := range streams {
		if has, err := b.hasDurable(ctx, st); has || err != nil {
			return has, err
		}
	}
	return false, err
}

func (b *bootstrap) hasDurable(ctx context.Context, st broker.Stream) (bool, error) {
	c, err := b.js.Consumer(ctx, st.Name, b.durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	if err == nil && c.CachedInfo().Config.Metadata[broker.MetaFilter] != "" {
		err = fmt.Errorf("%w: an operator created the consumer %s of stream %s, so Bootstrap cannot", ErrOption, b.durable, st.Name)
	}
	return err == nil, err
}

// exportAll exports while it renews the claim: the API and calls may take longer than Takeover. It
// ends when another instance has the claim.
func (b *bootstrap) exportAll(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	var keeper sync.WaitGroup
	keeper.Go(func() {
		for work.Sleep(ctx, b.Takeover/3) == nil {
			if err := b.save(ctx, func(*progress) {}); errors.Is(err, errClaim) {
				stop(err)
			}
		}
	})
	err := b.export(ctx)
	if lost := context.Cause(ctx); errors.Is(lost, errClaim) {
		err = lost
	}
	stop(nil)
	keeper.Wait()
	if errors.Is(err, errOutdated) || client.HasCode(err, client.CodeExportOutdated) {
		return errors.Join(err, b.save(ctx, func(p *progress) { p.Exports = nil }))
	}
	return err
}

// export gives what is missing of all exports to the handler, and joins the streams.
func (b *bootstrap) export(ctx context.Context) error {
	for _, open := range b.Bootstrap {
		if err := b.exportOf(ctx, open); err != nil {
			return fmt.Errorf("export %s: %w", b.plural(), err)
		}
	}
	return b.join(ctx)
}

func (b *bootstrap) plural() string {
	kind, _, _ := strings.Cut(b.eventType, ".")
	return settings.PluralOf(b.Kinds, kind)
}

// exportOf asks for the first state, because only an answer says whose export it is.
func (b *bootstrap) exportOf(ctx context.Context, open settings.OpenExport) error {
	x := open(b.plural(), "", "", client.ExportLines(1))
	for _, err := range x.All(ctx) {
		if err != nil {
			return err
		}
		break
	}
	head := x.Head()
	all, _ := b.state()
	at := exported{Tenant: head.Tenant, Cursor: head.Cursor, Streams: head.Streams}
	i := slices.IndexFunc(all.Exports, func(e exported) bool { return e.Tenant == head.Tenant })
	if i >= 0 {
		at = all.Exports[i]
	} else {
		i = len(all.Exports)
		b.Log.InfoContext(ctx, "reading an export", "tenant", head.Tenant, "kind", head.Kind)
		if err := b.save(ctx, func(p *progress) { p.Exports = append(p.Exports, at) }); err != nil {
			return err
		}
	}
	if at.Done {
		return nil
	}
	var batch []*message
	pass := func() error {
		if !b.pass(ctx, batch) {
			return cmp.Or(context.Cause(ctx), context.Cause(b.handling))
		}
		batch = nil
		b.at("handled")
		return b.save(ctx, func(p *progress) { p.Exports[i] = at })
	}
	for state, err := range open(b.plural(), at.Cursor, at.After).All(ctx) {
		if err != nil {
			return err
		}
		e, err := settings.StateEvent(at.Tenant, state)
		if err != nil {
			return err
		}
		e.Type, at.After = Snapshot, state.After
		if batch = append(batch, &message{event: e}); len(batch) < perCall*b.Concurrency {
			continue
		}
		if err := pass(); err != nil {
			return err
		}
	}
	at.Done = true
	return pass()
}

// pass calls the function with all states, with those of an aggregate one after the other. It
// returns false if ctx ends before.
func (b *bootstrap) pass(ctx context.Context, batch []*message) bool {
	r := &reader{subscriber: b.subscriber, handling: b.handling}
	queues := make(map[aggregate][]*message)
	for _, m := range batch {
		queues[m.aggregate()] = append(queues[m.aggregate()], m)
	}
	var calls sync.WaitGroup
	var ended atomic.Bool
	for _, queue := range queues {
		calls.Go(func() {
			for _, m := range queue {
				if !r.snapshot(ctx, m) {
					ended.Store(true)
					return
				}
			}
		})
	}
	calls.Wait()
	return !ended.Load()
}

// snapshot calls the function with a state until it succeeds. It returns false if ctx ends before.
func (r *reader) snapshot(ctx context.Context, m *message) bool {
	of := fmt.Sprintf("the state of %s %s of tenant %d", m.event.AggregateType, m.event.AggregateID, m.event.TenantID)
	defer func() {
		r.subscriber.mu.Lock()
		defer r.subscriber.mu.Unlock()
		delete(r.troubles, of) // if ctx has ended, another instance may handle the state
	}()
	for m.attempt = 1; r.enter(ctx); m.attempt++ {
		err := r.invoke(m)
		if err == nil {
			r.metrics.Snapshots.Inc()
			r.trouble(ctx, of, nil)
			return true
		}
		if r.handling.Err() != nil {
			return false
		}
		r.metrics.Failures.Inc()
		r.trouble(ctx, of, fmt.Errorf("handle %s: %w", of, err))
		work.Sleep(ctx, r.Pause(m.attempt))
	}
	return false
}

// join creates the durable consumers where the exports end, and ends the claim. A durable consumer
// that exists keeps its position: its later events are not handled yet. It returns errOutdated if a
// stream has dropped events that the exports do not cover.
func (b *bootstrap) join(ctx context.Context) error {
	qctx, cancel := context.WithTimeout(ctx, b.Broker.Timeout)
	streams, err := b.list(qctx)
	cancel()
	if err != nil {
		return err
	}
	at, _ := b.state()
	starts, err := b.starts(ctx, at.Exports, streams)
	if err != nil {
		return err
	}
	if err := b.save(ctx, func(p *progress) { p.Starts = starts }); err != nil {
		return err
	}
	b.at("positions")
	for _, st := range streams {
		if starts[st.Number].Whole {
			continue
		}
		r := b.newReader(b.handling, source{stream: st.Name, subject: b.filter})
		if err := r.declare(ctx); err != nil {
			return err
		}
		b.at("consumer")
		now, err := broker.ReadStream(ctx, b.js, b.Broker, st.Number)
		if err != nil {
			return err
		}
		if !now.Created.Equal(st.Created) || now.First > starts[st.Number].Seq+1 {
			return fmt.Errorf("%w: %s begins with sequence %d, and they end with %d", errOutdated, st.Name, now.First,
				starts[st.Number].Seq)
		}
	}
	if err := b.save(ctx, func(p *progress) { *p = progress{Starts: starts, Joined: true} }); err != nil {
		return err
	}
	b.at("joined")
	b.joined.Store(true)
	b.Log.InfoContext(ctx, "the exports are handled, continuing on the streams")
	return nil
}

// starts returns where the streams continue after the exports.
func (b *bootstrap) starts(ctx context.Context, exports []exported, streams []broker.Stream) (map[int]start, error) {
	all, created := make([][]client.ExportPosition, len(exports)), make(map[int]time.Time)
	for _, st := range streams {
		created[st.Number] = st.Created
	}
	for i, e := range exports {
		all[i] = e.Streams
		for _, p := range e.Streams {
			if p.Stream != "" && !created[p.Partition].Equal(p.Created) {
				return nil, fmt.Errorf("%w: %s of %s is gone or was recreated", errOutdated, p.Stream, p.Created)
			}
		}
	}
	starts := make(map[int]start)
	for _, st := range streams {
		at := start{Created: st.Created, Seq: settings.Covered(all, st.Number)}
		if at.Seq == math.MaxUint64 {
			has, err := b.hasDurable(ctx, st)
			if err != nil {
				return nil, err
			}
			at.Seq, at.Whole = st.Last, !has
		}
		starts[st.Number] = at
	}
	return starts, nil
}

// startOf returns the position up to which the exports cover a stream, also before they are read.
func (b *bootstrap) startOf(st broker.Stream) start {
	at, _ := b.state()
	if s := at.Starts[st.Number]; s.Created.Equal(st.Created) {
		return s
	}
	return start{}
}

// check makes an instance read new exports if a stream has dropped events before NATS delivered
// them, or was recreated. NATS has delivered those up to covered of the stream that was created at
// that time.
func (b *bootstrap) check(ctx context.Context, st broker.Stream, created time.Time, covered uint64) error {
	if at, _ := b.state(); at.Owner != "" || !at.lacks(st, created, covered) {
		return nil
	}
	if err := b.read(ctx); err != nil { // another instance may have read exports since
		return err
	}
	if at, _ := b.state(); at.Owner != "" || !at.lacks(st, created, covered) {
		return nil
	}
	b.Log.WarnContext(ctx, "events expired before they were handled, or the stream was recreated; reading exports again",
		"stream", st.Name, "created", st.Created, "first_seq", st.First, "after", covered)
	return b.save(ctx, func(p *progress) { p.Owner, p.Exports, p.Joined = b.owner, nil, true })
}

// lacks reports whether neither the exports nor NATS has delivered everything before the stream's
// first message.
func (p progress) lacks(st broker.Stream, created time.Time, covered uint64) bool {
	at, known := p.Starts[st.Number]
	if known && at.Created.Equal(st.Created) {
		return st.First > max(at.Seq, covered)+1
	}
	return known || !created.Equal(st.Created) || st.First > covered+1
}
