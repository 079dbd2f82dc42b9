package pglocal

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
)

// FreePort returns a TCP port that is free on loopback now. It is below the range from which the
// kernel takes the ports of outgoing connections. Otherwise a client that repeatedly dials a
// stopped server could get the server's port as its own. It would then connect to itself, and the
// server could not start.
//
// The port is reserved: while this process runs, FreePort does not return it again, in any process
// on this machine.
func FreePort() (int, error) {
	const low = 15000
	high := 32768 // the default start of ip_local_port_range on Linux
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if f := strings.Fields(string(b)); len(f) == 2 {
			if n, err := strconv.Atoi(f[0]); err == nil && n > low+1000 {
				high = n
			}
		}
	}
	for range 100 {
		if port := low + rand.IntN(high-low); isFree(port) && reserve(port) {
			return port, nil
		}
	}
	return 0, errors.New("found no free port on loopback")
}

func isFree(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	return err == nil && l.Close() == nil
}

// reserved has the ports that FreePort returned, each with the socket that reserves it: the runtime
// closes a listener that no variable refers to.
var reserved sync.Map

// reserve takes the port for the rest of this process. Other processes see the reservation as an
// abstract Unix socket, which has no file and ends with the process. Only Linux has such sockets.
func reserve(port int) bool {
	var l *net.UnixListener
	if runtime.GOOS == "linux" {
		var err error
		if l, err = net.ListenUnix("unix", &net.UnixAddr{Name: "@tidings-port-" + strconv.Itoa(port), Net: "unix"}); err != nil {
			return false
		}
	}
	_, taken := reserved.LoadOrStore(port, l)
	return !taken
}
