package threadcache

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// people have ids of several forms.
var people = []event.ID{"1", "7b0c2f52-5f0e-4d3a-9a51-6c1d7a3e9f10", "auth0|5f7c-12"}

// made returns comment n of a thread, whose place never changes.
func made(n int, parent *event.Child) event.Child {
	c := event.Child{
		ID: fmt.Sprintf("00000000-0000-7000-8000-%012d", n), Parent: "5", Slug: fmt.Sprintf("%08d", n), AuthorID: people[n%3],
		Body: fmt.Sprint("body ", n), AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: 1, Actor: "test",
	}
	c.CreatedAt.Time = start.Add(time.Duration(n/4) * time.Second) // four at a time, to test ties
	c.UpdatedAt = c.CreatedAt
	c.Path = fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
	if parent != nil {
		c.ReplyTo, c.Path = parent.ID, parent.Path+"/"+c.Path
	}
	return c
}

// at returns the given version of a comment. n and version determine its state.
func at(c event.Child, n int, version int64) event.Child {
	c.Version = version
	if version == 1 {
		return c
	}
	switch (int64(n) + version) % 6 {
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
	case 5:
		c.ModerationState = event.ModerationPending
	}
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		c.Body = ""
	}
	c.UpdatedAt.Time = c.CreatedAt.Add(time.Duration(version) * time.Minute)
	return c
}

func toEvent(tenant int64, c event.Child) event.Event {
	payload, err := c.Encode(kinds.Builtin().Children[event.AggregateComment].Names())
	if err != nil {
		panic(err)
	}
	typ := event.Edited
	if c.Version == 1 {
		typ = event.Created
	}
	return event.Event{ID: fmt.Sprint(c.ID, "-", c.Version), TenantID: tenant, AggregateType: event.AggregateComment,
		AggregateID: c.Parent, Type: typ, Version: 1, Payload: payload}
}

func TestSettingsThatWerePurgedAreTheDefaultsAtTheVersionThatStays(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := t.Context()
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	// Deleted, purged, and purged and set again.
	exec(`INSERT INTO threads (tenant_id, object, metadata) SELECT 1, o,
		jsonb_build_object('version_id', n, 'version_state', s, 'created_by', 't', 'last_update_time', '2026-01-02T03:04:05Z')
	  FROM (VALUES (1, '{"post_id": "5", "version": 2, "locked": false, "premoderated": false}'::jsonb, 'DELETED'),
	  (2, '{"post_id": "7", "version": 4, "locked": true}', 'LATEST')) v (n, o, s)`)
	exec(`INSERT INTO threads_purged (tenant_id, post_id, kind, version) VALUES (1, 6, 'comment', 3), (1, 7, 'comment', 3)`)
	fields := func() (all []string) {
		t.Helper()
		if _, err := New(kinds.Builtin).Verify(ctx, pool, pool,
			func(d projections.Difference) { all = append(all, d.String()) }); err != nil {
			t.Fatal(err)
		}
		return all
	}
	want := []string{
		"threadcache: tenant 1, thread of post 5: settings version is 0, want 2",
		"threadcache: tenant 1, thread of post 6: settings version is 0, want 3",
		"threadcache: tenant 1, thread of post 7: locked is false, want true",
		"threadcache: tenant 1, thread of post 7: settings version is 0, want 4",
	}
	if got := fields(); !slices.Equal(got, want) {
		t.Errorf("an empty projection: got %q, want %q", got, want)
	}
	for name, fill := range map[string]func() error{
		"repaired": func() error {
			repairKeys(t, pool, New(kinds.Builtin), []projections.Key{{Type: event.AggregateComment, TenantID: 1, Aggregate: "5"},
				{Type: event.AggregateComment, TenantID: 1, Aggregate: "6"}, {Type: event.AggregateComment, TenantID: 1, Aggregate: "7"}},
				func() {})
			return nil
		},
		"made from the truth": func() error {
			var events []event.Event
			for e, err := range New(kinds.Builtin).Truth(ctx, pool) {
				if err != nil {
					return err
				}
				events = append(events, e)
			}
			return apply(ctx, pool, New(kinds.Builtin), events)
		},
	} {
		exec(`DELETE FROM child_settings`)
		if err := fill(); err != nil {
			t.Fatal(err)
		}
		if got := fields(); len(got) > 0 {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	for i, sql := range []string{
		oldestSQL, newestSQL, skipOldestSQL, skipNewestSQL, threadedSQL, byIDSQL, bySlugSQL, byAuthorSQL, topFirstSQL, topAfterSQL,
		moderatedAllSQL, moderatedObjectSQL, moderatedAuthorSQL, moderatedAuthorInSQL, waitingSQL, summariesSQL,
		readSettingsSQL, settingsSQL, childrenSQL, descendantsSQL, countsSQL, splitBucketsSQL, splitGroupsSQL, totalsSQL,
		threadRowsSQL, flatRowsSQL, countedSQL, settingsRowsSQL,
		heldSQL, redactSQL, aggregatesSQL, readAggregatesSQL, dropChildrenSQL, reachedSQL,
	} {
		query, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, nil, sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, fmt.Sprintf("PREPARE s%d AS %s", i, query)); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// model has the expected reads of post 5: the newest delivered version of each comment and of the
// settings.
type model struct {
	comments map[string]event.Child
	settings event.Thread
}

func newModel() *model { return &model{comments: map[string]event.Child{}} }

func (m *model) deliver(c event.Child) {
	if c.Version > m.comments[c.ID].Version {
		m.comments[c.ID] = c
	}
}

func chronological(a, b event.Child) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt.Time), cmp.Compare(a.ID, b.ID))
}

func (m *model) chronological(keep func(event.Child) bool) []event.Child {
	all := []event.Child{}
	for _, c := range m.comments {
		if keep(c) {
			all = append(all, c)
		}
	}
	slices.SortFunc(all, chronological)
	return all
}

func (m *model) oldest() []event.Child { return m.chronological(event.Child.Visible) }

