package cli

import (
	"fmt"
	"strings"
	"unicode"
)

// isControl reports whether a character may act on a terminal instead of showing: it controls,
// breaks a line, or turns the direction of the text round.
func isControl(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u2028' || r == '\u2029'
}

// visible makes a text safe for a terminal. It replaces characters that may act on one by \uXXXX,
// their form in JSON, and damaged bytes by U+FFFD. Whatever a writer of events chose goes through
// it, or through cell.
func visible(s string) string {
	s = strings.ToValidUTF8(s, string(unicode.ReplacementChar))
	if !strings.ContainsFunc(s, isControl) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if isControl(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// visibleLines is visible for each line of a text.
func visibleLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = visible(lines[i])
	}
	return strings.Join(lines, "\n")
}
