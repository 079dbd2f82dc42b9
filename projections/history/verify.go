package history

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// headRow is an entity's last version, and whether that version is its deletion. The key of a child
// is in Child, the key of an edge in From and To.
type headRow struct {
	TenantID int64
	Child    string
	From, To event.ID
	Version  int64
	Deleted  bool
	Object   event.ID `db:"-"` // for a child of the truth: its parent, which is the aggregate of its events
}

func childHead(s *store.State[event.Child]) *headRow {
	return &headRow{TenantID: s.TenantID, Child: s.Object.ID, Version: s.Object.Version,
		Deleted: s.Object.AuthorState != event.AuthorActive, Object: s.Object.Parent}
}

func edgeHead(s *store.State[event.Edge]) *headRow {
	return &headRow{TenantID: s.TenantID, From: s.Object.From, To: s.Object.To, Version: s.Object.Version,
		Deleted: !s.Object.Active()}
}

// childHeadsSQL reads the heads of the histories of a kind's children. A purged history has its
// record as the head. Index: KIND_history_head_idx, KIND_history_purged_pkey, all of them. Locks:
// none.
const childHeadsSQL = `
SELECT /* history.verify */ tenant_id, {id}::text, '', '', version, deleted
  FROM (SELECT tenant_id, {id}, version, version_state = 'DELETED' AS deleted FROM {kind}_history
         WHERE version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT tenant_id, {id}, version, true FROM {kind}_history_purged p
         WHERE NOT EXISTS (SELECT FROM {kind}_history h WHERE h.tenant_id = p.tenant_id AND h.{id} = p.{id})) heads
 ORDER BY tenant_id, heads.{id}`

// edgeHeadsSQL reads the heads of a kind's edges in the same way.
// Index: KIND_history_head_idx, KIND_history_purged_pkey, all of them. Locks: none.
const edgeHeadsSQL = `
SELECT /* history.verify */ tenant_id, '', {from}, {to}, version, deleted
  FROM (SELECT tenant_id, {from}, {to}, version, version_state = 'DELETED' AS deleted FROM {kind}_history
         WHERE version_state IN ('LATEST', 'DELETED')
         UNION ALL
        SELECT tenant_id, {from}, {to}, version, true FROM {kind}_history_purged p
         WHERE NOT EXISTS (SELECT FROM {kind}_history h WHERE h.tenant_id = p.tenant_id AND h.{from} = p.{from} AND h.{to} = p.{to})) heads
 ORDER BY tenant_id, {from}, {to}`

func ofEdges(k kinds.Edge, sql string) string {
	return strings.NewReplacer("{kind}", k.Name, "{from}", k.Ends[0], "{to}", k.Ends[1]).Replace(sql)
}

// Verify compares the head of each history with the truth's row, and each version with its
// predecessor (versioned.Table.Check). It reports every difference, and returns the number of
// compared entities. An event that is not applied yet causes a difference, so the caller waits for
// a consumer's lag of 0. Both pools act as the system role. Memory does not grow with the tables.
func (p *Projection) Verify(ctx context.Context, truth, projection *pgxpool.Pool,
	report func(projections.Difference)) (checked int64, err error) {
	one := func(kind string, table *raw, want iter.Seq2[*headRow, error], sql string,
		keyOf func([]byte) (projections.Key, int64, error)) error {
		key := func(a, b *headRow) int {
			return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.Child, b.Child), cmp.Compare(a.From, b.From),
				cmp.Compare(a.To, b.To))
		}
		err := projections.Compare(want, projections.Rows[headRow](ctx, projection, sql, nil), key, func(want, got *headRow) {
			checked++
			compareHead(kind, want, got, report)
		})
		if err == nil {
			err = postgres.InTx(ctx, projection, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
				var failed error
				_, err = table.Check(ctx, tx, func(f versioned.Flaw[json.RawMessage]) {
					k, version, err := keyOf(f.Object)
					if err != nil {
						failed = err
						return
					}
					k.Type, k.TenantID = kind, f.TenantID
					report(projections.Difference{Projection: Name, TenantID: f.TenantID, Entity: entity(k),
						Field: fmt.Sprintf("version %d, %s", version, f.Rule), Want: f.Want, Got: f.Got, Key: k, Record: true})
				})
				return errors.Join(err, failed)
			})
		}
		if err != nil {
			return fmt.Errorf("verify the history of %s: %w", kind, err)
		}
		return nil
	}
	for _, k := range p.kinds().AllChildren() {
		if err := one(k.Name, Children(k).raw, projections.Of(store.ScanChildren(ctx, truth, k, nil, 0), childHead),
			ofChildren(k, childHeadsSQL), func(object []byte) (projections.Key, int64, error) {
				c, err := k.Names().Parse(object)
				return projections.Key{Child: c.ID}, c.Version, err
			}); err != nil {
			return checked, err
		}
	}
	for _, k := range p.kinds().AllEdges() {
		if err := one(k.Name, Edges(k).raw, projections.Of(store.ScanEdges(ctx, truth, k, nil, 0), edgeHead), ofEdges(k, edgeHeadsSQL),
			func(object []byte) (projections.Key, int64, error) {
				e, err := k.Names().Parse(object)
				return projections.Key{Other: e.From, Aggregate: e.To}, e.Version, err
			}); err != nil {
			return checked, err
		}
	}
	return checked, nil
}

func entity(k projections.Key) string {
	if k.Child != "" {
		return fmt.Sprintf("history of %s %s", k.Type, k.Child)
	}
	return fmt.Sprintf("history of %s %s/%s", k.Type, k.Other, k.Aggregate)
}

func compareHead(kind string, want, got *headRow, report func(projections.Difference)) {
	if want == nil && got.Deleted {
		return // gone in both
	}
	diffHead(kind, want, got).Report(report)
}

// diffHead compares an entity's last version on both sides, either of which may be nil.
func diffHead(kind string, want, got *headRow) projections.Diff {
	present := cmp.Or(want, got)
	key := projections.Key{Type: kind, TenantID: present.TenantID, Aggregate: cmp.Or(present.To, present.Object),
		Other: present.From, Child: present.Child}
	record := want == nil || got != nil && got.Version >= want.Version
	return projections.NewDiff(projections.Difference{Projection: Name, TenantID: present.TenantID, Entity: entity(key), Key: key,
		Record: record}, want, got, fieldsOf)
}

func fieldsOf(want, got *headRow) []projections.Field {
	return []projections.Field{
		projections.Compared("version", want.Version, got.Version),
		projections.Compared("deleted", want.Deleted, got.Deleted),
	}
}
