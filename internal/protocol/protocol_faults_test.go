//go:build faults

package protocol

import "testing"

// TestTheProtocolHoldsInFullBounds visits every state with two relays, two partitions and up to
// four rows.
func TestTheProtocolHoldsInFullBounds(t *testing.T) {
	explore(t, "two relays", Bounds{Relays: 2, Rows: 4, Partitions: 1, Late: 2})
	explore(t, "two partitions", Bounds{Relays: 2, Rows: 4, Partitions: 2, Late: 1})
	explore(t, "consumers", Bounds{Relays: 1, Readers: 2, Rows: 4, Partitions: 1, Late: 1})
	explore(t, "resize by two relays", Bounds{Relays: 2, Rows: 2, Partitions: 2, Late: 1, Resize: true})
	explore(t, "resize, consumers", Bounds{Relays: 1, Readers: 2, Rows: 2, Partitions: 2, Late: 1, Resize: true})
	explore(t, "loss, relays", Bounds{Relays: 2, Rows: 2, Partitions: 1, Late: 1, Loss: true})
	explore(t, "loss, consumers", Bounds{Relays: 1, Readers: 2, Rows: 2, Partitions: 1, Late: 1, Loss: true})
}
