package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// free is a lease that everybody holds at all times.
type free struct {
	mu     sync.Mutex
	counts map[string]int64
}

func (*free) Fence(context.Context, pgx.Tx) error { return nil }
func (*free) Continue() error                     { return nil }

func (f *free) Count(what string, n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.counts == nil {
		f.counts = map[string]int64{}
	}
	f.counts[what] += n
}

// shelved is a Store with a Shelver, which shelves after a microsecond of quiet and moves few
// comments at a time.
type shelved struct {
	*Store
	t       *testing.T
	db      *testkit.DB
	system  *pgxpool.Pool
	shelver *Shelver
}

func openShelved(t *testing.T) shelved {
	t.Helper()
	db := testkit.Postgres(t)
	a := shelved{Store: New(db.Pool(t, postgres.RoleAPI), nil), t: t, db: db, system: db.Pool(t, postgres.RoleSystem)}
	a.Store.moveRows = 3
	a.shelver = a.newShelver()
	return a
}

// comments are the kinds of these shelvers. There is only one, because a run takes the kinds in
// random order.
func comments() *kinds.Set {
	return &kinds.Set{Children: map[string]kinds.Child{commentKind.Name: commentKind}}
}

func (a shelved) newShelver() *Shelver {
	a.t.Helper()
	var shelver *Shelver
	shelver, err := NewShelver(a.system, func(context.Context) (time.Duration, error) { return shelver.after, nil }, comments,
		testkit.Logger(a.t), nil)
	if err != nil {
		a.t.Fatal(err)
	}
	shelver.after, shelver.walkPage, shelver.moveRows = time.Microsecond, 2, 3
	return shelver
}

func (a shelved) run() map[string]int64 {
	a.t.Helper()
	hold := &free{}
	if err := a.shelver.Run(a.t.Context(), hold); err != nil {
		a.t.Fatal(err)
	}
	return hold.counts
}

// thread makes n comments of a post. Each replies to the one before, except every fourth.
func (a shelved) thread(tenant int64, post event.ID, n int) (ids []string) {
	a.t.Helper()
	for i := range n {
		c := NewChild{Meta: Meta{Actor: "tester"}, Object: post, AuthorID: event.IDOf(i%3 + 1), Body: fmt.Sprint("comment ", i),
			Key: fmt.Sprint(post, "/", i)}
		if i%4 > 0 {
			c.ReplyTo = ids[i-1]
		}
		out, err := a.CreateChildren(a.t.Context(), tenant, commentKind, []NewChild{c})
		if err != nil || out[0].Err != nil {
			a.t.Fatal(err, out)
		}
		ids = append(ids, out[0].Child.ID)
	}
	return ids
}

// places returns how many comments of each thread are in each table, and the newest stub's state:
// "1/5 3+0 RETURNED" for three that are not shelved.
func (a shelved) places() string {
	a.t.Helper()
	rows, _ := a.system.Query(a.t.Context(), `
		SELECT concat_ws(' ', tenant_id || '/' || object_id, sum(here) || '+' || sum(there),
		       (SELECT state FROM archived_threads a WHERE a.tenant_id = c.tenant_id AND a.kind = c.kind AND a.object_id = c.object_id
		       ORDER BY archive_id DESC LIMIT 1))
		  FROM (SELECT tenant_id, kind, object_id, 1 AS here, 0 AS there FROM children UNION ALL SELECT tenant_id, kind, object_id, 0, 1
		  FROM children_archive) c
		 GROUP BY tenant_id, kind, object_id ORDER BY tenant_id, kind, object_id`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		a.t.Fatal(err)
	}
	return strings.Join(all, ", ")
}

func (a shelved) check() {
	a.t.Helper()
	if _, err := CheckShelving(a.t.Context(), a.system, kinds.Builtin(),
		func(f ShelvingFlaw) { a.t.Errorf("tenant %d, post %s: %s", f.TenantID, f.ObjectID, f.Rule) }); err != nil {
		a.t.Error(err)
	}
}

func (a shelved) want(want string) {
	a.t.Helper()
	if got := a.places(); got != want {
		a.t.Errorf("places: %s, want %s", got, want)
	}
	a.check()
}

