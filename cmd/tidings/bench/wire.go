package bench

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/tidings/tidings/internal/socket"
)

// wire is one keep-alive connection to the API with a minimal HTTP/1.1 client. The client of
// net/http uses as much processor time as the server, and both share the machine.
type wire struct {
	addr    string
	timeout time.Duration
	conn    net.Conn
	r       *bufio.Reader
	out     []byte
	token   string
}

// answered has the parts of an answer that a load generator needs.
type answered struct {
	status     int
	location   []byte
	writeToken []byte // Tidings-Token
	retryAfter bool
	problem    string // the body of a 4xx or a 5xx
}

func (w *wire) close() {
	if w.conn != nil {
		_ = w.conn.Close() // no request is in flight
		w.conn = nil
	}
}

// send sends one request and reads its answer. After an error the next call opens a new connection.
func (w *wire) send(method, path string, headers string, body []byte) (a answered, err error) {
	if w.conn == nil {
		conn, err := net.DialTimeout("tcp", w.addr, w.timeout)
		if err != nil {
			return a, err
		}
		w.conn = socket.Quiet(conn)
		w.r = bufio.NewReader(w.conn)
	}
	closing := false
	defer func() {
		if err != nil || closing {
			w.close()
		}
	}()
	if err := w.conn.SetDeadline(time.Now().Add(w.timeout)); err != nil {
		return a, err
	}
	w.out = append(w.out[:0], method...)
	w.out = append(append(w.out, ' '), path...)
	w.out = append(append(w.out, " HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer "...), w.token...)
	w.out = append(append(w.out, "\r\n"...), headers...)
	w.out = strconv.AppendInt(append(w.out, "Content-Length: "...), int64(len(body)), 10)
	w.out = append(append(w.out, "\r\n\r\n"...), body...)
	if _, err := w.conn.Write(w.out); err != nil {
		return a, err
	}
	a, closing, err = w.answer()
	return a, err
}

// answer reads an answer. closing: the server ends the connection.
func (w *wire) answer() (a answered, closing bool, err error) {
	line, err := w.r.ReadSlice('\n')
	if err != nil {
		return a, false, err
	}
	if len(line) < len("HTTP/1.1 200") {
		return a, false, fmt.Errorf("the answer begins %q", line)
	}
	if a.status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return a, false, fmt.Errorf("the answer begins %q", line)
	}
	length := -1
	for {
		if line, err = w.r.ReadSlice('\n'); err != nil {
			return a, closing, err
		}
		name, value, _ := bytes.Cut(bytes.TrimRight(line, "\r\n"), []byte(": "))
		switch string(name) {
		case "":
			if length < 0 {
				if a.status != 204 {
					return a, closing, errors.New("the answer has no Content-Length")
				}
				length = 0
			}
			if a.status >= 400 {
				body := make([]byte, length)
				_, err = io.ReadFull(w.r, body)
				a.problem = string(body)
				return a, closing, err
			}
			_, err = io.CopyN(io.Discard, w.r, int64(length))
			return a, closing, err
		case "Content-Length":
			if length, err = strconv.Atoi(string(value)); err != nil {
				return a, closing, err
			}
		case "Location":
			a.location = append(a.location, value...)
		case "Tidings-Token":
			a.writeToken = append(a.writeToken, value...)
		case "Retry-After":
			a.retryAfter = true
		case "Connection":
			closing = string(value) == "close"
		}
	}
}
