package load

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
)

// ThreadSpec says which threads to generate.
type ThreadSpec struct {
	Posts    int64 // with the ids 1 to Posts
	Comments int64 // in all
	Seed     uint64
}

// Bounds of the generator's memory: it keeps about 30 bytes per comment and 24 per post.
const (
	maxPosts    = 10_000_000
	maxComments = 20_000_000
)

// ParseThreadSpec reads "posts=N,comments=M,seed=S"; the seed is 1 unless given.
func ParseThreadSpec(s string) (ThreadSpec, error) {
	v, err := parseSpec(s, "posts", "comments")
	if err != nil {
		return ThreadSpec{}, err
	}
	spec := ThreadSpec{Posts: int64(v["posts"]), Comments: int64(v["comments"]), Seed: v["seed"]}
	if spec.Posts < 1 || spec.Posts > maxPosts {
		return spec, fmt.Errorf("posts is %d: want 1 to %d", spec.Posts, maxPosts)
	}
	if spec.Comments < 1 || spec.Comments > maxComments {
		return spec, fmt.Errorf("comments is %d: want 1 to %d", spec.Comments, maxComments)
	}
	return spec, nil
}

// What threads look like. Few posts have most of the comments; many comments answer one of the last few, which makes chains, and
// others one that was there early, which makes wide ones.
const (
	sizeSkew  = 0.9  // a post's weight is its place to this power, negative: see followersSkew
	topLevel  = 0.3  // share of comments that answer none
	recent    = 0.55 // of the others, share that answers one of the last few
	maxDepth  = 64   // the API's
	perAuthor = 5    // comments per author on average
	maxWords  = 400
	noComment = -1
	lateShare = 0.3 // of the leaves of a premoderated thread: those written after it became so
	editAgain = 0.2
)

// Threads is a plan: which comments are written, which answers which, and what becomes of them. The same spec makes the same plan.
type Threads struct {
	spec   ThreadSpec
	post   []int32 // of each comment, from 0
	parent []int32 // of each comment: an earlier one of its post, or noComment
	leaf   []bool  // nobody answers it
}

