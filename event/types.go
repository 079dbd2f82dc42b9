package event

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Aggregate types and event types of the catalog (docs/events.md).
const (
	AggregateFollow  = "follow"  // the follows of one user
	AggregateComment = "comment" // the comments on one post
	AggregateThread  = "thread"  // the settings of one thread
	AggregatePerson  = "person"  // an erased person, for readers to delete what they have

	// AggregateHeartbeat is the type of events without a change: Tidings writes them to measure its
	// own path (Heartbeat).
	AggregateHeartbeat = "heartbeat"

	Created   = "created"   // of edges and children; an edge also returns with it
	Removed   = "removed"   // of edges
	Edited    = "edited"    // of children: the body or the attributes
	Deleted   = "deleted"   // of children, by their author
	Moderated = "moderated" // of children, by a moderator
	Erased    = "erased"    // of children and persons
	Updated   = "updated"   // of an edge's attributes, or of thread settings
	Sent      = "sent"      // of heartbeats
)

// SystemTenant is the tenant of the installation itself. Only tokens of operators belong to it.
const SystemTenant = 0

// catalog has the newest version of each event type. Versions from 1 to it can be decoded.
var catalog = map[string]map[string]int{
	AggregateFollow:  {Created: 1, Removed: 1, Updated: 1}, // the last only where follows have attributes
	AggregateComment: {Created: 1, Edited: 1, Deleted: 1, Moderated: 1, Erased: 1},
	AggregateThread:  {Updated: 1},
	AggregatePerson:  {Erased: 1},

	AggregateHeartbeat: {Sent: 1},
}

// Known reports whether the catalog has the aggregate type, and whether it has this version of the
// event type.
func Known(aggregateType, eventType string, version int) (aggregate, exact bool) {
	types, ok := catalog[aggregateType]
	return ok, version >= 1 && version <= types[eventType]
}

// EventTypes returns the event types of the catalog as "aggregate.event", for metrics with bounded
// labels.
func EventTypes() []string {
	var all []string
	for a, types := range catalog {
		for t := range types {
			all = append(all, a+"."+t)
		}
	}
	return all
}

// TimeFormat is RFC 3339 in UTC with six digits: PostgreSQL's resolution, and sortable as text.
const TimeFormat = "2006-01-02T15:04:05.000000Z"

// Time is encoded in TimeFormat.
type Time struct{ time.Time }

// MarshalJSON writes TimeFormat.
func (t Time) MarshalJSON() ([]byte, error) {
	return append(t.UTC().AppendFormat(append(make([]byte, 0, len(TimeFormat)+2), '"'), TimeFormat), '"'), nil
}

// UnmarshalJSON reads any RFC 3339 time.
func (t *Time) UnmarshalJSON(b []byte) error {
	if len(b) < 2 || b[0] != '"' || bytes.IndexByte(b, '\\') >= 0 { // not written by Tidings: JSON has other spellings of a string
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		b = strconv.AppendQuote(nil, s)
	}
	v, err := time.Parse(time.RFC3339Nano, string(b[1:len(b)-1]))
	if err != nil {
		return errors.New("a time is not in RFC 3339") // err would quote it
	}
	t.Time = v.UTC()
	return nil
}

// Follow is the payload of follow events: the pair's whole state after the write.
type Follow struct {
	FollowerID   ID     `json:"follower_id"`
	FolloweeID   ID     `json:"followee_id"`
	Status       string `json:"status"` // ACTIVE or REMOVED
	Version      int64  `json:"version"`
	CreatedAt    Time   `json:"created_at"`
	PositionedAt Time   `json:"positioned_at"` // when it last became ACTIVE; orders pages
	UpdatedAt    Time   `json:"updated_at"`
	Actor        string `json:"actor"`
}

// Active reports whether the follower follows the followee now.
func (f Follow) Active() bool { return f.Status == StatusActive }

// The states of a follow.
const (
	StatusActive  = "ACTIVE"  // the edge exists
	StatusRemoved = "REMOVED" // it existed
)

// Comment is the payload of comment events: the comment's whole state after the write.
type Comment struct {
	CommentID       string `json:"comment_id"`
	PostID          ID     `json:"post_id"`
	ParentID        string `json:"parent_id,omitempty"`
	Slug            string `json:"slug"`
	Path            string `json:"path"`
	AuthorID        ID     `json:"author_id"`
	Body            string `json:"body"`
	AuthorState     string `json:"author_state"`     // ACTIVE, DELETED or ERASED
	ModerationState string `json:"moderation_state"` // NONE, PENDING, APPROVED, HIDDEN or REMOVED
	Version         int64  `json:"version"`
	CreatedAt       Time   `json:"created_at"`
	UpdatedAt       Time   `json:"updated_at"`
	Actor           string `json:"actor"`
	Reason          string `json:"reason,omitempty"` // of the moderator
	Erased          bool   `json:"erased,omitempty"` // body and reason were removed afterward: the author was erased
}

