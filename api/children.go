package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// childBody is a child as answers show it. A child that is gone (hidden, removed, deleted, erased)
// is a tombstone: it has its state, but neither author, body nor attributes.
type childBody struct {
	ID         string          `json:"child_id" format:"uuid"`
	Object     event.ID        `json:"object_id"`
	ParentID   string          `json:"parent_id,omitempty" format:"uuid" doc:"Absent on a top-level {child}."`
	AuthorID   event.ID        `json:"author_id,omitempty" doc:"Absent on a tombstone."`
	Slug       string          `json:"slug,omitempty" doc:"Short and unique within the {object}: the permalink."`
	Depth      int             `json:"depth,omitempty" doc:"1 for a top-level {child}."`
	Body       string          `json:"body,omitempty" doc:"Absent on a tombstone."`
	State      string          `json:"state"`
	Version    int64           `json:"version" doc:"Rises by one with each change; also the ETag."`
	CreatedAt  event.Time      `json:"created_at" format:"date-time"`
	UpdatedAt  event.Time      `json:"updated_at" format:"date-time"`
	Attributes json.RawMessage `json:"attributes,omitempty"`

	Counts map[string]any `json:"counts,omitempty" doc:"Only in a list that asks for them."`

	// Only in a tree, and in the answer for a permalink (childthreads.go):
	Replies []any       `json:"replies,omitempty"`
	Thread  any         `json:"thread,omitempty"`
	AsOf    *event.Time `json:"as_of,omitempty" format:"date-time" doc:"The answer includes every write that had committed by this time, except parked and scheduled events."`
}

func childBodyOf(c event.Child) *childBody {
	v := &childBody{
		ID: c.ID, Object: c.Parent, ParentID: c.ReplyTo, AuthorID: c.AuthorID, Slug: c.Slug, Body: c.Body,
		State: c.State(), Version: c.Version, CreatedAt: c.CreatedAt, UpdatedAt: c.UpdatedAt, Attributes: c.Attributes,
	}
	if c.Path != "" {
		v.Depth = store.Depth(c.Path)
	}
	if !event.BodyTravels(c.AuthorState, c.ModerationState) {
		v.AuthorID, v.Body, v.Attributes = "", "", nil
	}
	return v
}

// newChild is the body of a create.
type newChild struct {
	AuthorID   userID          `json:"author_id"`
	Body       string          `json:"body" doc:"1 to 16384 bytes of UTF-8 after trimming."`
	ParentID   *childID        `json:"parent_id,omitempty" doc:"The {child} of the same {object} that this one replies to."`
	Attributes json.RawMessage `json:"attributes,omitempty"`
}

// childEdit is the body of an edit.
type childEdit struct {
	Body       *string         `json:"body,omitempty" nullable:"false" doc:"1 to 16384 bytes of UTF-8 after trimming."`
	Attributes json.RawMessage `json:"attributes,omitempty"`
}

// UnderPath names the parent object of children.
type UnderPath struct {
	Object id `path:"object_id"`
}

// ChildPath names a child.
type ChildPath struct {
	ID childID `path:"child_id"`
}

type childGetInput struct {
	ChildPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: the answer is 304 if it is still current."`
}

type newChildInput struct {
	UnderPath
	Key  string           `header:"Idempotency-Key" maxLength:"255" pattern:"^[!-~]+$" patternDescription:"1 to 255 visible ASCII characters" doc:"Makes a retry safe: the same author and key get the first answer again."`
	Body *json.RawMessage // its schema depends on the kind
}

type changeInput struct {
	ChildPath
	IfMatch string           `header:"If-Match" doc:"Required: the ETag of the version to edit, or *."`
	Body    *json.RawMessage // its schema depends on the kind
}

type deleteInput struct {
	ChildPath
	IfMatch string `header:"If-Match" doc:"Required: the ETag of the version to delete, or *."`
}

