//go:build !linux

package daemon

import (
	"net"
	"time"
)

// dropUnread does nothing: only Linux has such a limit for one connection.
func dropUnread(net.Conn, time.Duration) {}
