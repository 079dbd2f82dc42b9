package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// commentKind is the kind of most tests of children.
var commentKind = kinds.Builtin().Children["comment"]

func TestMain(m *testing.M) { testkit.Main(m) }

// follows is the kind of edges of most tests.
var follows = kinds.Builtin().Edges["follow"]

const tenant = 7

func meta() store.Meta {
	return store.Meta{Actor: "tester", TraceParent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
}

type fixture struct {
	*store.Store
	system *pgxpool.Pool
}

func open(t *testing.T) fixture { return on(t, testkit.Postgres(t)) }

func on(t *testing.T, db *testkit.DB) fixture {
	t.Helper()
	return fixture{store.New(db.Pool(t, postgres.RoleAPI), nil), db.Pool(t, postgres.RoleSystem)}
}

// told is the content of an outbox message.
type told struct {
	Aggregate   string
	AggregateID event.ID
	Type        string
	Payload     map[string]any
}

// events returns the outbox's events, in the order of their ids.
func (f fixture) events(t *testing.T) []told {
	t.Helper()
	rows, _ := f.system.Query(t.Context(), `SELECT aggregate_type, aggregate_id, event_type, payload FROM outbox_messages ORDER BY id`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[told])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func (f fixture) follow(t *testing.T, a, b event.ID) store.EdgeOutcome {
	t.Helper()
	out, err := f.PutEdges(t.Context(), tenant, follows, []store.EdgeWrite{{Meta: meta(), From: a, To: b}})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func (f fixture) unfollow(t *testing.T, a, b event.ID) store.EdgeOutcome {
	t.Helper()
	out, err := f.RemoveEdges(t.Context(), tenant, follows, []store.EdgeWrite{{Meta: meta(), From: a, To: b}})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func TestFollowTransitions(t *testing.T) {
	t.Parallel()
	f := open(t)
	first := f.follow(t, "1", "2")
	if !first.Changed || first.Edge.Version != 1 || first.Edge.Status != event.StatusActive {
		t.Fatalf("first follow: %+v", first)
	}
	if again := f.follow(t, "1", "2"); again.Changed || !cmp.Equal(again.Edge, first.Edge) {
		t.Errorf("a repeated follow: got %+v, want %+v unchanged", again, first.Edge)
	}
	gone := f.unfollow(t, "1", "2")
	if !gone.Changed || gone.Edge.Version != 2 || gone.Edge.Status != event.StatusRemoved ||
		gone.Edge.PositionedAt != first.Edge.PositionedAt {
		t.Errorf("unfollow: %+v", gone)
	}
	if again := f.unfollow(t, "1", "2"); again.Changed || !cmp.Equal(again.Edge, gone.Edge) {
		t.Errorf("a repeated unfollow: got %+v, want %+v unchanged", again, gone.Edge)
	}
	back := f.follow(t, "1", "2")
	if !back.Changed || back.Edge.Version != 3 || back.Edge.CreatedAt != first.Edge.CreatedAt ||
		!back.Edge.PositionedAt.After(first.Edge.PositionedAt.Time) {
		t.Errorf("follow again: %+v: want version 3, the first created_at and a later positioned_at", back)
	}
	if never := f.unfollow(t, "8", "9"); never.Changed || never.Edge.Version != 0 {
		t.Errorf("unfollow of an unknown pair: %+v", never)
	}
	got, err := f.GetEdge(t.Context(), tenant, follows, "1", "2")
	if err != nil || !cmp.Equal(got, back.Edge) {
		t.Errorf("get: %+v, %v: want %+v", got, err, back.Edge)
	}
	if _, err := f.GetEdge(t.Context(), tenant, follows, "2", "1"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("get of an unknown pair: %v", err)
	}
	if _, err := f.GetEdge(t.Context(), tenant+1, follows, "1", "2"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("get by another tenant: %v", err)
	}

	events := f.events(t)
	if len(events) != 3 {
		t.Fatalf("%d events, want 3: %+v", len(events), events)
	}
	for i, want := range []struct {
		eventType string
		outcome   store.EdgeOutcome
	}{{event.Created, first}, {event.Removed, gone}, {event.Created, back}} {
		state := want.outcome.Edge
		state.Actor = "tester"
		raw, err := state.Encode(follows.Names())
		if err != nil {
			t.Fatal(err)
		}
		wantEvent := told{event.AggregateFollow, "2", want.eventType, asMap(t, json.RawMessage(raw))}
		if diff := cmp.Diff(wantEvent, events[i]); diff != "" {
			t.Errorf("event %d (-want +got):\n%s", i, diff)
		}
	}
	var trace string
	if err := f.system.QueryRow(t.Context(), `SELECT DISTINCT trace_id FROM outbox_messages`).Scan(&trace); err != nil ||
		trace != meta().TraceParent {
		t.Errorf("trace_id %q, %v", trace, err)
	}
}

func asMap(t *testing.T, v any) map[string]any {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestFollowOfASliceGivesEachItemItsOutcome(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.follow(t, "3", "4")
	item := func(a, b event.ID) store.EdgeWrite {
		return store.EdgeWrite{Meta: meta(), From: a, To: b}
	}
	out, err := f.PutEdges(t.Context(), tenant, follows, []store.EdgeWrite{
		item("9", "1"), item("3", "4"), item("5", "5"), item("1", "9"), item("9", "1"), item("", "1"), item("1", "a b"),
		{From: "1", To: "2"},
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, o := range out {
		got = append(got, fmt.Sprintf("%t v%d %t", o.Changed, o.Edge.Version, o.Err != nil))
	}
	want := []string{"true v1 false", "false v1 false", "false v0 true", "true v1 false", "false v1 false", "false v0 true",
		"false v0 true", "false v0 true"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}
	if !errors.Is(out[2].Err, store.ErrSelf) || !errors.Is(out[5].Err, store.ErrInvalid) || !errors.Is(out[7].Err, store.ErrInvalid) {
		t.Errorf("errors: %v, %v, %v", out[2].Err, out[5].Err, out[7].Err)
	}
	if n := len(f.events(t)); n != 3 {
		t.Errorf("%d events, want 3", n)
	}
}

func TestConcurrentTogglesLeaveOneEventPerVersion(t *testing.T) {
	t.Parallel()
	f := open(t)
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 10 {
				w := []store.EdgeWrite{{Meta: meta(), From: "1", To: "2"}, {Meta: meta(), From: "3", To: "2"}}
				if worker%2 == 1 {
					w[0], w[1] = w[1], w[0] // slices in reverse order must not deadlock
				}
				var err error
				if (worker+i)%2 == 0 {
					_, err = f.PutEdges(t.Context(), tenant, follows, w)
				} else {
					_, err = f.RemoveEdges(t.Context(), tenant, follows, w)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	versions := map[string]int64{}
	for i, e := range f.events(t) {
		who := e.Payload["follower_id"].(string)
		versions[who]++
		if v := int64(e.Payload["version"].(float64)); v != versions[who] {
			t.Fatalf("event %d of follower %s has version %d, want %d", i, who, v, versions[who])
		}
		wantType := event.Removed
		if e.Payload["status"] == event.StatusActive {
			wantType = event.Created
		}
		if e.Type != wantType {
			t.Errorf("event %d: type %s with status %s", i, e.Type, e.Payload["status"])
		}
	}
	for _, follower := range []event.ID{"1", "3"} {
		got, err := f.GetEdge(t.Context(), tenant, follows, follower, "2")
		if err != nil || got.Version != versions[fmt.Sprint(follower)] {
			t.Errorf("follower %s is at %+v, %v: want version %d", follower, got, err, versions[fmt.Sprint(follower)])
		}
	}
}

func (f fixture) create(t *testing.T, c store.NewChild) store.ChildOutcome {
	t.Helper()
	if c.Actor == "" {
		c.Meta = meta()
	}
	out, err := f.CreateChildren(t.Context(), tenant, commentKind, []store.NewChild{c})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func (f fixture) mustCreate(t *testing.T, c store.NewChild) event.Child {
	t.Helper()
	out := f.create(t, c)
	if out.Err != nil || !out.Changed {
		t.Fatalf("create %+v: %+v", c, out)
	}
	return out.Child
}

func (f fixture) edit(t *testing.T, id string, version int64, body string) store.ChildOutcome {
	t.Helper()
	out, err := f.EditChildren(t.Context(), tenant, commentKind,
		[]store.ChildEdit{{Meta: meta(), ID: id, IfVersion: version, Body: new(body)}})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func (f fixture) delete(t *testing.T, id string, version int64) store.ChildOutcome {
	t.Helper()
	out, err := f.DeleteChildren(t.Context(), tenant, commentKind, []store.ChildDelete{{Meta: meta(), ID: id, IfVersion: version}})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func (f fixture) moderation(t *testing.T, id string, version int64, state, reason string) store.ChildOutcome {
	t.Helper()
	out, err := f.ModerateChildren(t.Context(), tenant, commentKind,
		[]store.ChildModeration{{Meta: meta(), ID: id, IfVersion: version, State: state, Reason: reason}})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

// moderate sets any moderation state, also those that no moderator can set.
func (f fixture) moderate(t *testing.T, id, state string) {
	t.Helper()
	if _, err := f.system.Exec(t.Context(), `UPDATE comments SET moderation_state = $2, version = version + 1 WHERE comment_id = $1`,
		id, state); err != nil {
		t.Fatal(err)
	}
}

func (f fixture) set(t *testing.T, w store.ThreadSettings) store.ThreadOutcome {
	t.Helper()
	w.Meta = meta()
	out, err := f.SetThreads(t.Context(), tenant, commentKind, []store.ThreadSettings{w})
	if err != nil {
		t.Fatal(err)
	}
	return out[0]
}

func encoded(t *testing.T, c event.Child) []byte {
	t.Helper()
	b, err := c.Encode(commentKind.Names())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestCommentIsCreatedWithItsPlaceAndItsEvent(t *testing.T) {
	t.Parallel()
	f := open(t)
	first := f.mustCreate(t, store.NewChild{Object: "10", AuthorID: "3", Body: "  hello\n"})
	reply := f.mustCreate(t, store.NewChild{Object: "10", AuthorID: "4", ReplyTo: first.ID, Body: "hi"})
	segment := `[0-9a-f]{14}[0-9a-hjkmnp-tv-z]{8}`
	if !regexp.MustCompile(`^`+segment+`$`).MatchString(first.Path) || !strings.HasSuffix(first.Path, first.Slug) {
		t.Errorf("path %q with slug %q", first.Path, first.Slug)
	}
	if reply.Path[:len(first.Path)+1] != first.Path+"/" || store.Depth(first.Path) != 1 || store.Depth(reply.Path) != 2 {
		t.Errorf("reply at %q below %q", reply.Path, first.Path)
	}
	micros := fmt.Sprintf("%014x", first.CreatedAt.UnixMicro())
	if !strings.HasPrefix(first.Path, micros) {
		t.Errorf("path %q does not begin with the time %s", first.Path, micros)
	}
	if !reply.CreatedAt.After(first.CreatedAt.Time) || first.Body != "hello" || first.Version != 1 || first.State() != "VISIBLE" ||
		first.UpdatedAt != first.CreatedAt {
		t.Errorf("first %+v, reply %+v", first, reply)
	}
	for _, want := range []event.Child{first, reply} {
		got, err := f.GetChild(t.Context(), tenant, commentKind, want.ID)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("get (-want +got): %v\n%s", err, diff)
		}
	}
	if _, err := f.GetChild(t.Context(), tenant+1, commentKind, first.ID); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("get by another tenant: %v", err)
	}
	events := f.events(t)
	first.Actor, reply.Actor = "tester", "tester"
	want := []told{{event.AggregateComment, "10", event.Created, asMap(t, json.RawMessage(encoded(t, first)))},
		{event.AggregateComment, "10", event.Created, asMap(t, json.RawMessage(encoded(t, reply)))}}
	if diff := cmp.Diff(want, events); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestCreateRefusals(t *testing.T) {
	t.Parallel()
	f := open(t)
	ctx := t.Context()
	parent := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "parent"})
	deleted := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "deleted"})
	f.delete(t, deleted.ID, 1)
	hidden := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "hidden"})
	f.moderate(t, hidden.ID, event.ModerationHidden)
	f.set(t, store.ThreadSettings{Object: "2", Locked: true})
	f.set(t, store.ThreadSettings{Object: "3", Locked: true})
	f.set(t, store.ThreadSettings{Object: "3", Premoderated: true})
	deep := f.mustCreate(t, store.NewChild{Object: "4", AuthorID: "1", Body: "1"})
	for i := 2; i <= store.MaxDepth; i++ {
		deep = f.mustCreate(t, store.NewChild{Object: "4", AuthorID: "1", ReplyTo: deep.ID, Body: fmt.Sprint(i)})
	}
	before := len(f.events(t))
	for name, c := range map[string]struct {
		in   store.NewChild
		want error
	}{
		"no body":               {store.NewChild{Object: "1", AuthorID: "1", Body: ""}, store.ErrBodyEmpty},
		"a body of white space": {store.NewChild{Object: "1", AuthorID: "1", Body: " \t\n\u00a0"}, store.ErrBodyEmpty},
		"a body too long": {store.NewChild{Object: "1", AuthorID: "1", Body: strings.Repeat("é", store.MaxBodyBytes/2) + "x"},
			store.ErrBodyTooLong},
		"NUL in the body":      {store.NewChild{Object: "1", AuthorID: "1", Body: "a\x00b"}, store.ErrBodyText},
		"invalid UTF-8":        {store.NewChild{Object: "1", AuthorID: "1", Body: "a\xff"}, store.ErrBodyText},
		"no author":            {store.NewChild{Object: "1", Body: "x"}, store.ErrInvalid},
		"no post":              {store.NewChild{AuthorID: "1", Body: "x"}, store.ErrInvalid},
		"a post with a slash":  {store.NewChild{Object: "1/2", AuthorID: "1", Body: "x"}, store.ErrInvalid},
		"an invalid parent id": {store.NewChild{Object: "1", AuthorID: "1", Body: "x", ReplyTo: "x"}, store.ErrInvalid},
		"a key with a blank":   {store.NewChild{Object: "1", AuthorID: "1", Body: "x", Key: "a b"}, store.ErrInvalid},
		"a key too long":       {store.NewChild{Object: "1", AuthorID: "1", Body: "x", Key: strings.Repeat("k", 256)}, store.ErrInvalid},
		"an unknown parent": {store.NewChild{Object: "1", AuthorID: "1", Body: "x", ReplyTo: "00000000-0000-7000-8000-000000000000"},
			store.ErrParentUnknown},
		"a parent of another post": {store.NewChild{Object: "9", AuthorID: "1", Body: "x", ReplyTo: parent.ID}, store.ErrParentUnknown},
		"a deleted parent":         {store.NewChild{Object: "1", AuthorID: "1", Body: "x", ReplyTo: deleted.ID}, store.ErrParentGone},
		"a hidden parent":          {store.NewChild{Object: "1", AuthorID: "1", Body: "x", ReplyTo: hidden.ID}, store.ErrParentGone},
		"a locked thread":          {store.NewChild{Object: "2", AuthorID: "1", Body: "x"}, store.ErrThreadLocked},
		"below the deepest":        {store.NewChild{Object: "4", AuthorID: "1", Body: "x", ReplyTo: deep.ID}, store.ErrTooDeep},
	} {
		if c.in.Key == "" {
			c.in.Key = "refused"
		}
		if out := f.create(t, c.in); !errors.Is(out.Err, c.want) || out.Changed {
			t.Errorf("%s: got %+v, want %v", name, out, c.want)
		}
	}
	if out, err := f.CreateChildren(ctx, tenant+1, commentKind,
		[]store.NewChild{{Meta: meta(), Object: "1", AuthorID: "1", Body: "x", ReplyTo: parent.ID}}); err != nil ||
		!errors.Is(out[0].Err, store.ErrParentUnknown) {
		t.Errorf("a parent of another tenant: %+v, %v", out, err)
	}
	if after := len(f.events(t)); after != before {
		t.Errorf("%d events, want %d: refused creates make none", after, before)
	}
	var keys int
	if err := f.system.QueryRow(ctx, `SELECT count(*) FROM child_keys`).Scan(&keys); err != nil || keys != 0 {
		t.Errorf("%d keys are taken, %v: refused creates take none", keys, err)
	}
	if c := f.mustCreate(t, store.NewChild{Object: "3", AuthorID: "1", Body: "x"}); c.State() != "PENDING" {
		t.Errorf("in a premoderated thread: %s, want pending", c.State())
	}
	if c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1",
		Body: strings.Repeat("x", store.MaxBodyBytes) + "\n"}); len(c.Body) != store.MaxBodyBytes {
		t.Errorf("the longest body has %d bytes", len(c.Body))
	}
}

func TestIdempotencyKeys(t *testing.T) {
	t.Parallel()
	f := open(t)
	in := store.NewChild{Object: "1", AuthorID: "5", Body: "once", Key: "k1"}
	first := f.mustCreate(t, in)
	again := f.create(t, in)
	if again.Err != nil || !again.Replayed || again.Changed || !cmp.Equal(again.Child, first) {
		t.Errorf("replay: %+v, want %+v", again, first)
	}
	if out := f.edit(t, first.ID, 1, "twice"); !out.Changed {
		t.Fatalf("edit: %+v", out)
	}
	if out := f.delete(t, first.ID, 2); !out.Changed {
		t.Fatalf("delete: %+v", out)
	}
	if again := f.create(t, in); !again.Replayed || !cmp.Equal(again.Child, first) {
		t.Errorf("replay after edit and delete: %+v, want the first result %+v", again, first)
	}
	for name, other := range map[string]store.NewChild{
		"another body":   {Object: "1", AuthorID: "5", Body: "other", Key: "k1"},
		"another post":   {Object: "2", AuthorID: "5", Body: "once", Key: "k1"},
		"another parent": {Object: "1", AuthorID: "5", Body: "once", Key: "k1", ReplyTo: first.ID},
	} {
		if out := f.create(t, other); !errors.Is(out.Err, store.ErrKeyReused) {
			t.Errorf("%s: %+v, want ErrKeyReused", name, out)
		}
	}
	if c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "6", Body: "once", Key: "k1"}); c.ID == first.ID {
		t.Error("another author's key gave the same comment")
	}
	in.Meta = meta()
	if out, err := f.CreateChildren(t.Context(), tenant+1, commentKind, []store.NewChild{in}); err != nil || out[0].Replayed {
		t.Errorf("another tenant's key: %+v, %v", out, err)
	}
	// A slice that uses one key twice.
	a, b, c := in, in, in
	a.Key, b.Key, c.Key, c.Body = "k2", "k2", "k2", "other"
	out, err := f.CreateChildren(t.Context(), tenant, commentKind, []store.NewChild{a, b, c, in})
	if err != nil {
		t.Fatal(err)
	}
	if !out[0].Changed || !out[1].Replayed || out[1].Child.ID != out[0].Child.ID ||
		!errors.Is(out[2].Err, store.ErrKeyReused) || !out[3].Replayed {
		t.Errorf("a key twice in a slice: %+v", out)
	}
	// A key whose comment is missing fails only its own item.
	if _, err := f.system.Exec(t.Context(), `DELETE FROM children_comment WHERE child_id = $1`, out[0].Child.ID); err != nil {
		t.Fatal(err)
	}
	c.Key = "k3"
	if out, err = f.CreateChildren(t.Context(), tenant, commentKind, []store.NewChild{in, a, c}); err != nil {
		t.Fatal(err)
	}
	if !out[0].Replayed || !errors.Is(out[1].Err, store.ErrKeyOrphaned) || !out[2].Changed {
		t.Errorf("with a key whose comment is missing: %+v", out)
	}
}

func TestAReplayIsGivenThoughTheParentWentMeanwhile(t *testing.T) {
	t.Parallel()
	f := open(t)
	parent := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "parent"})
	in := store.NewChild{Object: "1", AuthorID: "2", Body: "reply", ReplyTo: parent.ID, Key: "k"}
	first := f.mustCreate(t, in)
	f.delete(t, parent.ID, 1)
	if again := f.create(t, in); !again.Replayed || !cmp.Equal(again.Child, first) {
		t.Errorf("got %+v, want the first result", again)
	}
}

func TestAPartlyRefusedSliceWritesTheRest(t *testing.T) {
	t.Parallel()
	f := open(t)
	out, err := f.CreateChildren(t.Context(), tenant, commentKind, []store.NewChild{
		{Meta: meta(), Object: "1", AuthorID: "1", Body: "a", Key: "a"},
		{Meta: meta(), Object: "1", AuthorID: "1", Body: "b", Key: "b", ReplyTo: "00000000-0000-7000-8000-000000000000"},
		{Meta: meta(), Object: "1", AuthorID: "1", Body: "c"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if !out[0].Changed || !errors.Is(out[1].Err, store.ErrParentUnknown) || !out[2].Changed {
		t.Errorf("outcomes: %+v", out)
	}
	if n := len(f.events(t)); n != 2 {
		t.Errorf("%d events, want 2", n)
	}
	f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "another", Key: "b"}) // the refused create released its key
}

func TestConcurrentEqualCreatesMakeOneComment(t *testing.T) {
	t.Parallel()
	f := open(t)
	const n = 50
	ids := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			out, err := f.CreateChildren(t.Context(), tenant, commentKind,
				[]store.NewChild{{Meta: meta(), Object: "1", AuthorID: "1", Body: "same", Key: "k"}})
			if err != nil || out[0].Err != nil {
				t.Errorf("create: %v, %+v", err, out)
				return
			}
			ids[i] = out[0].Child.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("two comments: %s and %s", id, ids[0])
		}
	}
	if events := f.events(t); len(events) != 1 {
		t.Errorf("%d events, want 1", len(events))
	}
}

