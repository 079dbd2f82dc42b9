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
	"strconv"
)

// Edge leads from From to To. Line is where it was read, from 1; 0 when it was generated.
type Edge struct {
	From, To   int64
	Attributes string // a JSON object; "" for none
	Line       int64
}

// LineError reports a line that is no edge.
type LineError struct {
	Line   int64
	Reason string
}

func (e *LineError) Error() string { return fmt.Sprintf("line %d: %s", e.Line, e.Reason) }

// maxLine is in bytes: two ids need 39, attributes and comments may be longer.
const maxLine = 64 << 10

// Read yields the edges of an edge list: "FROM TO" per line, and the attributes as a JSON object where there are any, separated by tabs or spaces,
// lines ending in LF or CRLF; empty lines and lines that begin with # are passed over. Gzip is told by its content. The first error ends it: a
// *LineError for what is no edge, with noSelf also for an edge from an id to itself, and for damaged gzip data.
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
					reason = fmt.Sprintf("the edge leads from %d to itself", e.From)
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

// parse returns the edge of a trimmed line, or why it is none.
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
		return Edge{}, fmt.Sprintf("want two ids, and attributes as a JSON object where there are any, found %d fields in %.60q", len(fields), text)
	}
	var ids [2]int64
	for i, f := range fields {
		n, err := strconv.ParseUint(string(f), 10, 63)
		if err != nil || n == 0 {
			return Edge{}, fmt.Sprintf("%.40q is not an id: want a number from 1 to 9223372036854775807", f)
		}
		ids[i] = int64(n)
	}
	return Edge{From: ids[0], To: ids[1], Attributes: attributes}, ""
}
