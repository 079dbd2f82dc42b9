package threadcache

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// made is comment n of a thread: its place in it never changes.
func made(n int, parent *event.Comment) event.Comment {
	c := event.Comment{
		CommentID: fmt.Sprintf("00000000-0000-7000-8000-%012d", n), PostID: 5, Slug: fmt.Sprintf("%08d", n), AuthorID: event.ID(n + 1),
		Body: fmt.Sprint("body ", n), AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: 1, Actor: "test",
	}
	c.CreatedAt.Time = start.Add(time.Duration(n/2) * time.Second) // in pairs, to test ties
	c.UpdatedAt = c.CreatedAt
	c.Path = fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
	if parent != nil {
		c.ParentID, c.Path = parent.CommentID, parent.Path+"/"+c.Path
	}
	return c
}

// at is the comment's given version: what it is then follows from the two numbers.
func at(c event.Comment, n int, version int64) event.Comment {
	c.Version = version
	if version == 1 {
		return c
	}
	switch (int64(n) + version) % 5 {
	case 0:
		c.AuthorState = event.AuthorDeleted
	case 1:
		c.ModerationState = event.ModerationHidden
	case 2:
		c.ModerationState = event.ModerationApproved
	case 3:
		c.Body += fmt.Sprint(", version ", version)
	case 4:
		c.AuthorState, c.Body = event.AuthorErased, ""
	}
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		c.Body = ""
	}
	c.UpdatedAt.Time = c.CreatedAt.Add(time.Duration(version) * time.Minute)
	return c
}

func toEvent(tenant int64, c event.Comment) event.Event {
	payload, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	typ := event.Edited
	if c.Version == 1 {
		typ = event.Created
	}
	return event.Event{ID: fmt.Sprint(c.CommentID, "-", c.Version), TenantID: tenant, AggregateType: event.AggregateComment, AggregateID: int64(c.PostID),
		Type: typ, Version: 1, Payload: payload}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	for i, sql := range []string{oldestSQL, threadedSQL, commentsSQL, descendantsSQL, truthSQL, rowsSQL, truthPageSQL} {
		query, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, nil, sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, fmt.Sprintf("PREPARE s%d AS %s", i, query)); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// model is what readers are to see: the newest version of each comment that was delivered.
type model map[string]event.Comment

func (m model) oldest() (all []event.Comment) {
	for _, c := range m {
		if c.Visible() {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b event.Comment) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt.Time), cmp.Compare(a.CommentID, b.CommentID))
	})
	return all
}

func (m model) descendants(of event.Comment) (n int) {
	for _, c := range m {
		if c.Visible() && strings.HasPrefix(c.Path, of.Path+"/") {
			n++
		}
	}
	return n
}

func (m model) threaded() (all []event.Comment) {
	for _, c := range m {
		switch {
		case c.Visible():
			all = append(all, c)
		case m.descendants(c) > 0:
			c.Body, c.AuthorID = "", 0
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b event.Comment) int { return cmp.Compare(a.Path, b.Path) })
	return all
}

func walk(read func(last *event.Comment) ([]event.Comment, error), limit int) (all []event.Comment, err error) {
	var last *event.Comment
	for {
		page, err := read(last)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if len(page) < limit {
			return all, nil
		}
		last = &page[limit-1]
	}
}

func (m model) compare(ctx context.Context, tx pgx.Tx, limit int) error {
	oldest, err := walk(func(last *event.Comment) ([]event.Comment, error) {
		var after *OldestCursor
		if last != nil {
			after = &OldestCursor{last.CreatedAt.Time, last.CommentID}
		}
		return Oldest(ctx, tx, 5, after, limit)
	}, limit)
	if err != nil {
		return err
	}
	ignore := cmpopts.IgnoreFields(event.Comment{}, "Actor")
	if diff := gocmp.Diff(m.oldest(), oldest, ignore); diff != "" {
		return fmt.Errorf("oldest (-want +got):\n%s", diff)
	}
	threaded, err := walk(func(last *event.Comment) ([]event.Comment, error) {
		after := ""
		if last != nil {
			after = last.Path
		}
		return Threaded(ctx, tx, 5, after, limit)
	}, limit)
	if err != nil {
		return err
	}
	if diff := gocmp.Diff(m.threaded(), threaded, ignore); diff != "" {
		return fmt.Errorf("threaded (-want +got):\n%s", diff)
	}
	rows, _ := tx.Query(ctx, `SELECT comment_id::text, visible_descendants FROM thread_comments`)
	var id string
	var got int
	n := 0
	_, err = pgx.ForEachRow(rows, []any{&id, &got}, func() error {
		n++
		if want := m.descendants(m[id]); want != got {
			return fmt.Errorf("%s has %d visible descendants, want %d", id, got, want)
		}
		return nil
	})
	if err == nil && n != len(m) {
		err = fmt.Errorf("%d rows, want %d", n, len(m))
	}
	return err
}

