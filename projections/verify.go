package projections

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// Difference is one point in which a projection disagrees with the truth.
type Difference struct {
	Projection string `json:"projection"`
	TenantID   int64  `json:"tenant_id"`
	Entity     string `json:"entity"` // "follow 7/42", "counts of user 42", "comment 0190..."
	Field      string `json:"field"`  // "row" if one side has no row
	Want       string `json:"want"`   // the value that the truth requires
	Got        string `json:"got"`    // the value in the projection
	Key        Key    `json:"-"`      // the argument of Repair
	Record     bool   `json:"-"`      // in a record, whose rows never change: Repair leaves this difference

	// The versions of the compared rows, 0 of a missing row or one without a version. With them,
	// Drift tells a difference that lasts from one between later states.
	WantVersion int64 `json:"-"`
	GotVersion  int64 `json:"-"`
}

// Key names the rows that Repair repairs together. Type, TenantID and Aggregate name the aggregate
// of their events. While a DLQ has an event of that aggregate, it explains the difference, and
// Repair does not repair it. The other fields name a part of the aggregate in the projection's own
// way. An edge has its target in Aggregate and its origin in Other. A count of edges has Other 0.
// Other keys name an object of children, or a child.
type Key struct {
	Type      string
	TenantID  int64
	Aggregate event.ID `json:",omitzero"`
	Other     event.ID `json:",omitzero"`
	Child     string   // the id of a child, if the key names one
	Kind      string   // the kind of children of a settings key
	Step      string   // the progress of Repair, in the projection's own format; "" before the start
}

// Ref returns the name of the key's edge or child for the reader of the truth.
func (k Key) Ref() event.Ref {
	return event.Ref{Type: k.Type, Child: k.Child, From: k.Other, To: k.Aggregate}
}

// Parked reports whether a DLQ has events of an aggregate. Repair leaves the rows of such an
// aggregate unchanged.
type Parked func(tenant int64, aggregateType string, aggregateID event.ID) bool

func (d Difference) String() string {
	return fmt.Sprintf("%s: tenant %d, %s: %s is %s, want %s", d.Projection, d.TenantID, d.Entity, d.Field, d.Got, d.Want)
}

// noTimeoutsSQL lets a statement read a whole table, and wait while the reader of another table is
// behind. The default timeouts would end it.
const noTimeoutsSQL = `SET LOCAL statement_timeout = 0; SET LOCAL tcp_user_timeout = 0`

// Rows yields the rows of sql one at a time, in one read-only transaction, then the error that
// ended them, if any.
func Rows[T any](ctx context.Context, pool *pgxpool.Pool, sql string, args pgx.StrictNamedArgs) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		var failed error // InTx would retry an error that it gets
		stopped := false
		err := postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, noTimeoutsSQL); err != nil {
				return fmt.Errorf("turn off the timeouts: %w", err)
			}
			rows, _ := tx.Query(ctx, sql, args)
			defer rows.Close()
			for rows.Next() {
				row, err := pgx.RowToAddrOfStructByPos[T](rows)
				if failed = err; err != nil {
					return nil
				}
				if stopped = !yield(row, nil); stopped {
					return nil
				}
			}
			failed = rows.Err()
			return nil
		})
		if err := errors.Join(err, failed); err != nil && !stopped {
			yield(nil, fmt.Errorf("read rows to compare: %w", err))
		}
	}
}

// Of yields, for each state of the truth, the row that the projection should have.
func Of[S, T any](states iter.Seq2[*S, error], row func(*S) *T) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		for s, err := range states {
			var r *T
			if err == nil {
				r = row(s)
			}
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}

