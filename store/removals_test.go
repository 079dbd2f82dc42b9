package store

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

var followKind = kinds.Builtin().Edges["follow"]

func newRemover(t *testing.T, pool *pgxpool.Pool) *Remover {
	t.Helper()
	r, err := NewRemover(pool, nil, kinds.Builtin, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func userRemoval(id event.ID) RemovalRequest {
	return RemovalRequest{Meta: Meta{Actor: "officer"}, Object: "user", ID: id, Kinds: []string{"follow"}, Direction: DirectionBoth}
}

// finish completes all removals.
func (r *Remover) finish(t *testing.T) (slices int) {
	t.Helper()
	for {
		worked, err := r.runOnce(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !worked {
			return slices
		}
		slices++
	}
}

// TestARemovalGoesOnWhereItBrokeOff fails the Remover at each step of each slice, and writes and
// requests the same removal meanwhile. Every edge that existed at the request is removed once, with
// one event, and the progress agrees.
func TestARemovalGoesOnWhereItBrokeOff(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	s, ctx := New(db.Pool(t, postgres.RoleAPI), nil), t.Context()
	// 1,200 edges from the user; 1,200 to it among 30,000 of others, so that the search takes
	// several windows; and some of another tenant.
	if _, err := owner.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) SELECT t, 7, 1000 + n
		FROM generate_series(1, 1200) n, generate_series(1, 2) t
		UNION ALL SELECT 1, 1000 + n, CASE WHEN n % 25 = 0 THEN 7 ELSE 5 END FROM generate_series(1, 30000) n`); err != nil {
		t.Fatal(err)
	}
	asked, err := s.RequestRemoval(ctx, 1, userRemoval("7"))
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken off")
	broke := 0
	r := newRemover(t, system)
	var last Removal
	for step, done := 0, false; !done; {
		steps := []string{"locked", "removed", "moved", ""}
		r.at = func(at string) error {
			if at == steps[step%len(steps)] {
				broke++
				return broken
			}
			return nil
		}
		step++
		if _, err := r.runOnce(ctx); err != nil && !errors.Is(err, broken) {
			t.Fatal(err)
		}
		if last, err = s.GetRemoval(ctx, 1, asked.ID); err != nil {
			t.Fatal(err)
		}
		if step == 8 { // behind the present position: the removal runs once more over everything
			if out, err := s.PutEdges(ctx, 1, followKind, []EdgeWrite{{Meta: Meta{Actor: "ann"}, From: "7", To: "1001"}}); err != nil ||
				!out[0].Created {
				t.Fatal(out, err)
			}
			if again, err := s.RequestRemoval(ctx, 1, userRemoval("7")); err != nil || again.ID != asked.ID || again.FinishedAt != nil {
				t.Fatal(again, err)
			}
		}
		done = last.FinishedAt != nil
	}
	if broke < 15 || last.Removed["follow"] != 2401 || last.Actor != "officer" {
		t.Errorf("broken off %d times: %+v", broke, last)
	}
	var active, others, events, versions int
	if err := system.QueryRow(ctx, `SELECT (SELECT count(*) FROM edges WHERE tenant_id = 1 AND status = 'ACTIVE'
		AND '7' IN (from_id, to_id)), (SELECT count(*) FROM edges WHERE status = 'ACTIVE'),
		(SELECT count(*) FROM outbox_messages WHERE event_type = 'removed' AND payload ->> 'actor' = 'officer'),
		(SELECT count(DISTINCT (payload ->> 'follower_id', payload ->> 'followee_id', payload ->> 'version')) FROM outbox_messages
		WHERE event_type = 'removed')`).
		Scan(&active, &others, &events, &versions); err != nil {
		t.Fatal(err)
	}
	if active != 0 || others != 30000 || events != 2401 || versions != 2401 {
		t.Errorf("%d edges are left, %d of others; %d events of %d removals", active, others, events, versions)
	}
	if next, err := s.RequestRemoval(ctx, 1, userRemoval("7")); err != nil || next.ID == asked.ID {
		t.Errorf("after the end: %+v, %v", next, err)
	}
}

// TestRemoversShareTheWork runs two Removers over removals of three tenants. Tenants take turns,
// one Remover at a time works on a removal, and the others skip it.
func TestRemoversShareTheWork(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	s, ctx := New(db.Pool(t, postgres.RoleAPI), nil), t.Context()
	if _, err := owner.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) SELECT t, u, 1000 + n
		FROM generate_series(1, 1700) n, generate_series(7, 8) u, generate_series(1, 3) t`); err != nil {
		t.Fatal(err)
	}
	ids := map[string]int64{}
	for tenant := int64(1); tenant <= 3; tenant++ {
		for user := int64(7); user <= 8; user++ {
			m, err := s.RequestRemoval(ctx, tenant, userRemoval(event.IDOf(user)))
			if err != nil {
				t.Fatal(err)
			}
			ids[m.ID] = tenant
			if _, err := s.GetRemoval(ctx, tenant%3+1, m.ID); !errors.Is(err, ErrNotFound) {
				t.Errorf("another tenant sees it: %v", err)
			}
		}
	}
	first := newRemover(t, system)
	var turns []int64
	for range 6 {
		if worked, err := first.runOnce(ctx); err != nil || !worked {
			t.Fatal(worked, err)
		}
		turns = append(turns, first.tenant)
	}
	if diff := cmp.Diff([]int64{1, 2, 3, 1, 2, 3}, turns); diff != "" {
		t.Errorf("tenants in their turns (-want +got):\n%s", diff)
	}
	var worked int
	if err := system.QueryRow(ctx,
		`SELECT count(*) FROM edge_removals WHERE worked_at IS NOT NULL AND (removed ->> 'follow')::int = 500`).Scan(&worked); err != nil ||
		worked != 6 {
		t.Errorf("%d removals had a slice of 500 edges in the first two turns, want 6: %v", worked, err)
	}

	// One Remover is frozen in the middle of a slice. The other completes everything else, and the
	// rest once the first one's connection is gone.
	frozen, ended := make(chan struct{}), make(chan error, 1)
	stuck, thaw := context.WithCancel(ctx)
	defer thaw()
	first.at = func(at string) error {
		if at == "removed" {
			close(frozen)
			<-stuck.Done()
		}
		return nil
	}
	go func() {
		_, err := first.runOnce(stuck)
		ended <- err
	}()
	<-frozen
	second := newRemover(t, system)
	second.finish(t)
	var left int
	if err := system.QueryRow(ctx, `SELECT count(*) FROM edge_removals WHERE finished_at IS NULL`).Scan(&left); err != nil || left != 1 {
		t.Errorf("%d removals remain besides the frozen one: %v", left, err)
	}
	thaw()
	if err := <-ended; err == nil {
		t.Error("the frozen slice committed")
	}

	// Both Removers run at once.
	for id, tenant := range ids {
		if _, err := owner.Exec(ctx, `UPDATE follows SET status = 'ACTIVE', version = version + 1 WHERE tenant_id = $1 AND follower_id = '8'
			AND status = 'REMOVED'`, tenant); err != nil {
			t.Fatal(id, err)
		}
		if _, err := s.RequestRemoval(ctx, tenant, userRemoval("8")); err != nil {
			t.Fatal(err)
		}
	}
	both, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	g := new(errgroup.Group)
	for range 2 {
		r := newRemover(t, system)
		g.Go(func() error { return r.Run(both) })
	}
	testkit.Eventually(t, "all removals to end", func() (bool, error) {
		err := system.QueryRow(ctx, `SELECT count(*) FROM edge_removals WHERE finished_at IS NULL`).Scan(&left)
		return left == 0, err
	})
	cancel()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	var active, twice int
	if err := system.QueryRow(ctx, `SELECT (SELECT count(*) FROM follows WHERE status = 'ACTIVE'),
		(SELECT count(*) FROM (SELECT FROM outbox_messages GROUP BY tenant_id, payload ->> 'follower_id', aggregate_id,
		payload ->> 'version' HAVING count(*) > 1) d)`).Scan(&active, &twice); err != nil || active+twice != 0 {
		t.Errorf("%d edges are left, %d were removed twice: %v", active, twice, err)
	}
}

// TestARemovalThatFailsHoldsBackNoOther: the Remover does not know the kind of the first removal.
// Before it retries that one, it completes the others, of the same tenant and of another one.
func TestARemovalThatFailsHoldsBackNoOther(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	s, ctx := New(db.Pool(t, postgres.RoleAPI), nil), t.Context()
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id)
		SELECT 2, 7, 1000 + n FROM generate_series(1, 1700) n`); err != nil { // several slices
		t.Fatal(err)
	}
	request := func(tenant int64, kind string) string {
		t.Helper()
		of := userRemoval("7")
		of.Kinds = []string{kind}
		m, err := s.RequestRemoval(ctx, tenant, of)
		if err != nil {
			t.Fatal(err)
		}
		return m.ID
	}
	done := func(tenant int64, id string) bool {
		t.Helper()
		m, err := s.GetRemoval(ctx, tenant, id)
		if err != nil {
			t.Fatal(err)
		}
		return m.FinishedAt != nil
	}
	fails, same, other := request(1, "like"), request(1, "follow"), request(2, "follow")
	known := *kinds.Builtin()
	known.Edges = map[string]kinds.Edge{"follow": followKind}
	r := newRemover(t, db.Pool(t, postgres.RoleSystem))
	r.kinds = func() *kinds.Set { return &known }
	for failures := 0; failures < 2; {
		if _, err := r.runOnce(ctx); err != nil {
			failures++
		}
	}
	if !done(1, same) || !done(2, other) {
		t.Error("it failed twice before the other removals were complete")
	}
	r.kinds = kinds.Builtin
	if r.finish(t); !done(1, fails) {
		t.Error("the removal that failed is not complete")
	}
}

// TestEdgesOf finds exactly the edges of an object at each end, in slices, also in a kind with hash
// partitions.
func TestEdgesOf(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	set := testkit.Kinds(t, "edges:\n  wave: {plural: waves, from: user, to: user, ends: [a_id, b_id], forward: waved, "+
		"reverse: wavers, partitions: 3}\n")
	makeKinds(t, db, set)
	s, k, ctx := New(db.Pool(t, postgres.RoleSystem), nil), set.Edges["wave"], t.Context()
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx,
		`INSERT INTO waves (tenant_id, a_id, b_id, status, version) SELECT 1, n, CASE WHEN n > 40000 OR n % 10000 = 0 THEN 7 ELSE 1 END,
		CASE n % 2 WHEN 0 THEN 'ACTIVE' ELSE 'REMOVED' END, n FROM generate_series(8, 40700) n UNION ALL SELECT t, 7, n, 'ACTIVE', 1
		FROM generate_series(8, 708) n, generate_series(1, 2) t`); err != nil {
		t.Fatal(err)
	}
	for end, want := range map[kinds.End]int{kinds.From: 701, kinds.To: 704} {
		var all []EdgeOf
		if err := s.EdgesOf(ctx, 1, k, "7", end, func(some []EdgeOf) error {
			if len(some) > MaxEdgesOf {
				t.Errorf("a slice of %d edges", len(some))
			}
			all = append(all, some...)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if len(all) != want || !slices.IsSortedFunc(all, func(a, b EdgeOf) int {
			return slices.Compare([]event.ID{a.From, a.To}, []event.ID{b.From, b.To})
		}) {
			t.Errorf("%d edges %s it, want %d", len(all), end, want)
		}
		for _, e := range all {
			if end == kinds.To && (e.To != "7" || event.IDOf(e.Version) != e.From || e.Active != (testkit.Number(e.From)%2 == 0)) ||
				end == kinds.From && e.From != "7" {
				t.Fatalf("%s: %+v", end, e)
			}
		}
		// Edges that are REMOVED at the given version are deleted, no others.
		all[1].Version++
		noFence := func(context.Context, pgx.Tx) error { return nil }
		n, err := s.ForgetEdges(ctx, 1, k, all, noFence)
		removed := int64(0)
		for i, e := range all {
			if !e.Active && i != 1 {
				removed++
			}
		}
		if err != nil || n != removed {
			t.Errorf("%d edges were deleted, want %d: %v", n, removed, err)
		}
	}
}

// TestAReadThatRunsAgainMissesNothing: PostgreSQL aborts a page in its middle, and the transaction
// runs again. An erasure relies on these pages.
func TestAReadThatRunsAgainMissesNothing(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	owner, s, ctx := db.Pool(t, postgres.RoleOwner), New(db.Pool(t, postgres.RoleAPI), nil), t.Context()
	if _, err := owner.Exec(ctx, `
		INSERT INTO follows (tenant_id, follower_id, followee_id) SELECT 1, 7, n FROM generate_series(1, 5) n;
		INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id, moderation_state)
		SELECT 1, 'comment', 7, 'key ' || n, 'x', gen_random_uuid(), 'NONE' FROM generate_series(1, 5) n;
		CREATE FUNCTION aborted(id text, once int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
		  IF id LIKE '%3' AND NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = once) THEN
		    PERFORM pg_advisory_lock(once); -- the session keeps it
		    RAISE 'once' USING ERRCODE = 'serialization_failure';
		  END IF;
		  RETURN true;
		END $$;
		CREATE POLICY aborted ON edges_follow AS RESTRICTIVE FOR SELECT USING (aborted(to_id, 70001));
		CREATE POLICY aborted ON child_keys AS RESTRICTIVE FOR SELECT USING (aborted(idempotency_key, 70002))`); err != nil {
		t.Fatal(err)
	}
	var edges []EdgeOf
	if err := s.EdgesOf(ctx, 1, followKind, "7", kinds.From, func(some []EdgeOf) error {
		edges = append(edges, some...)
		return nil
	}); err != nil || len(edges) != 5 {
		t.Errorf("%d edges of 5, %v", len(edges), err)
	}
	keys := 0
	if err := s.AuthorKeys(ctx, 1, kinds.Builtin().Children["comment"], "7", func(some map[string]string) error {
		keys += len(some)
		return nil
	}); err != nil || keys != 5 {
		t.Errorf("%d keys of 5, %v", keys, err)
	}
}
