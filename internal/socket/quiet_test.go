package socket_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/socket"
)

// pair returns both ends of a connection.
func pair(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return socket.Quiet(a), socket.Quiet(b)
}

// TestBytesArrive sends more than the sockets hold, in pieces of several sizes, while the reader
// starts late. The large pieces take the usual way.
func TestBytesArrive(t *testing.T) {
	for _, size := range []int{1, 1000, 64 << 10, 1 << 20} {
		a, b := pair(t)
		want := make([]byte, min(16<<20, size*10_000))
		_, _ = rand.Read(want)
		var g errgroup.Group
		g.Go(func() error {
			for at := 0; at < len(want); at += size {
				if n, err := a.Write(want[at:min(at+size, len(want))]); err != nil || n == 0 {
					return err
				}
			}
			return a.Close()
		})
		var got bytes.Buffer
		buffer := make([]byte, size)
		for {
			n, err := b.Read(buffer)
			got.Write(buffer[:n])
			if err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("pieces of %d: %v", size, err)
				}
				break
			}
		}
		if err := g.Wait(); err != nil || !bytes.Equal(got.Bytes(), want) {
			t.Errorf("pieces of %d: %d bytes of %d arrive, or others: %v", size, got.Len(), len(want), err)
		}
	}
}

func TestErrorsAreThoseOfTCP(t *testing.T) {
	piece := make([]byte, 1000)
	t.Run("a deadline of a read", func(t *testing.T) {
		a, _ := pair(t)
		if err := a.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		_, err := a.Read(piece)
		var timeout net.Error
		if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("the read returns %v", err)
		}
	})
	t.Run("a deadline of a write to a peer that does not read", func(t *testing.T) {
		a, _ := pair(t)
		if err := a.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		var err error
		for err == nil {
			_, err = a.Write(piece)
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the write returns %v", err)
		}
	})
	t.Run("a connection that is closed during a read", func(t *testing.T) {
		a, _ := pair(t)
		read := make(chan error)
		go func() {
			_, err := a.Read(piece)
			read <- err
		}()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-read; !errors.Is(err, net.ErrClosed) {
			t.Errorf("the read returns %v", err)
		}
	})
	t.Run("a peer that is gone", func(t *testing.T) {
		a, b := pair(t)
		if _, err := a.Write(piece); err != nil {
			t.Fatal(err)
		}
		if err := b.Close(); err != nil { // unread bytes reset the connection
			t.Fatal(err)
		}
		_, err := a.Read(piece)
		var op *net.OpError
		if !errors.Is(err, syscall.ECONNRESET) || !errors.As(err, &op) || op.Op != "read" || op.Addr.String() != a.RemoteAddr().String() {
			t.Errorf("the read returns %v", err)
		}
		for err = nil; err == nil; {
			_, err = a.Write(piece)
		}
		if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the write returns %v", err)
		}
	})
}
