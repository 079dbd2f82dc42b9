package store

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/kindfile"
)

// makeKinds makes the tables of the set's kinds that are not built in.
func makeKinds(t *testing.T, db *testkit.DB, set *kinds.Set) {
	t.Helper()
	pool := db.Pool(t, postgres.RoleSystem)
	for _, made := range catalog.Truth.MakeTables(set) {
		if _, err := pool.Exec(t.Context(), made.SQL, made.Args...); err != nil {
			t.Fatal(made.What, err)
		}
	}
}

// childSQL has the statements about children, as templates.
var childSQL = map[string]string{
	"childGet": childGetSQL, "childLock": childLockSQL, "childReplay": childReplaySQL, "childRelease": childReleaseSQL,
	"childCreate": childCreateSQL, "childTaken": childTakenSQL, "childEdit": childEditSQL, "childDelete": childDeleteSQL,
	"childModerate": childModerateSQL,
	"returnLock":    returnLockSQL, "returnMove": returnMoveSQL, "returnState": returnStateSQL, "archived": shelvedSQL,
	"walked": walkedSQL, "look": lookSQL, "quiet": quietSQL, "mark": markSQL, "walk": walkSQL, "moveLock": moveLockSQL, "move": moveSQL,
	"moveState": moveStateSQL, "unfinished": unfinishedSQL, "archiveStubs": shelvedStubsSQL, "archivePage": shelvedPageSQL,
	"stubPage": stubPageSQL, "scanChildren": scanChildrenSQL, "scanObjects": scanObjectsSQL, "scanObject": scanObjectSQL,
	"exportChildren": exportChildrenSQL, "lockTargets": lockTargetsSQL, "lockErased": lockErasedSQL,
}

