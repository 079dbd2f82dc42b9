package cli

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// postmaster returns the process id of dev's PostgreSQL.
func (d *dev) postmaster(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(d.dir, "postgres", "data", "postmaster.pid"))
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func TestDevStopsAndGoesOn(t *testing.T) {
	d := newDev(t)
	d.start(t)
	before, pid := d.instance(t), d.postmaster(t)
	if info, err := os.Stat(filepath.Join(d.dir, instanceFile)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("dev.json: %v, %v", info, err)
	}

	t.Run("another dev with the same data says so", func(t *testing.T) {
		other := &dev{dir: d.dir, env: d.env}
		<-awaitEnd(t, other)
		want := "another `tidings dev` (process " + strconv.Itoa(d.cmd.Process.Pid) + ") runs with " + d.dir
		if got := other.errors(); other.err == nil || !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
			t.Errorf("%v: %s\nwant one line with %q", other.err, got, want)
		}
	})

	d.stop(t)
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("PostgreSQL, process %d, is there after Ctrl-C: %v", pid, err)
	}
	if _, err := net.Dial("tcp", strings.TrimPrefix(before.NATSURL, "nats://")); err == nil {
		t.Error("NATS listens after Ctrl-C")
	}

	if code, _, stderr := run(t, nil, "", "status", "--data", d.dir); code != exitError || !strings.Contains(stderr, "has ended; start it again") {
		t.Errorf("status without a dev: exit code %d, %s", code, stderr)
	}

	d.start(t)
	after := d.instance(t)
	before.PID = after.PID
	if before != after {
		t.Errorf("after a stop and a start dev is %+v, it was %+v", after, before)
	}

	left := d.postmaster(t)
	d.kill(t)
	if err := syscall.Kill(left, 0); err != nil {
		t.Fatalf("PostgreSQL did not outlive its dev, so that this test shows nothing: %v", err)
	}
	d.start(t)
	after = d.instance(t)
	before.PID = after.PID
	if before != after {
		t.Errorf("after a kill and a start dev is %+v, it was %+v", after, before)
	}
	if pid := d.postmaster(t); pid == left {
		t.Errorf("PostgreSQL is still process %d", pid)
	}
}

// awaitEnd runs a dev that is to fail.
func awaitEnd(t *testing.T, d *dev) <-chan struct{} {
	t.Helper()
	d.launch(t)
	return d.done
}

func TestDevSaysWhichPortIsTaken(t *testing.T) {
	for _, variable := range []string{"API_ADDR", "OPS_ADDR"} {
		t.Run(variable, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			d := newDev(t, variable+"="+l.Addr().String())
			<-awaitEnd(t, d)
			d.cmd = nil
			want := "tidings: " + l.Addr().String() + " is in use by another program: stop that, or set " + variable + " to another address"
			if got := d.errors(); d.err == nil || !strings.Contains(got, want) || strings.Count(got, "\n") != 1 {
				t.Errorf("%v: %s\nwant one line with %q", d.err, got, want)
			}
		})
	}
}
