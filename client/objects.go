package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// Objects has the operations on objects of one type. T is their counts, and N the same without the
// time.
type Objects[T, N any] struct {
	core *core
	find func(context.Context) (string, error)
}

func (o Objects[T, N]) plural(ctx context.Context) (string, error) {
	if o.find == nil {
		return "", ErrNoClient
	}
	return o.find(ctx)
}

func objects[T, N any](c *core, plural string) Objects[T, N] {
	return Objects[T, N]{c, func(context.Context) (string, error) { return plural, nil }}
}

// Counts counts the edges and the children of an object. An unknown object counts 0.
func (o Objects[T, N]) Counts(ctx context.Context, id ID, opts ...Option) (T, error) {
	plural, err := o.plural(ctx)
	if err != nil {
		var none T
		return none, err
	}
	return fetch[T](ctx, o.core, newCall(http.MethodGet, "/v1/"+plural+"/"+segment(id)+"/counts", opts).projected())
}

// Counted are the counts of one object among many.
type Counted[N any] struct {
	ID     ID `json:"id"`
	Counts N  `json:"counts"`
}

// CountsOf counts the edges and the children of up to 200 objects, in the order of ids. An unknown
// object counts 0.
func (o Objects[T, N]) CountsOf(ctx context.Context, ids []ID, opts ...Option) ([]Counted[N], error) {
	plural, err := o.plural(ctx)
	if err != nil {
		return nil, err
	}
	body := struct {
		IDs []ID `json:"ids"`
	}{ids}
	all, err := fetch[several[Counted[N]]](ctx, o.core,
		newCall(http.MethodPost, "/v1/"+plural+":counts", opts).json(body).projected().repeatable())
	return all.Items, err
}

// EdgeObjects has the operations on objects that edges lead from or to.
type EdgeObjects[T, N any] struct{ Objects[T, N] }

// EdgesToRemove says which edges of an object to remove. The zero value removes all.
type EdgesToRemove struct {
	Kinds     []string `json:"kinds,omitempty"`
	Direction string   `json:"direction,omitempty"` // from: edges from the object; to: edges to it; both (default)
}

// EdgeRemoval is the progress of a removal of an object's edges.
type EdgeRemoval struct {
	ID          string           `json:"id"`
	Object      string           `json:"object"` // user, post, ...
	ObjectID    ID               `json:"object_id"`
	Kinds       []string         `json:"kinds"`
	Direction   string           `json:"direction"`
	State       string           `json:"state"`   // PENDING, RUNNING or DONE
	Removed     map[string]int64 `json:"removed"` // by kind
	Actor       string           `json:"actor"`
	RequestedAt time.Time        `json:"requested_at"`
	WorkedAt    time.Time        `json:"worked_at,omitzero"`
	FinishedAt  time.Time        `json:"finished_at,omitzero"`
}

// RemoveEdges requests the removal of an object's edges. The removal runs in the background:
// Client.EdgeRemoval reads its progress. A repeated request is safe.
func (o EdgeObjects[T, N]) RemoveEdges(ctx context.Context, id ID, which EdgesToRemove, opts ...Option) (EdgeRemoval, error) {
	plural, err := o.plural(ctx)
	if err != nil {
		return EdgeRemoval{}, err
	}
	k := newCall(http.MethodPost, "/v1/"+plural+"/"+segment(id)+":remove-edges", opts).json(which).repeatable()
	return fetch[EdgeRemoval](ctx, o.core, k)
}

// Link says whether an edge exists.
type Link struct {
	Active       bool      `json:"active"`
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Active last became true
}

// MutualLink is the Link of a kind whose ends are the same object.
type MutualLink struct {
	Link
	Reversed bool `json:"reversed"` // the edge in the other direction exists
}

// AnyLink is the link of an edge of any kind.
type AnyLink struct {
	Active       bool           `json:"active"`
	Reversed     bool           `json:"reversed,omitempty"` // the edge in the other direction exists; only if both ends are the same object
	PositionedAt time.Time      `json:"positioned_at,omitzero"`
	Attributes   map[string]any `json:"attributes,omitempty"`
}

