//go:build faults

package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tidings/tidings/internal/testkit"
)

// It needs a machine with pseudo-terminals.
func TestATerminalDoesNotEchoASecret(t *testing.T) {
	keys, tty := openTerminal(t)
	var prompt strings.Builder
	type answer struct {
		secret string
		err    error
	}
	read := make(chan answer, 1)
	go func() {
		secret, err := (Process{Stdin: tty, Stderr: &prompt}).secret("Token: ")
		read <- answer{secret, err}
	}()
	testkit.Eventually(t, "the terminal to stop showing what somebody types", func() (bool, error) {
		state, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
		return err == nil && state.Lflag&unix.ECHO == 0, err
	})
	if _, err := keys.WriteString("the secret\n"); err != nil {
		t.Fatal(err)
	}
	if got := <-read; got.secret != "the secret" || got.err != nil || prompt.String() != "Token: \n" {
		t.Errorf("%+v, %q", got, prompt.String())
	}
	if _, err := tty.WriteString("end"); err != nil {
		t.Fatal(err)
	}
	shown := make([]byte, 100)
	if n, err := keys.Read(shown); string(shown[:n]) != "end" || err != nil {
		t.Errorf("the terminal shows %q, %v", shown[:n], err)
	}
}

// openTerminal returns both ends of a pseudo-terminal.
func openTerminal(t *testing.T) (keyboard, tty *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keyboard.Close() })
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return keyboard, tty
}
