package history

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const commentID = "0190a000-0000-7000-8000-000000000001"

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

var commentKind, followKind = kinds.Builtin().Children[event.AggregateComment], kinds.Builtin().Edges[event.AggregateFollow]

func toEvent(aggregate, typ string, payload any) event.Event {
	var b []byte
	var err error
	id := event.ID("5")
	switch o := payload.(type) {
	case event.Child:
		b, err = o.Encode(commentKind.Names())
		id = o.Parent
	case event.Edge:
		b, err = o.Encode(followKind.Names())
		id = o.To
	default:
		b, err = json.Marshal(payload)
	}
	if err != nil {
		panic(err)
	}
	return event.Event{ID: fmt.Sprint(typ, "-", string(b)), TenantID: 1, AggregateType: aggregate, AggregateID: id,
		Type: typ, Version: 1, Payload: b}
}

func comment(version int64, typ, actor string, change func(*event.Child)) event.Event {
	c := event.Child{ID: commentID, Parent: "5", AuthorID: "7", Body: fmt.Sprint("body ", version), AuthorState: event.AuthorActive,
		ModerationState: event.ModerationNone, Version: version, Actor: actor}
	c.UpdatedAt.Time = start.Add(time.Duration(version) * time.Minute)
	if change != nil {
		change(&c)
	}
	return toEvent(event.AggregateComment, typ, c)
}

func follow(version int64, actor string) event.Event {
	f := event.Edge{From: "7", To: "5", Status: event.StatusActive, Version: version, Actor: actor}
	typ := event.Created
	if version%2 == 0 {
		f.Status, typ = event.StatusRemoved, event.Removed
	}
	return toEvent(event.AggregateFollow, typ, f)
}

func apply(t *testing.T, pool *pgxpool.Pool, events ...event.Event) {
	t.Helper()
	ctx := context.Background()
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{},
		func(tx pgx.Tx) error { return New(kinds.Builtin).Apply(ctx, tx, events) }); err != nil {
		t.Fatal(err)
	}
}

type entry struct {
	Version int64
	By      string
	State   versioned.State
}