func TestStatements(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	makeKinds(t, db, testSet)
	conn, err := db.Pool(t, postgres.RoleAPI).Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	all := map[string]string{
		"threadsGet": threadsGetSQL,
		"scanEdges":  scanEdgesSQL, "countEdges": CountEdgesSQL, "scanSettings": scanSettingsSQL, "exportSettings": exportSettingsSQL,
		"erasures":   erasuresSQL,
		"authorKeys": authorKeysSQL, "blankKeys": blankKeysSQL, "keysBounds": keysBoundsSQL, "countKeys": countKeysSQL,
		"purgeKeys": purgeKeysSQL, "keysCursor": keysCursorSQL, "keysRest": keysRestSQL, "archives": shelvingsSQL,
		"requestRemoval": requestRemovalSQL, "getRemoval": getRemovalSQL, "kindTable": kindTableSQL,
	}
	for _, k := range testSet.AllChildren() {
		for name, sql := range childSQL {
			all[name+" of "+k.Name] = shapeOf(k).sql(sql)
		}
		for _, table := range shapeOf(k).tables() {
			all["authorChildren of "+table] = strings.ReplaceAll(authorChildrenSQL, "{table}", table)
			all["childErase of "+table] = strings.ReplaceAll(childEraseSQL, "{table}", table)
			all["childEraseEnd of "+table] = strings.ReplaceAll(childEraseEndSQL, "{table}", table)
		}
	}
	for _, e := range testSet.AllEdges() {
		for name, sql := range map[string]string{"put": putEdgesSQL, "remove": removeEdgesSQL, "get": getEdgesSQL, "lock": lockEdgesSQL,
			"insert": insertEdgesSQL, "update": updateEdgesSQL, "of from": edgesFromSQL, "of to": edgesToSQL, "to child": edgesToChildSQL,
			"forget": forgetEdgesSQL, "export": exportEdgesSQL} {
			all[e.Name+" "+name] = edgesOf(e.Name, sql)
		}
	}
	for name, sql := range all {
		positional, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn.Conn(), sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Conn().Prepare(t.Context(), name, positional); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestKeysArePurgedByRangesOfPages(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id)
		SELECT 1, 'comment', 1, 'key-' || n, sha256('x'), gen_random_uuid() FROM generate_series(1, 30000) n`); err != nil {
		t.Fatal(err)
	}
	rows, _ := pool.Query(t.Context(), "EXPLAIN "+purgeKeysSQL,
		pgx.StrictNamedArgs{"from": "(0,0)", "to": "(128,0)", "before": "00000000-0000-7000-8000-000000000000"})
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if plan := strings.Join(lines, "\n"); err != nil || !strings.Contains(plan, "Tid Range Scan") {
		t.Errorf("%v\n%s", err, plan)
	}
}

func TestATakenSlugIsReplaced(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	s := New(db.Pool(t, postgres.RoleAPI), nil)
	next := []string{"aaaaaaaa", "aaaaaaaa", "bbbbbbbb", "aaaaaaaa", "cccccccc", "bbbbbbbb"}
	s.slug = func() string {
		slug := next[0]
		next = next[1:]
		return slug
	}
	m := Meta{Actor: "tester"}
	out, err := s.CreateChildren(t.Context(), 1, commentKind, []NewChild{
		{Meta: m, Object: "1", AuthorID: "1", Body: "a"}, {Meta: m, Object: "1", AuthorID: "1", Body: "b"},
		{Meta: m, Object: "1", AuthorID: "1", Body: "c"},
	})
	if err != nil {
		t.Fatal(err)
	}
	slugs := map[string]int{}
	for _, o := range out {
		slugs[o.Child.Slug]++
	}
	if diff := cmp.Diff(map[string]int{"aaaaaaaa": 1, "bbbbbbbb": 1, "cccccccc": 1}, slugs); diff != "" {
		t.Errorf("slugs (-want +got):\n%s", diff)
	}
	s.slug = func() string { return "aaaaaaaa" }
	if _, err := s.CreateChildren(t.Context(), 1, commentKind, []NewChild{{Meta: m, Object: "1", AuthorID: "1", Body: "d"}}); err == nil {
		t.Error("no free slug: no error")
	}
	if out, err := s.CreateChildren(t.Context(), 1, commentKind, []NewChild{{Meta: m, Object: "2", AuthorID: "1",
		Body: "d"}}); err != nil || out[0].Child.Slug != "aaaaaaaa" {
		t.Errorf("the slug in another post: %+v, %v", out, err)
	}
}

func TestRounds(t *testing.T) {
	keys := []string{"a", "b", "a", "", "c", "a"}
	places := []any{nil, 1, 1, 1, 1, nil} // an item behind one that waits for its key, and wants the same place, waits too
	got := rounds(len(keys), func(i int) (string, any, bool) { return keys[i], places[i], keys[i] != "" })
	if diff := cmp.Diff([][]int{{0, 1}, {2, 4}, {5}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestHotStatementsUseTheirIndexes checks plans in tables so large that a sequential scan elsewhere
// is tempting. It uses the policies of the API's role, and the plans that a connection keeps after
// a few executions.
func TestHotStatementsUseTheirIndexes(t *testing.T) {
	t.Run("as built in", func(t *testing.T) { hotStatements(t, testSet) })
	t.Run("partitioned", func(t *testing.T) {
		grown, err := kindfile.Extend(testSet, []byte(`{edges: {follow: {partitions: 16}}, children: {comment: {partitions: 16}}}`))
		if err != nil {
			t.Fatal(err)
		}
		hotStatements(t, grown)
	})
}

func hotStatements(t *testing.T, set *kinds.Set) {
	t.Helper()
	db := testkit.Postgres(t)
	ctx, own := t.Context(), db.Pool(t, postgres.RoleSystem)
	if _, err := catalog.Apply(ctx, catalog.Databases{Truth: own, Projections: own}, catalog.Request{Kinds: set, Actor: "t"}); err != nil {
		t.Fatal(err)
	}
	fill := []string{
		`INSERT INTO follows (tenant_id, follower_id, followee_id) SELECT 1, g / 10 + 1, 1000000 + g FROM generate_series(1, 10000) g`,
		`INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id)
			SELECT 1, k, g / 10 + 1, g::text, '', gen_random_uuid()
			FROM generate_series(1, 10000) g, unnest('{answer,comment,message,review}'::text[]) k`,
		`INSERT INTO threads (tenant_id, object, metadata)
			SELECT 1, jsonb_build_object('post_id', g / 3, 'kind', 'answer') -
			CASE g % 2 WHEN 0 THEN 'kind' ELSE '' END, jsonb_build_object('version_id', g, 'created_by', 't', 'last_update_time', now(),
			       'version_state', CASE g % 3 WHEN 2 THEN 'LATEST' ELSE 'ARCHIVED' END) FROM generate_series(1, 10000) g`,
		`INSERT INTO archived_threads (tenant_id, kind, object_id, archive_id, state, children, returned_at, returned_by)
			SELECT 1, k, 100000 + g, 1, CASE g % 2 WHEN 0 THEN 'ARCHIVED' ELSE 'RETURNED' END, 1, now(), 'write'
			FROM generate_series(1, 10000) g, unnest('{answer,comment,message,review}'::text[]) k`,
	}
	for _, k := range set.AllChildren() {
		names, values, rows := "", "", 10000
		if k.Partitions > 3 {
			rows = 30000 // so that a scan of one of many partitions costs more than its index
		}
		if k.Threaded {
			names, values = ", slug, path", ", lpad(g::text, 8, '0'), lpad(g::text, 22, '0')"
		}
		fill = append(fill,
			fmt.Sprintf(`INSERT INTO %s (tenant_id, child_id, object_id, author_id, body%s)
				SELECT 1, gen_random_uuid(), g / 100 + 1, g, 'x'%s FROM generate_series(1, %d) g`,
				shapeOf(k).Table(), names, values, rows),
			fmt.Sprintf(`INSERT INTO %s (tenant_id, child_id, object_id, author_id, body, author_state, moderation_state, version,
				created_at, updated_at%s)
				SELECT 1, gen_random_uuid(), 100000 + g / 100, g, 'x', 'ACTIVE', 'NONE', 1, now(), now()%s
				  FROM generate_series(1, 10000) g`, shapeOf(k).Shelf(), names, values))
	}
	for _, sql := range append(fill, `ANALYZE edges, children, child_keys, threads, children_archive, archived_threads`) {
		if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	pool := db.Pool(t, postgres.RoleAPI)
	type statement struct{ name, sql, args string } // args in the order in which the statement uses them
	all := []statement{
		{"removeEdges", edgesOf("follow", removeEdgesSQL), `'{1,1}', '{1,2}', '{5,6}', '{0,0}'`},
		{"getEdges", edgesOf("follow", getEdgesSQL), `'{1,1}', '{1,2}', '{5,6}'`},
		{"lockEdges", edgesOf("follow", lockEdgesSQL), `'{1,1}', '{1,2}', '{5,6}'`},
		{"updateEdges", edgesOf("follow", updateEdgesSQL), `'{1,1}', '{1,2}', '{5,6}', '{NULL,NULL}'`},
		{"threadsGet", threadsGetSQL, `'{1,2}', 1, 'comment'`},
		{"exportEdges", edgesOf("follow", exportEdgesSQL), `1, 5, 6, 500`},
		{"exportSettings", exportSettingsSQL, `1, 5, 'comment', 500`},
	}
	for _, k := range set.AllChildren() {
		const id = `'{00000000-0000-7000-8000-000000000000}'`
		given, attributes, threaded, after, before := `'{x}'`, "", "", `'00000000-0000-0000-0000-000000000000'`,
			`'ffffffff-ffff-ffff-ffff-ffffffffffff'`
		if len(k.Attributes) > 0 {
			given, attributes = given+`, '{"{}"}'`, `, '{"{}"}'`
		}
		if k.Threaded {
			after = `'0'`
			threaded, before = `, `+id+`, '{abcdefgh}'`, `'~'`
		}
		for _, s := range []statement{
			{"childGet", childGetSQL, `'{1}', ` + id},
			{"exportChildren", exportChildrenSQL, `1, 5, ` + after + `, 500`},
			{"childLock", childLockSQL, `'{1}', ` + id},
			{"childEdit", childEditSQL, `'{1}', ` + id + `, '{1}', ` + given},
			{"childDelete", childDeleteSQL, `'{1}', ` + id + `, '{1}', ` + given},
			{"childModerate", childModerateSQL, `'{1}', ` + id + `, '{1}', ` + strings.Replace(given, "x", "HIDDEN", 1)},
			{"childReplay", childReplaySQL, `'{1}', '{1}', '{k}'`},
			{"childCreate", childCreateSQL, `'{1}', ` + id + `, '{1}', '{1}', '{x}', '{k}', '{x}'` + threaded + attributes},
			{"archived", shelvedSQL, `'{1,1}', '{1,2}'`},
			{"returnLock", returnLockSQL, `1, 100002`},
			{"returnMove", returnMoveSQL, `1, 100002, 1000`},
			{"returnState", returnStateSQL, `true, 'write', 1, 100002, 1`},
			// The shelver's statements have the same plans for its own role, whose policies are
			// simpler.
			{"look", lookSQL, `1, 1, 200, '1 hour'`},
			{"quiet", quietSQL, `'1 hour', 1, 1, ` + before + `, 5000`},
			{"moveLock", moveLockSQL, `1, 100002, 1`},
			{"unfinished", unfinishedSQL, `1, 1, 200`},
			{"archiveStubs", shelvedStubsSQL, `1, 1, 1, 200`},
		} {
			all = append(all, statement{s.name + " of " + k.Name, shapeOf(k).sql(s.sql), s.args})
		}
		if k.OnePerAuthor {
			all = append(all, statement{"childTaken of " + k.Name, shapeOf(k).sql(childTakenSQL), `'{1}', '{1}', '{1}'`})
		}
	}
	for _, c := range all {
		name := c.name
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
				// Also the partitions, whose names begin so.
				for _, table := range []string{"edges", "children", "child_keys", "threads", "archived_threads"} {
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

// A new database has no statistics until autovacuum analyzes its tables. By then a load has written
// thousands of comments.
func TestACreateProbesItsSurroundingsThoughThereAreNoStatistics(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx := t.Context()
	for _, sql := range []string{
		`ALTER TABLE children_comment SET (autovacuum_enabled = false)`,
		`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body)
			SELECT 1, gen_random_uuid(), g / 100 + 1, lpad(g::text, 8, '0'), lpad(g::text, 22, '0'), 1, 'x'
			  FROM generate_series(1, 3000) g`,
	} {
		if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	pool := db.Pool(t, postgres.RoleAPI)
	k := New(pool, nil).children(commentKind)
	err := postgres.InTenant(ctx, pool, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		const id = "00000000-0000-7000-8000-000000000000"
		todo := []creation{{in: NewChild{Meta: Meta{tenant: 1}, Object: "1", AuthorID: "1", ReplyTo: id}, id: id}}
		rows, _ := tx.Query(ctx, "EXPLAIN "+k.sql(childCreateSQL), k.createArgs(todo, []int{0}))
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "children_comment_pkey") {
			t.Errorf("the plan does not probe the parent by its primary key:\n%s", plan)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A plan that PostgreSQL keeps may be from a time when the tables were empty. It must probe keys
// nevertheless, also that of a read: one that walks an index takes longer with every row.
func TestWritesProbeWithPlansOfEmptyTables(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	makeKinds(t, db, testSet)
	ctx := t.Context()
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, "ANALYZE"); err != nil {
		t.Fatal(err)
	}
	all, reads := make(map[string]string), make(map[string]string)
	for _, k := range testSet.AllChildren() {
		for name, sql := range map[string]string{"create": childCreateSQL, "edit": childEditSQL, "delete": childDeleteSQL,
			"moderate": childModerateSQL, "lock": childLockSQL, "lock targets": lockTargetsSQL} {
			all[name+" of "+k.Name] = shapeOf(k).sql(sql)
		}
		reads["get "+k.Name] = shapeOf(k).sql(childGetSQL)
	}
	for _, e := range testSet.AllEdges() {
		reads["get "+e.Name] = edgesOf(e.Name, getEdgesSQL)
		for name, sql := range map[string]string{"remove": removeEdgesSQL, "update": updateEdgesSQL, "lock": lockEdgesSQL} {
			all[name+" of "+e.Name] = edgesOf(e.Name, sql)
		}
	}
	pool := db.Pool(t, postgres.RoleAPI)
	if err := postgres.WriteInTenants(ctx, pool, []int64{1}, 0, func(tx pgx.Tx) (postgres.Landed, error) {
		return nil, probing(t, tx, all)
	}); err != nil {
		t.Fatal(err)
	}
	if err := New(pool, nil).read(ctx, 1, func(tx pgx.Tx) error { return probing(t, tx, reads) }); err != nil {
		t.Fatal(err)
	}
}

// probing checks that the plans that PostgreSQL would keep for the statements probe keys.
func probing(t *testing.T, tx pgx.Tx, all map[string]string) error {
	t.Helper()
	scan := regexp.MustCompile(`(?:Seq|Index|Index Only|Bitmap Heap) Scan (?:using \S+ )?on (children|edges|)`)
	key := map[string]string{"children": "child_id = ", "edges": "to_id = "} // the last column
	for name, sql := range all {
		lines, err := genericPlan(t.Context(), tx, sql)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for i, line := range lines {
			if of := scan.FindStringSubmatch(line); of != nil &&
				(!strings.Contains(lines[i+1], "Index Cond: ") || !strings.Contains(lines[i+1], key[of[1]])) {
				t.Errorf("%s walks a table or an index:\n%s", name, strings.Join(lines, "\n"))
			}
		}
	}
	return nil
}

// genericPlan returns the plan that PostgreSQL would keep for a statement.
func genericPlan(ctx context.Context, tx pgx.Tx, sql string) ([]string, error) {
	positional, args, err := pgx.NamedArgs{}.RewriteQuery(ctx, tx.Conn(), sql, nil)
	if err != nil {
		return nil, err
	}
	for _, sql := range []string{"SET LOCAL plan_cache_mode = force_generic_plan", "PREPARE hot AS " + positional} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return nil, err
		}
	}
	nulls := strings.Join(slices.Repeat([]string{"NULL"}, len(args)), ", ")
	rows, _ := tx.Query(ctx, "EXPLAIN EXECUTE hot("+nulls+")", pgx.QueryExecModeSimpleProtocol)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil {
		_, err = tx.Exec(ctx, "DEALLOCATE hot")
	}
	return lines, err
}

// To plan the statements of a write takes longer than to run them.
func TestAWriteIsNotPlannedAnew(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	eachKind(t, func(t *testing.T, f kindFixture) {
		want := map[string]int{"store.child_create": writes, "store.child_edit": writes, "store.child_delete": writes,
			"outbox.append": 3 * writes}
		if f.k.Moderated {
			want["store.child_moderate"], want["outbox.append"] = writes, 4*writes
		}
		for n := range writes {
			id := f.must(f.create(NewChild{Object: "5", AuthorID: event.IDOf(int64(1 + n)), Body: "x", Key: "k"})).ID
			edited, err := f.EditChildren(ctx, 1, f.k, []ChildEdit{{Meta: tester, ID: id, Body: new("y"), Attributes: f.attributes(2)}})
			if err != nil || !edited[0].Changed {
				t.Fatal(edited, err)
			}
			if f.k.Moderated {
				hide := ChildModeration{Meta: tester, ID: id, State: event.ModerationHidden}
				decided, err := f.ModerateChildren(ctx, 1, f.k, []ChildModeration{hide})
				if err != nil || !decided[0].Changed {
					t.Fatal(decided, err)
				}
			}
			deleted, err := f.DeleteChildren(ctx, 1, f.k, []ChildDelete{{Meta: tester, ID: id}})
			if err != nil || !deleted[0].Changed {
				t.Fatal(deleted, err)
			}
		}
		plannedOnce(t, f.pool, want)
	})
	t.Run("edges", func(t *testing.T) {
		db := testkit.Postgres(t)
		makeKinds(t, db, testSet)
		f := kindFixture{Store: New(db.Pool(t, postgres.RoleAPI), nil), t: t, k: commentKind}
		id := f.must(f.create(NewChild{Object: "5", AuthorID: "1", Body: "x"})).ID
		for n := range writes {
			vote := EdgeWrite{Meta: tester, From: event.IDOf(int64(1 + n)), To: event.ID(id)}
			for _, value := range []string{"1", "-1"} {
				vote.Attributes = json.RawMessage(`{"value": ` + value + `}`)
				if out, err := f.PutEdges(ctx, 1, testSet.Edges["nod"], []EdgeWrite{vote}); err != nil || !out[0].Changed {
					t.Fatal(out, err)
				}
			}
			if out, err := f.RemoveEdges(ctx, 1, testSet.Edges["nod"], []EdgeWrite{vote}); err != nil || !out[0].Changed {
				t.Fatal(out, err)
			}
		}
		plannedOnce(t, f.pool, map[string]int{"store.lock_targets": 2 * writes, "store.insert_edges": 2 * writes,
			"store.lock_edges": writes, "store.update_edges": writes, "store.remove_edges": writes})
	})
}

// To plan the statements of a read takes four times as long as to run them.
func TestAReadIsNotPlannedAnew(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	eachKind(t, func(t *testing.T, f kindFixture) {
		again := NewChild{Object: "5", AuthorID: "1", Body: "x", Key: "k"}
		id := f.must(f.create(again)).ID
		follow := EdgeWrite{Meta: tester, From: "1", To: "2"}
		for range writes {
			if _, err := f.GetChild(ctx, 1, f.k, id); err != nil {
				t.Fatal(err)
			}
			if out := f.create(again); !out.Replayed {
				t.Fatal(out)
			}
			if _, err := f.PutEdges(ctx, 1, followKind, []EdgeWrite{follow}); err != nil {
				t.Fatal(err)
			}
			if _, err := f.GetEdge(ctx, 1, followKind, follow.From, follow.To); err != nil {
				t.Fatal(err)
			}
			if _, err := f.GetThread(ctx, 1, f.k, "5"); f.k.Moderated && err != nil {
				t.Fatal(err)
			}
		}
		plannedOnce(t, f.pool, map[string]int{"store.child_get": writes, "store.child_replay": writes, "store.get_edges": writes,
			"store.put_edges": writes})
	})
}

// writes is how often TestAWriteIsNotPlannedAnew does each write. PostgreSQL makes five plans
// before it keeps one.
const writes = 12

// plannedOnce checks that each statement ran at least so often and that no statement of a write was
// planned for more than PostgreSQL's first runs.
func plannedOnce(t *testing.T, pool *pgxpool.Pool, want map[string]int) {
	t.Helper()
	runs := make(map[string]int)
	for _, conn := range pool.AcquireAllIdle(t.Context()) {
		rows, _ := conn.Query(t.Context(), `SELECT substring(statement from '/[*] ((?:store|outbox)[.][a-z_]+) '),
			       generic_plans, custom_plans FROM pg_prepared_statements WHERE statement ~ '/[*] (store|outbox)[.]'`)
		var name string
		var generic, custom int
		_, err := pgx.ForEachRow(rows, []any{&name, &generic, &custom}, func() error {
			if runs[name] += generic + custom; custom > 5 {
				t.Errorf("%s is planned anew: %d times", name, custom)
			}
			return nil
		})
		conn.Release()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, n := range want {
		if runs[name] < n {
			t.Errorf("%s ran %d times as a prepared statement, want %d", name, runs[name], n)
		}
	}
}
