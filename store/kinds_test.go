package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

// commentKind is the kind of tests that do not run for every kind.
var commentKind = kinds.Builtin().Children["comment"]

// testSet has the built-in kinds, a kind of children with every capability, and kinds of edges to
// children.
var testSet = func() *kinds.Set {
	s, err := kindfile.Extend(kinds.Builtin(), []byte(`
objects: {question: questions}
edges:
  cheer: {plural: cheers, from: user, to: answer, forward: cheered_answers, reverse: cheerers, partitions: 2}
  nod: {plural: nods, from: user, to: comment, forward: nodded_comments, reverse: nodders,
    attributes: {value: {enum: [-1, 1], required: true}}}
children:
  answer:
    plural: answers
    parent: question
    threaded: true
    moderated: true
    one_per_author: true
    partitions: 3
    attributes:
      score: {type: integer, aggregate: true}
      draft: {type: boolean, default: false}
`))
	if err != nil {
		panic(err)
	}
	return s
}()

// eachKind runs the test for several kinds of children: a threaded and moderated one, a flat one,
// one with attributes and one child per author, and one with every capability in hash partitions.
func eachKind(t *testing.T, test func(t *testing.T, f kindFixture)) {
	t.Helper()
	for _, k := range testSet.AllChildren() {
		t.Run(k.Name, func(t *testing.T) {
			db := testkit.Postgres(t)
			makeKinds(t, db, testSet)
			test(t, kindFixture{Store: New(db.Pool(t, postgres.RoleAPI), nil), t: t, db: db, k: k})
		})
	}
}

type kindFixture struct {
	*Store
	t  *testing.T
	db *testkit.DB
	k  kinds.Child
}

var tester = Meta{Actor: "tester"}

// attributes returns valid attributes of the kind, which differ by n.
func (f kindFixture) attributes(n int) json.RawMessage {
	switch f.k.Name {
	case "review":
		return json.RawMessage(fmt.Sprintf(`{"rating": %d}`, 1+n%5))
	case "answer":
		return json.RawMessage(fmt.Sprintf(`{"score": %d}`, n))
	}
	return nil
}

// create writes a child, each by another author unless the test sets one.
func (f kindFixture) create(c NewChild) ChildOutcome {
	f.t.Helper()
	c.Meta, c.Attributes = tester, f.attributes(1)
	out, err := f.CreateChildren(f.t.Context(), 1, f.k, []NewChild{c})
	if err != nil {
		f.t.Fatal(err)
	}
	return out[0]
}

func (f kindFixture) must(o ChildOutcome) event.Child {
	f.t.Helper()
	if o.Err != nil {
		f.t.Fatal(o.Err)
	}
	return o.Child
}

