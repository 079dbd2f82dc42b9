package outbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// bookmark stores that a user bookmarked a post.
func bookmark(ctx context.Context, pool *pgxpool.Pool, tenant int64, user, post event.ID) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		state := struct {
			UserID  event.ID `json:"user_id"`
			PostID  event.ID `json:"post_id"`
			Version int64    `json:"version"`
		}{UserID: user, PostID: post}
		// First the state: another write of the same bookmark waits here for its lock.
		err := tx.QueryRow(ctx, `INSERT INTO bookmarks (tenant_id, user_id, post_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
			RETURNING version`,
			tenant, user, post).Scan(&state.Version)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // nothing changed, so nothing happened
		}
		if err != nil {
			return fmt.Errorf("user %s keeps post %s: %w", user, post, err)
		}
		payload, err := json.Marshal(state)
		if err != nil {
			return err
		}
		// Then append the new state as an event of the post.
		return outbox.Append(ctx, tx, []event.Event{{
			TenantID: tenant, AggregateType: "bookmark", AggregateID: post, Type: event.Created, Payload: payload,
		}})
	})
}

func ExampleAppend() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL")) // as the login of the upstream
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	if err := bookmark(ctx, pool, 1, "7", "42"); err != nil {
		panic(err)
	}
}

// A transaction of database/sql, with the outbox in a schema of its own.
func ExampleSchema_AppendSQL() {
	ctx := context.Background()
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		panic(err)
	}
	defer db.Close()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		panic(err)
	}
	defer func() { _ = tx.Rollback() }() // of no effect after Commit
	var version int64
	if err := tx.QueryRowContext(ctx, `UPDATE orders SET status = 'paid', version = version + 1 WHERE id = 7 RETURNING version`).
		Scan(&version); err != nil { // first the state, whose lock orders the events
		panic(err)
	}
	err = outbox.Schema("tidings").AppendSQL(ctx, tx, []event.Event{{TenantID: 1, AggregateType: "order", AggregateID: "7", Type: "paid",
		Payload: fmt.Appendf(nil, `{"id": 7, "status": "paid", "version": %d}`, version)}})
	if err != nil {
		panic(err)
	}
	if err := tx.Commit(); err != nil {
		panic(err)
	}
}

// TestTheExample runs the example of docs/upstream.md twice. It has no output that `go test` could
// compare.
func TestTheExample(t *testing.T) {
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	// The test of the page has a declaration.
	if _, err := owner.Exec(t.Context(), `CREATE TABLE bookmarks (tenant_id bigint, user_id text, post_id text,
		version bigint NOT NULL DEFAULT 1, PRIMARY KEY (tenant_id, user_id, post_id));
		GRANT SELECT, INSERT ON bookmarks TO tidings_writer;
		ALTER POLICY writer_appends ON outbox_messages WITH CHECK (true)`); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set("role", string(postgres.RoleWriter))
	u.RawQuery = q.Encode()
	t.Setenv("DATABASE_URL", u.String())
	ExampleAppend()
	ExampleAppend()
	rows, _ := owner.Query(t.Context(), `SELECT concat_ws(' ', tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload)
		FROM outbox_messages
		UNION ALL SELECT concat_ws(' ', 'bookmark', tenant_id, user_id, post_id, version) FROM bookmarks`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{`1 bookmark 42 created 1 {"post_id": "42", "user_id": "7", "version": 1}`, "bookmark 1 7 42 1"},
		got); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
}