// Compare calls visit for each key of two sequences, the rows that the truth requires and the rows
// of the projection. Both sequences have the order of key. A row that one side lacks is nil.
// Compare holds two rows at a time, and stops at the first error.
func Compare[T any](want, got iter.Seq2[*T, error], key func(a, b *T) int, visit func(want, got *T)) error {
	nextWant, stopWant := iter.Pull2(want)
	defer stopWant()
	nextGot, stopGot := iter.Pull2(got)
	defer stopGot()
	w, wantErr, _ := nextWant() // at the end both are nil
	g, gotErr, _ := nextGot()
	for {
		if err := errors.Join(wantErr, gotErr); err != nil {
			return err
		}
		order := 0
		switch {
		case w == nil && g == nil:
			return nil
		case w == nil:
			order = 1
		case g == nil:
			order = -1
		default:
			order = key(w, g)
		}
		switch {
		case order < 0:
			visit(w, nil)
		case order > 0:
			visit(nil, g)
		default:
			visit(w, g)
		}
		if order <= 0 {
			w, wantErr, _ = nextWant()
		}
		if order >= 0 {
			g, gotErr, _ = nextGot()
		}
	}
}

// Window compares like Compare the first rows of both sides, each of which has at most limit rows.
// It ends at the last key up to which both sides are complete, and returns that key to continue
// after; nil means the end of the tables. With the limit 0 it is Compare.
func Window[T any](want, got iter.Seq2[*T, error], limit int, key func(a, b *T) int, visit func(want, got *T)) (last *T, err error) {
	if limit == 0 {
		return nil, Compare(want, got, key, visit)
	}
	var sides [2][]*T
	for i, side := range []iter.Seq2[*T, error]{want, got} {
		for row, err := range side {
			if err != nil {
				return nil, err
			}
			sides[i] = append(sides[i], row)
		}
		if rows := sides[i]; len(rows) == limit && (last == nil || key(rows[limit-1], last) < 0) {
			last = rows[limit-1]
		}
	}
	reached := func(rows []*T) iter.Seq2[*T, error] {
		return func(yield func(*T, error) bool) {
			for _, row := range rows {
				if last != nil && key(row, last) > 0 || !yield(row, nil) {
					return
				}
			}
		}
	}
	return last, Compare(reached(sides[0]), reached(sides[1]), key, visit)
}

// place is the end of a window over kinds: a row of a kind, or the beginning of a kind if row is
// nil.
type place[T any] struct {
	kind string
	row  *T
}

// Kinds implements Projection.Window for a projection with rows of kinds. It compares kind after
// kind in the order of their names with window. window compares at most limit rows after the given
// one (nil: from the first), and returns the last row as the function Window does.
func Kinds[K, T any](all []K, name func(K) string, after any, limit int,
	window func(k K, after *T, limit int) (checked int64, last *T, err error)) (checked int64, next any, err error) {
	at, _ := after.(place[T])
	for _, k := range all {
		switch n := name(k); {
		case n < at.kind:
			continue
		case n > at.kind:
			at = place[T]{kind: n}
		}
		left := limit - int(checked)
		if left <= 0 {
			return checked, at, nil
		}
		n, last, err := window(k, at.row, left)
		checked += n
		switch {
		case err != nil:
			return checked, nil, fmt.Errorf("compare a window of %s: %w", at.kind, err)
		case last != nil:
			return checked, place[T]{at.kind, last}, nil
		}
	}
	return checked, nil, nil
}

// Differ reports a difference in a field if want and got differ.
func (d Difference) Differ(report func(Difference), field string, want, got any) {
	if want != got {
		d.Field, d.Want, d.Got = field, fmt.Sprint(want), fmt.Sprint(got)
		report(d)
	}
}

// Present returns the text that a difference has for an existing or a missing row.
func Present(there bool) string {
	if there {
		return "present"
	}
	return "absent"
}

// Concat yields the values of the sequences one after the other, up to the first error.
func Concat[T any](all ...iter.Seq2[T, error]) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for _, seq := range all {
			for v, err := range seq {
				if !yield(v, err) || err != nil {
					return
				}
			}
		}
	}
}
