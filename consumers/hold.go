package consumers

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// holdSQL waits for the consumer's batches in hand and keeps others from beginning.
// Index: consumer_offsets_pkey. Locks: the rows, in key order.
const holdSQL = `SELECT /* consumers.hold */ FROM consumer_offsets WHERE consumer_name = @consumer ORDER BY partition_key FOR UPDATE`

// allParkedSQL reads the aggregates that have dead letters. Index:
// consumer_dead_letters_aggregate_idx. Locks: none; a transaction that unparks holds the offset.
const allParkedSQL = `
SELECT /* consumers.all_parked */ DISTINCT tenant_id, aggregate_type, aggregate_id
  FROM consumer_dead_letters WHERE consumer_name = @consumer`

// Hold keeps all instances of the consumer from beginning a batch until tx ends, and returns a
// function that reports whether an aggregate is parked. The caller then finds in the read tables
// the state between two batches, and its changes are part of that state. tx should be short.
func Hold(ctx context.Context, tx pgx.Tx,
	consumer string) (parked func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	if _, err := tx.Exec(ctx, holdSQL, pgx.StrictNamedArgs{"consumer": consumer}); err != nil {
		return nil, fmt.Errorf("hold consumer %s: %w", consumer, err)
	}
	return AllParked(ctx, tx, consumer)
}

// AllParked returns a function that reports whether an aggregate is parked, as q sees it now.
func AllParked(ctx context.Context, q postgres.Querier,
	consumer string) (parked func(tenant int64, aggregateType string, aggregateID event.ID) bool, err error) {
	all := make(map[aggregate]bool)
	rows, _ := q.Query(ctx, allParkedSQL, pgx.StrictNamedArgs{"consumer": consumer})
	var a aggregate
	if _, err := pgx.ForEachRow(rows, []any{&a.tenant, &a.kind, &a.id}, func() error {
		all[a] = true
		return nil
	}); err != nil {
		return nil, fmt.Errorf("read the parked aggregates of consumer %s: %w", consumer, err)
	}
	return func(tenant int64, aggregateType string, aggregateID event.ID) bool {
		return all[aggregate{tenant, aggregateType, aggregateID}]
	}, nil
}

// forgetSQL deletes the offsets and dead letters of a consumer. Index: consumer_offsets_pkey,
// consumer_dead_letters_aggregate_idx. Locks: the rows; the offsets are held.
const forgetSQL = `
WITH gone AS (DELETE FROM consumer_dead_letters WHERE consumer_name = @consumer)
DELETE /* consumers.forget */ FROM consumer_offsets WHERE consumer_name = @consumer`

// Forget deletes the offsets and dead letters of a consumer, which then begins with the oldest
// events of the streams. Batches in hand either commit before it, or change nothing.
func Forget(ctx context.Context, tx pgx.Tx, consumer string) error {
	if _, err := Hold(ctx, tx, consumer); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, forgetSQL, pgx.StrictNamedArgs{"consumer": consumer}); err != nil {
		return fmt.Errorf("delete the offsets of consumer %s: %w", consumer, err)
	}
	return nil
}
