package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/client"
)

func TestGeneratedThreadsAreThoseOfTheSpec(t *testing.T) {
	spec := ChildSpec{Objects: 100, Children: 10_000, Seed: 7}
	threads := GenerateChildren(comments, spec)
	sizes, depths := make([]int, spec.Objects), make([]int, spec.Children)
	kinds := map[string]int{}
	for i := range threads.object {
		sizes[threads.object[i]]++
		depths[i] = 1
		if p := threads.parent[i]; p != noChild {
			if p >= int32(i) || threads.object[p] != threads.object[i] || threads.leaf[p] || threads.late(int(p)) {
				t.Fatalf("comment %d of post %d answers %d", i, threads.object[i], p)
			}
			depths[i] = depths[p] + 1
		}
		if c := threads.content(i); c.Body == "" || len(c.Body) > 16<<10 || c.AuthorID == "0" {
			t.Fatalf("comment %d is %+v", i, c)
		}
		for _, c := range threads.changes(i) {
			kinds[c.method+c.path]++
		}
		if threads.late(i) {
			kinds["late"]++
		}
	}
	slices.Sort(sizes)
	if slices.Sort(depths); depths[len(depths)-1] > maxDepth || depths[len(depths)-1] < 12 || depths[len(depths)/2] < 2 {
		t.Errorf("the deepest comment is at %d, the median at %d", depths[len(depths)-1], depths[len(depths)/2])
	}
	if largest, median := sizes[len(sizes)-1], sizes[len(sizes)/2]; largest < 10*median {
		t.Errorf("the largest thread has %d comments, the median %d", largest, median)
	}
	for _, kind := range []string{"PATCH", "DELETE", "PUT/moderation", "late"} {
		if n := kinds[kind]; n < 10 || n > int(spec.Children)/5 {
			t.Errorf("%s: %d of %d comments", kind, n, spec.Children)
		}
	}
	again := GenerateChildren(comments, spec)
	if !slices.Equal(again.parent, threads.parent) || !slices.Equal(again.object, threads.object) ||
		!cmp.Equal(again.content(5), threads.content(5)) || again.Requests() != threads.Requests() || again.Requests() <= spec.Children {
		t.Error("two calls with the same spec make different plans")
	}
	spec.Seed++
	if slices.Equal(GenerateChildren(comments, spec).parent, threads.parent) {
		t.Error("another seed makes the same plan")
	}
	deep := GenerateChildren(comments, ChildSpec{Objects: 1, Children: 100_000, Seed: 1})
	for i, p := range deep.parent {
		depth := 1
		for ; p != noChild; p = deep.parent[p] {
			depth++
		}
		if depth > maxDepth {
			t.Fatalf("comment %d is at depth %d", i, depth)
		}
	}
}

func TestSpecOfChildren(t *testing.T) {
	got, err := comments.Spec("posts=10,comments=20,seed=3")
	if err != nil || got != (ChildSpec{10, 20, 3}) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "posts=10", "posts=0,comments=1", "posts=1,comments=0", "posts=x,comments=1", "users=3,comments=1",
		"posts=1,comments=20000001"} {
		if got, err := comments.Spec(bad); err == nil {
			t.Errorf("%q: %v, want an error", bad, got)
		}
	}
}

// threadAPI is the part of the API that a loader of threads uses.
type threadAPI struct {
	mu       sync.Mutex
	byKey    map[string]string // key -> id
	versions map[string]int    // of comments and posts
	refuse   map[string]bool   // parents
	log      []string
}

func newThreadAPI() *threadAPI {
	return &threadAPI{byKey: map[string]string{}, versions: map[string]int{}, refuse: map[string]bool{}}
}

func (a *threadAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	part := strings.Split(r.URL.Path, "/")
	entity := part[3]
	if r.Method == http.MethodPost {
		var c newChild
		if err := json.NewDecoder(r.Body).Decode(&c); err != nil || c.ParentID != "" && a.versions[c.ParentID] == 0 {
			w.WriteHeader(http.StatusUnprocessableEntity)
			return
		}
		if a.refuse[c.ParentID] {
			w.WriteHeader(http.StatusConflict)
			return
		}
		key := r.Header.Get("Idempotency-Key")
		id := a.byKey[key]
		if id != "" {
			w.Header().Set("Idempotency-Replayed", "true")
		} else {
			id = fmt.Sprintf("00000000-0000-7000-8000-%012d", len(a.byKey)+1)
			a.byKey[key], a.versions[id] = id, 1
			a.log = append(a.log, "POST")
		}
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, `{"comment_id":"`+id+`"}`)
		return
	}
	version := a.versions[entity]
	if want := r.Header.Get("If-Match"); want != "" && want != strconv.Quote(strconv.Itoa(version)) ||
		r.Header.Get("If-None-Match") == "*" && version > 0 {
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	}
	a.versions[entity]++
	a.log = append(a.log, r.Method)
}

