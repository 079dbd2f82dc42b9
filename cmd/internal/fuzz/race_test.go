package fuzz_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"sync"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
)

const racers = 3 // of a tenant

// race lets several clients of one tenant write the same entities at once. It compares their
// answers afterwards, when the events give the order of the writes.
type race struct {
	*lane
	mu       sync.Mutex
	known    map[string]int64 // by the path of an entity: the newest version that an answer had
	children []*childRow      // the children to write
	born     []string         // paths of the children that the race created
	attempts []*attempt
}

// attempt is a request of a race with its answer.
type attempt struct {
	answer
	entity   string // its path
	actor    string
	low      int64 // the newest version in an answer before the request began
	guard    int64 // the version of its If-Match, or 0
	write    bool
	key      authorKey // for a create with a key
	replayed bool
}

// race lets each client make the given number of requests, and compares their answers.
func (l *lane) race(each int) error {
	r := &race{lane: l, known: map[string]int64{}}
	for _, row := range l.m.children[max(0, len(l.m.children)-40):] {
		if row.now().AuthorState == event.AuthorActive {
			r.children = append(r.children, row)
		}
	}
	errs := make([]error, racers)
	var wg sync.WaitGroup
	for n := range racers {
		side := l.beside(l.rng.Uint64())
		side.record = nil
		wg.Go(func() {
			for i := 0; i < each && errs[n] == nil && l.ctx.Err() == nil; i++ {
				errs[n] = r.step(side, fmt.Sprintf("%s racer %d, %d of %d", l.mark(), n, i, l.seen))
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil || l.ctx.Err() != nil {
		return err
	}
	if err := r.settle(); err != nil {
		return fmt.Errorf("a race of tenant %d: %w", l.tenant, err)
	}
	return nil
}

// step makes one request. side has the client's random numbers.
func (r *race) step(side *lane, actor string) error {
	switch n := side.rng.IntN(10); {
	case n < 4:
		return r.edge(side, actor)
	case n < 7 && len(r.children) > 0:
		return r.child(side, actor)
	case n < 9:
		return r.create(side, actor)
	}
	k := side.childKind(moderated)
	path := r.settingsPath(k, "1")
	if side.chance(3) {
		return r.try(side, &attempt{entity: path}, http.MethodGet, path, "")
	}
	a := &attempt{entity: path, actor: actor, write: true}
	body := encode(map[string]any{"title": fmt.Sprint(r.mark(), " ", side.rng.IntN(3)), "premoderated": side.chance(5)})
	return r.try(side, a, http.MethodPut, path, body, r.guard(side, a)...)
}

// guard returns an If-Match with a recent version, or with any.
func (r *race) guard(side *lane, a *attempt) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v := r.known[a.entity]; v > 0 && !side.chance(3) {
		a.guard = v
		return []string{"If-Match: " + etag(v)}
	}
	return []string{"If-Match: *"}
}

func (r *race) edge(side *lane, actor string) error {
	k := side.edgeKind()
	from, to := pick(side, "1", "2"), pick(side, "1", "2")
	// Most clients meet at one edge, whose kind has attributes.
	if side.chance(2) {
		k, from, to = r.kinds.Edges["membership"], "1", "1"
	}
	if k.NoSelf() {
		to = map[string]string{"1": "2", "2": "1"}[from]
	}
	if k.ToChild { // which others delete and hide meanwhile
		to = "01890000-0000-7000-8000-000000000000"
		for _, row := range r.children {
			if row.k.Name == k.To && (to[0] == '0' || side.chance(3)) {
				to = row.states[0].ID
			}
		}
	}
	path := fmt.Sprintf("/v1/%s/%s/%s", k.Plural, from, to)
	a := &attempt{entity: path, actor: actor, write: true}
	var headers []string
	body := ""
	if len(k.Attributes) > 0 {
		if side.chance(2) {
			headers = r.guard(side, a)
		}
		body = encode(side.values(k.Attributes, false))
	}
	switch n := side.rng.IntN(8); {
	case n < 3:
		return r.try(side, a, http.MethodPut, path, body, headers...)
	case n < 5:
		return r.try(side, a, http.MethodDelete, path, "", headers...)
	case n < 6 && len(k.Attributes) > 0:
		if headers == nil {
			headers = r.guard(side, a)
		}
		return r.try(side, a, http.MethodPatch, path, body, headers...)
	}
	return r.try(side, &attempt{entity: path}, http.MethodGet, path, "")
}

func (r *race) child(side *lane, actor string) error {
	row := r.children[side.rng.IntN(min(8, len(r.children)))]
	path := onePath(row.k, row.states[0].ID)
	r.mu.Lock()
	if n := len(r.born); n > 0 && side.chance(2) {
		path = r.born[max(0, n-1-side.rng.IntN(4))]
	}
	r.mu.Unlock()
	a := &attempt{entity: path, actor: actor, write: true}
	switch n := side.rng.IntN(12); {
	case n < 6:
		return r.try(side, a, http.MethodPatch, path, encode(map[string]any{"body": fmt.Sprint(r.mark(), " ", side.rng.IntN(4))}),
			r.guard(side, a)...)
	case n < 7:
		return r.try(side, a, http.MethodDelete, path, "", r.guard(side, a)...)
	case n < 9 && (strings.HasPrefix(path, "/v1/comments/") || strings.HasPrefix(path, "/v1/lyrics/")):
		return r.try(side, a, http.MethodPut, path+"/moderation",
			encode(map[string]any{"state": pick(side, "APPROVED", "APPROVED", "HIDDEN")}), r.guard(side, a)...)
	}
	return r.try(side, &attempt{entity: path}, http.MethodGet, path, "")
}

// create writes children. Many requests have a key that other clients use for the same request at
// the same time.
func (r *race) create(side *lane, actor string) error {
	k := side.childKind(anyKind)
	n := newChild{k: k, object: "1", author: event.IDOf(1 + side.rng.Int64N(6)), body: r.mark() + " made in a race"}
	if len(k.Attributes) > 0 {
		n.values = map[string]any{}
		for name, a := range k.Attributes {
			if a.Minimum != nil {
				n.values[name] = *a.Minimum
			}
		}
	}
	a := &attempt{actor: actor, write: true}
	if side.chance(2) {
		n.key = fmt.Sprint("race-", r.seen, "-", side.rng.IntN(12))
		a.key = authorKey{k.Name, n.author, n.key}
	}
	w := r.createOf(n)
	return r.try(side, a, w.method, w.path, encode(w.body), w.headers...)
}

// try makes the request and keeps its answer.
func (r *race) try(side *lane, a *attempt, method, path, body string, headers ...string) (err error) {
	r.mu.Lock()
	a.low = r.known[a.entity]
	r.mu.Unlock()
	if a.write {
		headers = append(headers, "Tidings-Actor: "+a.actor)
	}
	if a.answer, err = side.call(method, path, body, headers...); err != nil {
		return err
	}
	a.replayed = a.header.Get("Idempotency-Replayed") == "true"
	if a.entity == "" {
		a.entity = a.header.Get("Location")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if a.status == http.StatusCreated && method == http.MethodPost && !a.replayed {
		r.born = append(r.born, a.entity)
	}
	r.known[a.entity] = max(r.known[a.entity], a.version())
	r.attempts = append(r.attempts, a)
	return nil
}

// shown returns the entity in the answer, or nil.
func (a *attempt) shown() map[string]any {
	if a.status >= 300 {
		now, _ := a.json["current"].(map[string]any)
		return now
	}
	return a.json
}

func (a *attempt) version() int64 {
	v, _ := a.shown()["version"].(float64)
	return int64(v)
}

// settle reads the events in the order of the writes, builds the model from them, and compares all
// answers.
func (r *race) settle() error {
	events, err := r.unseen()
	if err != nil {
		return err
	}
	by := make(map[string]*made, len(events))
	for i := range events {
		m, err := r.take(&events[i])
		if err == nil && by[m.actor] != nil {
			err = errors.New("the request made two events")
		}
		if err != nil {
			return fmt.Errorf("event %d, %s.%s: %w: %s", events[i].OutboxID, events[i].AggregateType,
				events[i].Type, err, events[i].Payload)
		}
		by[m.actor] = m
	}
	if err := r.keys(); err != nil {
		return err
	}
	for _, a := range r.attempts {
		if err := r.fits(a, by[a.actor]); err != nil {
			return fmt.Errorf("%s: answered %d %s, when version %d was known: %w", a.request, a.status, a.body, a.low, err)
		}
		delete(by, a.actor)
	}
	for actor, m := range by {
		return fmt.Errorf("version %d of %s is by %s, whose answer does not report it", m.version, m.entity, actor)
	}
	if err := r.apply(events); err != nil {
		return err
	}
	return r.project(events)
}

// made is a version that an event reports.
type made struct {
	entity, actor string
	version       int64
}

// take makes the event's state the next version of its entity, if it may follow the last one.
func (r *race) take(e *event.Event) (*made, error) {
	if e.AggregateType == event.AggregateThread {
		var got event.Thread
		if err := json.Unmarshal(e.Payload, &got); err != nil {
			return nil, err
		}
		row := r.m.thread(r.kinds.Children[got.Of()], got.PostID)
		now := row.now()
		if got.Version != now.Version+1 || got.UpdatedAt.Before(now.UpdatedAt.Time) ||
			got.Locked == now.Locked && got.Premoderate == now.Premoderate && got.Title == now.Title {
			return nil, fmt.Errorf("it cannot follow %+v", now)
		}
		r.m.putThread(row, got)
		return &made{r.settingsPath(row.k, row.object), got.Actor, got.Version}, nil
	}
	if k, ok := r.kinds.Edge(e.AggregateType); ok {
		got, err := e.DecodeEdge(k.Names())
		if err != nil {
			return nil, err
		}
		got.Attributes = store.CanonicalAttributes(got.Attributes)
		row := r.m.edge(k, got.From, got.To)
		if err := follows(row.now(), got, e.Type); err != nil {
			return nil, err
		}
		r.m.putEdge(row, got)
		return &made{fmt.Sprintf("/v1/%s/%s/%s", k.Plural, got.From, got.To), got.Actor, got.Version}, nil
	}
	k := r.kinds.Children[e.AggregateType]
	got, err := e.DecodeChild(k.Names())
	if err != nil {
		return nil, err
	}
	got.Attributes = store.CanonicalAttributes(got.Attributes)
	m := &made{onePath(k, got.ID), got.Actor, got.Version}
	row := r.m.byID[got.ID]
	if row == nil {
		if got.Version != 1 || e.Type != event.Created {
			return nil, errors.New("its first version is missing")
		}
		if first := r.m.placeOf(k, got.Parent, got.AuthorID); k.OnePerAuthor && first != nil {
			return nil, fmt.Errorf("the author has %s already", first.now().ID)
		}
		r.m.addChild(k, got)
		return m, nil
	}
	return m, row.follow(got, e.Type)
}

// follows reports whether a version of an edge may follow the last one.
func follows(last, next event.Edge, kind string) error {
	ok := next.Version == last.Version+1 && !next.UpdatedAt.Before(last.UpdatedAt.Time) &&
		(last.Version == 0 || next.CreatedAt == last.CreatedAt)
	switch kind {
	case event.Created:
		ok = ok && !last.Active() && next.Active() && next.PositionedAt == next.UpdatedAt
	case event.Removed:
		ok = ok && last.Active() && !next.Active() && next.PositionedAt == last.PositionedAt
	default:
		ok = ok && last.Active() && next.Active() && next.PositionedAt == last.PositionedAt &&
			string(next.Attributes) != string(last.Attributes)
	}
	if !ok {
		return fmt.Errorf("it cannot follow %+v", last)
	}
	return nil
}

// follow adds a version that may follow the last one. Members that the event of a hidden child
// lacks stay as they were.
func (r *childRow) follow(next event.Child, kind string) error {
	last := r.now()
	if bare(next) {
		next.Body, next.Attributes = last.Body, last.Attributes
	}
	same := last
	same.Version, same.UpdatedAt, same.Actor, same.Reason = next.Version, next.UpdatedAt, next.Actor, next.Reason
	ok := next.Version == last.Version+1 && !next.UpdatedAt.Before(last.UpdatedAt.Time) && last.AuthorState == event.AuthorActive &&
		!reflect.DeepEqual(same, next)
	switch kind {
	case event.Edited:
		same.Body, same.Attributes = next.Body, next.Attributes
		ok = ok && !bare(last)
	case event.Deleted:
		same.AuthorState = event.AuthorDeleted
	case event.Moderated:
		same.ModerationState = next.ModerationState
	}
	if !ok || !reflect.DeepEqual(same, next) {
		return fmt.Errorf("it cannot follow %+v", last)
	}
	r.states = append(r.states, next)
	return nil
}

// version returns an entity at a version, and whether a read can show it.
func (r *race) version(path string, version int64) (shown map[string]any, ok bool) {
	for _, row := range r.m.children {
		if onePath(row.k, row.states[0].ID) == path && version >= 1 && version <= int64(len(row.states)) {
			return renderChild(row.k, row.states[version-1], false), true
		}
	}
	for _, row := range r.m.edges {
		if fmt.Sprintf("/v1/%s/%s/%s", row.k.Plural, row.from, row.to) == path && version >= 1 && version <= int64(len(row.states)) {
			return renderEdge(row.k, row.states[version-1]), row.states[version-1].Active()
		}
	}
	for _, k := range r.kinds.AllChildren() {
		if !k.Moderated || r.settingsPath(k, "1") != path {
			continue
		}
		row := r.m.thread(k, "1")
		if version == 0 {
			return renderSettings(k, event.Thread{PostID: "1"}), true
		}
		if version <= int64(len(row.states)) {
			return renderSettings(k, row.states[version-1]), true
		}
	}
	return nil, false
}

// fits reports whether an answer is possible in some order of the requests that agrees with the
// events.
func (r *race) fits(a *attempt, m *made) error {
	version, guarded := a.version(), a.guard
	switch {
	case m != nil && (a.status >= 300 || a.replayed):
		return fmt.Errorf("version %d of %s was written, but the answer denies it", m.version, m.entity)
	case m != nil && (m.entity != a.entity || a.status != http.StatusNoContent && m.version != version):
		return fmt.Errorf("the answer differs from version %d of %s, which was written", m.version, m.entity)
	case m != nil && guarded > 0 && m.version != guarded+1:
		return fmt.Errorf("the guard was version %d, and version %d was written", guarded, m.version)
	case m != nil && m.version <= a.low:
		return fmt.Errorf("version %d was written", m.version)
	case m == nil && a.write && a.status == http.StatusCreated && !a.replayed:
		return errors.New("it has no event")
	case m == nil && a.write && a.status == http.StatusOK && guarded > 0 && version != guarded:
		return fmt.Errorf("the guard was version %d", guarded)
	case a.status == http.StatusPreconditionFailed && (guarded == 0 || version == guarded):
		return fmt.Errorf("the guard was version %d", guarded)
	case a.shown() == nil || a.replayed:
		return nil
	case version < a.low:
		return fmt.Errorf("version %d is old", version)
	}
	want, ok := r.version(a.entity, version)
	if !ok {
		return fmt.Errorf("there is no version %d to show", version)
	}
	return differ(a.answer, any(want), any(a.shown()))
}

// keys compares the answers to creates with one key: one child, created once.
func (r *race) keys() error {
	first, made := map[authorKey]string{}, map[authorKey]int{}
	for _, a := range r.attempts {
		if a.key.key == "" || a.status != http.StatusCreated {
			continue
		}
		if !a.replayed {
			made[a.key]++
		}
		if id := first[a.key]; id != "" && id != a.entity {
			return fmt.Errorf("the key %v made %s and %s", a.key, id, a.entity)
		}
		first[a.key] = a.entity
	}
	for key := range first {
		if made[key] != 1 {
			return fmt.Errorf("the key %v made %s %d times", key, first[key], made[key])
		}
		r.m.keys[key] = keyed{} // no lane uses the key again
	}
	return nil
}
