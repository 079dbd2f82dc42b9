package endtoend_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tidings/tidings/event"
)

// client calls the API's handler for one tenant.
type client struct {
	ctx     context.Context
	handler http.Handler
	token   string // of the tenant
	fresh   string // tokens of writes that reads must include
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

// call sends a request. Headers are "Name: value".
func (c client) call(method, path, body string, headers ...string) answer {
	r := httptest.NewRequestWithContext(c.ctx, method, path, strings.NewReader(body))
	r.Header.Set("Authorization", "Bearer "+c.token)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Set(name, value)
	}
	w := httptest.NewRecorder()
	c.handler.ServeHTTP(w, r)
	return answer{w.Code, w.Header(), w.Body.Bytes()}
}

// read repeats a request while the answer is 503. A read with tokens may get 503 while a consumer
// writes the same rows.
func (c client) read(method, path, body string, into any) error {
	var headers []string
	if c.fresh != "" {
		headers = append(headers, "Tidings-Token: "+c.fresh)
	}
	for try := 0; ; try++ {
		a := c.call(method, path, body, headers...)
		if a.status == http.StatusServiceUnavailable && try < 5 {
			continue
		}
		if a.status != http.StatusOK {
			return fmt.Errorf("%s %s: %d %s", method, path, a.status, a.body)
		}
		if err := json.Unmarshal(a.body, into); err != nil {
			return fmt.Errorf("%s %s: %w", method, path, err)
		}
		return nil
	}
}

// page is a page of any list, or a document with a thread's settings.
type page[T any] struct {
	Items  []T    `json:"items"`
	Next   string `json:"next"`
	Prev   string `json:"prev"`
	Thread thread `json:"thread"`
}

// walk reads a list page by page. Every page except the last must be as long as the limit.
func walk[T any](c client, path string, limit int, settings *thread) (all []T, last page[T], err error) {
	sep := "?"
	if strings.Contains(path, "?") {
		sep = "&"
	}
	cursor := ""
	for {
		var p page[T]
		if err := c.read(http.MethodGet, fmt.Sprintf("%s%slimit=%d%s", path, sep, limit, cursor), "", &p); err != nil {
			return nil, p, err
		}
		if len(p.Items) > limit || p.Next != "" && len(p.Items) != limit {
			return nil, p, fmt.Errorf("%s: a page of %d with the limit %d", path, len(p.Items), limit)
		}
		if settings != nil && p.Thread != *settings {
			return nil, p, fmt.Errorf("%s: settings %+v, want %+v", path, p.Thread, *settings)
		}
		all = append(all, p.Items...)
		if p.Next == "" {
			return all, p, nil
		}
		if next := "&cursor=" + p.Next; next != cursor {
			cursor = next
			continue
		}
		return nil, p, fmt.Errorf("%s: a page ends where it began", path)
	}
}

func differ(what string, want, got any) error {
	if diff := gocmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		return fmt.Errorf("%s (-want +got):\n%s", what, diff)
	}
	return nil
}

// equalWalk compares a list with the expected one.
func equalWalk[T any](c client, path string, limit int, settings *thread, want []T) error {
	got, _, err := walk[T](c, path, limit, settings)
	if err != nil {
		return err
	}
	return differ(fmt.Sprintf("%s by %d", path, limit), want, got)
}

