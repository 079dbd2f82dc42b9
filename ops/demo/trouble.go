package demo

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
)

const (
	troubleEvery = 15 * time.Second
	mostTrouble  = 40      // enough for the console to show
	farAway      = 1 << 40 // the site uses no aggregates from here on, so trouble delays none of its events
)

// unpublishableSQL writes an event in SQL whose type cannot be part of a subject.
// Index: outbox_messages_pkey.   Locks: none but the new row.
const unpublishableSQL = `
INSERT /* demo.unpublishable */ INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
VALUES (@tenant, @type, @aggregate, 'not a token', '{}') RETURNING id`

// Trouble creates failures for the console to show: events that no consumer understands, with later
// events behind them, and messages that no relay can publish. Every second such message becomes a
// dead letter. Trouble writes to the database itself as the role system, so use it only with
// tidings dev. The failures remain until an operator resolves them.
type Trouble struct {
	Pool   *pgxpool.Pool
	Tenant int64

	made int64 // failures so far
	last int64 // the id of the last message that no relay can publish
}

// Run creates a failure every 15 s until ctx ends or there are 40, and returns nil. While the
// database is unavailable it waits.
func (t *Trouble) Run(ctx context.Context) error {
	tick := time.NewTicker(troubleEvery)
	defer tick.Stop()
	for t.made < mostTrouble {
		if err := t.step(ctx); err != nil && ctx.Err() == nil && !postgres.IsTransient(err) {
			return fmt.Errorf("create failures for the demo: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
	return nil
}

func (t *Trouble) step(ctx context.Context) error {
	aggregate := farAway + t.made
	err := postgres.InTx(ctx, t.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		future := event.Event{TenantID: t.Tenant, AggregateType: event.AggregateFollow, AggregateID: event.IDOf(aggregate), Type: "muted",
			Payload: []byte(`{"version": 1}`)}
		behind := future
		behind.Payload = []byte(`{"version": 2}`)
		return outbox.Append(ctx, tx, []event.Event{future, behind})
	})
	if err != nil {
		return err
	}
	if t.last > 0 && t.made%2 == 1 {
		err := outbox.KillWaiting(ctx, t.Pool, t.last, "demo", "its event type cannot be part of a subject")
		if err != nil && !errors.Is(err, outbox.ErrDue) && !errors.Is(err, outbox.ErrNotWaiting) {
			return err
		}
	}
	t.made++
	return t.Pool.QueryRow(ctx, unpublishableSQL, pgx.StrictNamedArgs{"tenant": t.Tenant, "type": event.AggregateFollow,
		"aggregate": event.IDOf(aggregate)}).Scan(&t.last)
}
