package history

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// heldSQL counts versions that have content. Index: KIND_history_pkey. Locks: none.
const heldSQL = `
SELECT /* history.held */ count(*) FROM {kind}_history
 WHERE tenant_id = @tenant AND {id} = ANY(@ids::uuid[]) AND (object ->> 'body' <> '' OR object ?| '{reason,attributes}')`

// redactSQL removes the content of versions, and keeps their actors and times. The version of the
// erasure has no content. Index: KIND_history_pkey. Locks: the versions, in key order.
const redactSQL = `
WITH held AS MATERIALIZED (
  SELECT {id}, version_id FROM {kind}_history
   WHERE tenant_id = @tenant AND {id} = ANY(@ids::uuid[]) AND (object ->> 'body' <> '' OR object ?| '{reason,attributes}')
   ORDER BY {id}, version_id FOR NO KEY UPDATE
)
UPDATE /* history.redact */ {kind}_history h SET object = (h.object - '{reason,attributes}'::text[]) || '{"body": "", "erased": true}'
  FROM held WHERE h.tenant_id = @tenant AND h.{id} = held.{id} AND h.version_id = held.version_id`

func ofChildren(k kinds.Child, sql string) string {
	return strings.NewReplacer("{kind}", k.Name, "{id}", k.Names().ID).Replace(sql)
}

// Redact removes the content of every version of these children, in the caller's transaction, and
// returns the number of changed versions. With dryRun it only counts them.
func (p *Projection) Redact(ctx context.Context, tx pgx.Tx, tenant int64, ids []string, dryRun bool) (n int64, err error) {
	args := pgx.StrictNamedArgs{"tenant": tenant, "ids": ids}
	for _, k := range p.kinds().AllChildren() {
		var some int64
		if dryRun {
			err = tx.QueryRow(ctx, ofChildren(k, heldSQL), args).Scan(&some)
		} else {
			tag, e := tx.Exec(ctx, ofChildren(k, redactSQL), args)
			some, err = tag.RowsAffected(), e
		}
		if err != nil {
			return 0, fmt.Errorf("redact the histories of %d children: %w", len(ids), err)
		}
		n += some
	}
	return n, nil
}

// forgetEdgesSQL deletes the histories of pairs. Index: KIND_history_pkey. Locks: the versions; no
// other transaction writes them while the offsets are held.
const forgetEdgesSQL = `
DELETE /* history.forget */ FROM {kind}_history h
 USING unnest(@froms::text[], @tos::text[]) AS k(a, b) WHERE h.tenant_id = @tenant AND h.{from} = k.a AND h.{to} = k.b`

// forgetPurgedSQL deletes the records of purged histories of pairs. Index:
// KIND_history_purged_pkey. Locks: the records; no other transaction writes them while the offsets
// are held.
const forgetPurgedSQL = `
DELETE /* history.forget_purged */ FROM {kind}_history_purged h
 USING unnest(@froms::text[], @tos::text[]) AS k(a, b) WHERE h.tenant_id = @tenant AND h.{from} = k.a AND h.{to} = k.b`

const edgeRows = `(SELECT {from}, {to} FROM {kind}_history WHERE tenant_id = @tenant UNION ALL SELECT {from}, {to} FROM ` +
	`{kind}_history_purged WHERE tenant_id = @tenant) rows`

// Forget deletes the histories of an object's edges as Projection requires: all versions, and the
// records of purged histories. With dryRun it counts pairs.
func (p *Projection) Forget(ctx context.Context, tx pgx.Tx, of projections.EdgesOf, after projections.Pair,
	dryRun bool) (n int64, next *projections.Pair, err error) {
	all, next, err := of.Pairs(ctx, tx, ofEdges(of.Kind, edgeRows), of.Kind.Ends[0], of.Kind.Ends[1], after)
	if err != nil || dryRun || len(all) == 0 {
		return int64(len(all)), next, err
	}
	froms, tos := projections.Columns(all)
	for _, sql := range []string{forgetEdgesSQL, forgetPurgedSQL} {
		tag, err := tx.Exec(ctx, ofEdges(of.Kind, sql), pgx.StrictNamedArgs{"tenant": of.TenantID, "froms": froms, "tos": tos})
		if err != nil {
			return 0, nil, fmt.Errorf("delete the histories of %d edges: %w", len(all), err)
		}
		n += tag.RowsAffected()
	}
	return n, next, nil
}

