//go:build !race

package postgres

import (
	"net"
	"testing"
)

// TestAPoolsConnectionsAreQuiet: package socket tests the effect.
func TestAPoolsConnectionsAreQuiet(t *testing.T) {
	t.Parallel()
	if _, loud := dialed(t).Conn.(*net.TCPConn); loud {
		t.Error("each of its system calls wakes the monitor of an idle process")
	}
}
