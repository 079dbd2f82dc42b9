package followercounts

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// Name is the projection's name, and its consumer's.
const Name = "followercounts"

// Projection applies follow events. It has no state of its own.
type Projection struct {
	splitAt int64 // followers from which an account's are in two shards
}

// New returns the projection.
func New() Projection { return Projection{splitAt: splitAt} }

// Name returns the projection's name.
func (Projection) Name() string { return Name }

// Wants reports whether the projection applies events of the aggregate type.
func (Projection) Wants(aggregateType string) bool { return aggregateType == event.AggregateFollow }

type pair struct{ tenant, follower, followee int64 }

type account struct{ tenant, user int64 }

// Apply brings edges and counts up to the events, in the caller's transaction. A pair counts as it was before the batch and as
// it is after it; what happened between is nobody's to see. A payload that does not decode is a permanent error.
// Cost: one statement however many events, or three if a follow was removed.
func (p Projection) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	last := make(map[pair]event.Follow, len(events))
	for i := range events {
		e := &events[i]
		var f event.Follow
		if err := e.DecodePayload(&f); err != nil {
			return err
		}
		if err := check(f, e.AggregateID); err != nil {
			return event.Permanent(fmt.Errorf("event %s: %w", e.ID, err))
		}
		k := pair{e.TenantID, int64(f.FollowerID), int64(f.FolloweeID)}
		if f.Version > last[k].Version {
			last[k] = f
		}
	}
	e := newBatch(last)
	if e.losses {
		deltas, err := e.write(ctx, tx)
		if err != nil {
			return err
		}
		return p.addCounts(ctx, tx, deltas)
	}
	if _, err := tx.Exec(ctx, gainSQL, p.splitArgs(e.args())); err != nil {
		return fmt.Errorf("write %d follow edges and their counts: %w", len(e.pairs), err)
	}
	return nil
}

// check refuses what is no follow of followee, which is what the event is partitioned by.
func check(f event.Follow, followee int64) error {
	if int64(f.FolloweeID) != followee || f.FollowerID <= 0 || f.FollowerID == f.FolloweeID || f.Version <= 0 {
		return fmt.Errorf("follow %d/%d (of %d) has version %d", f.FollowerID, f.FolloweeID, followee, f.Version)
	}
	if f.Status != event.StatusActive && f.Status != event.StatusRemoved {
		return fmt.Errorf("follow %d/%d has status %.80q", f.FollowerID, f.FolloweeID, f.Status)
	}
	return nil
}

// writtenSQL writes the pairs that are newer than ours; before has their state before. One transaction at a time
// works on a pair (all its events are in one partition, whose offset the caller has locked), so the statement's snapshot is
// what the pair was before the batch.
// A pair that is new goes to a shard of its followee (shards.go), any other stays in its own.
const writtenSQL = `
WITH incoming AS MATERIALIZED (
  SELECT i.*, i.hash & (coalesce(s.shards, 1) - 1) AS shard_id
    FROM unnest(@tenants::bigint[], @followers::bigint[], @followees::bigint[], @actives::boolean[], @versions::bigint[], @positions::timestamptz[], @hashes::int[])
         WITH ORDINALITY AS i(tenant_id, follower_id, followee_id, active, version, positioned_at, hash, ord)
    LEFT JOIN follower_shards s ON s.tenant_id = i.tenant_id AND s.user_id = i.followee_id
), before AS MATERIALIZED (
  SELECT i.ord, e.active FROM incoming i JOIN follow_edges e USING (tenant_id, follower_id, followee_id)
), written AS (
  INSERT /* followercounts.edges */ INTO follow_edges AS e (tenant_id, follower_id, followee_id, active, version, positioned_at, shard_id)
  SELECT tenant_id, follower_id, followee_id, active, version, positioned_at, shard_id FROM incoming ORDER BY ord
      ON CONFLICT (tenant_id, follower_id, followee_id) DO UPDATE
         SET active = excluded.active, version = excluded.version, positioned_at = excluded.positioned_at
       WHERE excluded.version > e.version
  RETURNING e.tenant_id, e.follower_id, e.followee_id
), changed AS (
  SELECT i.ord, w.*, coalesce(b.active, false) AS was_active
    FROM written w JOIN incoming i USING (tenant_id, follower_id, followee_id) LEFT JOIN before b USING (ord)
)`

// edgesSQL writes pairs and returns with their state before which of them it has written.
// Index: follow_edges_pkey, follower_shards_pkey.   Locks: the pairs' rows, in key order.
const edgesSQL = writtenSQL + `
SELECT ord::int, was_active FROM changed`

// gainSQL is the usual case, in which no pair ends and so nobody loses anything: it writes the pairs, and makes or moves the accounts.
// Index: follow_edges_pkey, follower_counts_pkey, follower_shards_pkey.
// Locks: the pairs' rows, in key order, then the accounts' rows, in key order; the shards of its own accounts.
const gainSQL = writtenSQL + `, counted AS (
INSERT /* followercounts.gain */ INTO follower_counts AS c (tenant_id, user_id, followers, following)
SELECT tenant_id, user_id, sum(followers), sum(following)
  FROM (SELECT tenant_id, followee_id, 1, 0 FROM changed WHERE NOT was_active
         UNION ALL
        SELECT tenant_id, follower_id, 0, 1 FROM changed WHERE NOT was_active) AS d(tenant_id, user_id, followers, following)
 GROUP BY tenant_id, user_id ORDER BY tenant_id, user_id
    ON CONFLICT (tenant_id, user_id) DO UPDATE
       SET followers = c.followers + excluded.followers, following = c.following + excluded.following, updated_at = now()
RETURNING c.tenant_id, c.user_id, c.followers
)` + splitSQL

