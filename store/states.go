package store

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// States returns what events would say of the entities now, whatever versions the refs name; nothing of entities that the tenant does
// not have. Nobody publishes them: they have neither id nor sequence.
func (s *Store) States(ctx context.Context, tenant int64, refs []event.Ref) ([]event.Event, error) {
	var followers, followees, posts []int64
	var comments []string
	for _, r := range refs {
		switch r.Type {
		case event.AggregateFollow:
			followers, followees = append(followers, int64(r.Follower)), append(followees, int64(r.Followee))
		case event.AggregateComment:
			comments = append(comments, r.Comment)
		case event.AggregateThread:
			posts = append(posts, int64(r.Thread))
		}
	}
	var events []event.Event
	err := s.read(ctx, tenant, func(tx pgx.Tx) error {
		events = events[:0]
		add := func(aggregate, eventType string, id event.ID, state any) error {
			payload, err := json.Marshal(state)
			events = append(events, event.Event{TenantID: tenant, AggregateType: aggregate, AggregateID: int64(id), Type: eventType, Version: 1, Payload: payload})
			return err
		}
		if len(followers) > 0 {
			rows, _ := tx.Query(ctx, getFollowsSQL, pgx.StrictNamedArgs{"tenant": tenant, "followers": followers, "followees": followees})
			got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[followRow])
			if err != nil {
				return err
			}
			for _, r := range got {
				if err := add(event.AggregateFollow, event.Created, event.ID(r.FolloweeID), r.wire()); err != nil {
					return err
				}
			}
		}
		if len(comments) > 0 {
			byID, err := getComments(ctx, tx, tenant, comments)
			if err != nil {
				return err
			}
			for _, r := range byID {
				c := r.wire()
				if !event.BodyTravels(c.AuthorState, c.ModerationState) {
					c.Body = ""
				}
				if err := add(event.AggregateComment, event.Edited, c.PostID, c); err != nil {
					return err
				}
			}
		}
		if len(posts) > 0 {
			_, all, err := getThreads(ctx, tx, tenant, posts)
			if err != nil {
				return err
			}
			for _, t := range all {
				if t.Version == 0 {
					continue
				}
				if err := add(event.AggregateThread, event.Updated, t.PostID, t); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the states of %d entities of tenant %d: %w", len(refs), tenant, err)
	}
	return events, nil
}
