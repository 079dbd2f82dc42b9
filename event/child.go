package event

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Child is the payload of the events of a child: its whole state after the write. Its kind
// determines the names of two JSON members (ChildNames), so use Encode and DecodeChild.
type Child struct {
	ID              string          `json:"child_id"`            // renamed by ChildNames; a UUID
	Parent          ID              `json:"object_id"`           // renamed by ChildNames; the id of its object
	ReplyTo         string          `json:"parent_id,omitempty"` // UUID of the child that it replies to
	Slug            string          `json:"slug,omitempty"`      // only in threaded kinds
	Path            string          `json:"path,omitempty"`      // only in threaded kinds
	AuthorID        ID              `json:"author_id"`
	Body            string          `json:"body"`
	AuthorState     string          `json:"author_state"`     // ACTIVE, DELETED or ERASED
	ModerationState string          `json:"moderation_state"` // NONE, PENDING, APPROVED, HIDDEN or REMOVED
	Version         int64           `json:"version"`
	CreatedAt       Time            `json:"created_at"`
	UpdatedAt       Time            `json:"updated_at"`
	Attributes      json.RawMessage `json:"attributes,omitempty"` // an object, or nil for a kind without attributes
	Actor           string          `json:"actor"`
	Reason          string          `json:"reason,omitempty"` // of the moderator
	Erased          bool            `json:"erased,omitempty"` // body and reason were removed afterward: the author was erased
}

var children = newCodec(func(c *Child) []any {
	return []any{&c.ID, &c.Parent, &c.ReplyTo, &c.Slug, &c.Path, &c.AuthorID, &c.Body, &c.AuthorState, &c.ModerationState, &c.Version,
		&c.CreatedAt, &c.UpdatedAt, &c.Attributes, &c.Actor, &c.Reason, &c.Erased}
})

// ChildNames are the JSON members for a kind's children and their parent object.
type ChildNames struct{ ID, Parent string }

// Visible reports whether everybody sees the child.
func (c Child) Visible() bool { return Visible(c.AuthorState, c.ModerationState) }

// State returns the child's state in one word (function State).
func (c Child) State() string { return State(c.AuthorState, c.ModerationState) }

// Comment converts the child to a comment.
func (c Child) Comment() Comment {
	return Comment{
		CommentID: c.ID, PostID: c.Parent, ParentID: c.ReplyTo, Slug: c.Slug, Path: c.Path, AuthorID: c.AuthorID, Body: c.Body,
		AuthorState: c.AuthorState, ModerationState: c.ModerationState, Version: c.Version, CreatedAt: c.CreatedAt,
		UpdatedAt: c.UpdatedAt, Actor: c.Actor, Reason: c.Reason, Erased: c.Erased,
	}
}

// Encode writes the child as JSON.
func (c Child) Encode(n ChildNames) ([]byte, error) {
	out, err := children.encode(c, n.ID, n.Parent)
	if err != nil {
		return nil, fmt.Errorf("encode child %s: %w", c.ID, err)
	}
	return out, nil
}

// Parse reads a child from a history, which may hold payloads of any release.
func (n ChildNames) Parse(text []byte) (Child, error) { return children.decode(text, n.ID, n.Parent) }

// DecodeChild reads the payload of a child's event. Its parent object must be e.AggregateID. An
// error is permanent. It refuses ids that are not in canonical form, so that code that compares ids
// as text (an erasure, an index) and code that parses them see the same child.
func (e *Event) DecodeChild(n ChildNames) (Child, error) {
	c, err := decodeAs(e, ChildEvents, n.Parse)
	if err != nil {
		return Child{}, err
	}
	switch {
	case !IsUUID(c.ID):
		err = fmt.Errorf("%s is not a UUID in lower case with hyphens", n.ID)
	case c.ReplyTo != "" && !IsUUID(c.ReplyTo):
		err = errors.New("parent_id is not a UUID in lower case with hyphens")
	case c.Parent != e.AggregateID:
		err = fmt.Errorf("the %s of child %s is not its event's aggregate", n.Parent, c.ID)
	case c.AuthorID == "":
		err = fmt.Errorf("child %s has no author", c.ID)
	case c.Version <= 0:
		err = fmt.Errorf("child %s has version %d", c.ID, c.Version)
	default:
		return c, nil
	}
	return Child{}, e.permanent(err)
}
