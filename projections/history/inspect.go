package history

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// The statements read the version up to which a history was purged. Index:
// KIND_history_purged_pkey. Locks: none.
const (
	purgedChildSQL = `SELECT /* history.purged */ version FROM {kind}_history_purged WHERE tenant_id = @tenant::bigint
		AND {id} = @child::uuid`
	purgedEdgeSQL = `SELECT /* history.purged */ version FROM {kind}_history_purged WHERE tenant_id = @tenant::bigint
		AND {from} = @from::text AND {to} = @to::text`
)

// InspectChild compares the version of a child in the truth with the last version of its history.
// It returns an empty Diff if neither side has the child, or if only a deleted history has it. Both
// pools act as the system role.
func InspectChild(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Child, tenant int64,
	id string) (projections.Diff, error) {
	states, err := store.GetChildren(ctx, truth, tenant, k, []event.Ref{{Type: k.Name, Child: id}})
	if err != nil {
		return projections.Diff{}, err
	}
	return inspect(ctx, projection, Children(k), states, childHead, headRow{TenantID: tenant, Child: id}, versioned.Key{id},
		ofChildren(k, purgedChildSQL), pgx.StrictNamedArgs{"tenant": tenant, "child": id})
}

// InspectEdge is like InspectChild for an edge.
func InspectEdge(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Edge, tenant int64, from,
	to event.ID) (projections.Diff, error) {
	states, err := store.GetEdges(ctx, truth, tenant, k, []event.Ref{{Type: k.Name, From: from, To: to}})
	if err != nil {
		return projections.Diff{}, err
	}
	return inspect(ctx, projection, Edges(k), states, edgeHead, headRow{TenantID: tenant, From: from, To: to}, versioned.Key{from, to},
		ofEdges(k, purgedEdgeSQL), pgx.StrictNamedArgs{"tenant": tenant, "from": from, "to": to})
}

// inspect compares the state of an entity, if there is one, with the last version of its history.
// of has the entity's key.
func inspect[T any](ctx context.Context, projection *pgxpool.Pool, t *Table[T], states []store.State[T],
	head func(*store.State[T]) *headRow, of headRow, key versioned.Key, purgedSQL string,
	args pgx.StrictNamedArgs) (projections.Diff, error) {
	var want *headRow
	for i := range states {
		want = head(&states[i])
	}
	got, err := lastOf(ctx, projection, t, of, key, purgedSQL, args)
	if err != nil || want == nil && (got == nil || got.Deleted) {
		return projections.Diff{}, err
	}
	return diffHead(t.kind, want, got), nil
}

// lastOf returns the last version of an entity's history, also of a purged one, or nil if there was
// no history.
func lastOf[T any](ctx context.Context, projection *pgxpool.Pool, t *Table[T], of headRow, key versioned.Key, purgedSQL string,
	args pgx.StrictNamedArgs) (h *headRow, err error) {
	err = postgres.InTx(ctx, projection, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		last, err := t.raw.Recent(ctx, tx, of.TenantID, key, math.MaxInt64, 1)
		if err != nil {
			return err
		}
		h = &of
		if len(last) > 0 {
			h.Version, h.Deleted = last[0].Position, last[0].Metadata.VersionState == versioned.Deleted
			return nil
		}
		h.Deleted = true
		err = tx.QueryRow(ctx, purgedSQL, args).Scan(&h.Version)
		if errors.Is(err, pgx.ErrNoRows) {
			h, err = nil, nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("inspect the history of %s %v of tenant %d: %w", t.kind, key, of.TenantID, err)
	}
	return h, nil
}