func TestACheckOfShelvedThreadsReadsPagesAndFindsEveryFlaw(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	ctx := t.Context()
	for post := range int64(6) {
		a.thread(1+post%2, event.IDOf(10+post), 3)
	}
	a.run()
	owner := a.db.Pool(t, postgres.RoleOwner)
	exec := func(sql string) {
		t.Helper()
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	// A thread of more than two pages, every way in which a rule can be broken, and a stub of
	// another kind.
	columns := `tenant_id, kind, object_id, author_id, body, author_state, moderation_state, version, created_at, updated_at, slug, path`
	exec(`INSERT INTO children_archive (child_id, ` + columns + `)
	  SELECT gen_random_uuid(), 1, 'comment', 50, 1, 'b', 'ACTIVE', 'NONE', 1, now(), now(), lpad(g::text, 22, '0'), lpad(g::text, 22, '0')
	    FROM generate_series(1, 9000) g`)
	exec(`INSERT INTO archived_threads (archive_id, tenant_id, kind, object_id, state, children)
		VALUES (90, 1, 'comment', 50, 'ARCHIVED', 9000), (91, 1, 'comment', 60, 'ARCHIVED', 2),
	  (92, 1, 'review', 12, 'ARCHIVED', 2)`)
	exec(`DELETE FROM archived_threads WHERE (tenant_id, object_id) = (1, '12') AND kind = 'comment'`)
	exec(`UPDATE archived_threads SET children = 4 WHERE object_id = '13'`)
	exec(`INSERT INTO children (child_id, ` + columns + `) SELECT child_id, ` + columns +
		` FROM children_archive WHERE object_id = '15' AND path = (SELECT min(path) FROM children_archive WHERE object_id = '15')`)
	a.db.RowsPerStatement(t, 2*scanRows, "children", "children_archive", "children_archive_comment", "children_comment")
	var got []string
	n, err := CheckShelving(ctx, a.system, kinds.Builtin(), func(f ShelvingFlaw) {
		got = append(got, fmt.Sprint(f.Kind, " ", f.TenantID, "/", f.ObjectID, " ", f.Rule))
	})
	slices.Sort(got)
	want := []string{"comment 1/12 shelved comments have no stub", "comment 1/60 shelved comments are missing",
		"comment 2/13 shelved comments are missing", "comment 2/15 a comment is both on the shelf and off it",
		"comment 2/15 a shelved thread has comments off the shelf", "review 1/12 shelved reviews are missing"}
	if err != nil || n != 9018 || !slices.Equal(got, want) {
		t.Errorf("%d shelved, %v, flaws:\n%s", n, err, strings.Join(got, "\n"))
	}
}

func TestAShelvedThreadIsReadAsItIsAndComesBackWithTheFirstWrite(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	ctx, m := t.Context(), Meta{Actor: "tester"}
	ids := a.thread(1, "5", 8)
	theirs := a.thread(2, "5", 2) // of another tenant
	before := map[string]event.Child{}
	for _, id := range ids {
		var err error
		if before[id], err = a.GetChild(ctx, 1, commentKind, id); err != nil {
			t.Fatal(err)
		}
	}
	states, err := a.States(ctx, 1, kinds.Builtin(), []event.Ref{{Type: event.AggregateComment, Child: ids[0]},
		{Type: event.AggregateComment, Child: ids[1]}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]int64{CountThreadsShelved: 2, CountCommentsShelved: 10}, a.run()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	a.want("1/5 0+8 ARCHIVED, 2/5 0+2 ARCHIVED")

	var state *StateError
	var stale *StaleError
	last := ids[7]
	unchanged := func(name string, write func() ([]ChildOutcome, error), ok func(ChildOutcome) bool) {
		t.Helper()
		out, err := write()
		if err != nil || !ok(out[0]) {
			t.Errorf("%s: %+v, %v", name, out, err)
		}
		a.want("1/5 0+8 ARCHIVED, 2/5 0+2 ARCHIVED")
	}
	unchanged("reads", func() ([]ChildOutcome, error) {
		for id, want := range before {
			if got, err := a.GetChild(ctx, 1, commentKind, id); err != nil || !cmp.Equal(got, want) {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
			if _, err := a.GetChild(ctx, 2, commentKind, id); !errors.Is(err, ErrNotFound) {
				t.Errorf("another tenant got %v", err)
			}
		}
		got, err := a.States(ctx, 1, kinds.Builtin(), []event.Ref{{Type: event.AggregateComment, Child: ids[0]},
			{Type: event.AggregateComment, Child: ids[1]}})
		if len(got) != 2 || len(states) != 2 || err != nil {
			t.Errorf("%d states, %v", len(got), err)
		}
		return []ChildOutcome{{}}, nil
	}, func(ChildOutcome) bool { return true })
	unchanged("a create with a key of before", func() ([]ChildOutcome, error) {
		return a.CreateChildren(ctx, 1, commentKind, []NewChild{{Meta: m, Object: "5", AuthorID: "2", ReplyTo: ids[0],
			Body: "comment 1", Key: "5/1"}})
	}, func(o ChildOutcome) bool { return o.Replayed && cmp.Equal(o.Child, before[ids[1]]) })
	unchanged("another create with that key", func() ([]ChildOutcome, error) {
		return a.CreateChildren(ctx, 1, commentKind, []NewChild{{Meta: m, Object: "5", AuthorID: "2", ReplyTo: ids[0],
			Body: "another", Key: "5/1"}})
	}, func(o ChildOutcome) bool { return errors.Is(o.Err, ErrKeyReused) })
	unchanged("a stale edit", func() ([]ChildOutcome, error) {
		return a.EditChildren(ctx, 1, commentKind, []ChildEdit{{Meta: m, ID: last, IfVersion: 2, Body: new("x")}})
	}, func(o ChildOutcome) bool { return errors.As(o.Err, &stale) && stale.Current.Version == 1 })
	unchanged("an edit to the same body", func() ([]ChildOutcome, error) {
		return a.EditChildren(ctx, 1, commentKind, []ChildEdit{{Meta: m, ID: last, IfVersion: 1, Body: new("comment 7")}})
	}, func(o ChildOutcome) bool { return o.Err == nil && !o.Changed && o.Child.Version == 1 })
	unchanged("another tenant's edit", func() ([]ChildOutcome, error) {
		return a.EditChildren(ctx, 2, commentKind, []ChildEdit{{Meta: m, ID: last, IfVersion: 1, Body: new("x")}})
	}, func(o ChildOutcome) bool { return errors.Is(o.Err, ErrNotFound) })

	version := int64(1)
	for name, write := range map[string]func() ([]ChildOutcome, error){
		"an edit": func() ([]ChildOutcome, error) {
			return a.EditChildren(ctx, 1, commentKind, []ChildEdit{{Meta: m, ID: last, IfVersion: version,
				Body: new(fmt.Sprint("edit ", version))}})
		},
		"a moderation": func() ([]ChildOutcome, error) {
			return a.ModerateChildren(ctx, 1, commentKind, []ChildModeration{{Meta: m, ID: last, IfVersion: version,
				State: event.ModerationApproved}})
		},
		"a reply": func() ([]ChildOutcome, error) {
			return a.CreateChildren(ctx, 1, commentKind, []NewChild{{Meta: m, Object: "5", AuthorID: "9", ReplyTo: ids[2], Body: "reply"}})
		},
		"a first comment among others": func() ([]ChildOutcome, error) {
			out, err := a.CreateChildren(ctx, 1, commentKind,
				[]NewChild{{Meta: m, Object: "5", AuthorID: "9", Body: "first"}, {Meta: m, Object: "6", AuthorID: "9", Body: "another"}})
			return out, err
		},
	} {
		out, err := write()
		if err != nil || !out[0].Changed {
			t.Errorf("%s: %+v, %v", name, out, err)
			continue
		}
		if out[0].Child.ID == last {
			version = out[0].Child.Version
		}
		if got := a.places(); !strings.Contains(got, "+0 RETURNED, ") || !strings.Contains(got, "2/5 0+2 ARCHIVED") {
			t.Errorf("%s leaves %s", name, got)
		}
		a.check()
		a.run()
	}
	if out, err := a.DeleteChildren(ctx, 1, commentKind, []ChildDelete{{Meta: m, ID: last, IfVersion: version}}); err != nil ||
		out[0].Child.Version != 4 {
		t.Errorf("a deletion: %+v, %v", out, err)
	}
	a.run()
	before5 := a.places()
	if out, err := a.DeleteChildren(ctx, 1, commentKind, []ChildDelete{{Meta: m, ID: last}}); err != nil || !errors.As(out[0].Err, &state) {
		t.Errorf("a second deletion: %+v, %v", out, err)
	}
	if _, err := a.SetThreads(ctx, 1, commentKind, []ThreadSettings{{Meta: m, Object: "5", Locked: true}}); err != nil {
		t.Error(err)
	}
	if out, err := a.CreateChildren(ctx, 1, commentKind, []NewChild{{Meta: m, Object: "5", AuthorID: "9", Body: "late"}}); err != nil ||
		!errors.Is(out[0].Err, ErrThreadLocked) {
		t.Errorf("a comment in a locked thread: %+v, %v", out, err)
	}
	a.want(before5)
	// A slice that edits one comment twice, and one of another thread that is shelved: each entity
	// in its order.
	out, err := a.EditChildren(ctx, 2, commentKind, []ChildEdit{{Meta: m, ID: theirs[0], Body: new("one")},
		{Meta: m, ID: theirs[0], Body: new("two")}, {Meta: m, ID: theirs[1], IfVersion: 7, Body: new("x")}})
	if err != nil || out[0].Child.Version != 2 || out[1].Child.Body != "two" || out[1].Child.Version != 3 ||
		!errors.As(out[2].Err, &stale) {
		t.Errorf("a slice: %+v, %v", out, err)
	}
	if n := a.ThreadsReturned(); n != 6 {
		t.Errorf("%d threads returned, want 6", n)
	}
}

func TestAThreadThatIsNotQuietIsNotShelved(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	ids := a.thread(1, "1", 5)
	a.thread(1, "2", 5)
	a.shelver.after = time.Hour
	old := func(sql string, args ...any) {
		t.Helper()
		if _, err := a.system.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	old(`UPDATE comments SET updated_at = now() - interval '2 hours' WHERE comment_id <> $1`, ids[0]) // the first one was edited recently
	if plan, err := a.shelver.Plan(t.Context()); err != nil || plan[CountThreadsShelved] != 1 || plan[CountCommentsShelved] != 5 {
		t.Errorf("plan %v, %v", plan, err)
	}
	a.run()
	a.want("1/1 5+0, 1/2 0+5 ARCHIVED")

	// A thread with a write after it was found to be quiet.
	old(`UPDATE comments SET updated_at = now() - interval '2 hours'`)
	a.shelver.reached = func(step string) error {
		if step == "marked" {
			old(`UPDATE comments SET updated_at = now() WHERE comment_id = $1`, ids[0])
		}
		return nil
	}
	a.run()
	a.want("1/1 5+0 RETURNED, 1/2 0+5 ARCHIVED")

	a.shelver.reached = nil
	old(`UPDATE comments SET updated_at = now() - interval '2 hours'`)
	old(`UPDATE archived_threads SET returned_at = now() - interval '2 hours' WHERE state = 'RETURNED'`)
	a.run()
	a.want("1/1 0+5 ARCHIVED, 1/2 0+5 ARCHIVED")
	a.shelver.after = 0
	if counts := a.run(); len(counts) > 0 {
		t.Errorf("switched off, it did %v", counts)
	}
}

// The create has read that there is no stub before the stub exists, and then waits to take its key
// or to insert. Its transaction would not have an id yet when the shelver checks.
func TestTheShelverWaitsForACreateThatHasNotSeenItsStub(t *testing.T) {
	t.Parallel()
	for table, key := range map[string]string{"child_keys": "k", "children_comment": ""} {
		t.Run(table, func(t *testing.T) { waitsForACreate(t, table, key) })
	}
}

func waitsForACreate(t *testing.T, table, key string) {
	t.Helper()
	db := testkit.Postgres(t)
	a := shelved{Store: New(db.Pool(t, postgres.RoleAPI), nil), t: t, system: db.Pool(t, postgres.RoleSystem)}
	a.shelver = a.newShelver()
	ids := a.thread(1, "5", 4)
	ctx := t.Context()
	owner := db.Pool(t, postgres.RoleOwner)
	for _, sql := range []string{
		// A write that waits too long for a lock is retried, and the retry would see the stub.
		`CREATE FUNCTION wait_here() RETURNS trigger LANGUAGE plpgsql
			SET lock_timeout = 0 AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(77); RETURN NEW; END $$`,
		`CREATE TRIGGER wait_here BEFORE INSERT ON ` + table + ` FOR EACH ROW EXECUTE FUNCTION wait_here()`,
	} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := a.system.Acquire(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	lock := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(ctx, sql); err != nil {
			t.Error(err)
		}
	}
	lock(`SELECT pg_advisory_lock(77)`)
	var once sync.Once
	release := func() { once.Do(func() { lock(`SELECT pg_advisory_unlock(77)`) }) }
	defer release()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		out, err := a.CreateChildren(ctx, 1, commentKind,
			[]NewChild{{Meta: Meta{Actor: "tester"}, Object: "5", AuthorID: "1", ReplyTo: ids[0], Body: "late", Key: key}})
		if err != nil || !out[0].Changed {
			t.Errorf("%+v, %v", out, err)
		}
	})
	testkit.Eventually(t, "the insert waits", func() (waits bool, err error) {
		return waits, owner.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)`).Scan(&waits)
	})
	a.shelver.reached = func(step string) error {
		if step == "waiting" {
			release()
		}
		return nil
	}
	a.run()
	release()
	wg.Wait()
	a.want("1/5 0+5 ARCHIVED")
}

func TestAShelverThatBreaksOffAtAnyStepLosesNothing(t *testing.T) {
	t.Parallel()
	died := errors.New("died")
	a := openShelved(t)
	ids := a.thread(1, "1", 7)
	a.thread(1, "2", 3)
	a.thread(2, "1", 3)
	a.thread(1, "3", 0)
	whole := func() {
		t.Helper()
		for i, id := range ids {
			if c, err := a.GetChild(t.Context(), 1, commentKind, id); err != nil || c.Body != fmt.Sprint("comment ", i) {
				t.Fatalf("comment %d: %+v, %v", i, c, err)
			}
		}
		a.check()
	}
	// until ends the work at its nth step and begins again, for each n up to the number of steps.
	until := func(work func() error) (steps int) {
		for n := 1; ; n++ {
			seen := 0
			a.shelver.reached = func(step string) error {
				if seen++; seen == n {
					return fmt.Errorf("%w at %s", died, step)
				}
				return nil
			}
			err := work()
			whole()
			if !errors.Is(err, died) {
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
		}
	}
	for range 2 {
		if n := until(func() error { return a.shelver.Run(t.Context(), &free{}) }); n < 4 {
			t.Errorf("the shelver ended after %d steps", n)
		}
		a.shelver.reached = nil
		a.run()
		a.want("1/1 0+7 ARCHIVED, 1/2 0+3 ARCHIVED, 2/1 0+3 ARCHIVED")
		rows, _ := a.system.Query(t.Context(), `SELECT DISTINCT archive_id FROM archived_threads WHERE state = 'ARCHIVED'`)
		archives, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range archives {
			if n := until(func() error {
				_, _, err := a.shelver.Undo(t.Context(), &free{}, id)
				return err
			}); n < 2 {
				t.Errorf("shelving %d was undone without an interruption", id)
			}
		}
		a.want("1/1 7+0 RETURNED, 1/2 3+0 RETURNED, 2/1 3+0 RETURNED")
	}
}

func TestShelvingIsUndoneAndStaysUndone(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	a.thread(1, "1", 7)
	a.thread(2, "1", 4)
	a.run()
	a.thread(1, "2", 4)
	a.run()
	all, err := Shelvings(t.Context(), a.system, 10)
	if err != nil || len(all) != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	got := all[1]
	got.StartedAt = time.Time{}
	if diff := cmp.Diff(Shelving{ArchiveID: all[1].ArchiveID, Threads: 2, Comments: 11}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	hold := &free{}
	if threads, comments, err := a.shelver.Undo(t.Context(), hold, all[1].ArchiveID); threads != 2 || comments != 11 || err != nil {
		t.Errorf("%d threads, %d comments, %v", threads, comments, err)
	}
	a.want("1/1 7+0 RETURNED, 1/2 0+4 ARCHIVED, 2/1 4+0 RETURNED")
	if threads, _, err := a.shelver.Undo(t.Context(), hold, all[1].ArchiveID); threads != 0 || err != nil {
		t.Errorf("again: %d threads, %v", threads, err)
	}
	if _, _, err := a.shelver.Undo(t.Context(), hold, 4711); !errors.Is(err, ErrNotFound) {
		t.Errorf("an unknown shelving: %v", err)
	}
	if _, err := a.system.Exec(t.Context(), `UPDATE comments SET updated_at = now() - interval '2 hours'`); err != nil {
		t.Fatal(err)
	}
	a.shelver.after = time.Hour
	a.run() // they are quiet, but an operator brought them back
	a.want("1/1 7+0 RETURNED, 1/2 0+4 ARCHIVED, 2/1 4+0 RETURNED")
}

func TestALongThreadComesBackOverSeveralAttempts(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	ids := a.thread(1, "1", 20)
	a.run()
	a.Store.returnBudget = 0
	edit := func() error {
		_, err := a.EditChildren(t.Context(), 1, commentKind, []ChildEdit{{Meta: Meta{Actor: "tester"}, ID: ids[0], Body: new("x")}})
		return err
	}
	if err := edit(); !errors.Is(err, ErrThreadReturning) {
		t.Fatalf("without a return budget: %v", err)
	}
	// Each attempt gets as far as one transaction.
	a.Store.returnBudget = time.Nanosecond
	tries := 0
	for ; ; tries++ {
		a.Store.returnBudget = 2 * time.Millisecond
		err := edit()
		if err == nil {
			break
		}
		if !errors.Is(err, ErrThreadReturning) || tries > 100 {
			t.Fatal(tries, err)
		}
		a.check()
	}
	t.Logf("%d tries", tries)
	a.want("1/1 20+0 RETURNED")

	// The shelver completes a return that writers began and gave up.
	a.run()
	if err := postgres.InTx(t.Context(), a.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, _, err := shapeOf(commentKind).returnChunk(t.Context(), tx, 1, "1", returnedByWrite, 3)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	a.want("1/1 3+17 RETURNING")
	a.shelver.after = time.Hour
	a.run()
	a.want("1/1 20+0 RETURNED")
}

var errSpent = errors.New("the run has had its time")

// short is a lease whose run's time is up after a number of calls of Continue.
type short struct {
	free
	asks int
}

func (s *short) Continue() error {
	if s.asks--; s.asks < 0 {
		return errSpent
	}
	return nil
}

// A giant thread looks quiet but has a recent reply in an old branch; later it is quiet. In neither
// state does it make a run last longer than its time, or keep later runs from shelving the other
// threads.
func TestAGiantThreadTakesNoLongerThanARunHas(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	ids := a.thread(1, "1", 20)
	for post := int64(2); post <= 3; post++ {
		a.thread(1, event.IDOf(post), 2)
	}
	a.shelver.after, a.shelver.quietRows = time.Hour, 3
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := a.system.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec(`UPDATE children_comment SET updated_at = now() - interval '2 hours'`)
	exec(`UPDATE children_comment SET updated_at = now() WHERE child_id = $1`, ids[0])
	run := func(asks int, want error) {
		t.Helper()
		if err := a.shelver.Run(t.Context(), &short{asks: asks}); !errors.Is(err, want) {
			t.Errorf("a run with %d slices ended with %v, want %v", asks, err, want)
		}
		a.check()
	}
	run(6, errSpent) // skips the giant thread
	a.want("1/1 20+0, 1/2 2+0, 1/3 2+0")
	run(20, nil) // continues after it, and around to it
	a.want("1/1 20+0, 1/2 0+2 ARCHIVED, 1/3 0+2 ARCHIVED")

	// The same thread is quiet now. It moves over several runs, and no run reads it again once its
	// first comments have moved.
	exec(`UPDATE children_comment SET updated_at = now() - interval '2 hours'`)
	run(17, errSpent)
	a.want("1/1 17+3 ARCHIVING, 1/2 0+2 ARCHIVED, 1/3 0+2 ARCHIVED")
	run(3, errSpent) // too few to read it again
	a.want("1/1 11+9 ARCHIVING, 1/2 0+2 ARCHIVED, 1/3 0+2 ARCHIVED")
	run(100, nil)
	a.want("1/1 0+20 ARCHIVED, 1/2 0+2 ARCHIVED, 1/3 0+2 ARCHIVED")
}

func TestAThreadThatCannotBeMovedKeepsNoOther(t *testing.T) {
	t.Parallel()
	a := openShelved(t)
	a.thread(1, "1", 7)
	a.run()
	// Somebody imports comments that were shelved since. Then the thread returns.
	const columns = `tenant_id, child_id, object_id, parent_id, slug, path, author_id, body, created_at`
	if _, err := a.system.Exec(t.Context(), `INSERT INTO children_comment (`+columns+`) SELECT `+columns+
		` FROM children_archive_comment ORDER BY path DESC LIMIT 1`); err != nil {
		t.Fatal(err)
	}
	if err := postgres.InTx(t.Context(), a.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, _, err := shapeOf(commentKind).returnChunk(t.Context(), tx, 1, "1", returnedByWrite, 3)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	a.thread(1, "2", 3)
	a.thread(2, "1", 3)
	where := func(want string) {
		t.Helper()
		if got := a.places(); got != want {
			t.Errorf("places: %s, want %s", got, want)
		}
	}
	if err := a.shelver.Run(t.Context(), &free{}); !onBothSides(err) {
		t.Errorf("a run: %v", err)
	}
	where("1/1 7+1 RETURNING, 1/2 0+3 ARCHIVED, 2/1 0+3 ARCHIVED")
	if _, err := a.system.Exec(t.Context(), `UPDATE archived_threads SET archive_id = 1`); err != nil { // as if one run had shelved them
		t.Fatal(err)
	}
	if threads, _, err := a.shelver.Undo(t.Context(), &free{}, 1); threads != 2 || !onBothSides(err) {
		t.Errorf("undone: %d threads, %v", threads, err)
	}
	where("1/1 7+1 RETURNING, 1/2 3+0 RETURNED, 2/1 3+0 RETURNED")
	if _, err := a.system.Exec(t.Context(),
		`DELETE FROM children_comment c USING children_archive_comment a WHERE c.child_id = a.child_id`); err != nil {
		t.Fatal(err)
	}
	a.shelver.after = time.Hour
	a.run()
	a.want("1/1 7+0 RETURNED, 1/2 3+0 RETURNED, 2/1 3+0 RETURNED")
}

func TestAnErasureFindsWhatComesBackMeanwhile(t *testing.T) {
	t.Parallel()
	for name, chunks := range map[string]int{"some": 2, "all": 10} {
		a := openShelved(t)
		a.thread(1, "1", 20)
		a.run()
		a.thread(1, "2", 2)
		met, system := false, New(a.system, nil)
		err := system.AuthorChildren(t.Context(), 1, commentKind, "1", func(all []AuthorChild) error {
			for range chunks { // after the first of the two tables was read
				if met {
					break
				}
				if err := postgres.InTx(t.Context(), a.system, pgx.TxOptions{}, func(tx pgx.Tx) error {
					_, _, err := shapeOf(commentKind).returnChunk(t.Context(), tx, 1, "1", returnedByWrite, 3)
					return err
				}); err != nil {
					return err
				}
			}
			met = true
			var ids []string
			for _, c := range all {
				ids = append(ids, c.ID)
			}
			_, err := system.EraseChildren(t.Context(), 1, commentKind, kinds.Builtin().EdgesTo("comment"), ids, false,
				Meta{Actor: "tester"}, (&free{}).Fence)
			return err
		})
		var left, erased int
		if err := errors.Join(err, a.system.QueryRow(t.Context(), `
			SELECT count(*) FILTER (WHERE body <> ''), count(*) FILTER (WHERE author_state = 'ERASED') FROM all_comments
			WHERE author_id = '1'`).Scan(&left, &erased)); err != nil || left > 0 || erased != 8 {
			t.Errorf("%s returned: %d comments still have content, %d are erased, %v", name, left, erased, err)
		}
		a.check()
	}
}

// TestWritersSeeNoShelf runs random writers in threads that two shelvers move all the time. The
// shelvers die now and then, and an operator undoes shelvings.
func TestWritersSeeNoShelf(t *testing.T) {
	t.Parallel()
	seed, _ := testkit.Seed(t)
	a := openShelved(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	const tenants, posts, writers, writes = 2, 8, 2, 150
	objects := [posts]event.ID{"1", "2", "10", "B", "a.b@example.com", "auth0|1", "~", "0196b2d4-7c00-7000-8000-00000000000a"}
	var returned atomic.Int64
	var movers, wg sync.WaitGroup
	died := errors.New("died")
	for n := range uint64(2) {
		rng := rand.New(rand.NewPCG(seed, n))
		shelver := a.newShelver()
		shelver.reached = func(string) error {
			if rng.IntN(20) == 0 {
				return died
			}
			return nil
		}
		movers.Go(func() {
			for ctx.Err() == nil {
				hold := &free{}
				err := shelver.Run(ctx, hold)
				if err != nil && !errors.Is(err, died) && ctx.Err() == nil {
					t.Error(err)
				}
				if all, err := Shelvings(ctx, a.system, 3); err == nil && len(all) > 0 && rng.IntN(4) == 0 {
					if _, _, err := shelver.Undo(ctx, hold, all[rng.IntN(len(all))].ArchiveID); err != nil &&
						!errors.Is(err, died) && ctx.Err() == nil {
						t.Error(err)
					}
				}
			}
		})
	}
	type known struct {
		mu   sync.Mutex
		all  map[string]event.Child // the last outcome of each comment
		ids  []string
		keys map[string]string // the comment that each key made
		made map[string]int    // and how many
	}
	models := map[int64]*known{}
	for tenant := int64(1); tenant <= tenants; tenant++ {
		k := &known{all: map[string]event.Child{}, keys: map[string]string{}, made: map[string]int{}}
		models[tenant] = k
		for n := range uint64(writers) {
			rng := rand.New(rand.NewPCG(seed, uint64(tenant)<<8+n))
			wg.Go(func() {
				for i := range writes {
					k.mu.Lock()
					var c event.Child
					if len(k.ids) > 0 {
						c = k.all[k.ids[rng.IntN(len(k.ids))]]
					}
					k.mu.Unlock()
					m := Meta{Actor: "tester"}
					kind, version := rng.IntN(10), int64(rng.IntN(2))*c.Version
					key := fmt.Sprint(rng.IntN(20))
					for {
						var out []ChildOutcome
						var err error
						switch {
						case kind < 2 || c.ID == "":
							out, err = a.CreateChildren(ctx, tenant, commentKind,
								[]NewChild{{Meta: m, Object: objects[len(key)%posts], AuthorID: "1",
									Body: "keyed " + key, Key: key}})
						case kind < 6:
							out, err = a.CreateChildren(ctx, tenant, commentKind,
								[]NewChild{{Meta: m, Object: c.Parent, ReplyTo: c.ID, AuthorID: "2", Body: "reply"},
									{Meta: m, Object: objects[rng.IntN(posts)], AuthorID: "2", Body: "beside"}})
						case kind < 8:
							out, err = a.EditChildren(ctx, tenant, commentKind,
								[]ChildEdit{{Meta: m, ID: c.ID, IfVersion: version, Body: new(fmt.Sprint(n, "/", i))}})
						case kind < 9:
							state := []string{event.ModerationApproved, event.ModerationHidden, event.ModerationRemoved}[rng.IntN(3)]
							out, err = a.ModerateChildren(ctx, tenant, commentKind,
								[]ChildModeration{{Meta: m, ID: c.ID, IfVersion: version, State: state}})
						default:
							out, err = a.DeleteChildren(ctx, tenant, commentKind, []ChildDelete{{Meta: m, ID: c.ID, IfVersion: version}})
						}
						if errors.Is(err, ErrThreadReturning) {
							returned.Add(1)
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						var stale *StaleError
						var state *StateError
						k.mu.Lock()
						for _, o := range out {
							switch {
							case errors.As(o.Err, &stale) && version > 0 && stale.Current.Version > version, errors.As(o.Err, &state):
								continue
							case errors.Is(o.Err, ErrParentGone):
								continue
							case o.Err != nil:
								t.Errorf("kind %d, version %d: %v", kind, version, o.Err)
								continue
							}
							id := o.Child.ID
							if kind < 2 || c.ID == "" {
								if made, ok := k.keys[key]; ok && made != id {
									t.Errorf("key %s made %s and %s", key, made, id)
								}
								k.keys[key] = id
								if o.Changed {
									k.made[key]++
								}
							}
							if old, ok := k.all[id]; !ok {
								k.ids = append(k.ids, id)
								k.all[id] = o.Child
							} else if o.Changed && o.Child.Version > old.Version {
								k.all[id] = o.Child
							}
						}
						k.mu.Unlock()
						break
					}
					if c.ID != "" && rng.IntN(3) == 0 {
						if got, err := a.GetChild(ctx, tenant, commentKind, c.ID); err != nil ||
							got.Version < c.Version || got.Path != c.Path {
							t.Errorf("read %+v, %v, after %+v", got, err, c)
						}
					}
				}
			})
		}
	}
	wg.Wait()
	stop()
	movers.Wait()
	var moved int64
	if err := a.system.QueryRow(t.Context(), `SELECT sum(children)::bigint FROM archived_threads`).Scan(&moved); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d comments moved, %d threads returned by writers, %d answers that they are returning", moved,
		a.ThreadsReturned(), returned.Load())
	if moved == 0 || a.ThreadsReturned() == 0 {
		t.Error("nothing was moved")
	}
	check := func() {
		t.Helper()
		for tenant, k := range models {
			for id, want := range k.all {
				if got, err := a.GetChild(t.Context(), tenant, commentKind, id); err != nil || !cmp.Equal(got, want) {
					t.Errorf("got %+v, %v, want %+v", got, err, want)
				}
			}
			for key, n := range k.made {
				if n != 1 {
					t.Errorf("key %s made %d comments", key, n)
				}
			}
		}
		a.check()
		var n, slugs, total, wrong int
		if err := a.system.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT (tenant_id, post_id, slug)), count(DISTINCT comment_id)
			FROM all_comments`).Scan(&n, &slugs, &total); err != nil {
			t.Fatal(err)
		}
		if want := len(models[1].all) + len(models[2].all); n != want || slugs != want || total != want {
			t.Errorf("%d comments, %d slugs, %d ids, want %d", n, slugs, total, want)
		}
		if err := a.system.QueryRow(t.Context(), `
			SELECT count(*) FROM (SELECT payload->>'comment_id' AS id, (payload->>'version')::bigint AS version,
			       row_number() OVER (PARTITION BY payload->>'comment_id' ORDER BY id) AS place FROM outbox_messages) e
			       WHERE version <> place`).Scan(&wrong); err != nil || wrong > 0 {
			t.Errorf("%d events are out of order: %v", wrong, err)
		}
	}
	check()
	a.shelver.after = time.Hour
	a.run() // interrupted moves complete
	check()
	var waiting int
	if err := a.system.QueryRow(t.Context(), `SELECT count(*) FROM archived_threads WHERE state IN ('ARCHIVING', 'RETURNING')`).Scan(
		&waiting); err != nil || waiting > 0 {
		t.Errorf("%d threads are still moving: %v", waiting, err)
	}
}

// A create that took its id while the stub's transaction ran has a higher id, and may have looked
// for the stub before that transaction was committed.
func TestTheShelverWaitsForACreateThatBeganWhileItsStubWasWritten(t *testing.T) {
	t.Parallel()
	db := testkit.PostgresProcess(t).DB(t) // a server of its own: another transaction that ends would hide it
	a := shelved{Store: New(db.Pool(t, postgres.RoleAPI), nil), t: t, system: db.Pool(t, postgres.RoleSystem)}
	a.shelver = a.newShelver()
	ctx := t.Context()
	owner := db.Pool(t, postgres.RoleOwner)
	stub, err := owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	create, err := owner.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = create.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := stub.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	if _, err := create.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	if err := stub.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	waits := errors.New("it waits")
	a.shelver.reached = func(step string) error {
		if step == "waiting" {
			return waits
		}
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := a.shelver.settle(ctx); !errors.Is(err, waits) {
		t.Errorf("got %v: the shelver moves the thread beside a create that has not seen the stub", err)
	}
}
