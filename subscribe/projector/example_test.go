package projector_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

const schema = `
CREATE TABLE IF NOT EXISTS posts (tenant_id bigint, post_id text, comments bigint NOT NULL, PRIMARY KEY (tenant_id, post_id))`

// count counts the new comments of each post. It writes through tx only.
func count(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
	var q pgx.Batch
	for i := range batch {
		if batch[i].Type != event.Created {
			continue
		}
		c, err := subscribe.Decode[event.Child](kinds.Builtin(), &batch[i])
		if err != nil {
			return err // Project parks this event, and applies the others
		}
		q.Queue(`INSERT INTO posts VALUES ($1, $2, 1) ON CONFLICT (tenant_id, post_id) DO UPDATE SET comments = posts.comments + 1`,
			batch[i].TenantID, c.Parent)
	}
	return tx.SendBatch(ctx, &q).Close()
}

func ExampleProject() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL")) // a database of yours
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	if err := projector.Migrate(ctx, pool); err != nil {
		panic(err)
	}
	if _, err := pool.Exec(ctx, schema); err != nil {
		panic(err)
	}
	nc, err := nats.Connect(os.Getenv("NATS_URL"), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort())
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	if err := projector.Project(ctx, nc, pool, "comments", count, subscribe.Only("comment")); err != nil {
		panic(err)
	}
}

// The states that the API exports come first, and then the events of the streams.
func ExampleBootstrap() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	nc, err := nats.Connect(os.Getenv("NATS_URL"))
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	c, err := client.New("http://localhost:8080", client.WithToken(os.Getenv("TOKEN"))) // of one tenant, with the role export
	if err != nil {
		panic(err)
	}
	clear := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `TRUNCATE follows`)
		return err
	}
	erase := func(ctx context.Context, tx pgx.Tx, tenant int64, person event.ID) error {
		_, err := tx.Exec(ctx, `DELETE FROM follows WHERE tenant_id = $1 AND $2 IN (follower, followee)`, tenant, person)
		return err
	}
	keep := func(ctx context.Context, tx pgx.Tx, batch []event.Event) error {
		var q pgx.Batch
		for i := range batch {
			e, err := subscribe.Decode[event.Edge](kinds.Builtin(), &batch[i])
			if err != nil {
				return err
			}
			q.Queue(`INSERT INTO follows VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (tenant_id, follower, followee) DO UPDATE
				SET created_at = excluded.created_at, version = excluded.version, active = excluded.active
				WHERE (follows.created_at, follows.version) < (excluded.created_at, excluded.version)`, // the newest state wins
				batch[i].TenantID, e.From, e.To, e.CreatedAt.Time, e.Version, e.Active())
		}
		return tx.SendBatch(ctx, &q).Close()
	}
	err = projector.Project(ctx, nc, pool, "follows", keep, subscribe.Only("follow"),
		projector.Bootstrap(clear, c), projector.Erased(erase))
	if err != nil {
		panic(err)
	}
}

func ExampleDeadLetters() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	letters, err := projector.DeadLetters(pool, "comments", count)
	if err != nil {
		panic(err)
	}
	for l, err := range letters.List(ctx, projector.LetterFilter{Consumer: "comments", First: true}, 100) { // one per aggregate
		if err != nil {
			panic(err)
		}
		done, err := letters.Retry(ctx, projector.LetterRequest{ID: l.ID, Actor: "ann", Reason: "the program is fixed"})
		if err != nil {
			panic(err)
		}
		fmt.Printf("post %s: applied %d, %d left\n", l.Event.AggregateID, done.Gone, done.Left)
	}
}

// The projection starts again with the oldest events. Running instances notice.
func ExampleReplay() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	err = projector.Replay(ctx, pool, "comments", func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `TRUNCATE posts`)
		return err
	})
	if err != nil {
		panic(err)
	}
}
