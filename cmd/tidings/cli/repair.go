package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/relay"
)

func (p Process) repairCommand() *cobra.Command {
	c := &cobra.Command{Use: "repair", Short: "Repair a stream that no longer matches the database"}
	c.AddCommand(p.repairStreamCommand())
	return c
}

func (p Process) repairStreamCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
		o      relay.RepairOptions
	)
	c := &cobra.Command{
		Use:   "stream",
		Short: "Make the streams and the database agree after lost data, a new stream, or a restored database",
		Long: `Repair compares the stream of each partition with the outbox.

A new partition with a stream of its own replaces a partition whose stream is gone, was made anew or lost its end. The relay
publishes the missing events there first, in their order. It publishes events that are missing from the middle of a stream again
at the stream's end. It never publishes erased events again. A subscriber may see an event twice, and knows it by its id and version.
Tidings' own consumers continue by themselves.

A message that has no row tells of a write that the database lost when it went back in time (a restore, a failover). Repair refuses to
go on until --delete-unknown tells it to delete such messages. It does not undo what the projections took from them: run tidings verify.

Repair leaves a healthy stream alone. Relays may run meanwhile. Run an interrupted repair again. While a stream has no leader, repair
does nothing: wait until the brokers have elected one. Rows that were discarded or dropped with old archives cannot be published again.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			y, err := p.system(c.Context(), data, "repair")
			if err != nil {
				return err
			}
			defer y.close()
			report, err := relay.Repair(c.Context(), y.truth, y.broker, slog.New(slog.DiscardHandler), o)
			if err != nil && !errors.Is(err, relay.ErrUnknownMessages) {
				return err
			}
			for _, part := range report.Partitions { // also after a repair that was interrupted before this
				for _, s := range part.Successors {
					if err := consumers.Rebase(c.Context(), y.projections, part.Stream, part.Left, s); err != nil {
						return err
					}
				}
			}
			if asJSON {
				return errors.Join(p.writeJSON(report), err)
			}
			printRepair(p.Stdout, report)
			return err
		},
	}
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "only say what would be done")
	c.Flags().BoolVar(&o.DeleteUnknown, "delete-unknown", false, "delete messages that have no row")
	c.Flags().BoolVar(&o.DeleteForeign, "delete-foreign", false, "read all streams, and delete messages that no relay wrote")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

// printRepair writes a line for each partition with a problem, and what was done.
func printRepair(w io.Writer, report relay.RepairReport) {
	for _, p := range report.Partitions {
		if p.Problem == "" && p.Foreign+p.Duplicates == 0 {
			continue
		}
		var facts []string
		add := func(n int64, one, many string) {
			if n == 1 {
				facts = append(facts, "1 "+one)
			} else if n > 1 {
				facts = append(facts, fmt.Sprintf("%d %s", n, many))
			}
		}
		add(p.Republish, "event to publish again", "events to publish again")
		add(p.Unknown, "message without a row", "messages without a row")
		add(p.Foreign, "foreign message", "foreign messages")
		add(p.Duplicates, "repeated message", "repeated messages")
		add(p.Deleted, "message deleted", "messages deleted")
		for _, n := range p.ReplacedBy {
			facts = append(facts, fmt.Sprintf("replaced by partition %d", n))
		}
		if p.Problem != "" {
			facts = append([]string{p.Problem}, facts...)
		}
		fmt.Fprintf(w, "Partition %d (%s): %s.\n", p.Partition, p.Stream, strings.Join(facts, ", "))
	}
	switch {
	case report.Healthy:
		fmt.Fprintln(w, "The streams and the database agree. Repair did nothing.")
	case !report.Repaired:
		fmt.Fprintln(w, "Repair did nothing.")
	default:
		fmt.Fprintln(w, "The streams are repaired. The relay publishes what is missing.")
	}
}
