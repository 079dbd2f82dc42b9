package api

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
)

func newTestPages(bytes int64) *Pages {
	return NewPages(Config{PageCacheBytes: bytes}, prometheus.NewRegistry())
}

type offsets = map[string]uint64

// reached returns offsets at which every stream has applied seq.
func reached(seq uint64) offsets { return offsets{"EVENTS-2": seq, "EVENTS-3": seq} }

var follows = event.EdgeNames{From: "follower_id", To: "followee_id"}

func heardFollow(tenant int64, follower, followee event.ID, partition int, seq uint64) *event.Event {
	return heardEdge(tenant, event.AggregateFollow, follows, follower, followee, partition, seq)
}

func heardEdge(tenant int64, kind string, names event.EdgeNames, from, to event.ID, partition int, seq uint64) *event.Event {
	payload, err := event.Edge{From: from, To: to, Status: event.StatusActive, Version: 1}.Encode(names)
	if err != nil {
		panic(err)
	}
	return &event.Event{TenantID: tenant, AggregateType: kind, AggregateID: to, Type: event.Created,
		Version: 1, Payload: payload, Stream: fmt.Sprintf("EVENTS-%d", partition), Seq: seq}
}

func pageOf(next string) EdgeList { return EdgeList{Items: []Edge{{UserID: "1"}}, Next: next} }

// askOften requests a list often enough to make it hot, and keeps page for it if that is allowed.
func (p *Pages) askOften(key pageKey, page EdgeList, at offsets) (kept bool) {
	for range pageHotAfter {
		if _, ok := p.get(key, follows, 50); ok {
			return true
		}
		p.put(key, 50, page, at, time.Now())
	}
	got, ok := p.get(key, follows, 50)
	return ok && got.Next == page.Next
}

var hot = pageKey{1, "follow", listReverse, "42"}

func TestAPageIsKeptFromItsThirdRequest(t *testing.T) {
	p := newTestPages(1 << 20)
	p.Begin(reached(5))
	for n := 1; n <= 5; n++ {
		if _, ok := p.get(hot, follows, 50); ok != (n > pageHotAfter) {
			t.Errorf("request %d: kept is %t", n, ok)
		}
		p.put(hot, 50, pageOf("a"), reached(5), time.Now())
	}
	for name, other := range map[string]pageKey{"tenant": {2, "follow", listReverse, "42"}, "list": {1, "follow", listForward, "42"},
		"user": {1, "follow", listReverse, "43"}} {
		if _, ok := p.get(other, follows, 50); ok {
			t.Errorf("another %s has the page", name)
		}
	}
	if _, ok := p.get(hot, follows, 20); ok {
		t.Error("another limit has the page")
	}
}

func TestAPageReadBeforeItsEventWasAppliedIsNotKept(t *testing.T) {
	following7 := pageKey{1, "follow", listForward, "7"}
	for name, c := range map[string]struct {
		key   pageKey
		event *event.Event
		at    offsets // of the page
		kept  bool
	}{
		"followers, and the follow is not applied":         {hot, heardFollow(1, "7", "42", 3, 6), reached(5), false},
		"followers, and the follow is applied":             {hot, heardFollow(1, "7", "42", 3, 6), reached(6), true},
		"following, and the follow is not applied":         {following7, heardFollow(1, "7", "42", 3, 6), reached(5), false},
		"following, and the follow is applied":             {following7, heardFollow(1, "7", "42", 3, 6), reached(6), true},
		"somebody else's follow is not applied":            {hot, heardFollow(1, "7", "43", 3, 6), reached(5), true},
		"another tenant's follow is not applied":           {hot, heardFollow(2, "7", "42", 3, 6), reached(5), true},
		"another partition has not come to what was there": {hot, heardFollow(1, "7", "42", 3, 6), offsets{"EVENTS-3": 6}, false},
	} {
		p := newTestPages(1 << 20)
		p.Begin(reached(5))
		if !p.askOften(c.key, pageOf("before"), reached(5)) {
			t.Fatalf("%s: nothing is kept at all", name)
		}
		p.Hear(c.event, nil)
		for range 3 {
			page, ok := p.get(c.key, follows, 50)
			if ok && page.Next == "before" && c.event.TenantID == 1 && c.event.AggregateID == "42" {
				t.Fatalf("%s: the page from before the event is still there", name)
			}
			p.put(c.key, 50, pageOf("after"), c.at, time.Now())
		}
		if _, ok := p.get(c.key, follows, 50); ok != c.kept {
			t.Errorf("%s: kept is %t", name, ok)
		}
	}
}

func TestAnEventHeardWhileAPageIsReadKeepsItOut(t *testing.T) {
	p := newTestPages(1 << 20)
	p.Begin(reached(5))
	for range pageHotAfter {
		p.get(hot, follows, 50)
	}
	p.Hear(heardFollow(1, "7", "42", 3, 6), nil) // the page was read before the event
	p.put(hot, 50, pageOf("old"), reached(5), time.Now())
	if _, ok := p.get(hot, follows, 50); ok {
		t.Error("the old page is kept")
	}
}

