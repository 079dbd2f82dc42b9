package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/projections/followercounts"
)

type manyCountsInput struct {
	Body struct {
		UserIDs []userID `json:"user_ids" minItems:"1" maxItems:"500" nullable:"false" doc:"1 to 500 users. A repeated user gets a repeated answer." example:"[\"7\",\"42\"]"`
	}
}

// UserCounts are the counts of one user among many.
type UserCounts struct {
	UserID    event.ID `json:"user_id" example:"42"`
	Followers int64    `json:"followers" example:"1200"`
	Following int64    `json:"following" example:"80"`
}

// UserCountsList are the counts of many users.
type UserCountsList struct {
	Items []UserCounts `json:"items" nullable:"false" doc:"One per user, in the order of the request."`
	AsOf  event.Time   `json:"as_of" format:"date-time" doc:"The counts include every write that had committed by this time, except parked and scheduled events."`
}

type manyCountsOutput struct{ Body UserCountsList }

type mutualsInput struct {
	UserPath
	Other id  `path:"other_id" doc:"Another user. With the same user, the list has those who follow back."`
	Limit int `query:"limit" default:"50" minimum:"1" maximum:"200" doc:"At most this many items."`
}

// MutualList are the users whom one user follows and who follow another.
type MutualList struct {
	Items     []Edge     `json:"items" nullable:"false"`
	Truncated bool       `json:"truncated" doc:"True if there may be more." example:"false"`
	AsOf      event.Time `json:"as_of" format:"date-time" doc:"The list includes every write that had committed by this time, except parked and scheduled events."`
}

type mutualsOutput struct{ Body MutualList }

func (s *server) relationRoutes() {
	users := s.kinds.Objects[authors].ID
	n := &naming{ids: narrowed(idForms{"user_id": users, "other_id": users})}
	register(s, route{
		method: http.MethodPost, path: "/v1/users:count", id: "count-users", tag: "Users", role: tokens.RoleRead,
		status: http.StatusOK, projected: true,
		summary: "Count the followers and followings of up to 500 users", description: "Reads a projection. An unknown user counts 0.",
		codes: writing(), naming: n,
	}, s.manyCounts)
	register(s, route{
		method: http.MethodGet, path: "/v1/users/{user_id}/mutuals/{other_id}", id: "list-user-mutuals", tag: "Users",
		role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "List the users whom one user follows and who follow another",
		description: fmt.Sprintf("Ordered like the user's following list, newest first. Reads a projection. If the user follows more "+
			"than %[1]d users and the other has more than %[1]d followers, only the user's newest %[1]d are searched. The answer is "+
			"then the beginning of the list, and `truncated` is true. It is also true if more than `limit` users match. The list "+
			"has no further page.", followercounts.MutualsCap),
		naming: n,
	}, s.mutuals)
	schemas := s.api.OpenAPI().Components.Schemas.Map()
	n.narrow(schemas["Edge"])
	n.narrow(schemas["UserCounts"])
	if len(n.ids) > 0 {
		ids := schemas["ManyCountsInputBody"].Properties["user_ids"]
		narrowID(ids.Items, users, "7")
		ids.Examples = []any{[]any{exampleID(users, "7")}}
	}
}

func (s *server) manyCounts(ctx context.Context, in *manyCountsInput) (*manyCountsOutput, error) {
	users, items := make([]event.ID, len(in.Body.UserIDs)), make([]UserCounts, len(in.Body.UserIDs))
	for i, u := range in.Body.UserIDs {
		var err error
		if users[i], err = s.parseID(s.kinds.Objects[authors].ID, fmt.Sprintf("#/user_ids/%d", i), string(u)); err != nil {
			return nil, err
		}
	}
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		all, err := followercounts.ReadCounts(ctx, tx, []string{event.AggregateFollow}, users)
		for i, u := range users {
			c := all[followercounts.Object{Kind: event.AggregateFollow, ID: u}]
			items[i] = UserCounts{UserID: u, Followers: c.Incoming, Following: c.Outgoing}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &manyCountsOutput{Body: UserCountsList{Items: items, AsOf: asOf}}, nil
}

func (s *server) mutuals(ctx context.Context, in *mutualsInput) (*mutualsOutput, error) {
	var rows []followercounts.Edge
	var truncated bool
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		var err error
		rows, truncated, err = followercounts.Mutuals(ctx, tx, event.AggregateFollow, in.ID.ID, in.Other.ID, in.Limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &mutualsOutput{Body: MutualList{Items: edgesOf(rows), Truncated: truncated, AsOf: asOf}}, nil
}
