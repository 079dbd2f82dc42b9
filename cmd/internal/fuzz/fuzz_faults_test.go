//go:build faults

package fuzz_test

import (
	"testing"

	"github.com/tidings/tidings/internal/testkit"
)

func TestTwentyThousandAnswersAreThoseOfAModel(t *testing.T) {
	seed, _ := testkit.Seed(t)
	fuzz(t, seed, 20_000)
}
