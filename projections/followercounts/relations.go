package followercounts

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Pair names a follow.
type Pair struct{ Follower, Followee int64 }

// Relation is how two accounts stand to each other.
type Relation struct {
	Following    bool      // the pair's follower follows its followee
	FollowedBy   bool      // and the other way round
	PositionedAt time.Time // when Following last became true; zero unless it is
}

// relationsSQL looks both ways for each pair. LIMIT keeps the planner from any other plan than one probe for each.
// Index: follow_edges_pkey, two probes for each pair.   Locks: none.
const relationsSQL = `
SELECT /* followercounts.relations */ p.ord::int, there.positioned_at, back.active IS NOT NULL
  FROM unnest(@followers::bigint[], @followees::bigint[]) WITH ORDINALITY AS p(follower_id, followee_id, ord)
  LEFT JOIN LATERAL (SELECT positioned_at FROM follow_edges e
    WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.follower_id = p.follower_id AND e.followee_id = p.followee_id AND e.active LIMIT 1) there ON true
  LEFT JOIN LATERAL (SELECT active FROM follow_edges e
    WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.follower_id = p.followee_id AND e.followee_id = p.follower_id AND e.active LIMIT 1) back ON true`

// Relations returns how the accounts of each pair stand to each other, in the order of pairs; those that nobody knows stand in
// no relation. The transaction's tenant is set. Cost: one statement of two index probes for each pair.
func Relations(ctx context.Context, tx pgx.Tx, pairs []Pair) ([]Relation, error) {
	followers, followees := make([]int64, len(pairs)), make([]int64, len(pairs))
	for i, p := range pairs {
		followers[i], followees[i] = p.Follower, p.Followee
	}
	all := make([]Relation, len(pairs))
	rows, _ := tx.Query(ctx, relationsSQL, pgx.StrictNamedArgs{"followers": followers, "followees": followees})
	var ord int
	var since *time.Time
	var back bool
	if _, err := pgx.ForEachRow(rows, []any{&ord, &since, &back}, func() error {
		r := Relation{FollowedBy: back}
		if since != nil {
			r.Following, r.PositionedAt = true, *since
		}
		all[ord-1] = r
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the relations of %d pairs: %w", len(pairs), err)
	}
	return all, nil
}

// MutualsCap is how many edges Mutuals looks at most: of those whom an account follows, or of those who follow another.
const MutualsCap = 5000

// mutualsOfFollowingSQL walks down whom a user follows, newest first, and keeps those who follow the other.
// Index: follow_edges_forward_idx, one range of at most cap rows; follow_edges_pkey, a probe for each.   Locks: none.
const mutualsOfFollowingSQL = `
SELECT /* followercounts.mutuals_of_following */ known.user_id, known.positioned_at
  FROM (SELECT followee_id AS user_id, positioned_at FROM follow_edges
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND follower_id = @user AND active
         ORDER BY positioned_at DESC, followee_id DESC LIMIT @cap) known
 CROSS JOIN LATERAL (SELECT FROM follow_edges e
    WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.follower_id = known.user_id AND e.followee_id = @other AND e.active LIMIT 1) follows
 ORDER BY known.positioned_at DESC, known.user_id DESC
 LIMIT @limit`

// mutualsOfFollowersSQL takes all who follow the other, and keeps those whom the user follows.
// Index: follow_edges_reverse_idx, one range of at most cap rows; follow_edges_pkey, a probe for each.   Locks: none.
const mutualsOfFollowersSQL = `
SELECT /* followercounts.mutuals_of_followers */ followers.user_id, known.positioned_at
  FROM (SELECT follower_id AS user_id FROM follow_edges
         WHERE tenant_id = current_setting('tidings.tenant')::bigint AND followee_id = @other AND active LIMIT @cap) followers
 CROSS JOIN LATERAL (SELECT positioned_at FROM follow_edges e
    WHERE e.tenant_id = current_setting('tidings.tenant')::bigint AND e.follower_id = @user AND e.followee_id = followers.user_id AND e.active LIMIT 1) known
 ORDER BY known.positioned_at DESC, followers.user_id DESC
 LIMIT @limit`

// Mutuals returns up to limit accounts that user follows and that follow other, in the order of user's following list: the one
// that user followed last comes first. truncated says that there are more, or may be: when user follows, and other is followed
// by, more than MutualsCap accounts, only the newest MutualsCap of those whom user follows are looked at, and what is returned
// is where the whole answer begins. The transaction's tenant is set; it reads one snapshot.
// Cost: at most MutualsCap index rows, in one range, and a probe for each.
func Mutuals(ctx context.Context, tx pgx.Tx, user, other int64, limit int) (edges []Edge, truncated bool, err error) {
	counts, err := ReadCounts(ctx, tx, []int64{user, other})
	if err != nil {
		return nil, false, err
	}
	following, followers := counts[user].Following, counts[other].Followers
	sql, capped := mutualsOfFollowingSQL, following > MutualsCap
	if followers < following && followers <= MutualsCap {
		sql, capped = mutualsOfFollowersSQL, false
	}
	rows, _ := tx.Query(ctx, sql, pgx.StrictNamedArgs{"user": user, "other": other, "cap": MutualsCap, "limit": limit + 1})
	edges, err = pgx.CollectRows(rows, pgx.RowToStructByName[Edge])
	if err != nil {
		return nil, false, fmt.Errorf("read whom user %d follows of those who follow %d: %w", user, other, err)
	}
	if len(edges) > limit {
		return edges[:limit], true, nil
	}
	return edges, capped, nil
}
