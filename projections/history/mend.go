package history

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections"
)

// truthCommentsByIDSQL reads some comments of the truth.
// Index: comments_pkey, comments_archive_pkey.   Locks: none.
const truthCommentsByIDSQL = `
SELECT /* history.mend */ tenant_id, comment_id::text, coalesce(parent_id::text, ''), post_id, slug, path, author_id, body, author_state,
       moderation_state, version, created_at, updated_at
  FROM all_comments JOIN unnest(@tenants::bigint[], @ids::uuid[]) AS k(tenant_id, comment_id) USING (tenant_id, comment_id)`

// truthPairsSQL reads some pairs of the truth.
// Index: follows_pkey.   Locks: none.
const truthPairsSQL = `
SELECT /* history.mend */ tenant_id, follower_id, followee_id, status, version, created_at, positioned_at, updated_at
  FROM follows JOIN unnest(@tenants::bigint[], @followers::bigint[], @followees::bigint[]) AS k(tenant_id, follower_id, followee_id)
       USING (tenant_id, follower_id, followee_id)`

func readComments(ctx context.Context, truth *pgxpool.Pool, tenants []int64, ids []string) ([]*commentRow, error) {
	rows, _ := truth.Query(ctx, truthCommentsByIDSQL, pgx.StrictNamedArgs{"tenants": tenants, "ids": ids})
	comments, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[commentRow])
	if err != nil {
		return nil, fmt.Errorf("read %d comments of the truth: %w", len(ids), err)
	}
	return comments, nil
}

func readPairs(ctx context.Context, truth *pgxpool.Pool, tenants, followers, followees []int64) ([]*followRow, error) {
	rows, _ := truth.Query(ctx, truthPairsSQL, pgx.StrictNamedArgs{"tenants": tenants, "followers": followers, "followees": followees})
	follows, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[followRow])
	if err != nil {
		return nil, fmt.Errorf("read %d follows of the truth: %w", len(tenants), err)
	}
	return follows, nil
}

// Mend adds the versions that the truth is at where the histories of the keys lack them, by versioned.Unrecorded. A record is not corrected:
// versions that the truth does not know stay, and stay named by Verify. The caller holds the consumer's offsets in tx.
func (p *Projection) Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key, parked projections.Parked) error {
	var tenants, followers, followees, owners []int64
	var ids []string
	for _, k := range keys {
		if k.Comment != "" {
			owners, ids = append(owners, k.TenantID), append(ids, k.Comment)
		} else {
			tenants, followers, followees = append(tenants, k.TenantID), append(followers, k.Other), append(followees, k.Aggregate)
		}
	}
	comments, err := readComments(ctx, truth, owners, ids)
	if err != nil {
		return err
	}
	follows, err := readPairs(ctx, truth, tenants, followers, followees)
	if err != nil {
		return err
	}
	var events []event.Event
	for _, c := range comments {
		if parked(c.TenantID, event.AggregateComment, c.PostID) {
			continue
		}
		e, err := c.event()
		if err != nil {
			return err
		}
		events = append(events, e)
	}
	for _, f := range follows {
		if parked(f.TenantID, event.AggregateFollow, f.FolloweeID) {
			continue
		}
		e, err := f.event()
		if err != nil {
			return err
		}
		events = append(events, e)
	}
	return p.Apply(ctx, tx, events)
}