func (m *model) newest() []event.Child {
	all := m.oldest()
	slices.Reverse(all)
	return all
}

func (m *model) descendants(of event.Child) (n int) {
	for _, c := range m.comments {
		if c.Visible() && strings.HasPrefix(c.Path, of.Path+"/") {
			n++
		}
	}
	return n
}

// threaded returns the expected order of the thread below a path, or of all of it.
func (m *model) threaded(below string) []event.Child {
	all := m.chronological(func(c event.Child) bool {
		return strings.HasPrefix(c.Path, below) && (c.Visible() || m.descendants(c) > 0)
	})
	slices.SortFunc(all, func(a, b event.Child) int { return cmp.Compare(a.Path, b.Path) })
	for i := range all {
		if !all[i].Visible() {
			all[i].Body, all[i].AuthorID = "", ""
		}
	}
	return all
}

// cut returns all[skip:skip+limit] as far as it exists, as OFFSET and LIMIT would.
func cut(all []event.Child, skip, limit int) []event.Child {
	skip = min(skip, len(all))
	return all[skip:min(len(all), skip+limit)]
}

func walk(read func(last *event.Child) ([]event.Child, error), limit int) (all []event.Child, err error) {
	var last *event.Child
	for {
		page, err := read(last)
		if err != nil {
			return nil, err
		}
		if len(page) > limit {
			return nil, fmt.Errorf("a page of %d, want at most %d", len(page), limit)
		}
		all = append(all, page...)
		if len(page) < limit {
			return all, nil
		}
		last = &page[limit-1]
	}
}

func keyOf(c *event.Child) *Key {
	if c == nil {
		return nil
	}
	k := KeyOf(*c)
	return &k
}

func pathOf(c *event.Child) string {
	if c == nil {
		return ""
	}
	return c.Path
}

// same compares got with want.
func same(what string, want, got []event.Child, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if diff := gocmp.Diff(want, got, cmpopts.IgnoreFields(event.Child{}, "Actor"), cmpopts.EquateEmpty()); diff != "" {
		return fmt.Errorf("%s (-want +got):\n%s", what, diff)
	}
	return nil
}

// compare compares every read, in pages of limit.
func (m *model) compare(ctx context.Context, tx pgx.Tx, limit int) error {
	for order, want := range map[Order][]event.Child{Oldest: m.oldest(), Newest: m.newest()} {
		all, err := walk(func(last *event.Child) ([]event.Child, error) {
			return Page(ctx, tx, "comment", "5", order, keyOf(last), limit)
		}, limit)
		if err := same(fmt.Sprintf("pages, newest %t", order), want, all, err); err != nil {
			return err
		}
		for skip := range len(m.comments) + 2 {
			page, err := Skip(ctx, tx, "comment", "5", order, int64(skip), limit)
			if err := same(fmt.Sprintf("skip %d limit %d, newest %t", skip, limit, order), cut(want, skip, limit), page, err); err != nil {
				return err
			}
		}
	}
	all, err := walk(func(last *event.Child) ([]event.Child, error) {
		return Threaded(ctx, tx, "comment", "5", "", pathOf(last), limit)
	}, limit)
	if err := same("threaded", m.threaded(""), all, err); err != nil {
		return err
	}
	if err := m.compareModerated(ctx, tx, limit); err != nil {
		return err
	}
	for _, author := range people[:2] {
		want := slices.DeleteFunc(m.newest(), func(c event.Child) bool { return c.AuthorID != author })
		all, err := walk(func(last *event.Child) ([]event.Child, error) {
			return ByAuthor(ctx, tx, "comment", author, keyOf(last), limit)
		}, limit)
		if err := same(fmt.Sprintf("comments of author %s", author), want, all, err); err != nil {
			return err
		}
	}
	for _, c := range m.comments {
		if err := m.compareAt(ctx, tx, c, limit); err != nil {
			return fmt.Errorf("at comment %s: %w", c.ID, err)
		}
	}
	if err := m.compareSummary(ctx, tx); err != nil {
		return err
	}
	return m.compareTables(ctx, tx)
}

// compareModerated compares the lists of moderators.
func (m *model) compareModerated(ctx context.Context, tx pgx.Tx, limit int) error {
	for _, state := range []string{event.ModerationPending, event.ModerationHidden, event.ModerationRemoved} {
		for _, of := range []Moderated{{State: state}, {State: state, Object: "5"}, {State: state, Author: people[1]},
			{State: state, Author: people[1], Object: "5"}, {State: state, Object: "6"}} {
			want := m.chronological(func(c event.Child) bool {
				return c.AuthorState == event.AuthorActive && c.ModerationState == state &&
					(of.Author == "" || c.AuthorID == of.Author) && of.Object != "6"
			})
			all, err := walk(func(last *event.Child) ([]event.Child, error) { return of.Page(ctx, tx, "comment", keyOf(last), limit) },
				limit)
			if err := same(fmt.Sprintf("%+v", of), want, all, err); err != nil {
				return err
			}
			n, err := of.Count(ctx, tx, "comment", 3)
			if err != nil || n != min(len(want), 3) {
				return fmt.Errorf("%+v: %d children, %w, want %d", of, n, err, len(want))
			}
		}
	}
	var want []Waiting
	if waiting := m.chronological(func(c event.Child) bool { return c.State() == "PENDING" }); len(waiting) > 0 {
		want = []Waiting{{"5", len(waiting), waiting[0].CreatedAt.Time,
			Settings{m.settings.Locked, m.settings.Premoderate, m.settings.Title, m.settings.Version}}}
	}
	got, err := WaitingThreads(ctx, tx, "comment", "", limit)
	if diff := gocmp.Diff(want, got, cmpopts.EquateEmpty()); err != nil || diff != "" {
		return fmt.Errorf("threads that wait: %v (-want +got):\n%s", err, diff)
	}
	return nil
}

