package store_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// TestAttributesOfEdges writes edges of a kind of its own, whose table has hash partitions.
func TestAttributesOfEdges(t *testing.T) {
	t.Parallel()
	f := open(t)
	set := testkit.Kinds(t, `
objects: {place: places}
edges:
  visit: {plural: visits, from: user, to: place, forward: visited, reverse: visitors, partitions: 2,
    attributes: {role: {enum: [passer, regular], default: passer}, seat: {type: integer}}}
`)
	k := set.Edges["visit"]
	if _, err := f.system.Exec(t.Context(), `SELECT make_edge_kind($1, $2, $3, $4, $5, $6)`, k.Name, k.Plural, k.Ends[0], k.Ends[1],
		!k.NoSelf(), k.Partitions); err != nil {
		t.Fatal(err)
	}
	one := func(write func() ([]store.EdgeOutcome, error)) store.EdgeOutcome {
		t.Helper()
		out, err := write()
		if err != nil {
			t.Fatal(err)
		}
		return out[0]
	}
	put := func(attributes string, version int64) store.EdgeOutcome {
		t.Helper()
		w := store.EdgeWrite{Meta: meta(), From: "7", To: "7", IfVersion: version}
		if attributes != "" {
			w.Attributes = json.RawMessage(attributes)
		}
		return one(func() ([]store.EdgeOutcome, error) { return f.PutEdges(t.Context(), tenant, k, []store.EdgeWrite{w}) })
	}
	remove := func(version int64) store.EdgeOutcome {
		t.Helper()
		return one(func() ([]store.EdgeOutcome, error) {
			return f.RemoveEdges(t.Context(), tenant, k, []store.EdgeWrite{{Meta: meta(), From: "7", To: "7", IfVersion: version}})
		})
	}
	want := func(what string, o store.EdgeOutcome, changed bool, version int64, attributes string) {
		t.Helper()
		if o.Err != nil || o.Changed != changed || o.Edge.Version != version || string(o.Edge.Attributes) != attributes {
			t.Errorf("%s: %+v with %s", what, o, o.Edge.Attributes)
		}
	}
	want("new", put("", 0), true, 1, `{"role":"passer"}`)
	want("the same", put(`{"role":"passer"}`, 0), false, 1, `{"role":"passer"}`)
	want("changed", put(`{"seat": 3, "role":"regular"}`, 1), true, 2, `{"role":"regular","seat":3}`)
	want("left", put("", 0), false, 2, `{"role":"regular","seat":3}`)
	var stale *store.StaleEdgeError
	if o := put(`{}`, 1); !errors.As(o.Err, &stale) || stale.Current.Version != 2 || o.Changed {
		t.Errorf("a stale put: %+v", o)
	}
	if o := remove(1); !errors.As(o.Err, &stale) || o.Changed {
		t.Errorf("a stale removal: %+v", o)
	}
	var bad *kinds.AttributeError
	if o := put(`{"role":"king"}`, 0); !errors.As(o.Err, &bad) {
		t.Errorf("an unknown role: %+v", o)
	}
	want("removed", remove(2), true, 3, `{"role":"regular","seat":3}`)
	if o := put(`{}`, 3); !errors.Is(o.Err, store.ErrNotFound) {
		t.Errorf("a guarded put of a removed edge: %+v", o)
	}
	back := put("", 0)
	want("back, with the defaults", back, true, 4, `{"role":"passer"}`)
	if got, err := f.GetEdge(t.Context(), tenant, k, "7", "7"); err != nil || !cmp.Equal(got, back.Edge) {
		t.Errorf("get: %+v, %v: want %+v", got, err, back.Edge)
	}
	var types []string
	for _, e := range f.events(t) {
		types = append(types, e.Type)
	}
	if diff := cmp.Diff([]string{event.Created, event.Updated, event.Removed, event.Created}, types); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}

	// Writers race to make the same edges, several at a time and in different orders. One writer
	// makes each edge, the others change it, and no version occurs twice.
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 5 {
				var writes []store.EdgeWrite
				for n := range 6 {
					to := event.IDOf(100 + n)
					if w%2 == 1 {
						to = event.IDOf(105 - n)
					}
					writes = append(writes, store.EdgeWrite{Meta: meta(), From: "7", To: to,
						Attributes: json.RawMessage(fmt.Sprintf(`{"seat":%d}`, w*10+i))})
				}
				if _, err := f.PutEdges(t.Context(), tenant, k, writes); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	var doubled, missing int
	if err := f.system.QueryRow(t.Context(), `
		SELECT count(*) FILTER (WHERE events <> versions), count(*) FILTER (WHERE versions <> newest) FROM (
		  SELECT count(*) AS events, count(DISTINCT m.payload ->> 'version') AS versions, max(e.version) AS newest
		    FROM edges_visit e JOIN outbox_messages m ON m.aggregate_type = 'visit' AND m.aggregate_id = e.to_id WHERE e.to_id >= '100'
		    GROUP BY e.to_id) x`).Scan(&doubled, &missing); err != nil || doubled+missing > 0 {
		t.Errorf("%d edges have an event twice, %d lack one: %v", doubled, missing, err)
	}
}
