package kindfile

import (
	"encoding/json"
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
)

// upstreamFile is the file of `tidings upstream add` (docs/upstream.md).
type upstreamFile struct {
	Upstream   string                   `yaml:"upstream"`
	TypePrefix string                   `yaml:"type_prefix"`
	Source     string                   `yaml:"source"`
	ID         kinds.IDForm             `yaml:"id,omitempty"`
	Tenants    tenants                  `yaml:"tenants,omitempty"`
	MaxPayload int                      `yaml:"max_payload,omitempty"`
	Events     map[string]upstreamEvent `yaml:"events"`
}

type upstreamEvent struct {
	Summary  string         `yaml:"summary,omitempty"`
	Versions map[string]any `yaml:"versions"`
}

// tenants is a list, or "all".
type tenants []int64

func (t *tenants) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode && n.Value == "all" {
		*t = nil
		return nil
	}
	return n.Decode((*[]int64)(t))
}

// ReadUpstream reads the file of `tidings upstream add`. The error joins all errors, each with its
// line.
func ReadUpstream(file []byte) (*upstreams.Upstream, error) {
	doc, d, err := document(file)
	if err != nil {
		return nil, err
	}
	var f upstreamFile
	if err := d.Decode(&f); err != nil {
		return nil, typeErrors(err)
	}
	u := &upstreams.Upstream{Name: f.Upstream, TypePrefix: f.TypePrefix, Source: f.Source, IDs: f.ID, Tenants: f.Tenants,
		MaxPayload: f.MaxPayload, Events: make(map[string]upstreams.Event), Logins: []string{}}
	var all []error
	fault := func(f upstreams.Fault) {
		all = append(all, fmt.Errorf("line %d: %w", lineOf(doc.Content[0], f.Path), f))
	}
	for name, e := range f.Events {
		versions := make(map[string]json.RawMessage)
		for v, schema := range e.Versions {
			text, err := json.Marshal(schema)
			if err != nil { // a key that is not text
				fault(upstreams.Fault{Path: []string{"events", name, "versions", v}, Text: "is not a JSON Schema: " + err.Error()})
				text = []byte(`{"type": "object"}`)
			}
			versions[v] = text
		}
		u.Events[name] = upstreams.Event{Summary: e.Summary, Versions: versions}
	}
	for _, f := range u.Check() {
		fault(f)
	}
	return u, errors.Join(all...)
}

// WriteUpstream returns the file of a declared upstream.
func WriteUpstream(u *upstreams.Upstream) ([]byte, error) {
	f := upstreamFile{Upstream: u.Name, TypePrefix: u.TypePrefix, Source: u.Source, ID: u.IDs, Tenants: u.Tenants, MaxPayload: u.MaxPayload,
		Events: make(map[string]upstreamEvent)}
	for name, e := range u.Events {
		one := upstreamEvent{Summary: e.Summary, Versions: make(map[string]any)}
		for v, schema := range e.Versions {
			var s any
			if err := json.Unmarshal(schema, &s); err != nil {
				return nil, fmt.Errorf("the schema of %s.%s version %s: %w", u.Name, name, v, err)
			}
			one.Versions[v] = s
		}
		f.Events[name] = one
	}
	return yaml.Marshal(f)
}
