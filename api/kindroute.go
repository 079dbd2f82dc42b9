package api

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// The routes of a kind are those of its archetype under other names. The types of an archetype have
// members and parameters with the archetype's names (from_id, to_id, child_id, object_id). A naming
// translates these to the kind's names wherever a client sees them: in paths, in bodies, in
// problems and in the OpenAPI document. A route with a naming is registered like any other:
//
//	register(s, route{path: "/v1/" + k.Plural + "/{from_id}/{to_id}", naming: n, answer: s.schema(name, n, edgeBody{}), ...}, handle)

// naming translates the names of an archetype to those of one kind.
type naming struct {
	names     map[string]string // the kind's names by the archetype's
	ids       idForms           // of members and parameters, by the archetype's names
	filter    *huma.Param       // of the query: an attribute, or nil
	countable []any             // the lists whose counts a list of children can have
	ranked    bool              // lists of children have the order top
	flat      bool              // and not the order threaded
	nouns     *strings.Replacer // in descriptions, or nil: {a child}, {children}, {an object}, ...
	prose     *strings.Replacer // in titles of problems, or nil
	shapes    sync.Map          // reflect.Type to reflect.Type
}

// idForms are the forms of ids. Those that are not narrowed are missing.
type idForms map[string]kinds.IDForm

func narrowed(forms idForms) idForms {
	maps.DeleteFunc(forms, func(_ string, f kinds.IDForm) bool { return f == "" || f == kinds.String })
	return forms
}

func edgeNaming(k kinds.Edge) *naming {
	return &naming{names: map[string]string{"from_id": k.Ends[0], "to_id": k.Ends[1], "edge": k.Name, "entity": k.Name},
		ids: narrowed(idForms{"from_id": k.FromIDs, "to_id": k.ToIDs})}
}

// childNaming returns the naming of a kind of children. In titles of problems it replaces comment
// and post with the kind's words.
func childNaming(k kinds.Child) *naming {
	n := k.Names()
	return &naming{
		names: map[string]string{"child_id": n.ID, "object_id": n.Parent, "entity": k.Name, "child": k.Name},
		ids:   narrowed(idForms{"object_id": k.ParentIDs, "author_id": k.AuthorIDs, "user_id": k.AuthorIDs}),
		nouns: strings.NewReplacer("{child}", k.Name, "{a child}", a(k.Name), "{A child}", capital(a(k.Name)), "{children}", k.Plural,
			"{Children}", capital(k.Plural), "{object}", k.Parent, "{an object}", a(k.Parent), "{An object}", capital(a(k.Parent))),
		prose: strings.NewReplacer("comment", k.Name, "post", k.Parent),
	}
}

// kindWords are a kind's words, names and codes that differ from the defaults of every kind.
type kindWords struct {
	operations map[string]words  // by operation; an empty string means the default
	paths      map[string]string // by operation
	schemas    map[string]string // names by the ending that other kinds append to their own name
	texts      map[string]string // descriptions of members
	names      map[string]string // of members
	codes      map[string]string // of problems
}

// words describe an operation in the document.
type words struct{ id, summary, description string }

// wordsOf returns the words of the kinds that had routes before kinds became data.
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
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The list includes every write that had committed by this time, except parked and scheduled events."`
}

// entityVersions is one page of the versions of an edge or a child.
type entityVersions struct {
	Items []any      `json:"items" nullable:"false" doc:"Newest first."`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The history includes every write that had committed by this time, except parked and scheduled events."`
}

// archetype has the common parts of the routes of edges and of children.
type archetype struct {
	*server
	*naming
	words          kindWords
	plural, title  string // in paths; in names of schemas
	dashed, tagged string // name and plural in operationIds
	entity         *huma.Schema
}

func newArchetype(s *server, name, plural string, n *naming) archetype {
	return archetype{server: s, naming: n, words: wordsOf(name), plural: plural, title: camel(name),
		dashed: dashed(name), tagged: dashed(plural)}
}

// route returns a route of the kind.
func (k archetype) route(operation, method, path, role string, status int, w words) route {
	own := k.words.operations[operation]
	return route{method: method, path: cmp.Or(k.words.paths[operation], path), id: cmp.Or(own.id, w.id),
		summary:     cmp.Or(own.summary, w.summary),
		description: cmp.Or(own.description, w.description), role: role, status: status, tag: capital(k.plural), naming: k.naming}
}

// word returns the kind's name for a name of the archetype that is not a member of the archetype's
// types.
func (k archetype) word(name string) string { return cmp.Or(k.words.names[name], name) }

// code returns the kind's code for a problem.
func (k archetype) code(code string) string { return cmp.Or(k.words.codes[code], code) }

