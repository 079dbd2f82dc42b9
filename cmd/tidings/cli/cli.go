package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/tidings/bench"
	"github.com/tidings/tidings/erasure"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/load"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
)

// Process is what a command sees of the process that it runs in.
type Process struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Env            envconfig.Lookuper

	answers bool // a test's: Stdin has the answers of a person
}

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitInput = 2 // bad usage, or bad input
	exitAgain = 3 // not finished: the same command goes on; or a server is unavailable, and the output is what the others say; or doctor found errors
)

// usageError marks an error of the arguments.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

var (
	errReported = errors.New("reported")                // ends a command whose output has said already what is wrong
	errAway     = errors.New("a server is unavailable") // the same, of a server
)

// Main runs the command that args name in this process and returns the exit code. The first SIGINT or SIGTERM stops the
// command, which then ends in order; a second one ends the process at once.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // gives the signals back their default action
	return Execute(ctx, args, Process{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Env: envconfig.OsLookuper()})
}

// Execute runs the command that args name until it is done or ctx ends, and returns the exit code. It writes the command's
// error to stderr.
func Execute(ctx context.Context, args []string, p Process) int {
	started := false // what fails before a command starts is wrong with its arguments
	root := p.commands()
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	return p.exitCode(err, started)
}

// commands returns the command with all that are below it.
func (p Process) commands() *cobra.Command {
	root := &cobra.Command{
		Use:           "tidings",
		Short:         "A social write model with an event backbone",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(p.devCommand(), p.migrateCommand(), p.tokenCommand(), p.loadCommand(), p.verifyCommand(), p.statusCommand(), p.repairCommand(), p.restoreCommand(), p.streamCommand(), p.partitionsCommand(),
		p.replayCommand(), p.consumeCommand(), p.outboxCommand(), p.dlqCommand(), p.pauseCommand(), p.resumeCommand(), p.eraseCommand(), p.historyCommand(), p.archiveCommand(), p.eventsCommand(), p.kindsCommand(), p.contractsCommand(), p.edgesCommand(), p.doctorCommand(), p.natsCommand(), p.readyCommand(), p.versionCommand(), p.demoCommand(),
		bench.Command())
	refuseUnknown(root.Commands())
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	return root
}

// exitCode says on stderr what is wrong, and returns the code.
func (p Process) exitCode(err error, started bool) int {
	var usage *usageError
	var line *load.LineError
	var file *kinds.FileError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported), errors.Is(err, errWarnings):
		return exitError
	case errors.Is(err, errAway), errors.Is(err, errIllness):
		return exitAgain
	}
	fmt.Fprintf(p.Stderr, "tidings: %s\n", daemon.Plain(err))
	if errors.Is(err, erasure.ErrUnfinished) {
		return exitAgain
	}
	if started && !errors.As(err, &usage) {
		if errors.As(err, &line) || errors.As(err, &file) {
			return exitInput
		}
		return exitError
	}
	fmt.Fprintln(p.Stderr, "Run `tidings help` for what there is.")
	return exitInput
}

// refuseUnknown makes commands that only have others below them refuse one that they do not have, for which cobra prints their
// help and succeeds.
func refuseUnknown(commands []*cobra.Command) {
	for _, c := range commands {
		if c.HasSubCommands() {
			c.Args = cobra.NoArgs
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
			c.DisableFlagsInUseLine = true
			refuseUnknown(c.Commands())
		}
	}
}

// writeJSON writes v as one line.
func (p Process) writeJSON(v any) error {
	if err := json.NewEncoder(p.Stdout).Encode(v); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// table writes rows with their columns aligned; the first row is the header.
func (p Process) table(rows ...[]string) error { return tableTo(p.Stdout, rows...) }

func tableTo(to io.Writer, rows ...[]string) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		if _, err := fmt.Fprintln(w, strings.Join(row, "\t")); err != nil {
			return fmt.Errorf("write the result: %w", err)
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

func count(n int64) string { return words.Count(n) }