func TestEdit(t *testing.T) {
	t.Parallel()
	f := open(t)
	c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "one"})
	edited := f.edit(t, c.ID, 1, " two ")
	if !edited.Changed || edited.Child.Version != 2 || edited.Child.Body != "two" || edited.Child.CreatedAt != c.CreatedAt ||
		edited.Child.Path != c.Path {
		t.Errorf("edit: %+v", edited)
	}
	if same := f.edit(t, c.ID, 2, "two"); same.Err != nil || same.Changed || !cmp.Equal(same.Child, edited.Child) {
		t.Errorf("edit to the same body: %+v", same)
	}
	if any := f.edit(t, c.ID, store.AnyVersion, "three"); !any.Changed || any.Child.Version != 3 {
		t.Errorf("edit of any version: %+v", any)
	}
	var stale *store.StaleError
	if out := f.edit(t, c.ID, 2, "four"); !errors.As(out.Err, &stale) || stale.Current.Version != 3 || stale.Current.Body != "three" {
		t.Errorf("edit of a stale version: %+v", out)
	}
	if out := f.edit(t, "00000000-0000-7000-8000-000000000000", 1, "x"); !errors.Is(out.Err, store.ErrNotFound) {
		t.Errorf("edit of an unknown comment: %+v", out)
	}
	if out := f.edit(t, c.ID, 3, " "); !errors.Is(out.Err, store.ErrBodyEmpty) {
		t.Errorf("edit to an empty body: %+v", out)
	}
	if out, err := f.EditChildren(t.Context(), tenant+1, commentKind,
		[]store.ChildEdit{{Meta: meta(), ID: c.ID, Body: new("theirs")}}); err != nil || !errors.Is(out[0].Err, store.ErrNotFound) {
		t.Errorf("edit by another tenant: %+v, %v", out, err)
	}
	var wrong *store.StateError
	for state, allowed := range map[string]bool{
		event.ModerationPending: true, event.ModerationApproved: true, event.ModerationHidden: false, event.ModerationRemoved: false,
	} {
		f.moderate(t, c.ID, state)
		out := f.edit(t, c.ID, store.AnyVersion, "while "+state)
		if allowed != (out.Err == nil) || !allowed && !errors.As(out.Err, &wrong) {
			t.Errorf("edit while %s: %+v", state, out)
		}
	}
	out, err := f.EditChildren(t.Context(), tenant, commentKind, []store.ChildEdit{
		{Meta: meta(), ID: f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "a"}).ID, IfVersion: 1, Body: new("b")},
		{Meta: meta(), ID: c.ID, IfVersion: 1, Body: new("b")},
	})
	if err != nil || !out[0].Changed || out[1].Err == nil {
		t.Errorf("a slice of edits: %+v, %v", out, err)
	}
}

