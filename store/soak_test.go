//go:build soak

package store_test

import (
	"math/rand/v2"
	"testing"
)

func TestSoakNoWriteThatWasAnsweredIsLostInAHundredCrashes(t *testing.T) {
	crashes(t, rand.Uint64(), 100)
}
