package redact

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tidings/tidings/event"
)

// kept are the members of a child's payload that remain, beside the child and its object: its state
// and the actor. All other members are removed with the body.
var kept = []string{"parent_id", "slug", "path", "author_id", "body", "author_state", "moderation_state", "version", "created_at",
	"updated_at", "actor", "erased"}

// values returns the values of members of a JSON object, as they are written; nil for one that it
// lacks. Names match as consumers match them: encoding/json ignores case, and the last of several
// members counts.
func values(payload []byte, names ...string) ([]json.RawMessage, error) {
	all, d := make([]json.RawMessage, len(names)), json.NewDecoder(bytes.NewReader(payload))
	if start, err := d.Token(); err != nil || start != json.Delim('{') || !json.Valid(payload) {
		return nil, fmt.Errorf("redact a payload of %d bytes: it is not a JSON object", len(payload)) // err may quote it
	}
	for d.More() {
		name, err := d.Token()
		var value json.RawMessage
		if err = errors.Join(err, d.Decode(&value)); err != nil {
			return nil, err // never: the payload is valid
		}
		is := func(n string) bool { return strings.EqualFold(n, name.(string)) }
		if i := slices.IndexFunc(names, is); i >= 0 {
			all[i] = value
		}
	}
	return all, nil
}

// ChildID returns the id of the child that a payload names, in canonical form. It accepts any
// payload version and any form of the id. It returns "" if the payload names no child. It finds
// every child that Event.DecodeChild reads, and those that it refuses because of the form of their
// id.
func ChildID(n event.ChildNames, payload []byte) string {
	all, err := values(payload, n.ID)
	if err != nil {
		return ""
	}
	return childID(all[0])
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
	if !event.IsUUID(id) {
		return ""
	}
	return id
}

// IsRedacted reports whether the payload of a child's event has no content: only the members that
// Child leaves, and its mark. KIND.erased is made without content and has no mark. The mark alone
// is not enough, because a writer may set it.
func IsRedacted(n event.ChildNames, eventType string, payload []byte) bool {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil || fields == nil {
		return false
	}
	for name := range fields {
		if !slices.Contains(kept, name) && name != n.ID && name != n.Parent {
			return false
		}
	}
	body, has := fields["body"]
	return (!has || string(body) == `""`) && (eventType == event.Erased || string(fields["erased"]) == "true")
}

// Child returns the payload of a child's event without its content. It keeps the members that name
// the child and its state, and sets an empty body and "erased": true (docs/events.md). Repeating it
// changes nothing.
func Child(n event.ChildNames, payload []byte) ([]byte, error) {
	names := append([]string{n.ID, n.Parent}, kept...)
	all, err := values(payload, names...)
	if err != nil {
		return nil, err
	}
	out := []byte{'{'}
	for i, name := range names {
		switch name {
		case "body":
			all[i] = json.RawMessage(`""`)
		case "erased":
			all[i] = json.RawMessage(`true`)
		}
		if all[i] == nil {
			continue
		}
		value, err := json.Marshal(all[i])
		if err != nil {
			return nil, fmt.Errorf("encode a redacted payload: %w", err)
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(append(out, '"'), name...), `":`...), value...)
	}
	return append(out, '}'), nil
}

// Actor replaces the actor of a payload by event.ErasedActor if it is the given one. It accepts any
// aggregate type and changes nothing else. The member's name matches as consumers match it,
// ignoring case.
func Actor(payload []byte, actor string) (redacted []byte, changed bool, err error) {
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
			fields[name], changed = json.RawMessage(`"`+event.ErasedActor+`"`), true
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

// Anybody is not an ID that event.ParseID reads. It stands for every person.
const Anybody event.ID = "*"

// People returns the ids under which an erasure may search for a payload. The payload may be of any
// aggregate type, and need not be valid. People returns every id in it, because only the kind knows
// which ones are persons. It adds Anybody if the payload may be a child's and names no author. A
// redacted payload of a child names only its actor.
func People(eventType string, payload []byte) (ids []event.ID) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil {
		return nil
	}
	var actors []event.ID
	author, child, edge, others, content := false, false, false, 0, false
	for name, value := range fields {
		switch isAuthor := strings.EqualFold(name, "author_id"); {
		case strings.EqualFold(name, "actor"):
			var actor string
			_ = json.Unmarshal(value, &actor) // an actor that is not text names nobody
			user, is := strings.CutPrefix(actor, "user:")
			if id, err := event.ParseID(user); is && err == nil {
				actors = append(actors, id)
			}
		case name == "status" || name == "positioned_at":
			edge = true
		case slices.Contains(kept, name) && !isAuthor:
		default:
			id, isChild := idOf(value), !isAuthor && childID(value) != ""
			if id != "" {
				ids = append(ids, id)
			}
			author, child = author || isAuthor && id != "", child || isChild
			if !slices.Contains(kept, name) {
				others++
				content = content || id == "" && !isChild
			}
		}
	}
	body, has := fields["body"]
	if erased := eventType == event.Erased || string(fields["erased"]) == "true"; erased && (!has || string(body) == `""`) &&
		!content && !edge && (others == 0 || others <= 2 && child) {
		return actors
	}
	if child && !author && !edge {
		ids = append(ids, Anybody)
	}
	return append(ids, actors...)
}

// Headers returns the headers that identify an event and its place, without all others.
func Headers(headers map[string][]string) map[string][]string {
	out := make(map[string][]string, len(headers))
	for _, name := range []string{event.HeaderID, event.HeaderType, event.HeaderSource, event.HeaderSubject, event.HeaderTime,
		event.HeaderSpecVersion, event.HeaderDataContentType, event.HeaderDataSchema, event.HeaderTenant, event.HeaderTraceParent,
		event.HeaderOutboxID} {
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

// Ends returns the ids of the ends of an edge that a payload names, in any payload version and any
// form of the ids. An end is empty if the payload does not name it.
func Ends(n event.EdgeNames, payload []byte) (from, to event.ID) {
	all, err := values(payload, n.From, n.To)
	if err != nil {
		return "", ""
	}
	return idOf(all[0]), idOf(all[1])
}

// idOf reads an id in any form that a writer may use: text, or a whole number. It returns "" for
// anything else.
func idOf(raw json.RawMessage) event.ID {
	var text string
	if json.Unmarshal(raw, &text) != nil { // no text, so perhaps a number
		whole, zeros, _ := strings.Cut(string(raw), ".")
		if n, err := strconv.ParseInt(whole, 10, 64); err == nil && strings.Trim(zeros, "0") == "" {
			text = strconv.FormatInt(n, 10)
		}
	}
	id, err := event.ParseID(strings.TrimSpace(text))
	if err != nil {
		return ""
	}
	return id
}

// Edge returns the payload of an edge's event without its ends, attributes and actor, and with
// "erased": true. It names nobody. Repeating it changes nothing.
func Edge(payload []byte) ([]byte, error) {
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
