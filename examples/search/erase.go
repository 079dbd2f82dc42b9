package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
)

// clear empties the index before exports fill it again.
func clear(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `TRUNCATE documents, activity`)
	return err
}

// erase deletes what an erased person wrote.
func erase(ctx context.Context, tx pgx.Tx, tenant int64, person event.ID) error {
	_, err := tx.Exec(ctx, `DELETE FROM documents WHERE tenant_id = $1 AND author_id = $2`, tenant, person)
	return err
}
