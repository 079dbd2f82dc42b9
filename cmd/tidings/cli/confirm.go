package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// destructive is the annotation of commands that destroy something, or that cannot be undone. A test walks over all of them.
const destructive = "tidings/destructive"

// asking is how such a command asks.
type asking struct {
	p   Process
	yes bool
}

// destructive marks the command and adds --yes. Its RunE calls ask once it knows that there is something to destroy, and before it does.
func (p Process) destructive(c *cobra.Command) *asking {
	a := &asking{p: p}
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	c.Annotations[destructive] = "true"
	c.Flags().BoolVar(&a.yes, "yes", false, "do not ask for confirmation")
	return a
}

// errNothingGoes is what show returns where there is nothing to ask about.
var errNothingGoes = errors.New("nothing goes")

// ask shows what goes, on stderr, and asks for a yes on the terminal. With --yes it does neither. It returns nil for a yes, and where nothing goes. Where there
// is no terminal it refuses.
func (a *asking) ask(show func(w io.Writer) error) error {
	if a.yes {
		return nil
	}
	if err := show(a.p.Stderr); errors.Is(err, errNothingGoes) {
		return nil
	} else if err != nil {
		return err
	}
	if !a.p.interactive() {
		return &usageError{errors.New("nothing was done: there is no terminal to ask for a yes. --yes does it without")}
	}
	fmt.Fprint(a.p.Stderr, "Go on? [y/N] ")
	line, err := bufio.NewReader(a.p.Stdin).ReadString('\n')
	answer := strings.ToLower(strings.TrimSpace(line))
	if err != nil && !errors.Is(err, io.EOF) || answer != "y" && answer != "yes" {
		return errors.New("nothing was done: answer yes, or give --yes")
	}
	return nil
}

// interactive reports whether a person can answer.
func (p Process) interactive() bool {
	if p.answers {
		return true
	}
	f, ok := p.Stdin.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// textLines shows lines of text below a first one. Without lines nothing goes.
func textLines(first string, all ...string) func(io.Writer) error {
	return func(w io.Writer) error {
		if len(all) == 0 {
			return errNothingGoes
		}
		all := append([]string{first}, all...)
		_, err := fmt.Fprintln(w, strings.Join(all, "\n"))
		return err
	}
}