// ObjectCheck says which edges lead to an object of any type.
type ObjectCheck struct {
	ID    ID                 `json:"id"`
	Edges map[string]AnyLink `json:"edges"` // by kind
}

// AnyObjects has the operations on objects by the name of their type.
type AnyObjects struct {
	EdgeObjects[ObjectCounts, ObjectNumbers]
}

// Check checks which edges lead from the object of, whose type is origin, to each of up to 200
// objects, in the order of ids. edges has the kinds to check; empty: all that lead from origin.
func (o AnyObjects) Check(ctx context.Context, origin string, of ID, ids []ID, edges []string, opts ...Option) ([]ObjectCheck, error) {
	return check[ObjectCheck](ctx, o.Objects, origin, of, ids, edges, opts)
}

func check[R, T, N any](ctx context.Context, o Objects[T, N], origin string, of ID, ids []ID, edges []string,
	opts []Option) ([]R, error) {
	plural, err := o.plural(ctx)
	if err != nil {
		return nil, err
	}
	body := map[string]any{origin + "_id": of, "ids": ids}
	if len(edges) > 0 {
		body["edges"] = edges
	}
	all, err := fetch[several[R]](ctx, o.core, newCall(http.MethodPost, "/v1/"+plural+":check", opts).json(body).projected().repeatable())
	return all.Items, err
}

// EdgeRemoval polls a job that RemoveEdges started: pending, running or done.
func (c *Calls) EdgeRemoval(ctx context.Context, id string, opts ...Option) (EdgeRemoval, error) {
	return fetch[EdgeRemoval](ctx, c.core, newCall(http.MethodGet, "/v1/edge-removals/"+url.PathEscape(id), opts))
}

// ChildCounts count the children of an object.
type ChildCounts struct {
	Total   int64 `json:"total"` // ever written
	Visible int64 `json:"visible"`
}

// EdgeSum is the count and the sum of an integer of edges.
type EdgeSum struct {
	Count int64 `json:"count"` // edges with the attribute
	Sum   int64 `json:"sum"`
}

// EdgeValues is the count of an attribute of edges, and of each of its values.
type EdgeValues struct {
	Count  int64            `json:"count"`
	Values map[string]int64 `json:"values"`
}

// EdgeVotes is the count and the sum of an integer of edges, and the count of each of its values.
type EdgeVotes struct {
	Count  int64            `json:"count"`
	Sum    int64            `json:"sum"`
	Values map[string]int64 `json:"values"`
}

// Aggregate is the count and the sum of an attribute of visible children.
type Aggregate struct {
	Count int64 `json:"count"`
	Sum   int64 `json:"sum"`
}

// Average returns Sum divided by Count, or 0 if Count is 0.
func (a Aggregate) Average() float64 {
	if a.Count == 0 {
		return 0
	}
	return float64(a.Sum) / float64(a.Count)
}

func (c *ObjectCounts) asOf() time.Time { return c.AsOf }

// ObjectNumbers are the counts of an object of any type among many, by the name of the list or the
// plural of the kind.
type ObjectNumbers struct {
	Edges    map[string]int64
	Children map[string]KindCounts
}

// ObjectCounts are the counts of an object of any type.
type ObjectCounts struct {
	ObjectNumbers
	AsOf time.Time
}

// KindCounts count the children of an object of any kind.
type KindCounts struct {
	ChildCounts
	Aggregates map[string]Aggregate `json:"aggregates,omitempty"`
}

// UnmarshalJSON separates the counts from their time.
func (c *ObjectCounts) UnmarshalJSON(b []byte) error {
	var at struct {
		AsOf time.Time `json:"as_of"`
	}
	if err := json.Unmarshal(b, &at); err != nil {
		return err
	}
	c.AsOf = at.AsOf
	return c.ObjectNumbers.UnmarshalJSON(b)
}

