package projections

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
)

// Difference is one way in which a projection is not what the truth makes it.
type Difference struct {
	Projection string `json:"projection"`
	TenantID   int64  `json:"tenant_id"`
	Entity     string `json:"entity"` // "follow 7/42", "counts of user 42", "comment 0190..."
	Field      string `json:"field"`  // "row" when one side has none
	Want       string `json:"want"`   // by the truth
	Got        string `json:"got"`    // in the projection
	Key        Key    `json:"-"`      // what to mend
}

// Key names what a projection mends as one: a pair (Aggregate is the followee, Other the follower), an account (Other is 0), a
// post, or a comment.
type Key struct {
	Type                       string // the aggregate type of the events that it is made of
	TenantID, Aggregate, Other int64
	Comment                    string // its id, of a history only
}

// Parked tells whether events of an aggregate are in a DLQ: what they would change is left alone.
type Parked func(tenant int64, aggregateType string, aggregateID int64) bool

func (d Difference) String() string {
	return fmt.Sprintf("%s: tenant %d, %s: %s is %s, want %s", d.Projection, d.TenantID, d.Entity, d.Field, d.Got, d.Want)
}

// noStatementTimeoutSQL lets a statement read a whole table; ours are bounded otherwise.
const noStatementTimeoutSQL = `SET LOCAL statement_timeout = 0`

// Compare runs both queries, each in a read-only transaction of its own, and hands what they return to visit in one order: a
// row that one side lacks is nil there. Both queries are ordered as key compares. It holds two rows at a time, whatever the
// size of the tables, and stops at visit's first error.
func Compare[T any](ctx context.Context, truth, projections *pgxpool.Pool, truthSQL, projectionSQL string,
	key func(a, b *T) int, visit func(want, got *T) error) error {
	opts := pgx.TxOptions{AccessMode: pgx.ReadOnly}
	return postgres.InTx(ctx, truth, opts, func(left pgx.Tx) error {
		return postgres.InTx(ctx, projections, opts, func(right pgx.Tx) error {
			return merge(ctx, left, right, truthSQL, projectionSQL, key, visit)
		})
	})
}

func merge[T any](ctx context.Context, left, right pgx.Tx, leftSQL, rightSQL string, key func(a, b *T) int, visit func(want, got *T) error) error {
	nextLeft, stopLeft := iter.Pull2(stream[T](ctx, left, leftSQL))
	defer stopLeft()
	nextRight, stopRight := iter.Pull2(stream[T](ctx, right, rightSQL))
	defer stopRight()
	next := func(pull func() (*T, error, bool)) (*T, error) {
		row, err, _ := pull() // at the end both are nil
		return row, err
	}
	want, err := next(nextLeft)
	got, gotErr := next(nextRight)
	for {
		if err := errors.Join(err, gotErr); err != nil {
			return err
		}
		if want == nil && got == nil {
			return nil
		}
		order := 0
		switch {
		case want == nil:
			order = 1
		case got == nil:
			order = -1
		default:
			order = key(want, got)
		}
		switch {
		case order < 0:
			if err := visit(want, nil); err != nil {
				return err
			}
			want, err = next(nextLeft)
		case order > 0:
			if err := visit(nil, got); err != nil {
				return err
			}
			got, gotErr = next(nextRight)
		default:
			if err := visit(want, got); err != nil {
				return err
			}
			want, err = next(nextLeft)
			got, gotErr = next(nextRight)
		}
	}
}

// stream yields the rows of sql one at a time, then the error that ended them, if any.
func stream[T any](ctx context.Context, tx pgx.Tx, sql string) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		if _, err := tx.Exec(ctx, noStatementTimeoutSQL); err != nil {
			yield(nil, fmt.Errorf("lift the statement timeout: %w", err))
			return
		}
		rows, err := tx.Query(ctx, sql)
		if err != nil {
			yield(nil, fmt.Errorf("read rows to compare: %w", err))
			return
		}
		defer rows.Close()
		for rows.Next() {
			row, err := pgx.RowToAddrOfStructByPos[T](rows)
			if err != nil {
				yield(nil, fmt.Errorf("read a row to compare: %w", err))
				return
			}
			if !yield(row, nil) {
				return
			}
		}
		if err := rows.Err(); err != nil {
			yield(nil, fmt.Errorf("read rows to compare: %w", err))
		}
	}
}
