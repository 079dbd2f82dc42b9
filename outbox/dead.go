package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// deadAggregatesSQL reads which aggregates have messages in the DLQ.
// Index: outbox_messages_dlq_tenant_aggregate_idx.   Locks: none.
const deadAggregatesSQL = `SELECT /* outbox.dead_aggregates */ DISTINCT tenant_id, aggregate_type, aggregate_id FROM outbox_messages_dlq`

// Dead returns whether an aggregate has messages in the DLQ, as it is now. The pool acts as the system role.
func Dead(ctx context.Context, pool *pgxpool.Pool) (dead func(tenant int64, aggregateType string, aggregateID int64) bool, err error) {
	all := make(map[Aggregate]bool)
	rows, _ := pool.Query(ctx, deadAggregatesSQL)
	var a Aggregate
	if _, err := pgx.ForEachRow(rows, []any{&a.TenantID, &a.Type, &a.ID}, func() error {
		all[a] = true
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read which aggregates are in the DLQ: %w", err)
	}
	return func(tenant int64, aggregateType string, aggregateID int64) bool {
		return all[Aggregate{tenant, aggregateType, aggregateID}]
	}, nil
}
