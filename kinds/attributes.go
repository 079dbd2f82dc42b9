package kinds

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"slices"
	"strings"
	"unicode/utf8"
)

// AttributeError reports attributes that do not fit their kind. Fields is ordered by pointer.
type AttributeError struct{ Fields []FieldError }

// FieldError describes the error at one place. Pointer is a JSON pointer (RFC 6901) into the
// attributes; "" is the whole.
type FieldError struct{ Pointer, Detail string }

func (e *AttributeError) Error() string {
	var all []string
	for _, f := range e.Fields {
		all = append(all, strings.TrimSpace(f.Pointer+" "+f.Detail))
	}
	return "attributes: " + strings.Join(all, "; ")
}

func attributeError(pointer, format string, args ...any) *AttributeError {
	return &AttributeError{[]FieldError{{pointer, fmt.Sprintf(format, args...)}}}
}

// Check returns the attributes of an edge in their only form: with defaults, and with members
// ordered by name. Nil means no attributes. Check returns nil for a kind without attributes. An
// error is an *AttributeError.
func (e Edge) Check(raw json.RawMessage) (json.RawMessage, error) {
	return attributes(e.Attributes).check(raw)
}

// Patch merges change over the present attributes, and then does the same as Check. Null removes an
// attribute or restores its default (RFC 7396).
func (e Edge) Patch(present, change json.RawMessage) (json.RawMessage, error) {
	return attributes(e.Attributes).patch(present, change)
}

// Schema returns the JSON Schema of the attributes, for contracts. The caller may change it.
func (e Edge) Schema() map[string]any { return schema(e.Attributes) }

// Check validates raw, fills in defaults and sorts the members by name. Nil means no attributes,
// and a kind without attributes returns nil. An error is an *AttributeError.
func (c Child) Check(raw json.RawMessage) (json.RawMessage, error) {
	return attributes(c.Attributes).check(raw)
}

// Patch is Edge.Patch for a child.
func (c Child) Patch(present, change json.RawMessage) (json.RawMessage, error) {
	return attributes(c.Attributes).patch(present, change)
}

// Schema is Edge.Schema for a child.
func (c Child) Schema() map[string]any { return schema(c.Attributes) }

// schema returns the attributes as JSON Schema, draft 2020-12.
func schema(all map[string]Attribute) map[string]any {
	properties, required := map[string]any{}, []any{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		p := map[string]any{"type": a.Type}
		if len(a.Enum) > 0 {
			p["enum"] = slices.Clone(a.Enum)
		}
		if a.Default != nil {
			p["default"] = a.Default
		}
		if a.Type == Integer {
			p["minimum"], p["maximum"] = a.bounds()
		}
		if a.MaxLength > 0 {
			p["maxLength"] = int64(a.MaxLength)
		}
		if a.Required {
			required = append(required, name)
		}
		properties[name] = p
	}
	s := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		s["required"] = required
	}
	return s
}

// attributes are the attributes of a kind.
type attributes map[string]Attribute

// fits returns an error if v is not a valid value of the attribute.
func (all attributes) fits(name string, v any) error {
	text, err := json.Marshal(map[string]any{name: v})
	if err != nil {
		return fmt.Errorf("%v is not a value", v)
	}
	_, err = all.form(text)
	var bad *AttributeError
	if errors.As(err, &bad) {
		for _, f := range bad.Fields {
			if f.Pointer == "/"+name {
				return errors.New(f.Detail)
			}
		}
	}
	return nil
}

func (all attributes) check(raw json.RawMessage) (json.RawMessage, error) {
	if len(raw) == 0 {
		raw = json.RawMessage(`{}`)
	}
	return all.form(raw)
}

func (all attributes) patch(present, change json.RawMessage) (json.RawMessage, error) {
	values := map[string]json.RawMessage{}
	for i, raw := range []json.RawMessage{present, change} {
		var over map[string]json.RawMessage
		if len(raw) == 0 {
			continue
		}
		if err := json.Unmarshal(raw, &over); err != nil || over == nil {
			return nil, attributeError("", "expected object")
		}
		for name, v := range over {
			if i == 1 && string(v) == "null" {
				delete(values, name)
			} else {
				values[name] = v
			}
		}
	}
	text, err := json.Marshal(values)
	if err != nil {
		return nil, attributeError("", "expected object")
	}
	return all.form(text)
}

