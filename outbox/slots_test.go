package outbox

import (
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestWhatWaitsIsCountedBySlot(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if all, more, err := ReadSlots(t.Context(), pool); err != nil || more || len(all) != 0 {
		t.Fatalf("an empty outbox: %v, %t, %v", all, more, err)
	}
	appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`), newEvent("2", `3`), newEvent("2", `4`))
	exec(t, pool, `UPDATE outbox_messages SET inserted_at = now() - interval '100 s', available_at = now() - interval '50 s' WHERE id = 1`)
	exec(t, pool, `UPDATE outbox_messages SET available_at = now() + interval '1 h' WHERE id = 4`)
	if err := Park(t.Context(), pool, exchange(t, pool, Round{}).Held); err != nil {
		t.Fatal(err)
	}
	var slots [2]int
	for i := range slots {
		if err := pool.QueryRow(t.Context(), `SELECT slot FROM outbox_messages WHERE id = $1`, 1+2*i).Scan(&slots[i]); err != nil {
			t.Fatal(err)
		}
	}
	all, more, err := ReadSlots(t.Context(), pool)
	if err != nil || more {
		t.Fatal(more, err)
	}
	total, delayed := 0, 0
	for _, s := range all {
		total, delayed = total+s.Pending, delayed+s.Delayed
		if s.Slot < 0 || s.Slot >= event.Slots {
			t.Errorf("slot %d", s.Slot)
		}
		if s.Slot == slots[0] && (s.Pending < 2 || s.Oldest < 49*time.Second || s.Oldest > 90*time.Second) {
			t.Errorf("%+v, want 2 pending or more and 50 s", s)
		}
	}
	if total != 3 || delayed != 1 {
		t.Errorf("%d due and %d delayed, want 3 and 1: %+v", total, delayed, all)
	}
}