func TestAChildOfEveryKindIsWrittenReadAndErased(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, f kindFixture) {
		ctx := t.Context()
		c := f.must(f.create(NewChild{Object: "5", AuthorID: "7", Body: " first ", Key: "k"}))
		if c.Body != "first" || c.Version != 1 || c.Parent != "5" || (c.Path != "") != f.k.Threaded || (c.Slug != "") != f.k.Threaded ||
			(c.Attributes != nil) != (len(f.k.Attributes) > 0) {
			t.Errorf("created: %+v", c)
		}
		if again := f.create(NewChild{Object: "5", AuthorID: "7", Body: "first", Key: "k"}); !again.Replayed ||
			cmp.Diff(c, again.Child) != "" {
			t.Errorf("replayed: %+v, want %+v", again, c)
		}
		if again := f.create(NewChild{Object: "5", AuthorID: "7", Body: "another", Key: "k"}); !errors.Is(again.Err, ErrKeyReused) {
			t.Errorf("the key with another body: %+v", again)
		}
		edit := ChildEdit{Meta: tester, ID: c.ID, IfVersion: 1, Body: new("second"), Attributes: f.attributes(2)}
		out, err := f.EditChildren(ctx, 1, f.k, []ChildEdit{edit})
		if err != nil || out[0].Err != nil || out[0].Child.Version != 2 || out[0].Child.Body != "second" {
			t.Fatalf("edited: %+v, %v", out, err)
		}
		if string(out[0].Child.Attributes) == string(c.Attributes) && c.Attributes != nil {
			t.Errorf("the attributes are still %s", c.Attributes)
		}
		edit.IfVersion = AnyVersion
		if out, err = f.EditChildren(ctx, 1, f.k, []ChildEdit{edit}); err != nil || out[0].Changed || out[0].Err != nil {
			t.Errorf("edit without a change: %+v, %v", out, err)
		}
		if c.Attributes != nil { // only the attributes; one of them is unknown to the kind
			out, err = f.EditChildren(ctx, 1, f.k, []ChildEdit{{Meta: tester, ID: c.ID, Attributes: f.attributes(3)},
				{Meta: tester, ID: c.ID, Attributes: json.RawMessage(`{"no": 1}`)}})
			var wrong *kinds.AttributeError
			if err != nil || out[0].Child.Version != 3 || out[0].Child.Body != "second" || !errors.As(out[1].Err, &wrong) {
				t.Errorf("attributes: %+v, %v, %v", out[0], out[1].Err, err)
			}
		}
		decided, err := f.ModerateChildren(ctx, 1, f.k, []ChildModeration{{Meta: tester, ID: c.ID, State: event.ModerationHidden}})
		if err != nil || (decided[0].Err == nil) != f.k.Moderated {
			t.Errorf("moderated: %+v, %v", decided, err)
		}
		if f.k.Moderated {
			c := decided[0].Child
			if payload := f.lastEvent(); payload.Body != "" || payload.Attributes != nil || payload.Version != c.Version {
				t.Errorf("the event of a hidden child has %+v", payload)
			}
		}
		n, err := New(f.db.Pool(t, postgres.RoleSystem), nil).EraseChildren(ctx, 1, f.k, testSet.EdgesTo(f.k.Name), []string{c.ID}, false,
			tester, (&free{}).Fence)
		got, err2 := f.GetChild(ctx, 1, f.k, c.ID)
		if n != 1 || err != nil || err2 != nil || got.State() != "ERASED" || got.Body != "" || got.Attributes != nil {
			t.Errorf("erased %d: %+v, %v", n, got, errors.Join(err, err2))
		}
		if _, err := f.GetChild(ctx, 2, f.k, c.ID); !errors.Is(err, ErrNotFound) {
			t.Errorf("another tenant reads it: %v", err)
		}
		if out, err := f.DeleteChildren(ctx, 2, f.k, []ChildDelete{{Meta: tester, ID: c.ID}}); err != nil ||
			!errors.Is(out[0].Err, ErrNotFound) {
			t.Errorf("another tenant deletes it: %+v, %v", out, err)
		}
	})
}

// lastEvent is the payload of the newest event.
func (f kindFixture) lastEvent() event.Child {
	f.t.Helper()
	e := event.Event{TenantID: 1, AggregateType: f.k.Name, Version: 1}
	err := f.db.Pool(f.t, postgres.RoleSystem).QueryRow(f.t.Context(),
		`SELECT aggregate_id, event_type, payload FROM outbox_messages WHERE aggregate_type = $1 ORDER BY id DESC LIMIT 1`, f.k.Name).
		Scan(&e.AggregateID, &e.Type, &e.Payload)
	if err != nil {
		f.t.Fatal(err)
	}
	c, err := e.DecodeChild(f.k.Names())
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

func TestOnlyThreadedKindsHaveReplies(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, f kindFixture) {
		first := f.must(f.create(NewChild{Object: "5", AuthorID: "7", Body: "first"}))
		reply := f.create(NewChild{Object: "5", AuthorID: "8", ReplyTo: first.ID, Body: "reply"})
		switch {
		case f.k.Threaded && (reply.Err != nil || Depth(reply.Child.Path) != 2 || !strings.HasPrefix(reply.Child.Path, first.Path+"/")):
			t.Errorf("a reply: %+v", reply)
		case !f.k.Threaded && !errors.Is(reply.Err, ErrInvalid):
			t.Errorf("a reply in a flat kind: %+v", reply)
		}
	})
}