type childOutput struct {
	Status   int
	ETag     string `header:"ETag"`
	Location string `header:"Location" doc:"Only of a create: the address of the new {child}."`
	Replayed string `header:"Idempotency-Replayed" doc:"Only of a create: true if an earlier request with this key made the {child}."`
	WriteToken
	Body any
}

// childRoutes are the routes of one kind of children.
type childRoutes struct {
	archetype
	k      kinds.Child
	ends   []counted    // the kinds of edges that lead to the children
	thread *huma.Schema // the schema of a thread's state, if the kind is moderated
}

// addChildRoutes registers all routes of a kind of children except the counts of objects.
func (s *server) addChildRoutes(k kinds.Child) {
	c := &childRoutes{archetype: newArchetype(s, k.Name, k.Plural, childNaming(k)), k: k, ends: s.target(k.Name).ends}
	for _, end := range c.ends {
		c.countable = append(c.countable, end.list)
	}
	c.ranked, c.flat = k.RankedBy != "", !k.Threaded
	c.names["settings"] = c.word("settings")
	c.entity = c.schema("", childBody{}, c.looks())
	s.entities[k.Name] = c.entity
	s.current = append(s.current, c.entity)
	if k.Moderated {
		c.moderationRoutes()
	}
	c.singleRoutes()
	c.batchRoutes()
	c.listRoutes()
	if k.Threaded {
		c.threadRoutes()
	}
	c.versionRoute()
}

// looks adapts the schema of a child to the kind. It keeps the members in also, which only some
// answers have.
func (c *childRoutes) looks(also ...string) func(*huma.Schema) {
	return func(schema *huma.Schema) {
		state := &huma.Schema{Type: huma.TypeString, Enum: []any{event.StateVisible, event.StateDeleted, event.StateErased}}
		if c.k.Moderated {
			state.Enum = []any{event.StateVisible, event.StatePending, event.StateHidden, event.StateRemoved, event.StateDeleted,
				event.StateErased}
		}
		property("state", state, true)(schema)
		if c.k.Threaded {
			property("slug", schema.Properties["slug"], true)(schema)
			property("depth", schema.Properties["depth"], true)(schema)
		} else {
			without("parent_id", "slug", "depth")(schema)
		}
		if len(c.ends) > 0 {
			counts := objectOf(edgeCountMembers(c.ends, false), false)
			counts.Description = schema.Properties["counts"].Description
			property("counts", counts, false)(schema)
		} else {
			without("counts")(schema)
		}
		for _, name := range []string{"replies", "thread", "as_of"} {
			if !slices.Contains(also, name) {
				without(name)(schema)
			}
		}
		c.attributes(answered)(schema)
	}
}

// attributes sets the kind's attributes in a schema. It removes the member if the kind has none. A
// tombstone has no attributes.
func (c *childRoutes) attributes(in attributesOf) func(*huma.Schema) {
	if len(c.k.Attributes) == 0 {
		return without("attributes")
	}
	attributes := attributesSchema(c.k.Attributes, in)
	return property("attributes", attributes, in == written && len(attributes.Required) > 0)
}

// input adapts the schema of a create to the kind.
func (c *childRoutes) input(schema *huma.Schema) {
	if !c.k.Threaded {
		without("parent_id")(schema)
	}
	c.attributes(written)(schema)
}

// change adapts the schema of an edit to the kind.
func (c *childRoutes) change(schema *huma.Schema) {
	c.attributes(changed)(schema)
	if len(c.k.Attributes) == 0 {
		property("body", schema.Properties["body"], true)(schema)
	}
}

// under is the path of an object's children; one is the path of a child.
func (c *childRoutes) under() string {
	return "/v1/" + c.kinds.Objects[c.k.Parent].Plural + "/{object_id}/" + c.k.Plural
}
func (c *childRoutes) one() string { return "/v1/" + c.k.Plural + "/{child_id}" }

func (c *childRoutes) location(id string) string { return "/v1/" + c.k.Plural + "/" + id }

