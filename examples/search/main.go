// Command search keeps a full-text index of comments in PostgreSQL. Arguments are words to find.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

const name = "search"

const schema = `
CREATE TABLE IF NOT EXISTS documents (
  tenant_id bigint, comment_id uuid, post_id text NOT NULL, author_id text NOT NULL, version bigint NOT NULL, body text NOT NULL,
  words tsvector GENERATED ALWAYS AS (to_tsvector('simple', body)) STORED, PRIMARY KEY (tenant_id, comment_id));
CREATE INDEX IF NOT EXISTS documents_words_idx ON documents USING gin (words);
CREATE TABLE IF NOT EXISTS activity (tenant_id bigint, post_id text, events bigint NOT NULL, PRIMARY KEY (tenant_id, post_id))`

// documentSQL keeps the newest state of a comment. Exports and repairs repeat events.
const documentSQL = `
INSERT INTO documents (tenant_id, comment_id, post_id, author_id, version, body) VALUES ($1, $2, $3, $4, $5, $6)
    ON CONFLICT (tenant_id, comment_id) DO UPDATE SET version = excluded.version, body = excluded.body
    WHERE documents.version < excluded.version`

// activitySQL counts messages, each exactly once.
const activitySQL = `
INSERT INTO activity VALUES ($1, $2, 1) ON CONFLICT (tenant_id, post_id) DO UPDATE SET events = activity.events + 1`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if len(os.Args) > 1 {
		return find(ctx, pool, strings.Join(os.Args[1:], " "))
	}
	nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.Name("search"), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort())
	if err != nil {
		return err
	}
	defer nc.Close()
	if err := projector.Migrate(ctx, pool); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		return err
	}
	opts := []subscribe.Option{subscribe.Only("comment"), subscribe.Takeover(2 * time.Second), projector.Erased(erase)}
	if api := os.Getenv("API_URL"); api != "" {
		c, err := client.New(api, client.WithToken(os.Getenv("API_TOKEN")))
		if err != nil {
			return err
		}
		opts = append(opts, projector.Bootstrap(clear, c))
	}
	return projector.Project(ctx, nc, pool, name, index, opts...)
}

// index applies events in the transaction that also stores the position on the stream.
func index(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
	var q pgx.Batch
	for i := range batch {
		c, err := subscribe.Decode[event.Child](kinds.Builtin(), &batch[i])
		if err != nil {
			return err // Project parks the event
		}
		if !c.Visible() {
			c.Body = "" // deleted, hidden or erased: remove its words
		}
		q.Queue(documentSQL, batch[i].TenantID, c.ID, c.Parent, c.AuthorID, c.Version, c.Body)
		if batch[i].Stream != "" { // a state of an export is no event
			q.Queue(activitySQL, batch[i].TenantID, c.Parent)
		}
	}
	return tx.SendBatch(ctx, &q).Close()
}
