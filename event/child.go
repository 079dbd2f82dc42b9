package event

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
)

// Child is the payload of the events of a child: its whole state after the write. Which members of the JSON name it and its parent object
// depends on its kind (ChildNames), so it is written by Encode and read by DecodeChild.
type Child struct {
	ID              string          `json:"child_id"`            // renamed; a UUID
	Parent          ID              `json:"object_id"`           // renamed; the object that it is under
	ReplyTo         string          `json:"parent_id,omitempty"` // UUID of the child that it replies to
	Slug            string          `json:"slug,omitempty"`      // of threaded kinds
	Path            string          `json:"path,omitempty"`      // likewise
	AuthorID        ID              `json:"author_id"`
	Body            string          `json:"body"`
	AuthorState     string          `json:"author_state"`     // ACTIVE, DELETED or ERASED
	ModerationState string          `json:"moderation_state"` // NONE, PENDING, APPROVED, HIDDEN or REMOVED
	Version         int64           `json:"version"`
	CreatedAt       Time            `json:"created_at"`
	UpdatedAt       Time            `json:"updated_at"`
	Attributes      json.RawMessage `json:"attributes,omitempty"` // an object, or nil for a kind without attributes
	Actor           string          `json:"actor"`
	Reason          string          `json:"reason,omitempty"` // the moderator's
	Erased          bool            `json:"erased,omitempty"` // body and reason were taken out afterwards: the author was erased since
}

// ChildNames are the members of the JSON that name a kind's children and their parent object.
type ChildNames struct{ ID, Parent string }

// Visible applies the rule of the same name to the child.
func (c Child) Visible() bool { return Visible(c.AuthorState, c.ModerationState) }

// State is the child's state in one word: see the function.
func (c Child) State() string { return State(c.AuthorState, c.ModerationState) }

// Comment is the child as the readers of comments have it.
func (c Child) Comment() Comment {
	return Comment{
		CommentID: c.ID, PostID: c.Parent, ParentID: c.ReplyTo, Slug: c.Slug, Path: c.Path, AuthorID: c.AuthorID, Body: c.Body, AuthorState: c.AuthorState,
		ModerationState: c.ModerationState, Version: c.Version, CreatedAt: c.CreatedAt, UpdatedAt: c.UpdatedAt, Actor: c.Actor, Reason: c.Reason, Erased: c.Erased,
	}
}

// Encode writes the child as JSON.
func (c Child) Encode(n ChildNames) ([]byte, error) {
	out, err := json.Marshal(reflect.ValueOf(c).Convert(shape[Child](n.ID, n.Parent)).Interface())
	if err != nil {
		return nil, fmt.Errorf("encode child %s: %w", c.ID, err)
	}
	return out, nil
}

// DecodeChild reads the payload of the child's event, which is of e.AggregateID, its parent object. An error is permanent. A payload whose ids
// are not in their one form is refused: whoever compares them as text (an erasure, an index) and whoever reads them see the same child.
func (e *Event) DecodeChild(n ChildNames) (Child, error) {
	c, err := decodeAs[Child](e, ChildEvents, n.ID, n.Parent)
	if err != nil {
		return Child{}, err
	}
	switch {
	case !isUUID(c.ID):
		err = fmt.Errorf("%s is no UUID in lower case with hyphens", n.ID)
	case c.ReplyTo != "" && !isUUID(c.ReplyTo):
		err = errors.New("parent_id is no UUID in lower case with hyphens")
	case int64(c.Parent) != e.AggregateID:
		err = fmt.Errorf("child %s is of %s %d, its event of %d", c.ID, n.Parent, c.Parent, e.AggregateID)
	case c.AuthorID <= 0:
		err = fmt.Errorf("child %s has no author", c.ID)
	case c.Version <= 0:
		err = fmt.Errorf("child %s has version %d", c.ID, c.Version)
	default:
		return c, nil
	}
	return Child{}, e.permanent(err)
}
