//go:build !linux

package socket

import (
	"syscall"
	"time"
)

// limitUnacknowledged does nothing: only Linux has such a limit for one connection.
func limitUnacknowledged(syscall.RawConn, time.Duration) {}
