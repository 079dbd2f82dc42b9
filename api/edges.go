package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/tokens"
	"github.com/tidings/tidings/versioned"
)

// edgeBody is how an edge looks.
type edgeBody struct {
	From         event.ID        `json:"from_id"`
	To           event.ID        `json:"to_id"`
	Status       string          `json:"status" enum:"ACTIVE"`
	Version      int64           `json:"version" doc:"Rises by one with each change; also the ETag."`
	CreatedAt    event.Time      `json:"created_at" format:"date-time"`
	PositionedAt event.Time      `json:"positioned_at" format:"date-time" doc:"When the pair last became active: its place in lists."`
	UpdatedAt    event.Time      `json:"updated_at" format:"date-time"`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

// pastEdge is an edge as it was.
type pastEdge struct {
	From         event.ID        `json:"from_id" example:"7"`
	To           event.ID        `json:"to_id" example:"42"`
	Status       string          `json:"status" enum:"ACTIVE,REMOVED" example:"ACTIVE"`
	Version      int64           `json:"version" example:"3"`
	CreatedAt    event.Time      `json:"created_at" format:"date-time"`
	PositionedAt event.Time      `json:"positioned_at" format:"date-time" doc:"When the pair last became active."`
	UpdatedAt    event.Time      `json:"updated_at" format:"date-time"`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

func edgeBodyOf(e event.Edge) edgeBody {
	return edgeBody{
		From: e.From, To: e.To, Status: e.Status, Version: e.Version,
		CreatedAt: e.CreatedAt, PositionedAt: e.PositionedAt, UpdatedAt: e.UpdatedAt, Attributes: e.Attributes,
	}
}

// edgeVersion is a version of an edge.
type edgeVersion struct {
	VersionInfo
	Edge any `json:"edge"`
}

// edgeVersions is one page of an edge's versions.
type edgeVersions struct {
	Items []any      `json:"items" nullable:"false" doc:"The newest first."`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the history."`
}

// edgePair names an edge in a body.
type edgePair struct {
	From userID `json:"from_id" example:"7"`
	To   userID `json:"to_id" example:"42"`
}

// edgePairs is the body of a check.
type edgePairs struct {
	Pairs []json.RawMessage `json:"pairs" minItems:"1" maxItems:"500" nullable:"false" doc:"1 to 500. A pair may come twice, and is then answered twice."`
}

// edgeOperation puts or removes an edge.
type edgeOperation struct {
	Op   string `json:"op"`
	From userID `json:"from_id" example:"7"`
	To   userID `json:"to_id" example:"42"`
}

// edgeRelation is how the two ends of a pair stand to each other.
type edgeRelation struct {
	From         event.ID    `json:"from_id" example:"7"`
	To           event.ID    `json:"to_id" example:"42"`
	Active       bool        `json:"active" doc:"The edge is there." example:"true"`
	Reversed     *bool       `json:"reversed,omitempty" doc:"The edge from the one to the other is there." example:"false"`
	PositionedAt *event.Time `json:"positioned_at,omitempty" format:"date-time" doc:"When active last became true; absent unless it is."`
}

// edgeRelations answers a check.
type edgeRelations struct {
	Items []any      `json:"items" nullable:"false" doc:"One for each pair, in their order."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the answer."`
}

// edgeItem is one line of a list of edges.
type edgeItem struct {
	Object       event.ID        `json:"object_id"`
	PositionedAt event.Time      `json:"positioned_at" format:"date-time" doc:"When the pair last became active: the list's order, newest first."`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

// edgeList is one page.
type edgeList struct {
	Items []any      `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the list."`
}

// PairPath names an edge.
type PairPath struct {
	From id `path:"from_id"`
	To   id `path:"to_id"`
}

type edgeGetInput struct {
	PairPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: 304 while it is still the one."`
}

// attributesInput names an edge of a kind with attributes, and has them.
type attributesInput struct {
	PairPath
	IfMatch string           `header:"If-Match" doc:"The ETag that the change is about, or *."`
	Body    *json.RawMessage // as the kind says
}

type attributesPatch struct {
	PairPath
	IfMatch string           `header:"If-Match" doc:"Required: the ETag that the change is about, or *."`
	Body    *json.RawMessage // as the kind says
}

type guardedPair struct {
	PairPath
	IfMatch string `header:"If-Match" doc:"The ETag that the removal is about, or *."`
}

type edgeOutput struct {
	Status int
	ETag   string `header:"ETag"`
	WriteToken
	Body any
}

type noContent struct{ WriteToken }

type edgeCheckInput struct {
	Body *json.RawMessage // as the kind says
}

type edgeVersionsInput struct {
	PairPath
	Page
}

type anyOutput struct{ Body any }

// words are what the document says of an operation.
type words struct{ id, summary, description string }

// edgeWords are a kind's words, by operation, where they are other than those of every kind.
type edgeWords struct {
	operations map[string]words
	schemas    map[string]string // names by those that other kinds have
	texts      map[string]string // descriptions of members
	names      map[string]string // of members, operations of a batch and lists
	selfCode   string            // of the problem of an edge of an object to itself
}

// edgeRoutes are the routes of one kind of edges.
type edgeRoutes struct {
	*server
	*naming
	k      kinds.Edge
	words  edgeWords
	entity *huma.Schema
}

// addEdgeRoutes registers all routes of a kind of edges, but for the counts of objects.
func (s *server) addEdgeRoutes(k kinds.Edge) {
	e := &edgeRoutes{server: s, naming: edgeNaming(k), k: k, words: wordsOfEdges()[k.Name]}
	for _, name := range []string{"active", "reversed"} {
		e.names[name] = e.word(name)
	}
	e.names["entity"] = k.Name
	title := camel(k.Name)
	e.entity = s.schema(title, e.naming, edgeBody{}, e.attributes(answered))
	s.entities[k.Name] = e.entity
	e.singleRoutes(title)
	e.attributeRoutes()
	e.batchRoutes(title)
	e.checkRoute(title)
	e.listRoutes(title)
	e.versionRoute(title)
}

func (e *edgeRoutes) word(name string) string {
	if own, ok := e.words.names[name]; ok {
		return own
	}
	return name
}

func (e *edgeRoutes) schemaName(name string) string {
	if own, ok := e.words.schemas[name]; ok {
		return own
	}
	return camel(e.k.Name) + name
}

// attributes gives a schema the attributes of the kind, if it has any.
func (e *edgeRoutes) attributes(in attributesOf) func(*huma.Schema) {
	if len(e.k.Attributes) == 0 {
		return without("attributes")
	}
	return property("attributes", attributesSchema(e.k.Attributes, in), in == answered)
}

// describe gives members the kind's own descriptions.
func (e *edgeRoutes) describe(schema *huma.Schema) {
	for name, text := range e.words.texts {
		if p := schema.Properties[name]; p != nil {
			p.Description = text
		}
	}
}

// route is one of the kind's.
func (e *edgeRoutes) route(operation, method, path, role string, status int, w words) route {
	if own, ok := e.words.operations[operation]; ok {
		w = own
	}
	return route{method: method, path: path, id: w.id, summary: w.summary, description: w.description, role: role, status: status,
		tag: strings.ToUpper(e.k.Plural[:1]) + e.k.Plural[1:], naming: e.naming}
}

func (e *edgeRoutes) path() string { return "/v1/" + e.k.Plural + "/{from_id}/{to_id}" }

// self is the code of the problem of an edge of an object to itself, if the kind has none.
func (e *edgeRoutes) self() []string {
	if !e.k.NoSelf() {
		return nil
	}
	if e.words.selfCode != "" {
		return []string{e.words.selfCode}
	}
	return []string{codeSelfEdge}
}

// a is a word with its article.
func a(word string) string {
	if strings.ContainsRune("aeiou", rune(word[0])) {
		return "an " + word
	}
	return "a " + word
}

func (e *edgeRoutes) singleRoutes(string) {
	kind, dashed := a(e.k.Name), strings.ReplaceAll(e.k.Name, "_", "-")
	put := e.route("put", http.MethodPut, e.path(), tokens.RoleWrite, http.StatusCreated, words{"put-" + dashed, "Put " + kind,
		"201 when there was none, 200 when there was; without a change there is no event."})
	put.codes, put.answer = e.self(), e.entity
	put.also = map[int]string{http.StatusOK: "There was one."}
	if also, ok := e.words.texts["put 200"]; ok {
		put.also[http.StatusOK] = also
	}
	remove := e.route("remove", http.MethodDelete, e.path(), tokens.RoleWrite, http.StatusNoContent, words{"remove-" + dashed, "Remove " + kind,
		"204 also when there was none; then there is no event."})
	remove.codes = e.self()
	if len(e.k.Attributes) == 0 {
		register(e.server, put, func(ctx context.Context, in *PairPath) (*edgeOutput, error) { return e.put(ctx, *in, nil, "") })
	} else {
		put.description += " The body is the attributes, all of them: those that it leaves out get their defaults. Without a body an active one keeps its own."
		put.body = jsonBody(attributesSchema(e.k.Attributes, written), false)
		put.codes = append(put.codes, codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType, codeVersionStale, codeNotFound)
		register(e.server, put, func(ctx context.Context, in *attributesInput) (*edgeOutput, error) {
			return e.put(ctx, in.PairPath, in.Body, in.IfMatch)
		})
	}
	get := e.route("get", http.MethodGet, e.path(), tokens.RoleRead, http.StatusOK, words{"get-" + dashed, "Read " + kind,
		"From the truth. 404 when there is none, whether or not there ever was."})
	get.codes, get.answer, get.also = []string{codeNotFound}, e.entity, map[int]string{http.StatusNotModified: "If-None-Match names the version."}
	register(e.server, get, e.get)
	if len(e.k.Attributes) == 0 {
		register(e.server, remove, func(ctx context.Context, in *PairPath) (*noContent, error) { return e.remove(ctx, *in, "") })
	} else {
		remove.codes = append(remove.codes, codeVersionStale, codeNotFound)
		register(e.server, remove, func(ctx context.Context, in *guardedPair) (*noContent, error) {
			return e.remove(ctx, in.PairPath, in.IfMatch)
		})
	}
}

func (e *edgeRoutes) attributeRoutes() {
	if len(e.k.Attributes) == 0 {
		return
	}
	r := e.route("patch", http.MethodPatch, e.path(), tokens.RoleWrite, http.StatusOK, words{"patch-" + strings.ReplaceAll(e.k.Name, "_", "-"),
		"Change attributes of " + a(e.k.Name), "The body has those that change (RFC 7396: null takes one away, or back to its default). Without a change there is no event."})
	r.answer = e.entity
	r.body = jsonBody(attributesSchema(e.k.Attributes, changed), true)
	r.codes = []string{codeNotFound, codeVersionStale, codeIfMatchMissing, codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType}
	register(e.server, r, e.patch)
}

// ifMatch reads an If-Match that a write may have.
func (e *edgeRoutes) ifMatch(header string) (int64, error) {
	if header == "" {
		return store.AnyVersion, nil
	}
	return e.ifVersion(header)
}

// creates counts an edge that a user makes.
func (e *edgeRoutes) creates(ctx context.Context, from int64) error {
	if e.k.From != authors {
		return nil
	}
	return e.limitAuthor(ctx, from)
}

// authors is the object whose ids author_id and the limits of one user are about.
const authors = "user"

func (e *edgeRoutes) put(ctx context.Context, at PairPath, attributes *json.RawMessage, ifMatch string) (*edgeOutput, error) {
	version, err := e.ifMatch(ifMatch)
	if err != nil {
		return nil, err
	}
	if err := e.creates(ctx, at.From.int64()); err != nil {
		return nil, err
	}
	w := store.EdgeWrite{Meta: callerOf(ctx).meta, From: at.From.int64(), To: at.To.int64(), IfVersion: version}
	if attributes != nil {
		w.Attributes = *attributes
	}
	out, err := e.store.PutEdges(ctx, callerOf(ctx).TenantID, e.k, []store.EdgeWrite{w})
	if err != nil {
		return nil, err
	}
	return e.answerTo(ctx, out[0])
}

// answerTo is the answer to a put.
func (e *edgeRoutes) answerTo(ctx context.Context, out store.EdgeOutcome) (*edgeOutput, error) {
	if out.Err != nil {
		return nil, e.refused(out.Err, "#")
	}
	status := http.StatusOK
	if out.Created {
		status = http.StatusCreated
	}
	token, err := e.tokenOf(ctx, out.Edge.Ref(e.k.Name))
	if err != nil {
		return nil, err
	}
	return &edgeOutput{Status: status, ETag: etag(out.Edge.Version), WriteToken: token, Body: e.value(edgeBodyOf(out.Edge))}, nil
}

// refused says of an error of the store what the kind says of it. The attributes are at a pointer into the body.
func (e *edgeRoutes) refused(err error, at string) error {
	var stale *store.StaleEdgeError
	switch {
	case errors.Is(err, store.ErrSelf):
		p := e.problems.problem(e.self()[0], "")
		p.Errors = []FieldError{{Detail: p.Title, Parameter: e.of("to_id")}}
		return p
	case errors.As(err, &stale):
		p := e.problems.problem(codeVersionStale, fmt.Sprintf("the %s is at version %d", e.k.Name, stale.Current.Version))
		p.Current = &Current{e.value(edgeBodyOf(stale.Current))}
		return p
	}
	return e.attributesRefused(err, at)
}

// attributesRefused says where in a body attributes are that do not fit their kind.
func (s *server) attributesRefused(err error, at string) error {
	var bad *kinds.AttributeError
	if !errors.As(err, &bad) {
		return err
	}
	p := s.problems.problem(codeValidation, "validation failed")
	for _, f := range bad.Fields {
		p.Errors = append(p.Errors, FieldError{Detail: f.Detail, Pointer: at + f.Pointer})
	}
	return p
}

func (e *edgeRoutes) get(ctx context.Context, in *edgeGetInput) (*edgeOutput, error) {
	edge, err := e.store.GetEdge(ctx, callerOf(ctx).TenantID, e.k, in.From.int64(), in.To.int64())
	if err != nil {
		return nil, err
	}
	if !edge.Active() {
		return nil, store.ErrNotFound
	}
	return &edgeOutput{Status: okOr304(in.IfNoneMatch, edge.Version), ETag: etag(edge.Version), Body: e.value(edgeBodyOf(edge))}, nil
}

func (e *edgeRoutes) remove(ctx context.Context, at PairPath, ifMatch string) (*noContent, error) {
	version, err := e.ifMatch(ifMatch)
	if err != nil {
		return nil, err
	}
	out, err := e.store.RemoveEdges(ctx, callerOf(ctx).TenantID, e.k, []store.EdgeWrite{
		{Meta: callerOf(ctx).meta, From: at.From.int64(), To: at.To.int64(), IfVersion: version},
	})
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, e.refused(out[0].Err, "#")
	}
	token, err := e.tokenOf(ctx, out[0].Edge.Ref(e.k.Name))
	return &noContent{token}, err
}

// patchTries is how often a change of whatever version there is is merged again when another one came first.
const patchTries = 5

func (e *edgeRoutes) patch(ctx context.Context, in *attributesPatch) (*edgeOutput, error) {
	wanted, err := e.ifVersion(in.IfMatch)
	if err != nil {
		return nil, err
	}
	tenant, from, to := callerOf(ctx).TenantID, in.From.int64(), in.To.int64()
	for try := 1; ; try++ {
		edge, err := e.store.GetEdge(ctx, tenant, e.k, from, to)
		if err != nil {
			return nil, err
		}
		if !edge.Active() {
			return nil, store.ErrNotFound
		}
		if wanted != store.AnyVersion && wanted != edge.Version {
			return nil, e.refused(&store.StaleEdgeError{Kind: e.k, Current: edge}, "#")
		}
		merged, err := e.k.Patch(edge.Attributes, *in.Body)
		if err != nil {
			return nil, e.refused(err, "#")
		}
		out, err := e.store.PutEdges(ctx, tenant, e.k, []store.EdgeWrite{{Meta: callerOf(ctx).meta, From: from, To: to, Attributes: merged, IfVersion: edge.Version}})
		if err != nil {
			return nil, err
		}
		var stale *store.StaleEdgeError
		if wanted == store.AnyVersion && try < patchTries && errors.As(out[0].Err, &stale) {
			continue
		}
		return e.answerTo(ctx, out[0])
	}
}

func (e *edgeRoutes) batchRoutes(title string) {
	registry := e.api.OpenAPI().Components.Schemas
	put, remove := e.word("put"), e.word("remove")
	op := func(names ...any) func(*huma.Schema) {
		return property("op", &huma.Schema{Type: huma.TypeString, Enum: names}, true)
	}
	guard := func(*huma.Schema) {}
	if len(e.k.Attributes) > 0 {
		guard = property("if_match", registry.Schema(reflect.TypeFor[ifMatch](), false, ""), false)
	}
	var ops []kind
	if len(e.k.Attributes) == 0 {
		both := e.schema(e.schemaName("Operation"), e.naming, edgeOperation{}, op(put, remove))
		ops = []kind{{put, both, e.take, e.batchPut}, {remove, both, e.take, e.batchRemove}}
	} else {
		ops = []kind{
			{put, e.schema(title+"Put", e.naming, edgeOperation{}, op(put), e.attributes(written), guard), e.take, e.batchPut},
			{remove, e.schema(title+"Remove", e.naming, edgeOperation{}, op(remove), guard), e.take, e.batchRemove},
		}
	}
	w := words{"batch-" + strings.ReplaceAll(e.k.Plural, "_", "-"), fmt.Sprintf("Put and remove up to %d %s", maxBatch, e.k.Plural), ""}
	if own, ok := e.words.operations["batch"]; ok {
		w = own
	}
	example := map[string]any{"op": put, e.of("from_id"): "7", e.of("to_id"): "42"}
	e.batchRoute("/v1/"+e.k.Plural+":batch", w.id, strings.ToUpper(e.k.Plural[:1])+e.k.Plural[1:], w.summary, ops, []any{
		example, map[string]any{"op": remove, e.of("from_id"): "7", e.of("to_id"): "43"},
	})
}

func (e *edgeRoutes) take(ctx context.Context, f fields) (any, []string, error) {
	name := func(end string) (string, int64, error) {
		text, _ := f.object[e.of(end)].(string)
		n, err := e.parseID("#/"+e.of(end), text)
		return text, n, err
	}
	from, fromID, err := name("from_id")
	if err != nil {
		return nil, nil, err
	}
	to, toID, err := name("to_id")
	if err == nil && f.Op == e.word("put") {
		err = e.creates(ctx, fromID)
	}
	w := store.EdgeWrite{Meta: callerOf(ctx).meta, From: fromID, To: toID, Attributes: f.Attributes}
	if f.IfMatch != nil {
		w.IfVersion = int64(*f.IfMatch)
	}
	return w, []string{from + "/" + to}, err
}

func (e *edgeRoutes) batchPut(ctx context.Context, ops []*operation) error {
	return writeAll(ctx, ops, e.putEdges, func(op *operation, o store.EdgeOutcome) {
		status := http.StatusOK
		if o.Created {
			status = http.StatusCreated
		}
		e.done(ctx, op, e.refused(o.Err, "#/attributes"), o.Edge.Ref(e.k.Name), BatchOutcome{Status: status, Entity: e.value(edgeBodyOf(o.Edge))})
		op.naming = e.naming
	})
}

func (e *edgeRoutes) batchRemove(ctx context.Context, ops []*operation) error {
	return writeAll(ctx, ops, e.removeEdges, func(op *operation, o store.EdgeOutcome) {
		e.done(ctx, op, e.refused(o.Err, "#/attributes"), o.Edge.Ref(e.k.Name), BatchOutcome{Status: http.StatusNoContent})
	})
}

func (e *edgeRoutes) putEdges(ctx context.Context, tenant int64, in []store.EdgeWrite) ([]store.EdgeOutcome, error) {
	return e.store.PutEdges(ctx, tenant, e.k, in)
}

func (e *edgeRoutes) removeEdges(ctx context.Context, tenant int64, in []store.EdgeWrite) ([]store.EdgeOutcome, error) {
	return e.store.RemoveEdges(ctx, tenant, e.k, in)
}

func (e *edgeRoutes) checkRoute(string) {
	r := e.route("check", http.MethodPost, "/v1/"+e.k.Plural+":check", tokens.RoleRead, http.StatusOK, words{"check-" + strings.ReplaceAll(e.k.Plural, "_", "-"),
		"Ask of up to 500 pairs whether there is " + a(e.k.Name), "From a projection. Of a pair that nobody knows there is none."})
	r.projected, r.codes = true, []string{codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType}
	pair := e.schema(e.schemaName("Pair"), e.naming, edgePair{})
	pairs := e.server.schema(e.schemaName("CheckInputBody"), nil, edgePairs{}, func(s *huma.Schema) { s.Properties["pairs"].Items = pair })
	relation := e.schema(e.schemaName("Relation"), e.naming, edgeRelation{}, func(s *huma.Schema) {
		if e.k.From != e.k.To {
			without("reversed")(s)
		} else {
			s.Required = slices.Insert(s.Required, slices.Index(s.Required, e.of("active"))+1, e.of("reversed"))
		}
	}, e.describe)
	r.answer = e.server.schema(e.schemaName("RelationList"), nil, edgeRelations{}, func(s *huma.Schema) { s.Properties["items"].Items = relation })
	r.body = jsonBody(pairs, true)
	register(e.server, r, e.check)
}

// schema is that of the server, of the kind.
func (e *edgeRoutes) schema(name string, n *naming, of any, change ...func(*huma.Schema)) *huma.Schema {
	return e.server.schema(name, n, of, change...)
}

func (e *edgeRoutes) check(ctx context.Context, in *edgeCheckInput) (*anyOutput, error) {
	var body edgePairs
	if err := json.Unmarshal(*in.Body, &body); err != nil {
		return nil, err
	}
	pairs, items := make([]followercounts.Pair, len(body.Pairs)), make([]any, len(body.Pairs))
	for i, raw := range body.Pairs {
		var p edgePair
		err := e.decode(raw, &p)
		if err == nil {
			pairs[i].From, err = e.parseID(fmt.Sprintf("#/pairs/%d/%s", i, e.of("from_id")), string(p.From))
		}
		if err == nil {
			pairs[i].To, err = e.parseID(fmt.Sprintf("#/pairs/%d/%s", i, e.of("to_id")), string(p.To))
		}
		if err != nil {
			return nil, err
		}
	}
	asOf, err := e.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		all, err := followercounts.Relations(ctx, tx, e.k.Name, pairs)
		if err != nil {
			return err
		}
		for i, r := range all {
			item := edgeRelation{From: event.ID(pairs[i].From), To: event.ID(pairs[i].To), Active: r.There}
			if e.k.From == e.k.To {
				item.Reversed = &r.Back
			}
			if r.There {
				item.PositionedAt = &event.Time{Time: r.PositionedAt}
			}
			items[i] = e.value(item)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &anyOutput{Body: edgeRelations{Items: items, AsOf: asOf}}, nil
}

func (e *edgeRoutes) versionRoute(title string) {
	r := e.route("versions", http.MethodGet, e.path()+"/versions", tokens.RoleRead, http.StatusOK, words{"list-" + strings.ReplaceAll(e.k.Name, "_", "-") + "-versions",
		"List the versions of " + a(e.k.Name) + ", newest first", "Who did what, when. A pair that never was has none." + fromTheHistory})
	past := e.schema("Past"+title, e.naming, pastEdge{}, e.attributes(answered))
	item := e.schema(title+"Version", e.naming, edgeVersion{}, property(e.of("edge"), past, true))
	r.answer = e.schema(title+"Versions", nil, edgeVersions{}, func(s *huma.Schema) { s.Properties["items"].Items = item })
	r.codes = []string{codeCursorInvalid}
	register(e.server, r, e.versions)
}

func (e *edgeRoutes) versions(ctx context.Context, in *edgeVersionsInput) (*anyOutput, error) {
	tenant, from, to := callerOf(ctx).TenantID, in.From.int64(), in.To.int64()
	l := list{tenant: tenant, name: fmt.Sprint("versions of ", e.k.Name, " ", from), of: to}
	before, err := e.before(l, in.Cursor)
	if err != nil {
		return nil, err
	}
	var rows []versioned.Version[event.Edge]
	asOf, err := e.readHistory(ctx, tenant, func(tx pgx.Tx) (err error) {
		rows, err = history.Edges(e.k).Recent(ctx, tx, tenant, versioned.Key{from, to}, before, in.Limit+1)
		return err
	})
	if err != nil {
		return nil, err
	}
	rows, next, err := newPage(e.server, l, in.Limit, rows, position)
	if err != nil {
		return nil, err
	}
	items := make([]any, len(rows))
	for i, v := range rows {
		f := v.Object
		items[i] = e.value(edgeVersion{infoOf(v, f.Version), e.value(pastEdge{From: f.From, To: f.To, Status: f.Status, Version: f.Version,
			CreatedAt: f.CreatedAt, PositionedAt: f.PositionedAt, UpdatedAt: f.UpdatedAt, Attributes: f.Attributes})})
	}
	return &anyOutput{Body: edgeVersions{Items: items, Next: next, AsOf: asOf}}, nil
}

const (
	fromAProjection = "From a projection."
	fromTheHistory  = " From the history, which is a record and takes no Tidings-Token: `as_of` says how current it is."
)

// direction is one of the two lists of a kind.
type direction struct {
	name   string // reverse or forward
	list   string // as the kind calls it, in the path and in cursors
	of, to string // objects: whose list it is, and what is in it
}

// ObjectPath names an object.
type ObjectPath struct {
	ID id `path:"id" doc:"The object."`
}

type edgesInput struct {
	ObjectPath
	Page
}

type filteredInput struct {
	ObjectPath
	Page
	Filter map[string]string `query:"filter,deepObject"`
}

func (e *edgeRoutes) listRoutes(title string) {
	for _, d := range []direction{
		{name: listReverse, list: e.k.Reverse, of: e.k.To, to: e.k.From},
		{name: listForward, list: e.k.Forward, of: e.k.From, to: e.k.To},
	} {
		r := e.route(d.name, http.MethodGet, "/v1/"+e.kinds.Objects[d.of]+"/{id}/"+d.list, tokens.RoleRead, http.StatusOK, words{
			"list-" + strings.ReplaceAll(d.of+"-"+d.list, "_", "-"), "List the " + d.list + " of " + a(d.of) + ", newest first",
			fromAProjection + " " + strings.ToUpper(a(d.of)[:1]) + a(d.of)[1:] + " that nobody knows has none."})
		objects := e.kinds.Objects[d.of]
		r.tag = strings.ToUpper(objects[:1]) + objects[1:]
		r.projected, r.codes = true, []string{codeCursorInvalid}
		r.naming = &naming{names: map[string]string{"object_id": d.to + "_id"}, texts: map[string]string{"id": "The " + d.of + "."}, filters: filters(e.k)}
		if name, ok := e.words.schemas["EdgeList"]; ok {
			r.answer = e.api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[EdgeList](), true, name)
		} else {
			end := map[string]string{"reverse": "Origin", "forward": "Target"}[d.name]
			item := e.schema(title+end, r.naming, edgeItem{}, e.attributes(answered))
			r.answer = e.schema(title+end+"s", nil, edgeList{}, func(s *huma.Schema) { s.Properties["items"].Items = item })
		}
		if len(r.naming.filters) > 0 && d.name == listReverse {
			register(e.server, r, func(ctx context.Context, in *filteredInput) (*anyOutput, error) {
				return e.list(ctx, d, r.naming, in.ID.int64(), in.Page, in.Filter)
			})
			continue
		}
		r.naming.filters = nil
		register(e.server, r, func(ctx context.Context, in *edgesInput) (*anyOutput, error) {
			return e.list(ctx, d, r.naming, in.ID.int64(), in.Page, nil)
		})
	}
}

// filters are the attributes by which the reverse list can be asked for.
func filters(k kinds.Edge) map[string]*huma.Schema {
	all := make(map[string]*huma.Schema)
	schema := attributesSchema(k.Attributes, changed)
	for _, name := range k.Filters() {
		all[name] = schema.Properties[name]
	}
	return all
}

func (e *edgeRoutes) list(ctx context.Context, d direction, n *naming, of int64, in Page, filter map[string]string) (*anyOutput, error) {
	for name, value := range filter {
		if schema := n.filters[name]; schema == nil || !slices.Contains(schema.Enum, any(value)) {
			return nil, e.problems.problem(codeValidation, "validation failed", FieldError{Detail: fmt.Sprintf("expected one of %v", schema.Enum), Parameter: name})
		}
	}
	page, err := e.readList(ctx, d, of, in, filter)
	if err != nil {
		return nil, err
	}
	if _, ok := e.words.schemas["EdgeList"]; ok {
		return &anyOutput{Body: page}, nil
	}
	items := make([]any, len(page.Items))
	for i, item := range page.Items {
		items[i] = n.value(edgeItem{Object: item.UserID, PositionedAt: item.PositionedAt, Attributes: item.attributes})
	}
	return &anyOutput{Body: edgeList{Items: items, Next: page.Next, AsOf: page.AsOf}}, nil
}
