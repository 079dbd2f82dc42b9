package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	tidingsevent "github.com/tidings/tidings/event"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/outbox"
)

// tidings is this repository: outbox.Append as docs/upstream.md has it, and the relay's binary. Two
// settings differ from the defaults: a lease ends after 2 s instead of 10 s (LEASE_TTL), and relays
// write no heartbeats, which would be events too.
var tidings = peer{
	name: "tidings", stream: "EVENTS-0", declares: true,
	prepare: func(ctx context.Context, _ *pgxpool.Pool, url string) error {
		_, err := migrations.Up(ctx, url, migrations.Truth, slog.Default())
		return err
	},
	append: func(*pgxpool.Pool) (func(context.Context, pgx.Tx, []event) error, error) {
		return func(ctx context.Context, tx pgx.Tx, events []event) error {
			all := make([]tidingsevent.Event, len(events))
			for i, e := range events {
				all[i] = tidingsevent.Event{TenantID: 1, AggregateType: "entity", AggregateID: tidingsevent.ID(e.Entity), Type: "updated",
					Payload: e.json()}
			}
			if err := outbox.Append(ctx, tx, all); err != nil {
				return fmt.Errorf("append: %w", err)
			}
			return nil
		}, nil
	},
	unpublished: `
		SELECT convert_to(payload::text, 'UTF8') FROM outbox_messages WHERE processed_at IS NULL
		UNION ALL SELECT convert_to(payload::text, 'UTF8') FROM outbox_messages_dlq`,
}