// compareAt compares the reads that begin at one comment, in any state.
func (m *model) compareAt(ctx context.Context, tx pgx.Tx, c event.Child, limit int) error {
	got, found, err := BySlug(ctx, tx, "comment", "5", c.Slug)
	if err := same(fmt.Sprintf("by slug, found %t", found), []event.Child{c}, []event.Child{got}, err); err != nil {
		return err
	}
	if _, found, err := BySlug(ctx, tx, "comment", "6", c.Slug); found || err != nil {
		return fmt.Errorf("by slug in another post: %t, %w", found, err)
	}
	got, _, err = ByID(ctx, tx, "comment", c.ID)
	if err := same("by id", []event.Child{c}, []event.Child{got}, err); err != nil {
		return err
	}
	all, err := walk(func(last *event.Child) ([]event.Child, error) {
		return Threaded(ctx, tx, "comment", "5", c.Path, pathOf(last), limit)
	}, limit)
	if err := same("replies", m.threaded(c.Path+"/"), all, err); err != nil {
		return err
	}
	oldest := m.oldest()
	place, _ := slices.BinarySearchFunc(oldest, c, chronological)
	page, earlier, later, err := Around(ctx, tx, "comment", c, limit)
	from := max(0, min(place-limit/2, len(oldest)-limit))
	want := cut(oldest, from, limit)
	if err := same(fmt.Sprintf("%d around", limit), want, page, err); err != nil {
		return err
	}
	if earlier != (from > 0) || later != (from+len(want) < len(oldest)) {
		return fmt.Errorf("Around returned earlier %t, later %t for the comments %d to %d of %d", earlier, later,
			from, from+len(want), len(oldest))
	}
	return nil
}

func (m *model) compareSummary(ctx context.Context, tx pgx.Tx) error {
	newest := m.newest()
	want := Summary{Visible: int64(len(newest)), Total: int64(len(m.comments))}
	if len(newest) > 0 {
		want.LastAt = &newest[0].CreatedAt.Time
	}
	got, err := ReadSummaries(ctx, tx, []string{"comment"}, []event.ID{"5"})
	if diff := gocmp.Diff(want, got[Object{"comment", "5"}]); diff != "" || err != nil {
		return fmt.Errorf("summary: %w (-want +got):\n%s", err, diff)
	}
	settings, err := ReadSettings(ctx, tx, "comment", "5")
	wantSettings := Settings{m.settings.Locked, m.settings.Premoderate, m.settings.Title, m.settings.Version}
	if diff := gocmp.Diff(wantSettings, settings); diff != "" || err != nil {
		return fmt.Errorf("settings: %w (-want +got):\n%s", err, diff)
	}
	if none, err := ReadSettings(ctx, tx, "comment", "99"); err != nil || none != (Settings{}) {
		return fmt.Errorf("another thread has the settings %+v, %w", none, err)
	}
	return nil
}

func (m *model) compareTables(ctx context.Context, tx pgx.Tx) error {
	rows, _ := tx.Query(ctx, `SELECT child_id::text, visible_descendants FROM child_lists`)
	var id string
	var got int
	n := 0
	_, err := pgx.ForEachRow(rows, []any{&id, &got}, func() error {
		n++
		if want := m.descendants(m.comments[id]); want != got {
			return fmt.Errorf("%s has %d visible descendants, want %d", id, got, want)
		}
		return nil
	})
	if err == nil && n != len(m.comments) {
		err = fmt.Errorf("%d rows, want %d", n, len(m.comments))
	}
	return err
}

// checkRanges compares every range's count with its rows, and its size with the bound.
func checkRanges(ctx context.Context, pool *pgxpool.Pool, tenant int64, p Projection) error {
	rows, _ := pool.Query(ctx, `
		SELECT r.level, r.visible, (SELECT count(*) FROM child_lists c WHERE c.tenant_id = $1 AND c.object_id = r.object_id AND c.visible
		         AND (c.created_at, c.child_id) >= (r.first_at, r.first_id) AND (c.created_at, c.child_id) < (r.next_at, r.next_id)),
		       (SELECT count(*) FROM child_buckets b WHERE b.tenant_id = $1 AND b.object_id = r.object_id AND b.level = 0
		         AND (b.first_at, b.first_id) >= (r.first_at, r.first_id) AND (b.first_at, b.first_id) < (r.next_at, r.next_id))
		  FROM (SELECT *, lead(first_at, 1, 'infinity') OVER w AS next_at, lead(first_id, 1, first_id) OVER w AS next_id
		          FROM child_buckets WHERE tenant_id = $1 WINDOW w AS (PARTITION BY object_id, level ORDER BY first_at, first_id)) r`,
		tenant)
	var level, visible, comments, buckets int
	_, err := pgx.ForEachRow(rows, []any{&level, &visible, &comments, &buckets}, func() error {
		if visible != comments || level == 0 && comments > 2*p.bucketSize || level == 1 && (buckets > 2*p.groupSize || buckets == 0) {
			return fmt.Errorf("a range of level %d counts %d, has %d comments and %d buckets (sizes %+v)", level,
				visible, comments, buckets, p)
		}
		return nil
	})
	return err
}

// drawTree draws a random thread of up to n comments.
func drawTree(rt *rapid.T, n int) (tree []event.Child) {
	for n := range rapid.IntRange(1, n).Draw(rt, "comments") {
		parent := rapid.IntRange(-1, n-1).Draw(rt, "parent")
		if parent < 0 {
			tree = append(tree, made(n, nil))
		} else {
			tree = append(tree, made(n, &tree[parent]))
		}
	}
	return tree
}

