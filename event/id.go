package event

import (
	"errors"
	"fmt"
	"strconv"
)

// MaxIDBytes is the longest ID. The constraints of the tables have the same number.
const MaxIDBytes = 128

// idRule is the rule of ParseID, in words.
const idRule = "1 to 128 of the characters A-Z a-z 0-9 - _ . ~ : @ | + =, but not . or .. alone"

// ID is the id of an object: a person, a post, a group. Upstream services choose it. It may be a
// number, a UUID, or any other text that ParseID accepts. Two ids are the same if their bytes are,
// so 7 and 07 are two ids. The empty ID names no object.
type ID string

// ParseID reads an id: 1 to MaxIDBytes letters and digits of ASCII and the characters - _ . ~ : @ |
// + =, but not . or .., which no path of a URL can have.
func ParseID(s string) (ID, error) {
	if isID(s) {
		return ID(s), nil
	}
	return "", fmt.Errorf("%.140q is not an id: %s", s, idRule)
}

// idCharacters has the characters of ids.
var idCharacters = func() (is [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~:@|+=") {
		is[c] = true
	}
	return is
}()

func isID[S ~string | ~[]byte](s S) bool {
	if len(s) == 0 || len(s) > MaxIDBytes || string(s) == "." || string(s) == ".." {
		return false
	}
	for i := range len(s) {
		if !idCharacters[s[i]] {
			return false
		}
	}
	return true
}

// IDOf returns the id that is a decimal number.
func IDOf[N ~int | ~int64](n N) ID { return ID(strconv.FormatInt(int64(n), 10)) }

func (id ID) String() string { return string(id) }

// UnmarshalText is ParseID with an error that does not quote its input, because errors of payloads
// are logged.
func (id *ID) UnmarshalText(b []byte) error {
	if !isID(b) {
		return errors.New("a value is not an id: " + idRule)
	}
	*id = ID(b)
	return nil
}

// Number is a 64-bit number of Tidings' own, such as the id of a message in the outbox. In JSON it
// is a decimal string, because JavaScript's numbers are exact only up to 2^53.
type Number int64

// ParseNumber reads a decimal number from 1 to 2^63-1, without a sign or leading zeros.
func ParseNumber(s string) (Number, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 || strconv.FormatInt(n, 10) != s {
		return 0, fmt.Errorf("%.40q is not a decimal number from 1 to 9223372036854775807", s)
	}
	return Number(n), nil
}

func (n Number) String() string { return strconv.FormatInt(int64(n), 10) }

// MarshalText encodes the number as a decimal string.
func (n Number) MarshalText() ([]byte, error) { return strconv.AppendInt(nil, int64(n), 10), nil }

// UnmarshalText is ParseNumber.
func (n *Number) UnmarshalText(b []byte) (err error) {
	*n, err = ParseNumber(string(b))
	return err
}