// TestAnyDeliveryEndsInAFoldOfTheTruth delivers versions of a random tree in any order (replies before their parents among them),
// cut anywhere, with repetitions, and compares what readers see with a fold of the newest version delivered of each comment.
func TestAnyDeliveryEndsInAFoldOfTheTruth(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	tenant := int64(0)
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant++
		var tree []event.Comment
		for n := range rapid.IntRange(1, 9).Draw(rt, "comments") {
			parent := rapid.IntRange(-1, n-1).Draw(rt, "parent")
			if parent < 0 {
				tree = append(tree, made(n, nil))
			} else {
				tree = append(tree, made(n, &tree[parent]))
			}
		}
		m := model{}
		for range rapid.IntRange(1, 5).Draw(rt, "batches") {
			var batch []event.Event
			for range rapid.IntRange(0, 10).Draw(rt, "events") {
				n := rapid.IntRange(0, len(tree)-1).Draw(rt, "comment")
				c := at(tree[n], n, rapid.Int64Range(1, 6).Draw(rt, "version"))
				batch = append(batch, toEvent(tenant, c))
				if c.Version > m[c.CommentID].Version {
					m[c.CommentID] = c
				}
			}
			if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return New().Apply(ctx, tx, batch) }); err != nil {
				rt.Fatal(err)
			}
			limit := rapid.IntRange(1, 4).Draw(rt, "limit")
			err := postgres.InTenant(ctx, api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error { return m.compare(ctx, tx, limit) })
			if err != nil {
				rt.Fatal(err)
			}
		}
	})
}

func TestAPayloadThatIsNoCommentIsPermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, change := range map[string]func(*event.Comment){
		"an id that is none":        func(c *event.Comment) { c.CommentID = "42" },
		"a parent that is none":     func(c *event.Comment) { c.ParentID = "42" },
		"no version":                func(c *event.Comment) { c.Version = 0 },
		"a path cut short":          func(c *event.Comment) { c.Path = c.Path[1:] },
		"a path without separators": func(c *event.Comment) { c.Path = strings.Repeat("0", 45) },
		"no path":                   func(c *event.Comment) { c.Path = "" },
		"another post":              func(c *event.Comment) { c.PostID = 6 },
	} {
		c := made(1, nil)
		change(&c)
		e := toEvent(1, c)
		e.AggregateID = 5
		ctx := context.Background()
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return New().Apply(ctx, tx, []event.Event{e}) })
		if !event.IsPermanent(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestVerifyNamesEachDifference(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	root := made(1, nil)
	child := made(2, &root)
	grandchild := made(3, &child)
	other := made(4, nil)
	var events []event.Event
	for n, c := range []event.Comment{root, child, grandchild, other} {
		for v := int64(1); v <= int64(n+1); v++ {
			events = append(events, toEvent(1, at(c, n+1, v)))
		}
	}
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return New().Apply(ctx, tx, events) }); err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO comments (tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at)
	  SELECT tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at FROM thread_comments`)
	verify := func() (got []string) {
		checked, err := Verify(ctx, pool, pool, func(d projections.Difference) {
			got = append(got, strings.TrimPrefix(d.String(), "threadcache: tenant 1, comment 00000000-0000-7000-8000-00000000000"))
		})
		if err != nil {
			t.Fatal(err)
		}
		if checked != 4 {
			t.Errorf("checked %d", checked)
		}
		return got
	}
	if got := verify(); len(got) > 0 {
		t.Errorf("equal tables differ: %q", got)
	}
	exec(`UPDATE thread_comments SET visible_descendants = 7, shown = true WHERE slug = '00000001'`)
	exec(`UPDATE comments SET body = 'another', version = 9 WHERE slug = '00000003'`)
	exec(`DELETE FROM comments WHERE slug = '00000004'`)
	got := verify()
	want := []string{
		"3 of post 5: version is 3, want 9", "3 of post 5: body is another 18 bytes, want 7 bytes",
		fmt.Sprintf("1 of post 5: visible_descendants is 7, want %d", boolInt(at(child, 2, 2).Visible())+boolInt(at(grandchild, 3, 3).Visible())),
		"4 of post 5: row is present, want absent",
	}
	slices.Sort(got)
	slices.Sort(want)
	got = slices.DeleteFunc(got, func(s string) bool { return strings.Contains(s, "bytes") })
	want = slices.DeleteFunc(want, func(s string) bool { return strings.Contains(s, "bytes") })
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
