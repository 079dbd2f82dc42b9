package endtoend_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// ownKinds are kinds that no release has. A fault applies them while everything runs.
const ownKinds = `objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players,
    attributes: {mood: {enum: [calm, loud, wild], required: true, filter: true}, times: {type: integer, minimum: 1, maximum: 9}}}
  nod: {plural: nods, from: user, to: review, forward: nodded_reviews, reverse: nodders}
  mark: {plural: marks, from: user, to: verdict, forward: marked_verdicts, reverse: markers, partitions: 3,
    attributes: {color: {enum: [red, green, blue], required: true, filter: true}}}
children:
  verdict: {plural: verdicts, parent: song, one_per_author: true,
    attributes: {stars: {type: integer, minimum: -3, maximum: 3, required: true, aggregate: true},
      length: {type: integer, minimum: 0, maximum: 99, aggregate: true}}}
`

// The kinds of the model besides follows and comments.
var (
	modelEdges    = []string{"like", "membership", "play", "nod", "mark"}
	modelChildren = []string{"review", "message", "verdict"}
)

// edgeID identifies an edge.
type edgeID struct {
	kind     string
	from, to event.ID
}

// edgeState is one version of an edge.
type edgeState struct {
	Active     bool
	Version    int64
	At         string // when it last became active
	Attributes string // in the order of their names
}

// childState is one version of a child, as the API shows it.
type childState struct {
	ID, Author, Body, State string
	Object                  event.ID
	Version                 int64
	CreatedAt, UpdatedAt    string
	Attributes              string
}

func (c childState) visible() bool { return c.State == "VISIBLE" }

// shown returns the form in lists and single reads: an invisible child has no author, body or
// attributes.
func (c childState) shown() childState {
	if !c.visible() {
		c.Author, c.Body, c.Attributes = "", "", ""
	}
	return c
}

// kindModel is the truth of one tenant's edges and children of these kinds: every version from the
// answers to writes, oldest first. Each edge and each child has one writer.
type kindModel struct {
	mu       sync.Mutex
	edges    map[edgeID][]edgeState
	children map[string]map[string][]childState // by kind and id
	keep     map[string]bool                    // ids of children that no writer removes
}

func newKindModel() *kindModel {
	return &kindModel{edges: map[edgeID][]edgeState{}, children: map[string]map[string][]childState{}, keep: map[string]bool{}}
}

func (m *kindModel) putEdge(id edgeID, s edgeState) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if all := m.edges[id]; len(all) == 0 || all[len(all)-1].Version < s.Version {
		m.edges[id] = append(all, s)
	}
}

func (m *kindModel) putChild(kind string, c childState, keep bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.children[kind] == nil {
		m.children[kind] = map[string][]childState{}
	}
	if all := m.children[kind][c.ID]; len(all) == 0 || all[len(all)-1].Version < c.Version {
		m.children[kind][c.ID] = append(all, c)
	}
	if keep {
		m.keep[c.ID] = true
	}
}

// edge returns the newest version of an edge, or the zero value if it never existed.
func (m *kindModel) edge(id edgeID) edgeState {
	m.mu.Lock()
	defer m.mu.Unlock()
	if all := m.edges[id]; len(all) > 0 {
		return all[len(all)-1]
	}
	return edgeState{}
}

func (m *kindModel) kept(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.keep[id]
}

// list returns the newest versions of the children of a kind that fulfill want, oldest child first.
func (m *kindModel) list(kind string, want func(childState) bool) []childState {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []childState{}
	for _, versions := range m.children[kind] {
		if c := versions[len(versions)-1]; want(c) {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b childState) int {
		return cmp.Or(cmp.Compare(a.CreatedAt, b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return all
}

// edgeRow is one line of a list of edges.
type edgeRow struct {
	Object         event.ID
	At, Attributes string
}

// rows returns the lines of an object's list of edges, newest first.
func (m *kindModel) rows(kind string, object event.ID, reverse bool, want func(edgeState) bool) []edgeRow {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []edgeRow{}
	for id, versions := range m.edges {
		of, other := id.from, id.to
		if reverse {
			of, other = other, of
		}
		if s := versions[len(versions)-1]; id.kind == kind && of == object && s.Active && want(s) {
			all = append(all, edgeRow{other, s.At, s.Attributes})
		}
	}
	slices.SortFunc(all, func(a, b edgeRow) int { return cmp.Or(cmp.Compare(b.At, a.At), cmp.Compare(b.Object, a.Object)) })
	return all
}

// ids returns all edges of a kind that a writer ever wrote.
func (m *kindModel) ids(kind string) (all []edgeID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.edges {
		if id.kind == kind {
			all = append(all, id)
		}
	}
	slices.SortFunc(all, func(a, b edgeID) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to)) })
	return all
}

// canonical returns a JSON object in canonical form.
func canonical(raw json.RawMessage) (string, error) {
	if len(raw) == 0 {
		return "", nil
	}
	var all map[string]any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&all); err != nil {
		return "", err
	}
	text, err := json.Marshal(all)
	return string(text), err
}