// writing returns the codes of a route that takes a body, followed by more.
func writing(more ...string) []string {
	return append([]string{codeJSONInvalid, codeMediaType}, more...)
}

// gone returns the states of a tombstone.
func (c *childRoutes) gone() string {
	if c.k.Moderated {
		return "hidden, removed, deleted or erased"
	}
	return "deleted or erased"
}

func (c *childRoutes) singleRoutes() {
	c.createRoute()
	get := c.route("get", http.MethodGet, c.one(), tokens.RoleRead, http.StatusOK, words{"get-" + c.dashed, "Read {a child}",
		"Reads the truth. A " + c.gone() + " {child} is a tombstone: it has a state, but neither author nor body."})
	if c.k.Moderated {
		get.description += " A pending one has both."
	}
	get.codes, get.answer, get.extraStatuses = []string{codeNotFound}, c.entity,
		map[int]string{http.StatusNotModified: "If-None-Match names the current version."}
	register(c.server, get, c.get)

	edit := c.route("edit", http.MethodPatch, c.one(), tokens.RoleWrite, http.StatusOK,
		words{"edit-" + c.dashed, "Replace {a child}'s body",
			"An edit to the current body changes nothing: 200 with the same version, and no event."})
	if len(c.k.Attributes) > 0 {
		edit.summary = "Edit {a child}"
		edit.description = "Send what changes: the body, attributes (RFC 7396: null removes one, or restores its default), or both. " +
			"An edit to the current values changes nothing: 200 with the same version, and no event."
	}
	edit.codes = writing(codeBodyEmpty, codeBodyTooLong, codeBodyInvalid, codeNotFound, c.code(codeChildGone),
		codeVersionStale, codeIfMatchMissing, codeThreadReturning)
	edit.answer, edit.body = c.entity, jsonBody(c.schema("Edit", childEdit{}, c.change), true)
	register(c.server, edit, c.edit)

	remove := c.route("delete", http.MethodDelete, c.one(), tokens.RoleWrite, http.StatusNoContent,
		words{"delete-" + c.dashed, "Delete {a child} on behalf of its author", "The deletion cannot be undone."})
	if c.k.Threaded {
		remove.description += " Replies remain."
	}
	remove.codes = []string{codeNotFound, c.code(codeChildGone), codeVersionStale, codeIfMatchMissing, codeThreadReturning}
	register(c.server, remove, c.remove)
}

func (c *childRoutes) createRoute() {
	r := c.route("create", http.MethodPost, c.under(), tokens.RoleWrite, http.StatusCreated,
		words{"create-" + c.dashed, "Write {a child}", ""})
	r.codes, r.answer = writing(codeBodyEmpty, codeBodyTooLong, codeBodyInvalid, codeKeyReused, codeThreadReturning), c.entity
	if c.k.Threaded {
		r.summary += ", or a reply"
		r.codes = append(r.codes, codeParentUnknown, codeParentGone, codeTooDeep)
	}
	var notes []string
	if c.k.Moderated {
		notes = append(notes, "In a premoderated thread the {child} starts pending.")
		r.codes = append(r.codes, codeThreadLocked)
	}
	if c.k.OnePerAuthor {
		notes = append(notes, "An author may have one {child} of {an object}; a deleted one does not count. A second create fails with `"+
			codeAlreadyWritten+"`; `current` and Location name the first.")
		r.codes = append(r.codes, codeAlreadyWritten)
	}
	r.description = strings.Join(notes, " ")
	r.body = jsonBody(c.schema("Input", newChild{}, c.input), true)
	register(c.server, r, c.create)
	if c.k.OnePerAuthor {
		refusal := c.operation(http.MethodPost, c.path(c.under())).Responses["409"]
		refusal.Headers = map[string]*huma.Param{"Location": {Schema: &huma.Schema{Type: huma.TypeString},
			Description: "With `" + codeAlreadyWritten + "`: the address of the first one."}}
	}
}

