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
	mostTrouble  = 40      // then there is enough to show
	farAway      = 1 << 40 // aggregates from here on are of nobody, so trouble holds nobody's events back
)

// unpublishableSQL is a writer by SQL who calls an event by a name that no subject can have.
// Index: outbox_messages_pkey.   Locks: none but the new row.
const unpublishableSQL = `
INSERT /* demo.unpublishable */ INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
VALUES (@tenant, @type, @aggregate, 'not a token', '{}') RETURNING id`

// Trouble makes what goes wrong elsewhere: events that no consumer understands, with others behind them, and messages that no relay can publish, of which every second one is given
// up. It writes to the database itself, as the role system, so it is for a dev alone. Nothing of it comes to rest by itself.
type Trouble struct {
	Pool   *pgxpool.Pool
	Tenant int64

	made, last int64 // of what kind; the message that no relay can publish
}

// Run makes some now and then until ctx ends or there is enough of it, and returns nil. While the database is away it waits.
func (t *Trouble) Run(ctx context.Context) error {
	tick := time.NewTicker(troubleEvery)
	defer tick.Stop()
	for t.made < mostTrouble {
		if err := t.step(ctx); err != nil && ctx.Err() == nil && !postgres.IsTransient(err) {
			return fmt.Errorf("make trouble: %w", err)
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
		future := event.Event{TenantID: t.Tenant, AggregateType: event.AggregateFollow, AggregateID: aggregate, Type: "muted", Payload: []byte(`{"version": 1}`)}
		behind := future
		behind.Payload = []byte(`{"version": 2}`)
		return outbox.Append(ctx, tx, []event.Event{future, behind})
	})
	if err != nil {
		return err
	}
	if t.last > 0 && t.made%2 == 1 {
		err := outbox.KillWaiting(ctx, t.Pool, t.last, "demo", "no subject can have its name")
		if err != nil && !errors.Is(err, outbox.ErrDue) && !errors.Is(err, outbox.ErrNotWaiting) {
			return err
		}
	}
	t.made++
	return t.Pool.QueryRow(ctx, unpublishableSQL, pgx.StrictNamedArgs{"tenant": t.Tenant, "type": event.AggregateFollow, "aggregate": aggregate}).Scan(&t.last)
}