// wireEdge and wireChild parse answers with the names of the kind.

func wireEdge(raw json.RawMessage) (edgeState, error) {
	var e struct {
		Status     string
		Version    int64
		At         string `json:"positioned_at"`
		Attributes json.RawMessage
	}
	err := json.Unmarshal(raw, &e)
	attributes, err2 := canonical(e.Attributes)
	return edgeState{e.Status == event.StatusActive, e.Version, e.At, attributes}, errors.Join(err, err2)
}

func wireChild(k kinds.Child, raw json.RawMessage) (childState, error) {
	var all map[string]json.RawMessage
	var c struct {
		Author     string `json:"author_id"`
		Body       string
		State      string
		Version    int64
		CreatedAt  string `json:"created_at"`
		UpdatedAt  string `json:"updated_at"`
		Attributes json.RawMessage
	}
	if err := errors.Join(json.Unmarshal(raw, &all), json.Unmarshal(raw, &c)); err != nil {
		return childState{}, err
	}
	attributes, err := canonical(c.Attributes)
	out := childState{Author: c.Author, Body: c.Body, State: c.State, Version: c.Version, CreatedAt: c.CreatedAt,
		UpdatedAt: c.UpdatedAt, Attributes: attributes}
	var object string
	err = errors.Join(err, json.Unmarshal(all[k.Name+"_id"], &out.ID), json.Unmarshal(all[k.Parent+"_id"], &object))
	_, err2 := fmt.Sscan(object, &out.Object)
	return out, errors.Join(err, err2)
}

func mapAll[T any](raw []json.RawMessage, fn func(json.RawMessage) (T, error)) ([]T, error) {
	all := make([]T, len(raw))
	for i, r := range raw {
		var err error
		if all[i], err = fn(r); err != nil {
			return nil, fmt.Errorf("%s: %w", r, err)
		}
	}
	return all, nil
}

// kindWriter writes edges and children. It is their only writer, so it knows the answer to each
// write in advance.
type kindWriter struct {
	client
	m       *kindModel
	rng     *rand.Rand
	store   *store.Store
	set     func() *kinds.Set
	tenant  int64
	people  int        // it writes for the ten users after this one; idOf
	first   int        // the number of its first object
	objects []event.ID // targets of its edges and parents of its children
	created int
	tokens  map[string]string // the newest token of each entity; nil if the writer does not read its own writes
}

// begin gives the writer users and an object of its own, so the test knows their content during
// writes.
func (w *kindWriter) begin(people, object int) {
	w.people, w.first, w.objects, w.tokens = people, object, []event.ID{event.IDOf(object)}, map[string]string{}
}

func (w *kindWriter) user() event.ID   { return idOf(w.people + 1 + w.rng.IntN(10)) }
func (w *kindWriter) object() event.ID { return w.objects[w.rng.IntN(len(w.objects))] }

// pick returns one of the kinds in force.
func pick[T any](w *kindWriter, names []string, of map[string]T) T {
	for {
		if k, ok := of[names[w.rng.IntN(len(names))]]; ok {
			return k
		}
	}
}

// attributes returns valid attributes: all that the kind requires, and some others.
func (w *kindWriter) attributes(all map[string]kinds.Attribute) map[string]any {
	if len(all) == 0 {
		return nil
	}
	values := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		if !a.Required && w.rng.IntN(3) == 0 {
			continue
		}
		if a.Type == kinds.Integer {
			values[name] = *a.Minimum + w.rng.Int64N(*a.Maximum-*a.Minimum+1)
		} else {
			values[name] = a.Enum[w.rng.IntN(len(a.Enum))]
		}
	}
	return values
}

func (w *kindWriter) step() error {
	if len(w.tokens) > 50 { // a read may name at most 64 writes
		w.begin(w.people+10, w.first+1)
	}
	var err error
	switch w.rng.IntN(5) {
	case 0, 1:
		k := pick(w, modelEdges, w.set().Edges)
		targets := w.targets(k, childState.visible)
		switch {
		case k.ToChild && w.rng.IntN(8) == 0:
			err = w.edgeToGone(k)
		case len(targets) == 0:
		case w.rng.IntN(5) == 0:
			err = w.edgeGroup(k, targets)
		default:
			err = w.edge(k, edgeID{k.Name, w.user(), targets[w.rng.IntN(len(targets))]})
		}
	default:
		k := pick(w, modelChildren, w.set().Children)
		if w.rng.IntN(8) == 0 {
			err = w.childGroup(k)
		} else {
			err = w.childOf(k)
		}
	}
	if err != nil || w.tokens == nil {
		return err
	}
	reader := w.client
	reader.fresh = strings.Join(slices.Collect(maps.Values(w.tokens)), ",")
	return equalKinds(reader, w.m, w.rng, w.set(), w.objects, w.user(), 2)
}

