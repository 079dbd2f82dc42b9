//go:build soak

package fuzz_test

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/mutants"
)

// seedsEnv names the variable with the number of seeds; 20 if unset.
const seedsEnv = "TIDINGS_SOAK_SEEDS"

// TestSoakAMillionAnswersAreThoseOfAModel makes 50,000 requests from each seed.
func TestSoakAMillionAnswersAreThoseOfAModel(t *testing.T) {
	count := 20
	if text := os.Getenv(seedsEnv); text != "" {
		var err error
		if count, err = strconv.Atoi(text); err != nil || count < 1 {
			t.Fatalf("%s is %q: want a number from 1", seedsEnv, text)
		}
	}
	for range count {
		seed, fixed := testkit.Seed(t)
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { fuzz(t, seed, 50_000) })
		if fixed {
			return
		}
	}
}

// TestSoakTheFuzzerFindsEveryMutant builds the test without one guard of the system. The test must
// then fail for that reason, with one of three seeds.
func TestSoakTheFuzzerFindsEveryMutant(t *testing.T) {
	root, err := mutants.Root()
	if err != nil {
		t.Fatal(err)
	}
	all, err := mutants.Of("TestTwentyThousandAnswersAreThoseOfAModel")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		t.Run(strings.ReplaceAll(m.Name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			overlay, err := mutants.Overlay(root, t.TempDir(), m.Edits)
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "go", "test", "-tags", "faults", "-count=3", "-failfast", "-vet=off", "-ldflags=-s -w",
				"-overlay", overlay, "-run", "^"+m.Test+"$", "-timeout", "10m", ".")
			out, err := cmd.CombinedOutput()
			said := saying(string(out))
			t.Logf("without %s: %s", m.Name, said)
			switch {
			case err == nil:
				t.Error("the fuzzer has found nothing")
			case !strings.Contains(string(out), "--- FAIL: TestTwentyThousandAnswersAreThoseOfAModel"):
				t.Errorf("the fuzzer has not run: %s", out)
			case !regexp.MustCompile(m.Output).MatchString(said):
				t.Errorf("the fuzzer failed for another reason than %s", m.Output)
			}
		})
	}
}

// saying returns the output of a failed run of the fuzzer, without the system's log.
func saying(out string) string {
	var said []string
	for line := range strings.Lines(out) {
		if !strings.Contains(line, "level=") && strings.TrimSpace(line) != "" {
			said = append(said, line)
		}
	}
	const most = 40
	return strings.Join(said[:min(len(said), most)], "")
}
