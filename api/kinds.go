package api

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
)

// Kinds returns the kinds in force (catalog.Catalog).
type Kinds interface {
	Now() *kinds.Set
	// Refresh reads the kinds again and reports whether they have changed.
	Refresh(ctx context.Context) (bool, error)
}

// builtIn are the kinds that every installation has.
type builtIn struct{}

func (builtIn) Now() *kinds.Set                       { return kinds.Builtin() }
func (builtIn) Refresh(context.Context) (bool, error) { return false, nil }

// lookInterval is the minimum time between two reads of the kinds that requests for unknown paths
// cause.
const lookInterval = time.Second

// router passes requests to the routes of the kinds in force. When the kinds change, it builds new
// routes beside the ones that serve, and swaps them.
type router struct {
	base  *server // what all routes share
	kinds Kinds
	now   atomic.Pointer[server]

	mu     sync.Mutex
	failed *kinds.Set // the kinds whose routes could not be built
	looked time.Time
}

// ServeHTTP serves a request with the routes of the current kinds.
func (r *router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	s := r.now.Load()
	if set := r.kinds.Now(); set != s.kinds {
		s = r.update(req.Context(), set)
	}
	s.ServeHTTP(w, req)
}

// update builds the routes of the kinds, unless that is done or has failed, and returns the routes
// to serve with.
func (r *router) update(ctx context.Context, set *kinds.Set) *server {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.now.Load(); s.kinds == set || r.failed == set {
		return s
	}
	if err := r.build(set); err != nil {
		r.failed = set
		r.base.log.ErrorContext(ctx, "cannot build the routes of the new kinds: the previous kinds remain in force", "err", err,
			"runbook", "KindsNotServed")
	}
	return r.now.Load()
}

// build makes the routes of the kinds serve. The libraries panic if two kinds have routes or
// schemas of one name; build returns that as an error.
func (r *router) build(set *kinds.Set) (err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("build the routes of the kinds: %v", cause)
		}
	}()
	s := *r.base
	s.kinds = set
	s.routes()
	s.forgetAnswers()
	r.now.Store(&s)
	return nil
}

// refresh reads the kinds again for a request without a route in s, at most once per lookInterval.
// It returns the routes that serve the request then, or nil.
func (r *router) refresh(ctx context.Context, s *server) *server {
	r.mu.Lock()
	due := time.Since(r.looked) >= lookInterval
	if due {
		r.looked = time.Now()
	}
	r.mu.Unlock()
	if due {
		if _, err := r.kinds.Refresh(ctx); err != nil {
			r.base.log.WarnContext(ctx, "cannot read the kinds: those of the last read stay in force", "err", err)
		}
	}
	if set := r.kinds.Now(); set != s.kinds {
		if next := r.update(ctx, set); next != s {
			return next
		}
	}
	return nil
}

// EdgeKind describes a kind of edges.
type EdgeKind struct {
	Name       string         `json:"name" example:"follow"`
	Plural     string         `json:"plural" doc:"The name in paths." example:"follows"`
	From       string         `json:"from" doc:"The object that the edges lead from." example:"user"`
	To         string         `json:"to" doc:"The object, or the kind of children, that the edges lead to." example:"user"`
	Ends       []string       `json:"ends" nullable:"false" doc:"The names of both ids in paths and bodies." example:"[\"follower_id\",\"followee_id\"]"`
	Forward    string         `json:"forward" doc:"The list of an origin." example:"following"`
	Reverse    string         `json:"reverse" doc:"The list of a target." example:"followers"`
	Self       bool           `json:"self" doc:"Whether an object may have an edge to itself." example:"false"`
	Attributes map[string]any `json:"attributes,omitempty" doc:"The JSON Schema of the attributes; absent if the kind has none."`
	Filters    []string       `json:"filters,omitempty" doc:"Attributes by which the list of a target can be filtered." example:"[]"`
}

