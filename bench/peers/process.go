package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// relayProcess is a relay under test, and what a supervisor would do for it: if it ends by itself,
// it starts again after a second.
type relayProcess struct {
	command func() (*exec.Cmd, error)
	log     io.Writer

	mu       sync.Mutex
	cmd      *exec.Cmd
	ended    chan struct{}
	wanted   bool          // false while the harness has killed it
	spent    time.Duration // processor time of earlier processes
	restarts int           // by the supervisor
	broken   error         // why it could not start again
}

func (r *relayProcess) start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.launch()
}

// launch starts the process. The caller holds r.mu.
func (r *relayProcess) launch() error {
	cmd, err := r.command()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = r.log, r.log, withParent()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start a relay: %w", err)
	}
	ended := make(chan struct{})
	r.cmd, r.ended, r.wanted = cmd, ended, true
	go func() {
		_ = cmd.Wait() // a relay may end with any error
		r.mu.Lock()
		r.spent += cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
		again := r.wanted
		r.mu.Unlock()
		close(ended)
		if again {
			time.Sleep(time.Second)
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.wanted && r.ended == ended {
				r.restarts++
				r.broken = r.launch()
			}
		}
	}()
	return nil
}

// kill ends the process with SIGKILL.
func (r *relayProcess) kill() {
	r.mu.Lock()
	r.wanted = false
	ended := r.ended
	_ = r.cmd.Process.Kill() // it may have ended
	r.mu.Unlock()
	<-ended
}

func (r *relayProcess) signal(s syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cmd.Process.Signal(s)
}

// used returns the processor time of all its processes.
func (r *relayProcess) used() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.ended:
		return r.spent
	default:
		self, _ := processorTime(r.cmd.Process.Pid)
		return r.spent + self
	}
}

// processorTime returns that of a process and that of its ended children (proc_pid_stat(5), whose
// unit here is 10 ms on Linux).
func processorTime(pid int) (self, children time.Duration) {
	f := statFields(pid)
	const user = 11 // the fields utime, stime, cutime and cstime, after the name
	if len(f) < user+4 {
		return 0, 0
	}
	var ticks [4]time.Duration
	for i := range ticks {
		n, err := strconv.ParseInt(f[user+i], 10, 64)
		if err != nil {
			return 0, 0
		}
		ticks[i] = time.Duration(n) * 10 * time.Millisecond
	}
	return ticks[0] + ticks[1], ticks[2] + ticks[3]
}

// treeTime returns the processor time of a process and all its children so far.
func treeTime(pid int) (sum time.Duration) {
	pids, err := tree(pid)
	if err != nil {
		return 0
	}
	for _, p := range pids {
		self, children := processorTime(p)
		sum += self + children
	}
	return sum
}

// statFields returns the fields of /proc/PID/stat after the name, which may contain any character.
func statFields(pid int) []string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return nil
	}
	_, rest, _ := strings.Cut(string(b[bytes.LastIndexByte(b, ')'):]), " ")
	return strings.Fields(rest)
}

// tree returns a process and its descendants, in order.
func tree(pid int) ([]int, error) {
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, p := range procs {
		n, err := strconv.Atoi(filepath.Base(p))
		if err != nil {
			continue
		}
		if f := statFields(n); len(f) > 1 {
			if parent, err := strconv.Atoi(f[1]); err == nil {
				children[parent] = append(children[parent], n)
			}
		}
	}
	pids := []int{pid}
	for i := 0; i < len(pids); i++ {
		pids = append(pids, children[pids[i]]...)
	}
	slices.Sort(pids)
	return pids, nil
}

// tail keeps the end of what a relay writes.
type tail struct {
	mu  sync.Mutex
	all bytes.Buffer
}

// Write implements io.Writer.
func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	const most = 64 << 10
	if t.all.Len() > most {
		t.all.Next(t.all.Len() - most/2)
	}
	return t.all.Write(b)
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all.String()
}
