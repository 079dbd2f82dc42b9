package history

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/versioned"
)

// Name is the projection's name, and its consumer's: the archiver.
const Name = "archiver"

const sequence = "history_version_id"

// Projection applies comment and follow events. It is immutable.
type Projection struct {
	comments *versioned.Table[event.Comment]
	follows  *versioned.Table[event.Follow]
}

// New returns the projection.
func New() *Projection { return &Projection{comments: Comments(), follows: Follows()} }

// Comments is the history of comments. Its key is (comment_id).
func Comments() *versioned.Table[event.Comment] {
	return versioned.New[event.Comment](versioned.Definition{
		Table: "comment_history", Sequence: sequence, Version: "version",
		Key: []versioned.Column{{Name: "comment_id", Type: "uuid"}}, Purged: "comment_history_purged",
		Indexes: [][]versioned.Column{{{Name: "author_id", Type: "bigint"}}},
	})
}

// Follows is the history of follows. Its key is (follower_id, followee_id).
func Follows() *versioned.Table[event.Follow] {
	return versioned.New[event.Follow](versioned.Definition{
		Table: "follow_history", Sequence: sequence, Version: "version",
		Key: []versioned.Column{{Name: "follower_id", Type: "bigint"}, {Name: "followee_id", Type: "bigint"}}, Purged: "follow_history_purged",
	})
}

// Name returns the projection's name.
func (*Projection) Name() string { return Name }

// Wants reports whether the projection applies events of the aggregate type.
func (*Projection) Wants(aggregateType string) bool {
	return aggregateType == event.AggregateComment || aggregateType == event.AggregateFollow
}

// Apply records a version per event, in the caller's transaction. A payload that does not decode, or that does not say who did
// it, is a permanent error. Cost: three statements per table however many events.
func (p *Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	var comments []versioned.Entry[event.Comment]
	var follows []versioned.Entry[event.Follow]
	for i := range events {
		e := &events[i]
		switch e.AggregateType {
		case event.AggregateComment:
			var c event.Comment
			if err := e.DecodePayload(&c); err != nil {
				return err
			}
			if c.Version <= 0 || c.Actor == "" {
				return event.Permanent(fmt.Errorf("event %s: comment %s has version %d by %.80q", e.ID, c.CommentID, c.Version, c.Actor))
			}
			comments = append(comments, versioned.Entry[event.Comment]{
				Change:  versioned.Change[event.Comment]{TenantID: e.TenantID, Object: c, By: c.Actor, At: c.UpdatedAt.Time},
				Deleted: c.AuthorState != event.AuthorActive,
			})
		case event.AggregateFollow:
			var f event.Follow
			if err := e.DecodePayload(&f); err != nil {
				return err
			}
			if f.FollowerID <= 0 || f.FolloweeID <= 0 || f.Version <= 0 || f.Actor == "" {
				return event.Permanent(fmt.Errorf("event %s: follow %d/%d has version %d by %.80q", e.ID, f.FollowerID, f.FolloweeID, f.Version, f.Actor))
			}
			follows = append(follows, versioned.Entry[event.Follow]{
				Change:  versioned.Change[event.Follow]{TenantID: e.TenantID, Object: f, By: f.Actor, At: f.UpdatedAt.Time},
				Deleted: !f.Active(),
			})
		}
	}
	if _, err := p.comments.Record(ctx, tx, comments); err != nil {
		return err
	}
	_, err := p.follows.Record(ctx, tx, follows)
	return err
}
