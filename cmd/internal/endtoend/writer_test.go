package endtoend_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

const (
	posts     = 3    // common to all writers of a tenant; idOf from 1
	users     = 10   // they follow each other and write comments; idOf from 1
	celebrity = 1    // no writer removes its fans
	fans      = 1000 // ids of fans are the numbers from here
	maxPost   = 500  // comments of a post: the tree of a post has at most 1,000
)

// writer makes random writes of one tenant and records their outcomes in the model.
type writer struct {
	client
	m      *model
	rng    *rand.Rand
	store  *store.Store
	tenant int64
	n      int64 // the writer's number, for ids of its own
	fans   int
}

var meta = store.Meta{Actor: "test"}

// step makes one write, or a group of writes in one transaction.
func (w *writer) step() error {
	if w.rng.IntN(3) == 0 {
		return w.group()
	}
	post := w.post()
	id := w.pick(post)
	switch n := w.rng.IntN(20); {
	case n < 2:
		w.fans++
		_, err := w.setFollow(pair{event.IDOf(fans + 1000*int(w.n) + w.fans), event.IDOf(celebrity)}, true)
		return err
	case n < 6:
		_, err := w.setFollow(w.pair(), n < 4)
		return err
	case n < 7:
		_, err := w.setThread(post, thread{Locked: w.rng.IntN(5) == 0, Premoderated: w.rng.IntN(3) == 0,
			Title: fmt.Sprint("title ", w.rng.IntN(3))})
		return err
	case n < 13 || id == "":
		if len(w.m.ids(post)) >= maxPost {
			return nil
		}
		parent := ""
		if w.rng.IntN(3) > 0 {
			parent = id
		}
		_, err := w.create(post, w.user(), parent, w.rng.IntN(3) == 0)
		return err
	case n < 15:
		_, err := w.edit(id)
		return err
	}
	if w.m.kept(id) {
		return nil
	}
	if w.rng.IntN(4) == 0 {
		_, err := w.remove(id)
		return err
	}
	_, err := w.moderate(id)
	return err
}

// idOf returns the n-th id. Every third one is a number, a UUID, or another text.
func idOf(n int) event.ID {
	switch n % 3 {
	case 1:
		return event.IDOf(n)
	case 2:
		return event.ID(fmt.Sprintf("auth0|%d", n))
	}
	return event.ID(fmt.Sprintf("0197a2b4-5f0e-4d3a-9a51-%012d", n))
}

// post returns mostly the first post, so that it gets enough comments for several buckets.
func (w *writer) post() event.ID { return idOf(max(1, w.rng.IntN(posts+4)-3)) }

func (w *writer) user() event.ID { return idOf(1 + w.rng.IntN(users)) }

func (w *writer) pair() pair {
	for {
		if p := (pair{w.user(), w.user()}); p.follower != p.followee {
			return p
		}
	}
}

func (w *writer) pick(post event.ID) string {
	ids := w.m.ids(post)
	if len(ids) == 0 {
		return ""
	}
	return ids[w.rng.IntN(len(ids))]
}

// refused reports whether a write may get this answer because other writers write the same entity.
// Such a write changed nothing.
func refused(status int) bool {
	return status == http.StatusConflict || status == http.StatusPreconditionFailed || status == http.StatusServiceUnavailable
}

func (w *writer) odd(what string, a answer) error {
	if refused(a.status) {
		return nil
	}
	return fmt.Errorf("%s: %d %s", what, a.status, a.body)
}

// The writes over HTTP. Each returns the answer. An unexpected answer is an error.

func (w *writer) setFollow(p pair, active bool) (answer, error) {
	method, want := http.MethodPut, http.StatusCreated
	if !active {
		method, want = http.MethodDelete, http.StatusNoContent
	}
	a := w.call(method, fmt.Sprintf("/v1/follows/%s/%s", p.follower, p.followee), "")
	if a.status != want && a.status != http.StatusOK {
		return a, w.odd("follow", a)
	}
	f, err := w.store.GetEdge(w.ctx, w.tenant, kinds.Builtin().Edges["follow"], p.follower, p.followee) // the answer to DELETE has no body
	if errors.Is(err, store.ErrNotFound) && !active {
		return a, nil // the follow never existed
	}
	if err != nil {
		return a, err
	}
	w.m.putFollow(f)
	return a, nil
}

func (w *writer) setThread(post event.ID, t thread) (answer, error) {
	body, err := json.Marshal(t)
	if err != nil {
		return answer{}, err
	}
	path := fmt.Sprintf("/v1/posts/%s/thread", post)
	a := w.call(http.MethodPut, path, strings.Replace(string(body), `,"version":0`, "", 1), "If-Match: *")
	if a.status != http.StatusOK {
		return a, w.odd("PUT "+path, a)
	}
	var now thread
	if err := json.Unmarshal(a.body, &now); err != nil {
		return a, err
	}
	w.m.putThread(post, now)
	return a, nil
}

