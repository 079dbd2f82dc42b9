package threadcache

import (
	"fmt"
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// differing lists the differences of each entry of a page, by the number of the child.
func differing(page []projections.Diff, ids []string) (all []string) {
	for _, b := range page {
		b.Report(func(d projections.Difference) {
			all = append(all, fmt.Sprintf("%d %s: %s, %s", slices.Index(ids, b.Key.Child), d.Field, d.Want, d.Got))
		})
	}
	return all
}

// TestInspectionPutsTheTruthBesideTheProjection writes a thread and a flat list, applies them to
// the projection, and changes a few rows of the projection.
func TestInspectionPutsTheTruthBesideTheProjection(t *testing.T) {
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	ctx := t.Context()
	s, meta := store.New(db.Pool(t, postgres.RoleAPI), nil), store.Meta{Actor: "test"}
	comment, message := kinds.Builtin().Children["comment"], kinds.Builtin().Children["message"]
	var ids, flat []string
	for n := range 9 {
		for k, all := range map[string]*[]string{"comment": &ids, "message": &flat} {
			c := store.NewChild{Meta: meta, Object: "5", AuthorID: "1", Body: fmt.Sprint("body ", n)}
			if k == "comment" && n%3 != 0 { // 0 with 1 and 2 below it, 3 with 4 and 5, 6 with 7 and 8
				c.ReplyTo = ids[n-n%3]
			}
			out, err := s.CreateChildren(ctx, 1, kinds.Builtin().Children[k], []store.NewChild{c})
			if err != nil || out[0].Err != nil {
				t.Fatal(err, out[0].Err)
			}
			*all = append(*all, out[0].Child.ID)
		}
	}
	if out, err := s.SetThreads(ctx, 1, comment, []store.ThreadSettings{{Meta: meta, Object: "5", Locked: true}}); err != nil ||
		out[0].Err != nil {
		t.Fatal(err, out)
	}
	p := Projection{kinds: kinds.Builtin, bucketSize: 100, groupSize: 100, repairStep: repairStep}
	for e, err := range p.Truth(ctx, system) {
		if err == nil {
			err = apply(ctx, system, p, []event.Event{e})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	walk := func(k kinds.Child, ids []string) (got []string) {
		pages := 0
		for after := ""; pages == 0 || after != ""; pages++ {
			page, next, err := InspectPage(ctx, system, system, k, 1, "5", after, 4)
			if err != nil || len(page) == 0 {
				t.Fatalf("behind %q: %v, %v", after, page, err)
			}
			got, after = append(got, differing(page, ids)...), next
		}
		if pages != 3 {
			t.Errorf("%d pages of %s", pages, k.Plural)
		}
		return got
	}
	thread := func() string {
		settings, counts, exact, err := InspectThread(ctx, system, system, comment, 1, "5")
		return fmt.Sprint(differing([]projections.Diff{settings, counts}, nil), exact, err)
	}
	if all := slices.Concat(walk(comment, ids), walk(message, flat)); len(all) != 0 || thread() != "[] true <nil>" {
		t.Errorf("before: %q, %s", all, thread())
	}
	for _, sql := range []string{
		`UPDATE child_lists SET body = 'x', version = 7 WHERE child_id = '` + ids[4] + `'`,
		`DELETE FROM child_lists WHERE child_id IN ('` + ids[6] + `', '` + flat[2] + `')`,
		`UPDATE child_lists SET visible_descendants = 3 WHERE child_id = '` + ids[0] + `'`,
		`UPDATE child_lists SET visible_descendants = 4 WHERE child_id = '` + ids[3] + `'`, // its replies continue beyond the page
		`UPDATE child_settings SET locked = false`, `UPDATE child_totals SET total = 12 WHERE kind = 'comment'`,
		`INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state, moderation_state,
			version, created_at, updated_at, visible, shown)
		 SELECT tenant_id, kind, gen_random_uuid(), object_id, 'zzzzzzzz', 'zz', author_id, body, author_state, moderation_state, version,
		 created_at, updated_at, visible, shown FROM child_lists WHERE child_id = '` + ids[8] + `'`,
	} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"0 visible_descendants: 2, 3", "4 version: 1, 7", "4 body: 6 bytes, 1 different bytes", "6 row: present, absent",
		"-1 row: absent, present"}
	if diff := gocmp.Diff(want, walk(comment, ids)); diff != "" {
		t.Errorf("a thread (-want +got):\n%s", diff)
	}
	if diff := gocmp.Diff([]string{"2 row: present, absent"}, walk(message, flat)); diff != "" {
		t.Errorf("a flat list (-want +got):\n%s", diff)
	}
	if got := thread(); got != "[-1 locked: true, false -1 total: 9, 12] true <nil>" {
		t.Errorf("the thread: %s", got)
	}
	b, err := InspectChild(ctx, system, system, comment, 1, ids[3])
	if diff := gocmp.Diff([]string{"3 visible_descendants: 2, 4"}, differing([]projections.Diff{b}, ids)); err != nil || diff != "" {
		t.Errorf("a child: %v (-want +got):\n%s", err, diff)
	}
	for n, id := range []string{ids[6], "00000000-0000-7000-8000-000000000000"} {
		if b, err = InspectChild(ctx, system, system, comment, 1, id); err != nil || b.InTruth != (n == 0) || b.InProjection {
			t.Errorf("a child that the projection lacks: %+v, %v", b, err)
		}
	}
	if b, err = InspectChild(ctx, system, system, comment, 2, ids[0]); err != nil || b.InTruth || b.InProjection {
		t.Errorf("another tenant's child: %+v, %v", b, err)
	}
}