// wrote checks the answer to a write and keeps its token. It reports whether the write happened.
func (w *kindWriter) wrote(what, entity string, a answer, want int) (bool, error) {
	if a.status == http.StatusServiceUnavailable {
		return false, nil
	}
	if a.status != want {
		return false, fmt.Errorf("%s: %d %s, want %d", what, a.status, a.body, want)
	}
	if token := a.header.Get("Tidings-Token"); token != "" && w.tokens != nil {
		w.tokens[entity] = token
	}
	return a.status < 300, nil
}

// targets returns the objects to which the writer's edges of a kind lead, or its children that
// fulfill want.
func (w *kindWriter) targets(k kinds.Edge, want func(childState) bool) (all []event.ID) {
	if !k.ToChild {
		return w.objects
	}
	for _, c := range w.m.list(k.To, func(c childState) bool { return want(c) && w.writes(c) }) {
		all = append(all, event.ID(c.ID))
	}
	return all
}

// edgeToGone puts an edge to a child that is deleted, which is refused.
func (w *kindWriter) edgeToGone(k kinds.Edge) error {
	gone := w.targets(k, func(c childState) bool { return !c.visible() })
	if len(gone) == 0 {
		return nil
	}
	body := ""
	if all := w.attributes(k.Attributes); all != nil {
		text, err := json.Marshal(all)
		if err != nil {
			return err
		}
		body = string(text)
	}
	path := fmt.Sprintf("/v1/%s/%s/%s", k.Plural, w.user(), gone[w.rng.IntN(len(gone))])
	_, err := w.wrote("PUT "+path, path, w.call(http.MethodPut, path, body), http.StatusConflict)
	return err
}

// edge puts, changes or removes an edge.
func (w *kindWriter) edge(k kinds.Edge, id edgeID) error {
	path := fmt.Sprintf("/v1/%s/%s/%s", k.Plural, id.from, id.to)
	was := w.m.edge(id)
	keep := func(raw json.RawMessage, attributes map[string]any, merge bool) error {
		now, err := wireEdge(raw)
		if err != nil {
			return err
		}
		want := wantEdge(k, was, attributes, merge)
		if now.At == "" || was.Active && now.At != was.At {
			return fmt.Errorf("%s: it became active at %q, it was active since %q", path, now.At, was.At)
		}
		want.At = now.At
		w.m.putEdge(id, now)
		return differ(path, want, now)
	}
	switch n := w.rng.IntN(10); {
	case n < 5 || !was.Active:
		want, attributes, body := http.StatusCreated, w.attributes(k.Attributes), ""
		if was.Active {
			want = http.StatusOK
		}
		if attributes != nil {
			text, err := json.Marshal(attributes)
			if err != nil {
				return err
			}
			body = string(text)
		}
		a := w.call(http.MethodPut, path, body)
		if done, err := w.wrote("PUT "+path, path, a, want); !done {
			return err
		}
		return keep(a.body, attributes, false)
	case n < 6 && len(k.Attributes) > 0 && w.tokens == nil:
		return w.race(k, id, path)
	case n < 8 && len(k.Attributes) > 0:
		attributes := w.attributes(k.Attributes)
		text, err := json.Marshal(attributes)
		if err != nil {
			return err
		}
		version, want := was.Version, http.StatusOK
		if w.rng.IntN(4) == 0 {
			version, want = was.Version+1, http.StatusPreconditionFailed
		}
		a := w.call(http.MethodPatch, path, string(text), fmt.Sprintf(`If-Match: "%d"`, version))
		if done, err := w.wrote("PATCH "+path, path, a, want); !done {
			return err
		}
		return keep(a.body, attributes, true)
	}
	if done, err := w.wrote("DELETE "+path, path, w.call(http.MethodDelete, path, ""), http.StatusNoContent); !done {
		return err
	}
	was.Active, was.Version = false, was.Version+1
	w.m.putEdge(id, was)
	return nil
}

