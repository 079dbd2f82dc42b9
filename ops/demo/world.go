package demo

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/ops/load"
)

const (
	user     = "user"    // the object that acts
	visible  = "VISIBLE" // the state of a child that all readers see
	maxDepth = 40        // nested answers; the API accepts 64
)

// How many recent children and edges the site remembers, for each kind.
const (
	knownChildren = 300
	knownEdges    = 300
)

const (
	firstThreads = 6  // opened at the start
	premoderated = 3  // the third of every six threads is premoderated
	hotEvery     = 10 // every tenth thread is hot until the next such thread opens
	hotShare     = 0.3
	lureShare    = 0.04
	queueKept    = 8 // children that moderators leave in the queue for the console to show
)

// pair is an edge that exists, as far as the site knows.
type pair struct{ from, to client.ID }

// world is the memory of the site.
type world struct {
	rnd      *rand.Rand
	users    int
	edges    []edgeKind
	children []childKind

	ids     map[string]string                             // by object: the form of its ids
	newest  map[string]int64                              // by parent object: the number of threads opened
	threads map[string]map[client.ID]client.ChildSettings // by kind and object
	known   map[string][]client.Child                     // by kind: recent children that exist
	linked  map[string][]pair                             // by kind
	due     []act                                         // acts that run before any other
}

func newWorld(cfg Config) *world {
	return &world{rnd: newRand(cfg.Seed), users: cfg.Users, ids: make(map[string]string), newest: make(map[string]int64),
		threads: make(map[string]map[client.ID]client.ChildSettings),
		known:   make(map[string][]client.Child), linked: make(map[string][]pair)}
}

// id returns the n-th id of an object.
func (w *world) id(object string, n int64) client.ID { return load.ID(w.ids[object], n) }

// skewed returns an id of the object, from the first to the n-th, the first ones more often.
func (w *world) skewed(object string, n int, skew float64) client.ID {
	return w.id(object, int64(1+min(int(math.Pow(w.rnd.Float64(), skew)*float64(n)), n-1)))
}

// author returns the user who acts. Some users act more often.
func (w *world) author() client.ID { return w.skewed(user, w.users, 1.5) }

// target returns the object of an act. Few users are popular. Among threads it prefers the newest
// ones and the hot one.
func (w *world) target(object string) client.ID {
	newest, threads := w.newest[object]
	switch {
	case object == user:
		return w.skewed(object, w.users, 3)
	case !threads:
		return w.skewed(object, max(w.users/6, 3), 2)
	case newest >= hotEvery && w.rnd.Float64() < hotShare:
		return w.id(object, newest-newest%hotEvery)
	}
	return w.id(object, max(newest-int64(w.rnd.ExpFloat64()*4), 1))
}

// end returns the target of an edge: an object, or a child that exists as far as the site knows.
func (w *world) end(kind string) (id client.ID, ok bool) {
	if !w.isChild(kind) {
		return w.target(kind), true
	}
	all := w.known[kind]
	if len(all) == 0 {
		return "", false
	}
	return client.ID(all[w.rnd.IntN(len(all))].ID), true
}

func (w *world) isChild(kind string) bool {
	return slices.ContainsFunc(w.children, func(k childKind) bool { return k.Name == kind })
}

// open returns a target whose thread accepts children, as far as the site knows.
func (w *world) open(k childKind) client.ID {
	object := w.target(k.Parent)
	for range 5 {
		if !w.threads[k.Name][object].Locked {
			break
		}
		object = w.target(k.Parent)
	}
	return object
}

// take removes a random child from those known, so that no other worker acts on it meanwhile.
func (w *world) take(kind string) (c client.Child, ok bool) {
	all := w.known[kind]
	if len(all) == 0 {
		return c, false
	}
	i := w.rnd.IntN(len(all))
	c = all[i]
	w.known[kind] = slices.Delete(all, i, i+1)
	return c, true
}

// keep remembers a child that exists.
func (w *world) keep(kind string, c client.Child) {
	all := append(w.known[kind], c)
	w.known[kind] = all[max(len(all)-knownChildren, 0):]
}

// link remembers an edge.
func (w *world) link(kind string, p pair) {
	all := append(w.linked[kind], p)
	w.linked[kind] = all[max(len(all)-knownEdges, 0):]
}

// unlink removes a random edge from those known.
func (w *world) unlink(kind string) (p pair, ok bool) {
	all := w.linked[kind]
	if len(all) == 0 {
		return p, false
	}
	i := w.rnd.IntN(len(all))
	p = all[i]
	w.linked[kind] = slices.Delete(all, i, i+1)
	return p, true
}

// answered returns the id of a child of the object for a new one to answer, or "". It is always ""
// in a new thread, and sometimes in others.
func (w *world) answered(k childKind, object client.ID) string {
	if !k.Threaded || w.rnd.Float64() < 0.35 {
		return ""
	}
	all := w.known[k.Name]
	for i := len(all) - 1; i >= max(len(all)-100, 0); i-- {
		if all[i].Object == object && all[i].State == visible && all[i].Depth < maxDepth && w.rnd.Float64() < 0.5 {
			return all[i].ID
		}
	}
	return ""
}
