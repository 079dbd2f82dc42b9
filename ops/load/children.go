package load

import (
	"context"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"net/http"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/client"
)

// ChildSpec says which children to generate.
type ChildSpec struct {
	Objects  int64 // parents
	Children int64 // in total
	Seed     uint64
}

// Limits of the generator's memory: it keeps about 30 bytes per child and 24 bytes per object.
const (
	maxParents  = 10_000_000
	maxChildren = 20_000_000
)

// Spec parses the spec of a kind of children: "posts=N,comments=M,seed=S", with the plurals of the
// parent and of the kind. The default of seed is 1.
func (k ChildKind) Spec(s string) (ChildSpec, error) {
	v, err := parseSpec(s, k.Parents, k.Plural)
	if err != nil {
		return ChildSpec{}, err
	}
	spec := ChildSpec{Objects: int64(v[k.Parents]), Children: int64(v[k.Plural]), Seed: v["seed"]}
	if spec.Objects < 1 || spec.Objects > maxParents {
		return spec, fmt.Errorf("%s is %d: want 1 to %d", k.Parents, spec.Objects, maxParents)
	}
	if spec.Children < 1 || spec.Children > maxChildren {
		return spec, fmt.Errorf("%s is %d: want 1 to %d", k.Plural, spec.Children, maxChildren)
	}
	return spec, nil
}

// Shape of the children. Few objects have most of them. In threads many children answer one of the
// last few, which makes chains. Others answer an early one, which makes wide levels.
const (
	sizeSkew  = 0.9  // an object's weight is rank^-sizeSkew: see incomingSkew
	topLevel  = 0.3  // share of children in threads that are not replies
	recent    = 0.55 // share of replies that answer one of the last few
	maxDepth  = 64   // of the API
	perAuthor = 5    // children per author on average
	maxWords  = 400
	noChild   = -1
	lateShare = 0.3 // share of a premoderated thread's leaves that are written after it became premoderated
	editAgain = 0.2
)

// Children is a plan: the children to write, which child answers which, and the later changes of
// each. Equal kinds and specs make equal plans.
type Children struct {
	kind   ChildKind
	spec   ChildSpec
	object []int32 // of each child, from 0
	place  []int32 // of each child among the children of its object, from 0
	parent []int32 // of each child: an earlier one of its object, or noChild
	leaf   []bool  // no child answers it
	most   int64   // most children of one object
}

// GenerateChildren makes the plan. spec must be a result of the kind's Spec.
func GenerateChildren(k ChildKind, spec ChildSpec) *Children {
	rnd := rand.New(rand.NewPCG(spec.Seed, 0x7468_7265_6164_7321))
	objects, n := int(spec.Objects), int(spec.Children)
	places := rnd.Perm(objects)
	cumulative, total := make([]float64, objects), 0.0
	for i := range cumulative {
		total += math.Pow(float64(i+1), -sizeSkew)
		cumulative[i] = total
	}
	t := &Children{kind: k, spec: spec, object: make([]int32, n), place: make([]int32, n), parent: make([]int32, n), leaf: make([]bool, n)}
	depth := make([]uint8, n)
	written := make([][]int32, objects) // the children of each object so far
	for i := range n {
		p := places[min(sort.SearchFloat64s(cumulative, rnd.Float64()*total), objects-1)]
		earlier := written[p]
		parent := int32(noChild)
		if k.Threaded && len(earlier) > 0 && rnd.Float64() >= topLevel {
			k := 0
			if u := rnd.Float64(); rnd.Float64() < recent {
				k = max(len(earlier)-1-int(rnd.ExpFloat64()*3), 0)
			} else {
				k = int(u * u * float64(len(earlier)))
			}
			parent = earlier[k]
			if depth[parent] == maxDepth {
				parent = t.parent[parent]
			}
		}
		t.object[i], t.place[i], t.parent[i], t.leaf[i], depth[i] = int32(p), int32(len(earlier)), parent, true, 1
		t.most = max(t.most, int64(len(earlier))+1)
		if parent != noChild {
			t.leaf[parent], depth[i] = false, depth[parent]+1
		}
		written[p] = append(earlier, int32(i))
	}
	return t
}