// drawBatch draws versions of the tree's comments and of its settings in any order. It delivers
// them to the model and returns the events.
func drawBatch(rt *rapid.T, m *model, tenant int64, tree []event.Child) (batch []event.Event) {
	for range rapid.IntRange(0, 12).Draw(rt, "events") {
		n := rapid.IntRange(-1, len(tree)-1).Draw(rt, "comment")
		version := rapid.Int64Range(1, 7).Draw(rt, "version")
		if n < 0 {
			t := event.Thread{PostID: "5", Version: version, Locked: version%2 == 0, Premoderate: version%3 == 0,
				Title: fmt.Sprint("title ", version)}
			if version > m.settings.Version {
				m.settings = t
			}
			batch = append(batch, threadEvent(tenant, t))
			continue
		}
		c := at(tree[n], n, version)
		batch = append(batch, toEvent(tenant, c))
		m.deliver(c)
	}
	return batch
}

func threadEvent(tenant int64, t event.Thread) event.Event {
	payload, err := json.Marshal(t)
	if err != nil {
		panic(err)
	}
	return event.Event{ID: fmt.Sprint("thread-", t.Version), TenantID: tenant, AggregateType: event.AggregateThread,
		AggregateID: t.PostID, Type: event.Updated, Version: 1, Payload: payload}
}

// TestAnyDeliveryEndsInAFoldOfTheTruth delivers versions of random trees of two tenants in any
// order: replies before their parents, comments out of their order, cut at any place, with
// repetitions. The buckets have any size. The test compares all reads with a fold of the newest
// delivered version of each entity.
func TestAnyDeliveryEndsInAFoldOfTheTruth(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	tenant := int64(0)
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant += 2
		p := Projection{kinds: kinds.Builtin, bucketSize: rapid.IntRange(1, 3).Draw(rt, "bucket size"),
			groupSize: rapid.IntRange(1, 3).Draw(rt, "group size")}
		trees := [][]event.Child{drawTree(rt, 14), drawTree(rt, 3)}
		models := []*model{newModel(), newModel()}
		for range rapid.IntRange(1, 5).Draw(rt, "batches") {
			var batch []event.Event
			for i := range trees {
				batch = append(batch, drawBatch(rt, models[i], tenant+int64(i), trees[i])...)
			}
			if err := apply(ctx, pool, p, batch); err != nil {
				rt.Fatal(err)
			}
		}
		limit := rapid.IntRange(1, 6).Draw(rt, "limit")
		for i, m := range models { // at the history's end alone: a shorter history is one that is drawn too
			err := postgres.InTenant(ctx, api, tenant+int64(i), pgx.TxOptions{},
				func(tx pgx.Tx) error { return m.compare(ctx, tx, limit) })
			if err == nil {
				err = checkRanges(ctx, pool, tenant+int64(i), p)
			}
			if err != nil {
				rt.Fatal(err)
			}
		}
	})
}

func apply(ctx context.Context, pool *pgxpool.Pool, p Projection, batch []event.Event) error {
	return postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return p.Apply(ctx, tx, batch) })
}

// TestEventsThatComeLateOrTwiceChangeNothing delivers a reply before its comment, and old versions
// after new ones.
func TestEventsThatComeLateOrTwiceChangeNothing(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	root := made(1, nil)
	reply := made(2, &root)
	gone, again := reply, reply
	gone.Version, gone.AuthorState, gone.Body, again.Version = 2, event.AuthorDeleted, "", 3
	old := threadEvent(1, event.Thread{PostID: "5", Version: 2})
	settings := threadEvent(1, event.Thread{PostID: "5", Version: 3, Locked: true})
	rootEvent, replyEvent, goneEvent, againEvent := toEvent(1, root), toEvent(1, reply), toEvent(1, gone), toEvent(1, again)
	for _, step := range []struct {
		name                                   string
		events                                 []event.Event
		visible, total, below, reply, settings int
	}{
		{"a reply before its comment", []event.Event{replyEvent}, 1, 1, 0, 1, 0},
		{"its comment", []event.Event{rootEvent}, 2, 2, 1, 1, 0},
		{"its deletion, and settings", []event.Event{goneEvent, settings}, 1, 2, 0, 2, 3},
		{"older versions", []event.Event{replyEvent, old}, 1, 2, 0, 2, 3},
		{"its return", []event.Event{againEvent}, 2, 2, 1, 3, 3},
		{"all of them again", []event.Event{againEvent, goneEvent, rootEvent, old, replyEvent, settings}, 2, 2, 1, 3, 3},
	} {
		if err := apply(t.Context(), pool, New(kinds.Builtin), step.events); err != nil {
			t.Fatal(err)
		}
		got := step
		if err := pool.QueryRow(t.Context(), `SELECT coalesce((SELECT sum(visible) FROM child_buckets WHERE level = 0), 0),
			coalesce((SELECT total FROM child_totals), 0),
			coalesce((SELECT visible_descendants FROM child_lists WHERE slug = '00000001'), 0),
			(SELECT version FROM child_lists WHERE slug = '00000002'),
			coalesce((SELECT version FROM child_settings WHERE version < 3 OR locked), 0)`,
		).Scan(&got.visible, &got.total, &got.below, &got.reply, &got.settings); err != nil {
			t.Fatal(err)
		}
		if got, want := fmt.Sprint(got.visible, got.total, got.below, got.reply, got.settings),
			fmt.Sprint(step.visible, step.total, step.below, step.reply, step.settings); got != want {
			t.Errorf("%s: visible, total, below the comment, versions of the reply and of the settings: %s, want %s", step.name, got, want)
		}
	}
}

