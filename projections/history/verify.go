package history

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// headRow is an entity's last version, and whether that is its deletion. A and B are its key; B is not used by comments.
type headRow struct {
	TenantID int64
	Comment  string
	A, B     int64
	Version  int64
	Deleted  bool
}

func (r *headRow) kind() string {
	if r.Comment != "" {
		return event.AggregateComment
	}
	return event.AggregateFollow
}

func commentHead(s *store.State[event.Comment]) *headRow {
	return &headRow{TenantID: s.TenantID, Comment: s.Object.CommentID, Version: s.Object.Version, Deleted: s.Object.AuthorState != event.AuthorActive}
}

func followHead(s *store.State[event.Follow]) *headRow {
	return &headRow{TenantID: s.TenantID, A: int64(s.Object.FollowerID), B: int64(s.Object.FolloweeID), Version: s.Object.Version, Deleted: !s.Object.Active()}
}

// commentHeadsSQL reads the heads of the comments' histories; where all of one was purged, what is noted of it.
// Index: comment_history_head_idx, comment_history_purged_pkey, all of them.   Locks: none.
const commentHeadsSQL = `
SELECT /* history.verify */ tenant_id, comment_id::text, 0::bigint, 0::bigint, version, deleted
  FROM (SELECT tenant_id, comment_id, version, version_state = 'DELETED' AS deleted FROM comment_history WHERE version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT tenant_id, comment_id, version, true FROM comment_history_purged p
         WHERE NOT EXISTS (SELECT FROM comment_history h WHERE h.tenant_id = p.tenant_id AND h.comment_id = p.comment_id)) heads
 ORDER BY tenant_id, heads.comment_id`

// followHeadsSQL reads those of the pairs' histories likewise.
// Index: follow_history_head_idx, follow_history_purged_pkey, all of them.   Locks: none.
const followHeadsSQL = `
SELECT /* history.verify */ tenant_id, '', follower_id, followee_id, version, deleted
  FROM (SELECT tenant_id, follower_id, followee_id, version, version_state = 'DELETED' AS deleted FROM follow_history WHERE version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT tenant_id, follower_id, followee_id, version, true FROM follow_history_purged p
         WHERE NOT EXISTS (SELECT FROM follow_history h WHERE h.tenant_id = p.tenant_id AND h.follower_id = p.follower_id AND h.followee_id = p.followee_id)) heads
 ORDER BY tenant_id, follower_id, followee_id`

// Verify compares the head of each history with the truth's row and each version with its predecessor (versioned.Table.Check),
// reports every difference, and returns how many entities it compared. What has not been applied yet is a difference too, so it is run when the consumer's lag is 0. Both pools act
// as the system role. Memory does not grow with the tables.
func (*Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool, report func(projections.Difference)) (checked int64, err error) {
	visit := func(want, got *headRow) {
		checked++
		compareHead(want, got, report)
	}
	key := func(a, b *headRow) int {
		return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.Comment, b.Comment), cmp.Compare(a.A, b.A), cmp.Compare(a.B, b.B))
	}
	if err := projections.Compare(projections.Of(store.ScanComments(ctx, truth, nil, 0), commentHead), projections.Rows[headRow](ctx, projection, commentHeadsSQL, nil), key, visit); err != nil {
		return checked, fmt.Errorf("verify the history of comments: %w", err)
	}
	if err := projections.Compare(projections.Of(store.ScanFollows(ctx, truth, nil, 0), followHead), projections.Rows[headRow](ctx, projection, followHeadsSQL, nil), key, visit); err != nil {
		return checked, fmt.Errorf("verify the history of follows: %w", err)
	}
	return checked, postgres.InTx(ctx, projection, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := Comments().Check(ctx, tx, func(f versioned.Flaw[event.Comment]) {
			report(flaw(f, projections.Key{Type: event.AggregateComment, TenantID: f.TenantID, Comment: f.Object.CommentID}, f.Object.Version))
		}); err != nil {
			return err
		}
		_, err := Follows().Check(ctx, tx, func(f versioned.Flaw[event.Follow]) {
			report(flaw(f, projections.Key{Type: event.AggregateFollow, TenantID: f.TenantID, Aggregate: int64(f.Object.FolloweeID), Other: int64(f.Object.FollowerID)}, f.Object.Version))
		})
		return err
	})
}

func flaw[T any](f versioned.Flaw[T], key projections.Key, version int64) projections.Difference {
	return projections.Difference{Projection: Name, TenantID: f.TenantID, Entity: entity(key.Comment, key.Other, key.Aggregate),
		Field: fmt.Sprintf("version %d, %s", version, f.Rule), Want: f.Want, Got: f.Got, Key: key}
}

func entity(comment string, follower, followee int64) string {
	if comment != "" {
		return "history of comment " + comment
	}
	return fmt.Sprintf("history of follow %d/%d", follower, followee)
}

func compareHead(want, got *headRow, report func(projections.Difference)) {
	if want == nil && got.Deleted {
		return // gone in both
	}
	present := want
	if want == nil {
		present = got
	}
	differ := func(field string, want, got any) {
		if want != got {
			report(projections.Difference{Projection: Name, TenantID: present.TenantID, Entity: entity(present.Comment, present.A, present.B), Field: field, Want: fmt.Sprint(want), Got: fmt.Sprint(got),
				Key: projections.Key{Type: present.kind(), TenantID: present.TenantID, Aggregate: present.B, Other: present.A, Comment: present.Comment}})
		}
	}
	if want == nil || got == nil {
		differ("row", map[bool]string{true: "present", false: "absent"}[want != nil], map[bool]string{true: "present", false: "absent"}[got != nil])
		return
	}
	differ("version", want.Version, got.Version)
	differ("deleted", want.Deleted, got.Deleted)
}
