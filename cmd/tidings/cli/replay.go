package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

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
		consumer, from string
		o              replay.Options
	)
	c := p.command(command{
		use:   "replay --consumer NAME",
		short: "Rebuild a projection beside the live one, and swap them", long: replayHelp,
		name: "replay", needs: needAll, json: oneObject, dryRun: &o.DryRun, destructive: true,
		check: func(*session, []string) error {
			if !slices.Contains(fleet.Names(), consumer) {
				return &usageError{fmt.Errorf("--consumer is %q: want one of %s", consumer, strings.Join(fleet.Names(), ", "))}
			}
			if o.From = replay.Source(from); !slices.Contains([]replay.Source{replay.Auto, replay.Stream, replay.Truth}, o.From) {
				return &usageError{fmt.Errorf("--from is %q: want stream, truth or auto", from)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			bar := newReplayBar(s.Stderr)
			o.Progress = bar.show
			deps, projection := s.replaying(), fleet.Projections(s.kinds.Now)[slices.Index(fleet.Names(), consumer)]
			if err := s.ask(func(w io.Writer) error {
				plan := o
				plan.DryRun = true
				r, err := replay.Run(ctx, deps, projection, plan)
				if err != nil {
					return err
				}
				bar.end()
				if len(r.Tables) > 0 {
					fmt.Fprintln(w, "The new tables replace the live ones, which replay then drops:")
				}
				return tableTo(w, replayRows(r)...)
			}); err != nil {
				return nil, err
			}
			r, err := replay.Run(ctx, deps, projection, o)
			bar.end()
			if ctx.Err() != nil && err != nil {
				err = errors.New("stopped before the end: nothing was changed; run the same command again")
			}
			if err != nil {
				return nil, err
			}
			return reports(r, func(w io.Writer) error { return printReplay(w, r) }), nil
		},
	})
	c.Flags().StringVar(&consumer, "consumer", "", "the consumer: "+strings.Join(fleet.Names(), ", "))
	c.Flags().StringVar(&from, "from", string(replay.Auto), "stream, truth, or auto: the stream if it has every event, else the truth")
	return c
}

// replaying returns the dependencies of a replay.
func (y *system) replaying() replay.Deps {
	return replay.Deps{URL: y.env.ProjectionsDatabaseURL, Postgres: y.env.Postgres, Truth: y.Truth, Kinds: y.kinds,
		JetStream: y.JetStream, Broker: y.Broker, Log: slog.New(slog.DiscardHandler)}
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

func printReplay(w io.Writer, r replay.Report) error {
	rows := replayRows(r)
	if !r.Switched {
		err := tableTo(w, rows...)
		fmt.Fprintln(w, "\nNothing was changed (--dry-run).")
		return err
	}
	return tableTo(w, append(rows,
		[]string{"events applied", count(r.Events)},
		[]string{"time", seconds(r.Seconds)},
		[]string{"events/s", count(int64(r.EventsPerSecond))},
		[]string{"live consumer paused for", fmt.Sprintf("%.3f s (attempt %d)", r.SwitchSeconds, r.SwitchTries)},
		[]string{"dead letters", count(r.DeadLetters)},
	)...)
}