// Of many concurrent creates for one author's place one succeeds, and each other gets that child. A
// deletion frees the place.
func TestAnAuthorHasOneChildOfAnObjectWhereTheKindSaysSo(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, f kindFixture) {
		const tries = 24
		outs := make([]ChildOutcome, tries)
		other := New(f.db.Pool(t, postgres.RoleAPI), nil) // another process: its lanes are its own
		var wg sync.WaitGroup
		for i := range tries {
			wg.Go(func() {
				s := f.Store
				if i%2 == 0 {
					s = other
				}
				c := NewChild{Meta: tester, Object: "5", AuthorID: "7", Body: fmt.Sprint("try ", i), Attributes: f.attributes(i)}
				if i%3 == 0 {
					c.Key = fmt.Sprint("key", i)
				}
				out, err := s.CreateChildren(t.Context(), 1, f.k, []NewChild{c})
				if err != nil {
					t.Error(err)
					return
				}
				outs[i] = out[0]
			})
		}
		wg.Wait()
		if t.Failed() {
			return
		}
		var made []event.Child
		for _, o := range outs {
			if o.Err == nil {
				made = append(made, o.Child)
			}
		}
		if !f.k.OnePerAuthor {
			if len(made) != tries {
				t.Errorf("%d of %d were made", len(made), tries)
			}
			return
		}
		if len(made) != 1 {
			t.Fatalf("%d were made, want one", len(made))
		}
		for i, o := range outs {
			var taken *TakenError
			if o.Err != nil && (!errors.As(o.Err, &taken) || taken.Child.ID != made[0].ID) {
				t.Errorf("try %d: %v", i, o.Err)
			}
		}
		// Two of one batch: the first gets the place. Another author, and another object, have
		// places of their own.
		out, err := f.CreateChildren(t.Context(), 1, f.k, []NewChild{
			{Meta: tester, Object: "6", AuthorID: "7", Body: "a", Attributes: f.attributes(1)},
			{Meta: tester, Object: "6", AuthorID: "7", Body: "b", Attributes: f.attributes(1)},
			{Meta: tester, Object: "5", AuthorID: "8", Body: "c", Attributes: f.attributes(1)}})
		var taken *TakenError
		if err != nil || out[0].Err != nil || out[2].Err != nil || !errors.As(out[1].Err, &taken) || taken.Child.ID != out[0].Child.ID {
			t.Fatalf("a batch: %+v, %v", out, err)
		}
		// Creates for one place keep their order, whatever their keys. The second waits for the key
		// of the first, and the third for its place.
		out2, err := f.CreateChildren(t.Context(), 1, f.k, []NewChild{
			{Meta: tester, Object: "6", AuthorID: "7", Body: "refused", Attributes: f.attributes(1), Key: "one"},
			{Meta: tester, Object: "9", AuthorID: "7", Body: "first", Attributes: f.attributes(1), Key: "one"},
			{Meta: tester, Object: "9", AuthorID: "7", Body: "second", Attributes: f.attributes(1)}})
		if err != nil || out2[0].Err == nil || out2[1].Err != nil || !errors.As(out2[2].Err, &taken) || taken.Child.ID != out2[1].Child.ID {
			t.Errorf("a batch for one place: %+v, %v", out2, err)
		}
		// A key whose create was refused is free again.
		refused := f.create(NewChild{Object: "6", AuthorID: "7", Body: "later", Key: "later"})
		if !errors.As(refused.Err, &taken) {
			t.Errorf("a second one: %+v", refused)
		}
		if gone, err := f.DeleteChildren(t.Context(), 1, f.k, []ChildDelete{{Meta: tester, ID: out[0].Child.ID}}); err != nil ||
			gone[0].Err != nil {
			t.Fatal(gone, err)
		}
		again := f.must(f.create(NewChild{Object: "6", AuthorID: "7", Body: "later", Key: "later"}))
		if again.ID == out[0].Child.ID {
			t.Error("the place is not free")
		}
		// A retry with the key returns its child, although that child holds the place.
		if replay := f.create(NewChild{Object: "6", AuthorID: "7", Body: "later", Key: "later"}); !replay.Replayed ||
			replay.Child.ID != again.ID {
			t.Errorf("the key again: %+v", replay)
		}
	})
}

