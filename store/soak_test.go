//go:build soak

package store_test

import (
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestSoakNoWriteThatWasAnsweredIsLostInAHundredCrashes(t *testing.T) {
	seed, _ := testkit.Seed(t)
	crashes(t, seed, 100)
}
