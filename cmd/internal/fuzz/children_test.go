package fuzz_test

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

const maxDepth = 64

// goneCode returns the code for a child whose state forbids a write. Comments have a code of their
// own, from before there were kinds.
func goneCode(k kinds.Child) string {
	if k.Name == event.AggregateComment {
		return "comment-gone"
	}
	return "child-gone"
}

// settingsPath returns the path of the settings of an object's children.
func (l *lane) settingsPath(k kinds.Child, object event.ID) string {
	if k.Name == event.AggregateComment {
		return fmt.Sprintf("/v1/posts/%s/thread", object)
	}
	return l.underPath(k, object) + "/settings"
}

func (l *lane) summaryPath(k kinds.Child, object event.ID) string {
	return l.underPath(k, object) + "/summary"
}

func (l *lane) underPath(k kinds.Child, object event.ID) string {
	return fmt.Sprintf("/v1/%s/%s/%s", l.kinds.Objects[k.Parent].Plural, object, k.Plural)
}

func onePath(k kinds.Child, id string) string { return "/v1/" + k.Plural + "/" + id }

// childKind returns a random kind, comments more often.
func (l *lane) childKind(is func(kinds.Child) bool) kinds.Child {
	var all []kinds.Child
	for _, k := range l.kinds.AllChildren() {
		if is(k) {
			all = append(all, k)
		}
	}
	if c := l.kinds.Children[event.AggregateComment]; is(c) && l.chance(3) {
		return c
	}
	return pick(l, all...)
}

func anyKind(kinds.Child) bool     { return true }
func threaded(k kinds.Child) bool  { return k.Threaded }
func moderated(k kinds.Child) bool { return k.Moderated }

// child returns an existing child or nil, usually a recent one.
func (l *lane) child(is func(kinds.Child) bool) *childRow {
	for range 20 {
		n := len(l.m.children)
		if n == 0 {
			return nil
		}
		at := l.rng.IntN(n)
		if l.chance(2) {
			at = max(0, n-1-l.rng.IntN(30))
		}
		if r := l.m.children[at]; is(r.k) {
			return r
		}
	}
	return nil
}

func (l *lane) createChild() error { return l.do(l.create(l.childKind(anyKind))) }

// newChild is the content of a create.
type newChild struct {
	k              kinds.Child
	object, author event.ID
	replyTo        string
	body, key      string
	values         map[string]any
}

// create plans a create or a reply. It may have a new idempotency key, or a used one with the same
// or another request.
func (l *lane) create(k kinds.Child) write {
	n := newChild{k: k, object: l.object(), author: l.user(), body: l.text(k.Name)}
	if k.Threaded && !l.chance(3) {
		if r := l.child(threaded); r != nil && (r.k.Name == k.Name || l.chance(10)) {
			n.replyTo = r.now().ID
			if n.object = r.now().Parent; l.chance(20) {
				n.object = l.object()
			}
		}
	}
	if len(k.Attributes) > 0 {
		n.values = l.values(k.Attributes, false)
	}
	if l.chance(3) {
		n.key = fmt.Sprintf("key-%d", l.rng.IntN(30))
		if old, ok := l.lastWithKey(n); ok && !l.chance(4) {
			n = old
		}
	}
	return l.createOf(n)
}

// lastWithKey returns the request that first used a key.
func (l *lane) lastWithKey(n newChild) (newChild, bool) {
	old, ok := l.sent[authorKey{n.k.Name, n.author, n.key}]
	return old, ok
}

func (n newChild) request() string {
	return fmt.Sprint(n.object, "\n", n.replyTo, "\n", string(form(n.k.Attributes, n.values)), "\n", strings.TrimSpace(n.body))
}

func (l *lane) createOf(n newChild) write {
	body := map[string]any{"author_id": fmt.Sprint(n.author), "body": " " + n.body + "\n"}
	if n.replyTo != "" {
		body["parent_id"] = strings.ToUpper(n.replyTo)
	}
	if len(n.k.Attributes) > 0 {
		body["attributes"] = n.values
	}
	w := write{method: http.MethodPost, path: l.underPath(n.k, n.object), body: body, noun: n.k.Name,
		plan: func() outcome { return l.planCreate(n) }}
	op := map[string]any{"op": "create", n.k.Names().Parent: fmt.Sprint(n.object)}
	for name, v := range body {
		op[name] = v
	}
	if n.key != "" {
		w.headers = []string{"Idempotency-Key: " + n.key}
		op["idempotency_key"] = n.key
	}
	w.op = op
	return w
}

