package api

import (
	"context"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/tokens"
)

// Pair names a follow in a body.
type Pair struct {
	FollowerID userID `json:"follower_id" example:"7"`
	FolloweeID userID `json:"followee_id" example:"42"`
}

type checkInput struct {
	Body struct {
		Pairs []Pair `json:"pairs" minItems:"1" maxItems:"500" nullable:"false" doc:"1 to 500. A pair may come twice, and is then answered twice."`
	}
}

// Relation is how the two users of a pair stand to each other.
type Relation struct {
	FollowerID   event.ID    `json:"follower_id" example:"7"`
	FolloweeID   event.ID    `json:"followee_id" example:"42"`
	Following    bool        `json:"following" doc:"follower_id follows followee_id." example:"true"`
	FollowedBy   bool        `json:"followed_by" doc:"followee_id follows follower_id." example:"false"`
	PositionedAt *event.Time `json:"positioned_at,omitempty" format:"date-time" doc:"When following last became true; absent unless it is."`
}

// RelationList answers a check.
type RelationList struct {
	Items []Relation `json:"items" nullable:"false" doc:"One for each pair, in their order."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the answer."`
}

type checkOutput struct{ Body RelationList }

type manyCountsInput struct {
	Body struct {
		UserIDs []userID `json:"user_ids" minItems:"1" maxItems:"500" nullable:"false" doc:"1 to 500. A user may come twice, and is then answered twice." example:"[\"7\",\"42\"]"`
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
	Items []UserCounts `json:"items" nullable:"false" doc:"One for each user, in their order."`
	AsOf  event.Time   `json:"as_of" format:"date-time" doc:"Everything that was published up to then is counted."`
}

type manyCountsOutput struct{ Body UserCountsList }

type mutualsInput struct {
	UserPath
	Other id  `path:"other" doc:"Another user, or the same one: then those who follow each other."`
	Limit int `query:"limit" default:"50" minimum:"1" maximum:"200" doc:"Items at most."`
}

// MutualList are the users whom one user follows and who follow another.
type MutualList struct {
	Items     []Edge     `json:"items" nullable:"false"`
	Truncated bool       `json:"truncated" doc:"There are more, or may be." example:"false"`
	AsOf      event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the list."`
}

type mutualsOutput struct{ Body MutualList }

func (s *server) relationRoutes() {
	body := []string{codeJSONInvalid, codeRequestTooLarge, codeRequestTimeout, codeMediaType}
	register(s, route{
		method: http.MethodPost, path: "/v1/follows:check", id: "check-follows", tag: "Follows", role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary:     "Ask of up to 500 pairs whether the one follows the other",
		description: "Both ways, from a projection. A user follows nobody that nobody knows, nor themself.",
		codes:       body,
	}, s.checkFollows)
	register(s, route{
		method: http.MethodPost, path: "/v1/users:counts", id: "get-many-counts", tag: "Users", role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "Count the followers and followings of up to 500 users", description: "From a projection. A user that nobody knows has 0.",
		codes: body,
	}, s.manyCounts)
	register(s, route{
		method: http.MethodGet, path: "/v1/users/{id}/mutuals/{other}", id: "list-mutuals", tag: "Users", role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "List whom a user follows of those who follow another",
		description: fmt.Sprintf("In the order of the user's following list: who was followed last comes first. From a projection. When the user follows "+
			"more than %[1]d users and the other has more than %[1]d followers, only the newest %[1]d that the user follows are looked at: what comes is "+
			"the beginning of the whole list, and `truncated` is true.", followercounts.MutualsCap),
	}, s.mutuals)
}

func (s *server) checkFollows(ctx context.Context, in *checkInput) (*checkOutput, error) {
	pairs, items := make([]followercounts.Pair, len(in.Body.Pairs)), make([]Relation, len(in.Body.Pairs))
	for i, p := range in.Body.Pairs {
		var err error
		if pairs[i].Follower, err = s.parseID(fmt.Sprintf("#/pairs/%d/follower_id", i), string(p.FollowerID)); err != nil {
			return nil, err
		}
		if pairs[i].Followee, err = s.parseID(fmt.Sprintf("#/pairs/%d/followee_id", i), string(p.FolloweeID)); err != nil {
			return nil, err
		}
	}
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		all, err := followercounts.Relations(ctx, tx, pairs)
		for i, r := range all {
			items[i] = Relation{FollowerID: event.ID(pairs[i].Follower), FolloweeID: event.ID(pairs[i].Followee), Following: r.Following, FollowedBy: r.FollowedBy}
			if r.Following {
				items[i].PositionedAt = &event.Time{Time: r.PositionedAt}
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &checkOutput{Body: RelationList{Items: items, AsOf: asOf}}, nil
}

func (s *server) manyCounts(ctx context.Context, in *manyCountsInput) (*manyCountsOutput, error) {
	users, items := make([]int64, len(in.Body.UserIDs)), make([]UserCounts, len(in.Body.UserIDs))
	for i, u := range in.Body.UserIDs {
		var err error
		if users[i], err = s.parseID(fmt.Sprintf("#/user_ids/%d", i), string(u)); err != nil {
			return nil, err
		}
	}
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		all, err := followercounts.ReadCounts(ctx, tx, users)
		for i, u := range users {
			items[i] = UserCounts{UserID: event.ID(u), Followers: all[u].Followers, Following: all[u].Following}
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
		rows, truncated, err = followercounts.Mutuals(ctx, tx, in.ID.int64(), in.Other.int64(), in.Limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &mutualsOutput{Body: MutualList{Items: edgesOf(rows), Truncated: truncated, AsOf: asOf}}, nil
}