func TestDelete(t *testing.T) {
	t.Parallel()
	f := open(t)
	c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "secret"})
	reply := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "reply", ReplyTo: c.ID})
	var stale *store.StaleError
	if out := f.delete(t, c.ID, 4); !errors.As(out.Err, &stale) {
		t.Errorf("delete at a stale version: %+v", out)
	}
	gone := f.delete(t, c.ID, 1)
	if !gone.Changed || gone.Child.Version != 2 || gone.Child.State() != "DELETED" {
		t.Errorf("delete: %+v", gone)
	}
	var wrong *store.StateError
	if out := f.delete(t, c.ID, 2); !errors.As(out.Err, &wrong) || wrong.Current.Version != 2 {
		t.Errorf("delete again: %+v", out)
	}
	if out := f.edit(t, c.ID, 2, "back"); !errors.As(out.Err, &wrong) {
		t.Errorf("edit of a deleted comment: %+v", out)
	}
	if kept, err := f.GetChild(t.Context(), tenant, commentKind, c.ID); err != nil || kept.Body != "secret" {
		t.Errorf("the truth keeps the body: %+v, %v", kept, err)
	}
	if left, err := f.GetChild(t.Context(), tenant, commentKind, reply.ID); err != nil || !left.Visible() {
		t.Errorf("the reply stays: %+v, %v", left, err)
	}
	hidden := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "hidden"})
	f.moderate(t, hidden.ID, event.ModerationHidden)
	if out := f.delete(t, hidden.ID, 2); !out.Changed {
		t.Errorf("delete of a hidden comment: %+v", out)
	}
	if out := f.delete(t, "00000000-0000-7000-8000-000000000000", 1); !errors.Is(out.Err, store.ErrNotFound) {
		t.Errorf("delete of an unknown comment: %+v", out)
	}
	for _, e := range f.events(t) {
		if e.Type == event.Deleted && (e.Payload["body"] != "" || e.Payload["author_state"] != event.AuthorDeleted) {
			t.Errorf("a deleted comment's event: %+v", e.Payload)
		}
	}
}

