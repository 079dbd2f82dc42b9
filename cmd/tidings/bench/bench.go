package bench

import "github.com/spf13/cobra"

// Command returns `tidings bench`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure the system, one JSON object per case",
		Long: `Bench measures the system. With DATABASE_URL set, it works in a database of its own there. Otherwise
it starts its own servers. All servers are durable. Bench prints one JSON object per case to stdout,
and progress to stderr.`,
	}
	cmd.AddCommand(relayCommand(), latencyCommand(), projectCommand(), subscribeCommand(), readCommand(), writeCommand(), overloadCommand(),
		neighborsCommand(), archiveCommand(), serveCommand(), sizesCommand(), traceCommand(), childCommand())
	return cmd
}

// Texts of flags that several commands have.
const (
	syncWriting = "when the broker syncs to disk: always (before each publish ack) or default (every two minutes)"
	syncReading = syncWriting + "; the measured part only reads"
	giveUp      = "give up after this time"
)
