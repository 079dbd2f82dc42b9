package demo

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/ops/load"
)

// kindsOf returns a few kinds, one of which is not built in.
func kindsOf() ([]edgeKind, []childKind) {
	edges := []edgeKind{{EdgeKind: client.EdgeKind{Name: "follow", From: user, To: user}},
		{EdgeKind: client.EdgeKind{Name: "nod", From: user, To: "comment"}},
		{EdgeKind: client.EdgeKind{Name: "badge", From: "post", To: "badge"},
			attributes: load.Schema{Properties: map[string]load.Property{"color": {Enum: []any{"red"}}}, Required: []string{"color"}}}}
	children := []childKind{{ChildKind: client.ChildKind{Name: "comment", Parent: "post", Threaded: true, Moderated: true}},
		{ChildKind: client.ChildKind{Name: "note", Parent: user}}}
	return edges, children
}

// says returns the first n acts as sentences, and runs none of them.
func says(t *testing.T, seed uint64, n int) (all []string) {
	t.Helper()
	s, err := New(Config{URL: "http://127.0.0.1:1", Token: "t", Rate: 1, Users: 50, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	s.settle(kindsOf())
	s.keep("comment", client.Child{ID: "0196b2d4-7c00-7000-8000-000000000001"})
	for range n {
		all = append(all, s.next().says)
	}
	return all
}

func TestTheSameSeedMakesTheSameChoices(t *testing.T) {
	one, same, other := strings.Join(says(t, 1, 500), "\n"), strings.Join(says(t, 1, 500), "\n"), strings.Join(says(t, 2, 500), "\n")
	if one != same || one == other {
		t.Errorf("%.300s\n\n%.300s", one, other)
	}
	for _, want := range []string{": follow of user 1", "nod of comment 0196b2d4-7c00-7000-8000-000000000001",
		"badge of badge ", "comment on post ", "note on user ", "post 6: "} {
		if !strings.Contains(one, want) {
			t.Errorf("none of 500 acts is %q", want)
		}
	}
	if strings.Contains(one, "%!") || strings.Contains(one, "thread is locked") {
		t.Errorf("%s", one)
	}
}

func TestTextsAreSentences(t *testing.T) {
	rnd := newRand(3)
	for range 1000 {
		for _, s := range []string{body(rnd), title(rnd), lure(rnd)} {
			if strings.Contains(s, "%") || strings.Contains(s, "  ") || s != strings.TrimSpace(s) || len(s) > 600 ||
				strings.ToUpper(s[:1]) != s[:1] {
				t.Fatalf("%q", s)
			}
		}
	}
}

// TestASiteThatIsNotLetInEnds: a token without a role is an error, not an outage.
func TestASiteThatIsNotLetInEnds(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/kinds" {
			_, _ = w.Write([]byte(`{"objects":[{"name":"user","plural":"users"}],"edges":[{"name":"follow","plural":"follows",` +
				`"from":"user","to":"user","ends":["follower_id","followee_id"],"forward":"following",` +
				`"reverse":"followers"}],"children":[]}`))
			return
		}
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"title":"The token lacks a role","status":403,"code":"role-missing"}`))
	}))
	defer api.Close()
	s, err := New(Config{URL: api.URL, Token: "t", Rate: 1000, Users: 10, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() { failed <- s.Run(t.Context()) }()
	select {
	case err := <-failed:
		if p, is := errors.AsType[*client.Problem](err); !is || p.Code != client.CodeRoleMissing {
			t.Errorf("%v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("Run continues")
	}
}

func TestConfigsOutOfBoundsAreRefused(t *testing.T) {
	for _, c := range []Config{{Rate: 0, Users: 10}, {Rate: 2000, Users: 10}, {Rate: 1, Users: 9}, {Rate: 1, Users: 2_000_000}} {
		if c.URL, c.Token = "http://127.0.0.1:1", "t"; c.Validate() == nil {
			t.Errorf("%+v", c)
		}
	}
	if _, err := New(Config{URL: "nowhere", Token: "t", Rate: 1, Users: 10}); err == nil {
		t.Error("New accepted a URL without a host")
	}
}
