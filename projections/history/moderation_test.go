package history

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections"
)

// TestDecisionsAreTheVersionsThatMovedModeration adds 5,000 edits of an approved comment. A page
// that reads only edits must return the place of the next page.
func TestDecisionsAreTheVersionsThatMovedModeration(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	state := func(state, reason string) func(*event.Child) {
		return func(c *event.Child) { c.ModerationState, c.Reason = state, reason }
	}
	apply(t, pool, comment(1, event.Created, "ann", nil), comment(2, event.Moderated, "rule", state(event.ModerationPending, "links")),
		comment(3, event.Edited, "ann", state(event.ModerationPending, "")),
		comment(4, event.Moderated, "mod", state(event.ModerationApproved, "fine")))
	other := func(c *event.Child) { c.ID = strings.Replace(commentID, "1", "2", 1) }
	apply(t, pool, comment(1, event.Created, "bob", func(c *event.Child) { other(c); c.ModerationState = event.ModerationPending }))
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, `INSERT INTO comment_history (tenant_id, object, metadata)
	  SELECT tenant_id, object || jsonb_build_object('version', 5 + g),
	  metadata || jsonb_build_object('version_id', version_id + 1000 + g, 'version_state', 'ARCHIVED')
	    FROM comment_history, generate_series(0, 4999) g WHERE version = 4`); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, "ANALYZE comment_history"); err != nil {
		t.Fatal(err)
	}
	var got []string
	var pages int
	err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		for before := int64(math.MaxInt64); before != 0; pages++ {
			page, next, err := Decisions(ctx, tx, commentKind, 1, before, 2)
			if err != nil {
				return err
			}
			for _, d := range page {
				got = append(got, fmt.Sprint(d.Child.Version, " ", d.Was, " ", d.Child.ModerationState, " ", d.By, " ", d.Child.Reason))
			}
			before = next
		}
		last, err := LastDecisions(ctx, tx, commentKind, 1, []string{commentID, strings.Replace(commentID, "1", "2", 1)})
		if err != nil || len(last) != 0 { // the last 20 versions are edits
			t.Errorf("last decisions: %v, %v", last, err)
		}
		rows, _ := tx.Query(ctx, "EXPLAIN "+ofChildren(commentKind, decisionsSQL),
			pgx.StrictNamedArgs{"tenant": 1, "before": math.MaxInt64, "limit": 2, "walk": decisionsWalk})
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "Index Scan Backward using comment_history_moderated_idx") ||
			strings.Contains(plan, "Filter: (version") {
			t.Errorf("the plan:\n%s", plan)
		}
		return err
	})
	want := []string{"4 PENDING APPROVED mod fine", "2 NONE PENDING rule links"}
	if diff := cmp.Diff(want, got); err != nil || diff != "" || pages != 4 {
		t.Errorf("%v, %d pages, decisions (-want +got):\n%s", err, pages, diff)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, "DELETE FROM comment_history WHERE version > 4"); err != nil {
		t.Fatal(err)
	}
	err = postgres.InTenant(ctx, api, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		last, err := LastDecisions(ctx, tx, commentKind, 1, []string{commentID})
		if d := last[commentID]; err != nil || len(last) != 1 || d.By != "mod" || d.Child.Reason != "fine" || d.Child.Version != 4 {
			t.Errorf("last decisions: %+v, %v", last, err)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// TestARecordCountsTheNewestChildrenOfAnAuthor reads the records of two authors among many, and of
// one without children.
func TestARecordCountsTheNewestChildrenOfAnAuthor(t *testing.T) {
	db := testkit.Postgres(t)
	system, owner, ctx := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner), t.Context()
	if _, err := owner.Exec(ctx, `INSERT INTO comment_history (tenant_id, object, metadata)
	  SELECT 1, jsonb_build_object('comment_id', '0190a000-0000-7000-8000-' || lpad(g::text, 12, '0'), 'version', 1, 'author_id',
	         (CASE WHEN g <= 30 THEN 7 WHEN g <= 230 THEN 8 ELSE g END)::text, 'moderation_state',
	         CASE WHEN g <= 5 OR g > 200 AND g <= 230 THEN 'REMOVED' WHEN g <= 12 OR g <= 60 AND g > 30 THEN 'APPROVED' ELSE 'NONE' END),
	         jsonb_build_object('version_id', g, 'version_state', CASE WHEN g = 1 THEN 'DELETED' ELSE 'LATEST' END, 'created_by', 'ann',
	         'last_update_time', '2030-01-01T00:00:00Z') FROM generate_series(1, 5000) g`); err != nil {
		t.Fatal(err)
	}
	if _, err := owner.Exec(ctx, "ANALYZE comment_history"); err != nil {
		t.Fatal(err)
	}
	err := postgres.InTenant(ctx, system, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
		got, err := Records(ctx, tx, commentKind, 1, []event.ID{"7", "8", "9"})
		want := map[event.ID]Record{"7": {Of: 29, Approved: 7, Removed: 4}, "8": {Of: recordOf, Removed: 30}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("the records (-want +got):\n%s", diff)
		}
		if err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, "EXPLAIN "+ofChildren(commentKind, recordsSQL),
			pgx.StrictNamedArgs{"tenant": 1, "authors": []event.ID{"7"}, "most": recordOf})
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "Index Scan Backward using comment_history_author_idx") {
			t.Errorf("the plan:\n%s", plan)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestInspectionPutsTheTruthsVersionBesideTheHistory inspects a child and an edge whose histories
// lack the last version, lack all versions, or were purged, then a history whose child is gone.
func TestInspectionPutsTheTruthsVersionBesideTheHistory(t *testing.T) {
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	ctx := t.Context()
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := owner.Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	look := func() (got []string) {
		child, err := InspectChild(ctx, system, system, commentKind, 1, commentID)
		edge, err2 := InspectEdge(ctx, system, system, followKind, 1, "7", "5")
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		for _, b := range []projections.Diff{child, edge} {
			b.Report(func(d projections.Difference) { got = append(got, d.Entity[:16]+" "+d.Field+": "+d.Want+", "+d.Got) })
		}
		return got
	}
	if got := look(); len(got) != 0 {
		t.Errorf("with neither: %q", got)
	}
	exec(`INSERT INTO children_comment (tenant_id, child_id, object_id, slug, path, author_id, body, version)
		VALUES (1, $1, 5, '00000000', '0000000000000000000000', 7, 'x', 2)`, commentID)
	exec(`INSERT INTO edges_follow (tenant_id, from_id, to_id, version) VALUES (1, 7, 5, 3)`)
	want := []string{"history of comme row: present, absent", "history of follo row: present, absent"}
	if diff := cmp.Diff(want, look()); diff != "" {
		t.Errorf("without a history (-want +got):\n%s", diff)
	}
	apply(t, system, comment(1, event.Created, "ann", nil), follow(1, "ann"), follow(2, "ann"), follow(3, "ann"))
	if diff := cmp.Diff([]string{"history of comme version: 2, 1"}, look()); diff != "" {
		t.Errorf("with a history (-want +got):\n%s", diff)
	}
	exec(`DELETE FROM follow_history`)
	exec(`INSERT INTO follow_history_purged (tenant_id, follower_id, followee_id, version) VALUES (1, 7, 5, 3)`)
	exec(`UPDATE edges_follow SET status = 'REMOVED'`)
	apply(t, system, comment(2, event.Edited, "ann", nil))
	if got := look(); len(got) != 0 {
		t.Errorf("with a purged history: %q", got)
	}
	exec(`DELETE FROM children_comment`)
	if diff := cmp.Diff([]string{"history of comme row: absent, present"}, look()); diff != "" {
		t.Errorf("without a child (-want +got):\n%s", diff)
	}
}
