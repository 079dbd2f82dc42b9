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

// makeUp runs `make up` with a docker that says what it is asked for, has a version, and ends the doctor with a code. It returns what was said, and the secrets.
func makeUp(t *testing.T, version string, code int, args ...string) (out, secrets string, err error) {
	t.Helper()
	docker, env := filepath.Join(t.TempDir(), "docker"), filepath.Join(t.TempDir(), "env")
	script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in 'compose version --short') echo %s; exit;; esac\necho \"$*\"\ncase \"$*\" in *doctor*) exit %d;; esac\n", version, code)
	if err := os.WriteFile(docker, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	said, err := exec.Command("make", append([]string{"--no-print-directory", "-C", "..", "up", "DOCKER=" + docker, "ENV_FILE=" + env}, args...)...).CombinedOutput()
	b, readErr := os.ReadFile(env)
	if readErr != nil && !os.IsNotExist(readErr) {
		t.Fatal(readErr)
	}
	return string(said), string(b), err
}

// TestUpEndsWithTheDoctor: it builds the image, starts the fleet and asks the doctor, whose warnings do not make it fail, and whose errors do. Then it says where things are.
func TestUpEndsWithTheDoctor(t *testing.T) {
	for code, fails := range map[int]bool{0: false, 1: false, 3: true, 125: true} {
		out, secrets, err := makeUp(t, "v2.23.1", code)
		lines := strings.Split(out, "\n")
		if (err != nil) != fails || len(lines) < 3 || !strings.HasPrefix(lines[0], "buildx build ") || !strings.HasSuffix(lines[1], " -f compose.yaml --profile metrics up --detach") || !strings.Contains(lines[2], "tidings doctor") {
			t.Errorf("the doctor's exit code is %d: %v\n%s", code, err, out)
		}
		if fails == strings.Contains(out, "http://localhost:8081/console/") {
			t.Errorf("the doctor's exit code is %d: %s", code, out)
		}
		if !regexp.MustCompile(`^(API_CURSOR_KEY=[0-9a-f]{64}\n|(POSTGRES|NATS)_PASSWORD(_[A-Z]+)?=p?[0-9a-f]{64}\n){15}$`).MatchString(secrets) {
			t.Errorf("%d lines, and one of them is no secret", strings.Count(secrets, "\n"))
		}
	}
}

// TestUpSaysWhatItNeeds: a Compose that is too old, or none, or a wrong setting ends it in a sentence before anything is built.
func TestUpSaysWhatItNeeds(t *testing.T) {
	for _, c := range []struct {
		version string
		args    []string
		says    string
	}{
		{"1.29.2", nil, "Docker Compose is 1.29.2. The fleet needs 2.23.1 or later"},
		{"2.23.0", nil, "Docker Compose is 2.23.0."},
		{"2.40.3-desktop.1", []string{"BROKERS=2"}, "BROKERS is 2. It must be 1 or 3"},
		{"5.0.0", []string{"DOCKER=/nowhere/docker"}, "`/nowhere/docker compose version` fails. The fleet needs Docker with Compose 2.23.1 or later"},
	} {
		out, _, err := makeUp(t, c.version, 0, c.args...)
		if err == nil || !strings.Contains(out, "make: "+c.says) || strings.Contains(out, "buildx") {
			t.Errorf("%s %s: %v\n%s", c.version, c.args, err, out)
		}
	}
	out, _, err := makeUp(t, "2.40.3", 0, "BROKERS=3", "METRICS=")
	if err != nil || !strings.Contains(out, " -f compose.yaml -f compose.three.yaml up --detach") || strings.Contains(out, "Grafana") || !strings.Contains(out, "-f deploy/compose.three.yaml run --rm tidings status") {
		t.Errorf("%v: %s", err, out)
	}
}
