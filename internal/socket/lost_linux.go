package socket

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// DropUnread makes the kernel drop the connection, with all that it keeps for it, if the peer
// acknowledges or takes no byte of what is sent for that long. Probes of an idle connection count
// as sent. Otherwise the kernel would try for 15 minutes, also after the connection was closed.
func DropUnread(c net.Conn, after time.Duration) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) { // on an error the peer has gone
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after/time.Millisecond))
	})
}
