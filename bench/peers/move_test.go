package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/migrations"
)

// order is the payload of an event.
type order struct {
	ID      int64 `json:"id"`
	Version int64 `json:"version"`
}

// TestTheMoveFromWatermill runs the statements of docs/from-watermill.md forth and back, with
// Watermill's publisher and Forwarder. The relay is the test: it reads the rows of Tidings' outbox
// in their order, and marks them.
func TestTheMoveFromWatermill(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	page, err := os.ReadFile("../../docs/from-watermill.md")
	if err != nil {
		t.Fatal(err)
	}
	var blocks []string
	for _, b := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		blocks = append(blocks, b[1])
	}
	if len(blocks) != 4 {
		t.Fatalf("the page has %d blocks", len(blocks))
	}
	pool, js, natsURL := serversOfTheMove(t)
	if err := watermillPeer.prepare(t.Context(), pool, ""); err != nil {
		t.Fatal(err)
	}
	do := func(sql string) error {
		_, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		return err
	}
	if err := do(`CREATE TABLE orders AS SELECT id::bigint, 0::bigint AS version FROM generate_series(1, 3) AS id`); err != nil {
		t.Fatal(err)
	}
	until := func(what string, done func() (bool, error)) {
		t.Helper()
		if err := await(t.Context(), time.Minute, what, done); err != nil {
			t.Fatal(err)
		}
	}
	zero := func(query string) {
		t.Helper()
		until("answer 0 of "+query, func() (bool, error) {
			var n int
			err := pool.QueryRow(t.Context(), query).Scan(&n)
			return n == 0, err
		})
	}
	forward := func() (stop func()) {
		return inBackground(t, func(ctx context.Context) error { return runForwarder(ctx, pool, js, natsURL) })
	}
	var mu sync.Mutex
	written := map[int64]int64{}
	changed := func() {
		t.Helper()
		count := func() (n int64) {
			mu.Lock()
			defer mu.Unlock()
			for _, v := range written {
				n += v
			}
			return n
		}
		before := count()
		until("30 changes", func() (bool, error) { return count() >= before+30, nil })
	}
	stopWriter := inBackground(t, func(ctx context.Context) error {
		for id := int64(1); ctx.Err() == nil; id = id%3 + 1 {
			o := order{ID: id}
			if err := publishOrder(context.WithoutCancel(ctx), pool, &o); err != nil {
				return err
			}
			mu.Lock()
			written[id] = o.Version
			mu.Unlock()
			sleep(ctx, time.Millisecond)
		}
		return nil
	})

	stopForwarder := forward()
	changed()
	until("lock for the trigger", func() (bool, error) { // the page says to repeat it
		err := do(blocks[0])
		if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "55P03" {
			return false, err
		}
		return true, err
	})
	changed()
	zero(blocks[1])
	stopForwarder()
	all := onStream(t, js, 1)
	sent := uint64(len(all))
	changed()

	if err := do(blocks[2]); err != nil {
		t.Fatal(err)
	}
	changed()
	rows, _ := pool.Query(t.Context(), `
		WITH marked AS (UPDATE tidings.outbox_messages SET processed_at = now() WHERE processed_at IS NULL RETURNING *)
		SELECT id, aggregate_type || '/' || aggregate_id || '/' || event_type, payload FROM marked ORDER BY id`)
	moved, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
		Row     int64
		Name    string
		Payload order
	}])
	if err != nil || len(moved) < 30 {
		t.Fatalf("%d rows in Tidings, %v", len(moved), err)
	}
	for _, r := range moved {
		if r.Name != fmt.Sprintf("order/%d/paid", r.Payload.ID) {
			t.Fatalf("%+v", r)
		}
		all = append(all, r.Payload)
	}
	zero(blocks[3])
	stopForwarder = forward()
	stopWriter()
	zero(blocks[1])
	stopForwarder()
	all = append(all, onStream(t, js, sent+1)...)

	got := map[int64]int64{}
	for i, o := range all {
		if o.Version != got[o.ID]+1 {
			t.Fatalf("event %d of %d is version %d of order %d, after version %d", i, len(all), o.Version, o.ID, got[o.ID])
		}
		got[o.ID] = o.Version
	}
	if len(got) != 3 || fmt.Sprint(got) != fmt.Sprint(written) {
		t.Errorf("the last events are %v: want %v", got, written)
	}
}

// publishOrder changes an order and publishes that with Watermill, in one transaction.
func publishOrder(ctx context.Context, pool *pgxpool.Pool, o *order) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, `UPDATE orders SET version = version + 1 WHERE id = $1 RETURNING version`,
			o.ID).Scan(&o.Version); err != nil {
			return err
		}
		inTx, err := wsql.NewPublisher(wsql.TxFromPgx(tx), wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}},
			watermill.NopLogger{})
		if err != nil {
			return err
		}
		payload, err := json.Marshal(o)
		if err != nil {
			return err
		}
		return forwarder.NewPublisher(inTx, forwarder.PublisherConfig{ForwarderTopic: watermillTopic}).
			Publish("order.paid", message.NewMessage(watermill.NewUUID(), payload))
	})
}

// serversOfTheMove starts a database with the outbox in the schema tidings, and a broker with the
// stream of Watermill's messages.
func serversOfTheMove(t *testing.T) (*pgxpool.Pool, jetstream.JetStream, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "tidings-move-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // PostgreSQL runs as another user if root runs this
		t.Fatal(err)
	}
	server, err := pglocal.Start(t.Context(), pglocal.Config{Dir: filepath.Join(dir, "postgres"), Unsafe: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Abort() })
	url, err := newDatabase(t.Context(), server, "shop")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := migrations.UpIn(t.Context(), url, migrations.Outbox, "tidings", slog.Default()); err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	b, err := startBroker(dir, false, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.kill)
	nc, err := nats.Connect(b.url, natsOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: peerStream, Subjects: []string{"order.>"}}); err != nil {
		t.Fatal(err)
	}
	return pool, js, b.url
}

// onStream returns the orders on Watermill's stream from a sequence on.
func onStream(t *testing.T, js jetstream.JetStream, from uint64) (all []order) {
	t.Helper()
	s, err := js.Stream(t.Context(), peerStream)
	if err != nil {
		t.Fatal(err)
	}
	for seq := from; seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		var o order
		if err := json.Unmarshal(m.Data, &o); err != nil || !strings.HasPrefix(m.Subject, "order.") {
			t.Fatalf("%s: %s, %v", m.Subject, m.Data, err)
		}
		all = append(all, o)
	}
	return all
}

// inBackground runs fn until stop or the end of the test. Its error fails the test.
func inBackground(t *testing.T, fn func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}
