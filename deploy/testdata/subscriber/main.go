// Command subscriber reads events as a program outside Tidings does. The test of an upgrade builds
// it with the packages of each release.
//
//	subscriber handle    prints the id of each event of a follow
//	subscriber project   writes the id of every event, and RELEASE, to the table seen
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, how string) error {
	nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.CustomInboxPrefix(os.Getenv("NATS_INBOX_PREFIX")), nats.MaxReconnects(-1),
		nats.IgnoreAuthErrorAbort())
	if err != nil {
		return err
	}
	defer nc.Close()
	if how == "handle" {
		return subscribe.Handle(ctx, nc, "svc", "follow.*", func(_ context.Context, e subscribe.Event[event.Edge]) error {
			_, err := fmt.Println(e.ID)
			return err
		}, subscribe.Takeover(2*time.Second))
	}
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := projector.Migrate(ctx, pool); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, `CREATE TABLE IF NOT EXISTS seen (event_id uuid PRIMARY KEY, release text NOT NULL)`); err != nil {
		return err
	}
	return projector.Project(ctx, nc, pool, "svc", func(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
		for _, e := range batch {
			if _, err := tx.Exec(ctx, `INSERT INTO seen VALUES ($1, $2)`, e.ID, os.Getenv("RELEASE")); err != nil {
				return err
			}
		}
		return nil
	}, subscribe.Takeover(2*time.Second))
}