func (c *childRoutes) create(ctx context.Context, in *newChildInput) (*childOutput, error) {
	var body newChild
	if err := json.Unmarshal(*in.Body, &body); err != nil {
		return nil, err
	}
	w, err := c.newChild(ctx, in.Object.ID, body, in.Key)
	if err != nil {
		return nil, err
	}
	out, err := c.store.CreateChildren(ctx, callerOf(ctx).TenantID, c.k, []store.NewChild{w})
	answer, err := c.answer(ctx, http.StatusCreated, out, err)
	if err != nil {
		return nil, err
	}
	answer.Location = c.location(out[0].Child.ID)
	if out[0].Replayed {
		answer.Replayed = "true"
	}
	return answer, nil
}

// newChild returns the store's input for a create.
func (c *childRoutes) newChild(ctx context.Context, object event.ID, body newChild, key string) (store.NewChild, error) {
	author, err := c.parseID(c.k.AuthorIDs, "#/author_id", string(body.AuthorID))
	if err == nil {
		err = c.limitAuthor(ctx, author)
	}
	w := store.NewChild{Meta: callerOf(ctx).meta, Object: object, AuthorID: author, Body: body.Body, Attributes: body.Attributes, Key: key}
	if body.ParentID != nil {
		w.ReplyTo = body.ParentID.lower()
	}
	return w, err
}

// answer returns the answer to a single write.
func (c *childRoutes) answer(ctx context.Context, status int, out []store.ChildOutcome, err error) (*childOutput, error) {
	if err == nil {
		err = out[0].Err
	}
	if err != nil {
		return nil, c.refused(err)
	}
	token, err := c.tokenOf(ctx, out[0].Child.Ref(c.k.Name))
	return &childOutput{Status: status, ETag: etag(out[0].Child.Version), WriteToken: token, Body: c.value(childBodyOf(out[0].Child))}, err
}

// refused turns an error of the store into the kind's problem.
func (c *childRoutes) refused(err error) error {
	var stale *store.StaleError
	var state *store.StateError
	var taken *store.TakenError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &stale):
		return c.about(codeVersionStale, fmt.Sprintf("the %s is at version %d", c.k.Name, stale.Current.Version), stale.Current)
	case errors.As(err, &state):
		return c.about(c.code(codeChildGone), "the "+c.k.Name+" is "+strings.ToLower(state.Current.State()), state.Current)
	case errors.As(err, &taken):
		detail := fmt.Sprintf("the author already has %s of this %s: %s", a(c.k.Name), c.k.Parent, taken.Child.ID)
		p := c.about(codeAlreadyWritten, detail, taken.Child)
		p.location = c.location(taken.Child.ID)
		return p
	}
	if err = c.attributesRefused(err, "#/attributes"); err != nil {
		if p, logged := c.problems.of(err); !logged {
			c.tell(p)
			return p
		}
	}
	return err
}

func (c *childRoutes) about(code, detail string, current event.Child) *Problem {
	p := c.problems.problem(code, detail)
	p.Current = &Current{c.value(childBodyOf(current))}
	return p
}

func (c *childRoutes) get(ctx context.Context, in *childGetInput) (*childOutput, error) {
	child, err := c.store.GetChild(ctx, callerOf(ctx).TenantID, c.k, in.ID.lower())
	if err != nil {
		return nil, err
	}
	return &childOutput{Status: okOr304(in.IfNoneMatch, child.Version), ETag: etag(child.Version), Body: c.value(childBodyOf(child))}, nil
}

func (c *childRoutes) edit(ctx context.Context, in *changeInput) (*childOutput, error) {
	version, err := c.ifVersion(in.IfMatch)
	if err != nil {
		return nil, err
	}
	var body childEdit
	if err := json.Unmarshal(*in.Body, &body); err != nil {
		return nil, err
	}
	w, err := c.childEdit(ctx, in.ID.lower(), version, body)
	if err != nil {
		return nil, err
	}
	out, err := c.store.EditChildren(ctx, callerOf(ctx).TenantID, c.k, []store.ChildEdit{w})
	return c.answer(ctx, http.StatusOK, out, err)
}

