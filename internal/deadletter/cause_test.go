package deadletter

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestOneReasonIsOneCause(t *testing.T) {
	for _, c := range []struct{ err, want string }{
		{"version 2 is refused", "version # is refused"},
		{"no token", "no token"},
		{"", ""},
		{"  two\n\tlines  ", "two lines"},
		{`ERROR: duplicate key value violates unique constraint "edges_key" (SQLSTATE 23505)`,
			`ERROR: duplicate key value violates unique constraint "…" (SQLSTATE 23505)`},
		{`invalid input syntax for type bigint: "9\"x" (SQLSTATE 22P02)`, `invalid input syntax for type bigint: "…" (SQLSTATE 22P02)`},
		{"event 0190b5a2-7c1e-8abc-9def-0123456789AB is a comment.edited.v7", "event <uuid> is a comment.edited.v#"},
		{"dial tcp 10.0.0.7:4222: i/o timeout after 1.5s", "dial tcp #: i/o timeout after #s"},
		{"message 18446744073709551615 of stream EVENTS-3", "message # of stream EVENTS-#"},
		{"hash 9f86d081884c7d65 at 0xc000123abc", "hash <hex> at <hex>"},
		{"it can't be read: user's name 'Ann O''Hara' isn't", `it can't be read: user's name "…""…" isn't`},
		{"key `a b` and “c d”", `key "…" and "…"`},
		{"decade ed25519 utf8", "decade ed# utf#"},
		{"an \"open quote of 5", `an "open quote of #`},
		{"bad \xff byte\x00", "bad byte"},
	} {
		got := Cause(c.err)
		if got != c.want {
			t.Errorf("Cause(%q) = %q, want %q", c.err, got, c.want)
		}
		if again := Cause(got); again != got {
			t.Errorf("Cause(%q) = %q: want no further change", got, again)
		}
	}
}

func FuzzCause(f *testing.F) {
	f.Add(`x "1" 0xff 0190b5a2-7c1e-8abc-9def-0123456789ab 'a'`)
	f.Add(strings.Repeat("é1 ", 2000))
	f.Fuzz(func(t *testing.T, s string) {
		c := Cause(s)
		if !utf8.ValidString(c) || utf8.RuneCountInString(c) > maxCauseRunes || strings.ContainsAny(c, "\n\x00") {
			t.Errorf("Cause(%q) = %q", s, c)
		}
	})
}
