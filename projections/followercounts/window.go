package followercounts

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// windowCountsSQL counts the edges of accounts that say they have few: one statement sees edges and counts of one moment.
// Index: follower_counts_pkey; follow_edges_forward_idx, follow_edges_reverse_idx, at most as many edges as are counted.   Locks: none.
const windowCountsSQL = `
SELECT /* followercounts.window_counts */ c.tenant_id, c.user_id, c.followers, c.following,
       (SELECT count(*) FROM follow_edges e WHERE e.tenant_id = c.tenant_id AND e.followee_id = c.user_id AND e.active),
       (SELECT count(*) FROM follow_edges e WHERE e.tenant_id = c.tenant_id AND e.follower_id = c.user_id AND e.active)
  FROM (SELECT DISTINCT * FROM unnest(@tenants::bigint[], @users::bigint[]) AS u(tenant_id, user_id)) a
  JOIN follower_counts c USING (tenant_id, user_id)
 WHERE c.followers + c.following < @few`

// fewEdges is up to how many edges of an account a window counts.
const fewEdges = 2000

// Window compares limit pairs of the truth from after on with the projection's, and the counts of their accounts with their edges. It
// reports differences, which may be events on their way, and returns how many pairs it compared and where to go on: nil after the last one.
// Cost: two ranges, and at most fewEdges edges per account.
func (Projection) Window(ctx context.Context, truth, projection *pgxpool.Pool, after any, limit int, report func(projections.Difference)) (checked int64, next any, err error) {
	var from *store.State[event.Follow]
	var behind edgeRow
	if last, ok := after.(*edgeRow); ok {
		from, behind = &store.State[event.Follow]{TenantID: last.TenantID, Object: event.Follow{FollowerID: event.ID(last.FollowerID), FolloweeID: event.ID(last.FolloweeID)}}, *last
	}
	var tenants, users []int64
	last, err := projections.Window(projections.Of(store.ScanFollows(ctx, truth, from, limit), wanted), edges(ctx, projection, behind, &limit), limit, (*edgeRow).compare,
		func(want, got *edgeRow) {
			checked++
			compareEdge(want, got, report)
			if got != nil {
				tenants, users = append(tenants, got.TenantID, got.TenantID), append(users, got.FollowerID, got.FolloweeID)
			}
		})
	if err != nil {
		return checked, nil, fmt.Errorf("compare a window of follow edges: %w", err)
	}
	rows, _ := projection.Query(ctx, windowCountsSQL, pgx.StrictNamedArgs{"tenants": tenants, "users": users, "few": fewEdges})
	var got, want store.Counts
	if _, err := pgx.ForEachRow(rows, []any{&got.TenantID, &got.UserID, &got.Followers, &got.Following, &want.Followers, &want.Following}, func() error {
		want.TenantID, want.UserID = got.TenantID, got.UserID
		compareCounts(&want, &got, report)
		return nil
	}); err != nil {
		return checked, nil, fmt.Errorf("compare the counts of a window: %w", err)
	}
	if last != nil {
		next = last
	}
	return checked, next, nil
}