// comment reads an answer that is a comment.
func (w *writer) comment(what string, want int, a answer, keep bool) (answer, error) {
	if a.status != want {
		return a, w.odd(what, a)
	}
	var c comment
	if err := json.Unmarshal(a.body, &c); err != nil {
		return a, err
	}
	w.m.putComment(c, keep)
	return a, nil
}

func (w *writer) create(post, author event.ID, parent string, keep bool) (answer, error) {
	body := fmt.Sprintf(`{"author_id":"%s","body":"words %d"}`, author, w.rng.IntN(1000))
	if parent != "" {
		body = strings.Replace(body, "{", fmt.Sprintf(`{"parent_id":%q,`, parent), 1)
	}
	path := fmt.Sprintf("/v1/posts/%s/comments", post)
	return w.comment("POST "+path, http.StatusCreated, w.call(http.MethodPost, path, body), keep)
}

func (w *writer) edit(id string) (answer, error) {
	a := w.call(http.MethodPatch, "/v1/comments/"+id, fmt.Sprintf(`{"body":"other words %d"}`, w.rng.IntN(1000)), "If-Match: *")
	return w.comment("edit", http.StatusOK, a, false)
}

var decisions = []string{"APPROVED", "APPROVED", "HIDDEN", "REMOVED"}

func (w *writer) moderate(id string) (answer, error) {
	body := fmt.Sprintf(`{"state":%q,"reason":"r"}`, decisions[w.rng.IntN(len(decisions))])
	return w.comment("moderate", http.StatusOK, w.call(http.MethodPut, "/v1/comments/"+id+"/moderation", body, "If-Match: *"), false)
}

func (w *writer) remove(id string) (answer, error) {
	a := w.call(http.MethodDelete, "/v1/comments/"+id, "", "If-Match: *")
	if a.status != http.StatusNoContent {
		return a, w.odd("delete", a)
	}
	_, err := w.comment("read what was deleted", http.StatusOK, w.call(http.MethodGet, "/v1/comments/"+id, ""), false)
	return a, err
}

// group makes several writes of one kind in one call of the store.
func (w *writer) group() error {
	n := 2 + w.rng.IntN(8)
	switch w.rng.IntN(6) {
	case 0, 1:
		var writes []store.EdgeWrite
		for range n {
			p := w.pair()
			writes = append(writes, store.EdgeWrite{Meta: meta, From: p.follower, To: p.followee})
		}
		do := w.store.PutEdges
		if w.rng.IntN(3) == 0 {
			do = w.store.RemoveEdges
		}
		out, err := do(w.ctx, w.tenant, kinds.Builtin().Edges["follow"], writes)
		for _, o := range out {
			w.m.putFollow(o.Edge)
		}
		return busy(err)
	case 2, 3:
		var creates []store.NewChild
		for range n {
			post := w.post()
			c := store.NewChild{Meta: meta, Object: post, AuthorID: w.user(), Body: fmt.Sprint("words of a group ", w.rng.IntN(1000))}
			if w.rng.IntN(3) > 0 {
				c.ReplyTo = w.pick(post)
			}
			if len(w.m.ids(post)) < maxPost {
				creates = append(creates, c)
			}
		}
		out, err := w.store.CreateChildren(w.ctx, w.tenant, kinds.Builtin().Children["comment"], creates)
		return errors.Join(busy(err), w.outcomes(out))
	case 4:
		var edits []store.ChildEdit
		for _, id := range w.several(n) {
			edits = append(edits, store.ChildEdit{Meta: meta, ID: id, Body: new(fmt.Sprint("edited in a group ", w.rng.IntN(1000)))})
		}
		out, err := w.store.EditChildren(w.ctx, w.tenant, kinds.Builtin().Children["comment"], edits)
		return errors.Join(busy(err), w.outcomes(out))
	}
	var decide []store.ChildModeration
	var remove []store.ChildDelete
	for i, id := range w.several(n) {
		if w.m.kept(id) {
			continue
		}
		if i == 0 {
			remove = append(remove, store.ChildDelete{Meta: meta, ID: id})
		} else {
			state := decisions[w.rng.IntN(len(decisions))]
			decide = append(decide, store.ChildModeration{Meta: meta, ID: id, State: state})
		}
	}
	out, err := w.store.ModerateChildren(w.ctx, w.tenant, kinds.Builtin().Children["comment"], decide)
	gone, err2 := w.store.DeleteChildren(w.ctx, w.tenant, kinds.Builtin().Children["comment"], remove)
	return errors.Join(busy(err), busy(err2), w.outcomes(out), w.outcomes(gone))
}