// race sends two changes of the same version of an edge at once. Exactly one of them must succeed.
func (w *kindWriter) race(k kinds.Edge, id edgeID, path string) error {
	was := w.m.edge(id)
	name, _ := k.Filter()
	var changes []string
	for _, value := range k.Attributes[name].Enum {
		if change := fmt.Sprintf("%q:%q", name, value); !strings.Contains(was.Attributes, change) {
			changes = append(changes, change)
		}
	}
	answers := make([]answer, 2)
	var wg sync.WaitGroup
	for i := range answers {
		wg.Go(func() {
			answers[i] = w.call(http.MethodPatch, path, "{"+changes[i]+"}", fmt.Sprintf(`If-Match: "%d"`, was.Version))
		})
	}
	wg.Wait()
	made := 0
	for i, a := range answers {
		switch a.status {
		case http.StatusOK:
			now, err := wireEdge(a.body)
			if made++; err != nil || made > 1 || now.Version != was.Version+1 || !strings.Contains(now.Attributes, changes[i]) {
				return fmt.Errorf("two changes of version %d of %s: %d %s and %d %s", was.Version, path, answers[0].status, answers[0].body,
					answers[1].status, answers[1].body)
			}
			w.m.putEdge(id, now)
		case http.StatusPreconditionFailed, http.StatusServiceUnavailable:
		default:
			return fmt.Errorf("PATCH %s: %d %s", path, a.status, a.body)
		}
	}
	if made == 0 && answers[0].status != http.StatusServiceUnavailable && answers[1].status != http.StatusServiceUnavailable {
		return fmt.Errorf("two changes of version %d of %s, and neither succeeded", was.Version, path)
	}
	return nil
}

// wantEdge returns the expected edge after a put, or after a merge of attributes.
func wantEdge(k kinds.Edge, was edgeState, attributes map[string]any, merge bool) edgeState {
	want := was
	if len(k.Attributes) > 0 {
		values := map[string]any{}
		if merge {
			_ = json.Unmarshal([]byte(was.Attributes), &values) // cannot fail: the model has only parsed values
		}
		maps.Copy(values, attributes)
		for name, a := range k.Attributes {
			if _, given := values[name]; !given && a.Default != nil {
				values[name] = a.Default
			}
		}
		text, _ := json.Marshal(values)
		want.Attributes = string(text)
	}
	if want.Active = true; !was.Active || want.Attributes != was.Attributes {
		want.Version++
	}
	return want
}

// edgeGroup puts or removes several edges in one call of the store.
func (w *kindWriter) edgeGroup(k kinds.Edge, targets []event.ID) error {
	if w.tokens != nil {
		return nil // such writes have no tokens
	}
	var writes []store.EdgeWrite
	put := w.rng.IntN(3) > 0
	for range 2 + w.rng.IntN(6) {
		e := store.EdgeWrite{Meta: meta, From: w.user(), To: targets[w.rng.IntN(len(targets))]}
		if all := w.attributes(k.Attributes); put && all != nil {
			text, err := json.Marshal(all)
			if err != nil {
				return err
			}
			e.Attributes = text
		}
		writes = append(writes, e)
	}
	do := w.store.RemoveEdges
	if put {
		do = w.store.PutEdges
	}
	out, err := do(w.ctx, w.tenant, k, writes)
	for i, o := range out {
		if o.Err != nil {
			return o.Err
		}
		attributes, err := canonical(o.Edge.Attributes)
		if err != nil {
			return err
		}
		if o.Edge.Version > 0 {
			w.m.putEdge(edgeID{k.Name, writes[i].From, writes[i].To},
				edgeState{o.Edge.Active(), o.Edge.Version, wire(o.Edge.PositionedAt), attributes})
		}
	}
	return busy(err)
}

// childOf writes, edits or deletes a child.
func (w *kindWriter) childOf(k kinds.Child) error {
	mine := w.m.list(k.Name, func(c childState) bool { return c.visible() && w.writes(c) })
	if len(mine) == 0 || w.rng.IntN(2) == 0 && len(mine) < 40 {
		return w.create(k)
	}
	was := mine[w.rng.IntN(len(mine))]
	path := "/v1/" + k.Plural + "/" + was.ID
	if w.rng.IntN(5) < 2 {
		if w.m.kept(was.ID) {
			return nil
		}
		if done, err := w.wrote("DELETE "+path, path, w.call(http.MethodDelete, path, "", fmt.Sprintf(`If-Match: "%d"`, was.Version)),
			http.StatusNoContent); !done {
			return err
		}
		var now json.RawMessage
		if err := w.read(http.MethodGet, path, "", &now); err != nil {
			return err
		}
		gone, err := wireChild(k, now)
		if err != nil {
			return err
		}
		want := was
		want.State, want.Version, want.UpdatedAt = "DELETED", was.Version+1, gone.UpdatedAt
		w.m.putChild(k.Name, want, false)
		return differ(path, want.shown(), gone)
	}
	change, want := map[string]any{"body": fmt.Sprint("other words ", w.rng.IntN(1000))}, was
	want.Body, want.Version = change["body"].(string), was.Version+1
	if all := w.attributes(k.Attributes); all != nil {
		values := map[string]any{}
		if err := json.Unmarshal([]byte(was.Attributes), &values); err != nil {
			return err
		}
		if _, there := values["length"]; there && w.rng.IntN(3) == 0 {
			all["length"] = nil // the edit removes it
		}
		for name, v := range all {
			if values[name] = v; v == nil {
				delete(values, name)
			}
		}
		change["attributes"] = all
		text, err := json.Marshal(values)
		if err != nil {
			return err
		}
		want.Attributes = string(text)
	}
	body, err := json.Marshal(change)
	if err != nil {
		return err
	}
	a := w.call(http.MethodPatch, path, string(body), "If-Match: *")
	if done, err := w.wrote("PATCH "+path, path, a, http.StatusOK); !done {
		return err
	}
	now, err := wireChild(k, a.body)
	if err != nil {
		return err
	}
	if want.UpdatedAt = now.UpdatedAt; want.Body == was.Body && want.Attributes == was.Attributes {
		want.Version = was.Version
	}
	w.m.putChild(k.Name, now, false)
	return differ(path, want, now)
}

