package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/projections/followercounts"
)

// Edge is one line of a list of edges.
type Edge struct {
	UserID       event.ID   `json:"user_id"`
	PositionedAt event.Time `json:"positioned_at" format:"date-time" doc:"When the edge last became active; the list is ordered by it, newest first."`

	attributes json.RawMessage // only of a kind with attributes
}

// EdgeList is one page.
type EdgeList struct {
	Items []Edge     `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last page."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"The list includes every write that had committed by this time, except parked and scheduled events."`
}

// UserPath names a user.
type UserPath struct {
	ID id `path:"user_id" doc:"The user."`
}

// edgeCursor is the content of a cursor of followers and following.
type edgeCursor struct {
	At   event.Time `json:"t"`
	User event.ID   `json:"u"`
}

// readList reads a page of a list, from memory if it is kept.
func (e *edgeRoutes) readList(ctx context.Context, d direction, of event.ID, in Page, filter string) (EdgeList, error) {
	tenant := callerOf(ctx).TenantID
	l := list{tenant: tenant, name: d.of + " " + d.list, of: of}
	if filter != "" {
		name, _ := e.k.Filter()
		l.name += " " + name + "=" + filter
	}
	var after *followercounts.EdgeCursor
	if in.Cursor != "" {
		var c edgeCursor
		if err := e.cursors.decode(l, in.Cursor, &c); err != nil {
			return EdgeList{}, err
		}
		after = &followercounts.EdgeCursor{PositionedAt: c.At.Time, ID: c.User}
	}
	key := pageKey{tenant, e.k.Name, d.name, of}
	keep := after == nil && filter == "" && len(e.mustSee(ctx, followercounts.Name)) == 0
	if keep {
		if page, ok := e.pages.get(key, e.k.Names(), in.Limit); ok {
			return page, nil
		}
	}
	start := time.Now()
	var rows []followercounts.Edge
	read, err := e.readProjection(ctx, tenant, followercounts.Name, func(tx pgx.Tx) (err error) {
		if d.name == listReverse {
			rows, err = followercounts.Incoming(ctx, tx, e.k, of, filter, after, in.Limit+1)
		} else {
			rows, err = followercounts.Outgoing(ctx, tx, e.k, of, after, in.Limit+1)
		}
		return err
	})
	if err != nil {
		return EdgeList{}, err
	}
	rows, next, err := newPage(e.server, l, in.Limit, rows, func(e followercounts.Edge) any {
		return edgeCursor{At: event.Time{Time: e.PositionedAt}, User: e.ID}
	})
	if err != nil {
		return EdgeList{}, err
	}
	page := EdgeList{Items: edgesOf(rows), Next: next, AsOf: read.asOf}
	if keep {
		e.pages.put(key, in.Limit, page, read.offsets, start)
	}
	return page, nil
}

func edgesOf(rows []followercounts.Edge) []Edge {
	items := make([]Edge, len(rows))
	for i, e := range rows {
		items[i] = Edge{UserID: e.ID, PositionedAt: event.Time{Time: e.PositionedAt}, attributes: e.Attributes}
	}
	return items
}

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
