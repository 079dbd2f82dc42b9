package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

const (
	// deadAggregatesSQL reads the aggregates with messages in the DLQ.
	//
	// Index: outbox_messages_dlq_tenant_aggregate_idx.   Locks: none.
	deadAggregatesSQL = `SELECT /* outbox.dead_aggregates */ DISTINCT tenant_id, aggregate_type, aggregate_id FROM outbox_messages_dlq`
	// waitingAggregatesSQL reads the aggregates with delayed messages. Index:
	// outbox_messages_held_idx. Locks: none.
	waitingAggregatesSQL = `
SELECT /* outbox.waiting_aggregates */ DISTINCT tenant_id, aggregate_type, aggregate_id FROM outbox_messages WHERE delayed`
)

// Dead returns a function that reports whether an aggregate has messages in the DLQ, as of this
// call. The pool acts as the system role.
func Dead(ctx context.Context, pool *pgxpool.Pool) (dead func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	if dead, err = aggregates(ctx, pool, deadAggregatesSQL); err != nil {
		return nil, fmt.Errorf("read the aggregates in the DLQ: %w", err)
	}
	return dead, nil
}

// Waiting returns a function that reports whether an aggregate has delayed messages: for a retry,
// for the time that their writer set, or behind such a message. The pool acts as the system role.
func Waiting(ctx context.Context,
	pool *pgxpool.Pool) (waiting func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	if waiting, err = aggregates(ctx, pool, waitingAggregatesSQL); err != nil {
		return nil, fmt.Errorf("read the aggregates with delayed messages: %w", err)
	}
	return waiting, nil
}

func aggregates(ctx context.Context, pool *pgxpool.Pool,
	sql string) (among func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	all := make(map[Aggregate]bool)
	rows, _ := pool.Query(ctx, sql)
	var a Aggregate
	if _, err := pgx.ForEachRow(rows, []any{&a.TenantID, &a.Type, &a.ID}, func() error {
		all[a] = true
		return nil
	}); err != nil {
		return nil, err
	}
	return func(tenant int64, aggregateType string, aggregateID event.ID) bool {
		return all[Aggregate{tenant, aggregateType, aggregateID}]
	}, nil
}