func (l *lane) planCreate(n newChild) outcome {
	key := authorKey{n.k.Name, n.author, n.key}
	if known, ok := l.m.keys[key]; n.key != "" && ok {
		if known.request != n.request() {
			return refusal(http.StatusUnprocessableEntity, "idempotency-key-reused")
		}
		first := known.first
		return outcome{status: http.StatusCreated, replayed: true, location: func() string { return onePath(n.k, first.ID) },
			entity: func() any { return renderChild(n.k, first, false) },
			ref:    func() given { return given{row: l.m.byID[first.ID], version: 1} }}
	}
	settings := l.m.thread(n.k, n.object).now()
	parent := l.m.byID[n.replyTo]
	switch {
	case n.k.Moderated && settings.Locked:
		return refusal(http.StatusConflict, "thread-locked")
	case n.replyTo == "":
	case parent == nil || parent.k.Name != n.k.Name || parent.now().Parent != n.object:
		return refusal(http.StatusUnprocessableEntity, "parent-unknown")
	case !visible(parent.now()):
		return refusal(http.StatusConflict, "parent-gone")
	case depth(parent.now().Path) >= maxDepth:
		return refusal(http.StatusUnprocessableEntity, "too-deep")
	}
	if n.k.OnePerAuthor {
		if first := l.m.placeOf(n.k, n.object, n.author); first != nil {
			return outcome{status: http.StatusConflict, code: "already-written", about: first,
				current:  func() any { return renderChild(n.k, first.now(), false) },
				location: func() string { return onePath(n.k, first.now().ID) }}
		}
	}
	c := event.Child{Parent: n.object, ReplyTo: n.replyTo, AuthorID: n.author, Body: strings.TrimSpace(n.body),
		Attributes:  form(n.k.Attributes, n.values),
		AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: 1, Actor: l.acting}
	if n.k.Moderated && settings.Premoderate {
		c.ModerationState = event.ModerationPending
	}
	var row *childRow
	return outcome{status: http.StatusCreated, location: func() string { return onePath(n.k, row.now().ID) },
		entity: func() any { return renderChild(n.k, row.now(), false) }, ref: func() given { return given{row: row, version: 1} },
		commit: func(w wish) {
			c.ID, c.Slug, c.CreatedAt, c.UpdatedAt = w.ID, w.Slug, w.Created, w.Created
			if n.k.Threaded {
				c.Path = pathOf(parent, c)
			} else {
				c.Slug = ""
			}
			row = l.m.addChild(n.k, c)
			if n.key != "" {
				l.m.keys[key] = keyed{n.request(), c}
				l.sent[key] = n
			}
		}}
}

func depth(path string) int { return strings.Count(path, "/") + 1 }

// pathOf returns the position of a child: its parent's path and a segment of its time and slug. A
// reply is younger than its parent.
func pathOf(parent *childRow, c event.Child) string {
	segment := fmt.Sprintf("%014x%s", c.CreatedAt.UnixMicro(), c.Slug)
	if parent == nil {
		return segment
	}
	if p := parent.now(); !c.CreatedAt.After(p.CreatedAt.Time) {
		return "not behind the parent"
	}
	return parent.now().Path + "/" + segment
}

func (l *lane) changeChild() error {
	r := l.child(anyKind)
	if r == nil {
		return l.createChild()
	}
	return l.do(l.change(r))
}

