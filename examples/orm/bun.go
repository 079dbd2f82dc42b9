package orm

import (
	"context"
	"database/sql"
	"errors"

	"github.com/uptrace/bun"
)

// PayWithBun marks an order as paid, and appends the event in the same transaction.
func PayWithBun(ctx context.Context, db *bun.DB, id int64) error {
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		var order Order
		err := tx.NewUpdate().Model(&order).Set("status = 'paid', version = version + 1").
			Where("id = ? AND status <> 'paid'", id).Returning("*").Scan(ctx)
		if errors.Is(err, sql.ErrNoRows) {
			return nil // no change, so no event
		}
		if err != nil {
			return err
		}
		return appendPaid(ctx, tx.Tx, order)
	})
}
