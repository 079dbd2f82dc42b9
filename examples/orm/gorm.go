package orm

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"

	"gorm.io/gorm"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/outbox"
)

// tidings is the schema of the outbox.
const tidings outbox.Schema = "tidings"

// Order is a row of the service's own table. Its JSON is the payload of its events.
type Order struct {
	ID      int64  `json:"id" gorm:"primaryKey" bun:",pk,autoincrement"`
	Status  string `json:"status"`
	Version int64  `json:"version"`
}

// PayWithGORM marks an order as paid, and appends the event in the same transaction.
func PayWithGORM(ctx context.Context, db *gorm.DB, id int64) error {
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		// First the state: another change of the order waits here for its lock.
		result := tx.Exec(`UPDATE orders SET status = 'paid', version = version + 1 WHERE id = ? AND status <> 'paid'`, id)
		if result.Error != nil || result.RowsAffected == 0 {
			return result.Error // no change, so no event
		}
		var order Order
		if err := tx.First(&order, id).Error; err != nil {
			return err
		}
		conn, ok := tx.Statement.ConnPool.(*sql.Tx)
		if !ok {
			return fmt.Errorf("GORM's transaction is a %T: PrepareStmt wraps it, so open GORM without PrepareStmt", tx.Statement.ConnPool)
		}
		return appendPaid(ctx, conn, order)
	})
}

// appendPaid appends the event that an order is paid.
func appendPaid(ctx context.Context, tx *sql.Tx, order Order) error {
	payload, err := json.Marshal(order)
	if err != nil {
		return err
	}
	return tidings.AppendSQL(ctx, tx, []event.Event{{
		TenantID: 1, AggregateType: "order", AggregateID: event.ID(fmt.Sprint(order.ID)), Type: "paid", Payload: payload,
	}})
}
