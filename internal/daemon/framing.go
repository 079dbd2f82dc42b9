package daemon

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"sync/atomic"
)

// plainConn watches for requests that can be read in two ways: with Content-Length and with Transfer-Encoding. net/http takes the latter and
// drops the former without a word, and RFC 9112, 6.1, wants the connection closed: a proxy in front that reads by the length would take the rest
// of the one client's body for the request of another.
//
// It does not follow where a body begins and ends, so a body with two such lines ends the connection too. No body of JSON has them.
type plainConn struct {
	net.Conn
	twoWays atomic.Bool

	line            []byte // the first bytes of the line that is coming
	length, chunked bool   // seen since the last empty line
}

const (
	lengthLine = "content-length:"
	codingLine = "transfer-encoding:"
)

// Read is for one goroutine at a time, as the server does.
func (c *plainConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.twoWays.Load() {
		c.watch(b[:n])
	}
	return n, err
}

// CloseWrite lets the server end an answer before it closes the connection.
func (c *plainConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

func (c *plainConn) watch(b []byte) {
	for len(b) > 0 {
		end := bytes.IndexByte(b, '\n')
		part := b
		if end >= 0 {
			part = b[:end]
		}
		c.line = append(c.line, part[:min(len(part), len(codingLine)-len(c.line))]...)
		if end < 0 {
			return
		}
		switch {
		case len(c.line) == 0, string(c.line) == "\r":
			c.length, c.chunked = false, false
		case begins(c.line, lengthLine):
			c.length = true
		case begins(c.line, codingLine):
			c.chunked = true
		}
		if c.length && c.chunked {
			c.twoWays.Store(true)
			return
		}
		c.line, b = c.line[:0], b[end+1:]
	}
}

func begins(line []byte, name string) bool {
	return len(line) >= len(name) && bytes.EqualFold(line[:len(name)], []byte(name))
}

type connKey struct{}

// withConn tells the handlers which connection their request is on.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// framed refuses requests that can be read in two ways, and makes one with chunks the last of its connection: behind TLS nobody sees whether it
// had a length too.
func framed(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor == 1 && len(r.TransferEncoding) > 0 {
			w.Header().Set("Connection", "close")
		}
		if c, ok := r.Context().Value(connKey{}).(*plainConn); ok && c.twoWays.Load() {
			w.Header().Set("Connection", "close")
			http.Error(w, "400 Bad Request: Content-Length and Transfer-Encoding", http.StatusBadRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}
