package pglocal

import (
	"net"
	"strconv"
	"testing"
)

func TestAnotherProcessReservesAPort(t *testing.T) {
	const port = 14999 // below those of FreePort
	other, err := net.Listen("unix", "@tidings-port-"+strconv.Itoa(port))
	if err != nil {
		t.Fatal(err)
	}
	if reserve(port) {
		t.Error("the port is reserved twice")
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if !reserve(port) || reserve(port) {
		t.Error("after the other process ended, want one reservation")
	}
	if l, ok := reserved.LoadAndDelete(port); ok { // for another run of this test in this process
		if err := l.(*net.UnixListener).Close(); err != nil {
			t.Error(err)
		}
	}
}
