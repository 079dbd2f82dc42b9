package daemon

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"sync/atomic"
)

// plainConn detects requests with both Content-Length and Transfer-Encoding. net/http uses the
// latter and silently ignores the former. RFC 9112, section 6.1, wants the connection closed. A
// proxy in front that uses the length would otherwise pass the rest of one client's body on as the
// request of another client.
//
// plainConn does not parse bodies. So a body that contains two such lines also ends the connection;
// a JSON body has no such lines.
type plainConn struct {
	net.Conn
	twoWays atomic.Bool

	line            []byte // the first bytes of the current line
	length, chunked bool   // seen since the last empty line
}

const (
	lengthLine = "content-length:"
	codingLine = "transfer-encoding:"
)

// Read reads from the connection and inspects the bytes. The server calls it from one goroutine at
// a time.
func (c *plainConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if !c.twoWays.Load() {
		c.watch(b[:n])
	}
	return n, err
}

// CloseWrite lets the server finish a response before it closes the connection.
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

// withConn makes the connection of a request available to handlers.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// framed refuses requests with both headers. It also closes the connection after a request with
// chunks, because behind TLS plainConn cannot see whether the request also had a length.
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
