package lease

import (
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestAfterClearASuccessorTakesEverythingAtOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	killed, successor := newGroup(t, pool, "a"), newGroup(t, pool, "b")
	beat(t, killed)
	checkShares(t, killed)
	if err := Clear(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	beat(t, successor)
	checkShares(t, successor)
}
