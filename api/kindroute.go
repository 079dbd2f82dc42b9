package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// The routes of a kind are those of its archetype under other names. The code of an archetype has types whose members and parameters are named
// by the archetype (from_id, to_id, child_id, object_id); a naming gives them the names of the kind, wherever a client sees them: in paths, in
// bodies, in problems and in the OpenAPI document. A route with a naming is registered like any other:
//
//	register(s, route{path: "/v1/" + k.Plural + "/{from_id}/{to_id}", naming: n, answer: s.schema(name, n, edgeBody{}), ...}, handle)

// naming has the names of one kind.
type naming struct {
	names   map[string]string       // a kind's by the archetype's
	texts   map[string]string       // what parameters are, by the archetype's names
	filters map[string]*huma.Schema // parameters of the query, which the framework reads as members of its parameter filter
	nouns   *strings.Replacer       // of descriptions, or nil: {a child}, {children}, {an object} and the like
	prose   *strings.Replacer       // of titles of problems, or nil
	shapes  sync.Map                // reflect.Type to reflect.Type
}

func edgeNaming(k kinds.Edge) *naming {
	return &naming{names: map[string]string{"from_id": k.Ends[0], "to_id": k.Ends[1], "edge": k.Name, "entity": k.Name}}
}

// childNaming is that of children. Words of problems that are about comments of a post are about the kind's instead.
func childNaming(k kinds.Child) *naming {
	n := k.Names()
	return &naming{
		names: map[string]string{"child_id": n.ID, "object_id": n.Parent, "entity": k.Name, "child": k.Name},
		nouns: strings.NewReplacer("{child}", k.Name, "{a child}", a(k.Name), "{A child}", capital(a(k.Name)), "{children}", k.Plural, "{Children}", capital(k.Plural),
			"{object}", k.Parent, "{an object}", a(k.Parent), "{An object}", capital(a(k.Parent))),
		prose: strings.NewReplacer("comment", k.Name, "post", k.Parent),
	}
}

// kindWords are a kind's words, names and codes where they are other than those of every kind.
type kindWords struct {
	operations map[string]words  // by operation; what is empty there is as in every kind
	paths      map[string]string // likewise
	schemas    map[string]string // names by what other kinds put behind their own name
	texts      map[string]string // descriptions of members
	names      map[string]string // of members, operations of a batch and lists
	codes      map[string]string // of problems
}

// words are what the document says of an operation.
type words struct{ id, summary, description string }

// wordsOf are those of the kinds whose routes were there before kinds were data.
func wordsOf(kind string) kindWords {
	switch kind {
	case event.AggregateFollow:
		return wordsOfFollows()
	case event.AggregateComment:
		return wordsOfComments()
	}
	return kindWords{}
}

// entityList is one page of edges or children.
type entityList struct {
	Items []any      `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The list includes every write that had committed by this time."`
}

// entityVersions is one page of the versions of an edge or a child.
type entityVersions struct {
	Items []any      `json:"items" nullable:"false" doc:"Newest first."`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The history includes every write that had committed by this time."`
}

// archetype is what the routes of edges and of children have in common.
type archetype struct {
	*server
	*naming
	words          kindWords
	plural, title  string // in paths; in names of schemas
	dashed, tagged string // name and plural in operationIds
	entity         *huma.Schema
}

func newArchetype(s *server, name, plural string, n *naming) archetype {
	return archetype{server: s, naming: n, words: wordsOf(name), plural: plural, title: camel(name), dashed: dashed(name), tagged: dashed(plural)}
}

// route is one of the kind's.
func (k archetype) route(operation, method, path, role string, status int, w words) route {
	own := k.words.operations[operation]
	return route{method: method, path: cmp.Or(k.words.paths[operation], path), id: cmp.Or(own.id, w.id), summary: cmp.Or(own.summary, w.summary),
		description: cmp.Or(own.description, w.description), role: role, status: status, tag: capital(k.plural), naming: k.naming}
}

// word is a name of the kind for one of the archetype's that is no member of the archetype's types.
func (k archetype) word(name string) string { return cmp.Or(k.words.names[name], name) }

// code is the kind's code of a problem.
func (k archetype) code(code string) string { return cmp.Or(k.words.codes[code], code) }

func (k archetype) schemaName(name string) string { return cmp.Or(k.words.schemas[name], k.title+name) }

// schema makes a schema with the kind's names: see server.schema.
func (k archetype) schema(name string, of any, change ...func(*huma.Schema)) *huma.Schema {
	return k.server.schema(k.schemaName(name), k.naming, of, change...)
}

// describe gives members the kind's own descriptions.
func (k archetype) describe(schema *huma.Schema) {
	for name, text := range k.words.texts {
		if p := schema.Properties[name]; p != nil {
			p.Description = text
		}
	}
}

// a is a word with its article.
func a(word string) string {
	if strings.ContainsRune("aeiou", rune(word[0])) {
		return "an " + word
	}
	return "a " + word
}

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