func (k archetype) schemaName(name string) string { return cmp.Or(k.words.schemas[name], k.title+name) }

// schema makes a schema with the kind's names: see server.schema.
func (k archetype) schema(name string, of any, change ...func(*huma.Schema)) *huma.Schema {
	return k.server.schema(k.schemaName(name), k.naming, of, change...)
}

// describe sets the kind's own descriptions of members.
func (k archetype) describe(schema *huma.Schema) {
	for name, text := range k.words.texts {
		if p := schema.Properties[name]; p != nil {
			p.Description = text
		}
	}
}

// a returns the word with its article, which depends on the first sound: a user, a unit, an author.
func a(word string) string {
	if strings.ContainsRune("aeiou", rune(word[0])) && !soundsConsonant.MatchString(word) {
		return "an " + word
	}
	return "a " + word
}

// soundsConsonant matches words whose first letter is a vowel and whose first sound is not.
var soundsConsonant = regexp.MustCompile(`^(us[aeiou]|uni[^n]|uti|eu|one)`)

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

func dashed(name string) string { return strings.ReplaceAll(name, "_", "-") }

// of returns the kind's name for a name of the archetype, or the name itself if the kind has none
// for it.
func (n *naming) of(name string) string {
	if n == nil {
		return name
	}
	return cmp.Or(n.names[name], name)
}

// value returns v, a pointer to a struct, as a pointer to the same struct with the kind's names in
// JSON. Encode or decode what it returns. Structs within the struct keep their names.
func (n *naming) value(v any) any {
	of := reflect.ValueOf(v)
	return of.Convert(reflect.PointerTo(n.shape(of.Type().Elem()))).Interface()
}

// shape returns the type of t with the kind's names in its tags.
func (n *naming) shape(t reflect.Type) reflect.Type {
	if n == nil {
		return t
	}
	if shape, ok := n.shapes.Load(t); ok {
		return shape.(reflect.Type)
	}
	fields := make([]reflect.StructField, t.NumField())
	for i := range fields {
		fields[i] = t.Field(i)
		name, _, _ := strings.Cut(fields[i].Tag.Get("json"), ",")
		fields[i].Tag = reflect.StructTag(strings.Replace(string(fields[i].Tag), `json:"`+name, `json:"`+n.of(name), 1))
	}
	shape, _ := n.shapes.LoadOrStore(t, reflect.StructOf(fields))
	return shape.(reflect.Type)
}

// path returns a route's path with the kind's names for its parameters.
func (n *naming) path(path string) string {
	if n == nil {
		return path
	}
	for name, renamed := range n.names {
		path = strings.ReplaceAll(path, "{"+name+"}", "{"+renamed+"}")
	}
	return path
}

// namedContext has the parameters of a request by the archetype's names, by which the framework
// reads them.
type namedContext struct {
	anyContext
	*naming
}

type anyContext = huma.Context // a field of this name leaves the method Context alone

func (c namedContext) Param(name string) string { return c.anyContext.Param(c.of(name)) }
func (c namedContext) Query(name string) string { return c.anyContext.Query(c.of(name)) }
func (c namedContext) Unwrap() huma.Context     { return c.anyContext }

// document describes the parameters of an operation with the kind's names.
func (n *naming) document(op *huma.Operation) {
	if n == nil {
		return
	}
	if len(n.countable) == 0 {
		op.Parameters = slices.DeleteFunc(op.Parameters, func(p *huma.Param) bool { return p.Name == "counts" && p.In == "query" })
	}
	for _, p := range op.Parameters {
		if text := n.text(p.Description); text != p.Description {
			p.Description, p.Schema.Description = text, text
		}
		if form, ok := n.ids[p.Name]; ok {
			narrowID(p.Schema, form, exampleOf(p.Name))
		}
		switch {
		case p.Name == "counts" && p.In == "query":
			p.Schema.Items.Enum, p.Schema.Examples, p.Example = n.countable, nil, n.countable[:1]
			p.Schema.Items.PrecomputeMessages()
		case p.Name == "order":
			if n.flat {
				p.Description = n.text(flatOrders)
				p.Schema.Description = p.Description
			}
			p.Schema.Enum = slices.DeleteFunc(p.Schema.Enum, func(v any) bool {
				return v == "top" && !n.ranked || v == "threaded" && n.flat
			})
			p.Schema.PrecomputeMessages()
		}
		p.Name = n.of(p.Name)
	}
	for _, answer := range op.Responses {
		for _, h := range answer.Headers {
			h.Description, h.Schema.Description = n.text(h.Description), n.text(h.Schema.Description)
		}
	}
	if n.filter != nil {
		op.Parameters = append(op.Parameters, n.filter)
	}
}

