package api

import (
	"context"
	"net/http"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/tokens"
)

// Follow is how a follow looks.
type Follow struct {
	FollowerID   event.ID   `json:"follower_id"`
	FolloweeID   event.ID   `json:"followee_id"`
	Status       string     `json:"status" enum:"ACTIVE"`
	Version      int64      `json:"version" doc:"Rises by one with each change; also the ETag."`
	CreatedAt    event.Time `json:"created_at" format:"date-time"`
	PositionedAt event.Time `json:"positioned_at" format:"date-time" doc:"When the pair last became active: its place in lists."`
	UpdatedAt    event.Time `json:"updated_at" format:"date-time"`
}

func followOf(f event.Follow) Follow {
	return Follow{
		FollowerID: f.FollowerID, FolloweeID: f.FolloweeID, Status: f.Status, Version: f.Version,
		CreatedAt: f.CreatedAt, PositionedAt: f.PositionedAt, UpdatedAt: f.UpdatedAt,
	}
}

// PairPath names a pair.
type PairPath struct {
	FollowerID id `path:"follower_id"`
	FolloweeID id `path:"followee_id"`
}

type followGetInput struct {
	PairPath
	IfNoneMatch string `header:"If-None-Match" doc:"An ETag: 304 while it is still the one."`
}

type followOutput struct {
	Status int
	ETag   string `header:"ETag"`
	WriteToken
	Body Follow
}

type noContent struct{ WriteToken }

func (in PairPath) write(ctx context.Context) []store.FollowWrite {
	return []store.FollowWrite{{Meta: callerOf(ctx).meta, FollowerID: in.FollowerID.int64(), FolloweeID: in.FolloweeID.int64()}}
}

func (s *server) followRoutes() {
	const path, tag = "/v1/follows/{follower_id}/{followee_id}", "Follows"
	register(s, route{
		method: http.MethodPut, path: path, id: "follow", tag: tag, role: tokens.RoleWrite, status: http.StatusCreated,
		summary:     "Make one user follow another",
		description: "201 when that changed something, 200 when they did already; then there is no event.",
		codes:       []string{codeSelfFollow},
		also:        map[int]string{http.StatusOK: "They did already."},
	}, s.putFollow)
	register(s, route{
		method: http.MethodGet, path: path, id: "get-follow", tag: tag, role: tokens.RoleRead, status: http.StatusOK,
		summary:     "Read a follow",
		description: "From the truth. 404 when the one does not follow the other, whether or not they ever did.",
		codes:       []string{codeNotFound},
		also:        map[int]string{http.StatusNotModified: "If-None-Match names the version."},
	}, s.getFollow)
	register(s, route{
		method: http.MethodDelete, path: path, id: "unfollow", tag: tag, role: tokens.RoleWrite, status: http.StatusNoContent,
		summary:     "Make one user follow another no more",
		description: "204 also when they did not; then there is no event.",
		codes:       []string{codeSelfFollow},
	}, s.deleteFollow)
}

func (s *server) putFollow(ctx context.Context, in *PairPath) (*followOutput, error) {
	if err := s.limitAuthor(ctx, in.FollowerID.int64()); err != nil {
		return nil, err
	}
	out, err := s.store.Follow(ctx, callerOf(ctx).TenantID, in.write(ctx))
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	status := http.StatusOK
	if out[0].Changed {
		status = http.StatusCreated
	}
	token, err := s.tokenOf(ctx, out[0].Follow.Ref())
	if err != nil {
		return nil, err
	}
	return &followOutput{Status: status, ETag: etag(out[0].Follow.Version), WriteToken: token, Body: followOf(out[0].Follow)}, nil
}

func (s *server) getFollow(ctx context.Context, in *followGetInput) (*followOutput, error) {
	f, err := s.store.GetFollow(ctx, callerOf(ctx).TenantID, in.FollowerID.int64(), in.FolloweeID.int64())
	if err != nil {
		return nil, err
	}
	if !f.Active() {
		return nil, store.ErrNotFound
	}
	return &followOutput{Status: okOr304(in.IfNoneMatch, f.Version), ETag: etag(f.Version), Body: followOf(f)}, nil
}

func (s *server) deleteFollow(ctx context.Context, in *PairPath) (*noContent, error) {
	out, err := s.store.Unfollow(ctx, callerOf(ctx).TenantID, in.write(ctx))
	if err != nil {
		return nil, err
	}
	if out[0].Err != nil {
		return nil, out[0].Err
	}
	token, err := s.tokenOf(ctx, out[0].Follow.Ref())
	return &noContent{token}, err
}
