//go:build faults

package relay

import (
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

// TestAFullDiskOfTheBrokerBurnsNoAttemptAndLosesNothing fills the disk of NATS under relays that
// publish. Rows wait, and none counts a failure. NATS gives its streams up; it starts again with
// space, and the relays continue.
func TestAFullDiskOfTheBrokerBurnsNoAttemptAndLosesNothing(t *testing.T) {
	b, disk := testkit.NATSOnDisk(t, 128<<20)
	f := fleetOn(t, testkit.Postgres(t), b, seeded(t))
	f.relay("", 0)
	f.relay("", 0)
	f.awaitTakeover()
	pending := func() (n int, err error) {
		err = f.pool.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`).Scan(&n)
		return n, err
	}
	disk.Fill(t, 0)
	testkit.Eventually(t, "rows that nobody publishes", func() (bool, error) {
		n, err := pending()
		return n >= 300, err
	})
	disk.Free(t)
	b.Restart(t)
	f.awaitTakeover()
	f.check()
	var failed int
	if err := f.pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM outbox_messages WHERE attempts > 0)
		+ (SELECT count(*) FROM outbox_messages_dlq)`).Scan(&failed); err != nil || failed > 0 {
		t.Errorf("%d rows count a failed attempt, or are dead letters: %v", failed, err)
	}
	if n := f.refused.Load(); n > 0 {
		t.Errorf("the relays refused a stream %d times", n)
	}
}
