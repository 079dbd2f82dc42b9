package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

// guest returns a database whose outbox is alone in the schema "our tidings", which no search_path
// contains.
func guest(t *testing.T) (db *testkit.DB, schema Schema) {
	db, schema = testkit.EmptyPostgres(t), "our tidings"
	if _, err := migrations.UpIn(t.Context(), db.URL, migrations.Outbox, string(schema), testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	return db, schema
}

// Append and AppendSQL write the same rows, in every mode of pgx.
func TestAppendAndAppendSQLWriteTheSame(t *testing.T) {
	db, schema := guest(t)
	events := func() []event.Event {
		return []event.Event{
			{TenantID: 1, AggregateType: "order", AggregateID: "a~1", Type: "paid", Payload: json.RawMessage(`{"n": 1.50, "s": "<é& "}`)},
			{TenantID: 9e15, AggregateType: "order", AggregateID: "2", Type: "paid", Version: 3, Payload: json.RawMessage(`null`),
				OccurredAt:  time.Date(1, 1, 1, 0, 0, 0, 1_999, time.UTC),
				TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
			{TenantID: 1, AggregateType: "order", AggregateID: "2", Type: "paid", Payload: json.RawMessage("[1e3,\n\t2]"),
				OccurredAt: time.Date(9999, 12, 31, 23, 59, 59, 999_999_999, time.FixedZone("", 0))},
		}
	}
	owner := db.Pool(t, postgres.RoleOwner)
	if _, err := owner.Exec(t.Context(), `ALTER POLICY writer_appends ON "our tidings".outbox_messages WITH CHECK (true)`); err != nil {
		t.Fatal(err)
	}
	var want []string
	for name, add := range map[string]func(t *testing.T, url string, events []event.Event) error{
		"pgx": func(t *testing.T, url string, events []event.Event) error {
			pool, err := pgxpool.New(t.Context(), url)
			if err != nil {
				return err
			}
			defer pool.Close()
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return schema.Append(t.Context(), tx, events) })
		},
		"database/sql": func(t *testing.T, url string, events []event.Event) error {
			pool, err := sql.Open("pgx", url)
			if err != nil {
				return err
			}
			tx, err := pool.BeginTx(t.Context(), nil)
			if err != nil {
				return errors.Join(err, pool.Close())
			}
			return errors.Join(schema.AppendSQL(t.Context(), tx, events), tx.Commit(), pool.Close())
		},
	} {
		for _, mode := range []string{"cache_statement", "describe_exec", "exec", "simple_protocol"} {
			t.Run(name+" "+mode, func(t *testing.T) {
				u, err := url.Parse(db.URL)
				if err != nil {
					t.Fatal(err)
				}
				q := u.Query()
				q.Set("role", string(postgres.RoleWriter))
				q.Set("default_query_exec_mode", mode)
				u.RawQuery = q.Encode()
				added := events()
				if err := add(t, u.String(), added); err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, e := range added {
					var text string
					if err := owner.QueryRow(context.WithoutCancel(t.Context()), `
						SELECT concat_ws('|', tenant_id, aggregate_type, aggregate_id,
						event_type, event_version, payload,
						CASE WHEN occurred_at BETWEEN now() - interval '1 day' AND now() THEN 'now' ELSE occurred_at::text END,
						coalesce(trace_id, 'NULL')) FROM "our tidings".outbox_messages
						WHERE id = $1 AND event_id = $2 AND slot = $3`,
						e.OutboxID, e.ID, e.Slot).Scan(&text); err != nil {
						t.Fatal(err)
					}
					got = append(got, text)
				}
				if want == nil {
					want = got
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("rows (-first +this):\n%s", diff)
				}
			})
		}
	}
	if len(want) != 3 || !strings.Contains(want[0], "now") {
		t.Errorf("%q", want)
	}
}

func TestAppendSQLLeavesTheTransactionUsableAfterAnInvalidEvent(t *testing.T) {
	pool := stdlib.OpenDBFromPool(testkit.Postgres(t).Pool(t, postgres.RoleWriter))
	defer func() { _ = pool.Close() }() // the pool of pgx has the connections
	tx, err := pool.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for field, e := range map[string]event.Event{
		"payload":    {TenantID: 1, AggregateType: "order", AggregateID: "1", Type: "paid", Payload: json.RawMessage(`{`)},
		"event_type": {TenantID: 1, AggregateType: "order", AggregateID: "1", Type: "is paid", Payload: json.RawMessage(`{}`)},
	} {
		good := event.Event{TenantID: 1, AggregateType: "order", AggregateID: "1", Type: "paid", Payload: json.RawMessage(`{}`)}
		err := AppendSQL(t.Context(), tx, []event.Event{good, e})
		if invalid, ok := errors.AsType[*event.InvalidError](err); !ok || invalid.Field != field {
			t.Errorf("%s: %v", field, invalid)
		}
	}
	if err := AppendSQL(t.Context(), tx, nil); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
}
