package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
)

// edgeBody is an edge as answers show it.
type edgeBody struct {
	From         event.ID        `json:"from_id"`
	To           event.ID        `json:"to_id"`
	Status       string          `json:"status" enum:"ACTIVE"`
	Version      int64           `json:"version" doc:"Rises by one with each change; also the ETag."`
	CreatedAt    event.Time      `json:"created_at" format:"date-time"`
	PositionedAt event.Time      `json:"positioned_at" format:"date-time" doc:"When the edge last became active; lists are ordered by it."`
	UpdatedAt    event.Time      `json:"updated_at" format:"date-time"`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

// pastEdge is an edge at an earlier version.
type pastEdge struct {
	From         event.ID        `json:"from_id" example:"7"`
	To           event.ID        `json:"to_id" example:"42"`
	Status       string          `json:"status" enum:"ACTIVE,REMOVED" example:"ACTIVE"`
	Version      int64           `json:"version" example:"3"`
	CreatedAt    event.Time      `json:"created_at" format:"date-time"`
	PositionedAt event.Time      `json:"positioned_at" format:"date-time" doc:"When the edge last became active."`
	UpdatedAt    event.Time      `json:"updated_at" format:"date-time"`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

func edgeBodyOf(e event.Edge) *edgeBody {
	return &edgeBody{
		From: e.From, To: e.To, Status: e.Status, Version: e.Version,
		CreatedAt: e.CreatedAt, PositionedAt: e.PositionedAt, UpdatedAt: e.UpdatedAt, Attributes: e.Attributes,
	}
}

// edgeVersion is a version of an edge.
type edgeVersion struct {
	VersionInfo
	Edge any `json:"edge"`
}

// edgePair names an edge in a body.
type edgePair struct {
	From userID `json:"from_id" example:"7"`
	To   userID `json:"to_id" example:"42"`
}

// edgePairs is the body of a check.
type edgePairs struct {
	Pairs []json.RawMessage `json:"pairs" minItems:"1" maxItems:"500" nullable:"false" doc:"1 to 500 pairs. A repeated pair gets a repeated answer."`
}

// edgeOperation puts or removes an edge. The kind's schemas say which members it has.
type edgeOperation struct {
	Op         string          `json:"op"`
	From       userID          `json:"from_id" example:"7"`
	To         userID          `json:"to_id" example:"42"`
	Attributes json.RawMessage `json:"attributes,omitempty"`
	IfMatch    *ifMatch        `json:"if_match,omitempty"`
}

// edgeRelation says whether the edges between the two ends of a pair exist.
type edgeRelation struct {
	From         event.ID    `json:"from_id" example:"7"`
	To           event.ID    `json:"to_id" example:"42"`
	Active       bool        `json:"active" doc:"True if the edge exists." example:"true"`
	Reversed     *bool       `json:"reversed,omitempty" doc:"True if the edge in the other direction exists." example:"false"`
	PositionedAt *event.Time `json:"positioned_at,omitempty" format:"date-time" doc:"When active last became true; absent if it is false."`
}

// edgeRelations answers a check.
type edgeRelations struct {
	Items []any      `json:"items" nullable:"false" doc:"One per pair, in the order of the request."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The answer includes every write that had committed by this time, except parked and scheduled events."`
}

// edgeItem is one line of a list of edges.
type edgeItem struct {
	Object       event.ID        `json:"object_id"`
	PositionedAt event.Time      `json:"positioned_at" format:"date-time" doc:"When the edge last became active; the list is ordered by it, newest first."`
	Attributes   json.RawMessage `json:"attributes,omitempty"`
}

// PairPath names an edge.
type PairPath struct {
	From id `path:"from_id"`
	To   id `path:"to_id"`
}

type edgeGetInput struct {
	PairPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: the answer is 304 if it is still current."`
}

// attributesInput names an edge of a kind with attributes, and carries them.
type attributesInput struct {
	PairPath
	IfMatch string           `header:"If-Match" doc:"The ETag of the version to change, or *."`
	Body    *json.RawMessage // its schema depends on the kind
}

type attributesPatch struct {
	PairPath
	IfMatch string           `header:"If-Match" doc:"Required: the ETag that the change is about, or *."`
	Body    *json.RawMessage // its schema depends on the kind
}

type guardedPair struct {
	PairPath
	IfMatch string `header:"If-Match" doc:"The ETag of the version to remove, or *."`
}

type edgeOutput struct {
	Status int
	ETag   string `header:"ETag"`
	WriteToken
	Body any
}

type noContent struct{ WriteToken }

type edgeCheckInput struct {
	Body *json.RawMessage // its schema depends on the kind
}

type edgeVersionsInput struct {
	PairPath
	Page
}

type anyOutput struct{ Body any }

// edgeRoutes are the routes of one kind of edges.
type edgeRoutes struct {
	archetype
	k kinds.Edge
}

// addEdgeRoutes registers all routes of a kind of edges except the counts of objects.
func (s *server) addEdgeRoutes(k kinds.Edge) {
	e := &edgeRoutes{archetype: newArchetype(s, k.Name, k.Plural, edgeNaming(k)), k: k}
	for _, name := range []string{"active", "reversed"} {
		e.names[name] = e.word(name)
	}
	e.entity = e.schema("", edgeBody{}, e.attributes(answered))
	s.entities[k.Name] = e.entity
	if len(k.Attributes) > 0 {
		s.current = append(s.current, e.entity)
	}
	e.singleRoutes()
	e.attributeRoutes()
	e.batchRoutes()
	e.checkRoute()
	e.listRoutes()
	e.versionRoute()
}

// attributes sets the kind's attributes in a schema. It removes the member if the kind has none.
func (e *edgeRoutes) attributes(in attributesOf) func(*huma.Schema) {
	if len(e.k.Attributes) == 0 {
		return without("attributes")
	}
	return property("attributes", attributesSchema(e.k.Attributes, in), in == answered)
}

func (e *edgeRoutes) path() string { return "/v1/" + e.k.Plural + "/{from_id}/{to_id}" }

// self returns the code of the problem of an edge from an object to itself, or nil if the kind
// allows such edges.
func (e *edgeRoutes) self() []string {
	if !e.k.NoSelf() {
		return nil
	}
	return []string{e.code(codeSelfEdge)}
}

// ofTarget returns the codes of the problems of a put whose target is a child.
func (e *edgeRoutes) ofTarget() []string {
	if !e.k.ToChild {
		return nil
	}
	return []string{codeNotFound, codeTargetGone}
}

func (e *edgeRoutes) singleRoutes() {
	kind := a(e.k.Name)
	put := e.route("put", http.MethodPut, e.path(), tokens.RoleWrite, http.StatusCreated, words{"put-" + e.dashed, "Put " + kind,
		"201 if the edge is new, 200 if it existed. A request that changes nothing makes no event."})
	put.codes, put.answer = append(e.self(), e.ofTarget()...), e.entity
	if e.k.ToChild {
		put.description += fmt.Sprintf(" 404 if the %[1]s does not exist, 409 if it is deleted, hidden, removed or erased, even if the "+
			"edge exists. When the %[1]s is erased, all edges to it are removed.", e.k.To)
	}
	put.extraStatuses = map[int]string{http.StatusOK: cmp.Or(e.words.texts["put 200"], "The edge existed.")}
	remove := e.route("remove", http.MethodDelete, e.path(), tokens.RoleWrite, http.StatusNoContent,
		words{"remove-" + e.dashed, "Remove " + kind,
			"204 also if the edge did not exist; then there is no event."})
	remove.codes = e.self()
	if len(e.k.Attributes) == 0 {
		register(e.server, put, func(ctx context.Context, in *PairPath) (*edgeOutput, error) {
			return e.write(ctx, store.EdgeWrite{From: in.From.ID, To: in.To.ID})
		})
	} else {
		put.description += " The body has all attributes: missing ones get their defaults. With a version in If-Match, 404 if the edge " +
			"does not exist."
		if e.k.Optional() {
			put.description += " Without a body an active edge keeps its attributes."
		}
		put.body = jsonBody(attributesSchema(e.k.Attributes, written), false)
		put.codes = append(put.codes, writing(codeVersionStale)...)
		if !slices.Contains(put.codes, codeNotFound) {
			put.codes = append(put.codes, codeNotFound)
		}
		register(e.server, put, e.putAttributes)
	}
	get := e.route("get", http.MethodGet, e.path(), tokens.RoleRead, http.StatusOK, words{"get-" + e.dashed, "Read " + kind,
		"Reads the truth. 404 if the edge does not exist, whether or not it existed before."})
	get.codes, get.answer, get.extraStatuses = []string{codeNotFound}, e.entity,
		map[int]string{http.StatusNotModified: "If-None-Match names the current version."}
	register(e.server, get, e.get)
	if len(e.k.Attributes) == 0 {
		register(e.server, remove, func(ctx context.Context, in *PairPath) (*noContent, error) { return e.remove(ctx, *in, "") })
	} else {
		remove.description += " With a version in If-Match, 404 if the edge does not exist."
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
	r := e.route("patch", http.MethodPatch, e.path(), tokens.RoleWrite, http.StatusOK, words{"patch-" + e.dashed,
		"Change attributes of " + a(e.k.Name), "Send the attributes to change (RFC 7396: null removes one, or restores its default). A " +
			"request that changes nothing makes no event."})
	r.answer = e.entity
	r.body = jsonBody(attributesSchema(e.k.Attributes, changed), true)
	r.codes = append(writing(codeNotFound, codeVersionStale, codeIfMatchMissing), e.self()...)
	if e.k.ToChild {
		r.codes = append(r.codes, codeTargetGone)
	}
	register(e.server, r, e.patch)
}

// ifMatch reads the optional If-Match of a write.
func (e *edgeRoutes) ifMatch(header string) (int64, error) {
	if header == "" {
		return store.AnyVersion, nil
	}
	return e.ifVersion(header)
}

// creates counts a new edge against the limit of the user that it leads from.
func (e *edgeRoutes) creates(ctx context.Context, from event.ID) error {
	if e.k.From != authors {
		return nil
	}
	return e.limitAuthor(ctx, from)
}

// authors is the object whose ids are authors. The limits per user count these ids.
const authors = kinds.Author

func (e *edgeRoutes) putAttributes(ctx context.Context, in *attributesInput) (*edgeOutput, error) {
	version, err := e.ifMatch(in.IfMatch)
	if err != nil {
		return nil, err
	}
	w := store.EdgeWrite{From: in.From.ID, To: in.To.ID, IfVersion: version}
	if in.Body != nil {
		w.Attributes = *in.Body
	}
	return e.write(ctx, w)
}

func (e *edgeRoutes) patch(ctx context.Context, in *attributesPatch) (*edgeOutput, error) {
	version, err := e.ifVersion(in.IfMatch)
	if err != nil {
		return nil, err
	}
	return e.write(ctx, store.EdgeWrite{From: in.From.ID, To: in.To.ID, Attributes: *in.Body, Merge: true, IfVersion: version})
}

// write puts an edge.
func (e *edgeRoutes) write(ctx context.Context, w store.EdgeWrite) (*edgeOutput, error) {
	if !w.Merge { // a merge makes no edge
		if err := e.creates(ctx, w.From); err != nil {
			return nil, err
		}
	}
	c := callerOf(ctx)
	w.Meta = c.meta
	all, err := e.store.PutEdges(ctx, c.TenantID, e.k, []store.EdgeWrite{w})
	if err != nil {
		return nil, err
	}
	out := all[0]
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

// goneBy says what became of a child that takes no edges.
var goneBy = map[string]string{event.StateDeleted: "deleted by its author", event.StateHidden: "hidden by a moderator",
	event.StateRemoved: "removed by a moderator", event.StateErased: "erased"}

// refused turns an error of the store into the kind's problem. at points to the attributes in the
// body.
func (e *edgeRoutes) refused(err error, at string) error {
	var stale *store.StaleEdgeError
	var gone *store.TargetGoneError
	switch {
	case errors.Is(err, store.ErrSelf):
		p := e.problems.problem(e.self()[0], "")
		p.Errors = []FieldError{{Detail: p.Title, Parameter: e.of("to_id")}}
		return p
	case errors.As(err, &stale):
		p := e.problems.problem(codeVersionStale, fmt.Sprintf("the %s is at version %d", e.k.Name, stale.Current.Version))
		p.Current = &Current{e.value(edgeBodyOf(stale.Current))}
		return p
	case errors.As(err, &gone):
		return e.problems.problem(codeTargetGone, fmt.Sprintf("the %s was %s", gone.Kind, goneBy[gone.State]))
	case errors.Is(err, store.ErrTargetUnknown):
		return e.problems.problem(codeNotFound, fmt.Sprintf("there is no such %s", e.k.To))
	}
	return e.attributesRefused(err, at)
}

// attributesRefused turns attributes that do not fit their kind into a problem. at points to the
// attributes in the body.
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
	edge, err := e.store.GetEdge(ctx, callerOf(ctx).TenantID, e.k, in.From.ID, in.To.ID)
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
		{Meta: callerOf(ctx).meta, From: at.From.ID, To: at.To.ID, IfVersion: version},
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

// The operations of a batch of edges.
const (
	opPut    = "put"
	opRemove = "remove"
)

func (e *edgeRoutes) batchRoutes() {
	op := func(name string, change func(*huma.Schema), names ...any) *huma.Schema {
		return e.schema(name, edgeOperation{}, property("op", &huma.Schema{Type: huma.TypeString, Enum: names}, true), change)
	}
	var ops []kind
	if len(e.k.Attributes) == 0 {
		both := op("Operation", without("attributes", "if_match"), opPut, opRemove)
		ops = []kind{{opPut, both, e.take, e.batchPut}, {opRemove, both, e.take, e.batchRemove}}
	} else {
		ops = []kind{
			{opPut, op("Put", e.attributes(written), opPut), e.take, e.batchPut},
			{opRemove, op("Remove", without("attributes"), opRemove), e.take, e.batchRemove},
		}
	}
	r := e.route("batch", http.MethodPost, "/v1/"+e.k.Plural+":batch", tokens.RoleWrite, http.StatusOK,
		words{"batch-" + e.tagged, fmt.Sprintf("Put and remove up to %d %s", maxBatch, e.k.Plural), batchDescription})
	example := func(op, to string) map[string]any {
		return map[string]any{"op": op, e.of("from_id"): exampleID(e.k.FromIDs, "7"), e.of("to_id"): exampleID(e.k.ToIDs, to)}
	}
	e.batchRoute(r, ops, []any{example(opPut, "42"), example(opRemove, "43")})
}

func (e *edgeRoutes) take(ctx context.Context, raw []byte) (any, []string, error) {
	var op edgeOperation
	if err := e.takeApart(raw, e.value(&op)); err != nil {
		return nil, nil, err
	}
	from, err := e.parseID(e.k.FromIDs, "#/"+e.of("from_id"), string(op.From))
	if err != nil {
		return nil, nil, err
	}
	to, err := e.parseID(e.k.ToIDs, "#/"+e.of("to_id"), string(op.To))
	if err == nil && op.Op == opPut {
		err = e.creates(ctx, from)
	}
	w := store.EdgeWrite{Meta: callerOf(ctx).meta, From: from, To: to, Attributes: op.Attributes}
	if op.IfMatch != nil {
		w.IfVersion = int64(*op.IfMatch)
	}
	return w, []string{string(op.From + "/" + op.To)}, err
}

func (e *edgeRoutes) batchPut(ctx context.Context, ops []*operation) error {
	return writeAll(ctx, ops, e.k, e.store.PutEdges, func(op *operation, o store.EdgeOutcome) {
		status := http.StatusOK
		if o.Created {
			status = http.StatusCreated
		}
		e.done(ctx, op, e.refused(o.Err, "#/attributes"), o.Edge.Ref(e.k.Name),
			BatchOutcome{Status: status, Entity: e.value(edgeBodyOf(o.Edge))})
	})
}

func (e *edgeRoutes) batchRemove(ctx context.Context, ops []*operation) error {
	return writeAll(ctx, ops, e.k, e.store.RemoveEdges, func(op *operation, o store.EdgeOutcome) {
		e.done(ctx, op, e.refused(o.Err, "#/attributes"), o.Edge.Ref(e.k.Name), BatchOutcome{Status: http.StatusNoContent})
	})
}

func (e *edgeRoutes) checkRoute() {
	r := e.route("check", http.MethodPost, "/v1/"+e.k.Plural+":check", tokens.RoleRead, http.StatusOK, words{"check-" + e.tagged,
		"Check for up to 500 pairs whether there is " + a(e.k.Name), "Reads a projection. An unknown pair has no edge."})
	r.projected, r.codes = true, writing()
	pair := e.schema("Pair", edgePair{})
	pairs := e.schema("CheckInputBody", edgePairs{}, func(s *huma.Schema) { s.Properties["pairs"].Items = pair })
	relation := e.schema("Relation", edgeRelation{}, func(s *huma.Schema) {
		if e.k.From != e.k.To {
			without("reversed")(s)
		} else {
			s.Required = slices.Insert(s.Required, slices.Index(s.Required, e.of("active"))+1, e.of("reversed"))
		}
	}, e.describe)
	r.answer = e.schema("RelationList", edgeRelations{}, func(s *huma.Schema) { s.Properties["items"].Items = relation })
	r.body = jsonBody(pairs, true)
	register(e.server, r, e.check)
}

func (e *edgeRoutes) check(ctx context.Context, in *edgeCheckInput) (*anyOutput, error) {
	var body edgePairs
	if err := json.Unmarshal(*in.Body, &body); err != nil {
		return nil, err
	}
	pairs, items := make([]followercounts.Pair, len(body.Pairs)), make([]any, len(body.Pairs))
	for i, raw := range body.Pairs {
		var p edgePair
		err := json.Unmarshal(raw, e.value(&p))
		if err == nil {
			pairs[i].From, err = e.parseID(e.k.FromIDs, fmt.Sprintf("#/pairs/%d/%s", i, e.of("from_id")), string(p.From))
		}
		if err == nil {
			pairs[i].To, err = e.parseID(e.k.ToIDs, fmt.Sprintf("#/pairs/%d/%s", i, e.of("to_id")), string(p.To))
		}
		if err != nil {
			return nil, err
		}
	}
	read, err := e.readProjection(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		k := e.k
		k.Attributes = nil // the answer has none
		all, err := followercounts.Relations(ctx, tx, []kinds.Edge{k}, pairs)
		if err != nil {
			return err
		}
		for i := range all {
			r := all[i][0]
			item := &edgeRelation{From: pairs[i].From, To: pairs[i].To, Active: r.There}
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
	return &anyOutput{Body: edgeRelations{Items: items, AsOf: read.asOf}}, nil
}

func (e *edgeRoutes) versionRoute() {
	r := e.route("versions", http.MethodGet, e.path()+"/versions", tokens.RoleRead, http.StatusOK, words{"list-" + e.dashed + "-versions",
		"List the versions of " + a(e.k.Name) + ", newest first",
		"Shows who changed the edge, and when. An unknown pair has an empty list." + fromTheHistory})
	past := e.server.schema("Past"+e.title, e.naming, pastEdge{}, e.attributes(answered))
	item := e.schema("Version", edgeVersion{}, property(e.of("edge"), past, true))
	r.answer = e.schema("Versions", entityVersions{}, func(s *huma.Schema) { s.Properties["items"].Items = item })
	r.codes = []string{codeCursorInvalid}
	register(e.server, r, e.versions)
}

func (e *edgeRoutes) versions(ctx context.Context, in *edgeVersionsInput) (*anyOutput, error) {
	tenant, from, to := callerOf(ctx).TenantID, in.From.ID, in.To.ID
	l := list{tenant: tenant, name: fmt.Sprint("versions of ", e.k.Name, " ", from), of: to}
	rows, next, asOf, err := past(ctx, e.server, l, in.Page, func(tx pgx.Tx, before int64) ([]versioned.Version[event.Edge], error) {
		return history.Edges(e.k).Recent(ctx, tx, tenant, versioned.Key{from, to}, before, in.Limit+1)
	})
	if err != nil {
		return nil, err
	}
	items := make([]any, len(rows))
	for i, v := range rows {
		items[i] = e.value(&edgeVersion{infoOf(v, v.Object.Version), e.value(edgeBodyOf(v.Object))})
	}
	return &anyOutput{Body: entityVersions{Items: items, Next: next, AsOf: asOf}}, nil
}

const (
	fromAProjection = "Reads a projection."
	fromTheHistory  = " Reads the recorded history, which takes no Tidings-Token: `as_of` says how current it is."
)

// direction describes one of the two lists of a kind.
type direction struct {
	name   string // reverse or forward
	list   string // the kind's name for it, in the path and in cursors
	of, to string // objects or children: the owner of the list, and its items
}

// ObjectPath names the object that the answer or the request is about.
type ObjectPath struct {
	ID id `path:"owner_id" doc:"The {object}."`
}

// ownerNaming returns the naming of a route about an object of this type.
func (s *server) ownerNaming(object string) *naming {
	return &naming{names: map[string]string{"owner_id": object + "_id"}, nouns: strings.NewReplacer("{object}", object),
		ids: narrowed(idForms{"owner_id": s.kinds.IDs(object)})}
}

type edgesInput struct {
	ObjectPath
	Page
	query url.Values
}

// Resolve keeps the query, which may have the kind's filter.
func (in *edgesInput) Resolve(ctx huma.Context) []error {
	u := ctx.URL()
	in.query = u.Query()
	return nil
}

func (e *edgeRoutes) listRoutes() {
	for _, d := range []direction{
		{name: listReverse, list: e.k.Reverse, of: e.k.To, to: e.k.From},
		{name: listForward, list: e.k.Forward, of: e.k.From, to: e.k.To},
	} {
		owners := e.kinds.Plural(d.of)
		r := e.route(d.name, http.MethodGet, "/v1/"+owners+"/{owner_id}/"+d.list, tokens.RoleRead, http.StatusOK, words{
			"list-" + dashed(d.of+"-"+d.list), "List the " + d.list + " of " + a(d.of) + ", newest first",
			fromAProjection + " An unknown " + d.of + " has an empty list."})
		r.tag = capital(owners)
		r.projected, r.codes = true, []string{codeCursorInvalid}
		r.naming = e.ownerNaming(d.of)
		r.naming.names["object_id"] = d.to + "_id" // of an item
		maps.Copy(r.naming.ids, narrowed(idForms{"object_id": e.kinds.IDs(d.to)}))
		if name, ok := e.k.Filter(); ok && d.name == listReverse {
			r.naming.filter = &huma.Param{Name: name, In: "query", Description: "Only edges with this attribute.",
				Schema: attributesSchema(e.k.Attributes, changed).Properties[name]}
		}
		if name, ok := e.plainList(); ok {
			r.answer = e.api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[EdgeList](), true, name)
		} else {
			end := map[string]string{"reverse": "Origin", "forward": "Target"}[d.name]
			item := e.server.schema(e.title+end, r.naming, edgeItem{}, e.attributes(answered))
			r.answer = e.schema(end+"s", entityList{}, func(s *huma.Schema) { s.Properties["items"].Items = item })
		}
		register(e.server, r, func(ctx context.Context, in *edgesInput) (*anyOutput, error) { return e.list(ctx, d, r.naming, in) })
	}
}

// plainList returns the name of the schema of lists that have neither attributes nor the names of
// the kind: they are older than both.
func (e *edgeRoutes) plainList() (name string, ok bool) {
	name, ok = e.words.schemas["EdgeList"]
	return name, ok && len(e.k.Attributes) == 0
}

func (e *edgeRoutes) list(ctx context.Context, d direction, n *naming, in *edgesInput) (*anyOutput, error) {
	var filter string
	if p := n.filter; p != nil {
		if filter = in.query.Get(p.Name); filter != "" && !slices.Contains(p.Schema.Enum, any(filter)) {
			return nil, e.problems.problem(codeValidation, "validation failed",
				FieldError{Detail: fmt.Sprintf("expected one of %v", p.Schema.Enum), Parameter: p.Name})
		}
	}
	page, err := e.readList(ctx, d, in.ID.ID, in.Page, filter)
	if err != nil {
		return nil, err
	}
	if _, ok := e.plainList(); ok {
		return &anyOutput{Body: page}, nil
	}
	items := make([]any, len(page.Items))
	for i, item := range page.Items {
		items[i] = n.value(&edgeItem{Object: item.UserID, PositionedAt: item.PositionedAt, Attributes: item.attributes})
	}
	return &anyOutput{Body: entityList{Items: items, Next: page.Next, AsOf: page.AsOf}}, nil
}