func TestConcurrentEditsOfOneVersionChangeItOnce(t *testing.T) {
	t.Parallel()
	f := open(t)
	c := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "1", Body: "one"})
	var wg sync.WaitGroup
	var mu sync.Mutex
	changed := 0
	for i := range 20 {
		wg.Go(func() {
			out, err := f.EditChildren(t.Context(), tenant, commentKind,
				[]store.ChildEdit{{Meta: meta(), ID: c.ID, IfVersion: 1, Body: new(fmt.Sprint("edit ", i))}})
			var stale *store.StaleError
			switch {
			case err != nil:
				t.Error(err)
			case out[0].Changed:
				mu.Lock()
				changed++
				mu.Unlock()
			case !errors.As(out[0].Err, &stale) || stale.Current.Version != 2:
				t.Errorf("got %+v, want a stale version", out[0])
			}
		})
	}
	wg.Wait()
	if changed != 1 || len(f.events(t)) != 2 {
		t.Errorf("%d edits changed the comment, %d events: want 1 and 2", changed, len(f.events(t)))
	}
}

// The state is written and the event is not: the outbox refuses it, or the writer leaves before the
// commit.
func TestAWriteThatFailsLeavesNothing(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	f, owner := on(t, db), db.Pool(t, postgres.RoleOwner)
	write := func(ctx context.Context) error {
		_, err := f.PutEdges(ctx, tenant, follows, []store.EdgeWrite{{Meta: meta(), From: "1", To: "2"}})
		return err
	}
	nothing := func(why string) {
		t.Helper()
		if _, err := f.GetEdge(t.Context(), tenant, follows, "1", "2"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%s: the follow exists: %v", why, err)
		}
		if n := len(f.events(t)); n != 0 {
			t.Errorf("%s: %d events", why, n)
		}
	}
	if _, err := owner.Exec(t.Context(), `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		  IF NOT EXISTS (SELECT FROM follows) THEN RAISE 'the state comes first'; END IF;
		  RAISE 'refused';
		END $$;
		CREATE TRIGGER refuse BEFORE INSERT ON outbox_messages FOR EACH ROW EXECUTE FUNCTION refuse()`); err != nil {
		t.Fatal(err)
	}
	if err := write(t.Context()); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a write whose event is refused: %v", err)
	}
	nothing("refused")
	// The event waits, and its writer leaves.
	if _, err := owner.Exec(t.Context(), `CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END $$`); err != nil {
		t.Fatal(err)
	}
	lock, err := owner.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Rollback(t.Context()) // ended below
	if _, err := lock.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1)`); err != nil {
		t.Fatal(err)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	told := make(chan error, 1)
	go func() { told <- write(ctx) }()
	testkit.Eventually(t, "the event to wait", func() (waits bool, err error) {
		err = owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock' AND wait_event = 'advisory')`).Scan(&waits)
		return waits, err
	})
	leave()
	if err := <-told; err == nil {
		t.Error("a write whose writer has left: no error")
	}
	if err := lock.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	nothing("left")
}

func TestACommitWakesThePartitionsOfItsEvents(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	var woken []int
	s := store.New(db.Pool(t, postgres.RoleAPI), func(p int) { woken = append(woken, p) })
	write := store.EdgeWrite{Meta: store.Meta{Actor: "a"}, From: "7", To: "42"}
	if _, err := s.PutEdges(t.Context(), 1, follows, []store.EdgeWrite{write}); err != nil {
		t.Fatal(err)
	}
	var slot int
	if err := db.Pool(t, postgres.RoleSystem).QueryRow(t.Context(), `SELECT slot FROM outbox_messages`).Scan(&slot); err != nil {
		t.Fatal(err)
	}
	if len(woken) != 1 || woken[0] != slot {
		t.Errorf("woken %v: want %d", woken, slot)
	}
	woken = nil
	if _, err := s.PutEdges(t.Context(), 1, follows, []store.EdgeWrite{write}); err != nil || len(woken) > 0 {
		t.Errorf("a write that changed nothing woke %v (%v)", woken, err)
	}
}
