package testkit

import (
	"io"
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/tidings/tidings/internal/pglocal"
)

// Gate returns the URL of a server with another port, which refuses connections until open is called, as if the server started then.
func Gate(t testing.TB, server string) (gated string, open func()) {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	port, err := pglocal.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	target := u.Host
	u.Host = (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}).String()
	return u.String(), func() {
		t.Helper()
		l, err := net.Listen("tcp", u.Host)
		if err != nil {
			t.Fatal(err)
		}
		var passing sync.WaitGroup
		passing.Go(func() {
			for {
				client, err := l.Accept()
				if err != nil {
					return
				}
				passing.Go(func() { pass(client, target) })
			}
		})
		t.Cleanup(func() {
			_ = l.Close() // Accept ends with its error
			passing.Wait()
		})
	}
}

// pass copies both ways until either end closes.
func pass(client net.Conn, target string) {
	defer client.Close()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	done := make(chan struct{}, 2)
	for to, from := range map[net.Conn]net.Conn{client: server, server: client} {
		go func() {
			_, _ = io.Copy(to, from) // an end that closes
			done <- struct{}{}
		}()
	}
	<-done
	_, _ = client.Close(), server.Close()
	<-done
}
