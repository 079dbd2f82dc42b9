package store

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// FollowWrite is one pair to follow or to unfollow.
type FollowWrite struct {
	Meta
	FollowerID int64
	FolloweeID int64
}

func (w FollowWrite) check() error {
	if err := checkMeta(w.Meta); err != nil {
		return err
	}
	if w.FollowerID <= 0 || w.FolloweeID <= 0 {
		return fmt.Errorf("%w: pair %d, %d", ErrInvalid, w.FollowerID, w.FolloweeID)
	}
	if w.FollowerID == w.FolloweeID {
		return ErrSelfFollow
	}
	return nil
}

// FollowOutcome is what became of one FollowWrite.
type FollowOutcome struct {
	Follow  event.Follow // the pair as it is now; its zero value when Unfollow met a pair that never was
	Changed bool         // whether this write changed it, and so made an event
	Err     error        // ErrSelfFollow or ErrInvalid: nothing was written
}

type pair struct{ follower, followee int64 }

func (w FollowWrite) entity() any { return pair{w.FollowerID, w.FolloweeID} }

type followRow struct {
	FollowerID   int64
	FolloweeID   int64
	Status       string
	Version      int64
	CreatedAt    time.Time
	PositionedAt time.Time
	UpdatedAt    time.Time
}

func (r followRow) wire() event.Follow {
	return event.Follow{
		FollowerID: event.ID(r.FollowerID), FolloweeID: event.ID(r.FolloweeID), Status: r.Status, Version: r.Version,
		CreatedAt: wireTime(r.CreatedAt), PositionedAt: wireTime(r.PositionedAt), UpdatedAt: wireTime(r.UpdatedAt),
	}
}

// followSQL makes pairs ACTIVE that are not, and returns those. positioned_at moves with each such change: it orders pages.
// Times never go back between two versions, although the transaction that waited for the lock began before the other ended.
// Index: follows_pkey.   Locks: the pairs, in key order.
const followSQL = `
INSERT /* store.follow */ INTO follows AS f (tenant_id, follower_id, followee_id)
SELECT @tenant::bigint, w.follower_id, w.followee_id
  FROM unnest(@followers::bigint[], @followees::bigint[]) AS w(follower_id, followee_id)
 ORDER BY w.follower_id, w.followee_id
ON CONFLICT (tenant_id, follower_id, followee_id) DO UPDATE
   SET status = 'ACTIVE', version = f.version + 1,
       positioned_at = GREATEST(now(), f.updated_at), updated_at = GREATEST(now(), f.updated_at)
 WHERE f.status <> 'ACTIVE'
RETURNING f.follower_id, f.followee_id, f.status, f.version, f.created_at, f.positioned_at, f.updated_at`

// Follow makes each pair ACTIVE. Pairs that are already keep their row and make no event.
func (s *Store) Follow(ctx context.Context, tenant int64, writes []FollowWrite) ([]FollowOutcome, error) {
	return s.lanes.follow.do(ctx, tenant, writes)
}

func (s *Store) follow(ctx context.Context, tenant int64, writes []FollowWrite, lockTimeout time.Duration) ([]FollowOutcome, error) {
	return s.writeFollows(ctx, tenant, writes, lockTimeout, event.Created, followSQL)
}

// unfollowSQL makes pairs REMOVED that are ACTIVE, and returns those. The pairs are locked in key order first: an UPDATE alone
// locks in the order of its plan.
// Index: follows_pkey.   Locks: the pairs, in key order.
const unfollowSQL = `
WITH wanted AS (
  SELECT * FROM unnest(@followers::bigint[], @followees::bigint[]) AS w(follower_id, followee_id)
), held AS (
  SELECT f.follower_id, f.followee_id
    FROM follows f JOIN wanted w ON f.tenant_id = @tenant::bigint AND f.follower_id = w.follower_id AND f.followee_id = w.followee_id
   ORDER BY f.follower_id, f.followee_id
     FOR NO KEY UPDATE OF f
)
UPDATE /* store.unfollow */ follows f
   SET status = 'REMOVED', version = f.version + 1, updated_at = GREATEST(now(), f.updated_at)
  FROM held h
 WHERE f.tenant_id = @tenant::bigint AND f.follower_id = h.follower_id AND f.followee_id = h.followee_id AND f.status = 'ACTIVE'
RETURNING f.follower_id, f.followee_id, f.status, f.version, f.created_at, f.positioned_at, f.updated_at`

// Unfollow makes each pair REMOVED. Pairs that are, or that never were, make no event.
func (s *Store) Unfollow(ctx context.Context, tenant int64, writes []FollowWrite) ([]FollowOutcome, error) {
	return s.lanes.unfollow.do(ctx, tenant, writes)
}

