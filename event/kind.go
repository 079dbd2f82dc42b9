package event

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// The event types of each archetype. All are at version 1.
var (
	EdgeEvents   = []string{Created, Removed, Updated}
	ChildEvents  = []string{Created, Edited, Deleted, Moderated, Erased}
	ThreadEvents = []string{Updated}
)

var shapes sync.Map // the types that shape has made; there are few kinds

type shapeKey struct {
	of    reflect.Type
	names [2]string
}

// shape returns T with other JSON names for its first two members. Go can convert between the two
// types.
func shape[T any](first, second string) reflect.Type {
	key := shapeKey{reflect.TypeFor[T](), [2]string{first, second}}
	if t, ok := shapes.Load(key); ok {
		return t.(reflect.Type)
	}
	fields := reflect.VisibleFields(key.of)
	for i, name := range key.names {
		if _, options, has := strings.Cut(fields[i].Tag.Get("json"), ","); has {
			name += "," + options
		}
		fields[i].Tag = reflect.StructTag(fmt.Sprintf(`json:%q`, name))
	}
	t, _ := shapes.LoadOrStore(key, reflect.StructOf(fields))
	return t.(reflect.Type)
}

// decodeAs reads the payload as a T whose first two members have these names. The event must have
// one of the types.
func decodeAs[T any](e *Event, types []string, first, second string) (out T, err error) {
	if e.Version != 1 || !slices.Contains(types, e.Type) {
		return out, Permanent(fmt.Errorf("event %s is a %s.%s.v%d: this release does not know it", e.ID,
			e.AggregateType, e.Type, e.Version))
	}
	if out, err = parse[T](e.Payload, first, second); err != nil {
		return out, e.permanent(err)
	}
	return out, nil
}

// parse reads JSON as a T whose first two members have these names.
func parse[T any](text []byte, first, second string) (out T, err error) {
	v := reflect.New(shape[T](first, second))
	if err := json.Unmarshal(text, v.Interface()); err != nil {
		return out, err
	}
	return *v.Convert(reflect.TypeFor[*T]()).Interface().(*T), nil // the same memory under another type
}

// Parse reads a child from a history, which may hold payloads of any release.
func (n ChildNames) Parse(text []byte) (Child, error) { return parse[Child](text, n.ID, n.Parent) }

// Parse reads an edge from a history.
func (n EdgeNames) Parse(text []byte) (Edge, error) { return parse[Edge](text, n.From, n.To) }

// permanent adds the event to an error of its payload.
func (e *Event) permanent(err error) error {
	return Permanent(fmt.Errorf("decode the payload of event %s (%s.%s.v%d): %w", e.ID, e.AggregateType, e.Type, e.Version, err))
}

// OneForm returns attributes from PostgreSQL, whose jsonb has its own order of members, in the form
// of writers and events: members sorted by name, without spaces. It returns nil for empty input.
func OneForm(attributes []byte) json.RawMessage {
	if len(attributes) == 0 {
		return nil
	}
	var values map[string]any
	d := json.NewDecoder(bytes.NewReader(attributes))
	d.UseNumber()
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if d.Decode(&values) != nil || e.Encode(values) != nil {
		return attributes // not an object from jsonb
	}
	return bytes.TrimSuffix(out.Bytes(), []byte("\n"))
}