// text returns a description with the kind's nouns.
func (n *naming) text(text string) string {
	if n == nil || n.nouns == nil {
		return text
	}
	return n.nouns.Replace(text)
}

// title returns the title of a problem with the kind's words.
func (n *naming) title(text string) string {
	if n == nil || n.prose == nil {
		return text
	}
	return n.prose.Replace(text)
}

// tell renames the title and the parameters of a problem to the kind's names.
func (n *naming) tell(p *Problem) {
	if n == nil {
		return
	}
	p.Title = n.title(p.Title)
	for i := range p.Errors {
		p.Errors[i].Parameter = n.of(p.Errors[i].Parameter)
	}
}

// checkIDs returns the errors of ids of the path that do not have the form of their object's ids.
func (n *naming) checkIDs(ctx huma.Context) (all []FieldError) {
	if n == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(n.ids)) {
		text := ctx.Param(n.of(name))
		if text == "" { // the path has no such id
			continue
		}
		if _, err := n.ids[name].ParseID(text); err != nil {
			all = append(all, FieldError{Detail: err.Error(), Parameter: n.of(name)})
		}
	}
	return all
}

// camel turns "direct_message" into "DirectMessage", as names of schemas are usually written.
func camel(name string) string {
	var b strings.Builder
	for part := range strings.SplitSeq(name, "_") {
		if part != "" {
			b.WriteString(capital(part))
		}
	}
	return b.String()
}

// schema registers the schema of a struct with the kind's names, after the given changes, and
// returns a reference to it. A nil naming changes no name.
func (s *server) schema(name string, n *naming, of any, change ...func(*huma.Schema)) *huma.Schema {
	registry := s.api.OpenAPI().Components.Schemas
	if _, taken := registry.Map()[name]; taken {
		panic(fmt.Sprintf("api: two schemas are called %s", name)) // see build
	}
	schema := huma.SchemaFromType(registry, n.shape(reflect.TypeOf(of)))
	for _, property := range schema.Properties {
		property.Description = n.text(property.Description)
	}
	n.narrow(schema)
	for _, f := range change {
		f(schema)
	}
	schema.PrecomputeMessages()
	registry.Map()[name] = schema
	return &huma.Schema{Ref: "#/components/schemas/" + name}
}

// narrow gives the ids among the members of a schema their forms.
func (n *naming) narrow(s *huma.Schema) {
	if n == nil {
		return
	}
	for name, form := range n.ids {
		if p := s.Properties[n.of(name)]; p != nil {
			narrowID(p, form, exampleOf(name))
		}
	}
}

// exampleOf returns the integer for the example of an id, by the archetype's name. The two ends of
// an edge differ.
func exampleOf(name string) string {
	if name == "from_id" {
		return "7"
	}
	return "42"
}

// property sets a member of a schema. A required member is never missing.
func property(name string, of *huma.Schema, required bool) func(*huma.Schema) {
	return func(s *huma.Schema) {
		s.Properties[name] = of
		if required && !slices.Contains(s.Required, name) {
			s.Required = append(s.Required, name)
		}
	}
}

// refer returns a reference to a schema with a description of its own.
func refer(to *huma.Schema, description string) *huma.Schema {
	return &huma.Schema{Ref: to.Ref, Description: description}
}

// without removes members from a schema.
func without(names ...string) func(*huma.Schema) {
	return func(s *huma.Schema) {
		for _, name := range names {
			delete(s.Properties, name)
		}
		s.Required = slices.DeleteFunc(s.Required, func(name string) bool { return slices.Contains(names, name) })
	}
}

// arrayOf returns the schema of a list that is never null.
func arrayOf(items *huma.Schema, description string) *huma.Schema {
	return &huma.Schema{Type: huma.TypeArray, Items: items, Description: description}
}

// attributesOf tells which attributes a body must have.
type attributesOf int

const (
	written  attributesOf = iota // in a write: required ones without a default
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
			if n, ok := v.(int64); ok {
				v = float64(n) // as the framework compares numbers
			}
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

// jsonBody describes a body that the framework validates and the handler decodes itself.
func jsonBody(schema *huma.Schema, required bool) *huma.RequestBody {
	return &huma.RequestBody{Required: required, Content: map[string]*huma.MediaType{"application/json": {Schema: schema}}}
}

// operation returns a registered operation of the document.
func (s *server) operation(method, path string) *huma.Operation {
	all := operationsAt(s.api.OpenAPI().Paths[path])
	return all[slices.IndexFunc(all, func(op *huma.Operation) bool { return op.Method == method })]
}
