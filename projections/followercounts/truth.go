package followercounts

import (
	"context"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
)

// Tables are the projection's tables: what is built anew by a replay.
func (Projection) Tables() []string {
	return []string{"follow_edges", "follower_shards", "follower_counts"}
}

type followRow struct {
	TenantID, FollowerID, FolloweeID   int64
	Status                             string
	Version                            int64
	CreatedAt, PositionedAt, UpdatedAt time.Time
}

// truthPageSQL reads a page of the truth's pairs.
// Index: follows_pkey, one range.   Locks: none.
const truthPageSQL = `
SELECT /* followercounts.truth */ tenant_id, follower_id, followee_id, status, version, created_at, positioned_at, updated_at
  FROM follows WHERE (tenant_id, follower_id, followee_id) > (@tenant::bigint, @follower::bigint, @followee::bigint)
 ORDER BY tenant_id, follower_id, followee_id LIMIT @limit`

// Truth yields an event for each pair of the truth, with the state that it is in, in bounded memory. The pool acts as the
// system role.
func (Projection) Truth(ctx context.Context, truth *pgxpool.Pool) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		for row, err := range projections.Pages(ctx, truth, truthPageSQL, func(last *followRow) pgx.StrictNamedArgs {
			if last == nil {
				last = &followRow{}
			}
			return pgx.StrictNamedArgs{"tenant": last.TenantID, "follower": last.FollowerID, "followee": last.FolloweeID}
		}) {
			var e event.Event
			if err == nil {
				e, err = row.event()
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

func (r *followRow) event() (event.Event, error) {
	typ := event.Created
	if r.Status != event.StatusActive {
		typ = event.Removed
	}
	return projections.StateEvent(r.TenantID, event.AggregateFollow, r.FolloweeID, typ, event.Follow{
		FollowerID: event.ID(r.FollowerID), FolloweeID: event.ID(r.FolloweeID), Status: r.Status, Version: r.Version,
		CreatedAt: event.Time{Time: r.CreatedAt}, PositionedAt: event.Time{Time: r.PositionedAt}, UpdatedAt: event.Time{Time: r.UpdatedAt},
	})
}