// form checks the attributes and returns them in their only form.
func (all attributes) form(raw json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var doc any
	if err := d.Decode(&doc); err != nil {
		return nil, attributeError("", "expected JSON: %v", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, attributeError("", "expected JSON: invalid character after top-level value")
	}
	values, ok := doc.(map[string]any)
	if !ok {
		return nil, attributeError("", "expected object")
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		// A short number with a large exponent takes megabytes to compare.
		if n, ok := values[name].(json.Number); ok && (len(n) > 32 || strings.ContainsAny(string(n), "eE")) {
			return nil, attributeError("/"+escape.Replace(name), "expected a number of at most 32 characters without an exponent")
		}
	}
	if bad := all.misfits(values); bad != nil {
		return nil, &AttributeError{bad}
	}
	if len(all) == 0 {
		return nil, nil
	}
	for name, a := range all {
		v, given := values[name]
		switch {
		case !given && a.Default != nil:
			values[name] = a.Default
		case given && a.Type == Integer:
			n, _ := new(big.Rat).SetString(v.(json.Number).String())
			values[name] = n.Num().Int64()
		case given && a.Type == String && strings.ContainsRune(v.(string), 0):
			return nil, attributeError("/"+name, "expected no character U+0000")
		}
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(values); err != nil {
		return nil, fmt.Errorf("encode attributes: %w", err)
	}
	form := bytes.TrimSuffix(out.Bytes(), []byte("\n"))
	if n := len(form) + 2*len(values); n > MaxAttributeBytes { // PostgreSQL writes a space after each colon and comma
		return nil, attributeError("", "expected at most %d bytes", MaxAttributeBytes)
	}
	return form, nil
}

// misfits returns the fields that do not fit, ordered by pointer. The wording is that of the API's
// other errors.
func (all attributes) misfits(values map[string]any) (bad []FieldError) {
	add := func(name, format string, args ...any) {
		bad = append(bad, FieldError{"/" + escape.Replace(name), fmt.Sprintf(format, args...)})
	}
	for name, v := range values {
		if a, ok := all[name]; !ok {
			add(name, "unexpected property")
		} else if detail := a.misfit(v); detail != "" {
			add(name, "%s", detail)
		}
	}
	for name, a := range all {
		if _, given := values[name]; !given && a.Required {
			add(name, "expected required property %s to be present", name)
		}
	}
	slices.SortFunc(bad, func(a, b FieldError) int { return strings.Compare(a.Pointer, b.Pointer) })
	return bad
}

// misfit returns why a value does not fit, or "". It agrees with schema.
func (a Attribute) misfit(v any) string {
	var number *big.Rat
	fits := false
	switch v := v.(type) {
	case string:
		fits = a.Type == String
	case bool:
		fits = a.Type == Boolean
	case json.Number:
		number, _ = new(big.Rat).SetString(v.String())
		fits = a.Type == Integer && number.IsInt() // 1.0 is an integer too
	}
	if !fits {
		return "expected " + a.Type
	}
	if number != nil && number.Num().IsInt64() {
		v = number.Num().Int64()
	}
	if len(a.Enum) > 0 && !slices.Contains(a.Enum, v) {
		return fmt.Sprintf("expected value to be one of %q", strings.Join(words(a.Enum), ", "))
	}
	if s, ok := v.(string); ok && a.MaxLength > 0 && utf8.RuneCountInString(s) > a.MaxLength {
		return fmt.Sprintf("expected length <= %d", a.MaxLength)
	}
	if number != nil {
		least, most := a.bounds()
		if number.Cmp(new(big.Rat).SetInt64(least)) < 0 {
			return fmt.Sprintf("expected number >= %d", least)
		} else if number.Cmp(new(big.Rat).SetInt64(most)) > 0 {
			return fmt.Sprintf("expected number <= %d", most)
		}
	}
	return ""
}

// words returns the values of an enum as text.
func words(enum []any) []string {
	all := make([]string, len(enum))
	for i, v := range enum {
		all[i] = fmt.Sprint(v)
	}
	return all
}

// limit returns the largest integer that the attribute may have.
func (a Attribute) limit() int64 {
	if a.Aggregate {
		return MaxAggregate
	}
	return MaxInteger
}

// bounds returns the bounds of an integer.
func (a Attribute) bounds() (least, most int64) {
	most = a.limit()
	least = -most
	if a.Minimum != nil {
		least = *a.Minimum
	}
	if a.Maximum != nil {
		most = *a.Maximum
	}
	return least, most
}

var escape = strings.NewReplacer("~", "~0", "/", "~1")
