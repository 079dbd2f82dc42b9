package demo

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/tidings/tidings/client"
)

const (
	user     = "user"    // the object that acts
	visible  = "visible" // the state of a child that everybody sees
	maxDepth = 40        // of answers to answers; the API takes 64
)

// How much the site remembers of what it did lately, for each kind.
const (
	knownChildren = 300
	knownEdges    = 300
)

const (
	firstThreads = 6  // that are there from the beginning
	premoderated = 3  // of every six threads the third has moderators look first
	hotEvery     = 10 // threads of which one is hot, until the next one is there
	hotShare     = 0.3
	lureShare    = 0.04
	queueKept    = 8 // waiting children that moderators leave for the console to show
)

// pair is an edge that is there, as far as the site knows.
type pair struct{ from, to client.ID }

// world is what the site knows of itself.
type world struct {
	rnd      *rand.Rand
	users    int
	edges    []edgeKind
	children []childKind

	newest  map[string]int64                              // by object whose children have settings: the threads that were opened
	threads map[string]map[client.ID]client.ChildSettings // by kind and object
	known   map[string][]client.Child                     // by kind: what was written lately and is there
	linked  map[string][]pair                             // by kind
	due     []act                                         // what has to be done before anything else is chosen
}

func newWorld(cfg Config) *world {
	return &world{rnd: newRand(cfg.Seed), users: cfg.Users, newest: make(map[string]int64), threads: make(map[string]map[client.ID]client.ChildSettings),
		known: make(map[string][]client.Child), linked: make(map[string][]pair)}
}

// skewed is a number from 1 to n, the low ones more often.
func (w *world) skewed(n int, skew float64) client.ID {
	return client.ID(1 + min(int(math.Pow(w.rnd.Float64(), skew)*float64(n)), n-1))
}

// author is a user who acts: some do much.
func (w *world) author() client.ID { return w.skewed(w.users, 1.5) }

// target is what somebody looks at, likes or writes to: among users few are known to all, among threads it is the newest, and the one that is hot.
func (w *world) target(object string) client.ID {
	newest, threads := w.newest[object]
	switch {
	case object == user:
		return w.skewed(w.users, 3)
	case !threads:
		return w.skewed(max(w.users/6, 3), 2)
	case newest >= hotEvery && w.rnd.Float64() < hotShare:
		return client.ID(newest - newest%hotEvery)
	}
	return client.ID(max(newest-int64(w.rnd.ExpFloat64()*4), 1))
}

// open is a target whose thread takes children, as far as the site knows.
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

// take removes a child at random from what is known, so that nobody else acts on it meanwhile.
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

// keep remembers a child that is there.
func (w *world) keep(kind string, c client.Child) {
	all := append(w.known[kind], c)
	w.known[kind] = all[max(len(all)-knownChildren, 0):]
}

// link remembers an edge.
func (w *world) link(kind string, p pair) {
	all := append(w.linked[kind], p)
	w.linked[kind] = all[max(len(all)-knownEdges, 0):]
}

// unlink takes an edge at random from what is known.
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

// answered is a child of the object that a new one may answer; none of a young thread, and of others now and then.
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
