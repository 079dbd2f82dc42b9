package history

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

func TestAnErasedActorIsReplacedInTheirVersionsAlone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	apply(t, pool, comment(1, event.Created, "ann", nil), comment(2, event.Edited, "user:7", nil), comment(3, event.Edited, "user:77", nil),
		follow(1, "user:7"), follow(2, "ann"))
	redact := func(tenant int64, dryRun bool) (all int64) {
		t.Helper()
		for after := any(nil); ; {
			var n int64
			var next any
			if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
				n, next, err = New(kinds.Builtin).RedactActor(t.Context(), tx, tenant, "user:7", after, dryRun)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			if all, after = all+n, next; next == nil {
				return all
			}
		}
	}
	by := func() (all []string) {
		comments, follows := histories(t, pool)
		for _, e := range append(comments, follows...) {
			all = append(all, e.By)
		}
		return all
	}
	if n := redact(2, false); n != 0 {
		t.Errorf("another tenant has %d versions of the actor", n)
	}
	if n := redact(1, true); n != 2 {
		t.Errorf("a dry run finds %d versions, want 2", n)
	}
	if diff := cmp.Diff([]string{"ann", "user:7", "user:77", "user:7", "ann"}, by()); diff != "" {
		t.Errorf("after a dry run (-want +got):\n%s", diff)
	}
	if n := redact(1, false); n != 2 {
		t.Errorf("redacted %d versions, want 2", n)
	}
	if diff := cmp.Diff([]string{"ann", event.ErasedActor, "user:77", event.ErasedActor, "ann"}, by()); diff != "" {
		t.Errorf("after the redaction (-want +got):\n%s", diff)
	}
}

func TestTheHistoriesOfAPersonsEdgesAreForgottenAlone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	edge := func(from, to event.ID) event.Event {
		return toEvent(event.AggregateFollow, event.Created,
			event.Edge{From: from, To: to, Status: event.StatusActive, Version: 1, Actor: "ann"})
	}
	apply(t, pool, edge("7", "5"), edge("7", "auth0|6"), edge("a.b@example.com", "5"), edge("a.b@example.com", "7"), edge("9", "auth0|6"))
	left := func() (all []string) {
		t.Helper()
		rows, _ := pool.Query(t.Context(), `SELECT follower_id || ' ' || followee_id FROM follow_history ORDER BY 1`)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	for _, c := range []struct {
		end    kinds.End
		object event.ID
		want   []string
	}{
		{kinds.From, "7", []string{"9 auth0|6", "a.b@example.com 5", "a.b@example.com 7"}},
		{kinds.To, "7", []string{"9 auth0|6", "a.b@example.com 5"}},
		{kinds.To, "auth0|6", []string{"a.b@example.com 5"}},
	} {
		of := projections.EdgesOf{TenantID: 1, Kind: followKind, Object: c.object, End: c.end}
		for after := (&projections.Pair{}); after != nil; {
			if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
				_, after, err = New(kinds.Builtin).Forget(t.Context(), tx, of, *after, false)
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		if diff := cmp.Diff(c.want, left()); diff != "" {
			t.Errorf("after those of %s at end %v (-want +got):\n%s", c.object, c.end, diff)
		}
	}
}
