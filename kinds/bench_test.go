package kinds_test

import (
	"encoding/json"
	"testing"

	"github.com/tidings/tidings/kinds"
)

func BenchmarkCheck(b *testing.B) {
	membership, _ := kinds.Builtin().Edge("membership")
	raw := json.RawMessage(`{"role":"owner"}`)
	for b.Loop() {
		if _, err := membership.Check(raw); err != nil {
			b.Fatal(err)
		}
	}
}
