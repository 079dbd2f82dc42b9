package subscribe_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
)

// exporting is a rig with a truth, whose export an HTTP server answers. It hears what handlers get,
// in this process and in children.
type exporting struct {
	*rig
	api     *httptest.Server
	client  *client.Client
	refuses atomic.Int32 // the status of the next answers

	mu      sync.Mutex
	truth   map[event.ID]event.Event // by aggregate
	exports [][]client.ExportPosition
	seen    []seen
}

// seen is a call of a handler.
type seen struct {
	By, Type string
	Of       event.ID
	Version  int64
}

func newExporting(t *testing.T, partitions int) *exporting {
	x := &exporting{rig: newRig(t, partitions), truth: make(map[event.ID]event.Event)}
	x.api = httptest.NewServer(http.HandlerFunc(x.answer))
	t.Cleanup(x.api.Close)
	x.client = dial(t, x.api.URL)
	if _, err := x.nc.Subscribe("seen", func(m *nats.Msg) {
		var s seen
		if err := json.Unmarshal(m.Data, &s); err != nil {
			t.Error(err)
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		x.seen = append(x.seen, s)
		_ = m.Respond(nil)
	}); err != nil {
		t.Fatal(err)
	}
	return x
}

func dial(t *testing.T, url string) *client.Client {
	c, err := client.New(url, client.WithToken("t"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// write publishes the next version of followees.
func (x *exporting) write(followees ...int) {
	x.t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, n := range followees {
		to := event.IDOf(int64(n))
		e := follow("1", to, versionOf(x.truth[to])+1)
		x.truth[to] = e
		x.publish(e)
	}
}

func versionOf(e event.Event) int64 {
	var payload struct{ Version int64 }
	_ = json.Unmarshal(e.Payload, &payload) // none before the first version
	return payload.Version
}

// answer answers like the API. A cursor is the number of an export.
func (x *exporting) answer(w http.ResponseWriter, r *http.Request) {
	x.mu.Lock()
	defer x.mu.Unlock()
	problem := func(status int, code client.Code) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"status":%d,"code":%q,"title":"refused"}`, status, code)
	}
	if status := int(x.refuses.Load()); status != 0 {
		problem(status, "refused")
		return
	}
	var export, from int
	_, _ = fmt.Sscan(r.URL.Query().Get("after"), &from) // 0 at the beginning
	if _, err := fmt.Sscan(r.URL.Query().Get("cursor"), &export); err != nil {
		export = len(x.exports)
		x.exports = append(x.exports, x.positions())
	} else if !x.joins(x.exports[export]) {
		problem(http.StatusGone, client.CodeExportOutdated)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := json.NewEncoder(w)
	_ = out.Encode(map[string]client.ExportHead{"export": {Kind: event.AggregateFollow, Tenant: 1, Cursor: fmt.Sprint(export),
		Streams: x.exports[export]}})
	for _, to := range slices.SortedFunc(maps.Keys(x.truth), func(a, b event.ID) int { return testkit.Number(a) - testkit.Number(b) }) {
		if testkit.Number(to) > from {
			_ = out.Encode(client.ExportState{After: string(to), Type: "tidings.follow.created.v1", Subject: string(to),
				Data: x.truth[to].Payload})
		}
	}
	_ = out.Encode(map[string]string{"end": "done"})
}

// positions returns the ends of the streams that are not closed.
func (x *exporting) positions() (all []client.ExportPosition) {
	for _, s := range x.open {
		now := x.stream(s.Number)
		all = append(all, client.ExportPosition{Partition: s.Number, Stream: s.Name, Created: now.Created, Sequence: now.Last})
	}
	return all
}

func (x *exporting) joins(positions []client.ExportPosition) bool {
	for _, p := range positions {
		if now := x.stream(p.Partition); now.First > p.Sequence+1 || !now.Created.Equal(p.Created) {
			return false
		}
	}
	return true
}

func (x *exporting) stream(number int) broker.Stream {
	s, err := broker.ReadStream(context.Background(), x.js, x.cfg, number)
	if err != nil {
		x.t.Error(err)
	}
	return s
}

// expire removes the stream's messages before a sequence, or all.
func (x *exporting) expire(number int, before uint64) {
	x.t.Helper()
	s, err := x.js.Stream(context.Background(), x.cfg.StreamName(number))
	if err != nil {
		x.t.Fatal(err)
	}
	testkit.Expire(x.t, s, before)
}

// handleFollows runs an instance whose calls are heard by the test.
func handleFollows(ctx context.Context, nc *nats.Conn, c *client.Client, by string, fault func(subscribe.Event[event.Edge]) error,
	opts ...subscribe.Option) error {
	return subscribe.Handle(ctx, nc, "cache", "follow.*", func(ctx context.Context, e subscribe.Event[event.Edge]) error {
		if fault != nil {
			if err := fault(e); err != nil {
				return err
			}
		}
		note, err := json.Marshal(seen{by, e.Type, e.Data.To, e.Data.Version})
		if err == nil {
			_, err = nc.RequestWithContext(ctx, "seen", note)
		}
		return err
	}, append([]subscribe.Option{subscribe.Bootstrap(c), subscribe.Takeover(time.Second)}, opts...)...)
}

func (x *exporting) handle(by string, fault func(subscribe.Event[event.Edge]) error, opts ...subscribe.Option) *running {
	x.t.Helper()
	nc := x.b.Connect(x.t)
	return x.start(func(ctx context.Context) error {
		return handleFollows(ctx, nc, x.client, by, fault, append(opts, subscribe.Log(testkit.Logger(x.t)))...)
	})
}

// calls returns the calls of a type; "" for all.
func (x *exporting) calls(of string) (all []seen) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.seen {
		if of == "" || s.Type == of {
			all = append(all, s)
		}
	}
	return all
}

// settle waits until the newest version of each entity was handled, by an event or a state.
func (x *exporting) settle() {
	x.t.Helper()
	x.await("the newest versions", func() (bool, error) {
		newest := make(map[event.ID]int64)
		for _, s := range x.calls("") {
			newest[s.Of] = max(newest[s.Of], s.Version)
		}
		x.mu.Lock()
		defer x.mu.Unlock()
		for to, e := range x.truth {
			if newest[to] != versionOf(e) {
				return false, fmt.Errorf("followee %s has version %d, want %d", to, newest[to], versionOf(e))
			}
		}
		return true, nil
	})
}

// has waits for a call.
func (x *exporting) has(of string, to event.ID, version int64) {
	x.t.Helper()
	x.await(fmt.Sprintf("%s of followee %s, version %d", of, to, version), func() (bool, error) {
		return slices.ContainsFunc(x.calls(of), func(s seen) bool { return s.Of == to && s.Version == version }), nil
	})
}

func containsAll(text string, parts ...string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) })
}

func stopped(t *testing.T, all ...*running) {
	t.Helper()
	for _, w := range all {
		if err := w.stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestAHandlerBeginsWithStatesAndContinuesOnTheStreams has events that expired, and a stream that
// had ended before the export.
func TestAHandlerBeginsWithStatesAndContinuesOnTheStreams(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1, 2, 3, 3)
	x.expire(0, 4)
	x.resize(2)
	x.write(4)
	first, second := x.handle("first", nil), x.handle("second", nil)
	x.settle()
	x.exported()
	if got := x.calls(""); len(got) != 4 || len(x.calls(subscribe.Snapshot)) != 4 {
		t.Errorf("calls: %v, want four states", got)
	}
	x.write(1, 4)
	x.has(event.Created, "1", 2)
	x.has(event.Created, "4", 2)
	stopped(t, first, second)
	by := make(map[string]bool)
	for _, s := range x.calls(subscribe.Snapshot) {
		by[s.By] = true
	}
	if len(by) != 1 {
		t.Errorf("instances %v had states, want one", by)
	}
	x.write(2)
	third := x.handle("third", nil)
	x.has(event.Created, "2", 2)
	stopped(t, third)
	if got := x.calls(""); len(got) != 7 {
		t.Errorf("calls: %v, want seven: a start repeats neither states nor events", got)
	}
}

// TestAnInstanceThatLooksWhileAnotherBeginsFollowsItsRecord has an instance that read that there is
// no record before the other one wrote it, and then finds the other one's durable consumers.
func TestAnInstanceThatLooksWhileAnotherBeginsFollowsItsRecord(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1, 2, 3, 3)
	x.expire(0, 4)
	x.resize(2)
	x.write(4)
	looked, begun := make(chan struct{}), make(chan struct{})
	var look, begin sync.Once
	second := x.handle("second", nil, subscribe.CrashPoints(func(step string) {
		if step == "read" {
			look.Do(func() { close(looked); <-begun })
		}
	}))
	<-looked
	first := x.handle("first", nil, subscribe.CrashPoints(func(step string) {
		if step == "joined" {
			begin.Do(func() { close(begun) })
		}
	}))
	x.settle()
	x.exported()
	x.write(1)
	x.has(event.Created, "1", 2)
	stopped(t, first, second)
	if got := x.calls(""); len(got) != 5 || len(x.calls(subscribe.Snapshot)) != 4 {
		t.Errorf("calls: %v, want four states and an event", got)
	}
	if _, err := x.js.Consumer(t.Context(), x.cfg.StreamName(0), "cache-follow"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		t.Errorf("the durable consumer of a stream that had ended before the export: %v", err)
	}
}

// TestAStateIsRetriedUntilItSucceeds also after a Permanent error.
func TestAStateIsRetriedUntilItSucceeds(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1, 2)
	var health subscribe.Health
	var healed atomic.Bool
	w := x.handle("only", func(e subscribe.Event[event.Edge]) error {
		if e.Data.To == "2" && !healed.Load() {
			return subscribe.Permanent(errors.New("no room"))
		}
		return nil
	}, subscribe.Attempts(2), subscribe.BackOff(func(int) time.Duration { return time.Millisecond }), subscribe.Report(&health))
	x.has(subscribe.Snapshot, "1", 1)
	x.await("the reason", func() (bool, error) {
		err := health.Ready(t.Context())
		return err != nil && containsAll(err.Error(), "the state of follow 2 of tenant 1", "no room",
			"the first exports are not handled yet"), nil
	})
	if _, err := x.js.Consumer(t.Context(), x.cfg.StreamName(0), "cache-follow"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		t.Errorf("the durable consumer before the export is handled: %v", err)
	}
	healed.Store(true)
	x.has(subscribe.Snapshot, "2", 1)
	x.await("readiness", func() (bool, error) { err := health.Ready(t.Context()); return err == nil, err })
	stopped(t, w)
	if s, err := x.js.Stream(t.Context(), "EVENTS-dead"); err != nil || s.CachedInfo().State.Msgs != 0 {
		t.Errorf("dead letters: %v", err)
	}
}

// TestExportsBeginAgainIfTheirPositionsExpire lets the events behind the first exports expire:
// before a state is handled, and before the durable consumer exists.
func TestExportsBeginAgainIfTheirPositionsExpire(t *testing.T) {
	for name, step := range map[string]string{"in the export": "handled", "before the consumers": "positions", "after one": "consumer"} {
		t.Run(name, func(t *testing.T) {
			x := newExporting(t, 1)
			x.write(1, 2)
			var once sync.Once
			expired := make(chan struct{})
			w := x.handle("only", nil, subscribe.CrashPoints(func(at string) {
				if at == step {
					once.Do(func() { x.write(3, 4); x.expire(0, 4); close(expired) })
				}
			}))
			<-expired
			if step == "consumer" { // the reader sees it after the first exports have ended
				x.has(subscribe.Snapshot, "3", 1)
			}
			x.exported()
			if !slices.Contains(x.calls(subscribe.Snapshot), seen{"only", subscribe.Snapshot, "3", 1}) {
				t.Fatal("the exports ended without the state of followee 3, whose event expired")
			}
			x.write(1)
			x.has(event.Created, "1", 2)
			stopped(t, w)
		})
	}
}

// TestANewExportFollowsEventsThatExpired covers a subscriber that was down, one that lags, and one
// whose stream was recreated.
func TestANewExportFollowsEventsThatExpired(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1, 2)
	w := x.handle("first", nil)
	x.settle()
	x.exported()
	stopped(t, w)
	x.write(3, 4)
	x.expire(0, 4)

	gate := make(chan struct{})
	w = x.handle("second", func(e subscribe.Event[event.Edge]) error {
		if e.Type != subscribe.Snapshot && e.Data.To == "5" {
			<-gate
		}
		return nil
	}, subscribe.Concurrency(2))
	x.has(subscribe.Snapshot, "3", 1)
	x.has(event.Created, "4", 1)

	for range 60 { // more than the window of an instance
		x.write(5, 6)
	}
	last := x.stream(0).Last
	x.await("events in hand", func() (bool, error) {
		c, err := x.js.Consumer(t.Context(), x.cfg.StreamName(0), "cache-follow")
		return err == nil && c.CachedInfo().NumPending > 0 && c.CachedInfo().NumAckPending > 0, err
	})
	x.expire(0, last)
	x.has(subscribe.Snapshot, "6", 60)
	close(gate)

	if err := x.js.DeleteStream(t.Context(), x.cfg.StreamName(0)); err != nil {
		t.Fatal(err)
	}
	x.mu.Lock()
	x.truth["7"] = follow("1", "7", 1) // its event was lost
	p := x.open[0].Partition
	x.open = nil
	x.declare(p)
	x.mu.Unlock()
	x.has(subscribe.Snapshot, "7", 1)
	x.write(7)
	x.has(event.Created, "7", 2)
	stopped(t, w)
}

// TestAResizeDuringTheExport: events of the new streams come from their beginning.
func TestAResizeDuringTheExport(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1, 2)
	var once sync.Once
	w := x.handle("only", nil, subscribe.CrashPoints(func(at string) {
		if at == "handled" {
			once.Do(func() { x.write(1); x.resize(2); x.write(1, 2) })
		}
	}))
	for _, version := range []int64{2, 3} {
		x.has(event.Created, "1", version)
	}
	x.has(event.Created, "2", 2)
	stopped(t, w)
	if got := x.calls(event.Created); len(got) != 3 {
		t.Errorf("events: %v, want three", got)
	}
}

// TestASubscriberThatExistsContinuesWithoutExports, and begins with one if its durable consumers
// are deleted or events expire.
func TestASubscriberThatExistsContinuesWithoutExports(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1)
	w := x.handle("before", nil, subscribe.NoBootstrap())
	x.has(event.Created, "1", 1)
	stopped(t, w)
	x.write(2)
	w = x.handle("with", nil)
	x.has(event.Created, "2", 1)
	stopped(t, w)
	if got := x.calls(subscribe.Snapshot); len(got) > 0 {
		t.Errorf("states: %v", got)
	}
	x.await("NATS to forget the ended instance's requests", func() (bool, error) { // otherwise it may deliver the next event to them
		c, err := x.js.Consumer(t.Context(), x.cfg.StreamName(0), "cache-follow")
		return err == nil && c.CachedInfo().NumWaiting == 0, err
	})
	x.write(3)
	x.expire(0, 0)
	w = x.handle("later", nil)
	x.has(subscribe.Snapshot, "3", 1)
	x.exported()
	stopped(t, w)

	if err := x.js.DeleteConsumer(t.Context(), x.cfg.StreamName(0), "cache-follow"); err != nil {
		t.Fatal(err)
	}
	before := len(x.calls(subscribe.Snapshot))
	w = x.handle("again", nil)
	x.await("the states again", func() (bool, error) { return len(x.calls(subscribe.Snapshot)) == before+3, nil })
	x.exported()
	stopped(t, w)
}

// exported waits until no instance reads exports.
func (x *exporting) exported() {
	x.t.Helper()
	x.await("the end of the exports", func() (bool, error) { return x.record().Owner == "", nil })
}

// record is what the test reads of the record in NATS.
type record struct{ Owner string }

func (x *exporting) record() (r record) {
	x.t.Helper()
	kv, err := x.js.KeyValue(x.t.Context(), "EVENTS-bootstrap")
	var entry jetstream.KeyValueEntry
	if err == nil {
		entry, err = kv.Get(x.t.Context(), "cache-follow")
	}
	if err == nil {
		err = json.Unmarshal(entry.Value(), &r)
	}
	if err != nil {
		x.t.Fatal(err)
	}
	return r
}

// TestARefusedTokenEndsTheHandler, and an API that is unavailable does not.
func TestARefusedTokenEndsTheHandler(t *testing.T) {
	x := newExporting(t, 1)
	x.write(1)
	x.refuses.Store(http.StatusServiceUnavailable)
	var health subscribe.Health
	w := x.handle("only", nil, subscribe.Report(&health))
	x.await("the reason", func() (bool, error) {
		err := health.Ready(t.Context())
		return err != nil && containsAll(err.Error(), "export follows", "503"), nil
	})
	x.refuses.Store(http.StatusForbidden)
	<-w.done
	if err := w.stop(); !client.HasCode(err, "refused") {
		t.Errorf("the handler's error: %v", err)
	}
}

// TestBootstrapNeedsAllEventsOfAnExportedKind: a state is of no type of events.
func TestBootstrapNeedsAllEventsOfAnExportedKind(t *testing.T) {
	r := newRig(t, 1)
	none := func(context.Context, subscribe.Event[json.RawMessage]) error { return nil }
	for _, of := range []string{"follow.created", "person.*", "heartbeat.*"} {
		err := subscribe.Handle(t.Context(), r.nc, "cache", of, none, subscribe.Bootstrap(new(client.Client)))
		if !errors.Is(err, subscribe.ErrOption) {
			t.Errorf("%s: %v", of, err)
		}
	}
	if _, err := broker.Subscribe(t.Context(), r.js, r.cfg, broker.Principal{Role: broker.Subscriber, Name: "cache", Durable: true,
		Filter: "follow.*"}, broker.Subscription{AckWait: takeover}); err != nil {
		t.Fatal(err)
	}
	if err := subscribe.Handle(t.Context(), r.nc, "cache", "follow.*", none, subscribe.Bootstrap(new(client.Client))); !errors.Is(err,
		subscribe.ErrOption) {
		t.Errorf("an operator's durable consumers: %v", err)
	}
	if _, err := r.js.KeyValue(t.Context(), "EVENTS-bootstrap"); !errors.Is(err, jetstream.ErrBucketNotFound) {
		t.Errorf("the bucket: %v", err)
	}
}
