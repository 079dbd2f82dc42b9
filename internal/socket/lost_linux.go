package socket

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func limitUnacknowledged(c syscall.RawConn, after time.Duration) {
	_ = c.Control(func(fd uintptr) { // on an error the peer has gone
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(after/time.Millisecond))
	})
}
