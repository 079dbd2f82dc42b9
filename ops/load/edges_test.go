package load

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/client"
)

func zip(t *testing.T, s string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := io.WriteString(z, s); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestRead(t *testing.T) {
	large, longest := strings.Repeat("# filler\n", 20_000), strings.Repeat("x", 128)
	for _, c := range []struct {
		name, in string
		want     []Edge
		line     int64  // of the error; 0 for none
		reason   string // part of it
	}{
		{name: "nothing", in: ""},
		{name: "tabs, LF", in: "1\t2\n3\t4\n", want: []Edge{{"1", "2", "", 1}, {"3", "4", "", 2}}},
		{name: "spaces, CRLF", in: "1 2\r\n 3   4 \r\n", want: []Edge{{"1", "2", "", 1}, {"3", "4", "", 2}}},
		{name: "no newline at the end", in: "1 2\n3 4", want: []Edge{{"1", "2", "", 1}, {"3", "4", "", 2}}},
		{name: "comments and empty lines count as lines", in: "# x\r\n\r\n \n1 2\n#1 2\n", want: []Edge{{"1", "2", "", 4}}},
		{name: "a byte order mark", in: "\xef\xbb\xbf1 2\n", want: []Edge{{"1", "2", "", 1}}},
		{name: "the longest id", in: "1 " + longest + "\n", want: []Edge{{"1", client.ID(longest), "", 1}}},
		{name: "gzip", in: zip(t, "1 2\n"), want: []Edge{{"1", "2", "", 1}}},
		{name: "gzip in several members", in: zip(t, "1 2\n") + zip(t, "3 4\n"), want: []Edge{{"1", "2", "", 1}, {"3", "4", "", 2}}},
		{name: "one id", in: "1 2\n3\n", want: []Edge{{"1", "2", "", 1}}, line: 2, reason: "want two ids"},
		{name: "three ids", in: "1 2 3\n", line: 1, reason: "want two ids"},
		{name: "attributes", in: "1 2 {\"a\": 1}\r\n3 4\t{}\n", want: []Edge{{"1", "2", `{"a": 1}`, 1}, {"3", "4", "{}", 2}}},
		{name: "half an object", in: "1 2 {\"a\":\n", line: 1, reason: "is not a JSON object"},
		{name: "attributes of one id", in: "1 {}\n", line: 1, reason: "want two ids"},
		{name: "ids of every form", in: "auth0|5f7c-12 a.b@example.com\n0 -1\n+2 9223372036854775808\n7 07\n",
			want: []Edge{{"auth0|5f7c-12", "a.b@example.com", "", 1}, {"0", "-1", "", 2}, {"+2", "9223372036854775808", "", 3},
				{"7", "07", "", 4}}},
		{name: "a path", in: "1 x/y\n", line: 1, reason: `"x/y" is not an id`},
		{name: "two dots", in: ".. 1\n", line: 1, reason: "not an id"},
		{name: "a letter that is not ASCII", in: "1 \u00e9\n", line: 1, reason: "not an id"},
		{name: "129 bytes", in: "1 " + strings.Repeat("x", 129) + "\n", line: 1, reason: "not an id"},
		{name: "an edge to itself", in: "7 7\n", line: 1, reason: "the edge leads from 7 to itself"},
		{name: "bytes that are not text", in: "1 2\n\x00\xff 3\n", want: []Edge{{"1", "2", "", 1}}, line: 2, reason: "not an id"},
		{name: "a line without end", in: "# c\n" + strings.Repeat("1", maxLine+1), line: 2, reason: "longer than"},
		{name: "gzip cut short", in: zip(t, large+"1 2\n")[:60], line: 1, reason: "damaged"},
		{name: "gzip with a wrong header", in: "\x1f\x8bxxxxxxxxxxxx", line: 1, reason: "damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []Edge
			var failed error
			for e, err := range Read(strings.NewReader(c.in), true) {
				if err != nil {
					failed = err
					continue
				}
				got = append(got, e)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
			var line *LineError
			switch {
			case c.line == 0 && failed != nil:
				t.Errorf("error %v", failed)
			case c.line == 0:
			case !errors.As(failed, &line):
				t.Errorf("error %v: want one of line %d", failed, c.line)
			case c.reason != "damaged" && line.Line != c.line || !strings.Contains(line.Reason, c.reason):
				t.Errorf("error %v: want line %d, %s", failed, c.line, c.reason)
			}
		})
	}
}

func TestReadStopsWhenAsked(t *testing.T) {
	for e, err := range Read(strings.NewReader("7 7\n3 4\nx"), false) {
		if err != nil || e.From != e.To {
			t.Errorf("%+v, %v", e, err)
		}
		break
	}
}