// TestAWalkWhileOthersWriteMeetsOnceWhatStays writes a batch before each page of a walk. The walk
// must return every comment that was visible throughout exactly once, and no comment twice.
func TestAWalkWhileOthersWriteMeetsOnceWhatStays(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	tenant := int64(0)
	type walking struct {
		name string
		read func(ctx context.Context, tx pgx.Tx, last *event.Child, limit int) ([]event.Child, error)
		seen func(m *model) []event.Child
	}
	page := func(order Order) func(context.Context, pgx.Tx, *event.Child, int) ([]event.Child, error) {
		return func(ctx context.Context, tx pgx.Tx, last *event.Child, limit int) ([]event.Child, error) {
			return Page(ctx, tx, "comment", "5", order, keyOf(last), limit)
		}
	}
	walks := []walking{
		{"oldest", page(Oldest), (*model).oldest},
		{"newest", page(Newest), (*model).newest},
		{"threaded", func(ctx context.Context, tx pgx.Tx, last *event.Child, limit int) ([]event.Child, error) {
			return Threaded(ctx, tx, "comment", "5", "", pathOf(last), limit)
		}, func(m *model) []event.Child { return m.threaded("") }},
	}
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant++
		m, tree := newModel(), drawTree(rt, 20)
		var first []event.Event
		for n, c := range tree {
			if n%4 != 0 { // the walk's batches write the others
				m.deliver(c)
				first = append(first, toEvent(tenant, c))
			}
		}
		if err := apply(ctx, pool, New(kinds.Builtin), first); err != nil {
			rt.Fatal(err)
		}
		w := rapid.SampledFrom(walks).Draw(rt, "order")
		limit := rapid.IntRange(1, 5).Draw(rt, "limit")
		met, throughout, reads := map[string]int{}, map[string]int{}, 0
		_, err := walk(func(last *event.Child) (page []event.Child, err error) {
			if err := apply(ctx, pool, New(kinds.Builtin), drawBatch(rt, m, tenant, tree)); err != nil {
				return nil, err
			}
			reads++
			for _, c := range w.seen(m) {
				throughout[c.ID]++
			}
			err = postgres.InTenant(ctx, api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
				page, err = w.read(ctx, tx, last, limit)
				return err
			})
			for _, c := range page {
				met[c.ID]++
			}
			return page, err
		}, limit)
		if err != nil {
			rt.Fatal(err)
		}
		for id, n := range met {
			if n > 1 {
				rt.Errorf("%s: the walk returned %s %d times", w.name, id, n)
			}
		}
		for id, n := range throughout {
			if n == reads && met[id] != 1 {
				rt.Errorf("%s: the walk returned %s %d times, although it was visible throughout", w.name, id, met[id])
			}
		}
	})
}

