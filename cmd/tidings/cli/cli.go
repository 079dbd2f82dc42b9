package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/tidings/bench"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/ops/load"
	"github.com/tidings/tidings/ops/restore"
	"github.com/tidings/tidings/outbox"
)

// Process holds the streams and the environment of the process that runs a command.
type Process struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Env            envconfig.Lookuper

	// Set by tests.
	answers  bool                 // Stdin holds the answers to prompts
	ran      func(command string) // gets the name of a command that has succeeded
	demoStop time.Duration        // for the requests in progress when a demo stops; 0: the demo's own
}

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitInput = 2 // bad usage, or bad input
	// One of three: the command has not finished, and running it again continues; a server is
	// unavailable, and the output covers only the others; doctor found errors.
	exitAgain = 3
)

// exitCodes is a part of the help and of docs/commands.md.
const exitCodes = `Exit codes:
- 0: done.
- 1: an error, or findings.
- 2: wrong usage or input.
- 3: not finished (run the command again), a server is unavailable, or tidings doctor found errors.`

// usageError marks an error in the arguments.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

var (
	errReported    = errors.New("reported")                // ends a command whose output already names the problem
	errUnavailable = errors.New("a server is unavailable") // ends a command whose output already names the server or the lock
)

// Main runs the command that args name in this process and returns the exit code. The first SIGINT
// or SIGTERM stops the command, which then ends in order; a second one ends the process at once.
func Main(args []string) int { return mainWith(args, nil) }

func mainWith(args []string, ran func(command string)) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // restores the default action of the signals
	return Execute(ctx, args, Process{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Env: envconfig.OsLookuper(), ran: ran})
}

// Execute runs the command that args name until it is done or ctx ends, and returns the exit code.
// It writes the command's error to stderr.
func Execute(ctx context.Context, args []string, p Process) int {
	started := false // an error before a command starts is an error in its arguments
	root := p.commands()
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	code := p.exitCode(c, err, started)
	if p.ran != nil && started && code == exitOK {
		p.ran(c.CommandPath())
	}
	return code
}

// commands returns the root command with all its subcommands.
func (p Process) commands() *cobra.Command {
	root := &cobra.Command{
		Use:           "tidings",
		Short:         "Tidings stores social writes, and publishes each change as an event",
		Long:          "Tidings stores social writes, and publishes each change as an event.\n\n" + exitCodes,
		Version:       daemon.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetVersionTemplate("{{.Name}} {{.Version}}\n") // as the services answer
	root.AddCommand(p.devCommand(), p.serveCommand(), p.migrateCommand(), p.loadCommand(), p.demoCommand(), p.versionCommand(),
		bench.Command(),
		p.statusCommand(), p.doctorCommand(), p.verifyCommand(), p.readyCommand(), p.restoreCommand(), p.replayCommand(),
		p.consumeCommand(), p.pauseCommand(), p.resumeCommand(), p.eraseCommand(), p.historyCommand(), p.outboxCommand(), p.dlqCommand(),
		group("token", "Create, list, identify and revoke bearer tokens of the API",
			p.tokenCreateCommand(), p.tokenListCommand(), p.tokenIdentifyCommand(), p.tokenRevokeCommand()),
		group("kinds", "List, add and change the kinds of edges and children",
			p.kindsApplyCommand(), p.kindsDiffCommand(), p.kindsListCommand(), p.kindsShowCommand(), p.kindsHistoryCommand()),
		group("upstream", "Declare events that services append from tables of their own",
			p.upstreamAddCommand(), p.upstreamListCommand(), p.upstreamShowCommand(), p.upstreamRemoveCommand(),
			p.upstreamHistoryCommand()),
		group("contracts", "Write the contracts of events: JSON Schemas and an AsyncAPI document", p.contractsWriteCommand()),
		group("edges", "Remove all edges of an object", p.edgesRemoveCommand()),
		group("events", "Find and watch events", p.eventsFindCommand(), p.eventsWatchCommand()),
		group("partitions", "Show the partitions, or change their number", p.partitionsListCommand(), p.partitionsResizeCommand()),
		group("repair", "Repair a stream that no longer matches the database", p.repairStreamCommand()),
		group("stream", "Print the streams that are needed, or change their replicas, placement and limits",
			p.streamConfigureCommand(), p.streamPlanCommand()),
		group("archive", "Archive, export and drop old events, and hold those that you must keep",
			p.archiveRunCommand(), p.archiveSettingsCommand(), p.archiveStatusCommand(), p.archiveUndoCommand(),
			p.coldListCommand(), p.coldExportCommand(), p.coldVerifyCommand(), p.coldRestoreCommand(),
			group("hold", "Keep part of the outbox's archive beyond its retention",
				p.holdAddCommand(), p.holdListCommand(), p.holdReleaseCommand())),
		group("nats", "Create the NATS accounts, users and credentials of binaries and subscribers",
			p.natsUsersCommand(), p.natsAccountCommand(), p.natsCredsCommand(), p.natsRevokeCommand(), p.natsDurableCommand()))
	refuseUnknown(root.Commands())
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if c.HasParent() && c.HasSubCommands() { // of `tidings dlq list --json` the mistake is list
			err = cmp.Or(noCommand(c, c.Flags().Args()), err)
		}
		return err
	})
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	return root
}

