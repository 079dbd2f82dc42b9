//go:build linux && !race

package socket

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// most is the size above which a read or a write takes the usual way, because the copy takes long.
const most = 64 << 10

// quiet is a TCP connection whose small reads and writes are not announced.
type quiet struct {
	*net.TCPConn
	in, out transfer
}

// transfer is a read or a write in progress. It is kept for the next one, so that these allocate
// nothing.
type transfer struct {
	mu    sync.Mutex // one at a time, as in the net package
	b     []byte
	n     int
	errno syscall.Errno
	step  func(fd uintptr) (done bool)
	wait  func(step func(fd uintptr) (done bool)) error // between two steps, until the socket is ready
}

// Quiet returns c for a process that waits for small answers hundreds of times per second, or c
// itself if it is no TCP connection.
//
// The Go runtime announces each system call to its monitor, in case the call blocks. If the process
// was idle, this wakes the monitor's thread, which then looks around several times: a quarter of
// the time of a relay or a consumer, and a sixth of an API's (docs/performance.md). Reads and
// writes of a socket never block, because the runtime waits for the socket first. So these are made
// without the announcement. The race detector knows only announced calls, so with it the connection
// stays as it is.
func Quiet(c net.Conn) net.Conn {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return c
	}
	q := &quiet{TCPConn: tcp}
	q.in.step, q.in.wait = q.in.read, raw.Read
	q.out.step, q.out.wait = q.out.write, raw.Write
	return q
}

func (t *transfer) read(fd uintptr) (done bool) {
	t.n, t.errno = call(syscall.SYS_READ, fd, t.b)
	return t.errno != syscall.EAGAIN
}

func (t *transfer) write(fd uintptr) (done bool) {
	for t.n < len(t.b) && t.errno == 0 {
		var n int
		n, t.errno = call(syscall.SYS_WRITE, fd, t.b[t.n:])
		t.n += n
	}
	if t.errno == syscall.EAGAIN {
		t.errno = 0
		return false
	}
	return true
}

// run transfers b. err is that of the wait.
func (t *transfer) run(b []byte) (n int, errno syscall.Errno, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b, t.n, t.errno = b, 0, 0
	err = t.wait(t.step)
	t.b = nil
	return t.n, t.errno, err
}

func (c *quiet) Read(b []byte) (int, error) {
	if len(b) == 0 || len(b) > most {
		return c.TCPConn.Read(b)
	}
	n, errno, err := c.in.run(b)
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
	n, errno, err := c.out.run(b)
	if err == nil && errno != 0 {
		err = c.failed("write", errno)
	}
	return n, err
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
