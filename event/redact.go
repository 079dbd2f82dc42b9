package event

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// redacted is the part of a child's payload that remains: which child it is, its state, and the
// actor. All other members are removed with the body. Names match as consumers match them:
// encoding/json ignores case. Values stay as written.
type redacted struct {
	ID              json.RawMessage `json:"id,omitempty"`        // renamed by ChildNames
	Parent          json.RawMessage `json:"object_id,omitempty"` // renamed by ChildNames
	ParentID        json.RawMessage `json:"parent_id,omitempty"`
	Slug            json.RawMessage `json:"slug,omitempty"`
	Path            json.RawMessage `json:"path,omitempty"`
	AuthorID        json.RawMessage `json:"author_id,omitempty"`
	Body            json.RawMessage `json:"body"`
	AuthorState     json.RawMessage `json:"author_state,omitempty"`
	ModerationState json.RawMessage `json:"moderation_state,omitempty"`
	Version         json.RawMessage `json:"version,omitempty"`
	CreatedAt       json.RawMessage `json:"created_at,omitempty"`
	UpdatedAt       json.RawMessage `json:"updated_at,omitempty"`
	Actor           json.RawMessage `json:"actor,omitempty"`
	Erased          json.RawMessage `json:"erased"`
}

var redactedCodec = newCodec(func(r *redacted) []any {
	return []any{&r.ID, &r.Parent, &r.ParentID, &r.Slug, &r.Path, &r.AuthorID, &r.Body, &r.AuthorState, &r.ModerationState, &r.Version,
		&r.CreatedAt, &r.UpdatedAt, &r.Actor, &r.Erased}
})

// keptNames has the JSON names of its fields, except the two that the kind names.
var keptNames = func() map[string]bool {
	names := make(map[string]bool)
	for _, m := range redactedCodec.members[2:] {
		names[m.name] = true
	}
	return names
}()

// Named returns the id of the child that a payload names, in canonical form. It accepts any payload
// version and any form of the id. It returns "" if the payload names no child. It finds every child
// that DecodeChild reads, and those that DecodeChild refuses because of the form of their id.
func (n ChildNames) Named(payload []byte) string {
	r, err := redactedCodec.decode(payload, n.ID, n.Parent)
	if err != nil {
		return ""
	}
	return childID(r.ID)
}

// childID reads the id of a child in any form that a writer may use, or returns "".
func childID(raw json.RawMessage) string {
	var text string
	if len(raw) < 34 || json.Unmarshal(raw, &text) != nil { // 32 digits and the quotes
		return ""
	}
	digits := strings.TrimPrefix(strings.ToLower(strings.TrimSpace(text)), "urn:uuid:")
	digits = strings.ReplaceAll(strings.TrimSuffix(strings.TrimPrefix(digits, "{"), "}"), "-", "")
	if len(digits) != 32 {
		return ""
	}
	id := digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]
	if !IsUUID(id) {
		return ""
	}
	return id
}

// Redacted reports whether the payload of a child's event has no content: only the members that
// Redact leaves, and its mark. KIND.erased is made without content and has no mark. The mark alone
// is not enough, because a writer may set it.
func (n ChildNames) Redacted(eventType string, payload []byte) bool {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil || fields == nil {
		return false
	}
	for name := range fields {
		if !keptNames[name] && name != n.ID && name != n.Parent {
			return false
		}
	}
	body, has := fields["body"]
	return (!has || string(body) == `""`) && (eventType == Erased || string(fields["erased"]) == "true")
}

// Redact returns the payload of a child's event without its content. It keeps the members that name
// the child and its state, and sets an empty body and "erased": true (docs/events.md). Repeating it
// changes nothing.
func (n ChildNames) Redact(payload []byte) ([]byte, error) {
	r, err := redactedCodec.decode(payload, n.ID, n.Parent)
	if err != nil {
		return nil, fmt.Errorf("redact a payload of %d bytes: it is not a JSON object", len(payload)) // err may quote it
	}
	r.Body, r.Erased = json.RawMessage(`""`), json.RawMessage(`true`)
	out, err := redactedCodec.encode(r, n.ID, n.Parent)
	if err != nil {
		return nil, fmt.Errorf("encode a redacted payload: %w", err)
	}
	return out, nil
}

// ErasedActor replaces the actor of events that an erased person caused.
const ErasedActor = "erased"

// RedactActor replaces the actor of a payload by ErasedActor if it is the given one. It accepts any
// aggregate type and changes nothing else. The member's name matches as consumers match it,
// ignoring case.
func RedactActor(payload []byte, actor string) (redacted []byte, changed bool, err error) {
	// Most payloads have another actor. Only an escape can spell this one differently.
	if !bytes.Contains(payload, []byte(actor)) && !bytes.Contains(payload, []byte{'\\'}) {
		return payload, false, nil
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return payload, false, nil // not an object, so it has no actor
	}
	for name, value := range fields {
		var text string
		if strings.EqualFold(name, "actor") && json.Unmarshal(value, &text) == nil && text == actor {
			fields[name], changed = json.RawMessage(`"`+ErasedActor+`"`), true
		}
	}
	if !changed {
		return payload, false, nil
	}
	if redacted, err = json.Marshal(fields); err != nil {
		return nil, false, fmt.Errorf("encode a payload of %d bytes without its actor: %w", len(payload), err)
	}
	return redacted, true, nil
}

