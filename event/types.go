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

// Aggregate types and event types of the catalogue (docs/events.md).
const (
	AggregateFollow  = "follow"
	AggregateComment = "comment"
	AggregateThread  = "thread"

	// AggregateHeartbeat is of events that tell no change: Tidings writes them to measure its own path (Heartbeat).
	AggregateHeartbeat = "heartbeat"

	Created   = "created"
	Removed   = "removed"
	Edited    = "edited"
	Deleted   = "deleted"
	Moderated = "moderated"
	Erased    = "erased"
	Updated   = "updated"
	Sent      = "sent"
)

// SystemTenant stands for the installation. No person's and no service's token is of it.
const SystemTenant = 0

// catalogue has the newest version of each event type; versions from 1 to it can be decoded.
var catalogue = map[string]map[string]int{
	AggregateFollow:  {Created: 1, Removed: 1},
	AggregateComment: {Created: 1, Edited: 1, Deleted: 1, Moderated: 1, Erased: 1},
	AggregateThread:  {Updated: 1},

	AggregateHeartbeat: {Sent: 1},
}

// Known reports whether the catalogue has the aggregate type, and whether it has this version of the event type.
func Known(aggregateType, eventType string, version int) (aggregate, exact bool) {
	types, ok := catalogue[aggregateType]
	return ok, version >= 1 && version <= types[eventType]
}

// EventTypes returns the event types of the catalogue as "aggregate.event", for metrics that must stay bounded.
func EventTypes() []string {
	var all []string
	for a, types := range catalogue {
		for t := range types {
			all = append(all, a+"."+t)
		}
	}
	return all
}

// ID is a 64-bit id that travels as a decimal string in JSON, because JavaScript's numbers end at 2^53.
type ID int64

// ParseID reads a decimal id from 1 to 2^63-1, without sign or leading zeros.
func ParseID(s string) (ID, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 || strconv.FormatInt(n, 10) != s {
		return 0, fmt.Errorf("%q is not an id: want a decimal number from 1 to 9223372036854775807", s)
	}
	return ID(n), nil
}

func (id ID) String() string { return strconv.FormatInt(int64(id), 10) }

// MarshalText makes the id a string wherever text is wanted.
func (id ID) MarshalText() ([]byte, error) { return strconv.AppendInt(nil, int64(id), 10), nil }

// UnmarshalText is ParseID with an error that does not quote what it read: errors of payloads are logged.
func (id *ID) UnmarshalText(b []byte) error {
	n, err := ParseID(string(b))
	if err != nil {
		return errors.New("an id is no decimal number from 1 to 9223372036854775807")
	}
	*id = n
	return nil
}

// TimeFormat is RFC 3339 in UTC with six digits: PostgreSQL's resolution, and sortable as text.
const TimeFormat = "2006-01-02T15:04:05.000000Z"

// Time travels in TimeFormat.
type Time struct{ time.Time }

// MarshalJSON writes TimeFormat.
func (t Time) MarshalJSON() ([]byte, error) {
	return []byte(`"` + t.UTC().Format(TimeFormat) + `"`), nil
}

