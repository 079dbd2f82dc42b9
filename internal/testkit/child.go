package testkit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
)

// Process is a part of the system in a process of its own, for example the test's binary in another
// role. Its methods may be called at any time and by several goroutines.
type Process struct {
	t     testing.TB
	what  string
	cmd   *exec.Cmd
	in    *json.Encoder
	ended chan struct{}
	log   Output
}

// Spawn starts a process. The test kills it at its end, and logs what the process wrote to its
// standard error if the test failed. A process that calls EndWithTest ends also if the test's
// binary is killed. cmd.Stderr gets the same text.
func Spawn(t testing.TB, what string, cmd *exec.Cmd) *Process {
	t.Helper()
	p := &Process{t: t, what: what, cmd: cmd, ended: make(chan struct{})}
	if cmd.Stderr != nil {
		cmd.Stderr = io.MultiWriter(&p.log, cmd.Stderr)
	} else {
		cmd.Stderr = &p.log
	}
	in, err := cmd.StdinPipe()
	check(t, "make a pipe to the "+what, err)
	p.in = json.NewEncoder(in)
	check(t, "start the "+what, cmd.Start())
	go func() { _ = cmd.Wait(); close(p.ended) }() // the test causes the end
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("%s %d:\n%s", what, p.PID(), p.Log())
		}
	})
	return p
}

// PID returns the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Log returns the end of what the process has written to its standard error.
func (p *Process) Log() string { return p.log.String() }

// Ended is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Tell sends v to the process, whose EndWithTest receives it. The process may have ended meanwhile.
func (p *Process) Tell(v any) { _ = p.in.Encode(v) }

// Signal sends a signal. It does nothing if the process has ended.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("signal %v to the %s: %v", sig, p.what, err)
	}
}

// Kill sends SIGKILL and returns when the process has ended.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // it may have ended
	<-p.ended
}

// AwaitEnd waits until the process has ended, and returns its exit code: -1 if a signal ended it.
func (p *Process) AwaitEnd() int {
	p.t.Helper()
	Eventually(p.t, "the "+p.what+" to end", func() (bool, error) {
		select {
		case <-p.ended:
			return true, nil
		default:
			return false, nil
		}
	})
	return p.cmd.ProcessState.ExitCode()
}

// AwaitKilled waits until a signal has ended the process. It fails the test if the process ended by
// itself.
func (p *Process) AwaitKilled() {
	p.t.Helper()
	if code := p.AwaitEnd(); code != -1 {
		p.t.Errorf("the %s ended by itself with exit code %d, want a signal to end it", p.what, code)
	}
}

// Stopped reports that SIGSTOP has reached the process. It fails if the process has ended.
func (p *Process) Stopped() (bool, error) {
	state, ok := processState(p.PID())
	if !ok {
		return false, fmt.Errorf("the %s has ended", p.what)
	}
	return state == 'T', nil
}

// AwaitStopped waits until SIGSTOP has reached the process.
func (p *Process) AwaitStopped() {
	p.t.Helper()
	Eventually(p.t, "the "+p.what+" to freeze", p.Stopped)
}

// EndWithTest is for the process that Spawn starts: the process exits when the test's binary has
// ended. heard, which may be nil, gets each message of Tell.
func EndWithTest(heard func(message json.RawMessage)) {
	go func() {
		for in := json.NewDecoder(os.Stdin); ; {
			var message json.RawMessage
			if err := in.Decode(&message); err != nil {
				os.Exit(1)
			}
			if heard != nil {
				heard(message)
			}
		}
	}()
}

// SignalSelf sends sig to this process, which does not go on before SIGCONT. Any thread may take a
// signal, so the one that sends SIGSTOP would otherwise continue for a while.
func SignalSelf(sig syscall.Signal) {
	thawed := make(chan os.Signal, 1)
	signal.Notify(thawed, syscall.SIGCONT)
	defer signal.Stop(thawed)
	if err := syscall.Kill(os.Getpid(), sig); err != nil {
		panic(err)
	}
	<-thawed
}

// Output keeps the end of what a process writes: a MiB. Its methods may be called by several
// goroutines.
type Output struct {
	mu   sync.Mutex
	text []byte
}

func (l *Output) Write(p []byte) (int, error) {
	const most = 1 << 20
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	l.text = l.text[max(0, len(l.text)-most):]
	return len(p), nil
}

func (l *Output) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}
