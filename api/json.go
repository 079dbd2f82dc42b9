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
	err := json.Unmarshal(data, v)
	if _, ok := errors.AsType[*json.SyntaxError](err); ok {
		return fmt.Errorf("the text is not JSON: %w", err)
	}
	return err
}

// decodeBody decodes the body of a request. The framework decodes a body twice: into an any, which
// it validates, and then into the value for the handler. The first time is strict.
func decodeBody(data []byte, v any) error {
	switch v := v.(type) {
	case *any:
		return strictJSON(data, v)
	case **json.RawMessage: // the handler decodes it
		if text := bytes.TrimSpace(data); string(text) != "null" {
			*v = new(json.RawMessage(bytes.Clone(text)))
			return nil
		}
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

// maxNesting bounds how deep objects and arrays nest.
const maxNesting = 32

// checkMembers refuses repeated members, names that are not lower case, and values that nest too
// deep. It expects JSON: of other text it refuses only some.
func checkMembers(data []byte) error {
	var around []map[string]bool // the names in each object that has not ended; nil for an array
	isName := false              // the next string is the name of a member
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '{', '[':
			if len(around) == maxNesting {
				return fmt.Errorf("objects and arrays nest more than %d deep", maxNesting)
			}
			var names map[string]bool
			if isName = data[i] == '{'; isName {
				names = make(map[string]bool)
			}
			around = append(around, names)
		case '}', ']':
			around, isName = around[:max(0, len(around)-1)], false
		case ',':
			isName = len(around) > 0 && around[len(around)-1] != nil
		case '"':
			start := i
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
			if !isName {
				continue
			}
			isName = false
			if err := checkName(data[start:min(i+1, len(data))], around[len(around)-1]); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkName checks a member's name, in quotes, and adds it to those of its object.
func checkName(quoted []byte, names map[string]bool) error {
	name := string(bytes.Trim(quoted, `"`))
	if strings.IndexByte(name, '\\') >= 0 {
		if err := json.Unmarshal(quoted, &name); err != nil {
			return fmt.Errorf("the text is not JSON: %w", err)
		}
	}
	if names[name] {
		return fmt.Errorf("the member %.40q is repeated", name)
	}
	names[name] = true
	if strings.IndexFunc(name, func(r rune) bool { return r >= 'A' && r <= 'Z' || r >= utf8.RuneSelf }) >= 0 {
		return fmt.Errorf("the member %.40q is unknown", name)
	}
	return nil
}
