package store

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
)

// ShelvingFlaw is a violation of a rule of shelved threads.
type ShelvingFlaw struct {
	Kind     string
	TenantID int64
	ObjectID event.ID
	Rule     string
}

// shelvedPageSQL reads the next shelved children of a kind, and whether each is also in the other
// table. Index: the one of the kind's Order on the shelf, one range; the primary key of the
// table. Locks: none.
const shelvedPageSQL = `
SELECT /* store.archive_page */ a.tenant_id, a.object_id, a.{{.Order}}::text,
       EXISTS (SELECT FROM {{.Table}} c WHERE c.tenant_id = a.tenant_id AND c.child_id = a.child_id)
  FROM {{.Shelf}} a WHERE (a.tenant_id, a.object_id, a.{{.Order}}) > (@tenant::bigint, @object::text, @place::{{.OrderType}})
 ORDER BY a.tenant_id, a.object_id, a.{{.Order}} LIMIT @limit`

// stubPageSQL reads the next stubs of a kind, and whether a shelved thread has children outside
// the shelf. Index: archived_threads_stub_idx, one range of all kinds; the one of the kind's
// Order. Locks: none.
const stubPageSQL = `
SELECT /* store.stub_page */ s.tenant_id, s.object_id, s.state = 'ARCHIVED', s.children,
       s.state = 'ARCHIVED' AND EXISTS (SELECT FROM {{.Table}} c WHERE c.tenant_id = s.tenant_id AND c.object_id = s.object_id)
  FROM archived_threads s WHERE s.kind = '{{.Kind}}' AND s.state <> 'RETURNED'
   AND (s.tenant_id, s.object_id) > (@tenant::bigint, @object::text)
 ORDER BY s.tenant_id, s.object_id LIMIT @limit`

type shelvedChild struct {
	TenantID int64
	ObjectID event.ID
	Place    string
	InBoth   bool // it is also in the other table
}

type stubRow struct {
	TenantID      int64
	ObjectID      event.ID
	Shelved       bool
	Children      int64
	HasUnarchived bool // children are in the other table
}

// pages yields the rows of sql, page by page. Each page is one statement, and args returns its
// arguments: they name the row after which the page begins.
func pages[R any](ctx context.Context, tx pgx.Tx, sql string, args func(after *R) pgx.StrictNamedArgs) iter.Seq2[*R, error] {
	return func(yield func(*R, error) bool) {
		after := new(R)
		for more := true; more; {
			named := args(after)
			named["limit"] = scanRows
			rows, _ := tx.Query(ctx, sql, named)
			all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[R])
			if err != nil {
				yield(nil, err)
				return
			}
			for _, after = range all {
				if !yield(after, nil) {
					return
				}
			}
			more = len(all) == scanRows
		}
	}
}

// CheckShelving reports violations of the rules of shelved threads. Each child is in one table,
// each shelved child has a stub, and all children of a shelved thread are shelved. It returns the
// number of shelved children. It reads all of them, by pages, in one snapshot. The pool acts as
// postgres.RoleSystem.
func CheckShelving(ctx context.Context, pool *pgxpool.Pool, set *kinds.Set, report func(ShelvingFlaw)) (children int64, err error) {
	var flaws []ShelvingFlaw
	err = postgres.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		children, flaws = 0, nil
		for _, k := range set.AllChildren() {
			n, err := checkShelving(ctx, tx, k, func(tenant int64, object event.ID, rule string) {
				flaws = append(flaws, ShelvingFlaw{k.Name, tenant, object, rule})
			})
			if err != nil {
				return err
			}
			children += n
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("check shelved children: %w", err)
	}
	for _, f := range flaws {
		report(f)
	}
	return children, nil
}

// checkShelving merges the shelved children of a kind with the stubs, both in the order of tenant
// and object.
func checkShelving(ctx context.Context, tx pgx.Tx, k kinds.Child,
	flaw func(tenant int64, object event.ID, rule string)) (children int64, err error) {
	shape := shapeOf(k)
	next, stop := iter.Pull2(pages(ctx, tx, shape.sql(stubPageSQL), func(after *stubRow) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": after.TenantID, "object": after.ObjectID}
	}))
	defer stop()
	s, err, _ := next()
	var at shelvedChild // the present thread, with n shelved children so far
	var n int64
	// upTo compares the present thread with its stub, and reports stubs before (tenant, object)
	// that have no children.
	upTo := func(tenant int64, object event.ID) {
		for ; err == nil && s != nil && cmp.Or(cmp.Compare(s.TenantID, tenant), cmp.Compare(s.ObjectID, object)) < 0; s, err, _ = next() {
			has := int64(-1)
			if s.TenantID == at.TenantID && s.ObjectID == at.ObjectID {
				has, n = n, 0
			}
			if s.Shelved && s.Children != has {
				flaw(s.TenantID, s.ObjectID, "shelved "+k.Name+"s are missing")
			}
			if s.HasUnarchived {
				flaw(s.TenantID, s.ObjectID, "a shelved thread has "+k.Name+"s off the shelf")
			}
		}
		if n > 0 {
			flaw(at.TenantID, at.ObjectID, "shelved "+k.Name+"s have no stub")
		}
	}
	for c, cerr := range pages(ctx, tx, shape.sql(shelvedPageSQL), func(after *shelvedChild) pgx.StrictNamedArgs {
		return pgx.StrictNamedArgs{"tenant": after.TenantID, "object": after.ObjectID,
			"place": cmp.Or(after.Place, map[bool]string{false: noChild}[k.Threaded])}
	}) {
		if cerr != nil {
			return children, cerr
		}
		if c.TenantID != at.TenantID || c.ObjectID != at.ObjectID {
			upTo(c.TenantID, c.ObjectID)
			at, n = *c, 0
		}
		children++
		n++
		if c.InBoth {
			flaw(c.TenantID, c.ObjectID, "a "+k.Name+" is both on the shelf and off it")
		}
	}
	upTo(math.MaxInt64, "\x7f") // after every id
	return children, err
}
