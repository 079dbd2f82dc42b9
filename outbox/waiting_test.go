package outbox

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestMessagesThatWaitAreListedRetriedAndKilled: a message that a relay may be publishing is left
// alone. Messages behind a removed one are freed. Each action is recorded.
func TestMessagesThatWaitAreListedRetriedAndKilled(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`), newEvent("2", `3`), newEvent("2", `4`), newEvent("3", `5`),
		newEvent("4", `6`), newEvent("5", `7`))
	exec(t, pool, `UPDATE outbox_messages SET attempts = 3, last_error = 'no token' WHERE id IN (1, 3)`)
	delay(t, pool, time.Hour, 1, 3, 5)
	delay(t, pool, -time.Second, 6)
	if err := Park(t.Context(), pool, exchange(t, pool, Round{}).Held); err != nil {
		t.Fatal(err)
	}
	waiting := func(f WaitingFilter, limit int) (ids []int64) {
		t.Helper()
		all, err := postgres.Collect(ListWaiting(t.Context(), pool, f, limit))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range all {
			ids = append(ids, m.OutboxID)
		}
		return ids
	}
	for _, c := range []struct {
		f     WaitingFilter
		limit int
		want  []int64
	}{
		{WaitingFilter{}, 100, []int64{1, 2, 3, 4, 5, 6}},
		{WaitingFilter{After: 2}, 2, []int64{3, 4}},
		{WaitingFilter{AggregateType: "post", AggregateID: "2", EventType: "created", TenantID: 1}, 100, []int64{3, 4}},
		{WaitingFilter{TenantID: 2}, 100, nil},
		{WaitingFilter{AggregateType: "user"}, 100, nil},
		{WaitingFilter{EventType: "x"}, 100, nil},
	} {
		if got := waiting(c.f, c.limit); !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, want %v", c.f, got, c.want)
		}
	}
	for of, want := range map[int64][]int64{0: {1, 3}, 1: {1, 3}, 2: nil} {
		var got []int64
		all, err := Retrying(t.Context(), pool, of, 9)
		for _, m := range all {
			got = append(got, m.OutboxID)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("retrying of tenant %d: %v, %v; want %v", of, got, err, want)
		}
	}
	m, err := GetWaiting(t.Context(), pool, 2)
	if err != nil || m.Behind != 1 || string(m.Payload) != "2" || m.DueIn < 59*time.Minute || m.DueIn > time.Hour || m.Attempts != 0 {
		t.Errorf("message 2: %+v, %v", m, err)
	}
	if m, err := GetWaiting(t.Context(), pool, 1); err != nil || m.Behind != 0 || m.Attempts != 3 || m.LastError != "no token" {
		t.Errorf("message 1: %+v, %v", m, err)
	}

	before := contents(t, pool)
	for id, want := range map[int64]struct{ retry, kill error }{2: {retry: ErrBehind}, 6: {ErrDue, ErrDue},
		7: {ErrNotWaiting, ErrNotWaiting}, 99: {ErrNotWaiting, ErrNotWaiting}} {
		if err := RetryWaiting(t.Context(), pool, id, "ann", ""); !errors.Is(err, want.retry) {
			t.Errorf("a retry of %d: %v, want %v", id, err, want.retry)
		}
		if want.kill == nil {
			continue
		}
		if err := KillWaiting(t.Context(), pool, id, "ann", "no"); !errors.Is(err, want.kill) {
			t.Errorf("a kill of %d: %v, want %v", id, err, want.kill)
		}
	}
	if diff := gocmp.Diff(before, contents(t, pool)); diff != "" {
		t.Errorf("a refused action changed something (-before +after):\n%s", diff)
	}

	if err := RetryWaiting(t.Context(), pool, 1, "ann", "mended"); err != nil {
		t.Fatal(err)
	}
	claims := func(want ...int64) { // what is due comes in the order of its aggregate, which come in any order
		t.Helper()
		ids := claimedIDs(exchange(t, pool, Round{Due: true}))
		ordered := slices.Index(ids, 1) < slices.Index(ids, 2) && slices.Index(ids, 7) == len(ids)-1
		if got := slices.Sorted(slices.Values(ids)); !ordered || !slices.Equal(got, want) {
			t.Errorf("claimed %v, want %v", ids, want)
		}
	}
	claims(1, 2, 6, 7)
	due := scalar[time.Time](t, pool, `SELECT available_at FROM outbox_messages WHERE id = 3`)
	if err := KillWaiting(t.Context(), pool, 3, "bob", "no such user"); err != nil {
		t.Fatal(err)
	}
	claims(1, 2, 4, 6, 7)
	if got, want := scalar[string](t, pool, `SELECT concat_ws('|', id, attempts, last_error, payload) FROM outbox_messages_dlq`),
		"3|3|no token; killed by bob: no such user|3"; got != want {
		t.Errorf("the DLQ has %q, want %q", got, want)
	}
	if got := scalar[time.Time](t, pool, `SELECT available_at FROM outbox_messages_dlq`); !got.Equal(due) {
		t.Errorf("the DLQ says that the message was due at %s, want %s", got, due)
	}
	got := scalar[[]string](t, pool, `SELECT array_agg(concat_ws(' ', actor, action, dlq_id, tenant_id, aggregate_type, aggregate_id,
		event_type, reason) ORDER BY id) FROM outbox_dlq_actions`)
	if diff := gocmp.Diff([]string{"ann retry_waiting 1 1 post 1 created mended", "bob kill 3 1 post 2 created no such user"},
		got); diff != "" {
		t.Errorf("recorded (-want +got):\n%s", diff)
	}
}

// TestAKillThatARelayOvertakesTakesNothing: the relay publishes while the kill waits for the row,
// or the message becomes due between the kill's two transactions.
func TestAKillThatARelayOvertakesTakesNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("1", `1`), newEvent("2", `2`))
	delay(t, pool, time.Hour, 1, 2)
	marks, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = marks.Rollback(context.WithoutCancel(t.Context())) }() // the transaction may have ended
	if _, err := marks.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = now() WHERE id = 1`); err != nil {
		t.Fatal(err)
	}
	killed := make(chan error, 1)
	go func() { killed <- KillWaiting(t.Context(), pool, 1, "ann", "no") }()
	awaitBlocked(t, pool)
	if err := marks.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-killed; !errors.Is(err, ErrNotWaiting) {
		t.Errorf("a kill of a message that is published meanwhile: %v, want ErrNotWaiting", err)
	}

	// A kill that is paused until just before the due time still moves the message. While it
	// commits, no relay may find the message due.
	var due, until time.Time
	if err := pool.QueryRow(t.Context(), putOffSQL, pgx.StrictNamedArgs{"id": 2, "for": killDelay}).Scan(&due, &until); err != nil {
		t.Fatal(err)
	}
	if got := until.Sub(due); got != killDelay {
		t.Errorf("a message that is due in an hour is delayed by %s, want %s", got, killDelay)
	}

	was := scalar[time.Time](t, pool, `SELECT now()`) // the new due time of message 2; it was due before the second transaction began
	var did int
	if err := pool.QueryRow(t.Context(), killSQL, pgx.StrictNamedArgs{"id": 2, "was": was, "actor": "ann", "action": "kill", "reason": "no",
		"cause": "c"}).Scan(&did); err != nil || did != 0 {
		t.Errorf("a kill of a message that a relay may have claimed took %d, %v", did, err)
	}
	if got := scalar[int](t, pool, `SELECT count(*)::int FROM outbox_messages_dlq`); got != 0 {
		t.Errorf("the DLQ has %d messages", got)
	}
}