// group returns a command that only has subcommands.
func group(use, short string, sub ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short}
	c.AddCommand(sub...)
	return c
}

// silent says whether an error only selects the exit code, because the output names the problem.
func silent(err error) bool {
	return errors.Is(err, errReported) || errors.Is(err, errWarnings) || errors.Is(err, errUnavailable) || errors.Is(err, errUnhealthy)
}

// exitCode prints the error of the command c to stderr, and returns the exit code.
func (p Process) exitCode(c *cobra.Command, err error, started bool) int {
	var usage *usageError
	var line *load.LineError
	var file *fileError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported), errors.Is(err, errWarnings):
		return exitError
	case silent(err):
		return exitAgain
	}
	again := slices.ContainsFunc([]error{erasure.ErrUnfinished, restore.ErrUnfinished, outbox.ErrNotExclusive, outbox.ErrExclusiveLost},
		func(unfinished error) bool { return errors.Is(err, unfinished) })
	if ctx := c.Context(); !again && ctx != nil && ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = errors.New("stopped before the end") // by a signal: the statement that it met does not matter
	}
	message := strings.ReplaceAll(daemon.Plain(err), "\n\t", "\n  ") // cobra indents its suggestions by tabs
	fmt.Fprintf(p.Stderr, "tidings: %s\n", visibleLines(message))
	if again {
		return exitAgain
	}
	if started && !errors.As(err, &usage) {
		if errors.As(err, &line) || errors.As(err, &file) {
			return exitInput
		}
		return exitError
	}
	fmt.Fprintf(p.Stderr, "Run `%s` for the usage.\n", strings.Replace(c.CommandPath(), "tidings", "tidings help", 1))
	return exitInput
}

// exactArgs is cobra.ExactArgs with an error that names the arguments.
func exactArgs(n int) cobra.PositionalArgs { return rangeArgs(n, n) }

// rangeArgs is cobra.RangeArgs with an error that names the arguments.
func rangeArgs(least, most int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if least <= len(args) && len(args) <= most {
			return nil
		}
		return fmt.Errorf("got %s, want `%s`", words.Of(int64(len(args)), "argument"), strings.TrimSuffix(c.UseLine(), " [flags]"))
	}
}

// refuseUnknown makes each command that only groups subcommands refuse an unknown one. Cobra alone
// would print the help and succeed.
func refuseUnknown(commands []*cobra.Command) {
	for _, c := range commands {
		if c.HasSubCommands() {
			c.Args = noCommand
			c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
			c.DisableFlagsInUseLine = true
			refuseUnknown(c.Commands())
		}
	}
}

// noCommand refuses a first argument that names no subcommand, and suggests similar names.
func noCommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	c.SuggestionsMinimumDistance = 2 // cobra's own
	err := cobra.NoArgs(c, args)
	if similar := c.SuggestionsFor(args[0]); len(similar) > 0 {
		err = fmt.Errorf("%w. Similar: %s", err, strings.Join(similar, ", "))
	}
	return err
}

// writeJSON writes v as one line.
func (p Process) writeJSON(v any) error {
	if err := json.NewEncoder(p.Stdout).Encode(v); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// table writes rows with aligned columns. The first row is the header.
func (p Process) table(rows ...[]string) error { return tableTo(p.Stdout, rows...) }

func tableTo(to io.Writer, rows ...[]string) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, c := range row {
			cells[i] = visible(c)
		}
		if _, err := fmt.Fprintln(w, strings.Join(cells, "\t")); err != nil {
			return fmt.Errorf("write the result: %w", err)
		}
	}
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// tablesTo writes tables with a blank line between them.
func tablesTo(to io.Writer, tables ...[][]string) error {
	for n, rows := range tables {
		if n > 0 {
			fmt.Fprintln(to)
		}
		if err := tableTo(to, rows...); err != nil {
			return err
		}
	}
	return nil
}

func count(n int64) string { return words.Count(n) }

// isControl reports whether a character may act on a terminal instead of showing: it controls,
// breaks a line, or turns the direction of the text round.
func isControl(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

// visible makes a text safe for a terminal. It replaces characters that may act on one by \uXXXX,
// their form in JSON, and damaged bytes by U+FFFD. Whatever a writer of events chose goes through
// it, or through cell.
func visible(s string) string {
	s = strings.ToValidUTF8(s, string(unicode.ReplacementChar))
	if !strings.ContainsFunc(s, isControl) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if isControl(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// visibleLines is visible for each line of a text.
func visibleLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = visible(lines[i])
	}
	return strings.Join(lines, "\n")
}
