//go:build !linux

package socket

import (
	"net"
	"time"
)

// limitUnacknowledged does nothing: only Linux has such a limit for one connection.
func limitUnacknowledged(*net.TCPConn, time.Duration) {}
