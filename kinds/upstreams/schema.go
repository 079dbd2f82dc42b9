package upstreams

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// annotations are keywords of JSON Schema that describe a value and allow every value.
var annotations = []string{"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "format", "readOnly", "title",
	"writeOnly"}

// pattern matches the regular expressions that mean the same to PostgreSQL as to ECMA 262: literal
// characters, sets, groups, alternatives and repetitions.
var pattern = regexp.MustCompile(`^(` + escape + `|` + set + `|[^\\[(]|\((\?:)?)*$`)

// Parts of a regular expression. A set has no [, which begins a class in PostgreSQL, and is not
// empty, which only ECMA 262 knows.
const (
	escape = `\\[.\-/+*?()[\]{}|^$]`
	set    = `\[\^?(?:` + escape + `|[^\\\][])+\]`
)

var (
	unit  = regexp.MustCompile(`(?s)` + escape + `|` + set + `|\{\d+(?:,\d*)?\}|.`)
	large = regexp.MustCompile(`\d{4}|2[6-9]\d|25[6-9]|[3-9]\d\d`) // numbers above 255, the most in PostgreSQL
)

// portable reports whether PostgreSQL reads the regular expression as JSON Schema does.
func portable(text string) bool {
	_, err := regexp.Compile(text)
	_, posix := regexp.CompilePOSIX(strings.ReplaceAll(text, "(?:", "(")) // which knows no other (?
	return err == nil && posix == nil && pattern.MatchString(text) && !strings.Contains(text, "\n") &&
		!slices.ContainsFunc(unit.FindAllString(text, -1), func(u string) bool { return u[0] == '{' && large.MatchString(u) })
}

// toPostgres returns a portable regular expression for PostgreSQL, where a dot matches the ends of
// lines too.
func toPostgres(text string) string {
	return unit.ReplaceAllStringFunc(text, func(u string) string {
		if u == "." {
			return `[^\n\r\u2028\u2029]`
		}
		return u
	})
}

const maxSchemaDepth = 20

// compile returns the schema as function upstream_misfit reads it, or why the table could not check
// payloads by it: it has a keyword that the function does not know, or a malformed one.
func compile(schema json.RawMessage, path []string) (json.RawMessage, []Fault) {
	d := json.NewDecoder(bytes.NewReader(schema))
	d.UseNumber()
	var s any
	if err := d.Decode(&s); err != nil {
		return nil, []Fault{{path, "is not JSON: " + err.Error()}}
	}
	if o, ok := s.(map[string]any); !ok || o["type"] != "object" {
		return nil, []Fault{{path, `want a JSON Schema with "type": "object"`}}
	}
	if all := schemaFaults(s, path); len(all) > 0 {
		return nil, all
	}
	check, err := json.Marshal(Compile(s))
	if err != nil {
		return nil, []Fault{{path, "is not JSON: " + err.Error()}}
	}
	return check, nil
}

// Compile returns a valid schema in the form of function upstream_misfit: without annotations and
// booleans, with required as a text array of PostgreSQL (=required), and with the names of its
// properties as another (=names).
func Compile(s any) map[string]any {
	of, ok := s.(map[string]any)
	switch {
	case s == false:
		return map[string]any{"not": map[string]any{}}
	case !ok:
		return map[string]any{}
	}
	c := make(map[string]any, len(of))
	for k, v := range of {
		switch k {
		case "required":
			var names []string
			for _, n := range v.([]any) {
				names = append(names, n.(string))
			}
			c["=required"] = textArray(names)
		case "properties":
			members := make(map[string]any)
			for name, m := range v.(map[string]any) {
				members[name] = Compile(m)
			}
			c[k], c["=names"] = members, textArray(slices.Sorted(maps.Keys(members)))
		case "pattern":
			c[k] = toPostgres(v.(string))
		case "additionalProperties", "items", "not":
			c[k] = Compile(v)
		case "allOf", "anyOf", "oneOf":
			var list []any
			for _, one := range v.([]any) {
				list = append(list, Compile(one))
			}
			c[k] = list
		default:
			if !slices.Contains(annotations, k) {
				c[k] = v
			}
		}
	}
	return c
}

// textArray returns a literal of type text[].
func textArray(all []string) string {
	quoted := make([]string, len(all))
	for i, s := range all {
		quoted[i] = `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
	}
	return "{" + strings.Join(quoted, ",") + "}"
}

func schemaFaults(s any, path []string) (all []Fault) {
	fault := func(at []string, format string, args ...any) {
		all = append(all, Fault{at, fmt.Sprintf(format, args...)})
	}
	if _, is := s.(bool); is {
		return nil
	}
	o, ok := s.(map[string]any)
	if !ok {
		fault(path, "want a JSON Schema: an object, true or false")
		return all
	}
	if len(path) > maxSchemaDepth {
		fault(path, "the schema is nested more than %d levels deep", maxSchemaDepth)
		return all
	}
	at := func(more ...string) []string { return append(slices.Clone(path), more...) }
	for _, k := range slices.Sorted(maps.Keys(o)) {
		v := o[k]
		switch k {
		case "type":
			names, many := v.([]any)
			if !many {
				names = []any{v}
			}
			for _, n := range names {
				if !slices.Contains([]any{"object", "array", "string", "number", "integer", "boolean", "null"}, n) {
					fault(at(k), "%v is not a type of JSON", n)
				}
			}
		case "properties":
			members, ok := v.(map[string]any)
			if !ok {
				fault(at(k), "want an object")
			}
			for _, m := range slices.Sorted(maps.Keys(members)) {
				all = append(all, schemaFaults(members[m], at(k, m))...)
			}
		case "additionalProperties", "items", "not":
			all = append(all, schemaFaults(v, at(k))...)
		case "allOf", "anyOf", "oneOf":
			list, ok := v.([]any)
			if !ok || len(list) == 0 {
				fault(at(k), "want a list of schemas")
			}
			for i, one := range list {
				all = append(all, schemaFaults(one, at(k, fmt.Sprint(i)))...)
			}
		case "required":
			list, ok := v.([]any)
			if !ok || slices.ContainsFunc(list, func(m any) bool { _, is := m.(string); return !is }) {
				fault(at(k), "want a list of names")
			}
		case "enum":
			if list, ok := v.([]any); !ok || len(list) == 0 {
				fault(at(k), "want a list of values")
			}
		default:
			if text := bad(k, v); text != "" {
				fault(at(k), "%s", text)
			}
		}
	}
	return all
}

// bad returns why a keyword's value, which has no schema in it, is malformed.
func bad(keyword string, v any) string {
	n, number := v.(json.Number)
	switch keyword {
	case "const":
	case "uniqueItems":
		if _, ok := v.(bool); !ok {
			return "want true or false"
		}
	case "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties":
		if !number || strings.ContainsAny(n.String(), ".eE-") {
			return "want a whole number of at least 0"
		}
	case "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum":
		if !number {
			return "want a number"
		}
	case "multipleOf":
		if !number || strings.HasPrefix(n.String(), "-") || strings.Trim(n.String(), "0.") == "" {
			return "want a number above 0"
		}
	case "pattern":
		if text, ok := v.(string); !ok || !portable(text) {
			return fmt.Sprintf("%.80q is not a regular expression that PostgreSQL reads as JSON Schema does: "+
				"write sets in brackets instead of classes like \\d", text)
		}
	default:
		if !slices.Contains(annotations, keyword) {
			return "this keyword is not supported: the table could not check it"
		}
	}
	return ""
}
