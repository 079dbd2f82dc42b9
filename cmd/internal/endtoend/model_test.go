package endtoend_test

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/tidings/tidings/event"
)

// comment is a comment as the API shows it.
type comment struct {
	ID        string    `json:"comment_id"`
	Post      string    `json:"post_id"`
	Parent    string    `json:"parent_id"`
	Author    string    `json:"author_id"`
	Slug      string    `json:"slug"`
	Depth     int       `json:"depth"`
	Body      string    `json:"body"`
	State     string    `json:"state"`
	Version   int64     `json:"version"`
	CreatedAt string    `json:"created_at"` // sorts correctly as text
	UpdatedAt string    `json:"updated_at"`
	Replies   []comment `json:"replies"` // only in a tree
}

func (c comment) visible() bool { return c.State == "VISIBLE" }

// tombstone returns the form in which threaded pages show an invisible comment.
func (c comment) tombstone() comment {
	if !c.visible() {
		c.Author, c.Body = "", ""
	}
	return c
}

// shown returns the expected form of an outcome in the API.
func shown(c event.Comment, depth int) comment {
	v := comment{
		ID: c.CommentID, Post: c.PostID.String(), Parent: c.ParentID, Author: c.AuthorID.String(), Slug: c.Slug, Depth: depth,
		Body: c.Body, State: c.State(), Version: c.Version, CreatedAt: wire(c.CreatedAt), UpdatedAt: wire(c.UpdatedAt),
	}
	if !v.visible() && v.State != "PENDING" {
		v.Author, v.Body = "", ""
	}
	return v
}

func wire(t event.Time) string { return t.UTC().Format(event.TimeFormat) }

// thread is the settings of a post's thread.
type thread struct {
	Locked       bool   `json:"locked"`
	Premoderated bool   `json:"premoderated"`
	Title        string `json:"title"`
	Version      int64  `json:"version"`
}

type pair struct{ follower, followee event.ID }

// follow is the state of a pair.
type follow struct {
	active  bool
	version int64
	at      string
}

// edge is one line of a list of followers or following.
type edge struct {
	User string `json:"user_id"`
	At   string `json:"positioned_at"`
}

// model is the truth of one tenant: the newest version of everything, from the outcomes of writes.
// The outcomes of several writers may come in another order than the writes.
type model struct {
	mu       sync.Mutex
	comments map[string]comment
	posts    map[event.ID][]string // ids of the comments by post
	keep     map[string]bool       // comments that no writer removes
	threads  map[event.ID]thread
	follows  map[pair]follow
}

func newModel() *model {
	return &model{comments: map[string]comment{}, posts: map[event.ID][]string{}, keep: map[string]bool{}, threads: map[event.ID]thread{},
		follows: map[pair]follow{}}
}

func (m *model) putComment(c comment, keep bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, known := m.comments[c.ID]
	if !known {
		post := event.ID(c.Post)
		m.posts[post] = append(m.posts[post], c.ID)
	}
	if keep && c.visible() {
		m.keep[c.ID] = true
	}
	if c.Version > old.Version {
		m.comments[c.ID] = c
	}
}

func (m *model) putThread(post event.ID, t thread) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t.Version > m.threads[post].Version {
		m.threads[post] = t
	}
}

func (m *model) putFollow(f event.Edge) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := pair{f.From, f.To}
	if f.Version > m.follows[p].version {
		m.follows[p] = follow{active: f.Active(), version: f.Version, at: wire(f.PositionedAt)}
	}
}

func (m *model) comment(id string) comment {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.comments[id]
}

func (m *model) thread(post event.ID) thread {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.threads[post]
}

// ids returns the comments of a post, in the order in which the model learned of them.
func (m *model) ids(post event.ID) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.posts[post])
}

func (m *model) kept(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.keep[id]
}

func byAge(a, b comment) int {
	return cmp.Or(cmp.Compare(a.CreatedAt, b.CreatedAt), cmp.Compare(a.ID, b.ID))
}

// list returns the comments of all posts, or of one, that fulfill want, oldest first.
func (m *model) list(post event.ID, want func(comment) bool) []comment {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []comment{}
	for _, c := range m.comments {
		if (post == "" || c.Post == string(post)) && want(c) {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, byAge)
	return all
}

// tree returns the thread of a post: the visible comments, and those with a visible reply below
// them.
func (m *model) tree(post event.ID) []comment {
	below := map[string][]comment{}
	for _, c := range m.list(post, func(comment) bool { return true }) {
		below[c.Parent] = append(below[c.Parent], c)
	}
	var nest func(parent string) []comment
	nest = func(parent string) []comment {
		var all []comment
		for _, c := range below[parent] {
			if c.Replies = nest(c.ID); c.visible() || len(c.Replies) > 0 {
				all = append(all, c.tombstone())
			}
		}
		slices.SortFunc(all, func(a, b comment) int {
			return cmp.Or(cmp.Compare(a.CreatedAt, b.CreatedAt), cmp.Compare(a.Slug, b.Slug))
		})
		return all
	}
	return nest("")
}

// flat returns a tree in thread order.
func flat(tree []comment) []comment {
	all := []comment{}
	for _, c := range tree {
		replies := c.Replies
		c.Replies = nil
		all = append(append(all, c), flat(replies)...)
	}
	return all
}

// find finds a comment in a tree.
func find(tree []comment, id string) (comment, bool) {
	for _, c := range tree {
		if c.ID == id {
			return c, true
		}
		if c, ok := find(c.Replies, id); ok {
			return c, true
		}
	}
	return comment{}, false
}

// around returns the page of limit visible comments with c in the middle.
func around(oldest []comment, c comment, limit int) []comment {
	at, _ := slices.BinarySearchFunc(oldest, c, byAge)
	before := min(at, max(limit/2, limit-(len(oldest)-at)))
	return slice(oldest, at-before, limit)
}

// slice returns the rows that OFFSET and LIMIT would return.
func slice[T any](all []T, skip, limit int) []T {
	skip = min(skip, len(all))
	return all[skip:min(len(all), skip+limit)]
}

// edges returns the edges of a user, newest first.
func (m *model) edges(user event.ID, followers bool) []edge {
	m.mu.Lock()
	defer m.mu.Unlock()
	type row struct {
		at   string
		user event.ID
	}
	var rows []row
	for p, f := range m.follows {
		switch {
		case f.active && followers && p.followee == user:
			rows = append(rows, row{f.at, p.follower})
		case f.active && !followers && p.follower == user:
			rows = append(rows, row{f.at, p.followee})
		}
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(b.at, a.at), cmp.Compare(b.user, a.user)) })
	all := []edge{}
	for _, r := range rows {
		all = append(all, edge{fmt.Sprint(r.user), r.at})
	}
	return all
}

// users returns all users in follows.
func (m *model) users() []event.ID {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []event.ID
	for p := range m.follows {
		all = append(all, p.follower, p.followee)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