// People returns the ids under which an erasure may search for a payload. The payload may be of any
// aggregate type, and need not be valid. People returns every id in it, because only the kind knows
// which ones are persons. It adds Anybody if the payload may be a child's and names no author. A
// redacted payload of a child names only its actor.
func People(eventType string, payload []byte) (ids []ID) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return nil
	}
	var actors []ID
	author, child, edge, others, content := false, false, false, 0, false
	for name, value := range fields {
		switch isAuthor := strings.EqualFold(name, "author_id"); {
		case strings.EqualFold(name, "actor"):
			var actor string
			_ = json.Unmarshal(value, &actor) // an actor that is not text names nobody
			user, is := strings.CutPrefix(actor, "user:")
			if id, err := ParseID(user); is && err == nil {
				actors = append(actors, id)
			}
		case name == "status" || name == "positioned_at":
			edge = true
		case keptNames[name] && !isAuthor:
		default:
			id, isChild := idOf(value), !isAuthor && childID(value) != ""
			if id != "" {
				ids = append(ids, id)
			}
			author, child = author || isAuthor && id != "", child || isChild
			if !keptNames[name] {
				others++
				content = content || id == "" && !isChild
			}
		}
	}
	body, has := fields["body"]
	if erased := eventType == Erased || string(fields["erased"]) == "true"; erased && (!has || string(body) == `""`) &&
		!content && !edge && (others == 0 || others <= 2 && child) {
		return actors
	}
	if child && !author && !edge {
		ids = append(ids, Anybody)
	}
	return append(ids, actors...)
}

// RedactHeaders returns the headers that identify an event and its place, without all others.
func RedactHeaders(headers map[string][]string) map[string][]string {
	out := make(map[string][]string, len(headers))
	for _, name := range []string{HeaderID, HeaderType, HeaderSource, HeaderSubject, HeaderTime, HeaderSpecVersion, HeaderDataContentType,
		HeaderDataSchema, HeaderTenant, HeaderTraceParent, HeaderOutboxID} {
		if v, ok := headers[name]; ok {
			out[name] = v
		}
	}
	return out
}

// redactedEdge is the part of an edge's payload that remains: the status, the version and the
// times. Both ends, the attributes and the actor are removed.
type redactedEdge struct {
	Status       json.RawMessage `json:"status,omitempty"`
	Version      json.RawMessage `json:"version,omitempty"`
	CreatedAt    json.RawMessage `json:"created_at,omitempty"`
	PositionedAt json.RawMessage `json:"positioned_at,omitempty"`
	UpdatedAt    json.RawMessage `json:"updated_at,omitempty"`
	Erased       bool            `json:"erased"`
}

// namedEnds are the ends of an edge as a payload has them.
type namedEnds struct {
	From json.RawMessage `json:"from_id"` // renamed by EdgeNames
	To   json.RawMessage `json:"to_id"`   // renamed by EdgeNames
}

var namedEndsCodec = newCodec(func(n *namedEnds) []any { return []any{&n.From, &n.To} })

// Named returns the ids of the ends of an edge that a payload names, in any payload version and any
// form of the ids. An end is empty if the payload does not name it.
func (n EdgeNames) Named(payload []byte) (from, to ID) {
	ends, err := namedEndsCodec.decode(payload, n.From, n.To)
	if err != nil {
		return "", ""
	}
	return idOf(ends.From), idOf(ends.To)
}

// idOf reads an id in any form that a writer may use: text, or a whole number. It returns "" for
// anything else.
func idOf(raw json.RawMessage) ID {
	var text string
	if json.Unmarshal(raw, &text) != nil { // no text, so perhaps a number
		whole, zeros, _ := strings.Cut(string(raw), ".")
		if n, err := strconv.ParseInt(whole, 10, 64); err == nil && strings.Trim(zeros, "0") == "" {
			text = strconv.FormatInt(n, 10)
		}
	}
	id, err := ParseID(strings.TrimSpace(text))
	if err != nil {
		return ""
	}
	return id
}

// Redact returns the payload of an edge's event without its ends, attributes and actor, and with
// "erased": true. It names nobody. Repeating it changes nothing.
func (n EdgeNames) Redact(payload []byte) ([]byte, error) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return nil, fmt.Errorf("redact a payload of %d bytes: it is not a JSON object", len(payload)) // err may quote it
	}
	out, err := json.Marshal(redactedEdge{Status: fields["status"], Version: fields["version"], CreatedAt: fields["created_at"],
		PositionedAt: fields["positioned_at"], UpdatedAt: fields["updated_at"], Erased: true})
	if err != nil {
		return nil, fmt.Errorf("encode a redacted payload: %w", err)
	}
	return out, nil
}
