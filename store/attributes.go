package store

import (
	"bytes"
	"encoding/json"
)

// CanonicalAttributes returns attributes from PostgreSQL, whose jsonb has its own order of members,
// in the form of writers and events: members sorted by name, without spaces. It returns nil for
// empty input.
func CanonicalAttributes(attributes []byte) json.RawMessage {
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
