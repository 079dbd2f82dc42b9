package pglocal

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
)

// FreePort returns a TCP port that is free on loopback now. It lies below the range from which the kernel takes the ports of
// outgoing connections: a client that dials a stopped server again and again would sooner or later be given the server's
// port as its own, connect to itself, and keep the server from starting.
func FreePort() (int, error) {
	const low = 15000
	high := 32768 // Linux: ip_local_port_range begins here unless it was set otherwise
	if b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		if f := strings.Fields(string(b)); len(f) == 2 {
			if n, err := strconv.Atoi(f[0]); err == nil && n > low+1000 {
				high = n
			}
		}
	}
	for range 100 {
		if port := low + rand.IntN(high-low); isFree(port) {
			return port, nil
		}
	}
	return 0, errors.New("found no free port on loopback")
}

func isFree(port int) bool {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	return err == nil && l.Close() == nil
}
