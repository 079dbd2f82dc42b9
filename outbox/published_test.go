package outbox

import (
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestCountPublished(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent(1, `1`), newEvent(1, `2`), newEvent(1, `3`), newEvent(1, `4`))
	elsewhere := appendRows(t, pool, newEvent(2, `1`))[0]
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), partition = 4, stream_seq = 5 WHERE id = $1`, elsewhere.OutboxID)
	for i, seq := range []int64{4, 5, 5} { // the second and third name the same message; the fourth is not published
		if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = now(), partition = 3, stream_seq = $2 WHERE id = $1`, in[i].OutboxID, seq); err != nil {
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
