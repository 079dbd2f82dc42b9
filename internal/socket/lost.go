package socket

import (
	"net"
	"syscall"
	"time"
)

// DropLost makes the kernel drop the connection, with all that it keeps for it, if the peer
// acknowledges or takes no byte for that long of what is sent to it. On an idle connection these
// are probes: three of them, so that a single packet that the network loses ends none. Otherwise
// the kernel would try for 15 minutes, also after the connection was closed.
func DropLost(c net.Conn, after time.Duration) {
	tcp, ok := c.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
		SyscallConn() (syscall.RawConn, error)
	})
	if !ok {
		return
	}
	// On an error the peer has gone.
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: after / 2, Interval: after / 6, Count: 3})
	raw, err := tcp.SyscallConn()
	if err != nil {
		return // it is closed
	}
	limitUnacknowledged(raw, after)
}
