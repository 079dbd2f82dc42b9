package postgres

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sys/unix"
)

// dialed returns a connection of a pool, to a server that does not answer.
func dialed(t *testing.T) *link {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	pc, err := pgxpool.ParseConfig("")
	if err != nil {
		t.Fatal(err)
	}
	watch(pc)
	c, err := pc.ConnConfig.DialFunc(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c.(*link)
}

// TestAPoolsConnectionsDoNotOutliveTheirServer: package socket tests the effect.
func TestAPoolsConnectionsDoNotOutliveTheirServer(t *testing.T) {
	t.Parallel()
	raw, err := dialed(t).Conn.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var limit int
	var failed error
	if err := raw.Control(func(fd uintptr) {
		limit, failed = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	if got, want := time.Duration(limit)*time.Millisecond, 30*time.Second; got != want {
		t.Errorf("the kernel drops a lost connection after %s, want %s", got, want)
	}
}