func TestEventsFromBeforeTheFirstRequestCountToo(t *testing.T) {
	p := newTestPages(1 << 20)
	p.Begin(reached(5))
	p.Hear(heardFollow(1, "7", "42", 3, 6), nil) // nobody has requested 42 yet
	if p.askOften(hot, pageOf("old"), reached(5)) {
		t.Error("a page is kept that lacks an event from before")
	}
	if !p.askOften(hot, pageOf("new"), reached(6)) {
		t.Error("a page is not kept that has it")
	}
	p.Hear(heardFollow(1, "8", "42", 9, 1), nil) // on a new stream
	if p.askOften(hot, pageOf("newer"), reached(6)) {
		t.Error("a page is kept that lacks an event of a new stream")
	}
	p = newTestPages(1 << 20)
	p.Begin(reached(9))
	if p.askOften(hot, pageOf("old"), reached(8)) {
		t.Error("a page is kept that lacks what was on the stream at the beginning")
	}
}

func TestNothingIsKeptWhileNothingIsHeard(t *testing.T) {
	p := newTestPages(1 << 20)
	if p.askOften(hot, pageOf("a"), reached(5)) {
		t.Error("kept before the beginning")
	}
	p.Begin(reached(5))
	if !p.askOften(hot, pageOf("b"), reached(5)) {
		t.Fatal("not kept")
	}
	p.End()
	if p.askOften(hot, pageOf("b"), reached(5)) {
		t.Error("kept after the end")
	}
	p.Begin(reached(5))
	if _, ok := p.get(hot, follows, 50); ok {
		t.Error("a page from before the end is there again")
	}
	var none *Pages
	if _, ok := none.get(hot, follows, 50); ok {
		t.Error("no cache has a page")
	}
	none.put(hot, 50, pageOf("a"), reached(5), time.Now())
}

func TestWhatCannotBeReadEmptiesTheCache(t *testing.T) {
	for name, hear := range map[string]func(p *Pages){
		"an event that is damaged":      func(p *Pages) { p.Hear(&event.Event{Stream: "EVENTS-3", Seq: 6}, errors.New("damaged")) },
		"one that says not where it is": func(p *Pages) { p.Hear(&event.Event{}, errors.New("damaged")) },
		"a payload that is none":        func(p *Pages) { e := heardFollow(1, "1", "2", 3, 6); e.Payload = []byte("{"); p.Hear(e, nil) },
		"a version of the future":       func(p *Pages) { e := heardFollow(1, "1", "2", 3, 6); e.Version = 2; p.Hear(e, nil) },
	} {
		p := newTestPages(1 << 20)
		p.Begin(reached(5))
		if !p.askOften(hot, pageOf("a"), reached(5)) {
			t.Fatal("not kept")
		}
		hear(p)
		if _, ok := p.get(hot, follows, 50); ok {
			t.Errorf("%s: the page is still there", name)
		}
		if !p.askOften(hot, pageOf("b"), reached(6)) {
			t.Errorf("%s: nothing is kept any more", name)
		}
	}
}

// TestPagesOfEveryKind has events of kinds with other names, and of types that are no edges.
func TestPagesOfEveryKind(t *testing.T) {
	visits := event.EdgeNames{From: "guest_id", To: "place_id"}
	guests, visited := pageKey{1, "visit", listReverse, "42"}, pageKey{1, "visit", listForward, "7"}
	ask := func(p *Pages, key pageKey, names event.EdgeNames, seq uint64) (kept bool) {
		for range pageHotAfter {
			if _, ok := p.get(key, names, 50); ok {
				return true
			}
			p.put(key, 50, pageOf("a"), reached(seq), time.Now())
		}
		_, ok := p.get(key, names, 50)
		return ok
	}
	updated := heardEdge(1, "visit", visits, "7", "42", 3, 6)
	updated.Type = event.Updated
	other := heardEdge(1, "visit", event.EdgeNames{From: "user_id", To: "place_id"}, "7", "42", 3, 6)
	comment := heardFollow(1, "7", "42", 3, 6)
	comment.AggregateType, comment.Payload = event.AggregateComment, []byte("not even JSON")
	for name, c := range map[string]struct {
		event *event.Event
		err   error
		drops map[pageKey]bool
	}{
		"a new edge":           {heardEdge(1, "visit", visits, "7", "42", 3, 6), nil, map[pageKey]bool{guests: true, visited: true}},
		"other attributes":     {updated, nil, map[pageKey]bool{guests: true, visited: true}},
		"an edge of others":    {heardEdge(1, "visit", visits, "8", "43", 3, 6), nil, nil},
		"another tenant's":     {heardEdge(2, "visit", visits, "7", "42", 3, 6), nil, nil},
		"another kind's":       {heardFollow(1, "7", "42", 3, 6), nil, map[pageKey]bool{hot: true}},
		"a kind without lists": {heardEdge(1, "wave", visits, "7", "42", 3, 6), nil, nil},
		"a comment":            {comment, nil, nil},
		"a damaged comment":    {comment, errors.New("damaged"), nil},
		"one with other names": {other, nil, map[pageKey]bool{guests: true, visited: true, hot: true}},
		"a damaged one":        {updated, errors.New("damaged"), map[pageKey]bool{guests: true, visited: true, hot: true}},
	} {
		p := newTestPages(1 << 20)
		p.Begin(reached(5))
		names := map[pageKey]event.EdgeNames{guests: visits, visited: visits, hot: follows}
		for key, names := range names {
			if !ask(p, key, names, 5) {
				t.Fatalf("%s: %v is not kept", name, key)
			}
		}
		p.Hear(c.event, c.err)
		for key, names := range names {
			if _, ok := p.get(key, names, 50); ok == c.drops[key] {
				t.Errorf("%s: %v is kept: %t", name, key, ok)
			}
		}
		// A list that is requested from now on has the event, whatever it was.
		late := pageKey{1, "wave", listReverse, "42"}
		if ask(p, late, visits, 5) {
			t.Errorf("%s: a page from before it is kept", name)
		}
		if !ask(p, late, visits, 6) {
			t.Errorf("%s: a page from after it is not kept", name)
		}
	}
}

