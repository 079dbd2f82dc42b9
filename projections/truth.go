package projections

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// pageRows is how many rows of the truth are in memory at a time.
const pageRows = 4000

// Pages yields the rows of sql, page after page, each a statement of its own: nothing holds a snapshot of the truth for long.
// after makes the arguments that sql continues with from the last row, nil for the first page; sql has a parameter
// limit besides. What changes meanwhile may be seen as it was or as it is.
func Pages[T any](ctx context.Context, pool *pgxpool.Pool, sql string, after func(last *T) pgx.StrictNamedArgs) iter.Seq2[*T, error] {
	return func(yield func(*T, error) bool) {
		var last *T
		for {
			args := after(last)
			args["limit"] = pageRows
			rows, _ := pool.Query(ctx, sql, args)
			page, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[T])
			if err != nil {
				yield(nil, fmt.Errorf("read a page of the truth: %w", err))
				return
			}
			for _, row := range page {
				if !yield(row, nil) {
					return
				}
			}
			if len(page) < pageRows {
				return
			}
			last = page[len(page)-1]
		}
	}
}

// StateEvent is an event that says what state an entity is in, as if it had just been written: what a projection is built from
// when the stream does not reach back far enough. It is on no stream and has no id.
func StateEvent(tenant int64, aggregateType string, aggregateID int64, eventType string, payload any) (event.Event, error) {
	b, err := json.Marshal(payload)
	if err != nil {
		return event.Event{}, fmt.Errorf("encode the state of a %s of aggregate %d: %w", aggregateType, aggregateID, err)
	}
	return event.Event{TenantID: tenant, AggregateType: aggregateType, AggregateID: aggregateID, Type: eventType, Version: 1, Payload: b}, nil
}
