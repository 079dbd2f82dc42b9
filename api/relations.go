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
}

func (s *server) mutuals(ctx context.Context, in *mutualsInput) (*mutualsOutput, error) {
	var rows []followercounts.Edge
	var truncated bool
	read, err := s.readProjection(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		var err error
		rows, truncated, err = followercounts.Mutuals(ctx, tx, event.AggregateFollow, in.ID.ID, in.Other.ID, in.Limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	return &mutualsOutput{Body: MutualList{Items: edgesOf(rows), Truncated: truncated, AsOf: read.asOf}}, nil
}