// Purposes of random numbers. Each has its own generator, so that a child or an object can be
// computed alone.
const (
	aboutContent = iota
	aboutChanges
	aboutLateness
	aboutObject
)

func (t *Children) rand(about uint64, i int) *rand.Rand {
	return rand.New(rand.NewPCG(t.spec.Seed<<2|about, uint64(i)))
}

// settings are the settings of an object's thread. They are set before the late children, and again
// at the end.
type settings struct {
	Title        string `json:"title,omitempty"`
	Premoderated bool   `json:"premoderated,omitempty"`
	Locked       bool   `json:"locked,omitempty"`
}

// settings returns the final settings of the object's thread. They are zero for most objects, and
// for a kind that is not moderated.
func (t *Children) settings(object int) (s settings) {
	if !t.kind.Moderated {
		return s
	}
	rnd := t.rand(aboutObject, object)
	if rnd.Float64() < 0.2 {
		s.Title = words(rnd, 2+rnd.IntN(6))
	}
	s.Premoderated = rnd.Float64() < 0.05
	s.Locked = rnd.Float64() < 0.04
	return s
}

// late reports whether the child is written after its thread became premoderated.
func (t *Children) late(i int) bool {
	return t.leaf[i] && t.settings(int(t.object[i])).Premoderated && t.rand(aboutLateness, i).Float64() < lateShare
}

// change is a request that makes the next version of an existing child.
type change struct {
	method, path string // path is below the child's
	body         any
}

type edit struct {
	Body       string         `json:"body"`
	Attributes map[string]any `json:"attributes,omitempty"`
}

type decision struct {
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// changes returns the requests about a child after all children are written. Each makes a version,
// so a version tells where to resume.
func (t *Children) changes(i int) (all []change) {
	rnd := t.rand(aboutChanges, i)
	late := t.late(i)
	moderate := func(state, reason string) {
		if !t.kind.Moderated {
			return
		}
		all = append(all, change{http.MethodPut, "/moderation", decision{state, reason}})
	}
	if rnd.Float64() < 0.06 {
		all = append(all, change{http.MethodPatch, "", edit{"Edited: " + words(rnd, 1+rnd.IntN(20)), t.kind.Attributes.Generate(rnd)}})
		if rnd.Float64() < editAgain {
			all = append(all, change{http.MethodPatch, "", edit{Body: "Edited again: " + words(rnd, 1+rnd.IntN(20))}})
		}
	}
	switch u := rnd.Float64(); {
	case late && u < 0.75:
		moderate("APPROVED", "")
	case late && u < 0.85:
		moderate("HIDDEN", "off topic")
	case late: // it continues to wait
	case u < 0.02:
		moderate("HIDDEN", "spam")
	case u < 0.025:
		moderate("REMOVED", "against the rules")
	case u < 0.035:
		moderate("HIDDEN", "reported")
		moderate("APPROVED", "the report was wrong")
	}
	if rnd.Float64() < 0.04 {
		all = append(all, change{http.MethodDelete, "", nil})
	}
	return all
}

// Requests returns the number of requests of the plan, without retries.
func (t *Children) Requests() int64 {
	n := t.spec.Children
	for i := range t.object {
		n += int64(len(t.changes(i)))
	}
	for p := range int(t.spec.Objects) {
		s := t.settings(p)
		if s.Title != "" || s.Premoderated {
			n++
		}
		if s.Locked {
			n++
		}
	}
	return n
}

var vocabulary = strings.Fields(`the a of and to in is it that this was for on with as not be have at by from we you they but what all so
	if about more when there can no out just like good time people really think know see way well even because much before right same
	question answer maybe agree thanks wrong point again never always world work idea reason story problem better`)

// words returns n words, common ones more often.
func words(rnd *rand.Rand, n int) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(' ')
		}
		u := rnd.Float64()
		b.WriteString(vocabulary[int(u*u*float64(len(vocabulary)))])
	}
	return b.String()
}

