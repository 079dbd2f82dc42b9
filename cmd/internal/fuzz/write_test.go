package fuzz_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"time"

	"github.com/tidings/tidings/event"
)

// write is a request that writes. The lane calls plan when the answer has come: until then the
// model does not change.
type write struct {
	method, path string
	body         any // nil: no body
	headers      []string
	actor        string
	op           map[string]any // the write as an operation of a batch; nil if a batch cannot contain it
	noun         string         // the member of an outcome that contains the entity
	plan         func() outcome
}

// outcome is the expected answer to a write.
type outcome struct {
	status   int
	code     string
	current  func() any     // the member of a problem
	about    *childRow      // the child whose state current is, or nil
	location func() string  // of a create, and of an occupied place; nil: no header
	replayed bool           // an answer repeated for an idempotency key
	ref      func() given   // the write that the token names, once the state exists; nil: no token
	entity   func() any     // the entity after the write, once the state exists; nil: no body
	commit   func(got wish) // makes the state the newest, with the values that only the answer has
}

// wish holds values that a model cannot know before an answer or event has them: ids and times.
type wish struct {
	ID, Slug                       string
	Created, Positioned, UpdatedAt event.Time
	told                           bool
}

func refusal(status int, code string) outcome { return outcome{status: status, code: code} }

// wishOf reads these values from an entity.
func wishOf(id string, entity map[string]any) wish {
	w := wish{told: entity != nil}
	w.ID, _ = entity[id].(string)
	w.Slug, _ = entity["slug"].(string)
	for name, at := range map[string]*event.Time{"created_at": &w.Created, "positioned_at": &w.Positioned, "updated_at": &w.UpdatedAt} {
		text, _ := entity[name].(string)
		t, _ := time.Parse(event.TimeFormat, text)
		at.Time = t
	}
	return w
}

// do sends a write, compares its answer with the model's, and updates the model.
func (l *lane) do(w write) error {
	w.actor = l.actor()
	body := ""
	if w.body != nil {
		body = encode(w.body)
	}
	a, err := l.call(w.method, w.path, body, append(w.headers, "Tidings-Actor: "+w.actor)...)
	if err != nil {
		return err
	}
	l.acting = w.actor
	o := w.plan()
	var entity map[string]any
	if a.status < 300 {
		entity = a.json
	}
	if err := l.settle(a, o, entity, a.header.Get("Tidings-Token")); err != nil {
		return err
	}
	return l.headersOf(a, o)
}

// headersOf compares the headers of the answer to a single write.
func (l *lane) headersOf(a answer, o outcome) error {
	want, replayed := map[string]string{"Location": "", "ETag": ""}, ""
	if o.location != nil {
		want["Location"] = o.location()
	}
	if o.entity != nil && o.code == "" {
		if v, ok := o.entity().(map[string]any)["version"].(float64); ok && v > 0 {
			want["ETag"] = etag(int64(v))
		}
	}
	if o.replayed {
		replayed = "true"
	}
	want["Idempotency-Replayed"] = replayed
	got := map[string]string{}
	for name := range want {
		got[name] = a.header.Get(name)
	}
	return differ(a, want, got)
}

// settle compares an answer, or one operation's result, with the outcome, and updates the model.
func (l *lane) settle(a answer, o outcome, entity map[string]any, token string) error {
	if a.status != o.status || a.code() != o.code {
		return fmt.Errorf("%s: %d %s %.2000s, want %d %s", a.request, a.status, a.code(), a.body, o.status, o.code)
	}
	if o.current != nil {
		now, _ := a.json["current"].(map[string]any)
		if o.about != nil {
			o.about.tell(now)
		}
		return differ(a, o.current(), any(now))
	}
	if o.code != "" {
		return nil
	}
	if o.commit != nil {
		id := ""
		for _, k := range l.kinds.AllChildren() {
			if name := k.Names().ID; entity[name] != nil {
				id = name
			}
		}
		o.commit(wishOf(id, entity))
	}
	if o.entity != nil {
		if err := differ(a, o.entity(), any(entity)); err != nil {
			return err
		}
	}
	if o.ref == nil || o.ref().version == 0 {
		if token != "" {
			return fmt.Errorf("%s: a token of an unknown write: %s", a.request, token)
		}
		return nil
	}
	if token == "" {
		return fmt.Errorf("%s: %d without a token", a.request, a.status)
	}
	g := o.ref()
	g.token = token
	l.give(g)
	if l.tokens = append(l.tokens, g); len(l.tokens) > 60 {
		l.tokens = l.tokens[20:]
	}
	return nil
}

// condition is an If-Match with the version, another version, any, none, or nonsense. refused is
// the code of an invalid one.
type condition struct {
	header  string
	version int64 // 0: any version; -1: a valid tag that is not one of ours
	refused string
}

func (l *lane) condition(version int64) condition {
	switch n := l.rng.IntN(20); {
	case n < 9:
		return condition{etag(version), version, ""}
	case n < 13:
		return condition{"*", 0, ""}
	case n < 15:
		other := max(1, version+pick(l, int64(-1), 1, 7))
		return condition{etag(other), other, ""}
	case n < 16:
		return condition{"W/" + etag(version), -1, ""}
	case n < 17:
		return condition{pick(l, `"abc"`, `"0"`, `"-1"`, `"01"`, `"9223372036854775808"`), -1, ""}
	case n < 18:
		return condition{pick(l, "1", `"1`, `"1", "2"`, "**"), 0, "header-invalid"}
	}
	return condition{}
}

func (c condition) headers() []string {
	if c.header == "" {
		return nil
	}
	return []string{"If-Match: " + c.header}
}

// holds reports whether the condition holds for the version.
func (c condition) holds(version int64) bool { return c.version == 0 || c.version == version }

// inBatch adds the condition to an operation.
func (c condition) inBatch(op map[string]any) map[string]any {
	op = maps.Clone(op)
	switch {
	case c.header == "*":
		op["if_match"] = "*"
	case c.version > 0:
		op["if_match"] = json.Number(fmt.Sprint(c.version))
	}
	return op
}

// batched reports whether an operation can carry the condition.
func (c condition) batched() bool { return c.refused == "" && c.version >= 0 }
