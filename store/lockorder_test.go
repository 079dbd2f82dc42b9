package store_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// A batch waits for the locks of its edges in key order alone. Two batches that wait in different
// orders are a deadlock.

// begin opens a transaction that rolls back when the test ends, and runs a statement in it.
func (f fixture) begin(t *testing.T, sql string) pgx.Tx {
	t.Helper()
	tx, err := f.system.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(t.Context()) })
	if _, err := tx.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
	return tx
}

// blocked waits until a session of the database waits for a lock.
func blocked(t *testing.T, db *testkit.DB) {
	t.Helper()
	owner := db.Pool(t, postgres.RoleOwner) // sees the sessions of all logins
	testkit.Eventually(t, "a writer to wait for a lock", func() (waits bool, err error) {
		err = owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
		return waits, err
	})
}

// ends returns the outcomes of a batch that must end now.
func ends(t *testing.T, done <-chan []store.EdgeOutcome) (out []store.EdgeOutcome) {
	t.Helper()
	testkit.Eventually(t, "the batch to end", func() (bool, error) {
		select {
		case out = <-done:
			return true, nil
		default:
			return false, nil
		}
	})
	return out
}

func TestABatchOfRemovalsDoesNotWaitForAnEdgeThatItsFirstItemDidNotFind(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	f := on(t, db)
	edge := func(from event.ID) store.EdgeWrite { return store.EdgeWrite{Meta: meta(), From: from, To: "100"} }
	f.follow(t, "5", "100")
	first := f.begin(t, `SELECT FROM edges_follow WHERE from_id = '5' FOR UPDATE`)
	done := make(chan []store.EdgeOutcome, 1)
	go func() {
		out, err := f.RemoveEdges(t.Context(), tenant, follows, []store.EdgeWrite{edge("3"), edge("5"), edge("3")})
		if err != nil {
			t.Error(err)
		}
		done <- out
	}()
	blocked(t, db) // it has not found the edge 3, and waits for the edge 5
	f.follow(t, "3", "100")
	f.begin(t, `SELECT FROM edges_follow WHERE from_id = '3' FOR UPDATE`)
	if err := first.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out := ends(t, done); out[0].Changed || !out[1].Changed || out[2].Changed {
		t.Errorf("removed %v, %v and %v", out[0].Changed, out[1].Changed, out[2].Changed)
	}
}

func TestABatchHoldsNoEdgeWhileItWaitsToCreateALowerOne(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]struct {
		of      func(pgx.Tx, *testing.T) error
		version int64
	}{
		"the other creator rolls back": {func(tx pgx.Tx, t *testing.T) error { return tx.Rollback(t.Context()) }, 1},
		"the other creator commits":    {func(tx pgx.Tx, t *testing.T) error { return tx.Commit(t.Context()) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			db := testkit.Postgres(t)
			f := on(t, db)
			put := func(froms ...event.ID) []store.EdgeOutcome {
				var writes []store.EdgeWrite
				for _, from := range froms {
					writes = append(writes, store.EdgeWrite{Meta: meta(), From: from, To: "100",
						Attributes: json.RawMessage(`{"role":"owner"}`)})
				}
				out, err := f.PutEdges(t.Context(), tenant, kinds.Builtin().Edges["membership"], writes)
				if err != nil {
					t.Error(err)
				}
				return out
			}
			put("5")
			if _, err := f.system.Exec(t.Context(), `UPDATE edges_membership SET attributes = '{"role": "member"}'`); err != nil {
				t.Fatal(err)
			}
			creator := f.begin(t, `INSERT INTO edges_membership (tenant_id, from_id, to_id, attributes)
				VALUES (7, 3, 100, '{"role": "member"}')`)
			done := make(chan []store.EdgeOutcome, 1)
			go func() { done <- put("5", "3") }()
			blocked(t, db)
			if _, err := f.system.Exec(t.Context(), `SELECT FROM edges_membership WHERE from_id = '5' FOR UPDATE NOWAIT`); err != nil {
				t.Errorf("the batch holds the edge 5 while it waits for the edge 3: %v", err)
			}
			if err := end.of(creator, t); err != nil {
				t.Fatal(err)
			}
			out := ends(t, done)
			if !out[0].Changed || out[0].Created || out[0].Edge.Version != 2 ||
				!out[1].Changed || out[1].Created != (end.version == 1) || out[1].Edge.Version != end.version {
				t.Errorf("the edge 5: %+v\nthe edge 3: %+v", out[0], out[1])
			}
		})
	}
}