func (s *Store) unfollow(ctx context.Context, tenant int64, writes []FollowWrite, lockTimeout time.Duration) ([]FollowOutcome, error) {
	return s.writeFollows(ctx, tenant, writes, lockTimeout, event.Removed, unfollowSQL)
}

func (s *Store) writeFollows(ctx context.Context, tenant int64, writes []FollowWrite, lockTimeout time.Duration, eventType, transitionSQL string) ([]FollowOutcome, error) {
	out := make([]FollowOutcome, len(writes))
	turns := rounds(len(writes), func(i int) (pair, bool) {
		out[i].Err = writes[i].check()
		return pair{writes[i].FollowerID, writes[i].FolloweeID}, out[i].Err == nil
	})
	if len(turns) == 0 {
		return out, nil
	}
	err := s.write(ctx, tenant, lockTimeout, func(tx *unit) error {
		for _, turn := range turns {
			for _, i := range turn {
				out[i] = FollowOutcome{} // a second attempt starts afresh
			}
			if err := transition(ctx, tx, tenant, writes, turn, eventType, transitionSQL, out); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("follow %s, %d pairs of tenant %d: %w", eventType, len(writes), tenant, err)
	}
	return out, nil
}

// transition runs one round: the guarded statement, the events of what it changed, and a read of what it did not.
func transition(ctx context.Context, tx *unit, tenant int64, writes []FollowWrite, turn []int, eventType, transitionSQL string, out []FollowOutcome) error {
	index := make(map[pair]int, len(turn))
	followers, followees := make([]int64, len(turn)), make([]int64, len(turn))
	for n, i := range turn {
		followers[n], followees[n] = writes[i].FollowerID, writes[i].FolloweeID
		index[pair{followers[n], followees[n]}] = i
	}
	args := pgx.StrictNamedArgs{"tenant": tenant, "followers": followers, "followees": followees}
	rows, _ := tx.Query(ctx, transitionSQL, args)
	changed, err := pgx.CollectRows(rows, pgx.RowToStructByPos[followRow])
	if err != nil {
		return fmt.Errorf("write %d rows: %w", len(turn), err)
	}
	slices.SortFunc(changed, func(a, b followRow) int {
		return cmp.Or(cmp.Compare(a.FollowerID, b.FollowerID), cmp.Compare(a.FolloweeID, b.FolloweeID))
	})
	for _, r := range changed {
		i := index[pair{r.FollowerID, r.FolloweeID}]
		out[i].Follow, out[i].Changed = r.wire(), true
		state := out[i].Follow
		state.Actor = writes[i].Actor
		payload, err := json.Marshal(state)
		if err != nil {
			return fmt.Errorf("encode follow %d, %d: %w", r.FollowerID, r.FolloweeID, err)
		}
		tx.events = append(tx.events, event.Event{
			TenantID: tenant, AggregateType: event.AggregateFollow, AggregateID: r.FolloweeID, Type: eventType,
			OccurredAt: r.UpdatedAt, TraceParent: writes[i].TraceParent, Payload: payload,
		})
	}
	if len(changed) == len(turn) {
		return nil
	}
	rows, _ = tx.Query(ctx, getFollowsSQL, args)
	current, err := pgx.CollectRows(rows, pgx.RowToStructByPos[followRow])
	if err != nil {
		return fmt.Errorf("read %d rows: %w", len(turn), err)
	}
	for _, r := range current {
		if i := index[pair{r.FollowerID, r.FolloweeID}]; !out[i].Changed {
			out[i].Follow = r.wire()
		}
	}
	return nil
}

// getFollowsSQL reads pairs.
// Index: follows_pkey.   Locks: none.
const getFollowsSQL = `
SELECT /* store.get_follows */ f.follower_id, f.followee_id, f.status, f.version, f.created_at, f.positioned_at, f.updated_at
  FROM unnest(@followers::bigint[], @followees::bigint[]) AS w(follower_id, followee_id)
  JOIN follows f ON f.tenant_id = @tenant::bigint AND f.follower_id = w.follower_id AND f.followee_id = w.followee_id`

// GetFollow returns the pair, ACTIVE or REMOVED, or ErrNotFound when there never was one. The Actor is not kept in the truth.
func (s *Store) GetFollow(ctx context.Context, tenant, follower, followee int64) (event.Follow, error) {
	var row followRow
	err := s.read(ctx, tenant, func(tx pgx.Tx) error {
		rows, _ := tx.Query(ctx, getFollowsSQL, pgx.StrictNamedArgs{"tenant": tenant, "followers": []int64{follower}, "followees": []int64{followee}})
		var err error
		row, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[followRow])
		return notFound(err)
	})
	if err != nil {
		return event.Follow{}, fmt.Errorf("read follow %d, %d of tenant %d: %w", follower, followee, tenant, err)
	}
	return row.wire(), nil
}
