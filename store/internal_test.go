package store

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleAPI)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for name, sql := range map[string]string{
		"follow": followSQL, "unfollow": unfollowSQL, "getFollows": getFollowsSQL, "commentGet": commentGetSQL,
		"commentSurroundings": commentSurroundingsSQL, "commentKeys": commentKeysSQL, "commentReplay": commentReplaySQL,
		"commentRelease": commentReleaseSQL, "commentCreate": commentCreateSQL, "commentEdit": commentEditSQL,
		"commentDelete": commentDeleteSQL, "commentModerate": commentModerateSQL, "threadsGet": threadsGetSQL,
		"scanFollows": scanFollowsSQL, "countFollows": CountFollowsSQL, "scanThreads": scanThreadsSQL, "scanThread": scanThreadSQL, "scanComments": scanCommentsSQL, "scanSettings": scanSettingsSQL,
		"returnLock": returnLockSQL, "returnMove": returnMoveSQL, "returnState": returnStateSQL, "archivedPosts": archivedPostsSQL,
		"walked": walkedSQL, "look": lookSQL, "quiet": quietSQL, "mark": markSQL, "walk": walkSQL, "moveLock": moveLockSQL, "move": moveSQL,
		"moveState": moveStateSQL, "unfinished": unfinishedSQL, "archiveStubs": archiveStubsSQL, "archives": archivesSQL, "archiveCheck": archiveCheckSQL,
	} {
		positional, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn.Conn(), sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Conn().Prepare(t.Context(), name, positional); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestATakenSlugIsReplaced(t *testing.T) {
	db := testkit.Postgres(t)
	s := New(db.Pool(t, postgres.RoleAPI), nil)
	next := []string{"aaaaaaaa", "aaaaaaaa", "bbbbbbbb", "aaaaaaaa", "cccccccc"}
	s.slug = func() string {
		slug := next[0]
		next = next[1:]
		return slug
	}
	m := Meta{Actor: "tester"}
	out, err := s.Create(t.Context(), 1, []NewComment{
		{Meta: m, PostID: 1, AuthorID: 1, Body: "a"}, {Meta: m, PostID: 1, AuthorID: 1, Body: "b"}, {Meta: m, PostID: 1, AuthorID: 1, Body: "c"},
	})
	if err != nil {
		t.Fatal(err)
	}
	slugs := map[string]int{}
	for _, o := range out {
		slugs[o.Comment.Slug]++
	}
	if diff := cmp.Diff(map[string]int{"aaaaaaaa": 1, "bbbbbbbb": 1, "cccccccc": 1}, slugs); diff != "" {
		t.Errorf("slugs (-want +got):\n%s", diff)
	}
	s.slug = func() string { return "aaaaaaaa" }
	if _, err := s.Create(t.Context(), 1, []NewComment{{Meta: m, PostID: 1, AuthorID: 1, Body: "d"}}); err == nil {
		t.Error("no free slug: no error")
	}
	if out, err := s.Create(t.Context(), 1, []NewComment{{Meta: m, PostID: 2, AuthorID: 1, Body: "d"}}); err != nil || out[0].Comment.Slug != "aaaaaaaa" {
		t.Errorf("another post may have the slug: %+v, %v", out, err)
	}
}

func TestRounds(t *testing.T) {
	keys := []string{"a", "b", "a", "", "c", "a"}
	got := rounds(len(keys), func(i int) (string, bool) { return keys[i], keys[i] != "" })
	if diff := cmp.Diff([][]int{{0, 1, 4}, {2}, {5}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestHotStatementsUseTheirIndexes looks at plans in tables large enough for a sequential scan to be tempting elsewhere, with
// the policies of the API's role, and with the plans that a connection keeps after a few executions.
func TestHotStatementsUseTheirIndexes(t *testing.T) {
	db := testkit.Postgres(t)
	ctx := t.Context()
	for _, sql := range []string{
		`INSERT INTO follows (tenant_id, follower_id, followee_id) SELECT 1, g / 10 + 1, 1000000 + g FROM generate_series(1, 30000) g`,
		`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body)
			SELECT 1, gen_random_uuid(), g / 100 + 1, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x' FROM generate_series(1, 30000) g`,
		`INSERT INTO comment_keys (tenant_id, author_id, idempotency_key, request_hash, comment_id)
			SELECT 1, g / 10 + 1, g::text, '', gen_random_uuid() FROM generate_series(1, 30000) g`,
		`INSERT INTO threads (tenant_id, object, metadata)
			SELECT 1, jsonb_build_object('post_id', g / 3), jsonb_build_object('version_id', g, 'created_by', 't', 'last_update_time', now(),
			       'version_state', CASE g % 3 WHEN 2 THEN 'LATEST' ELSE 'ARCHIVED' END) FROM generate_series(1, 30000) g`,
		`INSERT INTO comments_archive (tenant_id, comment_id, post_id, slug, path, author_id, body, author_state, moderation_state, version, created_at, updated_at)
			SELECT 1, gen_random_uuid(), 100000 + g / 100, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x', 'ACTIVE', 'NONE', 1, now(), now() FROM generate_series(1, 30000) g`,
		`INSERT INTO archived_threads (tenant_id, post_id, archive_id, state, comments, returned_at, returned_by)
			SELECT 1, 100000 + g, 1, CASE g % 2 WHEN 0 THEN 'ARCHIVED' ELSE 'RETURNED' END, 1, now(), 'write' FROM generate_series(1, 30000) g`,
		`ANALYZE follows, comments, comment_keys, threads, comments_archive, archived_threads`,
	} {
		if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	pool := db.Pool(t, postgres.RoleAPI)
	for name, c := range map[string]struct{ sql, args string }{ // args in the order in which the statement names them
		"unfollow":            {unfollowSQL, `'{1,2}', '{5,6}', 1`},
		"getFollows":          {getFollowsSQL, `'{1,2}', '{5,6}', 1`},
		"commentGet":          {commentGetSQL, `1, '{00000000-0000-7000-8000-000000000000}'`},
		"commentEdit":         {commentEditSQL, `'{00000000-0000-7000-8000-000000000000}', '{1}', '{x}', 1`},
		"commentDelete":       {commentDeleteSQL, `'{00000000-0000-7000-8000-000000000000}', '{1}', '{x}', 1`},
		"commentModerate":     {commentModerateSQL, `'{00000000-0000-7000-8000-000000000000}', '{1}', '{HIDDEN}', 1`},
		"threadsGet":          {threadsGetSQL, `'{1,2}', 1`},
		"commentSurroundings": {commentSurroundingsSQL, `'{1}', '{00000000-0000-7000-8000-000000000000}', 1`},
		"commentReplay":       {commentReplaySQL, `'{1}', '{k}', 1`},
		"commentCreate":       {commentCreateSQL, `1, '{00000000-0000-7000-8000-000000000000}', '{1}', '{NULL}', '{abcdefgh}', '{""}', '{NULL}', '{1}', '{x}', '{NONE}'`},
		"archivedPosts":       {archivedPostsSQL, `1, '{1,2}'`},
		"returnLock":          {returnLockSQL, `1, 100002`},
		"returnMove":          {returnMoveSQL, `1, 100002, 1000`},
		"returnState":         {returnStateSQL, `true, 'write', 1, 100002, 1`},
		// What the archiver runs has these plans for its role too: the policies are simpler.
		"look":         {lookSQL, `1, 1, 200, '1 hour'`},
		"quiet":        {quietSQL, `'1 hour', 1, 1, '~', 5000`},
		"moveLock":     {moveLockSQL, `1, 100002, 1`},
		"unfinished":   {unfinishedSQL, `1, 1, 200`},
		"archiveStubs": {archiveStubsSQL, `1, 1, 1, 200`},
	} {
		for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
			err := postgres.InTenant(ctx, pool, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
				positional, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, tx.Conn(), c.sql, nil)
				if err != nil {
					return err
				}
				for _, sql := range []string{"SET LOCAL plan_cache_mode = " + mode, "PREPARE hot AS " + positional} {
					if _, err := tx.Exec(ctx, sql); err != nil {
						return err
					}
				}
				rows, _ := tx.Query(ctx, "EXPLAIN EXECUTE hot("+c.args+")", pgx.QueryExecModeSimpleProtocol)
				lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
				if err != nil {
					return err
				}
				plan := strings.Join(lines, "\n")
				for _, table := range []string{"follows", "comments", "comment_keys", "threads", "archived_threads"} { // and comments_archive, by its beginning
					if strings.Contains(plan, "Seq Scan on "+table) {
						t.Errorf("%s, %s, scans %s:\n%s", name, mode, table, plan)
					}
				}
				_, err = tx.Exec(ctx, "DEALLOCATE hot")
				return err
			})
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// A new database has no statistics until something analyses its tables, and by then a load has written thousands of comments.
func TestACreateProbesItsSurroundingsThoughThereAreNoStatistics(t *testing.T) {
	db := testkit.Postgres(t)
	ctx := t.Context()
	for _, sql := range []string{
		`ALTER TABLE comments SET (autovacuum_enabled = false)`,
		`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body)
			SELECT 1, gen_random_uuid(), g / 100 + 1, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x' FROM generate_series(1, 3000) g`,
	} {
		if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	err := postgres.InTenant(ctx, db.Pool(t, postgres.RoleAPI), 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, "EXPLAIN "+commentSurroundingsSQL, pgx.QueryExecModeSimpleProtocol, pgx.StrictNamedArgs{
			"tenant": int64(1), "post_ids": []int64{1}, "parent_ids": []string{"00000000-0000-7000-8000-000000000000"},
		})
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "comments_pkey") {
			t.Errorf("the parent is looked for elsewhere:\n%s", plan)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
