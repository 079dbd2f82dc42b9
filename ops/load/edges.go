package load

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"

	"github.com/tidings/tidings/client"
)

// Edge leads from From to To. Line is its line in the input, from 1, or 0 if it was generated.
type Edge struct {
	From, To   client.ID
	Attributes string // a JSON object; "" for none
	Line       int64
}

// LineError reports a line that is not an edge.
type LineError struct {
	Line   int64
	Reason string
}

func (e *LineError) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Reason) }

// maxLine is the limit of a line in bytes: two ids need 39 bytes, attributes and comments may be
// longer.
const maxLine = 64 << 10

// Read yields the edges of an edge list. Each line is "FROM TO", and the attributes as a JSON
// object if there are any, separated by tabs or spaces. Lines end in LF or CRLF. Read skips empty
// lines and lines that begin with #. It recognizes gzip by its content. The first error ends the
// sequence. A line that is not an edge and damaged gzip data are a *LineError. With noSelf, so is
// an edge from an id to itself.
func Read(r io.Reader, noSelf bool) iter.Seq2[Edge, error] {
	return func(yield func(Edge, error) bool) {
		in := bufio.NewReaderSize(r, maxLine)
		if magic, err := in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
			z, err := gzip.NewReader(in)
			if err != nil {
				yield(Edge{}, readError(1, err))
				return
			}
			in = bufio.NewReaderSize(z, maxLine)
		}
		for line := int64(1); ; line++ {
			text, err := in.ReadSlice('\n')
			if err != nil && err != io.EOF {
				yield(Edge{}, readError(line, err))
				return
			}
			if line == 1 {
				text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) // the byte order mark that some editors write
			}
			text = bytes.Trim(text, " \t\r\n")
			if len(text) > 0 && text[0] != '#' {
				e, reason := parse(text)
				if reason == "" && noSelf && e.From == e.To {
					reason = fmt.Sprintf("the edge leads from %s to itself", e.From)
				}
				if reason != "" {
					yield(Edge{}, &LineError{line, reason})
					return
				}
				e.Line = line
				if !yield(e, nil) {
					return
				}
			}
			if err == io.EOF {
				return
			}
		}
	}
}

func readError(line int64, err error) error {
	var corrupt flate.CorruptInputError
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return &LineError{line, fmt.Sprintf("longer than %d bytes", maxLine)}
	case errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &corrupt):
		return &LineError{line, fmt.Sprintf("the gzip data is damaged here: %v", err)}
	}
	return fmt.Errorf("read line %d: %w", line, err)
}

// parse returns the edge of a trimmed line, or the reason why it is not an edge.
func parse(text []byte) (Edge, string) {
	attributes := ""
	if at := bytes.IndexByte(text, '{'); at > 0 {
		text, attributes = text[:at], string(text[at:])
		var object map[string]any
		if err := json.Unmarshal([]byte(attributes), &object); err != nil {
			return Edge{}, fmt.Sprintf("%.60q is not a JSON object", attributes)
		}
	}
	fields := bytes.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == '\t' })
	if len(fields) != 2 {
		return Edge{}, fmt.Sprintf("want two ids, then perhaps attributes as a JSON object: got %.60q", text)
	}
	var ids [2]client.ID
	for i, f := range fields {
		id, err := client.ParseID(string(f))
		if err != nil {
			return Edge{}, err.Error()
		}
		ids[i] = id
	}
	return Edge{From: ids[0], To: ids[1], Attributes: attributes}, ""
}
