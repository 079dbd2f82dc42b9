package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/ops/replay"
)

const replayHelp = `Replay builds new tables of one consumer in a schema of their own. When they have caught up, one
transaction swaps them with the live tables. Writes, the live consumer and readers continue
meanwhile; readers see either the old or the new tables. Replay also restarts a consumer that
stopped because events expired before it read them, or because a stream was repaired.

If the stream has every event ever published, replay reads the stream. Otherwise it reads the truth,
and then the stream. --from chooses one of the two.

The archiver's histories are records: its replay only adds missing versions. From the stream it adds
each of them with its actor, and services may write meanwhile. The truth has only the newest version
of each entity, without its actor. So a replay from the truth does not bring back what a stopped
archiver had not read: earlier versions, and the actors. Each further write adds to that loss. If
the archiver has stopped, stop the API and every service that writes by SQL until the replay ends.

An interrupted replay changes nothing: run it again. The login of PROJECTIONS_DATABASE_URL must own
the tables, as for migrate.`

func (p Process) replayCommand() *cobra.Command {
	var (
		data, consumer, from string
		asJSON               bool
		o                    replay.Options
		sure                 *asking
	)
	c := &cobra.Command{
		Use:   "replay --consumer NAME",
		Short: "Rebuild a projection beside the live one, and swap them",
		Long:  replayHelp,
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			i := slices.Index(fleet.Names(), consumer)
			if i < 0 {
				return &usageError{fmt.Errorf("--consumer is %q: want one of %s", consumer, strings.Join(fleet.Names(), ", "))}
			}
			if o.From = replay.Source(from); !slices.Contains([]replay.Source{replay.Auto, replay.Stream, replay.Truth}, o.From) {
				return &usageError{fmt.Errorf("--from is %q: want stream, truth or auto", from)}
			}
			s, err := p.servers(c.Context(), data)
			if err != nil {
				return err
			}
			y, err := p.system(c.Context(), data, "replay")
			if err != nil {
				return err
			}
			defer y.close()
			bar := newReplayBar(p.Stderr)
			o.Progress = bar.show
			deps, projection := replay.Deps{
				URL: s.ProjectionsDatabaseURL, Postgres: s.Postgres, Truth: y.Truth, Kinds: y.kinds, JetStream: y.JetStream,
				Broker: y.Broker, Log: slog.New(slog.DiscardHandler),
			}, fleet.Projections(y.kinds.Now)[i]
			if !o.DryRun {
				if err := sure.ask(func(w io.Writer) error {
					plan := o
					plan.DryRun = true
					r, err := replay.Run(c.Context(), deps, projection, plan)
					if err != nil {
						return err
					}
					bar.end()
					if len(r.Tables) > 0 {
						fmt.Fprintln(w, "The new tables replace the live ones, which replay then drops:")
					}
					return tableTo(w, replayRows(r)...)
				}); err != nil {
					return err
				}
			}
			report, err := replay.Run(c.Context(), deps, projection, o)
			bar.end()
			if c.Context().Err() != nil && err != nil {
				err = errors.New("stopped before the end: nothing was changed; run the same command again")
			}
			if err != nil {
				return err
			}
			if asJSON {
				return p.writeJSON(report)
			}
			return p.printReplay(report)
		},
	}
	c.Flags().StringVar(&consumer, "consumer", "", "the consumer: "+strings.Join(fleet.Names(), ", "))
	c.Flags().StringVar(&from, "from", string(replay.Auto), "stream, truth, or auto: the stream if it has every event, else the truth")
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "show what the command would do, and change nothing")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}

// replayRows returns the rows about the source and the tables of a replay.
func replayRows(r replay.Report) [][]string {
	tables := strings.Join(r.Tables, ", ")
	if tables == "" {
		tables = "none: replay only adds missing versions"
	}
	return [][]string{{"consumer", r.Consumer}, {"from", fmt.Sprintf("%s (%s)", r.From, r.Because)},
		{"messages on the stream", count(int64(r.Messages))}, {"tables rebuilt", tables}}
}

func (p Process) printReplay(r replay.Report) error {
	rows := replayRows(r)
	if !r.Switched {
		if err := p.table(rows...); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(p.Stdout, "\nNothing was changed (--dry-run)."); err != nil {
			return fmt.Errorf("write the result: %w", err)
		}
		return nil
	}
	return p.table(append(rows,
		[]string{"events applied", count(r.Events)},
		[]string{"time", seconds(r.Seconds)},
		[]string{"events/s", count(int64(r.EventsPerSecond))},
		[]string{"live consumer paused for", fmt.Sprintf("%.3f s (attempt %d)", r.SwitchSeconds, r.SwitchTries)},
		[]string{"dead letters", count(r.DeadLetters)},
	)...)
}

// replayBar shows progress: as a bar on a terminal, else as a line at each step and every
// lineInterval.
type replayBar struct {
	mu    sync.Mutex // a goroutine of its own reads the truth
	w     io.Writer
	bar   *progressbar.ProgressBar
	start time.Time
	next  time.Time
	step  string
}

func newReplayBar(w io.Writer) *replayBar {
	b := &replayBar{w: w, start: time.Now()}
	if terminal(w) {
		b.bar = progressbar.NewOptions64(-1, progressbar.OptionSetWriter(w), progressbar.OptionShowCount(), progressbar.OptionShowIts(),
			progressbar.OptionSetItsString("events"), progressbar.OptionClearOnFinish(), progressbar.OptionUseANSICodes(true),
			progressbar.OptionSetWidth(30))
	}
	return b
}

func (b *replayBar) show(r replay.Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if b.bar != nil {
		b.bar.Describe(r.Step)
		if r.Total > 0 {
			b.bar.ChangeMax64(r.Total)
		}
		_ = b.bar.Set64(r.Done) // a failure to draw the bar must not stop the work
		return
	}
	if r.Step == b.step && now.Before(b.next) {
		return
	}
	b.step, b.next = r.Step, now.Add(lineInterval)
	line := fmt.Sprintf("%s  %s: %s", elapsed(b.start), r.Step, count(r.Done))
	if r.Total > 0 {
		line += " of " + count(r.Total)
	}
	fmt.Fprintln(b.w, line+" events")
}

func (b *replayBar) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bar != nil {
		_ = b.bar.Clear()
	}
}
