package bench

import (
	"sync"

	"github.com/spf13/cobra"
)

// Command returns `tidings bench`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure the system, one JSON object per case",
		Long: `Measures the system. With DATABASE_URL set it works in a database of its own there, else it starts its servers; all are durable.
One JSON object per case goes to stdout, progress to stderr.`,
	}
	cmd.AddCommand(relayCommand(), latencyCommand(), projectCommand(), subscribeCommand(), readCommand(), writeCommand(), overloadCommand(), neighboursCommand(), archiveCommand(), sizesCommand(), traceCommand(), childCommand())
	return cmd
}

// progress returns what says on stderr how far a run is, line by line, safe for concurrent use.
func progress(cmd *cobra.Command) func(format string, args ...any) {
	var mu sync.Mutex
	return func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		cmd.PrintErrf(format+"\n", args...)
	}
}
