//go:build faults

package outbox

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
)

// Writers reach an outbox through PgBouncer in transaction mode, which gives each transaction
// another session. No prepared statement and no setting of a session survives that.
func TestWritersGoThroughPgBouncer(t *testing.T) {
	db, schema := guest(t)
	through := db.ThroughPgBouncer(t)
	const writers, each = 8, 25
	want := 0
	for _, mode := range []string{"exec", "simple_protocol"} {
		u, err := url.Parse(through.URL)
		if err != nil {
			t.Fatal(err)
		}
		q := u.Query()
		q.Set("default_query_exec_mode", mode)
		u.RawQuery = q.Encode()
		pool, err := pgxpool.New(t.Context(), u.String())
		if err != nil {
			t.Fatal(err)
		}
		stdlib, err := sql.Open("pgx", u.String())
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for i := range each {
					events := []event.Event{{TenantID: 1, AggregateType: "order", AggregateID: event.ID(fmt.Sprint(w, i)[:1]), Type: "paid",
						Payload: json.RawMessage(`{"version": 1}`)}}
					if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
						return schema.Append(t.Context(), tx, events)
					}); err != nil {
						t.Errorf("pgx, %s: %v", mode, err)
						return
					}
					tx, err := stdlib.BeginTx(t.Context(), nil)
					if err == nil {
						err = errors.Join(schema.AppendSQL(t.Context(), tx, events), tx.Commit())
					}
					if err != nil || events[0].OutboxID == 0 {
						t.Errorf("database/sql, %s: %v", mode, err)
						return
					}
				}
			})
		}
		wg.Wait()
		pool.Close()
		if err := stdlib.Close(); err != nil {
			t.Error(err)
		}
		want += 2 * writers * each
	}
	var got int
	if err := db.Pool(t, postgres.RoleOwner).QueryRow(t.Context(), `SELECT count(*)
		FROM "our tidings".outbox_messages`).Scan(&got); err != nil || got != want {
		t.Errorf("%d events, %v; want %d", got, err, want)
	}
}
