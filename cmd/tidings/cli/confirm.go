package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// destructive is the annotation of commands that delete data, or that nobody can undo. A test
// visits all of them.
const destructive = "tidings/destructive"

// asking asks a person to confirm such a command.
type asking struct {
	p   Process
	yes bool
}

// destructive marks the command and adds --yes. The command calls ask before it deletes
// anything.
func (p Process) destructive(c *cobra.Command) *asking {
	a := &asking{p: p}
	if c.Annotations == nil {
		c.Annotations = map[string]string{}
	}
	c.Annotations[destructive] = "true"
	c.Flags().BoolVar(&a.yes, "yes", false, "do not ask for confirmation")
	return a
}

// errNothingToDelete is the error by which show reports that the command would delete nothing.
var errNothingToDelete = errors.New("nothing to delete")

// ask calls show, which prints to stderr what the command would delete, and then asks for a yes on
// the terminal. With --yes it does neither. It returns nil after a yes, and if the command would
// delete nothing. Without a terminal it returns a usageError.
func (a *asking) ask(show func(w io.Writer) error) error {
	if a.yes {
		return nil
	}
	if err := show(a.p.Stderr); errors.Is(err, errNothingToDelete) {
		return nil
	} else if err != nil {
		return err
	}
	if !a.p.interactive() {
		return &usageError{errors.New("nothing was changed: this needs a confirmation, and there is no terminal. Use --yes")}
	}
	fmt.Fprint(a.p.Stderr, "Continue? [y/N] ")
	line, err := bufio.NewReader(a.p.Stdin).ReadString('\n')
	answer := strings.ToLower(strings.TrimSpace(line))
	if err != nil && !errors.Is(err, io.EOF) || answer != "y" && answer != "yes" {
		return errors.New("nothing was changed: the answer was not yes")
	}
	return nil
}

// interactive reports whether a person can answer a prompt.
func (p Process) interactive() bool {
	if p.answers {
		return true
	}
	_, ok := p.keyboard()
	return ok
}

// textLines returns a show function for ask. It prints lines of text below a first one; without
// lines it returns errNothingToDelete.
func textLines(first string, all ...string) func(io.Writer) error {
	return func(w io.Writer) error {
		if len(all) == 0 {
			return errNothingToDelete
		}
		all := append([]string{first}, all...)
		_, err := fmt.Fprintln(w, strings.Join(all, "\n"))
		return err
	}
}
