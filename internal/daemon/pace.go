package daemon

import (
	"io"
	"net/http"
	"time"

	"github.com/tidings/tidings/internal/shares"
)

// enforcePace ends the connection of a client that sends its body or reads its answer more slowly
// than shares.PaceBytes within shares.PaceTime. Deadlines that the handler sets with
// http.ResponseController bound the whole body and the whole answer. One goroutine at a time reads,
// and one writes.
func enforcePace(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		p := &pacedWriter{ResponseWriter: w, control: http.NewResponseController(w), answered: start.Add(writeTimeout)}
		if r.ContentLength != 0 {
			b := &pacedBody{ReadCloser: r.Body, control: p.control, arrived: start.Add(readTimeout)}
			b.move()   // it also bounds a body that no handler reads
			b.left = 0 // a handler may begin to read later: its first piece begins then
			p.body = b
			r = r.WithContext(r.Context()) // the server reads its request's own body to decide what to do with the rest
			r.Body = b
		}
		h.ServeHTTP(p, r)
	})
}

// earlier returns the earlier of the end of a piece that begins now and takes d, and the end of
// all. A zero end sets no limit.
func earlier(end time.Time, d time.Duration) time.Time {
	piece := time.Now().Add(d)
	if !end.IsZero() && end.Before(piece) {
		return end
	}
	return piece
}

type pacedBody struct {
	io.ReadCloser
	control *http.ResponseController
	arrived time.Time // when the whole body must have arrived
	left    int       // bytes until the deadline moves
}

func (b *pacedBody) move() {
	b.left = shares.PaceBytes
	_ = b.control.SetReadDeadline(earlier(b.arrived, shares.PaceTime)) // only the writer of a test has no deadline
}

// Read reads until the deadline of the current piece.
func (b *pacedBody) Read(to []byte) (int, error) {
	if b.left <= 0 {
		b.move()
	}
	n, err := b.ReadCloser.Read(to)
	b.left -= n
	if err == io.EOF {
		// The server reads on, to learn whether the client has gone. That read must not end with
		// the pace.
		_ = b.control.SetReadDeadline(b.arrived)
	}
	return n, err
}

type pacedWriter struct {
	http.ResponseWriter
	control  *http.ResponseController
	body     *pacedBody // nil: the request has none
	answered time.Time  // when the whole answer must have been sent
	own      bool       // the handler has set answered
}

// Write writes piece by piece, each with a deadline of its own.
func (w *pacedWriter) Write(b []byte) (n int, err error) {
	for {
		piece := b[n:min(len(b), n+shares.PaceBytes)]
		_ = w.control.SetWriteDeadline(earlier(w.answered, shares.PaceTime))
		var wrote int
		wrote, err = w.ResponseWriter.Write(piece)
		if n += wrote; err != nil || n == len(b) {
			break
		}
	}
	// The server sends what it still buffers after the handler, and after the rest of a body that
	// nobody read. That rest has PaceTime too. A handler with a deadline of its own may work for
	// longer than a piece may take, and HTTP/2 ends a stream at its deadline.
	last := earlier(w.answered, 2*shares.PaceTime)
	if w.own {
		last = w.answered
	}
	_ = w.control.SetWriteDeadline(last)
	return n, err
}

// SetWriteDeadline sets when the whole answer must have been sent.
func (w *pacedWriter) SetWriteDeadline(t time.Time) error {
	w.answered, w.own = t, true
	return w.control.SetWriteDeadline(t)
}

// SetReadDeadline sets when the whole body must have arrived. A zero time ends the pace: nothing
// more is read.
func (w *pacedWriter) SetReadDeadline(t time.Time) error {
	if w.body == nil || t.IsZero() {
		return w.control.SetReadDeadline(t)
	}
	w.body.arrived = t
	return w.control.SetReadDeadline(earlier(t, shares.PaceTime))
}

// Unwrap lets http.ResponseController find the connection.
func (w *pacedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
