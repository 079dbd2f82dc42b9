package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// codec reads and writes the JSON of T. The tags of T have the names of its members. A kind has
// names of its own for the first two of them.
type codec[T any] struct {
	members []member
	fields  func(*T) []any // pointers to the fields of T, in their order
}

type member struct {
	name string
	omit bool // absent if it is empty
}

// newCodec reads the tags of T.
func newCodec[T any](fields func(*T) []any) codec[T] {
	c, v := codec[T]{fields: fields}, new(T)
	if len(fields(v)) != reflect.TypeFor[T]().NumField() {
		panic("event: the codec of " + reflect.TypeFor[T]().Name() + " lacks a field")
	}
	for i, p := range fields(v) {
		f := reflect.TypeFor[T]().Field(i)
		if p != reflect.ValueOf(v).Elem().Field(i).Addr().Interface() {
			panic("event: the fields of " + f.Name + "'s struct are in another order")
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		c.members = append(c.members, member{name, options == "omitempty"})
	}
	return c
}

// name returns the name of a member. The names of the first two are the kind's.
func (c codec[T]) name(i int, first, second string) string {
	switch i {
	case 0:
		return first
	case 1:
		return second
	}
	return c.members[i].name
}

// encode writes v like encoding/json.
func (c codec[T]) encode(v T, first, second string) ([]byte, error) {
	out := append(make([]byte, 0, 512), '{')
	for i, p := range c.fields(&v) {
		start := len(out)
		if start > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, '"'), c.name(i, first, second)...), `":`...)
		var empty bool
		var err error
		if out, empty, err = appendValue(out, p); err != nil {
			return nil, err
		}
		if empty && c.members[i].omit {
			out = out[:start]
		}
	}
	return append(out, '}'), nil
}

// appendValue writes the value that p points to, and reports whether it is empty.
func appendValue(out []byte, p any) (_ []byte, empty bool, err error) {
	switch p := p.(type) {
	case *ID:
		if isPlain(string(*p)) {
			return append(append(append(out, '"'), *p...), '"'), *p == "", nil
		}
	case *Time:
		return append(p.UTC().AppendFormat(append(out, '"'), TimeFormat), '"'), false, nil
	case *int64:
		return strconv.AppendInt(out, *p, 10), *p == 0, nil
	case *bool:
		return strconv.AppendBool(out, *p), !*p, nil
	case *string:
		if isPlain(*p) {
			return append(append(append(out, '"'), *p...), '"'), *p == "", nil
		}
	case *json.RawMessage:
		empty = len(*p) == 0
	}
	text, err := json.Marshal(p)
	return append(out, text...), empty, err
}

// isPlain reports whether the JSON of a text is the text in quotes.
func isPlain(text string) bool {
	for _, c := range []byte(text) {
		if c < ' ' || c >= utf8.RuneSelf || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			return false
		}
	}
	return true
}

// decode reads v like encoding/json: it ignores the case of names and skips unknown members, and
// the last of several members of a name counts.
func (c codec[T]) decode(text []byte, first, second string) (v T, err error) {
	fields, next := c.fields(&v), 0
	for name, value := range members(text, &err) {
		for range fields { // most members come in their order
			i := next
			if next++; next == len(fields) {
				next = 0
			}
			if is := c.name(i, first, second); string(name) == is || strings.EqualFold(string(name), is) {
				if err := readValue(value, fields[i]); err != nil {
					return *new(T), fmt.Errorf("the member %s: %w", is, err)
				}
				break
			}
		}
	}
	if err != nil {
		return *new(T), err
	}
	return v, nil
}

// readValue reads a valid JSON value into what p points to.
func readValue(value []byte, p any) error {
	text, simple := value, len(value) >= 2 && value[0] == '"'
	if simple {
		text = value[1 : len(value)-1]
		for _, c := range text {
			simple = simple && c != '\\' && c < utf8.RuneSelf
		}
	}
	switch p := p.(type) {
	case *ID:
		if simple {
			return p.UnmarshalText(text)
		}
	case *Time:
		return p.UnmarshalJSON(value)
	case *string:
		if simple {
			*p = string(text)
			return nil
		}
	case *int64:
		if n, err := strconv.ParseInt(string(value), 10, 64); err == nil {
			*p = n
			return nil
		}
	}
	return json.Unmarshal(value, p)
}

// members returns the names and the values of the members of a JSON object. null has none. For any
// other text it sets err.
func members(text []byte, err *error) iter.Seq2[[]byte, json.RawMessage] {
	return func(yield func([]byte, json.RawMessage) bool) {
		if !json.Valid(text) {
			*err = json.Unmarshal(text, new(any))
			return
		}
		at := skipSpace(text, 0)
		if text[at] != '{' {
			if text[at] != 'n' {
				*err = errors.New("the text is not a JSON object")
			}
			return
		}
		for at = skipSpace(text, at+1); text[at] != '}'; {
			end := valueEnd(text, at)
			name := text[at+1 : end-1]
			if bytes.IndexByte(name, '\\') >= 0 {
				var plain string
				_ = json.Unmarshal(text[at:end], &plain) // it is valid
				name = []byte(plain)
			}
			at = skipSpace(text, skipSpace(text, end)+1)
			end = valueEnd(text, at)
			if !yield(name, text[at:end:end]) {
				return
			}
			if at = skipSpace(text, end); text[at] == ',' {
				at = skipSpace(text, at+1)
			}
		}
	}
}

// skipSpace returns the place of the first byte from at on that is no space.
func skipSpace(text []byte, at int) int {
	for text[at] == ' ' || text[at] == '\n' || text[at] == '\t' || text[at] == '\r' {
		at++
	}
	return at
}

// valueEnd returns the place after the value at this place of a valid JSON object.
func valueEnd(text []byte, at int) int {
	for depth := 0; ; at++ {
		switch text[at] {
		case '"':
			for at++; text[at] != '"'; at++ {
				if text[at] == '\\' {
					at++
				}
			}
		case '{', '[':
			depth++
			continue
		case '}', ']', ',', ' ', '\n', '\t', '\r':
			if depth == 0 {
				return at // after a number, true, false or null
			}
			if text[at] != '}' && text[at] != ']' {
				continue
			}
			depth--
		default:
			continue
		}
		if depth == 0 {
			return at + 1
		}
	}
}
