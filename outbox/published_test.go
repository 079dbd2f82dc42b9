package outbox

import (
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestCountPublished(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`), newEvent("1", `3`), newEvent("1", `4`))
	elsewhere := appendRows(t, pool, newEvent("2", `1`))[0]
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), partition = 4, stream_seq = 5 WHERE id = $1`, elsewhere.OutboxID)
	for i, seq := range []int64{4, 5, 5} { // the second and third name the same message; the fourth is not published
		if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = now(), partition = 3, stream_seq = $2 WHERE id = $1`,
			in[i].OutboxID, seq); err != nil {
			t.Fatal(err)
		}
	}
	for first, want := range map[uint64][2]int64{1: {3, 2}, 5: {2, 1}, 6: {0, 0}} {
		rows, distinct, err := CountPublished(t.Context(), pool, 3, first)
		if err != nil || [2]int64{rows, distinct} != want {
			t.Errorf("from %d: %d rows, %d distinct, %v; want %v", first, rows, distinct, err, want)
		}
	}
}

func TestAMessageIsInPlaceWhenItsRowNamesIt(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`), newEvent("1", `3`))
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), partition = 3, stream_seq = 4 WHERE id = $1`, in[0].OutboxID)
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), partition = 4, stream_seq = 5 WHERE id = $1`, in[1].OutboxID)
	message := func(i int, seq uint64) Published { return Published{ID: in[i].OutboxID, EventID: in[i].ID, Seq: seq} }
	got, err := InPlace(t.Context(), pool, 3, []Published{message(0, 4), message(0, 9), message(1, 5), message(2, 6),
		{ID: in[0].OutboxID, EventID: in[1].ID, Seq: 4}})
	if err != nil || len(got) != 1 || !got[4] {
		t.Errorf("in place: %v, %v; want only the message at 4", got, err)
	}
}
