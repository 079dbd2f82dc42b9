package outbox

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestALostMessageGetsItsRowBackOnce: however often the redo runs. The database lost the first row,
// gave the id of the second one to another event, and has the third one in the DLQ.
func TestALostMessageGetsItsRowBackOnce(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	lost := appendRows(t, pool, newEvent("1", `1`), newEvent("2", `2`), newEvent("3", `3`))
	for i := range lost {
		lost[i].OccurredAt = time.Now()
	}
	failures := []Failure{{Row: Row{Event: lost[2], Attempts: MaxAttempts}, Error: "no"}}
	exec(t, pool, `UPDATE outbox_messages SET attempts = $1 WHERE id = $2`, MaxAttempts, lost[2].OutboxID)
	if _, dead, err := Fail(t.Context(), pool, failures); err != nil || dead != 1 {
		t.Fatal(dead, err)
	}
	exec(t, pool, `DELETE FROM outbox_messages WHERE id = $1`, lost[0].OutboxID)
	exec(t, pool, `UPDATE outbox_messages SET event_id = gen_random_uuid() WHERE id = $1`, lost[1].OutboxID)
	exec(t, pool, `UPDATE outbox_partitions SET floor_id = 100`)

	var highest int64
	for try, want := range [][]string{{lost[0].ID, lost[1].ID}, nil} {
		if err := RaiseIDs(t.Context(), pool, 50); err != nil {
			t.Fatal(err)
		}
		var moved, written []string
		if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			gone, inserted, err := Redo(t.Context(), tx, slices.Clone(lost))
			moved, written = gone, idsOfEvents(inserted)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(moved, []string{lost[1].ID}) || !slices.Equal(written, want) {
			t.Errorf("try %d: moved %v, written %v, want %v and %v", try+1, moved, written, lost[1].ID, want)
		}
		highest = scalar[int64](t, pool, `SELECT max(id) FROM outbox_messages`)
	}
	if highest != 51 {
		t.Errorf("the row under a new id has %d, want 51", highest)
	}
	if _, floor := tailOf(t, pool, 0); floor != lost[0].OutboxID-1 {
		t.Errorf("the floor is %d, want %d", floor, lost[0].OutboxID-1)
	}
	checkClaimed(t, pool, Round{}, lost[0].OutboxID, lost[1].OutboxID, highest)
}

func idsOfEvents(events []event.Event) (ids []string) {
	for _, e := range events {
		ids = append(ids, e.ID)
	}
	return ids
}

// TestIDsRiseAboveTheFirstOne: a database from before its first event has lost the event 1, and its
// sequence has given no id.
func TestIDsRiseAboveTheFirstOne(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if err := RaiseIDs(t.Context(), pool, 1); err != nil {
		t.Fatal(err)
	}
	if e := appendRows(t, pool, newEvent("1", `1`))[0]; e.OutboxID != 2 {
		t.Errorf("the next event has the id %d, want 2", e.OutboxID)
	}
}

// TestIDsRiseAboveTheEndOfARange: while a range ends, between the two steps of outbox_range_cut.
// Otherwise that would take the ids back.
func TestIDsRiseAboveTheEndOfARange(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool, ctx := db.Pool(t, postgres.RoleSystem), t.Context()
	var above int64
	raised := make(chan error, 1)
	if err := postgres.InTx(ctx, db.Pool(t, postgres.RoleOwner), pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `LOCK TABLE ONLY outbox_messages IN SHARE ROW EXCLUSIVE MODE`); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, `SELECT last_value + 200 FROM outbox_messages_id_seq`).Scan(&above); err != nil {
			return err
		}
		go func() { raised <- RaiseIDs(ctx, pool, above) }()
		testkit.Eventually(t, "the raise to wait or end", func() (bool, error) {
			return len(raised) > 0 || isBlocked(t, pool), nil
		})
		_, err := tx.Exec(ctx, `SELECT setval('outbox_messages_id_seq', $1)`, above-100)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := <-raised; err != nil {
		t.Fatal(err)
	}
	if e := appendRows(t, pool, newEvent("1", `1`))[0]; e.OutboxID != above+1 {
		t.Errorf("the next event has the id %d, want %d", e.OutboxID, above+1)
	}
}
