package relay

import (
	"os"
	"runtime"
)

// UseOneProcessor limits this process to one processor at a time, unless GOMAXPROCS is set. Use it
// for a process that only runs a relay. A relay mostly waits for its two servers, some microseconds
// at a time. On several processors, the Go runtime spends more on waking them than the work takes
// (docs/performance.md). One processor publishes as fast as a broker accepts.
func UseOneProcessor() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
}
