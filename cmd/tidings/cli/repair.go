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
			case report.Healthy:
				fmt.Fprintf(p.Stdout, "Stream %s and the database agree: %d messages. Nothing was done.\n", report.Stream, report.Messages)
			case !report.Repaired:
				fmt.Fprintf(p.Stdout, "Stream %s holds %d messages. A repair would publish %d events again, take %d messages off and move the marks of %d partitions back. Nothing was done.\n",
					report.Stream, report.Messages, report.Republish, report.Unknown, report.Behind)
			default:
				fmt.Fprintf(p.Stdout, "Stream %s is of generation %d. It held %d messages; %d events are published again now, %d messages were taken off, the marks of %d partitions moved back.\n",
					report.Stream, report.Generation, report.Messages, report.Republish, report.Deleted, report.Behind)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&o.DryRun, "dry-run", false, "only say what would be done")
	c.Flags().BoolVar(&o.DeleteUnknown, "delete-unknown", false, "take messages that have no row off the stream")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}
