package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// watermillPeer is Watermill 1.5.1 with watermill-sql 4.1.2 and watermill-nats 2.1.3, all under the
// MIT license. It follows https://watermill.io/advanced/forwarder/, which asks for two things:
// "Your command uses a publisher working in a context of a database transaction", and "Forwarder
// component is running, using a database subscriber, and a message broker publisher". The page's
// example leaves all else at its default.
//
// Three settings differ from the defaults, in Watermill's favor. The subscriber polls every 10 ms
// instead of every second. The JetStream publisher sends each message's UUID as Nats-Msg-Id
// (TrackMsgId). Watermill's PoisonQueue middleware sets a message aside that is too large for the
// broker. Without it the Forwarder would try that message forever, and the others would wait.
var watermillPeer = peer{
	name: "watermill", stream: peerStream,
	modules: []string{"github.com/ThreeDotsLabs/watermill", "github.com/ThreeDotsLabs/watermill-sql/v4",
		"github.com/ThreeDotsLabs/watermill-nats/v2"},
	prepare: func(_ context.Context, pool *pgxpool.Pool, _ string) error {
		sub, err := watermillSubscriber(pool)
		if err != nil {
			return err
		}
		return errors.Join(sub.SubscribeInitialize(watermillTopic), sub.SubscribeInitialize(watermillPoison), sub.Close())
	},
	append: func(*pgxpool.Pool) (func(context.Context, pgx.Tx, []event) error, error) {
		return func(_ context.Context, tx pgx.Tx, events []event) error {
			inTx, err := wsql.NewPublisher(wsql.TxFromPgx(tx), wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}},
				watermill.NopLogger{})
			if err != nil {
				return err
			}
			messages := make([]*message.Message, len(events))
			for i, e := range events {
				messages[i] = message.NewMessage(watermill.NewUUID(), e.json())
			}
			return forwarder.NewPublisher(inTx, forwarder.PublisherConfig{ForwarderTopic: watermillTopic}).Publish(peerSubject, messages...)
		}, nil
	},
	unpublished: watermillWaiting + `
		UNION ALL SELECT convert_to(payload::text, 'UTF8') FROM "watermill_` + watermillPoison + `"`,
	// A Forwarder locks the offset while it forwards a batch.
	held: watermillWaiting + ` AND NOT EXISTS (SELECT FROM "watermill_offsets_` + watermillTopic + `" FOR UPDATE SKIP LOCKED)`,
	payload: func(b []byte) ([]byte, error) {
		var envelope struct{ Payload []byte }
		err := json.Unmarshal(b, &envelope)
		return envelope.Payload, err
	},
	relay: runForwarder,
}

const (
	watermillTopic  = "events_to_forward"
	watermillPoison = "poison"
)

// watermillWaiting selects the messages after the offset, which has the transaction and the number
// of the last one that was forwarded.
const watermillWaiting = `
SELECT convert_to(m.payload::text, 'UTF8') FROM "watermill_` + watermillTopic + `" m
 WHERE NOT EXISTS (SELECT FROM "watermill_offsets_` + watermillTopic + `" o
                    WHERE (m.transaction_id, m."offset") <= (o.last_processed_transaction_id, o.offset_acked))`

func watermillSubscriber(pool *pgxpool.Pool) (*wsql.Subscriber, error) {
	return wsql.NewSubscriber(wsql.BeginnerFromPgx(pool), wsql.SubscriberConfig{
		SchemaAdapter:    wsql.DefaultPostgreSQLSchema{},
		OffsetsAdapter:   wsql.DefaultPostgreSQLOffsetsAdapter{},
		PollInterval:     10 * time.Millisecond,
		InitializeSchema: true,
	}, watermill.NewSlogLogger(slog.Default()))
}

func runForwarder(ctx context.Context, pool *pgxpool.Pool, _ jetstream.JetStream, natsURL string) error {
	log := watermill.NewSlogLogger(slog.Default())
	sub, err := watermillSubscriber(pool)
	if err != nil {
		return err
	}
	pub, err := wnats.NewPublisher(wnats.PublisherConfig{
		URL: natsURL, NatsOptions: natsOptions(), Marshaler: &wnats.NATSMarshaler{},
		JetStream: wnats.JetStreamConfig{TrackMsgId: true},
	}, log)
	if err != nil {
		return fmt.Errorf("connect to NATS: %w", err)
	}
	aside, err := wsql.NewPublisher(wsql.BeginnerFromPgx(pool), wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, log)
	if err != nil {
		return err
	}
	poison, err := middleware.PoisonQueueWithFilter(aside, watermillPoison, func(err error) bool {
		return errors.Is(err, nats.ErrMaxPayload)
	})
	if err != nil {
		return err
	}
	fwd, err := forwarder.NewForwarder(sub, pub, log, forwarder.Config{
		ForwarderTopic: watermillTopic, Middlewares: []message.HandlerMiddleware{poison},
	})
	if err != nil {
		return err
	}
	return fwd.Run(ctx)
}
