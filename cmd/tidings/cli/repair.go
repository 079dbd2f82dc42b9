package cli

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/relay"
)

func (p Process) repairCommand() *cobra.Command {
	c := &cobra.Command{Use: "repair", Short: "Mend what the system refuses to go on with"}
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
		Short: "Make the stream and the database agree again after lost data, a new stream, or a restored database",
		Long: `Repair reads the whole stream and compares it with the outbox. Events whose message is missing are published again by the relays, under a
new generation; erased events never are. A repeated event comes at the end of the stream, with its old id, so a subscriber may see it
twice and knows it by its id and version. Tidings' own consumers go on by themselves.

Messages that have no row tell of writes that the database lost when it went back in time (a restore, a failover). They are named, and
only --delete-unknown takes them off the stream. What the projections took from them before is not undone: run tidings verify.

Messages that no relay wrote (nats pub events.p05.x hello) harm nothing: everybody skips and counts them. --delete-foreign takes them off,
one by one.

A stream that is well is left alone. Relays may run meanwhile; they refuse the stream until the repair is done. An interrupted repair is
simply run again. Rows that were discarded or dropped with old archives cannot be published again.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			y, err := p.system(c.Context(), data, "repair")
			if err != nil {
				return err
			}
			defer y.close()
			report, err := relay.Repair(c.Context(), y.truth, y.broker, slog.New(slog.DiscardHandler), o)
			if err != nil {
				return err
			}
			if !o.DryRun { // also after a repair that was interrupted before this
				if err := consumers.Rebase(c.Context(), y.projections, report.Created, report.Generation, report.Tails); err != nil {
					return err
				}
			}
			if asJSON {
				return p.writeJSON(report)
			}
			switch {
			case report.Healthy && report.Deleted > 0:
				fmt.Fprintf(p.Stdout, "Stream %s and the database agree: %d messages. %d messages that no relay wrote were taken off.\n", report.Stream, report.Messages, report.Deleted)
			case report.Healthy:
				fmt.Fprintf(p.Stdout, "Stream %s and the database agree: %d messages. Nothing was done.\n", report.Stream, report.Messages)
			case !report.Repaired:
				fmt.Fprintf(p.Stdout, "Stream %s holds %d messages. A repair would publish %d events again, take %d messages off and move the marks of %d partitions back. Nothing was done.\n",
					report.Stream, report.Messages, report.Republish, report.Unknown, report.Behind)
			default:
				fmt.Fprintf(p.Stdout, "Stream %s is of generation %d. It held %d messages; %d events are published again now, %d messages were taken off, the marks of %d partitions moved back.\n",
					report.Stream, report.Generation, report.Messages, report.Republish, report.Deleted, report.Behind)
			}
			if left := report.Foreign - report.Deleted; report.Healthy && left > 0 {
				fmt.Fprintf(p.Stdout, "It also holds %d messages that no relay wrote. Everybody skips them; --delete-foreign takes them off.\n", left)
			}
			if report.Duplicates > 0 {
				fmt.Fprintf(p.Stdout, "%d messages repeat an event of an earlier one. The first one counts.\n", report.Duplicates)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "only say what would be done")
	c.Flags().BoolVar(&o.DeleteUnknown, "delete-unknown", false, "take messages that have no row off the stream")
	c.Flags().BoolVar(&o.DeleteForeign, "delete-foreign", false, "take messages that no relay wrote off the stream")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}
