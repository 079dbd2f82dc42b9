//go:build soak

package fuzz_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
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
		seed, fixed := seedFromEnv(t)
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { fuzz(t, seed, 50_000) })
		if fixed {
			return
		}
	}
}

// TestSoakTheFuzzerFindsEveryMutant builds the test without one guard of the system. The test must then fail for that
// reason, with one of three seeds.
func TestSoakTheFuzzerFindsEveryMutant(t *testing.T) {
	for _, m := range mutants() {
		t.Run(strings.ReplaceAll(m.without, " ", "_"), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			overlay, err := json.Marshal(map[string]any{"Replace": m.mutate(t, dir)})
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(dir, "overlay.json")
			if err := os.WriteFile(file, overlay, 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "go", "test", "-count=3", "-failfast", "-vet=off", "-ldflags=-s -w", "-overlay", file,
				"-run", "^TestEveryAnswerIsTheOneThatAModelHas$", "-timeout", "10m", ".")
			out, err := cmd.CombinedOutput()
			said := saying(string(out))
			t.Logf("without %s: %s", m.without, said)
			switch {
			case err == nil:
				t.Error("the fuzzer has found nothing")
			case !strings.Contains(string(out), "--- FAIL: TestEveryAnswerIsTheOneThatAModelHas"):
				t.Errorf("the fuzzer has not run: %s", out)
			case !regexp.MustCompile(m.finds).MatchString(said):
				t.Errorf("the fuzzer failed for another reason than %s", m.finds)
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
