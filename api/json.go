package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// strictJSON decodes one JSON value. It refuses input that encoding/json accepts: invalid UTF-8 and
// lone surrogates (encoding/json replaces them), repeated members (it takes the last), member names
// in another case (it ignores the case), and text after the value. Every member name of this API is
// lower case.
func strictJSON(data []byte, v any) error {
	if !utf8.Valid(data) {
		return errors.New("the text is not valid UTF-8")
	}
	if err := checkEscapes(data); err != nil {
		return err
	}
	if err := checkMembers(data); err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// decodeBody decodes the body of a request. The framework decodes a body twice: into an any, which
// it validates, and then into the value for the handler. The first time is strict.
func decodeBody(data []byte, v any) error {
	if _, first := v.(*any); first {
		return strictJSON(data, v)
	}
	return json.Unmarshal(data, v)
}

// checkEscapes refuses halves of surrogate pairs. A backslash outside a string is a syntax error,
// which a later check finds.
func checkEscapes(data []byte) error {
	unit := func(i int) (rune, bool) {
		if i+6 > len(data) || data[i] != '\\' || data[i+1] != 'u' {
			return 0, false
		}
		n, err := strconv.ParseUint(string(data[i+2:i+6]), 16, 16)
		return rune(n), err == nil
	}
	for i := 0; i < len(data); i++ {
		if data[i] != '\\' {
			continue
		}
		if r, ok := unit(i); ok && utf16.IsSurrogate(r) {
			if low, ok := unit(i + 6); !ok || utf16.DecodeRune(r, low) == utf8.RuneError {
				return fmt.Errorf("the escape \\u%04x is half of a pair", r)
			}
			i += 11
			continue
		}
		i++ // skip the escaped character
	}
	return nil
}

func checkMembers(data []byte) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if err := walk(dec, 0); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("there is text after the value")
	}
	return nil
}

// maxNesting bounds the recursion of walk.
const maxNesting = 32

func walk(dec *json.Decoder, depth int) error {
	if depth > maxNesting {
		return fmt.Errorf("values nest more than %d deep", maxNesting)
	}
	t, err := dec.Token()
	if err != nil {
		return fmt.Errorf("the text is not JSON: %w", err)
	}
	open, _ := t.(json.Delim)
	if open != '{' && open != '[' {
		return nil
	}
	seen := make(map[string]bool)
	for dec.More() {
		if open == '{' {
			t, err := dec.Token()
			if err != nil {
				return fmt.Errorf("the text is not JSON: %w", err)
			}
			name, _ := t.(string)
			if seen[name] {
				return fmt.Errorf("the member %.40q is repeated", name)
			}
			seen[name] = true
			if strings.IndexFunc(name, func(r rune) bool { return r >= 'A' && r <= 'Z' || r >= utf8.RuneSelf }) >= 0 {
				return fmt.Errorf("the member %.40q is unknown", name)
			}
		}
		if err := walk(dec, depth+1); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return fmt.Errorf("the text is not JSON: %w", err)
	}
	return nil
}