// batch is pairs to write, in key order.
type batch struct {
	pairs   []pair
	actives []bool
	last    map[pair]event.Follow
	losses  bool // a pair may end
}

func newBatch(last map[pair]event.Follow) batch {
	e := batch{pairs: make([]pair, 0, len(last)), actives: make([]bool, len(last)), last: last}
	for k := range last {
		e.pairs = append(e.pairs, k)
	}
	slices.SortFunc(e.pairs, func(a, b pair) int {
		return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.follower, b.follower), cmp.Compare(a.followee, b.followee))
	})
	for i, k := range e.pairs {
		f := last[k]
		e.actives[i] = f.Active()
		e.losses = e.losses || !e.actives[i]
	}
	return e
}

func (e batch) args() postgres.Args {
	n := len(e.pairs)
	tenants, followers, followees := make([]int64, n), make([]int64, n), make([]int64, n)
	versions, positions, hashes := make([]int64, n), make([]time.Time, n), make([]int32, n)
	for i, k := range e.pairs {
		f := e.last[k]
		tenants[i], followers[i], followees[i] = k.tenant, k.follower, k.followee
		versions[i], positions[i], hashes[i] = f.Version, f.PositionedAt.Time, shardHash(k.follower)
	}
	return postgres.Args{"tenants": tenants, "followers": followers, "followees": followees, "actives": e.actives, "versions": versions,
		"positions": positions, "hashes": hashes}
}

// write writes the pairs and returns by how much each account's counts move.
func (e batch) write(ctx context.Context, tx pgx.Tx) (map[account]Counts, error) {
	rows, _ := tx.Query(ctx, edgesSQL, e.args())
	deltas := make(map[account]Counts, len(e.pairs))
	move := func(a account, followers, following int64) {
		c := deltas[a]
		deltas[a] = Counts{c.Followers + followers, c.Following + following}
	}
	var ord int
	var before bool
	if _, err := pgx.ForEachRow(rows, []any{&ord, &before}, func() error {
		k, after := e.pairs[ord-1], e.actives[ord-1]
		if after == before {
			return nil
		}
		d := int64(1)
		if before {
			d = -1
		}
		move(account{k.tenant, k.followee}, d, 0)
		move(account{k.tenant, k.follower}, 0, d)
		return nil
	}); err != nil {
		return nil, fmt.Errorf("write %d follow edges: %w", len(e.pairs), err)
	}
	return deltas, nil
}

// holdCountsSQL makes the accounts that are new, with their counts, and locks the others, all in key order; it returns the new
// ones. WHERE false locks a row without writing it. An account that loses something had it, so its row is there: a new one
// never needs less than 0, and the CHECK on the proposed row, which comes before the conflict is noticed, is satisfied by 0.
// Index: follower_counts_pkey.   Locks: the accounts' rows, in key order.
const holdCountsSQL = `
INSERT /* followercounts.hold */ INTO follower_counts AS c (tenant_id, user_id, followers, following)
SELECT tenant_id, user_id, greatest(followers, 0), greatest(following, 0)
  FROM unnest(@tenants::bigint[], @users::bigint[], @followers::bigint[], @following::bigint[]) AS d(tenant_id, user_id, followers, following)
 ORDER BY tenant_id, user_id
    ON CONFLICT (tenant_id, user_id) DO UPDATE SET updated_at = c.updated_at WHERE false
RETURNING tenant_id, user_id`

// addCountsSQL moves the counts of accounts that this transaction has locked.
// Index: follower_counts_pkey, follower_shards_pkey.   Locks: none that it does not hold; the shards of its own accounts.
const addCountsSQL = `
WITH counted AS (
UPDATE /* followercounts.add */ follower_counts c
   SET followers = c.followers + d.followers, following = c.following + d.following, updated_at = now()
  FROM unnest(@tenants::bigint[], @users::bigint[], @followers::bigint[], @following::bigint[]) AS d(tenant_id, user_id, followers, following)
 WHERE c.tenant_id = d.tenant_id AND c.user_id = d.user_id
RETURNING c.tenant_id, c.user_id, c.followers
), split AS (` + splitSQL + `)
SELECT count(*) FROM counted`

// addCounts moves the counts of a batch in which pairs may have ended. Its statements lock in key order, and the first locks everything.
func (p Projection) addCounts(ctx context.Context, tx pgx.Tx, deltas map[account]Counts) error {
	maps.DeleteFunc(deltas, func(_ account, d Counts) bool { return d == (Counts{}) })
	if len(deltas) == 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, holdCountsSQL, countArgs(deltas))
	var a account
	if _, err := pgx.ForEachRow(rows, []any{&a.tenant, &a.user}, func() error {
		delete(deltas, a)
		return nil
	}); err != nil {
		return fmt.Errorf("hold the counts of %d accounts: %w", len(deltas), err)
	}
	if len(deltas) == 0 {
		return nil
	}
	counted, _ := tx.Query(ctx, addCountsSQL, p.splitArgs(countArgs(deltas)))
	got, err := pgx.CollectExactlyOneRow(counted, pgx.RowTo[int])
	if err != nil {
		return fmt.Errorf("add to the counts of %d accounts: %w", len(deltas), err)
	}
	if got != len(deltas) {
		return fmt.Errorf("add to the counts of %d accounts: %d rows", len(deltas), got)
	}
	return nil
}

func countArgs(deltas map[account]Counts) postgres.Args {
	var tenants, users, followers, following []int64
	for a, d := range deltas {
		tenants, users = append(tenants, a.tenant), append(users, a.user)
		followers, following = append(followers, d.Followers), append(following, d.Following)
	}
	return postgres.Args{"tenants": tenants, "users": users, "followers": followers, "following": following}
}
