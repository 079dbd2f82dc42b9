package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// naive is the outbox that most teams write first: a table with a flag, and a loop that polls,
// publishes and marks. It is written with care: Nats-Msg-Id deduplicates on the broker, the
// publishes of a batch are pipelined, an outage of the broker costs no attempts, and a row that the
// broker refuses five times is set aside. Two of these loops may run at once, as SKIP LOCKED
// suggests.
var naive = peer{
	name: "naive", stream: peerStream,
	prepare: func(ctx context.Context, pool *pgxpool.Pool, _ string) error {
		_, err := pool.Exec(ctx, naiveSchema)
		return err
	},
	append: func(*pgxpool.Pool) (func(context.Context, pgx.Tx, []event) error, error) {
		return func(ctx context.Context, tx pgx.Tx, events []event) error {
			payloads := make([]string, len(events))
			for i, e := range events {
				payloads[i] = string(e.json())
			}
			_, err := tx.Exec(ctx, naiveInsert, peerSubject, payloads)
			return err
		}, nil
	},
	unpublished: `SELECT convert_to(payload::text, 'UTF8') FROM naive_outbox WHERE sent_at IS NULL`,
	held: `
		WITH free AS (SELECT id FROM naive_outbox WHERE sent_at IS NULL FOR UPDATE SKIP LOCKED)
		SELECT convert_to(payload::text, 'UTF8') FROM naive_outbox WHERE sent_at IS NULL AND id NOT IN (SELECT id FROM free)`,
	relay: func(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, _ string) error {
		for ctx.Err() == nil {
			n, err := naiveRound(ctx, pool, js)
			if err != nil && ctx.Err() == nil {
				slog.Warn("round failed", "err", err)
				sleep(ctx, naiveBackoff)
			}
			if err == nil && n < naiveBatch {
				sleep(ctx, naivePoll)
			}
		}
		return nil
	},
}

const (
	naiveBatch    = 500
	naivePoll     = 10 * time.Millisecond
	naiveBackoff  = 200 * time.Millisecond
	naiveTimeout  = 5 * time.Second // for the acknowledgments of a batch
	naiveAttempts = 5
)

const naiveSchema = `
CREATE TABLE naive_outbox (
  id         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  message_id uuid        NOT NULL DEFAULT gen_random_uuid(),
  subject    text        NOT NULL,
  payload    jsonb       NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  sent_at    timestamptz,
  attempts   smallint    NOT NULL DEFAULT 0,
  last_error text
);
CREATE INDEX naive_outbox_pending ON naive_outbox (id) WHERE sent_at IS NULL`

const naiveInsert = `
INSERT INTO naive_outbox (subject, payload)
SELECT $1, p::jsonb FROM unnest($2::text[]) WITH ORDINALITY AS e(p, n) ORDER BY n`

const naiveClaim = `
SELECT id, message_id::text, subject, convert_to(payload::text, 'UTF8') FROM naive_outbox
 WHERE sent_at IS NULL AND attempts < $2 ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED`

const naiveRefused = `UPDATE naive_outbox SET attempts = attempts + 1, last_error = $2 WHERE id = $1`

// naiveRound publishes one batch in one transaction, which holds the rows' locks meanwhile. It
// returns the number of rows.
func naiveRound(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream) (n int, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		type row struct {
			ID        int64
			MessageID string
			Subject   string
			Payload   []byte
		}
		rows, _ := tx.Query(ctx, naiveClaim, naiveBatch, naiveAttempts)
		batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil || len(batch) == 0 {
			return err
		}
		n = len(batch)

		acks := make([]jetstream.PubAckFuture, len(batch))
		refused := make(map[int64]string)
		for i, r := range batch {
			m := &nats.Msg{Subject: r.Subject, Data: r.Payload, Header: nats.Header{nats.MsgIdHdr: {r.MessageID}}}
			acks[i], err = js.PublishMsgAsync(m)
			if errors.Is(err, nats.ErrMaxPayload) {
				refused[r.ID] = err.Error()
				continue
			}
			if err != nil {
				return fmt.Errorf("publish: %w", err)
			}
		}
		var sent []int64
		timeout := time.After(naiveTimeout)
		for i, r := range batch {
			if acks[i] == nil {
				continue
			}
			select {
			case <-acks[i].Ok():
				sent = append(sent, r.ID)
			case err := <-acks[i].Err():
				if _, answered := errors.AsType[*jetstream.APIError](err); !answered {
					return fmt.Errorf("publish: %w", err) // no answer: all rows again
				}
				refused[r.ID] = err.Error()
			case <-timeout:
				return errors.New("publish: no acknowledgment in time")
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if _, err := tx.Exec(ctx, `UPDATE naive_outbox SET sent_at = now() WHERE id = ANY($1)`, sent); err != nil {
			return err
		}
		for id, why := range refused {
			if _, err := tx.Exec(ctx, naiveRefused, id, why); err != nil {
				return err
			}
		}
		return nil
	})
	return n, err
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