// ifVersion reads an If-Match that the write requires.
func (s *server) ifVersion(ifMatch string) (int64, error) {
	if ifMatch == "" {
		return 0, s.problems.problem(codeIfMatchMissing, "")
	}
	v, ok := versionOf(ifMatch)
	if !ok {
		return 0, s.problems.problem(codeHeaderInvalid, "",
			FieldError{Detail: `expected one ETag, for example "3", or *`, Header: "If-Match"})
	}
	return v, nil
}

// childEdit returns the store's input for an edit.
func (c *childRoutes) childEdit(ctx context.Context, id string, version int64, body childEdit) (store.ChildEdit, error) {
	if body.Body == nil && body.Attributes == nil {
		return store.ChildEdit{}, c.problems.problem(codeValidation, "validation failed",
			FieldError{Detail: "expected body, attributes or both", Pointer: "#"})
	}
	return store.ChildEdit{Meta: callerOf(ctx).meta, ID: id, IfVersion: version, Body: body.Body, Attributes: body.Attributes}, nil
}

func (c *childRoutes) remove(ctx context.Context, in *deleteInput) (*noContent, error) {
	version, err := c.ifVersion(in.IfMatch)
	if err != nil {
		return nil, err
	}
	out, err := c.store.DeleteChildren(ctx, callerOf(ctx).TenantID, c.k,
		[]store.ChildDelete{{Meta: callerOf(ctx).meta, ID: in.ID.lower(), IfVersion: version}})
	answer, err := c.answer(ctx, http.StatusNoContent, out, err)
	if err != nil {
		return nil, err
	}
	return &noContent{answer.WriteToken}, nil
}

// childOperation has the members of all operations of a batch. The kind's schemas say which of them
// an operation has.
type childOperation struct {
	Op         string          `json:"op"`
	ID         childID         `json:"child_id"`
	Object     userID          `json:"object_id"`
	AuthorID   userID          `json:"author_id"`
	Body       *string         `json:"body,omitempty" nullable:"false" doc:"1 to 16384 bytes of UTF-8 after trimming."`
	ParentID   *childID        `json:"parent_id,omitempty" doc:"The {child} of the same {object} that this one replies to."`
	Attributes json.RawMessage `json:"attributes,omitempty"`
	Key        *string         `json:"idempotency_key,omitempty" nullable:"false" maxLength:"255" pattern:"^[!-~]+$" patternDescription:"1 to 255 visible ASCII characters" doc:"Like the header Idempotency-Key."`
	IfMatch    *ifMatch        `json:"if_match,omitempty" doc:"Like the header If-Match. Without it the outcome is 428."`
}

func (c *childRoutes) batchRoutes() {
	op := func(name string, change func(*huma.Schema), drop ...string) *huma.Schema {
		return c.schema(camel(name)+"Operation", childOperation{},
			property("op", &huma.Schema{Type: huma.TypeString, Enum: []any{name}}, true), change, without(drop...))
	}
	child, object := c.of("child_id"), c.of("object_id")
	create := op("create", func(s *huma.Schema) {
		property("body", s.Properties["body"], true)(s)
		c.input(s)
	}, child, "if_match")
	edit := op("edit", c.change, object, "author_id", "parent_id", "idempotency_key")
	remove := op("delete", func(*huma.Schema) {}, object, "author_id", "parent_id", "idempotency_key", "body", "attributes")
	first := map[string]any{"op": "create", object: exampleID(c.k.ParentIDs, "5"), "author_id": exampleID(c.k.AuthorIDs, "3"),
		"body": "Well said.", "idempotency_key": "import-1"}
	e := examples{exampleValues(), c.api.OpenAPI().Components.Schemas}
	if attributes := attributesSchema(c.k.Attributes, written); len(attributes.Properties) > 0 {
		first["attributes"], _ = e.of("attributes", attributes) // no error: every attribute has an example
	}
	r := c.route("batch", http.MethodPost, "/v1/"+c.k.Plural+":batch", tokens.RoleWrite, http.StatusOK,
		words{"batch-" + c.tagged, fmt.Sprintf("Write, edit and delete up to %d %s", maxBatch, c.k.Plural), batchDescription})
	c.batchRoute(r, []kind{
		{"create", create, c.takeCreate, batched(c, http.StatusCreated, c.store.CreateChildren)},
		{"edit", edit, c.takeEdit, batched(c, http.StatusOK, c.store.EditChildren)},
		{"delete", remove, c.takeDelete, batched(c, http.StatusNoContent, c.store.DeleteChildren)},
	}, []any{
		first,
		map[string]any{"op": "edit", child: exampleUUID, "if_match": 1, "body": "Well put."},
		map[string]any{"op": "delete", child: exampleUUID, "if_match": "*"},
	})
}

