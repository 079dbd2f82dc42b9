package deadletter

import (
	"regexp"
	"strings"
	"unicode/utf8"
)

const (
	maxErrorBytes = 2000 // bytes of an error that Cause reads
	maxCauseRunes = 200
)

// varyingPart matches the parts that differ from one event to the next. It also matches SQLSTATE
// codes, which Cause keeps.
var varyingPart = regexp.MustCompile(`SQLSTATE [0-9A-Z]{5}` + // kept
	`|"(?:[^"\\]|\\.)*"|` + "`[^`]*`" + `|“[^”]*”|\B'(?:[^'\\]|\\.)*'\B` + // quoted
	`|(?i:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})` +
	`|\b0[xX][0-9a-fA-F]+\b|\b[0-9a-f]*[0-9][0-9a-f]*[a-f][0-9a-f]*\b|\b[0-9a-f]*[a-f][0-9a-f]*[0-9][0-9a-f]*\b` +
	`|[0-9]+(?:[.,:][0-9]+)*`)

// minHex is the least number of hexadecimal digits of a number. A shorter word may be a name, for
// example ed25.
const minHex = 8

var digits = regexp.MustCompile(`[0-9]+(?:[.,:][0-9]+)*`)

// Cause returns the error without the parts that differ from one event to the next, so letters that
// failed for one reason have one cause. It replaces a number by #, a UUID by <uuid>, a hexadecimal
// number by <hex> and a quotation by "…". The result is one line of valid UTF-8 with at most 200
// characters.
func Cause(err string) string {
	if len(err) > maxErrorBytes {
		err = err[:maxErrorBytes]
	}
	err = strings.Join(strings.Fields(strings.ReplaceAll(strings.ToValidUTF8(err, ""), "\x00", "")), " ")
	err = varyingPart.ReplaceAllStringFunc(err, func(s string) string {
		switch {
		case strings.HasPrefix(s, "SQLSTATE "):
			return s
		case strings.HasPrefix(s, "“") || strings.IndexByte("\"`'", s[0]) >= 0:
			return `"…"`
		case len(s) == 36 && strings.Count(s, "-") == 4:
			return "<uuid>"
		case strings.HasPrefix(s, "0x") || strings.HasPrefix(s, "0X") || len(s) >= minHex && strings.ContainsAny(s, "abcdef"):
			return "<hex>"
		}
		return digits.ReplaceAllString(s, "#")
	})
	if utf8.RuneCountInString(err) > maxCauseRunes {
		err = string([]rune(err)[:maxCauseRunes])
	}
	return err
}
