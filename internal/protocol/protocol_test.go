package protocol

import "testing"

func explore(t *testing.T, name string, b Bounds) {
	t.Run(name, func(t *testing.T) {
		r := Explore(b)
		if r.Violation != "" {
			t.Fatal(r)
		}
		t.Logf("%d states, %d steps", r.States, r.Steps)
	})
}

// TestTheProtocolHoldsInSmallBounds visits every state of each part of the protocol in small
// bounds.
func TestTheProtocolHoldsInSmallBounds(t *testing.T) {
	explore(t, "two relays", Bounds{Relays: 2, Rows: 2, Partitions: 1, Late: 2})
	explore(t, "consumers", Bounds{Relays: 1, Readers: 2, Rows: 2, Partitions: 1, Late: 1})
	explore(t, "resize", Bounds{Relays: 1, Readers: 1, Rows: 2, Partitions: 2, Late: 1, Resize: true})
	explore(t, "loss", Bounds{Relays: 1, Readers: 1, Rows: 2, Partitions: 1, Late: 1, Loss: true})
}

// TestTheExplorerFindsTheMutants checks that each seeded fault breaks an invariant.
func TestTheExplorerFindsTheMutants(t *testing.T) {
	for name, b := range map[string]Bounds{
		"no expected sequence":       {Relays: 2, Rows: 2, Partitions: 1, Late: 2, Mutant: NoExpected},
		"mark before the ack":        {Relays: 1, Rows: 1, Partitions: 1, Late: 1, Mutant: MarkBeforeAck},
		"unknown is a failure":       {Relays: 1, Rows: 2, Partitions: 1, Late: 2, Mutant: UnknownIsFailure},
		"no wait for predecessors":   {Relays: 2, Rows: 2, Partitions: 2, Late: 2, Resize: true, Mutant: NoPredecessors},
		"offset outside transaction": {Relays: 1, Readers: 2, Rows: 2, Partitions: 1, Late: 1, Mutant: OffsetOutside},
	} {
		t.Run(name, func(t *testing.T) {
			r := Explore(b)
			if r.Violation == "" {
				t.Fatalf("not found in %d states", r.States)
			}
			t.Log(r)
		})
	}
}
