//go:build faults

package services

import (
	"testing"

	"github.com/tidings/tidings/internal/shares"
)

// TestEachSharedResourceServesAModestCaller walks the table of shared resources and attacks each
// row.
func TestEachSharedResourceServesAModestCaller(t *testing.T) {
	for _, r := range shares.Table() {
		t.Run(r.Name, func(t *testing.T) {
			attack, ok := attacks[r.Name]
			if !ok {
				t.Fatal("nothing attacks this row")
			}
			attack.run(startAttacked(t, attack.env))
		})
	}
}
