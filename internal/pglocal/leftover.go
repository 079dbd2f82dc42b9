package pglocal

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Time limits of the ways to stop a server, after which the next, harder way follows (PostgreSQL
// manual, "Shutting Down the Server"). A fast shutdown ends the sessions and writes a checkpoint.
// An immediate one leaves recovery to the next start.
const (
	fastTimeout      = 30 * time.Second
	immediateTimeout = 5 * time.Second
	killTimeout      = 5 * time.Second
	pollEvery        = 10 * time.Millisecond
)

// stopLeftover stops the server that an earlier process left running on data, if there is one. The
// caller holds the lock of the directory, so no living Server of this package owns it.
func stopLeftover(data string) error {
	pids, err := servers(data)
	if err != nil || len(pids) == 0 {
		return err
	}
	if pid := postmasterPID(data); slices.Contains(pids, pid) {
		for _, step := range []struct {
			sig     syscall.Signal
			timeout time.Duration
		}{{syscall.SIGCONT, 0}, {syscall.SIGINT, fastTimeout}, {syscall.SIGQUIT, immediateTimeout}} {
			if err := syscall.Kill(pid, step.sig); err != nil && err != syscall.ESRCH {
				return fmt.Errorf("stop the PostgreSQL that an earlier process left running on %s, process %d: %w", data, pid, err)
			}
			if awaitGone(data, step.timeout) {
				return nil
			}
		}
	}
	// The remaining processes have lost their postmaster, or ignore it.
	pids, err = servers(data)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("kill the PostgreSQL process %d that an earlier process left running on %s: %w", pid, data, err)
		}
	}
	if !awaitGone(data, killTimeout) {
		return fmt.Errorf("the PostgreSQL that an earlier process left running on %s does not end: kill its processes", data)
	}
	return nil
}

// awaitGone waits until no server process works in data, and reports whether that happened within
// the time.
func awaitGone(data string, within time.Duration) bool {
	for deadline := time.Now().Add(within); ; time.Sleep(pollEvery) {
		if pids, err := servers(data); err == nil && len(pids) == 0 {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// hasProc reports whether this system shows its processes as files, as Linux does and macOS does
// not. Without them a leftover server is not found. Then its lock file must remain, so that the new
// server finds it and refuses to start.
func hasProc() bool {
	_, err := os.Stat("/proc/self/cwd")
	return err == nil
}

// servers returns the postgres processes that work in data: the postmaster and its children, or
// children without a postmaster. It compares working directories, because the number in
// postmaster.pid may belong to another process by now.
func servers(data string) ([]int, error) {
	dir, err := os.Stat(data)
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, p := range procs {
		comm, err := os.ReadFile(filepath.Join(p, "comm"))
		if err != nil || string(bytes.TrimSpace(comm)) != "postgres" {
			continue // it ended meanwhile, or is another program
		}
		cwd, err := os.Stat(filepath.Join(p, "cwd"))
		if err != nil || !os.SameFile(dir, cwd) {
			continue // it ended, is another user's, or works in another directory
		}
		if pid, err := strconv.Atoi(filepath.Base(p)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// pidFile reads postmaster.pid: the process id from line 1, the state from line 8.
func pidFile(data string) (pid int, state string) {
	b, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return 0, ""
	}
	lines := strings.Split(string(b), "\n")
	pid, err = strconv.Atoi(strings.TrimSpace(lines[0]))
	if err != nil {
		return 0, ""
	}
	if len(lines) >= 8 {
		state = strings.TrimSpace(lines[7])
	}
	return pid, state
}

func postmasterPID(data string) int {
	pid, _ := pidFile(data)
	return pid
}

// Destroy kills every process that runs on the directory of a temporary server, and deletes the
// directory.
func Destroy(dir string) error {
	pids, err := servers(filepath.Join(dir, "data"))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			return fmt.Errorf("kill process %d on %s: %w", pid, dir, err)
		}
	}
	if !awaitGone(filepath.Join(dir, "data"), killTimeout) {
		return fmt.Errorf("the PostgreSQL on %s does not end after SIGKILL", dir)
	}
	return os.RemoveAll(dir)
}
