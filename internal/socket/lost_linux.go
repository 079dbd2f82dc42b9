package socket

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

func limitUnacknowledged(c *net.TCPConn, after time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return // it is closed
	}
	_ = raw.Control(func(fd uintptr) { // on an error the peer has gone
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after/time.Millisecond))
	})
}