// newChild is the body of a create.
type newChild struct {
	AuthorID   string         `json:"author_id"`
	Body       string         `json:"body"`
	ParentID   string         `json:"parent_id,omitempty"`
	Attributes map[string]any `json:"attributes,omitempty"`
}

// PlannedChild is a child of a plan.
type PlannedChild struct {
	Parent     int // the place in the plan of the child that it answers, before its own; -1 if it is not a reply
	AuthorID   client.ID
	Body       string
	Attributes map[string]any
}

// Child returns the child at place i of the plan, from 0. The result depends only on the plan and
// i.
func (t *Children) Child(i int) PlannedChild {
	rnd := t.rand(aboutContent, i)
	authors, u := t.spec.Children/perAuthor+1, rnd.Float64()
	author := int64(u * u * u * float64(authors)) // few authors write many
	if t.kind.OnePerAuthor {                      // an object's authors have consecutive ids, from a random one on
		authors = max(authors, t.most)
		author = (t.rand(aboutObject, int(t.object[i])).Int64N(authors) + int64(t.place[i])) % authors
	}
	return PlannedChild{
		Parent:     int(t.parent[i]),
		AuthorID:   ID(t.kind.AuthorIDs, 1+author),
		Body:       words(rnd, min(1+int(math.Exp(2.5+0.9*rnd.NormFloat64())), maxWords)),
		Attributes: t.kind.Attributes.Generate(rnd),
	}
}

// id returns the id of an object, from 0.
func (t *Children) id(object int) client.ID { return ID(t.kind.ParentIDs, int64(object)+1) }

// content returns the body of the request that creates child i, without its parent.
func (t *Children) content(i int) newChild {
	c := t.Child(i)
	return newChild{AuthorID: c.AuthorID.String(), Body: c.Body, Attributes: c.Attributes}
}

// RunChildren writes the plan in phases: the children in order, each after the one that it answers;
// settings; the late children of premoderated threads; the changes; the locks. Every request is
// safe to repeat: a create has an Idempotency-Key from the spec, and a change names the version
// before it. So a load may run twice, and may resume wherever it stopped. Changes of other writers
// remain. It ends as Run does.
func (l *Loader) RunChildren(ctx context.Context, t *Children) error {
	defer l.client.Close()
	run := childRun{l: l, t: t, ids: make([]uuid.UUID, len(t.object)), writing: make(map[int32]chan struct{})}
	for _, phase := range []iter.Seq2[job, error]{run.creates(false), run.setAll(false), run.creates(true),
		run.changeAll(), run.setAll(true)} {
		if err := l.run(ctx, phase); err != nil {
			return err
		}
	}
	return nil
}

type childRun struct {
	l   *Loader
	t   *Children
	ids []uuid.UUID // of written children; zero if refused

	mu      sync.Mutex
	writing map[int32]chan struct{} // closed and removed when the child is written or refused
}

// creates writes the late children, or all others. The job of a parent comes before those of its
// replies, so a worker that waits for a parent waits for another worker.
func (r *childRun) creates(late bool) iter.Seq2[job, error] {
	return func(yield func(job, error) bool) {
		for i := range r.t.object {
			if r.t.late(i) != late {
				continue
			}
			done := make(chan struct{})
			r.mu.Lock()
			r.writing[int32(i)] = done
			parent := r.writing[r.t.parent[i]]
			r.mu.Unlock()
			if !yield(job{after: parent, do: func(ctx context.Context) (time.Duration, error) { return r.create(ctx, i, done) }}, nil) {
				return
			}
		}
	}
}