// writes reports whether the child belongs to this writer.
func (w *kindWriter) writes(c childState) bool {
	for n := range 10 {
		if event.ID(c.Author) == idOf(w.people+1+n) {
			return true
		}
	}
	return false
}

// taken returns the author's existing child, if an author may have only one.
func (w *kindWriter) taken(k kinds.Child, object, author event.ID) []childState {
	if !k.OnePerAuthor {
		return nil
	}
	return w.m.list(k.Name, func(c childState) bool { return c.visible() && c.Object == object && c.Author == fmt.Sprint(author) })
}

// childGroup writes several children in one call of the store.
func (w *kindWriter) childGroup(k kinds.Child) error {
	if w.tokens != nil {
		return nil // such writes have no tokens
	}
	var creates []store.NewChild
	for range 2 + w.rng.IntN(4) {
		c := store.NewChild{Meta: meta, Object: w.object(), AuthorID: w.user(), Body: fmt.Sprint("words of a group ", w.rng.IntN(1000))}
		if all := w.attributes(k.Attributes); all != nil {
			text, err := json.Marshal(all)
			if err != nil {
				return err
			}
			c.Attributes = text
		}
		creates = append(creates, c)
	}
	out, err := w.store.CreateChildren(w.ctx, w.tenant, k, creates)
	for i, o := range out {
		var second *store.TakenError
		first := w.taken(k, creates[i].Object, creates[i].AuthorID)
		switch {
		case errors.Is(o.Err, store.ErrThreadReturning):
		case errors.As(o.Err, &second) && len(first) == 1 && second.Child.ID == first[0].ID:
		case o.Err != nil || len(first) > 0:
			return fmt.Errorf("a %s of %s under %s in a group: %+v, %w; existing: %+v", k.Name, creates[i].AuthorID,
				creates[i].Object, o.Child, o.Err, first)
		default:
			c := o.Child
			w.m.putChild(k.Name, childState{ID: c.ID, Author: c.AuthorID.String(), Body: c.Body, State: c.State(),
				Object: c.Parent, Version: c.Version,
				CreatedAt: wire(c.CreatedAt), UpdatedAt: wire(c.UpdatedAt), Attributes: string(c.Attributes)}, false)
		}
	}
	return busy(err)
}

// create writes a child. If an author may have only one, a second create must fail and name the
// existing child.
func (w *kindWriter) create(k kinds.Child) error {
	object, author := w.object(), w.user()
	body := map[string]any{"author_id": fmt.Sprint(author), "body": fmt.Sprint("words ", w.rng.IntN(1000))}
	if all := w.attributes(k.Attributes); all != nil {
		body["attributes"] = all
	}
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	first := w.taken(k, object, author)
	path, want := fmt.Sprintf("/v1/%ss/%s/%s", k.Parent, object, k.Plural), http.StatusCreated
	if len(first) > 0 {
		want = http.StatusConflict
	}
	w.created++
	key := fmt.Sprintf("Idempotency-Key: %d-%d", w.people, w.created)
	a := w.call(http.MethodPost, path, string(text), key)
	if a.status == http.StatusConflict && want == http.StatusConflict {
		at := "/v1/" + k.Plural + "/" + first[0].ID
		if a.header.Get("Location") != at || !strings.Contains(string(a.body), `"already-written"`) ||
			!strings.Contains(string(a.body), first[0].ID) {
			return fmt.Errorf("a second one, POST %s: %q, %s, want one that names %s", path, a.header.Get("Location"), a.body, at)
		}
		return nil
	}
	if done, err := w.wrote("POST "+path, a.header.Get("Location"), a, want); !done {
		return err
	}
	c, err := wireChild(k, a.body)
	if err != nil {
		return err
	}
	w.m.putChild(k.Name, c, w.rng.IntN(4) == 0)
	if w.rng.IntN(6) == 0 { // a repeated request creates no second child
		if again := w.call(http.MethodPost, path, string(text), key); again.status != http.StatusServiceUnavailable &&
			(again.status != http.StatusCreated || again.header.Get("Idempotency-Replayed") != "true" ||
				!strings.Contains(string(again.body), c.ID)) {
			return fmt.Errorf("POST %s again: %d %s, want %s", path, again.status, again.body, c.ID)
		}
	}
	attributes, err := json.Marshal(body["attributes"])
	wanted := childState{ID: c.ID, Author: fmt.Sprint(author), Body: body["body"].(string), State: "VISIBLE", Object: object, Version: 1,
		CreatedAt: c.CreatedAt, UpdatedAt: c.CreatedAt, Attributes: string(attributes)}
	if body["attributes"] == nil {
		wanted.Attributes = ""
	}
	return errors.Join(err, differ("POST "+path, wanted, c))
}

