package store

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// ErrTargetUnknown reports an edge to a child that the tenant does not have. It is an ErrNotFound.
var ErrTargetUnknown = fmt.Errorf("%w: the child that the edge leads to", ErrNotFound)

// TargetGoneError reports an edge to a child that takes no edges, because its author or a moderator
// withdrew it, or it is erased.
type TargetGoneError struct {
	Kind  string // of the child
	ID    event.ID
	State string // event.StateDeleted, StateErased, StateHidden or StateRemoved
}

func (e *TargetGoneError) Error() string {
	return fmt.Sprintf("store: the %s %s that the edge leads to is %s", e.Kind, e.ID, e.State)
}

// lockTargetsSQL locks children, shelved or not, against an erasure and a move, and reads their
// states. It waits for the shelf's rows first, as an erasure does. Plan: as heldSQL. Index:
// children_archive_KIND_pkey, children_KIND_pkey. Locks: the children, those on the shelf first,
// each in key order.
const lockTargetsSQL = `
WITH wanted AS (
  SELECT * FROM unnest((SELECT @tenants::bigint[]), @child_ids::text[]::uuid[]) AS w(tenant_id, child_id)
), shelved AS MATERIALIZED (
  SELECT c.tenant_id, c.child_id, c.author_state, c.moderation_state FROM {{.Shelf}} c
  JOIN wanted w ON c.tenant_id = ANY (ARRAY[w.tenant_id]) AND c.child_id = w.child_id
   ORDER BY w.tenant_id, w.child_id
     FOR KEY SHARE OF c
), present AS MATERIALIZED (
  SELECT c.tenant_id, c.child_id, c.author_state, c.moderation_state FROM {{.Table}} c
  JOIN wanted w ON c.tenant_id = ANY (ARRAY[w.tenant_id]) AND c.child_id = w.child_id
   ORDER BY w.tenant_id, w.child_id
     FOR KEY SHARE OF c
)
SELECT /* store.lock_targets */ tenant_id, child_id::text, author_state, moderation_state FROM shelved
 UNION ALL
SELECT tenant_id, child_id::text, author_state, moderation_state FROM present`

// lockTargets locks the children that the edges of a turn lead to, as a foreign key would, and
// returns the items whose child takes edges. The others get the error of their outcome.
func lockTargets(ctx context.Context, tx pgx.Tx, writes []EdgeWrite, turn []int, out []EdgeOutcome) ([]int, error) {
	s := childShape{Kind: writes[turn[0]].kind.To}
	states := make(map[childKey]string, len(turn)) // "" for a child that takes edges
	missing := column(turn, func(i int) childKey { return writes[i].target() })
	slices.SortFunc(missing, func(a, b childKey) int { return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.id, b.id)) })
	missing = slices.Compact(missing)
	for len(missing) > 0 {
		tenants, ids := make([]int64, len(missing)), make([]string, len(missing))
		for n, k := range missing {
			tenants[n], ids[n] = k.tenant, k.id
		}
		var k childKey
		var author, moderation string
		rows, _ := tx.Query(ctx, s.sql(lockTargetsSQL), postgres.Args{"tenants": tenants, "child_ids": ids})
		if _, err := pgx.ForEachRow(rows, []any{&k.tenant, &k.id, &author, &moderation}, func() error {
			states[k] = ""
			if !event.BodyTravels(author, moderation) {
				states[k] = event.State(author, moderation)
			}
			return nil
		}); err != nil {
			return nil, fmt.Errorf("lock %d children: %w", len(missing), err)
		}
		var moved []childKey // to the other table, while the statement waited for them
		for _, k := range missing {
			if _, locked := states[k]; locked {
				continue
			}
			there, err := s.get(ctx, tx, k.tenant, []string{k.id})
			if err != nil {
				return nil, err
			}
			if len(there) > 0 {
				moved = append(moved, k)
			}
		}
		missing = moved
	}
	left := make([]int, 0, len(turn))
	for _, i := range turn {
		state, exists := states[writes[i].target()]
		switch {
		case !exists:
			out[i].Err = ErrTargetUnknown
		case state != "":
			out[i].Err = &TargetGoneError{Kind: s.Kind, ID: writes[i].To, State: state}
		default:
			left = append(left, i)
		}
	}
	return left, nil
}

// childKey names a child of a kind.
type childKey struct {
	tenant int64
	id     string
}

// target returns the child that an edge to a child leads to.
func (w EdgeWrite) target() childKey { return childKey{w.tenant, string(w.To)} }
