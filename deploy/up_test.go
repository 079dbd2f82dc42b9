package deploy_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDownStopsTheServicesOfBothModes checks that `make down` needs no MODE.
func TestDownStopsTheServicesOfBothModes(t *testing.T) {
	for _, mode := range []string{"", "fleet"} {
		out, err := makeTarget(t, "down", "2.40.3", 0, filepath.Join(t.TempDir(), "env"), "MODE="+mode)
		if err != nil || !strings.HasSuffix(out, " --profile metrics --profile serve down --remove-orphans\n") {
			t.Errorf("mode %q: %v: %s", mode, err, out)
		}
	}
}

// makeUp runs `make up` with a fake docker command. The fake prints its arguments, reports the
// Compose version, and ends `tidings doctor` with the exit code. makeUp returns the output and the
// file of secrets.
func makeUp(t *testing.T, version string, code int, args ...string) (out, secrets string, err error) {
	t.Helper()
	env := filepath.Join(t.TempDir(), "env")
	out, err = makeTarget(t, "up", version, code, env, args...)
	b, readErr := os.ReadFile(env)
	if readErr != nil && !os.IsNotExist(readErr) {
		t.Fatal(readErr)
	}
	return out, string(b), err
}

func makeTarget(t *testing.T, target, version string, code int, env string, args ...string) (out string, err error) {
	t.Helper()
	docker := filepath.Join(t.TempDir(), "docker")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in 'compose version --short') echo %s; exit;; esac\necho \"$*\"\ncase \"$*\" in "+
		"*doctor*) exit %d;; *'up --detach'*) exit ${UP_ENDS:-0};; esac\n", version, code)
	if err := os.WriteFile(docker, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	output, err := exec.Command("make", append([]string{"--no-print-directory", "-C", "..", target, "DOCKER=" + docker, "ENV_FILE=" + env},
		args...)...).CombinedOutput()
	return string(output), err
}

// TestUpEndsWithTheDoctor checks that `make up` builds the image, starts the fleet and runs
// `tidings doctor`. It fails for any exit code of doctor except 0 and 1 (warnings). Otherwise it
// prints the addresses.
func TestUpEndsWithTheDoctor(t *testing.T) {
	for code, fails := range map[int]bool{0: false, 1: false, 3: true, 125: true} {
		out, secrets, err := makeUp(t, "v2.23.1", code)
		lines := strings.Split(out, "\n")
		if (err != nil) != fails || len(lines) < 3 || !strings.HasPrefix(lines[0], "buildx build ") ||
			!strings.HasSuffix(lines[1], " -f compose.yaml --profile metrics up --detach --remove-orphans") ||
			!strings.Contains(lines[2], "tidings doctor") {
			t.Errorf("with doctor's exit code %d: %v\n%s", code, err, out)
		}
		if fails == strings.Contains(out, "http://localhost:8081/console/") {
			t.Errorf("with doctor's exit code %d, the output is: %s", code, out)
		}
		if !regexp.MustCompile(`^(API_CURSOR_KEY=[0-9a-f]{64}\n|(POSTGRES|NATS)_PASSWORD(_[A-Z]+)?=p?[0-9a-f]+\n)+$`).MatchString(
			secrets) || strings.Count(secrets, "\n") != 17 {
			t.Errorf("the file of secrets has %d lines, want 17, each with a secret", strings.Count(secrets, "\n"))
		}
	}
}

// TestUpShowsWhyItFails checks that `make up` prints the end of the log of migrate, for which all
// other services wait. A lost file of secrets is the usual cause.
func TestUpShowsWhyItFails(t *testing.T) {
	t.Setenv("UP_ENDS", "1")
	out, _, err := makeUp(t, "2.40.3", 0)
	want := regexp.MustCompile(`(?m)up --detach --remove-orphans\n.* logs --no-log-prefix --tail 5 migrate\nmake: .*docs/docker.md$`)
	if err == nil || !want.MatchString(out) {
		t.Errorf("%v: %s", err, out)
	}
}

// TestUpSaysWhatItNeeds checks that `make up` refuses an old or missing Compose, and a wrong
// setting, in one sentence and before it builds the image.
func TestUpSaysWhatItNeeds(t *testing.T) {
	for _, c := range []struct {
		version string
		args    []string
		says    string
	}{
		{"1.29.2", nil, "Docker Compose is 1.29.2. The fleet needs 2.23.1 or later"},
		{"2.23.0", nil, "Docker Compose is 2.23.0."},
		{"2.40.3", []string{"MODE=both"}, "MODE is both. It must be serve or fleet"},
		{"2.40.3-desktop.1", []string{"BROKERS=2"}, "BROKERS is 2. It must be 1 or 3"},
		{"5.0.0", []string{"DOCKER=/nowhere/docker"}, "`/nowhere/docker compose version` fails. The fleet needs Docker with " +
			"Compose 2.23.1 or later"},
	} {
		out, _, err := makeUp(t, c.version, 0, c.args...)
		if err == nil || !strings.Contains(out, "make: "+c.says) || strings.Contains(out, "buildx") {
			t.Errorf("%s %s: %v\n%s", c.version, c.args, err, out)
		}
	}
	out, _, err := makeUp(t, "2.40.3", 0, "MODE=fleet")
	if err != nil || !regexp.MustCompile(`(?m) -f compose.fleet.yaml --profile serve rm --stop --force serve\n.* -f compose.yaml `+
		`-f compose.fleet.yaml --profile metrics up --detach --remove-orphans$`).MatchString(out) ||
		!strings.Contains(out, "compose -f deploy/compose.yaml -f deploy/compose.fleet.yaml run --rm tidings status") {
		t.Errorf("%v: %s", err, out)
	}
	out, _, err = makeUp(t, "2.40.3", 0, "BROKERS=3", "METRICS=")
	if err != nil || !strings.Contains(out, " -f compose.yaml -f compose.three.yaml up --detach") || strings.Contains(out, "Grafana") ||
		!strings.Contains(out, "-f deploy/compose.three.yaml run --rm tidings status") {
		t.Errorf("%v: %s", err, out)
	}
}
