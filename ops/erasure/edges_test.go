package erasure

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// put makes edges of the person. Their actor occurs only in their events and versions, so each
// occurrence is a remainder of them.
func (w *world) put(kind string, pairs ...[2]event.ID) {
	w.t.Helper()
	w.putBy(kind, "ann "+w.secret, pairs...)
}

func (w *world) putBy(kind, actor string, pairs ...[2]event.ID) {
	w.t.Helper()
	for some := range slices.Chunk(pairs, 400) {
		var writes []store.EdgeWrite
		for _, p := range some {
			writes = append(writes, store.EdgeWrite{Meta: store.Meta{Actor: actor}, From: p[0], To: p[1]})
		}
		out, err := w.store.PutEdges(w.t.Context(), tenant, kinds.Builtin().Edges[kind], writes)
		for _, o := range out {
			err = errors.Join(err, o.Err)
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
}

// leftOfEdges counts rows that name the author as the end of an edge.
func (w *world) leftOfEdges() map[string]int {
	w.t.Helper()
	left := map[string]int{}
	ask := func(db *testkit.DB, name, sql string) {
		w.t.Helper()
		var n int
		if err := db.Pool(w.t, postgres.RoleSystem).QueryRow(w.t.Context(), sql, w.author).Scan(&n); err != nil {
			w.t.Fatal(name, err)
		}
		if n > 0 {
			left[name] = n
		}
	}
	const end = ` WHERE tenant_id = 1 AND (from_id = $1 OR to_id = $1 AND kind = 'follow')`
	ask(w.truthDB, "edges", `SELECT count(*) FROM edges`+end)
	ask(w.projDB, "edge_lists", `SELECT count(*) FROM edge_lists`+end)
	ask(w.projDB, "edge_counts", `SELECT count(*) FROM edge_counts WHERE tenant_id = 1 AND object_id = $1
		AND (kind = 'follow' OR outgoing > 0)`)
	ask(w.projDB, "edge_shards", `SELECT count(*) FROM edge_shards WHERE tenant_id = 1 AND object_id = $1 AND kind = 'follow'`)
	for _, t := range []string{"follow_history", "follow_history_purged"} {
		ask(w.projDB, t, `SELECT count(*) FROM `+t+` WHERE tenant_id = 1 AND $1 IN (follower_id, followee_id)`)
	}
	ask(w.projDB, "membership_history", `SELECT count(*) FROM membership_history WHERE tenant_id = 1 AND $1 = user_id`)
	ask(w.truthDB, "payloads", `SELECT count(*) FROM (SELECT payload, tenant_id FROM outbox_messages UNION ALL SELECT payload, tenant_id
		FROM outbox_messages_dlq UNION ALL
		SELECT payload, tenant_id FROM outbox_messages_archive UNION ALL SELECT payload, tenant_id FROM outbox_messages_kept) m
		WHERE tenant_id = 1 AND $1::text IN (payload ->> 'follower_id', payload ->> 'followee_id', payload ->> 'user_id')`)
	return left
}

// TestNothingOfAPersonsEdgesIsLeftAnywhere erases a person with many followers, and kills the
// erasure at each step. Afterward the counts of others are correct, and all other rows are
// unchanged.
func TestNothingOfAPersonsEdgesIsLeftAnywhere(t *testing.T) {
	w := newWorld(t)
	w.author = "auth0|5f7c-12"
	w.fleet = append(w.fleet, followercounts.New(kinds.Builtin))
	ctx := t.Context()
	stopRelay := w.relay()
	stopConsumers := w.consume(w.projections)
	defer stopConsumers()

	w.put("follow", [2]event.ID{w.author, "10"}, [2]event.ID{w.author, "11"}, [2]event.ID{"a.b@example.com", w.author})
	var many [][2]event.ID
	for from := int64(1000); from < 1520; from++ {
		many = append(many, [2]event.ID{event.IDOf(from), w.author})
	}
	w.put("follow", many...)
	w.put("membership", [2]event.ID{w.author, "100"})
	w.put("like", [2]event.ID{w.author, "100"}, [2]event.ID{w.author, w.author}) // the post has the same id as the person
	w.putBy("follow", "bob", [2]event.ID{"10", "11"}, [2]event.ID{"13", "10"})
	w.putBy("like", "bob", [2]event.ID{"8", w.author})
	if out, err := w.store.RemoveEdges(ctx, tenant, kinds.Builtin().Edges["follow"],
		[]store.EdgeWrite{{Meta: store.Meta{Actor: "ann " + w.secret}, From: w.author, To: "11"}}); err != nil || !out[0].Changed {
		t.Fatal(out, err)
	}
	w.settle(w.projections)
	w.exec(w.projections, `INSERT INTO edge_shards (tenant_id, kind, object_id, shards) VALUES (1, 'follow', $1, 2)`, w.author)
	w.exec(w.projections, `INSERT INTO follow_history_purged (tenant_id, follower_id, followee_id, version)
		VALUES (1, 10, $1, 2)`, w.author)
	// An event that nobody can apply parks the later events of its aggregate: here the removal of
	// an edge that is counted. It spells a name and an id in unusual forms.
	w.put("follow", [2]event.ID{w.author, "50"})
	w.putBy("follow", "bob", [2]event.ID{"13", "50"})
	w.settle(w.projections)
	w.exec(w.truth, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'follow', 50, 'created', jsonb_build_object('Follower_ID', $2::text, 'followee_id', 50, 'actor', $1::text))`,
		w.secret, w.author)
	w.settle(w.projections)
	w.archive("outbox_messages_archive", "m.aggregate_type = 'follow' AND m.aggregate_id = '11'")
	w.archive("outbox_messages_kept", "m.aggregate_type = 'membership'")
	if e, err := w.cold.Export(ctx, outbox.Range{From: 1, To: 50_000_001, FirstAt: time.Now()}); err != nil || e.Rows == 0 ||
		len(filesHolding(t, w.coldDir, w.secret)) == 0 {
		t.Fatalf("%+v, %v", e, err)
	}
	stopRelay()
	w.put("follow", [2]event.ID{w.author, "14"})
	w.exec(w.truth, `WITH gone AS (DELETE FROM outbox_messages WHERE aggregate_id = '14' RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, trace_id, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, trace_id,
		event_id, inserted_at, slot FROM gone`)
	w.put("follow", [2]event.ID{"15", w.author}) // waits for a relay
	w.relay()

	dry, err := w.erase(Options{DryRun: true})
	if err != nil || dry.Counts[Edges] != 529 || dry.Counts[DLQ] != 1 || dry.Counts[DeadLetters] == 0 || dry.Counts[Cold] == 0 ||
		dry.Counts[Archive] == 0 || dry.Counts[Stream] < 529 {
		t.Errorf("a dry run: %+v, %v", dry, err)
	}
	died := map[string]bool{}
	wrote := false
	var report Report
	for err = errKilled; errors.Is(err, errKilled); {
		report, err = w.erase(Options{Wait: time.Minute, at: func(step string) error {
			if step == "read the stream" && !wrote { // the person writes meanwhile
				wrote = true
				w.put("follow", [2]event.ID{w.author, "16"}, [2]event.ID{w.author, "11"})
			}
			if died[step] {
				return nil
			}
			died[step] = true
			return errKilled
		}})
	}
	if err != nil || !report.Done {
		t.Fatal(report, err)
	}
	for _, step := range []string{"a slice of edges", "removing edges", "redacted the messages of edges", "unmarked", "deleted", "scanned",
		"a slice of edges, forgotten"} {
		if !died[step] {
			t.Errorf("it was not killed at %q, of %v", step, slices.Sorted(maps.Keys(died)))
		}
	}
	t.Logf("%+v", report)
	check := func(when string) {
		t.Helper()
		w.gone(when)
		if diff := cmp.Diff(map[string]int{}, w.leftOfEdges()); diff != "" {
			t.Errorf("%s remain (-want +got):\n%s", when, diff)
		}
	}
	check("after the erasure")
	w.settle(w.projections)
	w.equal("after the erasure", w.projections)
	counts := map[event.ID][2]int64{}
	for _, id := range []event.ID{"10", "11", "a.b@example.com", "50", "1000"} {
		var c [2]int64
		if err := w.projections.QueryRow(ctx, `SELECT coalesce(sum(incoming), 0), coalesce(sum(outgoing), 0) FROM edge_counts
			WHERE tenant_id = 1 AND kind = 'follow' AND object_id = $1`, id).Scan(&c[0], &c[1]); err != nil {
			t.Fatal(err)
		}
		counts[id] = c
	}
	want := map[event.ID][2]int64{"10": {1, 1}, "11": {1, 0}, "a.b@example.com": {}, "50": {1, 0}, "1000": {}}
	if diff := cmp.Diff(want, counts); diff != "" {
		t.Errorf("counts of others (-want +got):\n%s", diff)
	}
	// The like of the post with the same id as the person remains.
	if e, err := w.store.GetEdge(ctx, tenant, kinds.Builtin().Edges["like"], "8", w.author); err != nil || !e.Active() {
		t.Error(e, err)
	}
	if r, err := relay.Repair(ctx, w.truth, w.nats.Config(), testkit.Logger(t), relay.RepairOptions{DryRun: true}); err != nil ||
		!r.Healthy {
		t.Errorf("%+v, %v: stream and database disagree", r, err)
	}

	// A second erasure finds nothing, and a new consumer reads past the erased messages.
	again, err := w.erase(Options{Wait: time.Minute})
	if err != nil || !again.Done || len(again.Counts) > 0 {
		t.Errorf("the second erasure: %+v, %v", again, err)
	}
	freshPool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	stopFresh := w.consume(freshPool)
	w.putBy("follow", "bob", [2]event.ID{"13", "17"})
	w.settle(freshPool)
	stopFresh()
	w.equal("to a new consumer", freshPool)

	// A new edge of the pair begins at version 1 everywhere.
	w.put("follow", [2]event.ID{w.author, "10"})
	w.settle(w.projections)
	if e, err := w.store.GetEdge(ctx, tenant, kinds.Builtin().Edges["follow"], w.author, "10"); err != nil || e.Version != 1 {
		t.Error(e, err)
	}
	w.equal("with an edge that is created again", w.projections)
	var heads int
	if err := w.projections.QueryRow(ctx, `SELECT count(*) FROM follow_history WHERE tenant_id = 1 AND follower_id = $1
		AND version_state = 'LATEST'`, w.author).Scan(&heads); err != nil || heads != 1 {
		t.Errorf("%d histories, %v", heads, err)
	}
}

// TestTheEdgesToAPersonsChildrenAreRemoved erases a person who liked comments, and whose comments
// others liked. Nothing of the person's likes is left; those of others are removed like any edge.
func TestTheEdgesToAPersonsChildrenAreRemoved(t *testing.T) {
	w := newWorld(t)
	w.fleet = append(w.fleet, followercounts.New(kinds.Builtin))
	ctx := t.Context()
	w.relay()
	stopConsumers := w.consume(w.projections)
	defer stopConsumers()
	theirs := w.comment(tenant, w.author, "5", "", "a", "words "+w.secret)
	other := w.comment(tenant, "8", "5", "", "b", "words")
	a, b := event.ID(theirs.ID), event.ID(other.ID)
	w.put("like_comment", [2]event.ID{w.author, a}, [2]event.ID{w.author, b})
	w.putBy("like_comment", "bob", [2]event.ID{"9", a}, [2]event.ID{"9", b}, [2]event.ID{"10", a})
	w.settle(w.projections)
	report, err := w.erase(Options{Wait: time.Minute})
	if err != nil || !report.Done || report.Counts[Edges] != 2 || report.Counts[Children] != 1 {
		t.Fatal(report, err)
	}
	remover, err := store.NewRemover(w.truth, nil, kinds.Builtin, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	stopRemover := system.Start(t, remover.Run)
	testkit.Eventually(t, "the removal to end", func() (done bool, err error) {
		return done, w.truth.QueryRow(ctx, `SELECT bool_and(finished_at IS NOT NULL) FROM edge_removals`).Scan(&done)
	})
	stopRemover()
	w.settle(w.projections)
	w.gone("after the erasure")
	w.equal("after the erasure", w.projections)
	if diff := cmp.Diff(map[string]int{}, w.leftOfEdges()); diff != "" {
		t.Errorf("remain (-want +got):\n%s", diff)
	}
	k := kinds.Builtin().Edges["like_comment"]
	for _, c := range []struct {
		from, to event.ID
		active   bool
	}{{"9", a, false}, {"10", a, false}, {"9", b, true}} {
		if e, err := w.store.GetEdge(ctx, tenant, k, c.from, c.to); err != nil || e.Active() != c.active {
			t.Errorf("the like of %s by %s: %+v, %v", c.to, c.from, e, err)
		}
	}
	counts := map[event.ID]int64{}
	for _, id := range []event.ID{a, b} {
		var n int64
		if err := w.projections.QueryRow(ctx, `SELECT coalesce(sum(incoming), 0) FROM edge_counts
			WHERE kind = 'like_comment' AND object_id = $1`, id).Scan(&n); err != nil {
			t.Fatal(err)
		}
		counts[id] = n
	}
	if diff := cmp.Diff(map[event.ID]int64{a: 0, b: 1}, counts); diff != "" {
		t.Errorf("likers (-want +got):\n%s", diff)
	}
	if again, err := w.erase(Options{Wait: time.Minute}); err != nil || !again.Done || len(again.Counts) > 0 {
		t.Errorf("the second erasure: %+v, %v", again, err)
	}
}
