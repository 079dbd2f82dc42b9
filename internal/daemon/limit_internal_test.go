package daemon

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"
)

func TestConnectionsBeyondTheLimitWaitForOneToEnd(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	answer := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	go func() { ended <- serve(ctx, l, answer, slog.New(slog.DiscardHandler), 2) }()
	ask := func(c net.Conn) chan error {
		got := make(chan error, 1)
		go func() {
			_, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
			if err == nil {
				var resp *http.Response
				if resp, err = http.ReadResponse(bufio.NewReader(c), nil); err == nil {
					err = resp.Body.Close()
				}
			}
			got <- err
		}()
		return got
	}
	var conns []net.Conn
	for range 4 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // again
		conns = append(conns, c)
	}
	for _, c := range conns[:2] {
		if err := <-ask(c); err != nil {
			t.Fatal(err)
		}
	}
	third := ask(conns[2])
	select {
	case err := <-third:
		t.Fatalf("the third connection is answered: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if err := conns[0].Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-third; err != nil {
		t.Error(err)
	}
	cancel() // while the fourth waits
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