// UnmarshalJSON reads any RFC 3339 time.
func (t *Time) UnmarshalJSON(b []byte) error {
	if len(b) < 2 || b[0] != '"' || bytes.IndexByte(b, '\\') >= 0 { // no time of ours; JSON may spell a string otherwise
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		b = strconv.AppendQuote(nil, s)
	}
	v, err := time.Parse(time.RFC3339Nano, string(b[1:len(b)-1]))
	if err != nil {
		return errors.New("a time is not in RFC 3339") // err quotes it
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

// Active reports whether the pair is followed now.
func (f Follow) Active() bool { return f.Status == StatusActive }

// The states of a follow.
const (
	StatusActive  = "ACTIVE"
	StatusRemoved = "REMOVED"
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
	Reason          string `json:"reason,omitempty"` // the moderator's
	Erased          bool   `json:"erased,omitempty"` // body and reason were taken out afterwards: the author was erased since
}

// valid reports what is wrong with the ids of a comment of an event of the post: they have one form, so that whoever compares them as text (an
// erasure, an index) and whoever reads them see the same comment. outbox_messages has the same rule (names_comment).
func (c Comment) valid(post int64) error {
	switch {
	case !isUUID(c.CommentID):
		return errors.New("comment_id is no UUID in lower case with hyphens")
	case c.ParentID != "" && !isUUID(c.ParentID):
		return errors.New("parent_id is no UUID in lower case with hyphens")
	case int64(c.PostID) != post:
		return fmt.Errorf("comment %s is of post %d, its event of %d", c.CommentID, c.PostID, post)
	case c.AuthorID <= 0:
		return fmt.Errorf("comment %s has no author", c.CommentID)
	}
	return nil
}

// isUUID reports whether s is a UUID in its canonical form: lower case, with hyphens.
func isUUID(s string) bool {
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
	AuthorActive  = "ACTIVE"
	AuthorDeleted = "DELETED"
	AuthorErased  = "ERASED"

	ModerationNone     = "NONE"
	ModerationPending  = "PENDING"
	ModerationApproved = "APPROVED"
	ModerationHidden   = "HIDDEN"
	ModerationRemoved  = "REMOVED"
)

// Visible is the one rule of who sees a comment: its author left it and moderation, if any, let it through.
func Visible(authorState, moderationState string) bool {
	return authorState == AuthorActive && (moderationState == ModerationNone || moderationState == ModerationApproved)
}

// Visible applies the rule of the same name to the comment.
func (c Comment) Visible() bool { return Visible(c.AuthorState, c.ModerationState) }

// BodyTravels reports whether the events of a comment in these states have its body. A gone comment's stays in the truth:
// whoever reads the event must not show it. It travels again with the event that makes the comment visible.
func BodyTravels(authorState, moderationState string) bool {
	return Visible(authorState, moderationState) || authorState == AuthorActive && moderationState == ModerationPending
}

// State is the comment's state in one word, as the API shows it: visible, pending, hidden, removed, deleted or erased.
func (c Comment) State() string { return State(c.AuthorState, c.ModerationState) }

// State is the one word for a pair of states. The author's axis goes first: what they deleted is theirs to have deleted.
func State(authorState, moderationState string) string {
	switch {
	case authorState == AuthorErased:
		return "erased"
	case authorState == AuthorDeleted:
		return "deleted"
	case moderationState == ModerationPending:
		return "pending"
	case moderationState == ModerationHidden:
		return "hidden"
	case moderationState == ModerationRemoved:
		return "removed"
	}
	return "visible"
}

// Thread is the payload of thread events: the settings of the children of a kind under one object.
type Thread struct {
	Kind        string `json:"kind,omitempty"` // absent for comments, which had threads first
	PostID      ID     `json:"post_id"`        // the object, whatever it is
	Locked      bool   `json:"locked"`
	Premoderate bool   `json:"premoderated"`
	Title       string `json:"title,omitempty"`
	Version     int64  `json:"version"`
	UpdatedAt   Time   `json:"updated_at"`
	Actor       string `json:"actor"`
}

// Of is the kind of the children that the settings are for.
func (t Thread) Of() string { return cmp.Or(t.Kind, AggregateComment) }

// Heartbeat is the payload of heartbeats. The aggregate's id is a number that falls into the partition's first slot.
type Heartbeat struct {
	Partition       int     `json:"partition"`        // whose relay was to publish it when it was written
	IntervalSeconds float64 `json:"interval_seconds"` // the least between two of a partition
}

// System reports whether events of an aggregate type tell of Tidings itself. Readers get them if they ask for the type by name.
func System(aggregateType string) bool { return aggregateType == AggregateHeartbeat }

// PermanentError wraps an error that no retry can mend: the event itself is wrong. Consumers park it.
type PermanentError struct{ err error }

func (e *PermanentError) Error() string { return e.err.Error() }

// Unwrap returns what was wrong.
func (e *PermanentError) Unwrap() error { return e.err }

// Permanent marks err as a fault of the event itself.
func Permanent(err error) error { return &PermanentError{err} }

// IsPermanent reports whether err was marked by Permanent.
func IsPermanent(err error) bool {
	var p *PermanentError
	return errors.As(err, &p)
}