// equalKinds compares everything that the API serves for objects and a user, in all kinds in force.
// parts is the number of ways of reading, chosen by rng; 0 for all.
func equalKinds(c client, m *kindModel, rng *rand.Rand, set *kinds.Set, objects []event.ID, user event.ID, parts int) error {
	var all []func() error
	for _, name := range modelEdges {
		k, ok := set.Edge(name)
		if !ok {
			continue
		}
		all = append(all, func() error { return equalEdges(c, m, rng, set, k, user, false) },
			func() error { return equalChecks(c, m, rng, k) })
		targets := objects
		if k.ToChild {
			targets = nil
			under := m.list(k.To, func(c childState) bool { return slices.Contains(objects, c.Object) })
			for _, child := range pickSome(rng, under, 4) {
				targets = append(targets, event.ID(child.ID))
			}
		}
		for _, target := range targets {
			all = append(all, func() error { return equalEdges(c, m, rng, set, k, target, true) })
		}
	}
	for _, name := range modelChildren {
		k, ok := set.Child(name)
		if !ok {
			continue
		}
		all = append(all, func() error { return equalAuthored(c, m, rng, k, user) })
		for _, object := range objects {
			all = append(all, func() error { return equalChildren(c, m, rng, k, object) },
				func() error { return equalChildCounts(c, m, k, object) })
		}
	}
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	if parts > 0 {
		all = all[:min(parts, len(all))]
	}
	var errs []error
	for _, equal := range all {
		errs = append(errs, equal())
	}
	return errors.Join(errs...)
}

// equalEdges compares the list of an object, its filtered lists, and its count.
func equalEdges(c client, m *kindModel, rng *rand.Rand, set *kinds.Set, k kinds.Edge, object event.ID, reverse bool) error {
	of, other, list := k.From, k.To, k.Forward
	if reverse {
		of, other, list = other, of, k.Reverse
	}
	at := fmt.Sprintf("/v1/%s/%s/", set.Plural(of), object)
	same := func(path string, want []edgeRow) error {
		raw, _, err := walk[json.RawMessage](c, path, 1+rng.IntN(20), nil)
		if err != nil {
			return err
		}
		got, err := mapAll(raw, func(r json.RawMessage) (row edgeRow, err error) {
			var all map[string]json.RawMessage
			var id string
			err = errors.Join(json.Unmarshal(r, &all), json.Unmarshal(all[other+"_id"], &id), json.Unmarshal(all["positioned_at"], &row.At))
			_, err2 := fmt.Sscan(id, &row.Object)
			attributes, err3 := canonical(all["attributes"])
			row.Attributes = attributes
			return row, errors.Join(err, err2, err3)
		})
		return errors.Join(err, differ(path, want, got))
	}
	want := m.rows(k.Name, object, reverse, func(edgeState) bool { return true })
	errs := []error{same(at+list, want)}
	if name, ok := k.Filter(); ok && reverse {
		for _, value := range k.Attributes[name].Enum {
			errs = append(errs, same(fmt.Sprintf("%s%s?%s=%s", at, list, name, value), m.rows(k.Name, object, true, func(s edgeState) bool {
				return strings.Contains(s.Attributes, fmt.Sprintf("%q:%q", name, value))
			})))
		}
	}
	if reverse && k.ToChild {
		return errors.Join(errs...)
	}
	var counts map[string]json.RawMessage
	return errors.Join(append(errs, c.read(http.MethodGet, at+"counts", "", &counts),
		differ(at+"counts: "+list, fmt.Sprint(len(want)), string(counts[list])))...)
}