// change plans an edit, a deletion or a moderation of a child.
func (l *lane) change(r *childRow) write {
	c := r.now()
	if_ := l.condition(c.Version)
	w := write{headers: if_.headers(), path: onePath(r.k, c.ID), noun: r.k.Name}
	if l.chance(4) {
		w.path = onePath(r.k, strings.ToUpper(c.ID))
	}
	op := map[string]any{r.k.Names().ID: c.ID}
	switch n := l.rng.IntN(10); {
	case n < 5:
		body, text, change := map[string]any{}, (*string)(nil), map[string]any(nil)
		if len(r.k.Attributes) > 0 && l.chance(2) {
			change = l.values(r.k.Attributes, true)
			body["attributes"] = change
		}
		if change == nil || l.chance(2) {
			text = new(l.text("edit"))
			if l.chance(4) {
				text = new(c.Body)
			}
			body["body"] = *text + " "
		}
		for name, v := range body {
			op[name] = v
		}
		op["op"] = "edit"
		w.method, w.body, w.plan = http.MethodPatch, body, func() outcome { return l.planEdit(r, text, change, if_) }
	case n < 6 || n < 8 && !r.k.Moderated:
		op["op"] = "delete"
		w.method, w.plan = http.MethodDelete, func() outcome { return l.planDelete(r, if_) }
	case r.k.Moderated:
		state, reason := pick(l, "APPROVED", "APPROVED", "HIDDEN", "REMOVED"), ""
		body := map[string]any{"state": state}
		if l.chance(2) {
			reason = l.text("reason")
			if len(reason) > 1000 {
				reason = reason[:900]
			}
			body["reason"] = reason
		}
		op = nil
		w.method, w.path, w.body = http.MethodPut, w.path+"/moderation", body
		w.plan = func() outcome { return l.planModerate(r, state, reason, if_) }
	default:
		return l.change(r)
	}
	if op != nil && if_.batched() {
		w.op = if_.inBatch(op)
	}
	return w
}

// version returns the refusal of a write of a child, if its condition or state forbids the write.
func (l *lane) version(r *childRow, c condition, allowed func(event.Child) bool) (outcome, bool) {
	now := r.now()
	switch {
	case c.header == "":
		return refusal(http.StatusPreconditionRequired, "if-match-missing"), false
	case c.refused != "":
		return refusal(http.StatusBadRequest, c.refused), false
	case !c.holds(now.Version):
		return outcome{status: http.StatusPreconditionFailed, code: "version-stale", about: r,
			current: func() any { return renderChild(r.k, r.now(), false) }}, false
	case !allowed(now):
		return outcome{status: http.StatusConflict, code: goneCode(r.k), about: r,
			current: func() any { return renderChild(r.k, r.now(), false) }}, false
	}
	return outcome{}, true
}

func (l *lane) childOutcome(r *childRow, status int, next *event.Child) outcome {
	o := outcome{status: status, ref: func() given { return given{row: r, version: r.now().Version} }}
	if status != http.StatusNoContent {
		o.entity = func() any { return renderChild(r.k, r.now(), false) }
	}
	if next != nil {
		last := r.now()
		actor := l.acting
		o.commit = func(w wish) {
			next.Version, next.Actor, next.UpdatedAt = last.Version+1, actor, event.Time{}
			if w.told {
				next.UpdatedAt = later(w.UpdatedAt, last.UpdatedAt)
			}
			r.states = append(r.states, *next)
		}
	}
	return o
}

func (l *lane) planEdit(r *childRow, text *string, change map[string]any, c condition) outcome {
	o, ok := l.version(r, c, func(c event.Child) bool {
		return c.AuthorState == event.AuthorActive && c.ModerationState != event.ModerationHidden &&
			c.ModerationState != event.ModerationRemoved
	})
	if !ok {
		return o
	}
	now := r.now()
	next := now
	next.Reason = ""
	if change != nil {
		if next.Attributes = merged(r.k.Attributes, now.Attributes, change); !fits(r.k.Attributes, next.Attributes) {
			return refusal(http.StatusUnprocessableEntity, "validation-failed")
		}
	}
	if text != nil {
		next.Body = strings.TrimSpace(*text)
	}
	if next.Body == now.Body && bytes.Equal(next.Attributes, now.Attributes) {
		return l.childOutcome(r, http.StatusOK, nil)
	}
	return l.childOutcome(r, http.StatusOK, &next)
}

func (l *lane) planDelete(r *childRow, c condition) outcome {
	o, ok := l.version(r, c, func(c event.Child) bool { return c.AuthorState == event.AuthorActive })
	if !ok {
		return o
	}
	next := r.now()
	next.AuthorState, next.Reason = event.AuthorDeleted, ""
	return l.childOutcome(r, http.StatusNoContent, &next)
}

func (l *lane) planModerate(r *childRow, state, reason string, c condition) outcome {
	o, ok := l.version(r, c, func(c event.Child) bool { return c.AuthorState == event.AuthorActive })
	if !ok {
		return o
	}
	next := r.now()
	if next.ModerationState == state {
		return l.childOutcome(r, http.StatusOK, nil)
	}
	next.ModerationState, next.Reason = state, reason
	return l.childOutcome(r, http.StatusOK, &next)
}

