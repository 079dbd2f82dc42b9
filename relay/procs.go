package relay

import (
	"os"
	"runtime"
)

// UseOneProcessor has this process run on one processor at a time, unless GOMAXPROCS says otherwise. For a process that is a relay and nothing else: it mostly waits for
// the two servers, a handful of microseconds at a time, and on several processors the runtime spends more on waking them up than the work takes (docs/performance.md).
// One is enough to publish as quickly as a broker takes.
func UseOneProcessor() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(1)
	}
}
