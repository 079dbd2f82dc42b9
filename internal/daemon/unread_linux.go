package daemon

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// dropUnread makes the kernel drop the connection, with all it keeps for it, if the client
// acknowledges or takes no byte of what is sent for so long. Closing a connection alone would keep
// that for minutes.
func dropUnread(c net.Conn, after time.Duration) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) { // on an error the client has gone
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after/time.Millisecond))
	})
}
