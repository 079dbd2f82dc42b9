//go:build !linux

package socket

import (
	"net"
	"time"
)

// DropUnread does nothing: only Linux has such a limit for one connection.
func DropUnread(net.Conn, time.Duration) {}
