package history

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

func TestRetentionTakesTheHistoriesOfWhatIsGoneAndNothingMissesThem(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	ctx := t.Context()
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	id := func(n int) string { return fmt.Sprintf("0190a000-0000-7000-8000-%012d", n) }
	const ( // ids of comments, and of users whom user 7 follows
		living  = iota + 1
		hidden  // also living
		deleted // long ago
		behind  // deleted long ago, but the truth has a later version
		orphan  // missing in the truth
		recent  // deleted recently
	)
	long, now := start, time.Now()
	var events []event.Event
	for n := living; n <= recent; n++ {
		for _, tenant := range []int64{1, 2} { // in the other tenant all are living
			for v := range int64(2) {
				gone := tenant == 1 && v == 1 && (n == deleted || n == behind || n == recent)
				c := event.Child{ID: id(n), Parent: "5", AuthorID: "7", Body: "x", AuthorState: event.AuthorActive,
					ModerationState: event.ModerationNone, Version: v + 1, Actor: "ann"}
				f := event.Edge{From: "7", To: event.IDOf(100 + n), Status: event.StatusActive, Version: v + 1, Actor: "ann"}
				c.UpdatedAt.Time, f.UpdatedAt.Time = long, long
				if gone {
					c.AuthorState, f.Status = event.AuthorDeleted, event.StatusRemoved
				}
				if n == recent {
					c.UpdatedAt.Time, f.UpdatedAt.Time = now, now
				}
				for _, e := range []event.Event{toEvent(event.AggregateComment, event.Edited, c),
					toEvent(event.AggregateFollow, event.Created, f)} {
					e.TenantID = tenant
					events = append(events, e)
				}
			}
			if tenant == 1 && n == orphan {
				continue
			}
			version, author, moderation, status := 2, event.AuthorActive, event.ModerationNone, event.StatusActive
			if tenant == 1 && (n == deleted || n == recent) {
				author, status = event.AuthorDeleted, event.StatusRemoved
			}
			if n == hidden {
				moderation = event.ModerationHidden
			}
			if tenant == 1 && n == behind { // the pair is followed again; the comment was moderated
				version, author = 3, event.AuthorDeleted
			}
			exec(`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body, author_state, moderation_state,
				version)
			  VALUES ($1, $2, 5, $3, '00000000000000' || $3, 7, 'x', $4, $5, $6)`, tenant, id(n), fmt.Sprintf("abcdefg%d", n),
				author, moderation, version)
			exec(`INSERT INTO follows (tenant_id, follower_id, followee_id, status, version) VALUES ($1, 7, $2, $3, $4)`,
				tenant, event.IDOf(100+n), status, version)
		}
	}
	apply(t, pool, events...)
	var done [2][3]int64
	retain := func(after time.Duration) {
		t.Helper()
		done = [2][3]int64{}
		for i, step := range []func(int) error{
			func(i int) error {
				return RetainChildren(ctx, pool, pool, commentKind,
					versioned.Terms{After: after, Done: func(e, p, v int64) {
						done[i][0], done[i][1], done[i][2] = done[i][0]+e, done[i][1]+p, done[i][2]+v
					}})
			},
			func(i int) error {
				return RetainEdges(ctx, pool, pool, followKind, versioned.Terms{After: after,
					Done: func(e, p, v int64) { done[i][0], done[i][1], done[i][2] = done[i][0]+e, done[i][1]+p, done[i][2]+v }})
			},
		} {
			if err := step(i); err != nil {
				t.Fatal(err)
			}
		}
	}
	heads := func() (all []string) {
		t.Helper()
		rows, _ := pool.Query(ctx, `SELECT concat_ws(' ', tenant_id, 'c', right(comment_id::text, 1), version, version_state,
			metadata ->> 'created_by') FROM comment_history WHERE version_state <> 'ARCHIVED' AND tenant_id = 1
		   UNION ALL SELECT concat_ws(' ', tenant_id, 'f', followee_id::int - 100, version, version_state, metadata ->> 'created_by')
		   FROM follow_history WHERE version_state <> 'ARCHIVED' AND tenant_id = 1 ORDER BY 1`)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		var others int
		if err := pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM comment_history WHERE tenant_id = 2) + (SELECT count(*)
			FROM follow_history WHERE tenant_id = 2)`).Scan(&others); err != nil || others != 2*2*recent {
			t.Errorf("the other tenant has %d versions, %v: want %d", others, err, 2*2*recent)
		}
		return all
	}
	differences := func() (all []string) {
		t.Helper()
		if _, err := New(kinds.Builtin).Verify(ctx, pool, pool,
			func(d projections.Difference) { all = append(all, fmt.Sprint(d.Entity, " ", d.Field)) }); err != nil {
			t.Fatal(err)
		}
		return all
	}
	of := func(lines ...string) (all []string) {
		for _, kind := range []string{"c", "f"} {
			for _, l := range lines {
				all = append(all, "1 "+kind+" "+l)
			}
		}
		return all
	}
	before := heads()
	retain(0)
	if diff := cmp.Diff(before, heads()); diff != "" {
		t.Errorf("without a setting (-before +after):\n%s", diff)
	}
	retain(time.Hour)
	want := of("1 2 LATEST ann", "2 2 LATEST ann", "4 2 DELETED ann", "5 3 DELETED retention", "6 2 DELETED ann")
	if diff := cmp.Diff(want, heads()); diff != "" || done != [2][3]int64{{1, 1, 2}, {1, 1, 2}} {
		t.Errorf("after an hour, %v (-want +got):\n%s", done, diff)
	}
	wantDiffering := []string{"history of comment " + id(behind) + " version", "history of follow 7/104 version",
		"history of follow 7/104 deleted"}
	if diff := cmp.Diff(wantDiffering, differences()); diff != "" { // the versions that the archiver has not applied
		t.Errorf("verify (-want +got):\n%s", diff)
	}
	// The same events again, as in a replay, and a repair restore no purged history.
	apply(t, pool, events...)
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		keys := []projections.Key{{Type: event.AggregateComment, TenantID: 1, Child: id(deleted)},
			{Type: event.AggregateFollow, TenantID: 1, Aggregate: event.IDOf(100 + deleted), Other: "7"}}
		_, err := New(kinds.Builtin).Repair(ctx, tx, pool, keys, func(int64, string, event.ID) bool { return false })
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range New(kinds.Builtin).Truth(ctx, pool) {
		if err != nil {
			t.Fatal(err)
		}
		if e.TenantID == 1 {
			apply(t, pool, e)
		}
	}
	want = of("1 2 LATEST ann", "2 2 LATEST ann", "4 3 DELETED unrecorded", "5 3 DELETED retention", "6 2 DELETED ann")
	want[7] = "1 f 4 3 LATEST unrecorded"
	if diff := cmp.Diff(want, heads()); diff != "" {
		t.Errorf("after a replay (-want +got):\n%s", diff)
	}
	if got := differences(); len(got) > 0 {
		t.Errorf("verify: %q", got)
	}
	// The next round purges the history of the orphan. A pair that is followed again starts a new
	// history at its next version.
	exec(`UPDATE comment_history SET metadata = jsonb_set(metadata, '{last_update_time}', '"2026-01-03T00:00:00.000000Z"')
		WHERE metadata ->> 'created_by' = 'retention'`)
	exec(`UPDATE follow_history SET metadata = jsonb_set(metadata, '{last_update_time}', '"2026-01-03T00:00:00.000000Z"')
		WHERE metadata ->> 'created_by' = 'retention'`)
	retain(time.Hour)
	exec(`UPDATE follows SET status = 'ACTIVE', version = 3 WHERE tenant_id = 1 AND followee_id = $1`, event.IDOf(100+deleted))
	apply(t, pool, func() event.Event {
		f := event.Edge{From: "7", To: event.IDOf(100 + deleted), Status: event.StatusActive, Version: 3, Actor: "bob"}
		f.UpdatedAt.Time = now
		return toEvent(event.AggregateFollow, event.Created, f)
	}())
	want = []string{"1 c 1 2 LATEST ann", "1 c 2 2 LATEST ann", "1 c 4 3 DELETED unrecorded", "1 c 6 2 DELETED ann",
		"1 f 1 2 LATEST ann", "1 f 2 2 LATEST ann", "1 f 3 3 LATEST bob", "1 f 4 3 LATEST unrecorded", "1 f 6 2 DELETED ann"}
	if diff := cmp.Diff(want, heads()); diff != "" {
		t.Errorf("followed again (-want +got):\n%s", diff)
	}
	if got := differences(); len(got) > 0 {
		t.Errorf("verify at the end: %q", got)
	}
}

func TestWhatAnAuthorWroteIsFoundByTheIndex(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	ctx := t.Context()
	apply(t, pool, comment(1, event.Created, "ann", nil), comment(2, event.Edited, "ann", nil))
	for _, sql := range []string{`INSERT INTO comment_history (tenant_id, object, metadata)
	  SELECT 1 + g % 3, object || jsonb_build_object('comment_id', gen_random_uuid(), 'author_id', (1 + g % 100)::text),
	  metadata || jsonb_build_object('version_id', g)
	    FROM comment_history, generate_series(1, 6000) g WHERE version_state = 'LATEST'`, `ANALYZE comment_history`} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]int{}
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		var after versioned.Key
		for {
			page, err := Children(commentKind).Query(ctx, tx, 2, []versioned.Field{{Name: "author_id", Value: "8"}}, after, 7)
			if err != nil {
				return err
			}
			for _, v := range page {
				got[fmt.Sprint(v.Object.AuthorID, " ", v.Metadata.VersionState)]++
				after = versioned.Key{v.Object.ID}
			}
			if len(page) < 7 {
				break
			}
		}
		rows, _ := tx.Query(ctx, `EXPLAIN SELECT * FROM comment_history t WHERE t.tenant_id = $1 AND t.version_state = 'LATEST'
		  AND (t.object ->> 'author_id')::text = $2::text AND (t.comment_id) > ($3::uuid) ORDER BY t.comment_id LIMIT $4`, 2, "8",
			commentID, 7)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "comment_history_author_idx") || strings.Contains(plan, "Filter") {
			t.Errorf("the plan:\n%s", plan)
		}
		return err
	})
	if diff := cmp.Diff(map[string]int{"8 LATEST": 20}, got); diff != "" || err != nil {
		t.Errorf("heads found (-want +got): %v\n%s", err, diff)
	}
}