func (l *lane) putSettings() error { return l.do(l.settings(l.childKind(moderated), l.object())) }

func (l *lane) settings(k kinds.Child, object event.ID) write {
	r := l.m.thread(k, object) // as it is when the lane makes the request
	next := event.Thread{Locked: l.chance(6), Premoderate: l.chance(4)}
	if l.chance(2) {
		next.Title = fmt.Sprintf("%s title %d", l.mark(), l.rng.IntN(5))
	}
	body := map[string]any{"title": "  " + next.Title, "locked": next.Locked}
	if next.Premoderate {
		body["premoderated"] = true
	}
	c, none := l.condition(r.now().Version), ""
	if r.now().Version == 0 {
		c = condition{}
	}
	w := write{method: http.MethodPut, path: l.settingsPath(k, object), body: body, headers: c.headers(), noun: k.Name}
	if l.chance(4) {
		none = pick(l, "*", "*", `"1"`)
		w.headers = append(w.headers, "If-None-Match: "+none)
	}
	w.plan = func() outcome { return l.planSettings(l.m.thread(k, object), next, c, none) }
	return w
}

func (l *lane) planSettings(r *threadRow, want event.Thread, c condition, none string) outcome {
	now := r.now()
	stale := outcome{status: http.StatusPreconditionFailed, code: "version-stale", current: func() any { return renderSettings(r.k, now) }}
	switch {
	case none != "" && (none != "*" || c.header != ""):
		return refusal(http.StatusBadRequest, "header-invalid")
	case c.refused != "":
		return refusal(http.StatusBadRequest, c.refused)
	case c.header == "" && now.Version != 0 && none == "":
		return refusal(http.StatusPreconditionRequired, "if-match-missing")
	case c.header == "" && now.Version != 0, c.header != "" && !c.holds(now.Version):
		return stale
	}
	o := outcome{status: http.StatusOK, entity: func() any { return renderSettings(r.k, r.now()) },
		ref: func() given { return given{row: r, version: r.now().Version} }}
	if want.Locked == now.Locked && want.Premoderate == now.Premoderate && want.Title == now.Title {
		return o
	}
	actor := l.acting
	o.commit = func(w wish) {
		next := now
		next.Locked, next.Premoderate, next.Title, next.Version, next.Actor = want.Locked, want.Premoderate,
			want.Title, now.Version+1, actor
		next.UpdatedAt = later(w.UpdatedAt, now.UpdatedAt)
		l.m.putThread(r, next)
	}
	return o
}

func (l *lane) readChild() error {
	r := l.child(anyKind)
	if r == nil {
		return nil
	}
	return l.readState(r, l.ifNoneMatch(r.now().Version)...)
}

// readState reads a child from the truth.
func (l *lane) readState(r *childRow, headers ...string) error {
	c := r.now()
	a, err := l.call(http.MethodGet, onePath(r.k, c.ID), "", headers...)
	if err != nil {
		return err
	}
	r.tell(a.json)
	return l.equalEntity(a, c.Version, renderChild(r.k, r.now(), false))
}

// tell stores the time of a deletion, which the answer to the deletion lacks.
func (r *childRow) tell(entity map[string]any) {
	if last := &r.states[len(r.states)-1]; last.UpdatedAt.IsZero() && entity["updated_at"] != nil {
		last.UpdatedAt = later(wishOf("", entity).UpdatedAt, r.states[len(r.states)-2].UpdatedAt)
	}
}

func (l *lane) readSettings() error {
	k, object := l.childKind(moderated), l.object()
	t := l.m.thread(k, object).now()
	a, err := l.call(http.MethodGet, l.settingsPath(k, object), "", l.ifNoneMatch(t.Version)...)
	if err != nil {
		return err
	}
	return l.equalEntity(a, t.Version, renderSettings(k, t))
}

// asksFor reports whether the request has an If-None-Match with the version.
func asksFor(request string, version int64) bool {
	_, headers, _ := strings.Cut(request, "If-None-Match: ")
	return strings.Contains(strings.ReplaceAll(headers, `\"`, `"`), etag(version))
}
