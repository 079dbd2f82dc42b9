package bench

import (
	"sync"

	"github.com/spf13/cobra"
)

// Command returns `tidings bench`.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure the system, one JSON object per case",
		Long: `Bench measures the system. With DATABASE_URL set, it works in a database of its own there. Otherwise
it starts its own servers. All servers are durable. Bench prints one JSON object per case to stdout,
and progress to stderr.`,
	}
	cmd.AddCommand(relayCommand(), latencyCommand(), projectCommand(), subscribeCommand(), readCommand(), writeCommand(), overloadCommand(),
		neighborsCommand(), archiveCommand(), sizesCommand(), traceCommand(), childCommand())
	return cmd
}

// progress returns a function that prints lines of progress to stderr. The function is safe for
// concurrent use.
func progress(cmd *cobra.Command) func(format string, args ...any) {
	var mu sync.Mutex
	return func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		cmd.PrintErrf(format+"\n", args...)
	}
}
