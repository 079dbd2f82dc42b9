//go:build faults

package console_test

import (
	"testing"
)

func TestPagesOfOneHundredThousandAreFast(t *testing.T) {
	d := openDesk(t)
	d.fill(t, 100_000)
	fast(t, d)
}
