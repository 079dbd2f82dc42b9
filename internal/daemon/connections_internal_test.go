package daemon

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// fakeConn is a connection from an address that records when it is closed.
type fakeConn struct {
	net.Conn
	from string
	gone *[]string
	name string
}

func (f *fakeConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(f.from))
}

func (f *fakeConn) Close() error {
	*f.gone = append(*f.gone, f.name)
	return nil
}

// Connections open and close one after the other. "name ADDRESS" opens one, "name STATE" is a state
// that the server reports, and "wait" waits one second.
func TestWhichConnectionGoesWhenThePortIsFull(t *testing.T) {
	const a, b, c0, d, six, six2 = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1", "[2001:db8::1]:1", "[2001:db8::2]:9"
	for name, c := range map[string]struct {
		steps []string
		gone  string // in this order
		says  string // of the last step: taken, full, refused
	}{
		"there is room": {[]string{"1 " + a, "2 " + b}, "", "taken"},
		"the longest idle": {[]string{"1 " + a, "2 " + b, "3 " + a, "1 active", "2 active", "3 active", "2 idle", "1 idle", "3 idle",
			"4 " + b}, "1", "taken"},
		"the longest idle of addresses with as many": {[]string{"1 " + a, "2 " + b, "3 " + c0, "1 active", "2 active", "3 active",
			"2 idle", "1 idle", "3 idle", "4 " + d}, "2", "taken"},
		"an idle one before a new one": {[]string{"1 " + a, "1 active", "1 idle", "2 " + b, "3 " + a, "4 " + b}, "1", "taken"},
		"a slow opener before an idle one": {
			[]string{"1 " + a, "1 active", "1 idle", "2 " + b, "3 " + a, "wait", "4 " + b}, "3", "taken"},
		"the oldest of the new ones": {[]string{"1 " + a, "2 " + b, "3 " + a, "4 " + b}, "1", "taken"},
		"none with a request in progress": {[]string{"1 " + a, "2 " + b, "3 " + a, "1 active", "2 active", "3 active",
			"wait", "4 " + b}, "", "full"},
		"one has ended": {[]string{"1 " + a, "2 " + b, "3 " + a, "1 active", "2 active", "3 active", "4 " + b,
			"2 closed", "4 " + b}, "", "taken"},
		"one of an address at its limit": {[]string{"1 " + b, "1 active", "1 idle", "2 " + a, "3 " + a, "2 active", "3 active",
			"3 idle", "4 " + a}, "3", "taken"},
		"an address with a request on each": {[]string{"1 " + a, "2 " + a, "1 active", "2 active", "3 " + a}, "", "refused"},
		"an IPv6 network is an address":     {[]string{"1 " + six, "2 " + six2, "1 active", "2 active", "3 " + six2}, "", "refused"},
		"ousted ones end": {[]string{"1 " + a, "2 " + b, "3 " + a, "4 " + b, "1 active", "1 closed", "5 " + a},
			"1 2", "taken"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newConnections(nil, 3, 2, slog.New(slog.DiscardHandler))
				conns, gone := make(map[string]*fakeConn), []string{}
				says := ""
				for _, step := range c.steps {
					who, what, _ := strings.Cut(step, " ")
					time.Sleep(time.Millisecond)
					switch what {
					case "":
						time.Sleep(time.Second)
					case "active":
						l.follow(conns[who], http.StateActive)
					case "idle":
						l.follow(conns[who], http.StateIdle)
					case "closed":
						l.follow(conns[who], http.StateClosed)
					default:
						conns[who] = &fakeConn{from: what, gone: &gone, name: who}
						taken, full := l.take(conns[who])
						says = map[[2]bool]string{{true, false}: "taken", {false, true}: "full",
							{false, false}: "refused"}[[2]bool{taken, full}]
					}
				}
				if diff := cmp.Diff(strings.Fields(c.gone), strings.Fields(strings.Join(gone, " "))); diff != "" || says != c.says {
					t.Errorf("the last one is %s, want %s; closed (-want +got):\n%s", says, c.says, diff)
				}
				for _, conn := range conns {
					l.follow(conn, http.StateClosed)
				}
				if n := len(l.open) + len(l.of); n != 0 {
					t.Errorf("%d connections and addresses remain: %v", n, l)
				}
			})
		})
	}
}

// client is a connection to the server under test, from an address of this machine.
type client struct {
	net.Conn
	in *bufio.Reader
}

func dialFrom(t *testing.T, from string, to net.Addr) client {
	t.Helper()
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // perhaps a second time
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return client{c, bufio.NewReader(c)}
}

func (c client) ask(path string) error {
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Two addresses hold as many connections as they may, and keep opening more. Half of these
// connections never send a byte. Other clients still get answers, on each new connection and on an
// old one, and also when all others work.
func TestIdleConnectionsKeepNobodyOut(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const most = 64
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	release := make(chan struct{})
	working := make(chan struct{}, most)
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/work" {
			working <- struct{}{}
			<-release
		}
		_, _ = io.WriteString(w, "ok")
	})
	go func() {
		ended <- serve(ctx, newConnections(l, most, most/2, slog.New(slog.DiscardHandler)), h, slog.New(slog.DiscardHandler))
	}()
	hold := func(from string) {
		for i := range most {
			c := dialFrom(t, from, l.Addr())
			if i%2 == 0 {
				if err := c.ask("/"); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	hold("127.0.0.2")
	hold("127.0.0.3")
	kept := dialFrom(t, "127.0.0.4", l.Addr())
	for range 4 {
		if err := kept.ask("/"); err != nil {
			t.Fatalf("on the connection in use: %v", err)
		}
		for _, from := range []string{"127.0.0.2", "127.0.0.3"} { // too few to fill the port again
			for range 4 {
				dialFrom(t, from, l.Addr())
			}
		}
		if err := dialFrom(t, "127.0.0.1", l.Addr()).ask("/"); err != nil {
			t.Fatalf("on a new connection: %v", err)
		}
	}
	answered := make(chan error, most+1)
	for i := range most {
		c := dialFrom(t, fmt.Sprintf("127.0.1.%d", 1+i%4), l.Addr())
		go func() { answered <- c.ask("/work") }()
		<-working
	}
	go func() { answered <- dialFrom(t, "127.0.0.1", l.Addr()).ask("/") }()
	select {
	case err := <-answered:
		t.Fatalf("answered while all connections work: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	close(release)
	for range most + 1 {
		if err := <-answered; err != nil {
			t.Errorf("after connections became free: %v", err)
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