// equalChecks reads whether edges exist for some pairs, from the projection and from the truth.
func equalChecks(c client, m *kindModel, rng *rand.Rand, k kinds.Edge) error {
	ids := m.ids(k.Name)
	var pairs []map[string]string
	var want []string
	for range min(10, len(ids)) {
		id := ids[rng.IntN(len(ids))]
		pairs = append(pairs, map[string]string{k.Ends[0]: fmt.Sprint(id.from), k.Ends[1]: fmt.Sprint(id.to)})
		s := m.edge(id)
		if s.Active {
			want = append(want, fmt.Sprint(true, s.At))
		} else {
			want = append(want, fmt.Sprint(false, ""))
		}
	}
	if len(pairs) == 0 {
		return nil
	}
	body, err := json.Marshal(map[string]any{"pairs": pairs})
	var got page[struct {
		Active bool
		At     string `json:"positioned_at"`
	}]
	err = errors.Join(err, c.read(http.MethodPost, "/v1/"+k.Plural+":check", string(body), &got))
	var have []string
	for _, item := range got.Items {
		have = append(have, fmt.Sprint(item.Active, item.At))
	}
	return errors.Join(err, differ(k.Plural+":check "+string(body), want, have))
}

func (m *kindModel) under(k kinds.Child, object event.ID) []childState {
	return m.list(k.Name, func(c childState) bool { return c.visible() && c.Object == object })
}

// equalChildren compares the pages of an object's children: in both orders, by cursors in both
// directions, with skip, and around a child.
func equalChildren(c client, m *kindModel, rng *rand.Rand, k kinds.Child, object event.ID) error {
	path, oldest := fmt.Sprintf("/v1/%ss/%s/%s", k.Parent, object, k.Plural), m.under(k, object)
	newest := slices.Clone(oldest)
	slices.Reverse(newest)
	read := func(raw json.RawMessage) (childState, error) { return wireChild(k, raw) }
	limit := func() int { return 1 + rng.IntN(max(10, len(oldest)/3)) }
	var errs []error
	for _, of := range []struct {
		order string
		want  []childState
	}{{"?order=oldest", oldest}, {"?order=newest", newest}} {
		order, want := of.order, of.want
		raw, last, err := walk[json.RawMessage](c, path+order, limit(), nil)
		got, err2 := mapAll(raw, read)
		errs = append(errs, err, err2, differ(path+order, want, got))
		n, end := limit(), len(want)
		for order == "?order=oldest" && last.Prev != "" && err == nil { // and back from the end
			end -= len(last.Items)
			at := fmt.Sprintf("%s?limit=%d&cursor=%s", path, n, last.Prev)
			last = page[json.RawMessage]{}
			err = c.read(http.MethodGet, at, "", &last)
			got, err2 := mapAll(last.Items, read)
			errs = append(errs, err, err2, differ(at+" backwards", want[max(0, end-n):max(0, end)], got))
		}
		var skipped page[json.RawMessage]
		skip, size := rng.IntN(len(want)+3), limit()
		at := fmt.Sprintf("%s%s&skip=%d&limit=%d", path, order, skip, size)
		errs = append(errs, c.read(http.MethodGet, at, "", &skipped))
		got, err = mapAll(skipped.Items, read)
		errs = append(errs, err, differ(at, slice(want, skip, size), got))
	}
	if len(oldest) > 0 {
		var middle page[json.RawMessage]
		at, size := rng.IntN(len(oldest)), limit()
		before := min(at, max(size/2, size-(len(oldest)-at)))
		where := fmt.Sprintf("%s?around=%s&limit=%d", path, oldest[at].ID, size)
		errs = append(errs, c.read(http.MethodGet, where, "", &middle))
		got, err := mapAll(middle.Items, read)
		errs = append(errs, err, differ(where, slice(oldest, at-before, size), got))
	}
	return errors.Join(errs...)
}

// equalChildCounts compares the total and the visible number of an object's children, and the count
// and sum of each aggregated attribute.
func equalChildCounts(c client, m *kindModel, k kinds.Child, object event.ID) error {
	type aggregate struct{ Count, Sum int64 }
	type counts struct {
		Total, Visible int
		Aggregates     map[string]aggregate
	}
	var all map[string]json.RawMessage
	at := fmt.Sprintf("/v1/%ss/%s/counts", k.Parent, object)
	if err := c.read(http.MethodGet, at, "", &all); err != nil {
		return err
	}
	visible := m.under(k, object)
	var got counts
	want := counts{Total: len(m.list(k.Name, func(c childState) bool { return c.Object == object })), Visible: len(visible)}
	for _, name := range k.Aggregates() {
		if want.Aggregates == nil {
			want.Aggregates = map[string]aggregate{}
		}
		var sum aggregate
		for _, child := range visible {
			var values map[string]int64
			if err := json.Unmarshal([]byte(child.Attributes), &values); err != nil {
				return err
			}
			if v, ok := values[name]; ok {
				sum.Count++
				sum.Sum += v
			}
		}
		want.Aggregates[name] = sum
	}
	return errors.Join(json.Unmarshal(all[k.Plural], &got), differ(at+": "+k.Plural, want, got))
}