// valid checks the ids of a comment in an event of the post. They must have one form, so that code
// that compares them as text (an erasure, an index) and code that parses them see the same comment.
// outbox_messages has the same rule (names_comment).
func (c Comment) valid(post ID) error {
	switch {
	case !IsUUID(c.CommentID):
		return errors.New("comment_id is not a UUID in lower case with hyphens")
	case c.ParentID != "" && !IsUUID(c.ParentID):
		return errors.New("parent_id is not a UUID in lower case with hyphens")
	case c.PostID != post:
		return fmt.Errorf("the post_id of comment %s is not its event's aggregate", c.CommentID)
	case c.AuthorID == "":
		return fmt.Errorf("comment %s has no author", c.CommentID)
	}
	return nil
}

// IsUUID reports whether s is a UUID in its canonical form: lower case, with hyphens.
func IsUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i, c := range []byte(s) {
		if i == 8 || i == 13 || i == 18 || i == 23 {
			if c != '-' {
				return false
			}
		} else if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// The two axes of a comment's state.
const (
	AuthorActive  = "ACTIVE"  // the author keeps it
	AuthorDeleted = "DELETED" // the author deleted it: final
	AuthorErased  = "ERASED"  // the author was erased: final

	ModerationNone     = "NONE"     // nobody decided
	ModerationPending  = "PENDING"  // it waits for a moderator
	ModerationApproved = "APPROVED" // a moderator allowed it
	ModerationHidden   = "HIDDEN"   // a moderator hid it
	ModerationRemoved  = "REMOVED"  // a moderator removed it
)

// Visible reports whether everybody sees a comment in these states: its author has not deleted it,
// and moderation allows it.
func Visible(authorState, moderationState string) bool {
	return authorState == AuthorActive && (moderationState == ModerationNone || moderationState == ModerationApproved)
}

// Visible reports whether everybody sees the comment.
func (c Comment) Visible() bool { return Visible(c.AuthorState, c.ModerationState) }

// BodyTravels reports whether events of a comment in these states have its body. If not, the body
// remains only in the truth, because readers of the event must not show it. The event that makes
// the comment visible again has it.
func BodyTravels(authorState, moderationState string) bool {
	return Visible(authorState, moderationState) || authorState == AuthorActive && moderationState == ModerationPending
}

// The states of a child as readers see them: one word for both axes.
const (
	StateVisible = "VISIBLE" // everybody sees it
	StatePending = "PENDING" // only moderators see it, until one decides
	StateHidden  = "HIDDEN"  // by a moderator
	StateRemoved = "REMOVED" // by a moderator
	StateDeleted = "DELETED" // by its author
	StateErased  = "ERASED"  // with its author
)

// State returns the comment's state in one word, as the API shows it.
func (c Comment) State() string { return State(c.AuthorState, c.ModerationState) }

// State returns the one word for a pair of states. The author's deletion hides any moderation
// state.
func State(authorState, moderationState string) string {
	switch {
	case authorState == AuthorErased:
		return StateErased
	case authorState == AuthorDeleted:
		return StateDeleted
	case moderationState == ModerationPending:
		return StatePending
	case moderationState == ModerationHidden:
		return StateHidden
	case moderationState == ModerationRemoved:
		return StateRemoved
	}
	return StateVisible
}

// Thread is the payload of thread events: the settings of the children of a kind under one object.
type Thread struct {
	Kind        string `json:"kind,omitempty"` // absent for comments, the first kind with threads
	PostID      ID     `json:"post_id"`        // the object's id, of any type
	Locked      bool   `json:"locked"`
	Premoderate bool   `json:"premoderated"`
	Title       string `json:"title,omitempty"`
	Version     int64  `json:"version"`
	UpdatedAt   Time   `json:"updated_at"`
	Actor       string `json:"actor"`
}

// Of returns the kind of the children that the settings apply to.
func (t Thread) Of() string { return cmp.Or(t.Kind, AggregateComment) }

// PersonErased is the payload of person.erased. Each partition has one such event for an erasure,
// behind all events of the tenant that name the person. Its aggregate id is a number that belongs
// to the partition's first slot.
type PersonErased struct {
	PersonID    ID   `json:"person_id"`
	RequestedAt Time `json:"requested_at"` // when the erasure was requested; earlier than the event
}

// Heartbeat is the payload of heartbeats. Their aggregate id is a number that belongs to the
// partition's first slot.
type Heartbeat struct {
	Partition       int     `json:"partition"`        // the partition that was expected to publish it when it was written
	IntervalSeconds float64 `json:"interval_seconds"` // the minimum between two heartbeats of a partition
}

// System reports whether events of an aggregate type are about Tidings itself. Readers get them
// only if they request the type by name.
func System(aggregateType string) bool { return aggregateType == AggregateHeartbeat }

// PermanentError wraps an error that no retry can repair: the event itself is wrong. Consumers park
// it.
type PermanentError struct{ err error }

func (e *PermanentError) Error() string { return e.err.Error() }

// Unwrap returns the wrapped error.
func (e *PermanentError) Unwrap() error { return e.err }

// Permanent marks err as a fault of the event itself.
func Permanent(err error) error { return &PermanentError{err} }

// IsPermanent reports whether err was marked by Permanent.
func IsPermanent(err error) bool {
	var p *PermanentError
	return errors.As(err, &p)
}
