//go:build linux && !race

package socket

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"
)

// most is the size above which a read or a write takes the usual way, because the copy takes long.
const most = 64 << 10

// quiet is a TCP connection whose small reads and writes are not announced.
type quiet struct {
	*net.TCPConn
	raw syscall.RawConn
}

// Quiet returns c for a process that waits for small answers hundreds of times per second, or c
// itself if it is no TCP connection.
//
// The Go runtime announces each system call to its monitor, in case the call blocks. If the process
// was idle, this wakes the monitor's thread, which then looks around several times: a quarter of
// the time of a relay or a consumer (docs/performance.md). Reads and writes of a socket never
// block, because the runtime waits for the socket first. So these are made without the
// announcement. The race detector knows only announced calls, so with it the connection stays as it
// is.
func Quiet(c net.Conn) net.Conn {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return c
	}
	return &quiet{tcp, raw}
}

func (c *quiet) Read(b []byte) (int, error) {
	if len(b) == 0 || len(b) > most {
		return c.TCPConn.Read(b)
	}
	n, errno := 0, syscall.Errno(0)
	err := c.raw.Read(func(fd uintptr) bool {
		n, errno = call(syscall.SYS_READ, fd, b)
		return errno != syscall.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case errno != 0:
		return 0, c.failed("read", errno)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (c *quiet) Write(b []byte) (int, error) {
	if len(b) == 0 || len(b) > most {
		return c.TCPConn.Write(b)
	}
	sent, errno := 0, syscall.Errno(0)
	err := c.raw.Write(func(fd uintptr) bool {
		for sent < len(b) && errno == 0 {
			var n int
			n, errno = call(syscall.SYS_WRITE, fd, b[sent:])
			sent += n
		}
		if errno == syscall.EAGAIN {
			errno = 0
			return false
		}
		return true
	})
	if err == nil && errno != 0 {
		err = c.failed("write", errno)
	}
	return sent, err
}

// call makes a system call with a buffer, which is not empty.
func call(trap, fd uintptr, b []byte) (int, syscall.Errno) {
	for {
		n, _, errno := syscall.RawSyscall(trap, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		switch errno {
		case 0:
			return int(n), 0
		case syscall.EINTR:
			continue
		}
		return 0, errno
	}
}

// failed returns the error that a net.TCPConn returns.
func (c *quiet) failed(op string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(op, errno)}
}