func TestAttributesAndIDsCountAsBytes(t *testing.T) {
	p := newTestPages(1 << 20)
	p.Begin(reached(5))
	var before int64
	sizes := make(map[string]int64)
	for _, name := range []string{"plain", "attributes", "id"} {
		page := EdgeList{Items: []Edge{{UserID: "1"}, {UserID: "2"}}}
		switch name {
		case "attributes":
			page.Items[1].attributes = make([]byte, 1000)
		case "id":
			page.Items[1].UserID = event.ID(make([]byte, 101))
		}
		if !p.askOften(pageKey{1, "follow", listReverse, event.ID(name)}, page, reached(5)) {
			t.Fatalf("%s: not kept", name)
		}
		sizes[name], before = p.bytes-before, p.bytes
	}
	plain := int64(pageOverhead + 2*pageItemBytes + 2)
	if want := map[string]int64{"plain": plain, "attributes": plain + 1000, "id": plain + 100}; !maps.Equal(sizes, want) {
		t.Errorf("%v bytes, want %v", sizes, want)
	}
}

func TestPagesAreBoundedInNumberAndBytes(t *testing.T) {
	room := 10 * sizeOf(pageOf("x"))
	p := newTestPages(room)
	p.Begin(reached(5))
	key := func(user event.ID) pageKey { return pageKey{1, "follow", listReverse, user} }
	for user := range int64(50) {
		if !p.askOften(key(event.IDOf(user)), pageOf("x"), reached(5)) {
			t.Fatalf("page %d is not kept", user)
		}
		if p.bytes > room {
			t.Fatalf("%d bytes, want %d at most", p.bytes, room)
		}
	}
	kept := 0
	for user := range int64(50) {
		if _, ok := p.get(key(event.IDOf(user)), follows, 50); ok {
			kept++
		}
	}
	if kept != 10 {
		t.Errorf("%d pages are kept, want the last 10", kept)
	}
	for user := range int64(3 * pageMaxTracked) {
		p.get(key(event.IDOf(user)), follows, 50)
	}
	if len(p.tracked) != pageMaxTracked || p.recent.Len() != pageMaxTracked || p.bytes != 0 {
		t.Errorf("%d lists are tracked, %d in order, %d bytes", len(p.tracked), p.recent.Len(), p.bytes)
	}
	p = newTestPages(100)
	p.Begin(reached(5))
	if p.askOften(hot, pageOf("x"), reached(5)) || p.bytes != 0 {
		t.Errorf("a page that is larger than the cache is kept: %d bytes", p.bytes)
	}
}

func TestAPageIsNeverOlderThanItsAge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newTestPages(1 << 20)
		p.Begin(reached(5))
		if !p.askOften(hot, pageOf("a"), reached(5)) {
			t.Fatal("not kept")
		}
		time.Sleep(pageMaxAge - time.Millisecond)
		if _, ok := p.get(hot, follows, 50); !ok {
			t.Error("gone before its time")
		}
		time.Sleep(time.Millisecond)
		if _, ok := p.get(hot, follows, 50); ok {
			t.Error("there after its time")
		}
		p.put(hot, 50, pageOf("b"), reached(5), time.Now().Add(-pageMaxAge)) // the read took so long
		if _, ok := p.get(hot, follows, 50); ok {
			t.Error("its time begins when it was read")
		}
	})
}

func BenchmarkPages(b *testing.B) {
	p := newTestPages(1 << 20)
	p.Begin(reached(5))
	p.askOften(hot, pageOf("a"), reached(5))
	b.Run("get", func(b *testing.B) {
		for b.Loop() {
			p.get(hot, follows, 50)
		}
	})
	e := heardFollow(1, "1", "2", 3, 6)
	b.Run("hear", func(b *testing.B) {
		for b.Loop() {
			e.Seq++
			p.Hear(e, nil)
		}
	})
}

// KeepFor sets how long a page is kept without an event.
func (p *Pages) KeepFor(d time.Duration) { p.maxAge = d }
