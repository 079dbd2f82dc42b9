package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/ops/restore"
)

const restoreHelp = `Run restore after you restored or lost databases or NATS, when servers, relays and consumers run
again. Keep the API stopped until the command has finished. docs/backup.md has the steps before it.

Restore brings back the writes that the truth lost, from the streams and histories that still have
them. It replaces every stream that is not empty with a new one, and publishes the missing events there.
It replays consumers that cannot continue, repeats the erasures since --since, repairs the
projections, and verifies everything. Its login must own the tables, because it may replay. If a
step does not finish within --wait, or another restore or repair is running, the exit code is 3 and
the output names the cause. After that, and after any interruption, run the command again: it
continues.`

func (p Process) restoreCommand() *cobra.Command {
	var (
		since string
		o     restore.Options
	)
	c := p.command(command{
		use:   "restore --since TIME",
		short: "Make truth, streams and projections agree after a restore of any of them", long: restoreHelp,
		name: "restore", needs: needAll, json: oneObject, dryRun: &o.DryRun, destructive: true,
		check: func(*session, []string) (err error) {
			if o.Since, err = parseAge(since, time.Now()); err != nil {
				return &usageError{fmt.Errorf("--since needs the time of the oldest restored backup, for example 24h or "+
					"2026-11-22T03:00:00Z: %w", err)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			deps, err := s.restoring(ctx, s.system, o.Wait)
			if err != nil {
				return nil, err
			}
			if err := s.ask(func(w io.Writer) error {
				plan := o
				plan.DryRun = true
				r, err := runRestore(ctx, deps, plan)
				if err == nil {
					printRestore(w, r)
				}
				return err
			}); err != nil {
				return nil, err
			}
			if !o.DryRun && !s.asJSON {
				o.Progress = func(what string) { fmt.Fprintln(s.Stderr, what) }
			}
			r, err := runRestore(ctx, deps, o)
			if err != nil {
				return nil, err
			}
			if !o.DryRun && !r.Verified.OK {
				err = errReported
			}
			return reports(r, func(w io.Writer) error {
				printRestore(w, r)
				if o.DryRun {
					_, err := fmt.Fprintln(w, "Nothing was changed.")
					return err
				}
				return printVerification(w, r.Verified)
			}), err
		},
	})
	c.Flags().StringVar(&since, "since", "", "when the oldest restored backup was made: a duration ago such as 24h, a date, "+
		"or a time in RFC 3339")
	c.Flags().DurationVar(&o.Wait, "wait", 10*time.Minute, "how long to wait for relays and consumers, at each step")
	c.Flags().IntVar(&o.Limit, "limit", 20, "list at most this many differences per projection; all are counted")
	return c
}

// runRestore is restore.Run, with a usageError for a time in the future.
func runRestore(ctx context.Context, d restore.Deps, o restore.Options) (restore.Report, error) {
	report, err := restore.Run(ctx, d, o)
	if errors.Is(err, restore.ErrFuture) {
		err = &usageError{err}
	}
	return report, err
}

// restoring returns the dependencies of a restore.
func (p Process) restoring(ctx context.Context, y *system, wait time.Duration) (restore.Deps, error) {
	now, err := truthKinds(ctx, y.Truth)
	if err != nil {
		return restore.Deps{}, err
	}
	d := restore.Deps{Deps: y.verifying(), TruthKinds: now}
	d.Erase = func(ctx context.Context, tenant int64, person event.ID) error {
		o := erasure.Options{TenantID: tenant, AuthorID: person, Reason: "a restore undid the erasure", Wait: wait}
		if err := setActor(&o.Actor); err != nil {
			return err
		}
		_, err := p.erase(ctx, y, o)
		return err
	}
	d.Replay = func(ctx context.Context, consumer string) error {
		for _, projection := range d.Fleet {
			if projection.Name() == consumer {
				_, err := replay.Run(ctx, y.replaying(), projection, replay.Options{From: replay.Auto})
				return err
			}
		}
		return fmt.Errorf("there is no consumer %s", consumer)
	}
	return d, nil
}

// printRestore prints the findings and steps of a restore, or in a dry run its plan.
func printRestore(w io.Writer, r restore.Report) {
	unknown, redone := int64(0), int64(r.History)
	for _, part := range r.Streams.Partitions {
		unknown, redone = unknown+part.Unknown, redone+part.Redone
	}
	printPartitions(w, r.Streams)
	if r.DryRun {
		if r.Streams.Healthy {
			fmt.Fprintln(w, "The streams and the database agree. You need a restore only after a failover that lost commits,\n"+
				"or if a database or a disk of NATS came back from a backup or a snapshot.")
		}
		fmt.Fprintf(w, "Writes that the truth lost and the streams still have: %s.\n", count(unknown))
		fmt.Fprintf(w, "Erasures to repeat: %s.\n", count(int64(len(r.Erased))))
		fmt.Fprintln(w, "Restore replaces every stream that is not empty with a new one, rebuilds projections that cannot continue, and "+
			"repairs all differences.")
		return
	}
	fmt.Fprintf(w, "%s written again. %s ran again.\n", words.Of(redone, "lost write"), words.Of(int64(len(r.Erased)), "erasure"))
	if r.Overtaken > 0 {
		fmt.Fprintf(w, "For %s, the truth has a newer state than the lost write: the newer state remains, with a higher version.\n",
			entities(int64(r.Overtaken)))
	}
	if len(r.Renewed) > 0 {
		fmt.Fprintf(w, "New streams replace those of %s.\n", words.Partitions(r.Renewed))
	}
	for _, name := range r.Replayed {
		fmt.Fprintf(w, "The projection of %s was rebuilt.\n", name)
	}
}

func entities(n int64) string {
	if n == 1 {
		return "1 entity"
	}
	return count(n) + " entities"
}
