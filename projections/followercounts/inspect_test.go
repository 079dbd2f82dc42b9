package followercounts

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

func TestInspectionPutsEdgesBesideTheProjection(t *testing.T) {
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	ctx := t.Context()
	s, k := store.New(db.Pool(t, postgres.RoleAPI), nil), kinds.Builtin().Edges["follow"]
	var puts []store.EdgeWrite
	for to := int64(2); to <= 8; to++ {
		puts = append(puts, store.EdgeWrite{Meta: store.Meta{Actor: "test"}, From: "1", To: event.IDOf(to)},
			store.EdgeWrite{Meta: store.Meta{Actor: "test"}, From: event.IDOf(to), To: "1"})
	}
	if _, err := s.PutEdges(ctx, 1, k, puts); err != nil {
		t.Fatal(err)
	}
	p := New(kinds.Builtin)
	for e, err := range p.Truth(ctx, system) {
		if err == nil {
			err = postgres.InTx(ctx, system, pgx.TxOptions{}, func(tx pgx.Tx) error { return p.Apply(ctx, tx, []event.Event{e}) })
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	look := func() (all []string) {
		report := func(d projections.Difference) {
			all = append(all, fmt.Sprint(d.Entity, " ", d.Field, ": ", d.Want, ", ", d.Got))
		}
		pages := 0
		for after := event.ID(""); pages == 0 || after != ""; pages++ {
			page, next, err := InspectEdges(ctx, system, system, k, 1, "1", after, 3)
			if err != nil {
				t.Fatal(err)
			}
			for _, b := range page {
				b.Report(report)
			}
			after = next
		}
		b, exact, err := InspectCounts(ctx, system, system, k, "user", 1, "1")
		if err != nil || !exact || len(b.Fields) != 2 || pages != 3 {
			t.Errorf("counts: %+v, %t, %v; %d pages", b, exact, err, pages)
		}
		b.Report(report)
		return all
	}
	if got := look(); len(got) != 0 {
		t.Errorf("before: %q", got)
	}
	for _, sql := range []string{`UPDATE edge_lists SET active = false WHERE from_id = '1' AND to_id = '4'`,
		`DELETE FROM edge_lists WHERE from_id = '1' AND to_id = '6'`,
		`UPDATE edge_counts SET incoming = 9, outgoing = 9 WHERE object_id = '1'`} {
		if _, err := owner.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"follow 1/4 active: true, false", "follow 1/6 row: present, absent", "counts of user 1 followers: 7, 9",
		"counts of user 1 following: 7, 9"}
	got := look()
	if len(got) == 4 && got[2] > got[3] {
		got[2], got[3] = got[3], got[2]
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("after (-want +got):\n%s", diff)
	}
	if b, err := InspectEdge(ctx, system, system, k, 1, "1", "6"); err != nil || !b.InTruth || b.InProjection || b.Key.Other != "1" {
		t.Errorf("an edge that the projection lacks: %+v, %v", b, err)
	}
	for _, other := range [][3]int64{{1, 1, 9}, {2, 1, 6}} {
		if b, err := InspectEdge(ctx, system, system, k, other[0], event.IDOf(other[1]),
			event.IDOf(other[2])); err != nil || b.InTruth || b.InProjection {
			t.Errorf("no edge: %+v, %v", b, err)
		}
	}
}
