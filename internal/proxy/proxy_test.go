package proxy_test

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/proxy"
)

// TestADelayIsThatOfAWire sends chunks back to back to an echo. Each way takes the delay, and the
// chunks share it: one after the other they would take a hundred times as long.
func TestADelayIsThatOfAWire(t *testing.T) {
	t.Parallel()
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		if c, err := echo.Accept(); err == nil {
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	p, err := proxy.Start(echo.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	const delay, chunks, size = 100 * time.Millisecond, 100, 32 << 10 // size of the proxy's reads
	p.Slow(delay)
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	go func() {
		for range chunks {
			if _, err := c.Write(make([]byte, size)); err != nil {
				return // the read below fails
			}
		}
	}()
	first := make([]byte, 1)
	if _, err := io.ReadFull(c, first); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 2*delay {
		t.Errorf("the first byte came back after %s: want %s or more", took, 2*delay)
	}
	if _, err := io.CopyN(io.Discard, c, chunks*size-1); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > chunks*delay/2 {
		t.Errorf("%d chunks came back after %s: each waited for the one before", chunks, took)
	}
}
