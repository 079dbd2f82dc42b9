package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// incompressible is a text too long for an entry of an index.
const incompressible = `(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) n)`

// extremes are values of each column that a writer may set.
var extremes = map[string][]string{
	"tenant_id":      {`-9223372036854775808`, `-1`, `0`, `9223372036854775807`},
	"aggregate_type": {`''`, `'no token'`, `'heartbeat'`, `E'\n'`, `repeat('x', 1000)`, `repeat('x', 1000000)`, incompressible},
	"aggregate_id":   {`''`, `'a b'`, `E'\n'`, `'..'`, `'+7:a.b@example.com|~=_-'`, `repeat('x', 128)`, `repeat('x', 129)`, incompressible},
	"event_type":     {`''`, `'*'`, `'>'`, `'a.b'`, `repeat('x', 1000)`, `repeat('x', 1000000)`, incompressible},
	"event_version":  {`-32768`, `0`, `32767`},
	"payload": {`'null'`, `'"text"'`, `'1e1000'`, `('"' || repeat('x', 8000000) || '"')::jsonb`,
		`('"' || repeat('x', 9000000) || '"')::jsonb`, `(repeat('[', 3000) || repeat(']', 3000))::jsonb`},
	"occurred_at": {`'-infinity'`, `'infinity'`, `'4713-01-01 BC'`, `'0001-01-01 00:00:00Z'`, `'9999-12-31 23:59:59.999999Z'`},
	"available_at": {`'-infinity'`, `'infinity'`, `'4713-01-01 BC'`, `now() - interval '1 microsecond'`, `now() + interval '1 microsecond'`,
		`now() + interval '366 days' - interval '1 microsecond'`, `now() + interval '366 days'`},
	"trace_id": {`''`, `E'\u0001'`, `repeat('x', 60000)`, `repeat('x', 65536)`, `repeat('x', 65537)`, `repeat('x', 10000000)`},
}

// TestNoRowStopsItsPartition: a writer sets each column to extremes. Whatever the table takes is
// published or ends in the DLQ, now and a year later, and the relay continues with the other rows
// meanwhile.
func TestNoRowStopsItsPartition(t *testing.T) {
	db := testkit.Postgres(t)
	system, writer, b := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleWriter), testkit.NATS(t)
	ctx := t.Context()
	// Without declarations: the rules of the table alone must hold.
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, `ALTER POLICY writer_appends ON outbox_messages WITH CHECK (true)`); err != nil {
		t.Fatal(err)
	}

	rows, _ := system.Query(ctx, `SELECT attname::text FROM pg_attribute WHERE attrelid = 'outbox_messages'::regclass AND attnum > 0
		AND has_column_privilege('tidings_writer', attrelid, attnum, 'INSERT') ORDER BY attnum`)
	columns, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range columns {
		if len(extremes[c]) == 0 {
			t.Errorf("a writer may set %s: give the test its extremes", c)
		}
	}
	if len(columns) != len(extremes) {
		t.Errorf("a writer may set %d columns, the test has %d", len(columns), len(extremes))
	}

	aggregate := 0
	appendRow := func(q interface {
		QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	}, values map[string]string) error {
		var names, all []string
		for name, v := range values {
			names, all = append(names, name), append(all, v)
		}
		var id int64
		return q.QueryRow(ctx, `INSERT INTO outbox_messages (`+strings.Join(names, ", ")+`)
			VALUES (`+strings.Join(all, ", ")+`) RETURNING id`).Scan(&id)
	}
	var taken []string
	for _, column := range columns {
		for _, value := range extremes[column] {
			for _, eventType := range []string{`'created'`, `'not a token'`} { // of a row that is published, and of one that fails
				aggregate++
				row := map[string]string{"tenant_id": "1", "aggregate_type": "'post'", "aggregate_id": fmt.Sprint(aggregate),
					"payload": "'{}'"}
				later := map[string]string{"event_type": "'edited'"}
				row["event_type"] = eventType
				row[column] = value
				for _, name := range []string{"tenant_id", "aggregate_type", "aggregate_id", "payload"} {
					later[name] = row[name]
				}
				// The later row of the aggregate is of a transaction that began earlier.
				earlier, err := writer.Begin(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if err := appendRow(writer, row); err != nil {
					if _, refused := errors.AsType[*pgconn.PgError](err); !refused {
						t.Errorf("%s = %s: %v", column, value, err)
					}
					if err := earlier.Rollback(ctx); err != nil {
						t.Fatal(err)
					}
					continue
				}
				taken = append(taken, column+" = "+value)
				if err := errors.Join(appendRow(earlier, later), earlier.Commit(ctx)); err != nil {
					t.Fatalf("the row behind %s = %s: %v", column, value, err)
				}
			}
		}
	}
	t.Logf("the table takes %d rows: %s", len(taken), strings.Join(taken, "; "))

	start(t, newRelay(t, system, b))
	others := func(when string) {
		t.Helper()
		aggregate++
		id := insertRow(t, writer, int64(aggregate), "created")
		testkit.Eventually(t, "another row to be published "+when, func() (published bool, err error) {
			err = system.QueryRow(ctx, `SELECT processed_at IS NOT NULL FROM outbox_messages WHERE id = $1`, id).Scan(&published)
			return published, err
		})
	}
	exec := func(sql string) {
		t.Helper()
		testkit.Eventually(t, "the rows to change", func() (bool, error) { // not in a deadlock with the relay
			_, err := system.Exec(ctx, sql)
			return err == nil, err
		})
	}
	others("beside the extremes")
	testkit.Eventually(t, "every other row to be published, delayed or dead", func() (done bool, err error) {
		err = system.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL AND NOT delayed)`).Scan(&done)
		return done, err
	})
	exec(`UPDATE outbox_messages SET inserted_at = inserted_at - interval '367 days', available_at = available_at - interval '367 days'
		WHERE processed_at IS NULL`)
	others("a year later")
	testkit.Eventually(t, "every row that fails to wait for another attempt", func() (done bool, err error) {
		err = system.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM outbox_messages
			WHERE processed_at IS NULL AND available_at <= now())`).Scan(&done)
		return done, err
	})
	waiting, err := postgres.Collect(outbox.ListWaiting(ctx, system, outbox.WaitingFilter{}, -1))
	if err != nil || len(waiting) == 0 {
		t.Errorf("%d rows are waiting, %v", len(waiting), err)
	}
	for _, m := range waiting {
		if m.Behind == 0 && (m.Attempts == 0 || m.DueIn > 5*time.Minute) {
			t.Errorf("message %d is due in %s after %d attempts", m.OutboxID, m.DueIn, m.Attempts)
		}
	}
	testkit.Eventually(t, "every row to be published or dead", func() (done bool, err error) {
		exec(fmt.Sprintf(`UPDATE outbox_messages SET attempts = %d, available_at = inserted_at + interval '1 microsecond'
			WHERE processed_at IS NULL AND behind IS NULL AND delayed`, outbox.MaxAttempts))
		err = system.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM outbox_messages WHERE processed_at IS NULL)`).Scan(&done)
		return done, err
	})
	others("after the last attempts")
}
