package kinds

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
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
	return orNew(e.checker, e.Attributes).check(raw)
}

// Patch merges change over the present attributes, and then does the same as Check. Null removes an
// attribute or restores its default (RFC 7396).
func (e Edge) Patch(present, change json.RawMessage) (json.RawMessage, error) {
	return orNew(e.checker, e.Attributes).patch(present, change)
}

// Schema returns the JSON Schema of the attributes, for contracts. The caller may change it.
func (e Edge) Schema() map[string]any { return schema(e.Attributes) }

// Check is Edge.Check for a child.
func (c Child) Check(raw json.RawMessage) (json.RawMessage, error) {
	return orNew(c.checker, c.Attributes).check(raw)
}

// Patch is Edge.Patch for a child.
func (c Child) Patch(present, change json.RawMessage) (json.RawMessage, error) {
	return orNew(c.checker, c.Attributes).patch(present, change)
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
			var values []any
			for _, v := range a.Enum {
				values = append(values, v)
			}
			p["enum"] = values
		}
		if a.Default != nil {
			p["default"] = a.Default
		}
		if a.Type == Integer {
			limit := int64(MaxInteger)
			if a.Aggregate {
				limit = MaxAggregate
			}
			p["minimum"], p["maximum"] = -limit, limit
			if a.Minimum != nil {
				p["minimum"] = *a.Minimum
			}
			if a.Maximum != nil {
				p["maximum"] = *a.Maximum
			}
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

// checker checks the attributes of a kind. It is immutable.
type checker struct {
	all      map[string]Attribute
	compiled *jsonschema.Schema
}

// orNew returns k, or makes the checker of a kind that Parse did not make.
func orNew(k *checker, all map[string]Attribute) *checker {
	if k == nil {
		return newChecker(all)
	}
	return k
}

// newChecker panics if the attributes are not valid. Parse has checked them.
func newChecker(all map[string]Attribute) *checker {
	text, err := json.Marshal(schema(all))
	if err != nil {
		panic(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		panic(err)
	}
	c := jsonschema.NewCompiler()
	const where = "attributes.json"
	if err := c.AddResource(where, doc); err != nil {
		panic(err)
	}
	return &checker{all, c.MustCompile(where)}
}

// fits returns an error if v is not a valid value of the attribute.
func (k *checker) fits(name string, v any) error {
	text, err := json.Marshal(map[string]any{name: v})
	if err != nil {
		return fmt.Errorf("%v is not a value", v)
	}
	_, err = k.form(text)
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

func (k *checker) check(raw json.RawMessage) (json.RawMessage, error) {
	if len(raw) == 0 {
		raw = json.RawMessage(`{}`)
	}
	return k.form(raw)
}

func (k *checker) patch(present, change json.RawMessage) (json.RawMessage, error) {
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
	return k.form(text)
}

// form checks the attributes and returns them in their only form.
func (k *checker) form(raw json.RawMessage) (json.RawMessage, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, attributeError("", "expected JSON: %v", err)
	}
	values, _ := doc.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(values)) {
		// A short number with a large exponent takes megabytes to compare.
		if n, ok := values[name].(json.Number); ok && (len(n) > 32 || strings.ContainsAny(string(n), "eE")) {
			return nil, attributeError("/"+escape.Replace(name), "expected a number of at most 32 characters without an exponent")
		}
	}
	if err := k.compiled.Validate(doc); err != nil {
		return nil, fieldErrors(err)
	}
	if len(k.all) == 0 {
		return nil, nil
	}
	for name, a := range k.all {
		v, given := values[name]
		switch {
		case !given && a.Default != nil:
			values[name] = a.Default
		case given && a.Type == Integer:
			values[name] = boundedInteger(v.(json.Number)) // 1.0 is an integer too
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

// boundedInteger returns an integer that is within the bounds of all integers.
func boundedInteger(n json.Number) int64 {
	r, _ := new(big.Rat).SetString(n.String())
	return r.Num().Int64()
}

// fieldErrors translates the library's errors to the wording of the API's other errors, with one
// pointer each.
func fieldErrors(err error) error {
	var invalid *jsonschema.ValidationError
	if !errors.As(err, &invalid) {
		return fmt.Errorf("check attributes: %w", err)
	}
	out := &AttributeError{}
	var walk func(*jsonschema.ValidationError)
	walk = func(v *jsonschema.ValidationError) {
		at := ""
		for _, token := range v.InstanceLocation {
			at += "/" + escape.Replace(token)
		}
		add := func(pointer, format string, args ...any) {
			out.Fields = append(out.Fields, FieldError{pointer, fmt.Sprintf(format, args...)})
		}
		switch k := v.ErrorKind.(type) {
		case *kind.Type:
			add(at, "expected %s", strings.Join(k.Want, " or "))
		case *kind.Enum:
			var values []string
			for _, w := range k.Want {
				values = append(values, fmt.Sprint(w))
			}
			add(at, "expected value to be one of %q", strings.Join(values, ", "))
		case *kind.Minimum:
			add(at, "expected number >= %s", k.Want.RatString())
		case *kind.Maximum:
			add(at, "expected number <= %s", k.Want.RatString())
		case *kind.MaxLength:
			add(at, "expected length <= %d", k.Want)
		case *kind.Required:
			for _, name := range k.Missing {
				add(at+"/"+escape.Replace(name), "expected required property %s to be present", name)
			}
		case *kind.AdditionalProperties:
			for _, name := range k.Properties {
				add(at+"/"+escape.Replace(name), "unexpected property")
			}
		}
		for _, cause := range v.Causes {
			walk(cause)
		}
	}
	walk(invalid)
	slices.SortFunc(out.Fields, func(a, b FieldError) int {
		return strings.Compare(a.Pointer+"\x00"+a.Detail, b.Pointer+"\x00"+b.Detail)
	})
	return out
}

var escape = strings.NewReplacer("~", "~0", "/", "~1")
