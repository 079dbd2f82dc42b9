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
	var want *headRow
	for i := range states {
		want = childHead(&states[i])
	}
	got, err := lastOf(ctx, projection, Children(k), tenant, versioned.Key{id}, ofChildren(k, purgedChildSQL),
		pgx.StrictNamedArgs{"tenant": tenant, "child": id})
	if err != nil || want == nil && (got == nil || got.Deleted) {
		return projections.Diff{}, err
	}
	if got != nil {
		got.Child = id
	}
	return diffHead(k.Name, want, got), nil
}

// InspectEdge is like InspectChild for an edge.
func InspectEdge(ctx context.Context, truth, projection *pgxpool.Pool, k kinds.Edge, tenant int64, from,
	to event.ID) (projections.Diff, error) {
	states, err := store.GetEdges(ctx, truth, tenant, k, []event.Ref{{Type: k.Name, From: from, To: to}})
	if err != nil {
		return projections.Diff{}, err
	}
	var want *headRow
	for i := range states {
		want = edgeHead(&states[i])
	}
	got, err := lastOf(ctx, projection, Edges(k), tenant, versioned.Key{from, to}, ofEdges(k, purgedEdgeSQL),
		pgx.StrictNamedArgs{"tenant": tenant, "from": from, "to": to})
	if err != nil || want == nil && (got == nil || got.Deleted) {
		return projections.Diff{}, err
	}
	if got != nil {
		got.From, got.To = from, to
	}
	return diffHead(k.Name, want, got), nil
}

// lastOf returns the last version of a history, also of a purged one, or nil if there was no
// history.
func lastOf[T any](ctx context.Context, projection *pgxpool.Pool, t *Table[T], tenant int64, key versioned.Key, purgedSQL string,
	args pgx.StrictNamedArgs) (h *headRow, err error) {
	err = postgres.InTx(ctx, projection, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		last, err := t.raw.Recent(ctx, tx, tenant, key, math.MaxInt64, 1)
		if err != nil {
			return err
		}
		if len(last) > 0 {
			h = &headRow{TenantID: tenant, Version: last[0].Position, Deleted: last[0].Metadata.VersionState == versioned.Deleted}
			return nil
		}
		h = &headRow{TenantID: tenant, Deleted: true}
		err = tx.QueryRow(ctx, purgedSQL, args).Scan(&h.Version)
		if errors.Is(err, pgx.ErrNoRows) {
			h, err = nil, nil
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("inspect the history of %s %v of tenant %d: %w", t.kind, key, tenant, err)
	}
	return h, nil
}
