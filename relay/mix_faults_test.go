//go:build faults

package relay

import (
	"os"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestFaultsMixedFromASeedLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	seed, _ := testkit.Seed(t)
	if d := runMix(t, os.Args[0], seed, 5); d.any() {
		t.Errorf("seed %d: the stream differs from the committed rows: %+v", seed, d)
	}
}
