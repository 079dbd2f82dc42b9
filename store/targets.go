package store

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
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
// states. It waits for the shelf's rows first, as an erasure does. Index:
// children_archive_KIND_pkey, children_KIND_pkey. Locks: the children, those on the shelf first,
// each in key order.
const lockTargetsSQL = `
WITH shelved AS MATERIALIZED (
  SELECT c.child_id, c.author_state, c.moderation_state FROM {{.Shelf}} c
   WHERE c.tenant_id = @tenant::bigint AND c.child_id = ANY(@child_ids::uuid[])
   ORDER BY c.child_id
     FOR KEY SHARE OF c
), present AS MATERIALIZED (
  SELECT c.child_id, c.author_state, c.moderation_state FROM {{.Table}} c
   WHERE c.tenant_id = @tenant::bigint AND c.child_id = ANY(@child_ids::uuid[])
   ORDER BY c.child_id
     FOR KEY SHARE OF c
)
SELECT /* store.lock_targets */ child_id::text, author_state, moderation_state FROM shelved
 UNION ALL
SELECT child_id::text, author_state, moderation_state FROM present`

// lockTargets locks the children that the edges of a turn lead to, as a foreign key would, and
// returns the items whose child takes edges. The others get the error of their outcome.
func lockTargets(ctx context.Context, tx pgx.Tx, tenant int64, writes []EdgeWrite, turn []int, out []EdgeOutcome) ([]int, error) {
	s := childShape{Kind: writes[turn[0]].kind.To}
	states := make(map[string]string, len(turn)) // "" for a child that takes edges
	missing := column(turn, func(i int) string { return string(writes[i].To) })
	slices.Sort(missing)
	missing = slices.Compact(missing)
	for len(missing) > 0 {
		var id, author, moderation string
		rows, _ := tx.Query(ctx, s.sql(lockTargetsSQL), pgx.StrictNamedArgs{"tenant": tenant, "child_ids": missing})
		if _, err := pgx.ForEachRow(rows, []any{&id, &author, &moderation}, func() error {
			states[id] = ""
			if !event.BodyTravels(author, moderation) {
				states[id] = event.State(author, moderation)
			}
			return nil
		}); err != nil {
			return nil, fmt.Errorf("lock %d children: %w", len(missing), err)
		}
		missing = slices.DeleteFunc(missing, func(id string) bool { _, locked := states[id]; return locked })
		if len(missing) == 0 {
			break
		}
		moved, err := s.get(ctx, tx, tenant, missing) // to the other table, while the statement waited for them
		if err != nil {
			return nil, err
		}
		missing = slices.DeleteFunc(missing, func(id string) bool { _, exists := moved[id]; return !exists })
	}
	left := make([]int, 0, len(turn))
	for _, i := range turn {
		state, exists := states[string(writes[i].To)]
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