func dashed(name string) string { return strings.ReplaceAll(name, "_", "-") }

// of returns the kind's name for one of the archetype's, which is also the name of whatever has no other.
func (n *naming) of(name string) string {
	if n == nil {
		return name
	}
	return cmp.Or(n.names[name], name)
}

// value returns the struct v, or what v points to, with the kind's names for its members in JSON. Structs within it keep theirs. A pointer costs no copy.
func (n *naming) value(v any) any {
	of := reflect.ValueOf(v)
	if of.Kind() == reflect.Pointer {
		return of.Convert(reflect.PointerTo(n.shape(of.Type().Elem()))).Interface()
	}
	return of.Convert(n.shape(of.Type())).Interface()
}

// decode reads JSON with the kind's names into the struct that v points to.
func (n *naming) decode(data []byte, v any) error {
	of := reflect.TypeOf(v).Elem()
	shaped := reflect.New(n.shape(of))
	if err := json.Unmarshal(data, shaped.Interface()); err != nil {
		return err
	}
	reflect.ValueOf(v).Elem().Set(shaped.Elem().Convert(of))
	return nil
}

// shape is the struct of t with the kind's names in its tags. Go converts between the two.
func (n *naming) shape(t reflect.Type) reflect.Type {
	if shape, ok := n.shapes.Load(t); ok {
		return shape.(reflect.Type)
	}
	fields := make([]reflect.StructField, t.NumField())
	for i := range fields {
		fields[i] = t.Field(i)
		name, options, _ := strings.Cut(fields[i].Tag.Get("json"), ",")
		if renamed, ok := n.names[name]; ok {
			was, is := fmt.Sprintf("json:%q", joined(name, options)), fmt.Sprintf("json:%q", joined(renamed, options))
			fields[i].Tag = reflect.StructTag(strings.Replace(string(fields[i].Tag), was, is, 1))
		}
	}
	shape, _ := n.shapes.LoadOrStore(t, reflect.StructOf(fields))
	return shape.(reflect.Type)
}

func joined(name, options string) string {
	if options == "" {
		return name
	}
	return name + "," + options
}

// path is a route's path with the kind's names for its parameters.
func (n *naming) path(path string) string {
	if n == nil {
		return path
	}
	for name, renamed := range n.names {
		path = strings.ReplaceAll(path, "{"+name+"}", "{"+renamed+"}")
	}
	return path
}

// enter lets the framework read the parameters of the path by the archetype's names.
func (n *naming) enter(ctx huma.Context, next func(huma.Context)) {
	r, _ := humago.Unwrap(ctx)
	for name, renamed := range n.names {
		if v := r.PathValue(renamed); v != "" {
			r.SetPathValue(name, v)
		}
	}
	if r.URL.RawQuery != "" {
		query, other := make(url.Values), false
		for given, values := range r.URL.Query() {
			name := n.inQuery(given)
			query[name], other = values, other || name != given
		}
		if other {
			u := *r.URL
			u.RawQuery = query.Encode()
			r.URL = &u
		}
	}
	next(ctx)
}

// strange marks a parameter that has a name of the framework's: the framework does not know it under the mark, so it is refused, as any other unknown one.
const strange = "?"

// inQuery is what the framework calls a parameter of the query.
func (n *naming) inQuery(name string) string {
	for archetype, renamed := range n.names {
		if name == renamed {
			return archetype
		}
	}
	switch {
	case n.filters[name] != nil:
		return "filter[" + name + "]"
	case n.names[name] != "" || strings.HasPrefix(name, "filter["):
		return strange + name
	}
	return name
}

