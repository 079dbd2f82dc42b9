//go:build faults

package pglocal_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/pglocal"
)

// TestFaultServerLeftBehindIsStoppedAndItsDataKept kills the parent of a server. The parent is a
// child process that runs this binary.
func TestFaultServerLeftBehindIsStoppedAndItsDataKept(t *testing.T) {
	if dir := os.Getenv("PGLOCAL_LEAVE_BEHIND"); dir != "" {
		s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
		conn, err := pgx.Connect(t.Context(), s.URL("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 'kept' AS v"); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		select {}
	}
	for _, c := range []struct {
		name string
		then func(t *testing.T, postmaster int)
	}{
		{"it still runs", func(*testing.T, int) {}},
		{"it is frozen", func(t *testing.T, pid int) { kill(t, pid, syscall.SIGSTOP) }},
		{"its postmaster was killed too", func(t *testing.T, pid int) { kill(t, pid, syscall.SIGKILL) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := dataDir(t)
			cmd := exec.Command(os.Args[0], "-test.run=^TestFaultServerLeftBehindIsStoppedAndItsDataKept$")
			cmd.Env = append(os.Environ(), "PGLOCAL_LEAVE_BEHIND="+dir)
			if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != -1 {
				t.Fatalf("the parent was not killed: %v: %s", err, out)
			}
			b, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(strings.SplitN(string(b), "\n", 2)[0])
			if err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(pid, 0); err != nil {
				t.Fatalf("the server did not outlive its parent: %v", err)
			}
			c.then(t, pid)

			s := start(t, pglocal.Config{Dir: dir, Unsafe: true})
			defer stop(t, s)
			if s.PID() == pid {
				t.Errorf("process %d still runs", pid)
			}
			if got := query(t, s, "SELECT v FROM kept"); got != "kept" {
				t.Errorf("the table holds %q", got)
			}
		})
	}
}
