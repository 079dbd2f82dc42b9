package api_test

import (
	"context"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"

	"pgregory.net/rapid"
)

// errorLog counts errors in the log: handlers that panicked, and answers with 500.
type errorLog struct {
	slog.Handler
	last atomic.Value
}

func (l *errorLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn {
		text := r.Message
		r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
		l.last.Store(text)
	}
	return nil
}
func (l *errorLog) Enabled(context.Context, slog.Level) bool { return true }
func (l *errorLog) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *errorLog) WithGroup(string) slog.Handler            { return l }

// strange are values that are invalid in some places.
func strange() []string {
	return []string{
		"", " ", "0", "-1", "+1", "01", "1.5", "1e400", "0x10", "9223372036854775807", "9223372036854775808", "99999999999999999999999",
		"NaN", "null", "true", "*", `"`, `"1"`, `W/"1"`,
		"\x00", "a\x00b", "\xff\xfe", "\xed\xa0\x80", "é", "😀", "\u202e", "\u212a", "a\r\nX-Evil: 1", "%", "%00", "%2F", "a/b", "..", ".",
		"//", "?", "#", ";", "a&b=c", "'; DROP TABLE follows; --",
		"{}", "[]", "{", strings.Repeat("A", 5000), strings.Repeat("9", 400), "00000000-0000-0000-0000-000000000000",
		"FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", "2026-13-01T00:00:00Z", "0001-01-01T00:00:00Z",
		"294277-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999+23:59", "-infinity", "zzzzzzzz", "application/json", "chunked",
	}
}

// strangeJSON are values that replace a value of a body.
func strangeJSON() []string {
	return []string{
		"null", "true", "0", "-1", "1.5", "1e400", "-0", "9223372036854775808", "99999999999999999999999999", "1E2", `""`, `"\u0000"`,
		`"\ud800"`, `"\ud83d\ude00"`, `"*"`, `"0"`, `"9223372036854775807"`, `"9223372036854775808"`,
		"[]", "{}", `[[[[[[[[]]]]]]]]`, strings.Repeat("[", 40) + strings.Repeat("]", 40), strings.Repeat("[", 100000), `{"a":1,"a":2}`,
		`"` + strings.Repeat("x", 17000) + `"`, `"` + strings.Repeat("😀", 100) + `"`,
		"\"\xff\"", "\"\x00\"", "nul", "'x'", "", "//", `"a" "b"`, "\ufeff1",
	}
}

var jsonValue = regexp.MustCompile(`"[^"]*"|\b\d+\b|\btrue\b|\bfalse\b`)

// mutate breaks a body, or leaves it as it is.
func mutate(t *rapid.T, body string) string {
	places := jsonValue.FindAllStringIndex(body, -1)
	if len(places) == 0 {
		return body
	}
	at := rapid.SampledFrom(places).Draw(t, "place")
	value := func() string { return rapid.SampledFrom(strangeJSON()).Draw(t, "value") }
	switch rapid.SampledFrom([]string{"as it is", "value", "member", "twice", "cut", "bytes", "more"}).Draw(t, "mutation") {
	case "value": // or a name
		return body[:at[0]] + value() + body[at[1]:]
	case "member":
		return strings.Replace(body, "{", `{"nope":`+value()+`,`, 1)
	case "twice":
		if first := regexp.MustCompile(`"\w+":("[^"]*"|true)`).FindString(body); first != "" {
			return strings.Replace(body, first, first+","+first, 1)
		}
	case "cut":
		return body[:rapid.IntRange(0, len(body)).Draw(t, "length")]
	case "bytes":
		return body[:at[0]] + string(rapid.SliceOfN(rapid.Byte(), 1, 8).Draw(t, "bytes")) + body[at[0]:]
	case "more":
		return body + value()
	}
	return body
}