// document describes the parameters of an operation by the kind's names.
func (n *naming) document(op *huma.Operation) {
	if n == nil {
		return
	}
	op.Parameters = slices.DeleteFunc(op.Parameters, func(p *huma.Param) bool { return p.Name == "filter" })
	for _, p := range op.Parameters {
		if text := cmp.Or(n.texts[p.Name], n.text(p.Description)); text != p.Description {
			p.Description, p.Schema.Description = text, text
		}
		p.Name = n.of(p.Name)
	}
	for _, answer := range op.Responses {
		for _, h := range answer.Headers {
			h.Description, h.Schema.Description = n.text(h.Description), n.text(h.Schema.Description)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(n.filters)) {
		op.Parameters = append(op.Parameters, &huma.Param{Name: name, In: "query", Schema: n.filters[name], Description: "Only edges with this attribute."})
	}
}

// text is a description with the kind's nouns.
func (n *naming) text(text string) string {
	if n == nil || n.nouns == nil {
		return text
	}
	return n.nouns.Replace(text)
}

// title is a title of a problem as the kind has it.
func (n *naming) title(text string) string {
	if n == nil || n.prose == nil {
		return text
	}
	return n.prose.Replace(text)
}

// tell names the places in a problem as the kind does.
func (n *naming) tell(p *Problem) {
	if n == nil {
		return
	}
	p.Title = n.title(p.Title)
	for i := range p.Errors {
		unknown, ok := strings.CutPrefix(p.Errors[i].Parameter, strange)
		if p.Errors[i].Parameter = n.of(unknown); ok {
			p.Errors[i].Parameter = unknown
		}
	}
}

const namingKey = "naming" // of an operation's metadata

// namingOf returns the naming of a request's operation, or nil.
func namingOf(ctx huma.Context) *naming {
	if op := ctx.Operation(); op != nil {
		n, _ := op.Metadata[namingKey].(*naming)
		return n
	}
	return nil
}

// camel makes "direct_message" "DirectMessage": what is common in names of schemas.
func camel(name string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(name, "_") {
		if part != "" {
			b.WriteString(capital(part))
		}
	}
	return b.String()
}

// schema makes the schema of a struct with the kind's names, and of what else the kind changes about it, and returns a reference to it. A nil naming
// changes no name.
func (s *server) schema(name string, n *naming, of any, change ...func(*huma.Schema)) *huma.Schema {
	registry := s.api.OpenAPI().Components.Schemas
	if _, taken := registry.Map()[name]; taken {
		panic(fmt.Sprintf("api: two schemas are called %s", name)) // see build
	}
	schema := huma.SchemaFromType(registry, reflect.TypeOf(of))
	properties := make(map[string]*huma.Schema, len(schema.Properties))
	for member, property := range schema.Properties {
		property.Description = n.text(property.Description)
		properties[n.of(member)] = property
	}
	schema.Properties = properties
	for i, member := range schema.Required {
		schema.Required[i] = n.of(member)
	}
	for _, f := range change {
		f(schema)
	}
	schema.PrecomputeMessages()
	registry.Map()[name] = schema
	return &huma.Schema{Ref: "#/components/schemas/" + name}
}

// property changes a member of a schema, or adds one. A required one is never missing.
func property(name string, of *huma.Schema, required bool) func(*huma.Schema) {
	return func(s *huma.Schema) {
		s.Properties[name] = of
		if required && !slices.Contains(s.Required, name) {
			s.Required = append(s.Required, name)
		}
	}
}

// refer is a reference to a schema that says what it is there.
func refer(to *huma.Schema, description string) *huma.Schema {
	return &huma.Schema{Ref: to.Ref, Description: description}
}

// without takes members out of a schema.
func without(names ...string) func(*huma.Schema) {
	return func(s *huma.Schema) {
		for _, name := range names {
			delete(s.Properties, name)
		}
		s.Required = slices.DeleteFunc(s.Required, func(name string) bool { return slices.Contains(names, name) })
	}
}

// arrayOf is the schema of a list that is never null.
func arrayOf(items *huma.Schema, description string) *huma.Schema {
	return &huma.Schema{Type: huma.TypeArray, Items: items, Description: description}
}

// Which attributes a body must have.
type attributesOf int

const (
	written  attributesOf = iota // in a write: those that are required and have no default
	changed                      // in a change: none
	answered                     // in an answer: those that every entity has
)

// attributesSchema describes the attributes of a kind.
func attributesSchema(all map[string]kinds.Attribute, in attributesOf) *huma.Schema {
	schema := &huma.Schema{Type: huma.TypeObject, Properties: make(map[string]*huma.Schema), AdditionalProperties: false}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		a := all[name]
		p := &huma.Schema{Type: cmp.Or(a.Type, huma.TypeString)}
		for _, v := range a.Enum {
			p.Enum = append(p.Enum, v)
		}
		switch p.Type {
		case huma.TypeInteger:
			p.Format = "int64"
			p.Minimum, p.Maximum = float(a.Minimum), float(a.Maximum)
		case huma.TypeString:
			if a.MaxLength > 0 {
				p.MaxLength = &a.MaxLength
			}
			if len(a.Enum) == 0 {
				p.Examples = []any{"text"}
			}
		}
		if in == written {
			p.Default = a.Default
		}
		schema.Properties[name] = p
		if in == answered && a.Default != nil || in != changed && a.Required && a.Default == nil {
			schema.Required = append(schema.Required, name)
		}
	}
	schema.PrecomputeMessages()
	return schema
}

func float(n *int64) *float64 {
	if n == nil {
		return nil
	}
	f := float64(*n)
	return &f
}

// jsonBody describes a body that the handler gets as it is, once the framework has validated it.
func jsonBody(schema *huma.Schema, required bool) *huma.RequestBody {
	return &huma.RequestBody{Required: required, Content: map[string]*huma.MediaType{"application/json": {Schema: schema}}}
}

// operation finds a registered operation of the document.
func (s *server) operation(method, path string) *huma.Operation {
	item := s.api.OpenAPI().Paths[path]
	switch method {
	case http.MethodGet:
		return item.Get
	case http.MethodPut:
		return item.Put
	case http.MethodPost:
		return item.Post
	case http.MethodPatch:
		return item.Patch
	}
	return item.Delete
}
