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

// TestUpEndsWithTheDoctor runs `make up` with a compose that only says what it is asked for: warnings do not make it fail, errors do.
func TestUpEndsWithTheDoctor(t *testing.T) {
	makefile, err := filepath.Abs("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	for code, fails := range map[int]bool{0: false, 1: false, 3: true, 125: true} {
		dir := t.TempDir()
		compose := filepath.Join(dir, "compose")
		if err := os.WriteFile(compose, fmt.Appendf(nil, "#!/bin/sh\necho \"$*\"\ncase \"$*\" in *doctor*) exit %d;; esac\n", code), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(filepath.Join(dir, "deploy"), 0o700); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("make", "--no-print-directory", "-f", makefile, "up", "COMPOSE="+compose)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		lines := strings.Split(string(out), "\n")
		if (err != nil) != fails || len(lines) < 3 || !strings.HasSuffix(lines[1], "up --build --detach") || !strings.Contains(lines[2], "tidings doctor") {
			t.Errorf("the doctor's exit code is %d: %v\n%s", code, err, out)
		}
		if env, err := os.ReadFile(filepath.Join(dir, "deploy", ".env")); err != nil || !regexp.MustCompile(`^(API_CURSOR_KEY=[0-9a-f]{64}\n|(POSTGRES|NATS)_PASSWORD(_[A-Z]+)?=p?[0-9a-f]{64}\n){13}$`).Match(env) {
			t.Errorf("deploy/.env has %d lines, and one of them is no secret: %v", strings.Count(string(env), "\n"), err)
		}
	}
}
