package followercounts

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

type edgeRow struct {
	TenantID, FollowerID, FolloweeID int64
	Active                           bool
	Version                          int64
	PositionedAt                     time.Time
	ShardID, Shards                  int32 // the edge's, and how many its followee has; the truth knows of none
}

// wanted is the edge that the truth makes.
func wanted(s *store.State[event.Follow]) *edgeRow {
	f := s.Object
	return &edgeRow{s.TenantID, int64(f.FollowerID), int64(f.FolloweeID), f.Active(), f.Version, f.PositionedAt.Time, 0, 1}
}

func (r *edgeRow) compare(o *edgeRow) int {
	return cmp.Or(cmp.Compare(r.TenantID, o.TenantID), cmp.Compare(r.FollowerID, o.FollowerID), cmp.Compare(r.FolloweeID, o.FolloweeID))
}

// edgeRowsSQL reads the projection's pairs behind one of them, of which NULL is no limit.
// Index: follow_edges_pkey, one range; follower_shards, which is small.   Locks: none.
const edgeRowsSQL = `
SELECT /* followercounts.verify */ e.tenant_id, follower_id, followee_id, active, version, positioned_at, shard_id, coalesce(s.shards, 1)::int
  FROM follow_edges e LEFT JOIN follower_shards s ON s.tenant_id = e.tenant_id AND s.user_id = e.followee_id
 WHERE (e.tenant_id, follower_id, followee_id) > (@tenant::bigint, @follower::bigint, @followee::bigint)
 ORDER BY e.tenant_id, follower_id, followee_id LIMIT @limit::bigint`

func edges(ctx context.Context, projection *pgxpool.Pool, after edgeRow, limit *int) iter.Seq2[*edgeRow, error] {
	return projections.Rows[edgeRow](ctx, projection, edgeRowsSQL,
		pgx.StrictNamedArgs{"tenant": after.TenantID, "follower": after.FollowerID, "followee": after.FolloweeID, "limit": limit})
}

// countRowsSQL reads every account of the projection that has anything; no row and zeros are the same to a reader.
// Index: follower_counts_pkey, all of it.   Locks: none.
const countRowsSQL = `
SELECT /* followercounts.verify */ tenant_id, user_id, followers, following
  FROM follower_counts WHERE followers <> 0 OR following <> 0 ORDER BY tenant_id, user_id`

// Verify compares edges and counts with the truth's follows, reports every difference, and returns how many pairs and accounts
// it compared. An edge must be in a shard that its followee has, or no page would show it; in which one is nobody's business: two
// projections that got the same events in other batches may differ in that. Counts are computed from the truth, not from the edges. What has not been applied yet is a difference too, so
// it is run when the consumer's lag is 0. Both pools act as the system role. Memory does not grow with the tables.
func (Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) (checked int64, err error) {
	err = projections.Compare(projections.Of(store.ScanFollows(ctx, truth, nil, 0), wanted), edges(ctx, projection, edgeRow{}, nil), (*edgeRow).compare,
		func(want, got *edgeRow) {
			checked++
			compareEdge(want, got, report)
		})
	if err != nil {
		return checked, fmt.Errorf("verify follow edges: %w", err)
	}
	err = projections.Compare(projections.Rows[store.Counts](ctx, truth, store.CountFollowsSQL, nil), projections.Rows[store.Counts](ctx, projection, countRowsSQL, nil),
		func(a, b *store.Counts) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.UserID, b.UserID))
		},
		func(want, got *store.Counts) {
			checked++
			compareCounts(want, got, report)
		})
	if err != nil {
		return checked, fmt.Errorf("verify follower counts: %w", err)
	}
	return checked, nil
}

func compareEdge(want, got *edgeRow, report func(projections.Difference)) {
	present := want
	if want == nil {
		present = got
	}
	differ := func(field string, want, got any) {
		if want != got {
			report(projections.Difference{
				Projection: Name, TenantID: present.TenantID, Entity: fmt.Sprintf("follow %d/%d", present.FollowerID, present.FolloweeID),
				Field: field, Want: fmt.Sprint(want), Got: fmt.Sprint(got),
				Key: projections.Key{Type: event.AggregateFollow, TenantID: present.TenantID, Aggregate: present.FolloweeID, Other: present.FollowerID},
			})
		}
	}
	if want == nil || got == nil {
		differ("row", presence(want != nil), presence(got != nil))
		return
	}
	differ("version", want.Version, got.Version)
	differ("active", want.Active, got.Active)
	differ("positioned_at", want.PositionedAt.UTC().Format(event.TimeFormat), got.PositionedAt.UTC().Format(event.TimeFormat))
	if got.ShardID < 0 || got.ShardID >= got.Shards {
		differ("shard_id", fmt.Sprintf("0 to %d", got.Shards-1), fmt.Sprint(got.ShardID))
	}
}

func compareCounts(want, got *store.Counts, report func(projections.Difference)) {
	var zero store.Counts
	present := want
	if want == nil {
		want, present = &zero, got
	}
	if got == nil {
		got = &zero
	}
	differ := func(field string, want, got int64) {
		if want != got {
			report(projections.Difference{
				Projection: Name, TenantID: present.TenantID, Entity: fmt.Sprintf("counts of user %d", present.UserID),
				Field: field, Want: fmt.Sprint(want), Got: fmt.Sprint(got), Key: projections.Key{Type: event.AggregateFollow, TenantID: present.TenantID, Aggregate: present.UserID},
			})
		}
	}
	differ("followers", want.Followers, got.Followers)
	differ("following", want.Following, got.Following)
}

func presence(there bool) string {
	if there {
		return "present"
	}
	return "absent"
}