func (c *childRoutes) takeCreate(ctx context.Context, raw []byte) (any, []string, error) {
	var op childOperation
	if err := c.takeApart(raw, c.value(&op)); err != nil {
		return nil, nil, err
	}
	object, err := c.parseID(c.k.ParentIDs, "#/"+c.of("object_id"), string(op.Object))
	if err != nil {
		return nil, nil, err
	}
	body := newChild{AuthorID: op.AuthorID, Body: *op.Body, ParentID: op.ParentID, Attributes: op.Attributes}
	w, err := c.newChild(ctx, object, body, *cmp.Or(op.Key, new("")))
	var keys []string
	if w.ReplyTo != "" {
		keys = append(keys, w.ReplyTo) // an earlier operation may delete it
	}
	if w.Key != "" {
		keys = append(keys, string(op.AuthorID)+" "+w.Key)
	}
	if c.k.OnePerAuthor {
		keys = append(keys, fmt.Sprint("author ", w.Object, " ", w.AuthorID))
	}
	return w, keys, err
}

// takeChange reads an operation on a child, and the version in its if_match.
func (c *childRoutes) takeChange(raw []byte) (op childOperation, version int64, err error) {
	if err = c.takeApart(raw, c.value(&op)); err == nil && op.IfMatch == nil {
		err = c.problems.problem(codeIfMatchMissing, "")
	}
	return op, int64(*cmp.Or(op.IfMatch, new(ifMatch))), err
}

func (c *childRoutes) takeEdit(ctx context.Context, raw []byte) (any, []string, error) {
	op, version, err := c.takeChange(raw)
	if err != nil {
		return nil, nil, err
	}
	w, err := c.childEdit(ctx, op.ID.lower(), version, childEdit{op.Body, op.Attributes})
	return w, []string{w.ID}, err
}

func (c *childRoutes) takeDelete(ctx context.Context, raw []byte) (any, []string, error) {
	op, version, err := c.takeChange(raw)
	w := store.ChildDelete{Meta: callerOf(ctx).meta, ID: op.ID.lower(), IfVersion: version}
	return w, []string{w.ID}, err
}

// batched returns what writes operations of a batch with a function of the store.
func batched[W any](c *childRoutes, status int, write func(context.Context, int64, kinds.Child, []W) ([]store.ChildOutcome, error),
) func(context.Context, []*operation) error {
	return func(ctx context.Context, ops []*operation) error {
		return writeAll(ctx, ops, c.k, write, func(op *operation, o store.ChildOutcome) { c.outcome(ctx, op, o, status) })
	}
}

// outcome sets the outcome of an operation of a batch.
func (c *childRoutes) outcome(ctx context.Context, op *operation, o store.ChildOutcome, status int) {
	out := BatchOutcome{Status: status, Replayed: o.Replayed}
	if status != http.StatusNoContent {
		out.Entity = c.value(childBodyOf(o.Child))
	}
	c.done(ctx, op, c.refused(o.Err), o.Child.Ref(c.k.Name), out)
}