func histories(t *testing.T, pool *pgxpool.Pool) (comments, follows []entry) {
	t.Helper()
	ctx := context.Background()
	err := postgres.InTenant(ctx, pool, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		c, err := historyOf(Children(commentKind), ctx, tx, 1, versioned.Key{commentID}, 0, 100)
		if err != nil {
			return err
		}
		for _, v := range c {
			comments = append(comments, entry{v.Object.Version, v.Metadata.CreatedBy, v.Metadata.VersionState})
			if want := start.Add(time.Duration(v.Object.Version) * time.Minute); !v.Metadata.LastUpdateTime.Equal(want) {
				t.Errorf("version %d was made at %s, want %s", v.Object.Version, v.Metadata.LastUpdateTime, want)
			}
		}
		f, err := historyOf(Edges(followKind), ctx, tx, 1, versioned.Key{"7", "5"}, 0, 100)
		for _, v := range f {
			follows = append(follows, entry{v.Object.Version, v.Metadata.CreatedBy, v.Metadata.VersionState})
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return comments, follows
}

func TestHistoriesSayWhoDidWhat(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	events := []event.Event{
		comment(1, event.Created, "ann", nil), follow(1, "ann"), comment(2, event.Edited, "ann", nil), follow(2, "bob"),
		comment(3, event.Deleted, "mod", func(c *event.Child) { c.AuthorState = event.AuthorDeleted }), follow(3, "ann"),
	}
	apply(t, pool, events[2:4]...)
	apply(t, pool, events...) // late versions get their places, stored ones stay
	apply(t, pool, slices.Concat(events[:1], events)...)
	comments, follows := histories(t, api)
	if diff := cmp.Diff([]entry{{1, "ann", versioned.Archived}, {2, "ann", versioned.Archived}, {3, "mod", versioned.Deleted}},
		comments); diff != "" {
		t.Errorf("comment (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]entry{{1, "ann", versioned.Archived}, {2, "bob", versioned.Archived}, {3, "ann", versioned.Latest}},
		follows); diff != "" {
		t.Errorf("follow (-want +got):\n%s", diff)
	}
}

func TestAVersionThatNobodyMadeIsPermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, e := range map[string]event.Event{
		"a follow without an actor":  follow(1, ""),
		"a comment without an actor": comment(1, event.Created, "", nil),
		"a comment without an id":    comment(1, event.Created, "ann", func(c *event.Child) { c.ID = "" }),
		"a comment without a number": comment(0, event.Created, "ann", nil),
	} {
		ctx := context.Background()
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			return New(kinds.Builtin).Apply(ctx, tx, []event.Event{e})
		})
		if !event.IsPermanent(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestVerifyComparesTheHeads(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	apply(t, pool, comment(1, event.Created, "ann", nil), follow(1, "ann"), follow(2, "ann"))
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body)
		VALUES (1, $1, 5, 'abcdefgh', '00000000000000abcdefgh', 7, 'x')`, commentID)
	exec(`INSERT INTO follows (tenant_id, follower_id, followee_id, status, version) VALUES (1, 7, 5, 'REMOVED', 2)`)
	verify := func() (got []string) {
		if _, err := New(kinds.Builtin).Verify(ctx, pool, pool,
			func(d projections.Difference) { got = append(got, d.String()) }); err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := verify(); len(got) > 0 {
		t.Errorf("equal heads differ: %q", got)
	}
	exec(`UPDATE comments SET version = 2, author_state = 'DELETED'`)
	exec(`INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, 8, 5)`)
	want := []string{
		"archiver: tenant 1, history of comment " + commentID + ": version is 1, want 2",
		"archiver: tenant 1, history of comment " + commentID + ": deleted is false, want true",
		"archiver: tenant 1, history of follow 8/5: row is absent, want present",
	}
	if diff := cmp.Diff(want, verify()); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
	exec(`UPDATE comments SET version = 1, author_state = 'ACTIVE'`)
	exec(`DELETE FROM follows WHERE follower_id = '8'`)
	exec(`UPDATE comment_history SET metadata = jsonb_set(metadata, '{version_state}', '"ARCHIVED"')`) // by hand
	want = []string{
		"archiver: tenant 1, history of comment " + commentID + ": row is absent, want present",
		"archiver: tenant 1, history of comment " + commentID +
			": version 1, state of the last version is ARCHIVED, want LATEST or DELETED",
	}
	if diff := cmp.Diff(want, verify()); diff != "" {
		t.Errorf("a history without a head (-want +got):\n%s", diff)
	}
}

// historyOf calls versioned.Table.History.
func historyOf[T any](t *Table[T], ctx context.Context, tx pgx.Tx, tenant int64, key versioned.Key, after int64,
	limit int) ([]versioned.Version[T], error) {
	all, err := t.raw.History(ctx, tx, tenant, key, after, limit)
	return t.versions(all, err)
}

// TestTwoArchiversDoNotWaitForOneAnother keeps one archiver's batch open, while the batch of
// another archiver, with other pairs and comments, commits.
func TestTwoArchiversDoNotWaitForOneAnother(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	batch := func(first int) (events []event.Event) { // as many events as a batch of an archiver
		for n := first; n < first+500; n++ {
			f := event.Edge{From: event.IDOf(n), To: event.IDOf(n + 1), Status: event.StatusActive, Version: 1, Actor: "user:7"}
			events = append(events, toEvent(event.AggregateFollow, event.Created, f),
				comment(1, event.Created, "user:7", func(c *event.Child) {
					c.ID = fmt.Sprintf("0190a000-0000-7000-8000-%012d", n)
				}))
		}
		return events
	}
	ctx, p := t.Context(), New(kinds.Builtin)
	open, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Rollback(context.WithoutCancel(ctx)) }() // no effect after a commit
	if err := p.Apply(ctx, open, batch(1)); err != nil {
		t.Fatal(err)
	}
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '2s'`); err != nil {
			return err
		}
		return p.Apply(ctx, tx, batch(10001))
	}); err != nil {
		t.Errorf("the second archiver, while the first one's batch is open: %v", err)
	}
	if err := open.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	var follows, comments int
	if err := pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM follow_history), (SELECT count(*) FROM comment_history)`).Scan(&follows,
		&comments); err != nil || follows != 1000 || comments != 1000 {
		t.Errorf("%d versions of follows and %d of comments, %v: want 1,000 of each", follows, comments, err)
	}
}

// TestAReplayRecordsBesideTheLiveArchiver records versions of one entity in two transactions. The
// second waits for the first, whose versions it must not take for missing ones.
func TestAReplayRecordsBesideTheLiveArchiver(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	live := New(kinds.Builtin)
	for name, order := range map[string][]projections.Projection{
		"the live one first": {live, live.ForReplay()}, "the replay first": {live.ForReplay(), live},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			if _, err := pool.Exec(ctx, `DELETE FROM follow_history`); err != nil {
				t.Fatal(err)
			}
			open, err := pool.Begin(ctx)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = open.Rollback(context.WithoutCancel(ctx)) }() // no effect after a commit
			if err := order[0].Apply(ctx, open, []event.Event{follow(1, "user:7"), follow(2, "user:7")}); err != nil {
				t.Fatal(err)
			}
			second := make(chan error, 1)
			go func() {
				second <- postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					return order[1].Apply(ctx, tx, []event.Event{follow(1, "user:7"), follow(2, "user:7"), follow(3, "user:7")})
				})
			}()
			testkit.Eventually(t, "the second transaction to wait", func() (waits bool, err error) {
				err = pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks w JOIN pg_locks of USING (pid)
					WHERE NOT w.granted AND (w.locktype = 'advisory' OR of.relation = 'follow_history'::regclass))`).Scan(&waits)
				return waits, err
			})
			if err := open.Commit(ctx); err != nil {
				t.Fatal(err)
			}
			if err := <-second; err != nil {
				t.Fatal(err)
			}
			var versions, heads int
			if err := pool.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE version_state = 'LATEST') FROM follow_history`).Scan(
				&versions, &heads); err != nil || versions != 3 || heads != 1 {
				t.Errorf("%d versions, %d of them LATEST, %v; want 3 and 1", versions, heads, err)
			}
		})
	}
}
