package api

import (
	"context"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/tokens"
)

// Edge is one line of a followers or following list.
type Edge struct {
	UserID       event.ID   `json:"user_id"`
	PositionedAt event.Time `json:"positioned_at" format:"date-time" doc:"When the pair last became active: the list's order, newest first."`
}

// EdgeList is one page.
type EdgeList struct {
	Items []Edge     `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the list."`
}

// Counts are how many visible followers and followings a user has.
type Counts struct {
	Followers int64      `json:"followers"`
	Following int64      `json:"following"`
	AsOf      event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is counted."`
}

// UserPath names a user.
type UserPath struct {
	ID id `path:"id" doc:"The user."`
}

type edgesInput struct {
	UserPath
	Page
}

type edgesOutput struct{ Body EdgeList }

type countsOutput struct{ Body Counts }

func (s *server) userRoutes() {
	const tag = "Users"
	register(s, route{
		method: http.MethodGet, path: "/v1/users/{id}/followers", id: "list-followers", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "List who follows a user, newest first", description: "From a projection. A user that nobody knows has none.",
		codes: []string{codeCursorInvalid},
	}, s.edges(listFollowers, followercounts.Followers))
	register(s, route{
		method: http.MethodGet, path: "/v1/users/{id}/following", id: "list-following", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "List whom a user follows, newest first", description: "From a projection. A user that nobody knows has none.",
		codes: []string{codeCursorInvalid},
	}, s.edges(listFollowing, followercounts.Following))
	register(s, route{
		method: http.MethodGet, path: "/v1/users/{id}/counts", id: "get-counts", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "Count a user's followers and followings", description: "From a projection. A user that nobody knows has 0.",
	}, s.counts)
}

// project reads a projection in one transaction of the tenant, as of one snapshot, and says of when that is.
func (s *server) project(ctx context.Context, tenant int64, consumer string, fn func(tx pgx.Tx) error) (event.Time, error) {
	progress, err := s.readProjection(ctx, tenant, consumer, fn)
	return event.Time{Time: progress.AsOf}, err
}

// edgeCursor is what a cursor of followers and following carries.
type edgeCursor struct {
	At   event.Time `json:"t"`
	User event.ID   `json:"u"`
}

type readEdges func(ctx context.Context, tx pgx.Tx, user int64, after *followercounts.EdgeCursor, limit int) ([]followercounts.Edge, error)

func (s *server) edges(name string, read readEdges) func(context.Context, *edgesInput) (*edgesOutput, error) {
	return func(ctx context.Context, in *edgesInput) (*edgesOutput, error) {
		tenant := callerOf(ctx).TenantID
		l := list{tenant: tenant, name: name, of: in.ID.int64()}
		var after *followercounts.EdgeCursor
		if in.Cursor != "" {
			var c edgeCursor
			if err := s.cursors.decode(l, in.Cursor, &c); err != nil {
				return nil, err
			}
			after = &followercounts.EdgeCursor{PositionedAt: c.At.Time, UserID: int64(c.User)}
		}
		key := pageKey{tenant, name, in.ID.int64()}
		keep := after == nil && len(s.mustSee(ctx, followercounts.Name)) == 0
		if keep {
			if page, ok := s.pages.get(key, in.Limit); ok {
				return &edgesOutput{Body: page}, nil
			}
		}
		start := time.Now()
		var rows []followercounts.Edge
		progress, err := s.readProjection(ctx, tenant, followercounts.Name, func(tx pgx.Tx) error {
			var err error
			rows, err = read(ctx, tx, in.ID.int64(), after, in.Limit+1)
			return err
		})
		if err != nil {
			return nil, err
		}
		rows, next, err := newPage(s, l, in.Limit, rows, func(e followercounts.Edge) any {
			return edgeCursor{At: event.Time{Time: e.PositionedAt}, User: event.ID(e.UserID)}
		})
		if err != nil {
			return nil, err
		}
		page := EdgeList{Items: edgesOf(rows), Next: next, AsOf: event.Time{Time: progress.AsOf}}
		if keep {
			s.pages.put(key, in.Limit, page, progress.Offsets, start)
		}
		return &edgesOutput{Body: page}, nil
	}
}

func edgesOf(rows []followercounts.Edge) []Edge {
	items := make([]Edge, len(rows))
	for i, e := range rows {
		items[i] = Edge{UserID: event.ID(e.UserID), PositionedAt: event.Time{Time: e.PositionedAt}}
	}
	return items
}

func (s *server) counts(ctx context.Context, in *UserPath) (*countsOutput, error) {
	user := in.ID.int64()
	var c followercounts.Counts
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, followercounts.Name, func(tx pgx.Tx) error {
		all, err := followercounts.ReadCounts(ctx, tx, []int64{user})
		c = all[user]
		return err
	})
	if err != nil {
		return nil, err
	}
	return &countsOutput{Body: Counts{Followers: c.Followers, Following: c.Following, AsOf: asOf}}, nil
}
