//go:build soak

package console_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
)

func TestSoakPagesOfAMillionAreFast(t *testing.T) {
	d := openDesk(t)
	d.fill(t, 1_000_000)
	fast(t, d)
}

// TestSoakPagesOfAMillionDeadLettersAreFast has a million dead letters of the outbox and as many of
// a consumer, 100 kinds and 32 partitions.
func TestSoakPagesOfAMillionDeadLettersAreFast(t *testing.T) {
	d := openDesk(t)
	d.crowd(t, 1_000_000, 100)
	ada := d.signIn(t, d.Tokens.Admin)
	const limit = 200 * time.Millisecond
	for _, path := range d.crowdOf(t) {
		testkit.Eventually(t, path+" is fast", func() (bool, error) {
			began := time.Now()
			page(t, ada, path)
			took := time.Since(began)
			t.Logf("%s took %s", path, took.Round(time.Millisecond))
			if took >= limit {
				return false, fmt.Errorf("it took %s", took)
			}
			return true, nil
		})
	}
}
