package outbox

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// A sweep reads every selected message once. Each statement reads a bounded number, even if an
// aggregate has many messages.
func TestASweepReadsPages(t *testing.T) {
	db := testkit.Postgres(t)
	owner, pool := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleSystem)
	// Two aggregates of two and a half pages, a hundred small ones, the acts of user 7, and acts of
	// another user.
	const rows = `
		INSERT INTO %s (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at,
		attempts, event_id, inserted_at%s)
		SELECT g, CASE WHEN g %% 100 = 0 THEN 2 ELSE 1 END, CASE WHEN g %% 7 = 0 THEN 'thread' ELSE 'comment' END,
		CASE WHEN g <= 5000 THEN 1 + g %% 2 ELSE g %% 100 END, 'created', 1,
		       jsonb_build_object('n', g, 'actor', CASE WHEN g %% 4 = 0 THEN 'user:7' ELSE 'user:70' END), now(), now(), 0,
		       gen_random_uuid(), now()%s FROM generate_series(1, 9000) g`
	exec(t, owner, fmt.Sprintf(rows, "outbox_messages_kept", ", processed_at", ", now()"))
	exec(t, owner, fmt.Sprintf(rows, "outbox_messages_dlq", ", slot", ", 1"))
	exec(t, owner, fmt.Sprintf(rows, "outbox_messages", ", processed_at", ", CASE WHEN g % 10 > 0 THEN now() END"))
	all := func(where string) []int64 {
		rows, _ := owner.Query(t.Context(), `SELECT id FROM outbox_messages_kept WHERE tenant_id = 1 AND `+where+` ORDER BY id`)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	exec(t, owner, `ANALYZE outbox_messages_kept`)
	found, _ := pool.Query(t.Context(), "EXPLAIN (COSTS OFF) "+ofTable(sweepActorSQL, TableKept), pgx.QueryExecModeExec,
		pgx.StrictNamedArgs{"tenant": int64(1), "actor": "user:9", "after": int64(0), "after_event": noEvent, "limit": sweepPage})
	plan, err := pgx.CollectRows(found, pgx.RowTo[string])
	if text := strings.Join(plan, "\n"); err != nil || !strings.Contains(text, "_actor_idx") ||
		!strings.Contains(text, "Index Cond: ((tenant_id = '1'::bigint) AND ((payload ->> 'actor'::text) = 'user:9'::text)") {
		t.Errorf("the acts of a user are not found by their index (%v):\n%s", err, text)
	}
	type sweep struct {
		name, table string
		sel         Selection
		want        []int64
	}
	check := func(cases ...sweep) {
		t.Helper()
		for _, c := range cases {
			var got []int64
			most, page := 0, 0
			if err := Sweep(t.Context(), pool, c.table, c.sel, func(m Swept) error {
				got, page = append(got, m.ID), page+1
				return nil
			}, func() error {
				most, page = max(most, page), 0
				return nil
			}); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			if slices.Sort(got); !slices.Equal(got, c.want) || page > 0 || most > sweepWindow {
				t.Errorf("%s: %d messages, at most %d at a time, want %d", c.name, len(got), most, len(c.want))
			}
		}
	}
	check(
		sweep{"an actor", TableKept, Selection{TenantID: 1, Actor: "user:7"}, all("payload ->> 'actor' = 'user:7'")},
		sweep{"both", TableKept, Selection{TenantID: 1, Actor: "user:7", Aggregates: map[string][]event.ID{"comment": {"50"}}},
			all("(payload ->> 'actor' = 'user:7' OR aggregate_type = 'comment' AND aggregate_id = '50')")},
	)
	db.RowsPerStatement(t, sweepWindow, TableDLQ, TableOutbox)
	// The policy hides the index of actors: no operator on jsonb may read a row before the policy
	// does.
	db.RowsPerStatement(t, 2*sweepPage, TableKept)
	comments := map[string][]event.ID{"comment": {"1", "2", "50", "51"}, "thread": {"2"}}
	check(
		sweep{"the DLQ", TableDLQ, Selection{TenantID: 1}, all("true")},
		sweep{"the outbox", TableOutbox, Selection{TenantID: 1}, all("true")},
		sweep{"what is pending", TableOutbox, Selection{TenantID: 1, Pending: true}, all("id % 10 = 0")},
		sweep{"aggregates", TableKept, Selection{TenantID: 1, Aggregates: comments},
			all("(aggregate_type = 'comment' AND aggregate_id IN ('1', '2', '50', '51') OR aggregate_type = 'thread' " +
				"AND aggregate_id = '2')")},
	)
}

// TestARedactionNamesItsEvent: another event may have the message's id by now.
func TestARedactionNamesItsEvent(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent("1", `{"n": 1}`), newEvent("1", `{"n": 2}`))
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), partition = 0, stream_seq = id`)
	was := contents(t, pool)
	tx := func(fn func(tx pgx.Tx) error) {
		t.Helper()
		if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, fn); err != nil {
			t.Fatal(err)
		}
	}
	other := Published{ID: in[0].OutboxID, EventID: in[1].ID}
	tx(func(tx pgx.Tx) error { return Unmark(t.Context(), tx, []Published{other}) })
	redact := func(id int64, eventID string) (n int64) {
		t.Helper()
		tx(func(tx pgx.Tx) (err error) {
			n, err = Redact(t.Context(), tx, TableOutbox, []Redacted{{ID: id, EventID: eventID, Payload: `{}`}})
			return err
		})
		return n
	}
	if n := redact(other.ID, other.EventID); n != 0 {
		t.Errorf("%d messages of another event are redacted", n)
	}
	if diff := cmp.Diff(was, contents(t, pool)); diff != "" {
		t.Errorf("the messages have changed (-before +after):\n%s", diff)
	}
	if n := redact(in[0].OutboxID, in[0].ID); n != 1 || !scalar[bool](t, pool,
		`SELECT payload = '{}' AND stream_seq IS NULL FROM outbox_messages WHERE id = $1`, in[0].OutboxID) {
		t.Errorf("%d messages are redacted, and it may have kept its payload or its sequence", n)
	}
}
