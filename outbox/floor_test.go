package outbox

import (
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestTheHorizonOfAnOutboxThatHadNoRowIsBelowTheFirst: a sequence that was never used shows its first value as its last one, and a
// floor on it would hide the first row from every claim.
func TestTheHorizonOfAnOutboxThatHadNoRowIsBelowTheFirst(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for want := range int64(3) {
		h, err := ReadHorizon(t.Context(), pool)
		if err != nil {
			t.Fatal(err)
		}
		if h.LastID != want {
			t.Errorf("after %d rows the last id is %d", want, h.LastID)
		}
		if rows := appendRows(t, pool, newEvent(1, `{}`)); rows[0].OutboxID != want+1 {
			t.Fatalf("row %d has id %d", want+1, rows[0].OutboxID)
		}
	}
}
