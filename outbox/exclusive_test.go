package outbox

import (
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestALostPacketEndsNoRepair: the server sends an idle holder of the lock several probes. The
// limit of other connections would end it after the first one that is lost.
func TestALostPacketEndsNoRepair(t *testing.T) {
	t.Parallel()
	exclusive, free, err := Exclusive(t.Context(), testkit.Postgres(t).Pool(t, postgres.RoleSystem), "repair")
	if err != nil {
		t.Fatal(err)
	}
	defer free()
	if limit := scalar[string](t, exclusive, `SHOW tcp_user_timeout`); limit != "0" {
		t.Errorf("the limit is %s ms, want none", limit)
	}
}