// equalAuthored compares the children of an author.
func equalAuthored(c client, m *kindModel, rng *rand.Rand, k kinds.Child, author event.ID) error {
	want := m.list(k.Name, func(c childState) bool { return c.visible() && c.Author == fmt.Sprint(author) })
	slices.Reverse(want)
	path := fmt.Sprintf("/v1/users/%s/%s", author, k.Plural)
	raw, _, err := walk[json.RawMessage](c, path, 1+rng.IntN(20), nil)
	got, err2 := mapAll(raw, func(raw json.RawMessage) (childState, error) { return wireChild(k, raw) })
	return errors.Join(err, err2, differ(path, want, got))
}

// equalHistories compares every version of some edges and children, and their state in the truth.
func equalHistories(c client, m *kindModel, rng *rand.Rand, set *kinds.Set) error {
	type version struct {
		Version int64
		State   string `json:"version_state"`
	}
	var errs []error
	check := func(path string, name string, n int, gone bool, want func(i int) any, read func(json.RawMessage) (any, error)) {
		raw, _, err := walk[json.RawMessage](c, path+"/versions", 1+rng.IntN(5), nil)
		var got, wanted []any
		for i, r := range raw {
			var v version
			var all map[string]json.RawMessage
			err = errors.Join(err, json.Unmarshal(r, &v), json.Unmarshal(r, &all))
			state, err2 := read(all[name])
			err = errors.Join(err, err2)
			got = append(got, []any{v, state})
			if i < n {
				at := n - 1 - i
				v := version{int64(at + 1), "ARCHIVED"}
				if i == 0 {
					v.State = "LATEST"
					if gone {
						v.State = "DELETED"
					}
				}
				wanted = append(wanted, []any{v, want(at)})
			}
		}
		if len(raw) != n {
			err = errors.Join(err, fmt.Errorf("%s has %d versions, want %d", path, len(raw), n))
		}
		errs = append(errs, err, differ(path+"/versions", wanted, got))
	}
	for _, name := range modelEdges {
		k := set.Edges[name]
		ids := m.ids(name)
		for range min(5, len(ids)) {
			id := ids[rng.IntN(len(ids))]
			versions, path := m.edges[id], fmt.Sprintf("/v1/%s/%s/%s", k.Plural, id.from, id.to)
			check(path, name, len(versions), !m.edge(id).Active, func(i int) any { return versions[i] },
				func(r json.RawMessage) (any, error) { return wireEdge(r) })
			if now := m.edge(id); now.Active {
				var raw json.RawMessage
				err := c.read(http.MethodGet, path, "", &raw)
				got, err2 := wireEdge(raw)
				errs = append(errs, err, err2, differ(path, now, got))
			}
		}
	}
	for _, name := range modelChildren {
		k := set.Children[name]
		for _, child := range pickSome(rng, m.list(name, func(childState) bool { return true }), 5) {
			versions, path := m.children[name][child.ID], "/v1/"+k.Plural+"/"+child.ID
			check(path, name, len(versions), !child.visible(), func(i int) any { return versions[i].shown() },
				func(r json.RawMessage) (any, error) { return wireChild(k, r) })
			var raw json.RawMessage
			err := c.read(http.MethodGet, path, "", &raw)
			got, err2 := wireChild(k, raw)
			errs = append(errs, err, err2, differ(path, child.shown(), got))
		}
	}
	return errors.Join(errs...)
}

func pickSome[T any](rng *rand.Rand, all []T, n int) []T {
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:min(n, len(all))]
}

// equal compares everything that the API serves for all objects of the model and for some users.
func (m *kindModel) equal(c client, rng *rand.Rand, set *kinds.Set) error {
	users, objects := map[event.ID]bool{}, map[event.ID]bool{}
	for id := range m.edges {
		users[id.from] = true
		if !set.Edges[id.kind].ToChild {
			objects[id.to] = true
		}
	}
	for _, name := range modelChildren {
		for _, child := range m.list(name, func(childState) bool { return true }) {
			users[event.ID(child.Author)], objects[child.Object] = true, true
		}
	}
	errs := []error{equalHistories(c, m, rng, set)}
	at := slices.Sorted(maps.Keys(objects))
	for _, user := range pickSome(rng, slices.Sorted(maps.Keys(users)), 6) {
		errs = append(errs, equalKinds(c, m, rng, set, at, user, 0))
		at = nil // once is enough
	}
	return errors.Join(errs...)
}
