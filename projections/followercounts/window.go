package followercounts

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/projections"
)

// truthEdgesPageSQL reads a page of the truth's pairs.
// Index: follows_pkey, one range.   Locks: none.
const truthEdgesPageSQL = `
SELECT /* followercounts.window */ tenant_id, follower_id, followee_id, status = 'ACTIVE', version, positioned_at, 0, 1
  FROM follows WHERE (tenant_id, follower_id, followee_id) > (@tenant::bigint, @follower::bigint, @followee::bigint)
 ORDER BY tenant_id, follower_id, followee_id LIMIT @limit`

// edgesPageSQL reads a page of the projection's likewise.
// Index: follow_edges_pkey, one range; follower_shards_pkey.   Locks: none.
const edgesPageSQL = `
SELECT /* followercounts.window */ e.tenant_id, follower_id, followee_id, active, version, positioned_at, shard_id, coalesce(s.shards, 1)::int
  FROM follow_edges e LEFT JOIN follower_shards s ON s.tenant_id = e.tenant_id AND s.user_id = e.followee_id
 WHERE (e.tenant_id, follower_id, followee_id) > (@tenant::bigint, @follower::bigint, @followee::bigint)
 ORDER BY e.tenant_id, follower_id, followee_id LIMIT @limit`

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
	from, _ := after.(*edgeRow)
	if from == nil {
		from = &edgeRow{}
	}
	var tenants, users []int64
	last, err := projections.Window(ctx, truth, projection, truthEdgesPageSQL, edgesPageSQL,
		pgx.StrictNamedArgs{"tenant": from.TenantID, "follower": from.FollowerID, "followee": from.FolloweeID}, limit,
		func(a, b *edgeRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.FollowerID, b.FollowerID), cmp.Compare(a.FolloweeID, b.FolloweeID))
		},
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
	var got, want countRow
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
