package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/relay"
)

func (p Process) repairStreamCommand() *cobra.Command {
	var o relay.RepairOptions
	c := p.command(command{
		use:   "stream",
		short: "Repair the streams after NATS lost messages or a whole stream",
		long: `Repair compares the stream of each partition with the outbox. If a database or a disk of NATS came
back from a backup or a snapshot, run tidings restore instead: it includes the repair.

If a stream is gone, was recreated or lost its end, a new partition with a new stream replaces it.
The relay first publishes the missing events there, in their order. Events that are missing in the
middle of a stream are published again at its end, and erased events never. A subscriber may see an
event twice, with the same id and version. Tidings' own consumers continue by themselves.

A message without a row is a write that the database lost when it went back in time (a restore, a
failover). Repair refuses to go past it: tidings restore writes it again. With --delete-unknown
repair deletes such messages instead, but does not undo their effect on the projections: run tidings
verify --repair afterwards.

Repair changes nothing on an intact stream. Relays may run meanwhile, but no other repair or
restore: the second one names the first, and exits with code 3. After an interruption, run it
again. While a stream has no leader, repair does nothing: wait until the brokers have elected one.
On a cluster it asks leaders of a damaged stream to step down, until a majority of the replicas has
reported the loss.
Repair cannot publish rows that were discarded, or dropped with old archives.`,
		name: "repair", needs: needAll | orOutbox, json: oneObject, dryRun: &o.DryRun, destructive: true,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			if err := s.ask(func(w io.Writer) error { return showRepair(ctx, w, s.system, o) }); err != nil {
				return nil, err
			}
			r, err := relay.Repair(ctx, s.Truth, s.Broker, slog.New(slog.DiscardHandler), o)
			if err != nil && !errors.Is(err, relay.ErrUnknownMessages) {
				return nil, err
			}
			if err := s.rebase(ctx, r); err != nil {
				return nil, err
			}
			return reports(r, func(w io.Writer) error { printRepair(w, r, err != nil); return nil }), err
		},
	})
	c.Flags().BoolVar(&o.DeleteUnknown, "delete-unknown", false, "delete messages that have no row")
	c.Flags().BoolVar(&o.DeleteForeign, "delete-foreign", false, "read all streams, and delete messages that no relay wrote")
	return c
}

// rebase sets the offsets at which the consumers continue, also if an earlier repair was
// interrupted before this step.
func (y *system) rebase(ctx context.Context, report relay.RepairReport) error {
	if y.OutboxAlone {
		return nil
	}
	for _, part := range report.Partitions {
		for _, s := range part.Successors {
			if err := consumers.Rebase(ctx, y.Projections, part.Stream, part.Left, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// showRepair prints the plan of a repair.
func showRepair(ctx context.Context, w io.Writer, y *system, o relay.RepairOptions) error {
	o.DryRun = true
	report, err := relay.Repair(ctx, y.Truth, y.Broker, slog.New(slog.DiscardHandler), o)
	if err != nil && !errors.Is(err, relay.ErrUnknownMessages) {
		return err
	}
	if report.Healthy {
		return errNothingToDelete
	}
	printPartitions(w, report)
	return err
}

// printRepair writes a line for each partition that has a problem, and the result. A dry run writes
// the same lines.
func printRepair(w io.Writer, report relay.RepairReport, refused bool) {
	printPartitions(w, report)
	switch {
	case report.Healthy:
		fmt.Fprintln(w, "The streams and the database agree. Repair has nothing to do.")
	case report.DryRun && !refused:
		fmt.Fprintln(w, "Nothing was changed. Run the same command without --dry-run to take these steps.")
	case refused:
		fmt.Fprintln(w, "Nothing was changed.")
	default:
		fmt.Fprintln(w, "The streams are repaired. The relay publishes the missing events.")
	}
}

// printPartitions writes a line for each partition that has a problem, with the steps of its
// repair.
func printPartitions(w io.Writer, report relay.RepairReport) {
	for _, p := range report.Partitions {
		if p.Problem == "" && p.Foreign+p.Duplicates == 0 {
			continue
		}
		var found, do []string
		add := func(to *[]string, n int64, one, many string) {
			if n == 1 {
				*to = append(*to, "1 "+one)
			} else if n > 1 {
				*to = append(*to, count(n)+" "+many)
			}
		}
		if p.Problem != "" {
			found = append(found, p.Problem)
		}
		add(&found, p.Foreign, "foreign message", "foreign messages")
		add(&found, p.Duplicates, "repeated message", "repeated messages")
		if p.Adopt {
			do = append(do, "take the partition back into the database")
		}
		if p.Bind {
			do = append(do, "bind the partition to its stream")
		}
		add(&do, p.Republish, "event to publish again", "events to publish again")
		add(&do, p.Deleted, "message to delete", "messages to delete")
		if p.Close {
			do = append(do, "close the stream again")
		} else if len(p.ReplacedBy) > 0 {
			do = append(do, replacement(p.ReplacedBy))
		}
		if len(do) == 0 {
			do = []string{"nothing"}
		}
		fmt.Fprintf(w, "Partition %d (%s): %s. Repair: %s.\n", p.Partition, p.Stream, strings.Join(found, ", "), strings.Join(do, ", "))
	}
}

// replacement says which new partitions replace a partition.
func replacement(by []int) string {
	if len(by) == 1 {
		return fmt.Sprintf("partition %d replaces it", by[0])
	}
	return "partitions " + words.Ranges(by) + " replace it"
}