// GenerateThreads makes the plan. spec must be one that ParseThreadSpec would return.
func GenerateThreads(spec ThreadSpec) *Threads {
	rnd := rand.New(rand.NewPCG(spec.Seed, 0x7468_7265_6164_7321))
	posts, n := int(spec.Posts), int(spec.Comments)
	places := rnd.Perm(posts)
	cumulative, total := make([]float64, posts), 0.0
	for i := range cumulative {
		total += math.Pow(float64(i+1), -sizeSkew)
		cumulative[i] = total
	}
	t := &Threads{spec: spec, post: make([]int32, n), parent: make([]int32, n), leaf: make([]bool, n)}
	depth := make([]uint8, n)
	written := make([][]int32, posts) // the comments of each post so far
	for i := range n {
		p := places[min(sort.SearchFloat64s(cumulative, rnd.Float64()*total), posts-1)]
		earlier := written[p]
		parent := int32(noComment)
		if len(earlier) > 0 && rnd.Float64() >= topLevel {
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
		t.post[i], t.parent[i], t.leaf[i], depth[i] = int32(p), parent, true, 1
		if parent != noComment {
			t.leaf[parent], depth[i] = false, depth[parent]+1
		}
		written[p] = append(earlier, int32(i))
	}
	return t
}

// Each of these draws from a generator of its own, so that a comment or a post can be looked at alone.
const (
	aboutContent = iota
	aboutChanges
	aboutLateness
	aboutPost
)

func (t *Threads) rand(about uint64, i int) *rand.Rand {
	return rand.New(rand.NewPCG(t.spec.Seed<<2|about, uint64(i)))
}

// settings is what is set for a post: first before the late comments, then at the end.
type settings struct {
	Title        string `json:"title,omitempty"`
	Premoderated bool   `json:"premoderated,omitempty"`
	Locked       bool   `json:"locked,omitempty"`
}

// settings are those at the end of the post's thread. Most posts have none.
func (t *Threads) settings(post int) (s settings) {
	rnd := t.rand(aboutPost, post)
	if rnd.Float64() < 0.2 {
		s.Title = words(rnd, 2+rnd.IntN(6))
	}
	s.Premoderated = rnd.Float64() < 0.05
	s.Locked = rnd.Float64() < 0.04
	return s
}

// late reports whether a comment is written after its thread became premoderated.
func (t *Threads) late(i int) bool {
	return t.leaf[i] && t.settings(int(t.post[i])).Premoderated && t.rand(aboutLateness, i).Float64() < lateShare
}

// change is a request about a comment that is there: one that makes its next version.
type change struct {
	method, path string // path is below the comment's
	body         any
}

type newBody struct {
	Body string `json:"body"`
}

type decision struct {
	State  string `json:"state"`
	Reason string `json:"reason,omitempty"`
}

// changes is what becomes of a comment after all are written. Each makes a version, so where one was made is where to go on.
func (t *Threads) changes(i int) (all []change) {
	rnd := t.rand(aboutChanges, i)
	late := t.late(i)
	moderate := func(state, reason string) {
		all = append(all, change{http.MethodPut, "/moderation", decision{state, reason}})
	}
	if rnd.Float64() < 0.06 {
		all = append(all, change{http.MethodPatch, "", newBody{"Edited: " + words(rnd, 1+rnd.IntN(20))}})
		if rnd.Float64() < editAgain {
			all = append(all, change{http.MethodPatch, "", newBody{"Edited again: " + words(rnd, 1+rnd.IntN(20))}})
		}
	}
	switch u := rnd.Float64(); {
	case late && u < 0.75:
		moderate("approved", "")
	case late && u < 0.85:
		moderate("hidden", "off topic")
	case late: // it goes on waiting
	case u < 0.02:
		moderate("hidden", "spam")
	case u < 0.025:
		moderate("removed", "against the rules")
	case u < 0.035:
		moderate("hidden", "reported")
		moderate("approved", "the report was wrong")
	}
	if rnd.Float64() < 0.04 {
		all = append(all, change{http.MethodDelete, "", nil})
	}
	return all
}

// Requests is how many requests the threads take, retries not counted.
func (t *Threads) Requests() int64 {
	n := t.spec.Comments
	for i := range t.post {
		n += int64(len(t.changes(i)))
	}
	for p := range int(t.spec.Posts) {
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

// words is n words, the common ones more often.
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

// newComment is the body of a create.
type newComment struct {
	AuthorID string `json:"author_id"`
	Body     string `json:"body"`
	ParentID string `json:"parent_id,omitempty"`
}

// PlannedComment is one comment of a plan.
type PlannedComment struct {
	Parent   int // the comment that it answers, by its place in the plan, which is before its own; -1 when it answers none
	AuthorID int64
	Body     string
}

// Comment returns the comment at place i of the plan, from 0. The same place is the same comment.
func (t *Threads) Comment(i int) PlannedComment {
	rnd := t.rand(aboutContent, i)
	authors, u := float64(t.spec.Comments/perAuthor+1), rnd.Float64()
	return PlannedComment{
		Parent:   int(t.parent[i]),
		AuthorID: 1 + int64(u*u*u*authors), // few write much
		Body:     words(rnd, min(1+int(math.Exp(2.5+0.9*rnd.NormFloat64())), maxWords)),
	}
}

// content is what a comment's create says of its author and its text.
func (t *Threads) content(i int) newComment {
	c := t.Comment(i)
	return newComment{AuthorID: strconv.FormatInt(c.AuthorID, 10), Body: c.Body}
}

// RunThreads writes the threads: the comments in their order, each after the one that it answers; then settings, and what is
// written into premoderated threads; then what becomes of the comments; then the locks. Every request is safe to repeat: a create
// has an Idempotency-Key made of the spec, a change names the version that it is about. So a load may be run twice, and run
// again after it was stopped anywhere. What somebody else did to a comment or a thread stays. It ends as Run does.
func (l *Loader) RunThreads(ctx context.Context, t *Threads) error {
	defer l.client.CloseIdleConnections()
	run := threadRun{l: l, t: t, ids: make([]uuid.UUID, len(t.post)), writing: make(map[int32]chan struct{})}
	for _, phase := range []iter.Seq2[job, error]{run.creates(false), run.setAll(false), run.creates(true), run.changeAll(), run.setAll(true)} {
		if err := l.run(ctx, phase); err != nil {
			return err
		}
	}
	return nil
}

type threadRun struct {
	l   *Loader
	t   *Threads
	ids []uuid.UUID // of the comments that were written; nil of one that was refused

	mu      sync.Mutex
	writing map[int32]chan struct{} // closed when the comment was written, or refused; it is not there any more then
}

// creates writes the comments that are late, or those that are not. A parent's job is before its replies', so a worker that
// waits for a parent waits for another worker.
func (r *threadRun) creates(late bool) iter.Seq2[job, error] {
	return func(yield func(job, error) bool) {
		for i := range r.t.post {
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

func (r *threadRun) create(ctx context.Context, i int, done chan struct{}) (time.Duration, error) {
	answered := func(id uuid.UUID) {
		r.ids[i] = id
		r.mu.Lock()
		delete(r.writing, int32(i))
		r.mu.Unlock()
		close(done)
	}
	c := r.t.content(i)
	if p := r.t.parent[i]; p != noComment {
		if r.ids[p] == uuid.Nil {
			r.l.refused.Add(1)
			answered(uuid.Nil)
			return 0, nil
		}
		c.ParentID = r.ids[p].String()
	}
	s := r.t.spec
	header := http.Header{"Idempotency-Key": {fmt.Sprintf("load-%d-%d-%d-%d", s.Seed, s.Posts, s.Comments, i)}}
	path := fmt.Sprintf("/v1/posts/%d/comments", r.t.post[i]+1)
	resp, body, after, err := r.request(ctx, http.MethodPost, path, header, c)
	if err != nil {
		return after, err
	}
	switch {
	case resp.StatusCode == http.StatusConflict:
		r.l.refused.Add(1)
		answered(uuid.Nil)
		return 0, nil
	case resp.StatusCode != http.StatusCreated:
		return 0, &RefusedError{What: "POST " + path, Status: resp.StatusCode, Reason: reason(resp, body)}
	}
	var made struct {
		ID uuid.UUID `json:"comment_id"`
	}
	if err := json.Unmarshal(body, &made); err != nil {
		return 0, fmt.Errorf("read a comment: %w", err)
	}
	if resp.Header.Get("Idempotency-Replayed") == "true" {
		r.l.existed.Add(1)
	} else {
		r.l.created.Add(1)
	}
	answered(made.ID)
	return 0, nil
}

// request is the loader's, with a body to encode.
func (r *threadRun) request(ctx context.Context, method, path string, header http.Header, body any) (*http.Response, []byte, time.Duration, error) {
	var send []byte
	if body != nil {
		var err error
		if send, err = json.Marshal(body); err != nil {
			return nil, nil, 0, fmt.Errorf("encode the body of %s %s: %w", method, path, err)
		}
	}
	return r.l.request(ctx, method, path, header, send)
}

// changeAll makes the changes of all comments, those of one comment in their order.
func (r *threadRun) changeAll() iter.Seq2[job, error] {
	return func(yield func(job, error) bool) {
		for i := range r.t.post {
			var before chan struct{}
			for n, c := range r.t.changes(i) {
				done := make(chan struct{})
				if !yield(job{after: before, do: func(ctx context.Context) (time.Duration, error) {
					if r.ids[i] == uuid.Nil {
						r.l.refused.Add(1)
						close(done)
						return 0, nil
					}
					header := http.Header{"If-Match": {fmt.Sprintf("%q", strconv.Itoa(n+1))}}
					after, err := r.change(ctx, c.method, "/v1/comments/"+r.ids[i].String()+c.path, header, c.body)
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

// change sends a change of what is there. A version that is later than the one that the change is about says that it was made.
func (r *threadRun) change(ctx context.Context, method, path string, header http.Header, body any) (time.Duration, error) {
	resp, answer, after, err := r.request(ctx, method, path, header, body)
	switch {
	case err != nil:
		return after, err
	case resp.StatusCode == http.StatusPreconditionFailed:
		r.l.existed.Add(1)
	case resp.StatusCode == http.StatusConflict:
		r.l.refused.Add(1)
	case resp.StatusCode < 300:
		r.l.changed.Add(1)
	default:
		return 0, &RefusedError{What: method + " " + path, Status: resp.StatusCode, Reason: reason(resp, answer)}
	}
	return 0, nil
}

// setAll sets what holds for threads: at first without the locks, at last the locks.
func (r *threadRun) setAll(last bool) iter.Seq2[job, error] {
	return func(yield func(job, error) bool) {
		for post := range int(r.t.spec.Posts) {
			s, header := r.t.settings(post), http.Header{"If-None-Match": {"*"}}
			first := s.Title != "" || s.Premoderated
			if last && first {
				header = http.Header{"If-Match": {`"1"`}}
			}
			if last && !s.Locked || !last && !first {
				continue
			}
			s.Locked = last
			if !yield(job{do: func(ctx context.Context) (time.Duration, error) {
				return r.change(ctx, http.MethodPut, fmt.Sprintf("/v1/posts/%d/thread", post+1), header, s)
			}}, nil) {
				return
			}
		}
	}
}
