//go:build soak

package console_test

import "testing"

func TestSoakPagesOfAMillionAreFast(t *testing.T) {
	d := openDesk(t)
	d.fill(t, 1_000_000)
	fast(t, d)
}
