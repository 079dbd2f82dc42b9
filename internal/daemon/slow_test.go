package daemon_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/shares"
)

// pipes is a listener whose connections are in memory, so they work inside a synctest bubble.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

func TestAClientThatTakesItsTimeLosesTheConnection(t *testing.T) {
	for name, c := range map[string]struct {
		send, slowly string
		after        time.Duration
	}{
		"no request":             {"", "", 5 * time.Second},
		"slow headers":           {"GET / HTTP/1.1\r\nHost: x\r\n", strings.Repeat("x", 500), 5 * time.Second},
		"a slow body":            {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n", strings.Repeat("x", 500), shares.PaceTime},
		"nothing behind headers": {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "", 2 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				l := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
				served := make(chan error, 1)
				go func() {
					served <- daemon.Serve(ctx, l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						_, _ = io.Copy(io.Discard, r.Body)
					}), 100, slog.New(slog.DiscardHandler))
				}()
				ours, theirs := net.Pipe()
				l.conns <- theirs
				start := time.Now()
				wrote := make(chan struct{})
				go func() {
					defer close(wrote)
					_, err := io.WriteString(ours, c.send)
					for i := 0; err == nil && i < len(c.slowly); i++ {
						time.Sleep(time.Second)
						_, err = ours.Write([]byte{c.slowly[i]})
					}
				}()
				_, err := io.Copy(io.Discard, ours)
				took := time.Since(start)
				if err != nil && !errors.Is(err, io.ErrClosedPipe) {
					t.Error(err)
				}
				if took < c.after || took > c.after+time.Second {
					t.Errorf("closed after %s, want %s", took, c.after)
				}
				ours.Close()
				<-wrote
				cancel()
				if err := <-served; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A client that reads a byte a second loses the connection, and one that reads at the pace gets all
// of a long answer.
func TestAClientThatReadsSlowlyLosesTheConnection(t *testing.T) {
	const length, pace = 20 * shares.PaceBytes, shares.PaceBytes / int(shares.PaceTime/time.Second)
	for name, c := range map[string]struct {
		each int // bytes per second
		all  bool
	}{"a byte a second": {1, false}, "the pace, for more than a minute": {pace + 1, false},
		"twice the pace": {2 * pace, true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				l := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
				served := make(chan error, 1)
				go func() {
					served <- daemon.Serve(ctx, l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
						_, _ = w.Write(make([]byte, length))
					}), 100, slog.New(slog.DiscardHandler))
				}()
				ours, theirs := net.Pipe()
				l.conns <- theirs
				if _, err := io.WriteString(ours, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
					t.Fatal(err)
				}
				got, start := 0, time.Now()
				for {
					n, err := io.ReadFull(ours, make([]byte, c.each))
					if got += n; err != nil {
						break
					}
					time.Sleep(time.Second)
				}
				// The whole answer has a minute.
				if got > length != c.all || time.Since(start) > time.Minute+time.Second {
					t.Errorf("%d bytes of %d arrive within %s", got, length, time.Since(start))
				}
				ours.Close()
				cancel()
				if err := <-served; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