// TestAKillOfAMessageThatBecameDueIsRefusedAgain: its first kill is so slow that the message
// becomes due before it is delayed, so a relay may have claimed the message. The second kill, as an
// operator repeats it, must not take it either.
func TestAKillOfAMessageThatBecameDueIsRefusedAgain(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("1", `1`))
	exec(t, db.Pool(t, postgres.RoleOwner), `
		CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep_until(OLD.available_at); RETURN NEW; END $$;
		CREATE TRIGGER late BEFORE UPDATE ON outbox_messages FOR EACH ROW
		  WHEN (OLD.delayed AND NEW.available_at > OLD.available_at) EXECUTE FUNCTION late()`)
	delay(t, pool, time.Second, 1)
	for n := range 2 {
		if err := KillWaiting(t.Context(), pool, 1, "ann", "no"); !errors.Is(err, ErrDue) {
			t.Errorf("kill %d of a message that became due: %v, want ErrDue", n+1, err)
		}
	}
	if m, err := GetWaiting(t.Context(), pool, 1); err != nil || m.DueIn > 0 {
		t.Errorf("the message is due in %s, %v; want now", m.DueIn, err)
	}
}

// awaitBlocked waits until a session of this database waits for another session's lock.
func awaitBlocked(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	testkit.Eventually(t, "a session to wait for a lock", func() (bool, error) { return isBlocked(t, pool), nil })
}

func isBlocked(t *testing.T, pool *pgxpool.Pool) bool {
	t.Helper()
	return scalar[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
		AND cardinality(pg_blocking_pids(pid)) > 0)`)
}