func (w *writer) several(n int) []string {
	var ids []string
	for range n {
		if id := w.pick(w.post()); id != "" {
			ids = append(ids, id)
		}
	}
	return ids
}

// busy ignores errors that a later try may not meet. Such a write changed nothing.
func busy(err error) error {
	if postgres.IsTransient(err) || postgres.IsLockTimeout(err) || errors.Is(err, store.ErrThreadReturning) {
		return nil
	}
	return err
}

func (w *writer) outcomes(out []store.ChildOutcome) error {
	for _, o := range out {
		if errors.Is(o.Err, store.ErrNotFound) || errors.Is(o.Err, store.ErrInvalid) || errors.Is(o.Err, store.ErrParentUnknown) {
			return o.Err
		}
		if o.Child.Version > 0 {
			w.m.putComment(shown(o.Child.Comment(), store.Depth(o.Child.Path)), false)
		}
	}
	return nil
}

// session is a writer with accounts and a post of its own. After each write it reads everything
// that the tokens of its writes must show.
type session struct {
	writer
	tokens map[string]string // the newest token of each entity
	reads  int
}

const sessionComments = 40 // with the pairs and the post, the maximum that the tokens of one read may name

func (s *session) post() event.ID { return event.IDOf(100 + s.n) }

// account returns the account that the session's other users follow and are followed by.
func (s *session) account() event.ID { return s.other(0) }

// other returns the n-th of them.
func (s *session) other(n int64) event.ID { return event.IDOf(10_000 + 100*s.n + n) }

func (s *session) step() error {
	var a answer
	var err error
	var entity string
	id := s.pick(s.post())
	c := s.m.comment(id)
	want := http.StatusOK
	switch n := s.rng.IntN(12); {
	case n < 4:
		p := pair{s.account(), s.other(1 + s.rng.Int64N(10))}
		if s.rng.IntN(2) == 0 {
			p.follower, p.followee = p.followee, p.follower
		}
		was, active := s.m.follow(p).active, n < 3
		if entity = fmt.Sprint(p); active && !was {
			want = http.StatusCreated
		} else if !active {
			want = http.StatusNoContent
		}
		a, err = s.setFollow(p, active)
	case n < 5:
		entity = "thread"
		a, err = s.setThread(s.post(), thread{Locked: s.rng.IntN(6) == 0, Premoderated: s.rng.IntN(3) == 0,
			Title: fmt.Sprint("title ", s.rng.IntN(5))})
	case n < 8 && len(s.m.ids(s.post())) < sessionComments || id == "":
		parent := ""
		if s.rng.IntN(3) > 0 {
			parent = id
		}
		want = http.StatusCreated
		if s.m.thread(s.post()).Locked || parent != "" && !c.visible() {
			want = http.StatusConflict
		}
		if a, err = s.create(s.post(), s.account(), parent, false); a.status == http.StatusCreated {
			var made comment
			err = errors.Join(err, json.Unmarshal(a.body, &made))
			entity = made.ID
		}
	case n < 9:
		if entity = id; !c.visible() && !pending(c) {
			want = http.StatusConflict
		}
		a, err = s.edit(id)
	case n < 11:
		if entity = id; c.State == "DELETED" {
			want = http.StatusConflict
		}
		a, err = s.moderate(id)
	default:
		if entity, want = id, http.StatusNoContent; c.State == "DELETED" {
			want = http.StatusConflict
		}
		a, err = s.remove(id)
	}
	if a.status == http.StatusServiceUnavailable {
		return nil
	}
	if err == nil && a.status != want {
		err = fmt.Errorf("a write of its own: %d %s, want %d", a.status, a.body, want)
	}
	if err != nil {
		return err
	}
	if token := a.header.Get("Tidings-Token"); token != "" {
		s.tokens[entity] = token
	}
	var all []string
	for _, token := range s.tokens {
		all = append(all, token)
	}
	s.fresh = strings.Join(all, ",")
	c2 := s.client
	s.fresh = "" // writes accept no token
	s.reads++
	switch s.rng.IntN(6) {
	case 0:
		return equalUser(c2, s.m, s.rng, s.account())
	case 1:
		return equalAuthor(c2, s.m, s.rng, s.account())
	case 2:
		return equalRelations(c2, s.m, s.rng, []event.ID{s.account(), s.other(1), s.other(2), s.other(3)})
	}
	return equalPost(c2, s.m, s.rng, s.post(), s.rng.IntN(1000))
}