// UnmarshalJSON separates counts of edges, which are numbers, from counts of children.
func (c *ObjectNumbers) UnmarshalJSON(b []byte) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	*c = ObjectNumbers{Edges: make(map[string]int64), Children: make(map[string]KindCounts)}
	for name, v := range all {
		var err error
		switch {
		case name == "as_of": // of ObjectCounts
		case v[0] == '{':
			var k KindCounts
			err = json.Unmarshal(v, &k)
			c.Children[name] = k
		default:
			var n int64
			err = json.Unmarshal(v, &n)
			c.Edges[name] = n
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Objects returns the operations on the objects of this name, for example user. It sends nothing.
// The first operation reads the object's name in paths from the API.
func (c *Calls) Objects(object string) AnyObjects {
	all := Objects[ObjectCounts, ObjectNumbers]{c.core, func(ctx context.Context) (string, error) {
		_, o, err := kindNamed(ctx, c.core, object, func(l *KindList) []ObjectKind { return l.Objects })
		return o.Plural, err
	}}
	return AnyObjects{EdgeObjects[ObjectCounts, ObjectNumbers]{all}}
}

// Users has the operations on users.
type Users struct {
	EdgeObjects[UserCounts, UserNumbers]
}

// Mutuals are the users whom one user follows and who follow another.
type Mutuals struct {
	Items     []UserEntry `json:"items"`
	Truncated bool        `json:"truncated"` // there may be more
	AsOf      time.Time   `json:"as_of"`
}

func (m *Mutuals) asOf() time.Time { return m.AsOf }

// Mutuals lists the users whom user follows and who follow other, newest first.
func (u Users) Mutuals(ctx context.Context, user, other ID, opts ...Option) (Mutuals, error) {
	k := newCall(http.MethodGet, "/v1/users/"+segment(user)+"/mutuals/"+segment(other), opts)
	return fetch[Mutuals](ctx, u.core, k.projected())
}

// KindList has all kinds of the installation.
type KindList struct {
	Objects  []ObjectKind `json:"objects"`
	Edges    []EdgeKind   `json:"edges"`
	Children []ChildKind  `json:"children"`
}

// ObjectKind is a type of objects.
type ObjectKind struct {
	Name   string `json:"name"`
	Plural string `json:"plural"`
	ID     string `json:"id"` // the form of its ids: string, integer or uuid
}

// EdgeKind is a kind of edges.
type EdgeKind struct {
	Name       string          `json:"name"`
	Plural     string          `json:"plural"`
	From       string          `json:"from"`
	To         string          `json:"to"`
	Ends       []string        `json:"ends"`    // the members that name From and To
	Forward    string          `json:"forward"` // the list of an origin
	Reverse    string          `json:"reverse"` // the list of a target
	Self       bool            `json:"self"`    // an edge may lead from an object to itself
	Attributes json.RawMessage `json:"attributes,omitempty"`
	Filters    []string        `json:"filters,omitempty"` // attributes by which the list of a target can be filtered
}

// ChildKind is a kind of children.
type ChildKind struct {
	Name         string          `json:"name"`
	Plural       string          `json:"plural"`
	Parent       string          `json:"parent"` // the parent object
	Threaded     bool            `json:"threaded"`
	Moderated    bool            `json:"moderated"`
	OnePerAuthor bool            `json:"one_per_author"`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

// Kinds lists the kinds of edges and children that the installation has.
func (c *Calls) Kinds(ctx context.Context, opts ...Option) (KindList, error) {
	return fetch[KindList](ctx, c.core, newCall(http.MethodGet, "/v1/kinds", opts))
}

func (k ObjectKind) kind() string { return k.Name }
func (k EdgeKind) kind() string   { return k.Name }
func (k ChildKind) kind() string  { return k.Name }

// kindNamed returns the kind of this name in the list that was read last. If the list does not have
// the kind, kindNamed reads the list again.
func kindNamed[K interface{ kind() string }](ctx context.Context, c *core, name string, in func(*KindList) []K) (*KindList, K, error) {
	var none K
	if c == nil {
		return nil, none, ErrNoClient
	}
	c.kinds.mu.Lock()
	list := c.kinds.list
	c.kinds.mu.Unlock()
	is := func(k K) bool { return k.kind() == name }
	if list == nil || !slices.ContainsFunc(in(list), is) {
		read, err := fetch[KindList](ctx, c, newCall(http.MethodGet, "/v1/kinds", nil))
		if err != nil {
			return nil, none, err
		}
		list = &read
		c.kinds.mu.Lock()
		c.kinds.list = list
		c.kinds.mu.Unlock()
	}
	unknown := &UnknownKindError{Kind: name}
	for _, k := range in(list) {
		if is(k) {
			return list, k, nil
		}
		unknown.Have = append(unknown.Have, k.kind())
	}
	return nil, none, unknown
}

// DLQ has the operations on events that could not be published. They need the role admin.
type DLQ struct{ core *core }

// DeadMessage is an event that could not be published, without its payload.
type DeadMessage struct {
	ID            int64     `json:"id,string"` // its id in the outbox
	EventID       string    `json:"event_id"`
	AggregateType string    `json:"aggregate_type"`
	AggregateID   string    `json:"aggregate_id"`
	EventType     string    `json:"event_type"`
	EventVersion  int       `json:"event_version"`
	Attempts      int       `json:"attempts"`
	LastError     string    `json:"last_error"`
	TraceParent   string    `json:"traceparent,omitempty"`
	OccurredAt    time.Time `json:"occurred_at"`
	InsertedAt    time.Time `json:"inserted_at"`
	DeadAt        time.Time `json:"dead_at"`
}

// DeadMessageFull is an event that could not be published.
type DeadMessageFull struct {
	DeadMessage
	Payload json.RawMessage `json:"payload"`
}

// DLQAction is the record of an action on an event.
type DLQAction struct {
	At            time.Time `json:"at"`
	Actor         string    `json:"actor"`
	Action        string    `json:"action"`    // retry or discard
	ID            int64     `json:"id,string"` // its id in the DLQ
	EventID       string    `json:"event_id"`
	AggregateType string    `json:"aggregate_type"`
	AggregateID   string    `json:"aggregate_id"`
	EventType     string    `json:"event_type"`
	NewID         string    `json:"new_id,omitempty"` // the new id of a retried event in the outbox
	Reason        string    `json:"reason,omitempty"`
}

// DLQFilter selects events. The zero value selects all.
type DLQFilter struct {
	AggregateType         string
	AggregateID           ID
	EventType             string
	DeadBefore, DeadAfter time.Time // from DeadAfter (included) to DeadBefore (excluded)
}

const dlqPath = "/v1/outbox/dlq"

// List lists the events by id, from the truth.
func (d DLQ) List(f DLQFilter, opts ...Option) *List[DeadMessage] {
	set := []Option{Query("aggregate_type", f.AggregateType), Query("event_type", f.EventType)}
	if f.AggregateID != "" {
		set = append(set, Query("aggregate_id", f.AggregateID.String()))
	}
	for name, at := range map[string]time.Time{"dead_before": f.DeadBefore, "dead_after": f.DeadAfter} {
		if !at.IsZero() {
			set = append(set, Query(name, at.UTC().Format(time.RFC3339Nano)))
		}
	}
	return listOf[DeadMessage](d.core, dlqPath, false, append(set, opts...))
}

// Get reads an event with its payload.
func (d DLQ) Get(ctx context.Context, id int64, opts ...Option) (DeadMessageFull, error) {
	return fetch[DeadMessageFull](ctx, d.core, newCall(http.MethodGet, dlqPath+"/"+strconv.FormatInt(id, 10), opts))
}

// Retry puts an event back into the outbox, with a new id after all others. The client does not
// repeat the request if its outcome is unknown.
func (d DLQ) Retry(ctx context.Context, id int64, reason string, opts ...Option) (DLQAction, error) {
	return d.act(ctx, id, "retry", reason, opts)
}

// Discard deletes an event. The client does not repeat the request if its outcome is unknown.
func (d DLQ) Discard(ctx context.Context, id int64, reason string, opts ...Option) (DLQAction, error) {
	return d.act(ctx, id, "discard", reason, opts)
}

func (d DLQ) act(ctx context.Context, id int64, action, reason string, opts []Option) (DLQAction, error) {
	body := struct {
		Reason string `json:"reason,omitempty"`
	}{reason}
	return fetch[DLQAction](ctx, d.core, newCall(http.MethodPost, dlqPath+"/"+strconv.FormatInt(id, 10)+":"+action, opts).json(body))
}