func (r *childRun) create(ctx context.Context, i int, done chan struct{}) (time.Duration, error) {
	answered := func(id uuid.UUID) {
		r.ids[i] = id
		r.mu.Lock()
		delete(r.writing, int32(i))
		r.mu.Unlock()
		close(done)
	}
	c := r.t.content(i)
	if p := r.t.parent[i]; p != noChild {
		if r.ids[p] == uuid.Nil {
			r.l.refused.Add(1)
			answered(uuid.Nil)
			return 0, nil
		}
		c.ParentID = r.ids[p].String()
	}
	s := r.t.spec
	key := fmt.Sprintf("load-%d-%d-%d-%d", s.Seed, s.Objects, s.Children, i)
	path := fmt.Sprintf("/v1/%s/%s/%s", r.t.kind.Parents, r.t.id(int(r.t.object[i])), r.t.kind.Plural)
	var made map[string]any
	resp, refused, after, err := r.l.request(ctx, http.MethodPost, path, c, &made, client.IdempotencyKey(key))
	switch {
	case err != nil:
		return after, err
	case refused != nil && resp.Status == http.StatusConflict:
		r.l.refused.Add(1)
		answered(uuid.Nil)
		return 0, nil
	case refused != nil:
		return 0, &RefusedError{What: "POST " + path, Status: resp.Status, Reason: reason(refused)}
	}
	text, _ := made[r.t.kind.Name+"_id"].(string)
	id, err := uuid.Parse(text)
	if err != nil {
		return 0, fmt.Errorf("read the id of a %s: %w", r.t.kind.Name, err)
	}
	if resp.Replayed {
		r.l.existed.Add(1)
	} else {
		r.l.created.Add(1)
	}
	answered(id)
	return 0, nil
}

// changeAll makes the changes of all children; those of one child in order.
func (r *childRun) changeAll() iter.Seq2[job, error] {
	return func(yield func(job, error) bool) {
		for i := range r.t.object {
			var before chan struct{}
			for n, c := range r.t.changes(i) {
				done := make(chan struct{})
				if !yield(job{after: before, do: func(ctx context.Context) (time.Duration, error) {
					if r.ids[i] == uuid.Nil {
						r.l.refused.Add(1)
						close(done)
						return 0, nil
					}
					after, err := r.change(ctx, c.method, "/v1/"+r.t.kind.Plural+"/"+r.ids[i].String()+c.path,
						client.IfMatch(int64(n+1)), c.body)
					if err == nil {
						close(done)
					}
					return after, err
				}}, nil) {
					return
				}
				before = done
			}
		}
	}
}

// change sends a change of an existing object. If the version is already later, an earlier run made
// the change.
func (r *childRun) change(ctx context.Context, method, path string, about client.Option, body any) (time.Duration, error) {
	resp, refused, after, err := r.l.request(ctx, method, path, body, nil, about)
	switch {
	case err != nil:
		return after, err
	case refused == nil:
		r.l.changed.Add(1)
	case resp.Status == http.StatusPreconditionFailed:
		r.l.existed.Add(1)
	case resp.Status == http.StatusConflict:
		r.l.refused.Add(1)
	default:
		return 0, &RefusedError{What: method + " " + path, Status: resp.Status, Reason: reason(refused)}
	}
	return 0, nil
}

// settingsPath returns the path of the settings of an object's thread.
func (r *childRun) settingsPath(object int) string {
	if r.t.kind.Name == "comment" {
		return fmt.Sprintf("/v1/posts/%s/thread", r.t.id(object)) // this path is older than kinds
	}
	return fmt.Sprintf("/v1/%s/%s/%s/settings", r.t.kind.Parents, r.t.id(object), r.t.kind.Plural)
}

// setAll sets the settings of threads: in the first phase without locks, in the last phase with
// them.
func (r *childRun) setAll(last bool) iter.Seq2[job, error] {
	return func(yield func(job, error) bool) {
		for object := range int(r.t.spec.Objects) {
			s, about := r.t.settings(object), client.IfNoneMatch("*")
			first := s.Title != "" || s.Premoderated
			if last && first {
				about = client.IfMatch(1)
			}
			if last && !s.Locked || !last && !first {
				continue
			}
			s.Locked = last
			if !yield(job{do: func(ctx context.Context) (time.Duration, error) {
				return r.change(ctx, http.MethodPut, r.settingsPath(object), about, s)
			}}, nil) {
				return
			}
		}
	}
}