func TestThreadsOfEveryKindAreShelvedAndComeBack(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, f kindFixture) {
		ctx := t.Context()
		system := f.db.Pool(t, postgres.RoleSystem)
		var ids []string
		for author := range int64(7) {
			ids = append(ids, f.must(f.create(NewChild{Object: "5", AuthorID: event.IDOf(author + 1), Body: "text"})).ID)
		}
		before, err := f.GetChild(ctx, 1, f.k, ids[3])
		if err != nil {
			t.Fatal(err)
		}
		after := func(context.Context) (time.Duration, error) { return time.Microsecond, nil }
		shelver, err := NewShelver(system, after, func() *kinds.Set { return testSet }, testkit.Logger(t), nil)
		if err != nil {
			t.Fatal(err)
		}
		shelver.moveRows = 3
		if plan, err := shelver.Plan(ctx); err != nil || plan[CountThreadsShelved] != 1 || plan[CountCommentsShelved] != 7 {
			t.Errorf("plan %v, %v", plan, err)
		}
		check := func(want int64) {
			t.Helper()
			if n, err := CheckShelving(ctx, system, testSet, func(flaw ShelvingFlaw) { t.Errorf("%+v", flaw) }); err != nil || n != want {
				t.Errorf("%d shelved, %v, want %d", n, err, want)
			}
		}
		if err := shelver.Run(ctx, &free{}); err != nil {
			t.Fatal(err)
		}
		check(7)
		if got, err := f.GetChild(ctx, 1, f.k, ids[3]); err != nil || cmp.Diff(before, got) != "" {
			t.Errorf("shelved: %+v, %v", got, err)
		}
		var mine []string
		if err := f.AuthorChildren(ctx, 1, f.k, "4", func(all []AuthorChild) error {
			for _, c := range all {
				mine = append(mine, c.ID)
			}
			return nil
		}); err != nil || !slices.Equal(mine, ids[3:4]) {
			t.Errorf("of author 4: %v, %v", mine, err)
		}
		second := f.create(NewChild{Object: "5", AuthorID: "1", Body: "late"}) // brings it back
		var taken *TakenError
		if (second.Err == nil) == f.k.OnePerAuthor || f.k.OnePerAuthor && (!errors.As(second.Err, &taken) || taken.Child.ID != ids[0]) {
			t.Errorf("a late one: %+v", second)
		}
		check(0)
		if got, err := f.GetChild(ctx, 1, f.k, ids[3]); err != nil || cmp.Diff(before, got) != "" {
			t.Errorf("back: %+v, %v", got, err)
		}
		if err := shelver.Run(ctx, &free{}); err != nil {
			t.Fatal(err)
		}
		var archive int64
		if err := system.QueryRow(ctx, `SELECT max(archive_id) FROM archived_threads WHERE state <> 'RETURNED'`).Scan(
			&archive); err != nil {
			t.Fatal(err)
		}
		if threads, _, err := shelver.Undo(ctx, &free{}, archive); threads != 1 || err != nil {
			t.Errorf("undone: %d, %v", threads, err)
		}
		check(0)
	})
}

func TestSettingsOfThreadsOfTwoKindsAreApart(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	makeKinds(t, db, testSet)
	s, ctx := New(db.Pool(t, postgres.RoleAPI), nil), t.Context()
	answer := testSet.Children["answer"]
	out, err := s.SetThreads(ctx, 1, answer, []ThreadSettings{{Meta: tester, Object: "5", Locked: true}})
	if err != nil || out[0].Err != nil || !out[0].Changed {
		t.Fatal(out, err)
	}
	create := func(k kinds.Child) error {
		out, err := s.CreateChildren(ctx, 1, k, []NewChild{{Meta: tester, Object: "5", AuthorID: "7", Body: "text"}})
		return errors.Join(err, out[0].Err)
	}
	if err := create(answer); !errors.Is(err, ErrThreadLocked) {
		t.Errorf("in the locked thread: %v", err)
	}
	if err := create(commentKind); err != nil {
		t.Errorf("in the other kind's thread: %v", err)
	}
	if got, err := s.GetThread(ctx, 1, commentKind, "5"); err != nil || got.Version != 0 || got.Locked {
		t.Errorf("%+v, %v", got, err)
	}
	plain := testSet.Children["message"]
	plain.Moderated = false
	if out, err := s.SetThreads(ctx, 1, plain,
		[]ThreadSettings{{Meta: tester, Object: "5", Locked: true}}); err != nil || !errors.Is(out[0].Err, ErrInvalid) {
		t.Errorf("of a kind that is not moderated: %+v, %v", out, err)
	}
	if versions, err := s.ThreadVersions(ctx, 1, answer, "5", 1<<62, 10); err != nil || len(versions) != 1 ||
		versions[0].Object.Kind != "answer" {
		t.Errorf("%+v, %v", versions, err)
	}
}

