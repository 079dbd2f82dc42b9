package event

import (
	"encoding/json"
	"fmt"
	"slices"
)

// kept are the fields of a comment's payload that say which comment it is, in which state it was and whose act that was. They are what
// a redacted payload has; whatever else a writer put there is gone with the body.
var kept = []string{"comment_id", "post_id", "parent_id", "slug", "path", "author_id", "author_state", "moderation_state", "version",
	"created_at", "updated_at", "actor"}

// CommentPayload is what an erasure needs to know of a payload, of whatever version or quality.
type CommentPayload struct {
	CommentID string
	AuthorID  string // in decimal
	Erased    bool   // redacted already
}

// PeekComment reads what an erasure needs to know. ok is false for a payload that is no JSON object. Fields of the wrong type count as absent.
func PeekComment(payload []byte) (c CommentPayload, ok bool) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(payload, &fields) != nil || fields == nil {
		return c, false
	}
	_ = json.Unmarshal(fields["comment_id"], &c.CommentID)
	if json.Unmarshal(fields["author_id"], &c.AuthorID) != nil {
		c.AuthorID = string(fields["author_id"]) // a writer's number
	}
	_ = json.Unmarshal(fields["erased"], &c.Erased)
	return c, true
}

// RedactComment returns the payload of a comment event without its content: the fields that name the comment and its state, an empty
// body, and "erased": true (docs/events.md). Redacting again changes nothing.
func RedactComment(payload []byte) ([]byte, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(payload, &fields); err != nil {
		return nil, fmt.Errorf("redact a payload of %d bytes: it is no JSON object", len(payload)) // the error itself may quote it
	}
	for name := range fields {
		if !slices.Contains(kept, name) {
			delete(fields, name)
		}
	}
	fields["body"], fields["erased"] = json.RawMessage(`""`), json.RawMessage(`true`)
	redacted, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("encode a redacted payload: %w", err)
	}
	return redacted, nil
}

// RedactHeaders returns the headers that name an event and its place. All others go.
func RedactHeaders(headers map[string][]string) map[string][]string {
	out := make(map[string][]string, len(headers))
	for _, name := range []string{HeaderID, HeaderType, HeaderSource, HeaderSubject, HeaderTime, HeaderSpecVersion, HeaderDataContentType, HeaderTraceParent,
		HeaderMsgID, HeaderOutboxID} {
		if v, ok := headers[name]; ok {
			out[name] = v
		}
	}
	return out
}