// equalPost compares everything that the API serves for a post. part selects one of postParts ways
// of reading; -1 reads in all ways.
func equalPost(c client, m *model, rng *rand.Rand, post event.ID, part int) error {
	path, settings := fmt.Sprintf("/v1/posts/%s/comments", post), m.thread(post)
	oldest, tree, ids := m.list(post, comment.visible), m.tree(post), m.ids(post)
	newest := slices.Clone(oldest)
	slices.Reverse(newest)
	limit := func() int { return 1 + rng.IntN(max(10, len(ids)/4)) }
	parts := []func() error{
		func() error { return equalWalk(c, path, min(200, limit()), &settings, oldest) },
		func() error { return equalWalk(c, path+"?order=newest", min(200, limit()), &settings, newest) },
		func() error { return equalWalk(c, path+"?order=threaded", min(200, limit()), &settings, flat(tree)) },
		func() error { // and back from the end
			n := min(200, limit())
			_, p, err := walk[comment](c, path, n, &settings)
			if err != nil {
				return err
			}
			got := p.Items
			for p.Prev != "" {
				at := fmt.Sprintf("%s?limit=%d&cursor=%s", path, n, p.Prev)
				p = page[comment]{}
				if err := c.read(http.MethodGet, at, "", &p); err != nil {
					return err
				}
				got = append(p.Items, got...)
			}
			return differ(path+" backwards", oldest, got)
		},
		func() error {
			for range 8 {
				order, want := "oldest", oldest
				if rng.IntN(2) == 0 {
					order, want = "newest", newest
				}
				skip, n := rng.IntN(len(oldest)+10), min(200, limit())
				at := fmt.Sprintf("%s?order=%s&skip=%d&limit=%d", path, order, skip, n)
				var p page[comment]
				if err := c.read(http.MethodGet, at, "", &p); err != nil {
					return err
				}
				if err := differ(at, slice(want, skip, n), p.Items); err != nil {
					return err
				}
				if more := skip+n < len(want); more != (p.Next != "") || p.Thread != settings {
					return fmt.Errorf("%s: next %q, want more: %t; settings %+v, want %+v", at, p.Next, more, p.Thread, settings)
				}
			}
			return nil
		},
		func() error {
			for range min(5, len(ids)) {
				id, n := ids[rng.IntN(len(ids))], min(200, limit())
				at := fmt.Sprintf("%s?around=%s&limit=%d", path, id, n)
				var p page[comment]
				if err := c.read(http.MethodGet, at, "", &p); err != nil {
					return err
				}
				if err := differ(at, around(oldest, m.comment(id), n), p.Items); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			var p page[comment]
			if err := c.read(http.MethodGet, path+"/tree", "", &p); err != nil {
				return err
			}
			if p.Thread != settings {
				return fmt.Errorf("%s/tree: settings %+v, want %+v", path, p.Thread, settings)
			}
			return differ(path+"/tree", tree, p.Items)
		},
		func() error {
			for range min(5, len(ids)) {
				id := ids[rng.IntN(len(ids))]
				of, _ := find(tree, id)
				if err := equalWalk(c, "/v1/comments/"+id+"/replies", min(200, limit()), &settings, flat(of.Replies)); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			for range min(8, len(ids)) {
				want := m.comment(ids[rng.IntN(len(ids))])
				var got struct {
					comment
					Thread thread `json:"thread"`
				}
				at := path + "/by-slug/" + want.Slug
				if err := c.read(http.MethodGet, at, "", &got); err != nil {
					return err
				}
				if err := errors.Join(differ(at, want, got.comment), differ(at, settings, got.Thread)); err != nil {
					return err
				}
			}
			return nil
		},
		func() error {
			type summary struct {
				Visible int    `json:"visible"`
				Total   int    `json:"total"`
				Last    string `json:"last_activity_at"`
				Thread  thread `json:"thread"`
			}
			want, got := summary{Visible: len(oldest), Total: len(ids), Thread: settings}, summary{}
			if len(oldest) > 0 {
				want.Last = newest[0].CreatedAt
			}
			at := fmt.Sprintf("/v1/posts/%s/comments/summary", post)
			return errors.Join(c.read(http.MethodGet, at, "", &got), differ(at, want, got))
		},
		func() error {
			return equalWalk(c, fmt.Sprintf("/v1/moderation/pending?post_id=%s", post), min(200, limit()), nil, m.list(post, pending))
		},
	}
	if part >= 0 {
		return parts[part%len(parts)]()
	}
	var errs []error
	for _, p := range parts {
		errs = append(errs, p())
	}
	return errors.Join(errs...)
}

func pending(c comment) bool { return c.State == "PENDING" }

// equalUser compares a user's lists and counts.
func equalUser(c client, m *model, rng *rand.Rand, user event.ID) error {
	followers, following := m.edges(user, true), m.edges(user, false)
	type counts struct {
		Followers int `json:"followers"`
		Following int `json:"following"`
	}
	var got counts
	at := fmt.Sprintf("/v1/users/%s/", user)
	return errors.Join(
		equalWalk(c, at+"followers", 1+rng.IntN(20), nil, followers),
		equalWalk(c, at+"following", 1+rng.IntN(20), nil, following),
		c.read(http.MethodGet, at+"counts", "", &got), differ(at+"counts", counts{len(followers), len(following)}, got))
}

// equalAuthor compares an author's comments in all posts.
func equalAuthor(c client, m *model, rng *rand.Rand, author event.ID) error {
	want := m.list("", func(c comment) bool { return c.visible() && c.Author == fmt.Sprint(author) })
	slices.Reverse(want)
	return equalWalk(c, fmt.Sprintf("/v1/users/%s/comments", author), 1+rng.IntN(40), nil, want)
}

// equalRelations compares all pairs of users, their counts in one answer, and mutuals of some
// pairs.
func equalRelations(c client, m *model, rng *rand.Rand, users []event.ID) error {
	type Pair struct { // exported for cmp
		Follower string `json:"follower_id"`
		Followee string `json:"followee_id"`
	}
	type relation struct {
		Pair
		Following  bool   `json:"following"`
		FollowedBy bool   `json:"followed_by"`
		At         string `json:"positioned_at"`
	}
	var pairs []Pair
	var want []relation
	for _, a := range users {
		for _, b := range users {
			if len(pairs) == 500 {
				break
			}
			i := Pair{fmt.Sprint(a), fmt.Sprint(b)}
			r := relation{Pair: i, FollowedBy: m.follow(pair{b, a}).active}
			if f := m.follow(pair{a, b}); f.active {
				r.Following, r.At = true, f.at
			}
			pairs, want = append(pairs, i), append(want, r)
		}
	}
	body, err := json.Marshal(map[string]any{"pairs": pairs})
	var got page[relation]
	errs := []error{err, c.read(http.MethodPost, "/v1/follows:check", string(body), &got), differ("check", want, got.Items)}

	type numbers struct {
		Followers int `json:"followers"`
		Following int `json:"following"`
	}
	type counts struct {
		User   string  `json:"id"`
		Counts numbers `json:"counts"`
	}
	var names []string
	var wantCounts []counts
	for _, u := range users {
		names = append(names, fmt.Sprint(u))
		wantCounts = append(wantCounts, counts{fmt.Sprint(u), numbers{len(m.edges(u, true)), len(m.edges(u, false))}})
	}
	body, err = json.Marshal(map[string]any{"ids": names})
	var gotCounts page[counts]
	errs = append(errs, err, c.read(http.MethodPost, "/v1/users:counts", string(body), &gotCounts),
		differ("counts", wantCounts, gotCounts.Items))

	for range 5 {
		a, b := users[rng.IntN(len(users))], users[rng.IntN(len(users))]
		var want []edge
		for _, e := range m.edges(a, false) {
			if slices.ContainsFunc(m.edges(b, true), func(f edge) bool { return f.User == e.User }) {
				want = append(want, e)
			}
		}
		var got page[edge]
		at := fmt.Sprintf("/v1/users/%s/mutuals/%s?limit=200", a, b)
		errs = append(errs, c.read(http.MethodGet, at, "", &got), differ(at, want, got.Items))
	}
	return errors.Join(errs...)
}

func (m *model) follow(p pair) follow {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.follows[p]
}
