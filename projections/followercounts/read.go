package followercounts

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// Edge is one line of a followers or following page: the other account, and when the pair last became active.
type Edge struct {
	UserID       int64
	PositionedAt time.Time
}

// EdgeCursor is where a page ended: the next one starts below it. The id breaks ties, so no edge is lost at a page's end.
type EdgeCursor struct {
	PositionedAt time.Time
	UserID       int64
}

// Counts are an account's visible followers and followings. An unknown account has none.
type Counts struct {
	Followers, Following int64
}

// followersSQL is one page of who follows a user, newest first: a page of each shard, merged.
// Index: follow_edges_reverse_idx, one range of limit rows for each shard; follower_shards_pkey.   Locks: none.
const followersSQL = `
SELECT /* followercounts.followers */ page.user_id, page.positioned_at
  FROM generate_series(0, coalesce((SELECT shards FROM follower_shards WHERE tenant_id = current_setting('tidings.tenant')::bigint AND user_id = @user), 1) - 1) AS shard(id)
 CROSS JOIN LATERAL (
   SELECT follower_id AS user_id, positioned_at
     FROM follow_edges
    WHERE tenant_id = current_setting('tidings.tenant')::bigint AND followee_id = @user AND shard_id = shard.id AND active
      AND (positioned_at, follower_id) < (@positioned_at, @after_user)
    ORDER BY positioned_at DESC, follower_id DESC
    LIMIT @limit) page
 ORDER BY page.positioned_at DESC, page.user_id DESC
 LIMIT @limit`

// Followers returns up to limit accounts that follow user, newest first, below after; from the newest when after is nil.
// The transaction's tenant is set. Cost: limit index rows for each of the user's shards, of which almost everybody has one.
func Followers(ctx context.Context, tx pgx.Tx, user int64, after *EdgeCursor, limit int) ([]Edge, error) {
	return page(ctx, tx, followersSQL, "followers", user, after, limit)
}

// followingSQL is one page of whom a user follows, newest first.
// Index: follow_edges_forward_idx, one range.   Locks: none.
const followingSQL = `
SELECT /* followercounts.following */ followee_id AS user_id, positioned_at
  FROM follow_edges
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND follower_id = @user AND active
   AND (positioned_at, followee_id) < (@positioned_at, @after_user)
 ORDER BY positioned_at DESC, followee_id DESC
 LIMIT @limit`

// Following returns up to limit accounts that user follows; the rest is as with Followers.
func Following(ctx context.Context, tx pgx.Tx, user int64, after *EdgeCursor, limit int) ([]Edge, error) {
	return page(ctx, tx, followingSQL, "following", user, after, limit)
}

func page(ctx context.Context, tx pgx.Tx, sql, what string, user int64, after *EdgeCursor, limit int) ([]Edge, error) {
	args := pgx.StrictNamedArgs{"user": user, "limit": limit, "positioned_at": any("infinity"), "after_user": int64(0)}
	if after != nil {
		args["positioned_at"], args["after_user"] = after.PositionedAt, after.UserID
	}
	rows, _ := tx.Query(ctx, sql, args)
	edges, err := pgx.CollectRows(rows, pgx.RowToStructByName[Edge])
	if err != nil {
		return nil, fmt.Errorf("read %d %s of user %d: %w", limit, what, user, err)
	}
	return edges, nil
}

// countsSQL reads the counts of some users.
// Index: follower_counts_pkey.   Locks: none.
const countsSQL = `
SELECT /* followercounts.counts */ user_id, followers, following
  FROM follower_counts
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND user_id = ANY(@users)`

// ReadCounts returns the counts of every one of users; those that nobody follows and who follow nobody have zeros.
// The transaction's tenant is set.
func ReadCounts(ctx context.Context, tx pgx.Tx, users []int64) (map[int64]Counts, error) {
	all := make(map[int64]Counts, len(users))
	for _, u := range users {
		all[u] = Counts{}
	}
	rows, _ := tx.Query(ctx, countsSQL, pgx.StrictNamedArgs{"users": users})
	var user int64
	var c Counts
	if _, err := pgx.ForEachRow(rows, []any{&user, &c.Followers, &c.Following}, func() error {
		all[user] = c
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the counts of %d users: %w", len(users), err)
	}
	return all, nil
}

// reachedSQL looks for pairs whose row here is older than asked for.
// Index: follow_edges_pkey, one probe per pair.   Locks: none.
const reachedSQL = `
SELECT /* followercounts.reached */ NOT EXISTS (
  SELECT FROM unnest(@followers::bigint[], @followees::bigint[], @versions::bigint[]) AS w(follower_id, followee_id, version)
    LEFT JOIN follow_edges e ON e.tenant_id = current_setting('tidings.tenant')::bigint AND e.follower_id = w.follower_id AND e.followee_id = w.followee_id
   WHERE coalesce(e.version, 0) < w.version)`

// Reached reports whether the projection has each of the pairs at the version that the ref names, or a later one. The transaction's
// tenant is set.
func (Projection) Reached(ctx context.Context, tx pgx.Tx, refs []event.Ref) (reached bool, err error) {
	n := len(refs)
	followers, followees, versions := make([]int64, n), make([]int64, n), make([]int64, n)
	for i, r := range refs {
		followers[i], followees[i], versions[i] = int64(r.Follower), int64(r.Followee), r.Version
	}
	err = tx.QueryRow(ctx, reachedSQL, pgx.StrictNamedArgs{"followers": followers, "followees": followees, "versions": versions}).Scan(&reached)
	if err != nil {
		return false, fmt.Errorf("look whether %d pairs are there: %w", n, err)
	}
	return reached, nil
}

// Redact has nothing to do: a pair has no content.
func (Projection) Redact(context.Context, pgx.Tx, int64, []string, bool) (int64, error) {
	return 0, nil
}
