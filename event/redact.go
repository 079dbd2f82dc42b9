package event

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// redacted is what is left of a child's payload: which child it is, in which state it was and whose act that was. Whatever else a writer put
// there is gone with the body. The fields are found as consumers find them (encoding/json takes capitals for small letters), as they came.
type redacted struct {
	ID              json.RawMessage `json:"id,omitempty"`        // as the kind names it
	Parent          json.RawMessage `json:"object_id,omitempty"` // likewise
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

// kept are the names of its fields, but for the two that the kind names.
var kept = func() map[string]bool {
	names := make(map[string]bool)
	for i := range reflect.TypeFor[redacted]().NumField() - 2 {
		name, _, _ := strings.Cut(reflect.TypeFor[redacted]().Field(i+2).Tag.Get("json"), ",")
		names[name] = true
	}
	return names
}()

// Named returns the id of the child that a payload names, of whatever version or quality: in the canonical form, in whatever form it has
// it. It is "" for a payload that names none. It finds every child that DecodeChild reads, and those that it refuses for the form of their id.
func (n ChildNames) Named(payload []byte) string {
	r, err := parse[redacted](payload, n.ID, n.Parent)
	if err != nil {
		return ""
	}
	return childID(r.ID)
}

// childID reads the id of a child in any form that a writer may give it; "" for what is none.
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
	if !isUUID(id) {
		return ""
	}
	return id
}

// Redacted reports whether the payload of an event of a child has no content: only what Redact leaves, and its mark. A KIND.erased is
// made without content and has no mark. What a payload says of itself is not enough: a writer may say anything.
func (n ChildNames) Redacted(eventType string, payload []byte) bool {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil || fields == nil {
		return false
	}
	for name := range fields {
		if !kept[name] && name != n.ID && name != n.Parent {
			return false
		}
	}
	body, has := fields["body"]
	return (!has || string(body) == `""`) && (eventType == Erased || string(fields["erased"]) == "true")
}

// Redact returns the payload of a child's event without its content: the fields that name the child and its state, an empty
// body, and "erased": true (docs/events.md). Redacting again changes nothing.
func (n ChildNames) Redact(payload []byte) ([]byte, error) {
	r, err := parse[redacted](payload, n.ID, n.Parent)
	if err != nil {
		return nil, fmt.Errorf("redact a payload of %d bytes: it is no JSON object", len(payload)) // the error itself may quote it
	}
	r.Body, r.Erased = json.RawMessage(`""`), json.RawMessage(`true`)
	out, err := json.Marshal(reflect.ValueOf(r).Convert(shape[redacted](n.ID, n.Parent)).Interface())
	if err != nil {
		return nil, fmt.Errorf("encode a redacted payload: %w", err)
	}
	return out, nil
}

// ErasedActor is the actor of what was done by a person who has been erased.
const ErasedActor = "erased"

// RedactActor returns a payload of any aggregate type without an actor, where that is whose act it tells of: the actor is ErasedActor then, and everything else is as it was. The field
// is found as consumers find it.
func RedactActor(payload []byte, actor string) (redacted []byte, changed bool, err error) {
	if !bytes.Contains(payload, []byte(actor)) && !bytes.Contains(payload, []byte{'\\'}) { // most are somebody else's; only an escape spells it otherwise
		return payload, false, nil
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return payload, false, nil // no object: it has no actor
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

// People returns the ids by which an erasure may look for a payload of any aggregate type, of whatever quality: all that it names, for which of these is a person the kind says; and 0,
// for anybody's, where it names a child and no author. A payload that has been redacted names nobody but its actor.
func People(eventType string, payload []byte) (ids []int64) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return nil
	}
	var actors []int64
	author, child, others, content := false, false, 0, false
	for name, value := range fields {
		switch id := int64(0); {
		case strings.EqualFold(name, "actor"):
			var actor string
			_ = json.Unmarshal(value, &actor) // one that is no text names nobody
			if user, is := strings.CutPrefix(actor, "user:"); is {
				actors = append(actors, idOf(json.RawMessage(user)))
			}
		case kept[name] && name != "author_id":
		default:
			if id = idOf(value); id > 0 {
				ids = append(ids, id)
			}
			isChild := id == 0 && childID(value) != ""
			author, child = author || id > 0 && strings.EqualFold(name, "author_id"), child || isChild
			if !kept[name] {
				others++
				content = content || id == 0 && !isChild
			}
		}
	}
	body, has := fields["body"]
	if erased := eventType == Erased || string(fields["erased"]) == "true"; erased && (!has || string(body) == `""`) && !content && others <= 2 {
		return actors
	}
	if child && !author {
		ids = append(ids, 0)
	}
	return append(ids, actors...)
}

// RedactHeaders returns the headers that name an event and its place. All others go.
func RedactHeaders(headers map[string][]string) map[string][]string {
	out := make(map[string][]string, len(headers))
	for _, name := range []string{HeaderID, HeaderType, HeaderSource, HeaderSubject, HeaderTime, HeaderSpecVersion, HeaderDataContentType, HeaderTraceParent, HeaderOutboxID} {
		if v, ok := headers[name]; ok {
			out[name] = v
		}
	}
	return out
}

// severed is what is left of an edge's payload: which change it was, and when. The ends are gone, and with them whose change it was.
type severed struct {
	Status       json.RawMessage `json:"status,omitempty"`
	Version      json.RawMessage `json:"version,omitempty"`
	CreatedAt    json.RawMessage `json:"created_at,omitempty"`
	PositionedAt json.RawMessage `json:"positioned_at,omitempty"`
	UpdatedAt    json.RawMessage `json:"updated_at,omitempty"`
	Erased       bool            `json:"erased"`
}

// Named returns the ids that a payload names as the ends of an edge, of whatever version or quality, in whatever form it has them; 0 for one that it does not name.
func (n EdgeNames) Named(payload []byte) (from, to int64) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return 0, 0
	}
	for field, value := range fields { // encoding/json, by which consumers read, takes capitals for small letters
		switch id := idOf(value); {
		case id != 0 && strings.EqualFold(field, n.From):
			from = id
		case id != 0 && strings.EqualFold(field, n.To):
			to = id
		}
	}
	return from, to
}

// idOf reads an id in any form that a writer may give it: a text or a number, with zeros before it or decimals that are zeros behind it.
func idOf(raw json.RawMessage) int64 {
	text := string(raw)
	if n := len(text); n >= 2 && text[0] == '"' && !strings.Contains(text, `\`) { // as nearly all are
		text = text[1 : n-1]
	} else if json.Unmarshal(raw, &text) != nil {
		text = string(raw)
	}
	whole, decimals, _ := strings.Cut(strings.TrimSpace(text), ".")
	if strings.Trim(decimals, "0") != "" {
		return 0
	}
	id, err := strconv.ParseInt(whole, 10, 64)
	if err != nil {
		return 0
	}
	return id
}

// Redact returns the payload of an edge's event without its ends, attributes and actor, and with "erased": true. It names nobody. Redacting again changes nothing.
func (n EdgeNames) Redact(payload []byte) ([]byte, error) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return nil, fmt.Errorf("redact a payload of %d bytes: it is no JSON object", len(payload)) // the error itself may quote it
	}
	out, err := json.Marshal(severed{Status: fields["status"], Version: fields["version"], CreatedAt: fields["created_at"], PositionedAt: fields["positioned_at"],
		UpdatedAt: fields["updated_at"], Erased: true})
	if err != nil {
		return nil, fmt.Errorf("encode a redacted payload: %w", err)
	}
	return out, nil
}