// ChildKind describes a kind of children.
type ChildKind struct {
	Name         string         `json:"name" example:"comment"`
	Plural       string         `json:"plural" doc:"The name in paths." example:"comments"`
	Parent       string         `json:"parent" doc:"The parent object." example:"post"`
	Threaded     bool           `json:"threaded" doc:"Whether children reply to children." example:"true"`
	Moderated    bool           `json:"moderated" example:"true"`
	OnePerAuthor bool           `json:"one_per_author" example:"false"`
	Attributes   map[string]any `json:"attributes,omitempty" doc:"The JSON Schema of the attributes; absent if the kind has none."`
}

// ObjectKind is an object that edges and children are about.
type ObjectKind struct {
	Name   string `json:"name" example:"user"`
	Plural string `json:"plural" doc:"The name in paths." example:"users"`
	ID     string `json:"id" enum:"string,integer,uuid" doc:"The form of its ids: string is any id, integer a decimal number, uuid a UUID in lower case." example:"string"`
}

// KindList is all kinds of the installation.
type KindList struct {
	Objects  []ObjectKind `json:"objects" nullable:"false" doc:"Ordered by name."`
	Edges    []EdgeKind   `json:"edges" nullable:"false" doc:"Ordered by name."`
	Children []ChildKind  `json:"children" nullable:"false" doc:"Ordered by name."`
}

type kindsInput struct {
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: the answer is 304 if it is still current."`
}

type kindsOutput struct {
	Status int
	ETag   string `header:"ETag"`
	Body   KindList
}

func (s *server) kindRoutes() {
	all := kindsOf(s.kinds)
	raw, err := json.Marshal(all)
	if err != nil {
		panic(err) // only strings and booleans, so a bug
	}
	sum := sha256.Sum256(raw)
	tag := `"` + hex.EncodeToString(sum[:8]) + `"`
	register(s, route{
		method: http.MethodGet, path: "/v1/kinds", id: "list-kinds", tag: "Kinds", role: tokens.RoleRead, status: http.StatusOK,
		summary: "List the kinds of edges and children", description: "Lists the kinds that the installation serves.",
		extraStatuses: map[int]string{http.StatusNotModified: "If-None-Match names the current ETag."},
	}, func(_ context.Context, in *kindsInput) (*kindsOutput, error) {
		status := http.StatusOK
		if tagged(in.IfNoneMatch, tag) {
			status = http.StatusNotModified
		}
		return &kindsOutput{Status: status, ETag: tag, Body: all}, nil
	})
}

func kindsOf(set *kinds.Set) KindList {
	out := KindList{Objects: []ObjectKind{}, Edges: []EdgeKind{}, Children: []ChildKind{}}
	for _, name := range slices.Sorted(maps.Keys(set.Objects)) {
		out.Objects = append(out.Objects, ObjectKind{name, set.Objects[name].Plural, string(set.Objects[name].ID)})
	}
	for _, k := range set.AllEdges() {
		e := EdgeKind{Name: k.Name, Plural: k.Plural, From: k.From, To: k.To, Ends: k.Ends[:], Forward: k.Forward, Reverse: k.Reverse,
			Self: k.Self, Filters: k.Filters()}
		if len(k.Attributes) > 0 {
			e.Attributes = k.Schema()
		}
		out.Edges = append(out.Edges, e)
	}
	for _, k := range set.AllChildren() {
		c := ChildKind{Name: k.Name, Plural: k.Plural, Parent: k.Parent, Threaded: k.Threaded, Moderated: k.Moderated,
			OnePerAuthor: k.OnePerAuthor}
		if len(k.Attributes) > 0 {
			c.Attributes = k.Schema()
		}
		out.Children = append(out.Children, c)
	}
	return out
}

// describeEntities adds the entities of every kind to the schemas of batch outcomes and of problems
// with a stale version.
func (s *server) describeEntities() {
	registry := s.api.OpenAPI().Components.Schemas
	outcome := registry.Map()["BatchOutcome"]
	delete(outcome.Properties, "entity")
	for _, name := range slices.Sorted(maps.Keys(s.entities)) {
		after := "The edge after a put."
		if _, child := s.kinds.Child(name); child {
			after = "After a create or an edit."
		}
		outcome.Properties[name] = refer(s.entities[name], cmp.Or(wordsOf(name).texts["outcome"], after))
	}
	registry.Map()["Problem"].Properties["current"].OneOf = s.current
}
