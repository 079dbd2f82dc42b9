package cells

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// Errors of this package.
var (
	// ErrUnassigned reports several truths and an empty tenant_cells: it is unknown which rows of
	// the projections belong to this truth. Fill the table.
	ErrUnassigned = errors.New("cells: several truths write to these projections, and tenant_cells does not assign the tenants to them")
	// ErrShared reports projections to which several truths write.
	ErrShared = errors.New("cells: other truths write to these projections too")
)

// others is the tenant number of the row that applies to all tenants without a row.
const otherTenants = 0

// Tenants are the tenants of one cell. The zero value has all tenants.
type Tenants struct {
	cell   string
	of     map[int64]string // the cell by tenant
	others []string         // the other cells
}

// tenantsSQL reads the whole table. Locks: none.
const tenantsSQL = `SELECT /* cells.tenants */ tenant_id, cell FROM tenant_cells`

// readSQL reads, from the offsets, the names of the streams that consumers read: EVENTS of
// EVENTS-0. Index: none, a row per consumer and stream that ever existed. Locks: none.
const readSQL = `
SELECT /* cells.read */ DISTINCT regexp_replace(partition_key, '-[0-9]+$', '')
  FROM consumer_offsets WHERE NOT closed AND partition_key ~ '-[0-9]+$'`

// Read returns the tenants of a cell, or ErrUnassigned. It reads the whole table: use the result
// for one pass over the projections.
func Read(ctx context.Context, q postgres.Querier, cell string) (Tenants, error) {
	t := Tenants{cell: cell, of: make(map[int64]string)}
	var tenant int64
	var name string
	rows, _ := q.Query(ctx, tenantsSQL)
	_, err := pgx.ForEachRow(rows, []any{&tenant, &name}, func() error {
		t.of[tenant] = name
		t.add(name)
		return nil
	})
	if err != nil {
		return t, fmt.Errorf("read the cells of tenants: %w", err)
	}
	rows, _ = q.Query(ctx, readSQL)
	if _, err := pgx.ForEachRow(rows, []any{&name}, func() error {
		t.add(name)
		return nil
	}); err != nil {
		return t, fmt.Errorf("read the cells of consumers: %w", err)
	}
	if len(t.of) == 0 && len(t.others) > 0 {
		return t, fmt.Errorf("%w: %s and %v", ErrUnassigned, cell, t.others)
	}
	return t, nil
}

func (t *Tenants) add(cell string) {
	if cell != t.cell && !slices.Contains(t.others, cell) {
		t.others = append(t.others, cell)
	}
}

// Has reports whether the tenant belongs to the cell.
func (t Tenants) Has(tenant int64) bool {
	return len(t.of) == 0 || cmp.Or(t.of[tenant], t.of[otherTenants]) == t.cell
}

// RequireSole returns ErrShared if there is another cell.
func (t Tenants) RequireSole() error {
	if len(t.others) > 0 {
		return fmt.Errorf("%w: %v in addition to %s", ErrShared, t.others, t.cell)
	}
	return nil
}
