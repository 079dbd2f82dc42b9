package socket

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestAConnectionThatTheNetworkHasLostIsDropped: the peer's kernel receives nothing more, so it
// acknowledges nothing. Without the limit the reader would wait for 15 minutes.
func TestAConnectionThatTheNetworkHasLostIsDropped(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	loseAll(t, peer)
	DropUnread(c, 500*time.Millisecond)
	if _, err := c.Write([]byte("a question")); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ETIMEDOUT) {
		t.Errorf("the answer that cannot come: %v, want ETIMEDOUT", err)
	}
}

// loseAll makes the kernel ignore every packet of the connection that arrives.
func loseAll(t *testing.T, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		none := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &none})
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}