func TestThreadsAreWrittenOnceHoweverOftenTheyAreSent(t *testing.T) {
	a := newThreadAPI()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var n atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch i := n.Add(1); {
		case i == 150:
			cancel()
			a.ServeHTTP(w, r)
		case i%20 == 3:
			w.WriteHeader(http.StatusServiceUnavailable)
		case i%20 == 7: // the connection breaks after the write
			a.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		default:
			a.ServeHTTP(w, r)
		}
	}))
	defer srv.Close()
	threads := GenerateChildren(comments, ChildSpec{Objects: 20, Children: 300, Seed: 3})
	stopped := loader(t, srv.URL, time.Minute)
	if err := stopped.RunChildren(ctx, threads); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v, want canceled", err)
	}
	for range 2 {
		l := loader(t, srv.URL, time.Minute)
		if err := l.RunChildren(t.Context(), threads); err != nil {
			t.Fatal(err)
		}
		if s := l.Stats(); s.Done() != threads.Requests() || s.Refused > 0 {
			t.Errorf("%+v, want %d requests done, none refused", s, threads.Requests())
		}
	}
	if int64(len(a.log)) != threads.Requests() || len(a.byKey) != 300 {
		t.Errorf("%d writes, %d comments: want %d and 300", len(a.log), len(a.byKey), threads.Requests())
	}
	l := loader(t, srv.URL, time.Minute)
	if err := l.RunChildren(t.Context(), threads); err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Existed != threads.Requests() {
		t.Errorf("a second load: %+v, want %d", s, threads.Requests())
	}
}

func TestRepliesToARefusedCommentAreNotSent(t *testing.T) {
	a := newThreadAPI()
	a.refuse[""] = true // refuses all first comments, so replies have no parent
	srv := httptest.NewServer(a)
	defer srv.Close()
	threads := GenerateChildren(comments, ChildSpec{Objects: 5, Children: 100, Seed: 3})
	l := loader(t, srv.URL, time.Minute)
	if err := l.RunChildren(t.Context(), threads); err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Done() != threads.Requests() || s.Refused < 100 || s.Created != 0 {
		t.Errorf("%+v, want %d requests done, all comments refused", s, threads.Requests())
	}
}

func TestALoadOfThreadsEndsAtOnceWhenRefused(t *testing.T) {
	srv := httptest.NewServer(&api{follows: map[[2]string]bool{}})
	defer srv.Close()
	err := loader(t, srv.URL, time.Minute).RunChildren(t.Context(),
		GenerateChildren(comments, ChildSpec{Objects: 1, Children: 100, Seed: 1}))
	if want := "the API refuses POST /v1/posts/1/comments with 401: no such token (unauthorized)"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

// Flat children have neither replies nor moderation. With one child per author, no author has two
// under one object. Attributes are those that the schema allows.
func TestPlansFollowTheirKind(t *testing.T) {
	least, most := int64(-2), int64(3)
	k := ChildKind{Name: "verdict", Plural: "verdicts", Parents: "songs", OnePerAuthor: true,
		Attributes: Schema{Required: []string{"stars"}, Properties: map[string]Property{
			"stars": {Type: "integer", Minimum: &least, Maximum: &most}, "mood": {Type: "string", Enum: []any{"calm", "loud"}},
			"note": {Type: "string", MaxLength: 4}, "public": {Type: "boolean"}, "wide": {Type: "integer"},
		}}}
	plan := GenerateChildren(k, ChildSpec{Objects: 20, Children: 3000, Seed: 3})
	type pair struct {
		object int32
		author client.ID
	}
	seen, stars, given := map[pair]bool{}, map[int64]int{}, map[string]int{}
	check := func(all map[string]any) {
		stars[all["stars"].(int64)]++
		for name, v := range all {
			given[name]++
			if s, ok := v.(string); name == "mood" && s != "calm" && s != "loud" || ok && name == "note" && len(s) > 4 {
				t.Fatalf("%s is %v", name, v)
			}
		}
	}
	for i := range plan.object {
		c := plan.Child(i)
		if p := (pair{plan.object[i], c.AuthorID}); seen[p] || c.Parent != -1 || plan.late(i) || c.AuthorID == "" {
			t.Fatalf("child %d is %+v of object %d", i, c, plan.object[i])
		} else {
			seen[p] = true
		}
		check(c.Attributes)
		for _, change := range plan.changes(i) {
			if e, ok := change.body.(edit); ok && e.Attributes != nil {
				check(e.Attributes)
			} else if change.path != "" {
				t.Fatalf("child %d: %+v", i, change)
			}
		}
	}
	for n := int64(-5); n < 6; n++ {
		if within := n >= least && n <= most; within != (stars[n] > 200) {
			t.Errorf("%d stars %d times", n, stars[n])
		}
	}
	if given["stars"] < 3000 || given["mood"] < 2000 || given["mood"] > 2900 || given["note"] == 0 ||
		given["public"] == 0 || given["wide"] == 0 {
		t.Errorf("given: %v", given)
	}
}
