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

// dropEdgesSQL drops some pairs, to be written anew.
// Index: follow_edges_pkey.   Locks: the rows; nobody else writes them while the offsets are held.
const dropEdgesSQL = `
DELETE /* followercounts.drop_edges */ FROM follow_edges e
 USING unnest(@tenants::bigint[], @followers::bigint[], @followees::bigint[]) AS k(tenant_id, follower_id, followee_id)
 WHERE e.tenant_id = k.tenant_id AND e.follower_id = k.follower_id AND e.followee_id = k.followee_id`

// recountSQL makes accounts' counts what their edges say.
// Index: follow_edges_forward_idx, follow_edges_reverse_idx: all edges of the accounts.   Locks: the accounts' rows, in key order.
const recountSQL = `
INSERT /* followercounts.recount */ INTO follower_counts AS c (tenant_id, user_id, followers, following)
SELECT a.tenant_id, a.user_id,
       (SELECT count(*) FROM follow_edges e WHERE e.tenant_id = a.tenant_id AND e.followee_id = a.user_id AND e.active),
       (SELECT count(*) FROM follow_edges e WHERE e.tenant_id = a.tenant_id AND e.follower_id = a.user_id AND e.active)
  FROM (SELECT DISTINCT * FROM unnest(@tenants::bigint[], @users::bigint[]) AS u(tenant_id, user_id)) a
 ORDER BY a.tenant_id, a.user_id
    ON CONFLICT (tenant_id, user_id) DO UPDATE SET followers = excluded.followers, following = excluded.following, updated_at = now()
 WHERE (c.followers, c.following) IS DISTINCT FROM (excluded.followers, excluded.following)`

// Mend makes the pairs of the keys what the truth says, and the counts of all accounts concerned what their edges say then. The
// caller holds the consumer's offsets in tx: an event that is on its way finds that its version is there.
func (p Projection) Mend(ctx context.Context, tx pgx.Tx, truth *pgxpool.Pool, keys []projections.Key, parked projections.Parked) error {
	var tenants, followers, followees, owners, users []int64
	refs := make(map[int64][]event.Ref) // by tenant
	for _, k := range keys {
		owners, users = append(owners, k.TenantID), append(users, k.Aggregate)
		if k.Other != 0 && !parked(k.TenantID, event.AggregateFollow, k.Aggregate) {
			tenants, followers, followees = append(tenants, k.TenantID), append(followers, k.Other), append(followees, k.Aggregate)
			owners, users = append(owners, k.TenantID), append(users, k.Other)
			refs[k.TenantID] = append(refs[k.TenantID], event.Ref{Type: event.AggregateFollow, Follower: event.ID(k.Other), Followee: event.ID(k.Aggregate)})
		}
	}
	pairs := pgx.StrictNamedArgs{"tenants": tenants, "followers": followers, "followees": followees}
	if _, err := tx.Exec(ctx, dropEdgesSQL, pairs); err != nil {
		return fmt.Errorf("drop %d follow edges: %w", len(tenants), err)
	}
	var events []event.Event
	for tenant, some := range refs {
		states, err := store.GetEvents(ctx, truth, tenant, some)
		if err != nil {
			return err
		}
		events = append(events, states...)
	}
	if err := p.Apply(ctx, tx, events); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, recountSQL, pgx.StrictNamedArgs{"tenants": owners, "users": users}); err != nil {
		return fmt.Errorf("count the edges of %d accounts: %w", len(users), err)
	}
	return nil
}