// actsWindow is the number of versions that one step of RedactActor reads.
const actsWindow = 20_000

// actsSQL replaces an actor in the next versions of a kind. It returns the number of the actor's
// versions and the last version that it read. Index: KIND_history_pkey, one range. Locks: the
// actor's versions.
const actsSQL = `
WITH next AS MATERIALIZED (
  SELECT {keys}, version_id, @actor::text IN (metadata ->> 'created_by', object ->> 'actor') AS mine FROM {kind}_history
   WHERE tenant_id = @tenant::bigint AND ({keys}, version_id) > ({after}, @version::bigint) ORDER BY {keys}, version_id LIMIT @window
), changed AS (
  UPDATE {kind}_history h
     SET metadata = h.metadata || jsonb_build_object('created_by', @erased::text),
         object = h.object || jsonb_build_object('actor', @erased::text)
    FROM next WHERE NOT @dry_run AND next.mine AND h.tenant_id = @tenant::bigint
     AND ({h.keys}, h.version_id) = ({next.keys}, next.version_id)
)
SELECT /* history.acts */ (SELECT count(*) FROM next WHERE mine), ARRAY[{keys}]::text[], version_id FROM next
 ORDER BY {keys.desc}, version_id DESC LIMIT 1`

// actsOf returns actsSQL for a kind whose key columns have one type.
func actsOf(kind, keyType string, keys ...string) string {
	of := func(format string) string {
		var all []string
		for i, k := range keys {
			all = append(all, strings.NewReplacer("KEY", k, "N", fmt.Sprint(i+1)).Replace(format))
		}
		return strings.Join(all, ", ")
	}
	return strings.NewReplacer("{kind}", kind, "{keys}", of("KEY"), "{keys.desc}", of("KEY DESC"), "{h.keys}", of("h.KEY"),
		"{next.keys}", of("next.KEY"), "{after}", of("(@after::text[])[N]::"+keyType)).Replace(actsSQL)
}

// act is the place of RedactActor: the last version that it read of a kind's histories.
type act struct {
	kind    int
	keys    []string
	version int64
}

// RedactActor replaces a person as the actor of versions in the histories of all kinds, as
// Projection requires.
func (p *Projection) RedactActor(ctx context.Context, tx pgx.Tx, tenant int64, actor string, after any,
	dryRun bool) (n int64, next any, err error) {
	var all []string
	var first [][]string
	for _, k := range p.kinds().AllChildren() {
		all, first = append(all, actsOf(k.Name, "uuid", k.Names().ID)), append(first, []string{"00000000-0000-0000-0000-000000000000"})
	}
	for _, k := range p.kinds().AllEdges() {
		all, first = append(all, actsOf(k.Name, "text", k.Ends[0], k.Ends[1])), append(first, []string{"", ""})
	}
	at, _ := after.(act)
	if at.kind >= len(all) {
		return 0, nil, nil
	}
	if at.keys == nil {
		at.keys = first[at.kind]
	}
	err = tx.QueryRow(ctx, all[at.kind], pgx.StrictNamedArgs{"tenant": tenant, "actor": actor, "erased": event.ErasedActor,
		"dry_run": dryRun, "window": actsWindow, "after": at.keys, "version": at.version}).Scan(&n, &at.keys, &at.version)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, act{kind: at.kind + 1}, nil
	}
	if err != nil {
		return 0, nil, fmt.Errorf("redact the actor %s in the histories: %w", actor, err)
	}
	return n, at, nil
}
