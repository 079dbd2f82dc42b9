//go:build !race

package broker

import (
	"net"
	"testing"
)

// TestConnectionsToNATSAreQuiet: package socket tests the effect.
func TestConnectionsToNATSAreQuiet(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := dialer{}.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, loud := c.(*net.TCPConn); loud {
		t.Error("each of its system calls wakes the monitor of an idle process")
	}
}
