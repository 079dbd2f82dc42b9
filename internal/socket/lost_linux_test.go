package socket

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestAConnectionThatTheNetworkHasLostIsDropped: the peer's kernel receives nothing more, so it
// acknowledges nothing. Without the limit the reader would wait for minutes.
func TestAConnectionThatTheNetworkHasLostIsDropped(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		question string
		after    time.Duration
	}{
		"after a question that did not arrive": {"a question", 500 * time.Millisecond},
		"while it is idle":                     {"", 3 * time.Second}, // the kernel counts probes in seconds
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			near, far := connect(t)
			loseAll(t, far)
			DropLost(near, c.after)
			if _, err := near.Write([]byte(c.question)); err != nil {
				t.Fatal(err)
			}
			if err := near.SetReadDeadline(time.Now().Add(40 * time.Second)); err != nil {
				t.Fatal(err)
			}
			if _, err := near.Read(make([]byte, 1)); !errors.Is(err, unix.ETIMEDOUT) {
				t.Errorf("the answer that cannot come: %v, want ETIMEDOUT", err)
			}
		})
	}
}

// TestALostPacketDropsNoConnection: the kernel sends several probes before it gives up.
func TestALostPacketDropsNoConnection(t *testing.T) {
	t.Parallel()
	near, _ := connect(t)
	DropLost(near, 30*time.Second)
	idle, interval := option(t, near, unix.TCP_KEEPIDLE), option(t, near, unix.TCP_KEEPINTVL)
	if probes := (30 - idle) / interval; probes != 3 {
		t.Errorf("it sends %d probes: the first after %d s, the others each %d s", probes, idle, interval)
	}
}

func option(t *testing.T, c *net.TCPConn, name int) (value int) {
	t.Helper()
	control(t, c, func(fd int) (err error) {
		value, err = unix.GetsockoptInt(fd, unix.IPPROTO_TCP, name)
		return err
	})
	return value
}

// loseAll makes the kernel ignore every packet of the connection that arrives.
func loseAll(t *testing.T, c *net.TCPConn) {
	t.Helper()
	none := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	control(t, c, func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &none})
	})
}

func control(t *testing.T, c *net.TCPConn, do func(fd int) error) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = do(int(fd)) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

// connect returns both ends of a connection.
func connect(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialed, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dialed.Close() })
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() })
	return dialed.(*net.TCPConn), accepted.(*net.TCPConn)
}