// Measures the cost of the row-level policy for events of direct SQL writers.
func TestWhatThePolicyOfWritersCosts(t *testing.T) {
	db := testkit.Postgres(t)
	makeKinds(t, db, testSet)
	s, ctx := New(db.Pool(t, postgres.RoleAPI), nil), t.Context()
	out, err := s.CreateChildren(ctx, 1, commentKind, []NewChild{{Meta: tester, Object: "5", AuthorID: "7", Body: "text"}})
	if err != nil {
		t.Fatal(err)
	}
	payload, err := out[0].Child.Encode(commentKind.Names())
	if err != nil {
		t.Fatal(err)
	}
	const rows = 5000
	for _, kind := range []string{"comment", "like"} {
		for _, role := range []postgres.Role{postgres.RoleSystem, postgres.RoleWriter} {
			err := postgres.InTx(ctx, db.Pool(t, role), pgx.TxOptions{}, func(tx pgx.Tx) error {
				begin := time.Now()
				_, err := tx.Exec(ctx, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
					SELECT 1, $1, 5, 'edited', $2 FROM generate_series(1, $3)`, kind, payload, rows)
				t.Logf("%s, %s: %s a row", kind, role, time.Since(begin)/rows)
				return err
			})
			if err != nil {
				t.Errorf("%s of %s: %v", role, kind, err)
			}
		}
	}
}

// TestMergesOfAttributesLoseNone changes two attributes of the same children at once, in groups of
// different order. Each change merges with the present attributes, so none is lost. An invalid
// attribute is refused alone.
func TestMergesOfAttributesLoseNone(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	makeKinds(t, db, testSet)
	s, k := New(db.Pool(t, postgres.RoleAPI), nil), testSet.Children["answer"]
	const children, rounds = 10, 20
	var ids []string
	for author := range children {
		out, err := s.CreateChildren(t.Context(), 1, k, []NewChild{{Meta: tester, Object: "5", AuthorID: event.IDOf(author + 1), Body: "x",
			Attributes: json.RawMessage(`{"score":0}`)}})
		if err != nil || out[0].Err != nil {
			t.Fatal(out, err)
		}
		ids = append(ids, out[0].Child.ID)
	}
	var g errgroup.Group
	for worker := range 4 {
		g.Go(func() error {
			for round := range rounds {
				var edits []ChildEdit
				for n := range children {
					change := fmt.Sprintf(`{"score":%d}`, round+1)
					if worker%2 == 1 {
						n, change = children-1-n, fmt.Sprintf(`{"draft":%t}`, round%2 == 1)
					}
					edits = append(edits, ChildEdit{Meta: tester, ID: ids[n], Attributes: json.RawMessage(change)})
				}
				out, err := s.EditChildren(t.Context(), 1, k, append(edits,
					ChildEdit{Meta: tester, ID: ids[0], Attributes: json.RawMessage(`{"score":"x"}`)},
					ChildEdit{Meta: tester, ID: ids[1], Attributes: json.RawMessage(`{"score":1}`), IfVersion: 1 << 40}))
				if err != nil {
					return err
				}
				var unfit *kinds.AttributeError
				var stale *StaleError
				if !errors.As(out[children].Err, &unfit) || !errors.As(out[children+1].Err, &stale) {
					return fmt.Errorf("invalid attributes: %v, %v", out[children].Err, out[children+1].Err)
				}
				for _, o := range out[:children] {
					if o.Err != nil {
						return o.Err
					}
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if c, err := s.GetChild(t.Context(), 1, k, id); err != nil ||
			string(c.Attributes) != fmt.Sprintf(`{"draft":true,"score":%d}`, rounds) {
			t.Errorf("%s, %v", c.Attributes, err)
		}
	}
}

// narrowSet has objects whose ids have one form.
func narrowSet(t *testing.T) *kinds.Set {
	return testkit.Kinds(t, `
objects: {song: {plural: songs, id: uuid}, disc: {plural: discs, id: integer}}
edges: {spin: {plural: spins, from: disc, to: song, forward: spun, reverse: spinners}}
children: {remark: {plural: remarks, parent: song, moderated: true}}
`)
}

const songID = "0196b2d4-7c00-7000-8000-00000000000a"

func TestIDsOfAnotherFormAreInvalidEachForItself(t *testing.T) {
	t.Parallel()
	db, set := testkit.Postgres(t), narrowSet(t)
	makeKinds(t, db, set)
	s, by := New(db.Pool(t, postgres.RoleAPI), nil), Meta{Actor: "t"}
	spin, remark := set.Edges["spin"], set.Children["remark"]
	writes := []EdgeWrite{{Meta: by, From: "8", To: songID}, {Meta: by, From: "8", To: "8"}, {Meta: by, From: songID, To: songID},
		{Meta: by, From: "08", To: songID}, {Meta: by, From: "9", To: songID}}
	for _, write := range []func(context.Context, int64, kinds.Edge, []EdgeWrite) ([]EdgeOutcome, error){s.PutEdges, s.RemoveEdges} {
		out, err := write(t.Context(), 1, spin, writes)
		if err != nil {
			t.Fatal(err)
		}
		for i, o := range out {
			if good := i == 0 || i == 4; good != o.Changed || errors.Is(o.Err, ErrInvalid) == good {
				t.Errorf("%d: %+v", i, o)
			}
		}
	}
	children, err := s.CreateChildren(t.Context(), 1, remark, []NewChild{{Meta: by, Object: "8", AuthorID: "a", Body: "x"},
		{Meta: by, Object: songID, AuthorID: "a|b", Body: "x"}})
	if err != nil || !errors.Is(children[0].Err, ErrInvalid) || !children[1].Changed {
		t.Errorf("%+v, %v", children, err)
	}
	settings, err := s.SetThreads(t.Context(), 1, remark, []ThreadSettings{{Meta: by, Object: "8", Locked: true},
		{Meta: by, Object: songID, Locked: true}})
	if err != nil || !errors.Is(settings[0].Err, ErrInvalid) || !settings[1].Changed {
		t.Errorf("%+v, %v", settings, err)
	}
	r := RemovalRequest{Meta: by, Object: "song", ID: "8", IDs: kinds.UUID, Kinds: []string{"spin"}, Direction: DirectionBoth}
	if _, err := s.RequestRemoval(t.Context(), 1, r); !errors.Is(err, ErrInvalid) {
		t.Errorf("a removal: %v", err)
	}
}

// For up to five seconds after kinds apply, a process has the former kinds.
func TestAnIDThatWasNarrowedAMomentAgoIsInvalidToo(t *testing.T) {
	t.Parallel()
	db, set := testkit.Postgres(t), narrowSet(t)
	makeKinds(t, db, set)
	s, by := New(db.Pool(t, postgres.RoleAPI), nil), Meta{Actor: "t"}
	spin, remark := set.Edges["spin"], set.Children["remark"]
	spin.FromIDs, spin.ToIDs, remark.ParentIDs = kinds.String, kinds.String, kinds.String
	good := EdgeWrite{Meta: by, From: "8", To: songID}
	if out, err := s.PutEdges(t.Context(), 1, spin, []EdgeWrite{{Meta: by, From: "x", To: songID}}); !errors.Is(err, ErrInvalid) {
		t.Errorf("alone: %+v, %v", out, err)
	}
	if out, err := s.PutEdges(t.Context(), 1, spin, []EdgeWrite{good, {Meta: by, From: "8", To: "8"}}); !errors.Is(err, ErrInvalid) {
		t.Errorf("in a slice: %+v, %v", out, err)
	}
	out, err := s.CreateChildren(t.Context(), 1, remark, []NewChild{{Meta: by, Object: "8", AuthorID: "a", Body: "x"}})
	if !errors.Is(err, ErrInvalid) {
		t.Errorf("a child: %+v, %v", out, err)
	}
	if out, err := s.PutEdges(t.Context(), 1, spin, []EdgeWrite{good}); err != nil || !out[0].Created {
		t.Errorf("a good one afterward: %+v, %v", out, err)
	}
}