// TestSkipCountsWhatIsLeft has the buckets of the example in the documents: 100, 102, 101 and 22
// comments. After the first 300 there are 25.
func TestSkipCountsWhatIsLeft(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	p, m := Projection{kinds: kinds.Builtin, bucketSize: 102, groupSize: 2}, newModel()
	write := func(from, to int, change func(*event.Child)) {
		t.Helper()
		var batch []event.Event
		for n := from; n < to; n++ {
			c := made(n, nil)
			change(&c)
			m.deliver(c)
			batch = append(batch, toEvent(1, c))
		}
		if err := apply(ctx, pool, p, batch); err != nil {
			t.Fatal(err)
		}
	}
	counts := func(level int) []int {
		t.Helper()
		rows, _ := pool.Query(ctx, `SELECT visible FROM child_buckets WHERE level = $1 ORDER BY first_at, first_id`, level)
		got, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	gone := func(c *event.Child) { c.Version, c.AuthorState, c.Body = 2, event.AuthorDeleted, "" }
	write(0, 511, func(*event.Child) {})
	if diff := gocmp.Diff([]int{102, 102, 102, 102, 103}, counts(0)); diff != "" {
		t.Errorf("buckets (-want +got):\n%s", diff)
	}
	write(50, 52, gone)
	write(300, 301, gone)
	write(306, 386, gone)
	write(408, 511, gone)
	if diff := gocmp.Diff([]int{100, 102, 101, 22, 0}, counts(0)); diff != "" {
		t.Errorf("buckets after deletions (-want +got):\n%s", diff)
	}
	if diff := gocmp.Diff([]int{202, 123}, counts(1)); diff != "" {
		t.Errorf("groups after deletions (-want +got):\n%s", diff)
	}
	for order, all := range map[Order][]event.Child{Oldest: m.oldest(), Newest: m.newest()} {
		for _, skip := range []int{0, 22, 99, 100, 201, 202, 300, 302, 303, 324, 325, 326, 1 << 40} {
			err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
				page, err := Skip(ctx, tx, "comment", "5", order, int64(skip), 50)
				if skip == 300 && len(page) != 25 {
					t.Errorf("after the first 300 there are %d comments, want 25", len(page))
				}
				return same(fmt.Sprintf("skip %d, newest %t", skip, order), cut(all, skip, 50), page, err)
			})
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// explain runs a statement, and returns the rows that its scans of each table read and the indexes
// that they used.
func explain(ctx context.Context, tx pgx.Tx, sql string,
	args pgx.StrictNamedArgs) (rows map[string]float64, indexes map[string]bool, err error) {
	var raw []byte
	if err := tx.QueryRow(ctx, "EXPLAIN (ANALYZE, FORMAT JSON) "+sql, args).Scan(&raw); err != nil {
		return nil, nil, err
	}
	var plans []map[string]any
	if err := json.Unmarshal(raw, &plans); err != nil {
		return nil, nil, err
	}
	rows, indexes = map[string]float64{}, map[string]bool{}
	var visit func(node map[string]any)
	visit = func(node map[string]any) {
		if name, ok := node["Index Name"].(string); ok {
			indexes[name] = true
		}
		if table, ok := node["Relation Name"].(string); ok {
			removed, _ := node["Rows Removed by Filter"].(float64)
			rows[table] += (node["Actual Rows"].(float64) + removed) * node["Actual Loops"].(float64)
		}
		children, _ := node["Plans"].([]any)
		for _, child := range children {
			visit(child.(map[string]any))
		}
	}
	visit(plans[0]["Plan"].(map[string]any))
	return rows, indexes, nil
}

// A consumer's small batches share plans, which may be from a time when the tables were empty. They
// must probe keys nevertheless: in a thread of some thousand replies, a batch took a second.
func TestPlansOfEmptyTablesProbeAncestorsAndRanges(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx := t.Context()
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, "ANALYZE child_lists, child_buckets"); err != nil {
		t.Fatal(err)
	}
	const posts, replies = 50, 10
	var events []event.Event
	var first event.Child
	for post := range posts {
		first = written(event.IDOf(post+1), 0, nil)
		events = append(events, toEvent(1, first))
		for n := range replies {
			events = append(events, toEvent(1, written(first.Parent, n+1, &first)))
		}
	}
	key := fmt.Sprintf("'{1}', '{comment}', '{%s}', ", first.Parent)
	err := postgres.InTx(ctx, db.Pool(t, postgres.RoleSystem), pgx.TxOptions{}, func(tx pgx.Tx) error {
		for _, sql := range []string{asConsumersDoSQL, "SET LOCAL plan_cache_mode = force_generic_plan"} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		hot := map[string]string{"descendants": key + fmt.Sprintf("'{%s}', '{1}'", first.Path),
			"counts": key + fmt.Sprintf("'{2026-01-01}', '{%s}', '{1}', 200", first.ID)}
		for name, sql := range map[string]string{"descendants": descendantsSQL, "counts": countsSQL} {
			positional, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, tx.Conn(), sql, nil)
			if err != nil {
				return err
			}
			for _, sql := range []string{"PREPARE " + name + " AS " + positional, "EXPLAIN EXECUTE " + name + "(" + hot[name] + ")"} {
				if _, err := tx.Exec(ctx, sql); err != nil {
					return err
				}
			}
		}
		if err := New(kinds.Builtin).Apply(ctx, tx, events); err != nil {
			return err
		}
		for name, args := range hot {
			rows, _, err := explain(ctx, tx, "EXECUTE "+name+"("+args+")", nil)
			if err != nil {
				return err
			}
			if n := rows["child_lists"] + rows["child_buckets"]; n < 1 || n > 10 {
				t.Errorf("%s reads %v", name, rows)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var errUndo = errors.New("roll back")

// TestManyObjectsAreProbes reads the numbers of 200 objects of 5,000, in tables with and without
// statistics.
func TestManyObjectsAreProbes(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	const objects, asked = 5000, 200
	var ids []event.ID
	for n := range asked {
		ids = append(ids, event.IDOf(int64(n*objects/asked+1)))
	}
	for _, sql := range []string{
		`INSERT INTO child_totals (tenant_id, kind, object_id, total) SELECT 1, 'review', n, 2 FROM generate_series(1, $1::int) n`,
		`INSERT INTO child_buckets (tenant_id, kind, object_id, level, first_at, first_id, visible)
		 SELECT 1, 'review', n, level, '-infinity', '00000000-0000-0000-0000-000000000000', 2
		   FROM generate_series(1, $1::int) n, generate_series(0, 1) level`,
		`INSERT INTO child_aggregates (tenant_id, kind, object_id, attribute, count, sum)
		 SELECT 1, 'review', n, 'rating', 2, 7 FROM generate_series(1, $1::int) n`,
		`INSERT INTO child_lists (tenant_id, kind, child_id, object_id, author_id, body, author_state, moderation_state, version,
		   created_at, updated_at, visible, shown)
		 SELECT 1, 'review', gen_random_uuid(), n, m, '', 'ACTIVE', 'NONE', 1, timestamptz '2026-01-01' + m * interval '1 s',
		   '2026-01-01', true, true
		   FROM generate_series(1, $1::int) n, generate_series(1, 2) m`,
	} {
		if _, err := pool.Exec(ctx, sql, objects); err != nil {
			t.Fatal(err)
		}
	}
	for _, when := range []string{"without statistics", "with statistics"} {
		if when == "with statistics" {
			if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, `ANALYZE child_totals, child_buckets, child_aggregates,
				child_lists`); err != nil {
				t.Fatal(err)
			}
		}
		if err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
			for sql, want := range map[string]map[string]float64{
				summariesSQL:      {"child_totals": asked, "child_buckets": asked, "child_lists": asked},
				readAggregatesSQL: {"child_aggregates": asked},
			} {
				rows, _, err := explain(ctx, tx, sql, pgx.StrictNamedArgs{"kinds": []string{"review"}, "objects": ids})
				if err != nil {
					return err
				}
				if diff := gocmp.Diff(want, rows); diff != "" {
					t.Errorf("%s the statement reads other rows (-want +got):\n%s", when, diff)
				}
			}
			sums, err := ReadSummaries(ctx, tx, []string{"comment", "review"}, append(ids, "none"))
			if err != nil {
				return err
			}
			for _, id := range append(ids, "none") {
				var want Summary
				if id != "none" {
					last := time.Date(2026, 1, 1, 0, 0, 2, 0, time.UTC)
					want = Summary{Visible: 2, Total: 2, LastAt: &last}
				}
				if diff := gocmp.Diff([]Summary{want, {}}, []Summary{sums[Object{"review", id}], sums[Object{"comment", id}]}); diff != "" {
					t.Errorf("%s (-want +got):\n%s", id, diff)
				}
			}
			all, err := ReadAggregates(ctx, tx, []string{"comment", "review"}, append(ids, "none"))
			if err == nil && len(all) != asked {
				t.Errorf("aggregates of %d objects", len(all))
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCostsDoNotGrowWithTheThread has 4,000 comments in 200 buckets, in tables without statistics.
func TestCostsDoNotGrowWithTheThread(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	const comments, limit = 4000, 10
	p := Projection{kinds: kinds.Builtin, bucketSize: 20, groupSize: 10}
	var batch []event.Event
	for n := range comments {
		batch = append(batch, toEvent(1, made(n, nil)))
	}
	// childrenSQL must find a new comment's descendants and its former state by keys, also in an
	// empty table. PostgreSQL makes the plan of the first batch then, and that plan meets all rows
	// of the batch.
	explainNew := func(when string, n int) {
		t.Helper()
		if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
				return err
			}
			c := made(n, nil)
			rows, indexes, err := explain(ctx, tx, childrenSQL, pgx.StrictNamedArgs{
				"tenants": []int64{1}, "kinds": []string{"comment"}, "attributes": []*string{nil}, "ids": []string{c.ID},
				"objects": []string{"5"}, "parents": []*string{nil}, "slugs": []string{c.Slug},
				"paths": []string{c.Path}, "authors": []string{"1"}, "bodies": []string{""}, "author_states": []string{c.AuthorState},
				"moderation_states": []string{c.ModerationState}, "versions": []int64{1}, "created_ats": []time.Time{start},
				"updated_ats": []time.Time{start}, "visibles": []bool{true},
			})
			want := map[string]bool{"child_lists_pkey": true, "child_lists_path_idx": true}
			if diff := gocmp.Diff(want, indexes); err == nil && (rows["child_lists"] > 1 || diff != "") {
				t.Errorf("%s a new comment reads %v by (-want +got):\n%s", when, rows, diff)
			}
			return cmp.Or(err, errUndo)
		}); !errors.Is(err, errUndo) {
			t.Fatal(err)
		}
	}
	explainNew("with no comment", 0)
	if err := apply(ctx, pool, p, batch); err != nil {
		t.Fatal(err)
	}
	err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		for _, sql := range []string{skipOldestSQL, skipNewestSQL} {
			for _, skip := range []int{0, 30, 2000, 3989} {
				rows, _, err := explain(ctx, tx, sql, pgx.StrictNamedArgs{"kind": "comment", "object": "5", "skip": skip, "limit": limit})
				if err != nil {
					return err
				}
				if rows["child_lists"] > 2*20+limit || rows["child_buckets"] > comments/20/10+2*10 {
					t.Errorf("skip %d reads %v", skip, rows)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	explainNew("with 4,000 comments", comments)
	// The index of paths is now one level higher than the primary key, so any other plan looks
	// cheaper.
	if _, err := pool.Exec(ctx, `
INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state, moderation_state, version,
	created_at, updated_at, visible, shown)
SELECT 1, 'comment', ('00000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, 5, 'x' || lpad(n::text, 7, '0'),
	lpad(n::text, 22, '0'), 1, '', 'ACTIVE', 'NONE', 1, $1, $1, true, true
  FROM generate_series(1, 24000) n`, start); err != nil {
		t.Fatal(err)
	}
	explainNew("with 28,000 comments", comments)
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, asConsumersDoSQL); err != nil {
			return err
		}
		rows, indexes, err := explain(ctx, tx, descendantsSQL,
			pgx.StrictNamedArgs{"tenants": []int64{1}, "kinds": []string{"comment"}, "objects": []string{"5"},
				"paths": []string{made(0, nil).Path}, "deltas": []int32{1}})
		// found by its path, changed by its key
		if diff := gocmp.Diff(map[string]bool{"child_lists_path_idx": true, "child_lists_pkey": true}, indexes); err == nil &&
			(rows["child_lists"] > 2 || diff != "") {
			t.Errorf("an ancestor reads %v by (-want +got):\n%s", rows, diff)
		}
		return cmp.Or(err, errUndo)
	}); !errors.Is(err, errUndo) {
		t.Fatal(err)
	}
}

func TestAPayloadThatIsNoCommentIsPermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, change := range map[string]func(*event.Child){
		"an invalid id":             func(c *event.Child) { c.ID = "42" },
		"an invalid parent":         func(c *event.Child) { c.ReplyTo = "42" },
		"no version":                func(c *event.Child) { c.Version = 0 },
		"a path cut short":          func(c *event.Child) { c.Path = c.Path[1:] },
		"a path without separators": func(c *event.Child) { c.Path = strings.Repeat("0", 45) },
		"no path":                   func(c *event.Child) { c.Path = "" },
		"another post":              func(c *event.Child) { c.Parent = "6" },
	} {
		c := made(1, nil)
		change(&c)
		e := toEvent(1, c)
		e.AggregateID = "5"
		ctx := context.Background()
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			return New(kinds.Builtin).Apply(ctx, tx, []event.Event{e})
		})
		if !event.IsPermanent(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A reader applies the events of its token beside the consumer (api.readProjection). If both create
// a post's first bucket, the reader has to run its transaction again.
func TestAReaderThatMeetsTheConsumersFirstBucketRunsAgain(t *testing.T) {
	ctx := t.Context()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	p := New(kinds.Builtin)
	apply := func(tx pgx.Tx, all ...event.Child) error {
		var events []event.Event
		for _, c := range all {
			events = append(events, toEvent(1, c))
		}
		return p.Apply(ctx, tx, events)
	}
	as := func(n int, state string, version int64) event.Child {
		c := made(n, nil)
		c.ModerationState, c.Version = state, version
		return c
	}
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		return apply(tx, as(1, event.ModerationPending, 1), as(2, event.ModerationPending, 1))
	}); err != nil {
		t.Fatal(err)
	}
	var visible []int64
	err := postgres.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(reader pgx.Tx) error {
		var seen int64
		if err := reader.QueryRow(ctx, `SELECT coalesce(sum(visible), 0) FROM child_buckets WHERE level = 0`).Scan(&seen); err != nil {
			return err
		}
		if visible = append(visible, seen); len(visible) == 1 { // the consumer commits after the reader's snapshot
			if err := postgres.InTx(ctx, pool, pgx.TxOptions{},
				func(tx pgx.Tx) error { return apply(tx, as(1, event.ModerationApproved, 2)) }); err != nil {
				return err
			}
		}
		return apply(reader, as(2, event.ModerationApproved, 2))
	})
	if diff := gocmp.Diff([]int64{0, 1}, visible); err != nil || diff != "" {
		t.Errorf("%v; counts that the reader saw at each try (-want +got):\n%s", err, diff)
	}
	var n int64
	if err := pool.QueryRow(ctx, `SELECT sum(visible) FROM child_buckets WHERE level = 0`).Scan(&n); err != nil || n != 2 {
		t.Errorf("%d visible comments, %v: want 2", n, err)
	}
}

func TestSettingsOfAnotherPostOrWithoutAVersionArePermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, settings := range []event.Thread{{PostID: "6", Version: 1}, {PostID: "5"}} {
		e := threadEvent(1, settings)
		e.AggregateID = "5"
		if err := apply(t.Context(), pool, New(kinds.Builtin), []event.Event{e}); !event.IsPermanent(err) {
			t.Errorf("%+v: %v", settings, err)
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
	for n, c := range []event.Child{root, child, grandchild, other} {
		for v := int64(1); v <= int64(n+1); v++ {
			events = append(events, toEvent(1, at(c, n+1, v)))
		}
	}
	events = append(events, threadEvent(1, event.Thread{PostID: "5", Locked: true, Title: "one", Version: 3}))
	if err := apply(ctx, pool, New(kinds.Builtin), events); err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO threads (tenant_id, object, metadata) SELECT tenant_id,
	  jsonb_build_object('post_id', object_id::text, 'locked', locked, 'premoderated', premoderated, 'title', title, 'version', version),
	  '{"version_id": 1, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}' FROM child_settings`)
	exec(`INSERT INTO comments (tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state,
		version, created_at, updated_at)
	  SELECT tenant_id, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at,
	  updated_at FROM child_lists`)
	verify := func() (got []string) {
		checked, err := New(kinds.Builtin).Verify(ctx, pool, pool, func(d projections.Difference) {
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
	for _, table := range New(kinds.Builtin).Tables() { // and rebuild them from the truth
		exec(`DELETE FROM ` + table)
	}
	events = nil
	for e, err := range New(kinds.Builtin).Truth(ctx, pool) {
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, e)
	}
	if err := apply(ctx, pool, New(kinds.Builtin), events); err != nil {
		t.Fatal(err)
	}
	if got := verify(); len(got) > 0 {
		t.Errorf("tables rebuilt from the truth differ: %q", got)
	}
	exec(`UPDATE child_lists SET visible_descendants = 7, shown = true WHERE slug = '00000001'`)
	exec(`UPDATE comments SET body = 'another', version = 9 WHERE slug = '00000003'`)
	exec(`DELETE FROM comments WHERE slug = '00000004'`)
	exec(`UPDATE child_buckets SET visible = 9 WHERE level = 0`)
	exec(`DELETE FROM child_buckets WHERE level = 1`)
	exec(`UPDATE child_totals SET total = 7`)
	exec(`UPDATE child_settings SET locked = false, title = 'other', version = 2`)
	got := verify()
	want := []string{
		"3 of post 5: version is 3, want 9", "3 of post 5: body is 18 different bytes, want 7 bytes",
		fmt.Sprintf("1 of post 5: visible_descendants is 7, want %d",
			boolInt(at(child, 2, 2).Visible())+boolInt(at(grandchild, 3, 3).Visible())),
		"4 of post 5: row is present, want absent",
		"threadcache: tenant 1, bucket from 0001-01-01T00:00:00.000000Z 00000000-0000-0000-0000-000000000000 of post 5: " +
			"visible is 9, want 1",
		"threadcache: tenant 1, group from 2026-01-02T03:04:05.000000Z 00000000-0000-7000-8000-000000000001 of post 5: " +
			"visible is absent, want 1",
		"threadcache: tenant 1, thread of post 5: locked is false, want true",
		"threadcache: tenant 1, thread of post 5: settings version is 2, want 3",
		"threadcache: tenant 1, thread of post 5: title is other, want one",
		"threadcache: tenant 1, thread of post 5: total is 7, want 3",
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

func TestVerifyCountsEachRangeOfEachThread(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := t.Context()
	var events []event.Event
	for n := range 60 { // comments of the posts 5, 7 and p:9, not in the order of their ids
		c := made(60-n, nil)
		c.Parent = []event.ID{"5", "7", "p:9"}[n%3]
		events = append(events, toEvent(1, c))
	}
	if err := apply(ctx, pool, Projection{kinds: kinds.Builtin, bucketSize: 2, groupSize: 2}, events); err != nil {
		t.Fatal(err)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO comments (tenant_id, comment_id, post_id, parent_id, slug, path, author_id, body, author_state, moderation_state,
		version, created_at, updated_at)
	  SELECT tenant_id, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state, version, created_at,
	  updated_at FROM child_lists`)
	verify := func() (got []string) {
		t.Helper()
		if _, err := New(kinds.Builtin).Verify(ctx, pool, pool, func(d projections.Difference) {
			got = append(got, fmt.Sprintf("%s %s: %s, not %s", d.Key.Aggregate, d.Entity[:strings.Index(d.Entity, " ")], d.Got, d.Want))
		}); err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := verify(); len(got) > 0 {
		t.Fatalf("equal counts differ: %q", got)
	}
	exec(`UPDATE child_buckets SET visible = visible + 100 WHERE (level, object_id, first_id) IN
	  (SELECT level, object_id, first_id FROM child_buckets WHERE level = 0 AND object_id = '7'
	   ORDER BY first_at, first_id OFFSET 2 LIMIT 1)`)
	exec(`DELETE FROM child_buckets WHERE (level, object_id, first_id) IN
	  (SELECT level, object_id, first_id FROM child_buckets WHERE level = 1 AND object_id = 'p:9' ORDER BY first_at, first_id LIMIT 1)`)
	exec(`INSERT INTO child_buckets (tenant_id, kind, object_id, level, first_at, first_id, visible)
	  SELECT 1, 'comment', post, 0, '-infinity', '00000000-0000-0000-0000-000000000000', 3 FROM unnest('{4, 6, 10, 11}'::text[]) post`)
	exec(`INSERT INTO child_totals (tenant_id, kind, object_id, total) VALUES (1, 'comment', 11, 8)`)
	got := verify()
	want := []string{"10 bucket: 3, not 0", "11 thread: 8, not 0", "11 bucket: 3, not 0", "4 bucket: 3, not 0", "6 bucket: 3, not 0",
		"7 bucket: 1", "p:9 group: absent, not"}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("got %q, want %q", got, want)
	}
}
