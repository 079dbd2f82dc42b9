package outbox

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestWhatCannotBePublishedIsNotAppended(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, c := range map[string]struct {
		field   string
		breakIt func(*event.Event)
	}{
		"a type that is not a token": {"event_type", func(e *event.Event) { e.Type = "a.b" }},
		"no aggregate type":          {"aggregate_type", func(e *event.Event) { e.AggregateType = "" }},
		"a trace with a line break":  {"trace_id", func(e *event.Event) { e.TraceParent = "a\r\nb" }},
		"a trace that is too long":   {"trace_id", func(e *event.Event) { e.TraceParent = strings.Repeat("x", 61<<10) }},
		"a time that no header has": {"occurred_at", func(e *event.Event) {
			e.OccurredAt = time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)
		}},
		"a version beyond the column": {"event_version", func(e *event.Event) { e.Version = math.MaxInt16 + 1 }},
		"a version below one":         {"event_version", func(e *event.Event) { e.Version = -1 }},
		"a payload that is too large": {"payload", func(e *event.Event) {
			e.Payload = []byte(`"` + strings.Repeat("x", MaxMessage) + `"`)
		}},
		"a payload that the table pads": {"payload", func(e *event.Event) {
			e.Payload = []byte(`[1` + strings.Repeat(",1", MaxMessage*2/5) + `]`)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bad := newEvent("1", `1`)
			c.breakIt(&bad)
			err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
				err := Append(t.Context(), tx, []event.Event{newEvent("1", `1`), bad})
				var invalid *event.InvalidError
				if !errors.As(err, &invalid) || invalid.Field != c.field || !strings.Contains(err.Error(), "2 of 2: "+c.field) {
					t.Errorf("got %v, want an error about %s of the second event", err, c.field)
				}
				return Append(t.Context(), tx, nil) // the transaction remains usable
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	if c := exchange(t, pool, Round{}); len(c.Rows) > 0 {
		t.Errorf("%d rows: want nothing written", len(c.Rows))
	}
}

func TestWhatWasAppendedIsFoundWhereverItHasMoved(t *testing.T) {
	const columns = `id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, ` +
		`attempts, event_id, inserted_at, slot`
	const toDLQ = `WITH gone AS (DELETE FROM outbox_messages RETURNING *) INSERT INTO outbox_messages_dlq (` + columns +
		`) SELECT ` + columns + ` FROM gone`
	const toArchive = `UPDATE outbox_messages SET processed_at = now(); UPDATE outbox_partitions SET floor_id = 50000000;
		SELECT outbox_range_archive(1, 0)`
	const taken = `WITH gone AS (DELETE FROM outbox_messages RETURNING *)
		INSERT INTO outbox_dlq_actions (actor, action, dlq_id, event_id, tenant_id, aggregate_type, aggregate_id, event_type)
		SELECT 'somebody', 'discard', id, event_id, tenant_id, aggregate_type, aggregate_id, event_type FROM gone`
	requeued := strings.ReplaceAll(ofTable(requeueSQL, TableOutbox), lostSQL, "true")
	for name, c := range map[string]struct {
		sql    string
		tenant int64
		want   bool
	}{
		"where it was written":                        {`SELECT`, 1, true},
		"published":                                   {`UPDATE outbox_messages SET processed_at = now()`, 1, true},
		"in the DLQ":                                  {toDLQ, 1, true},
		"in the archive":                              {toArchive, 1, true},
		"discarded from the DLQ":                      {taken, 1, true},
		"under a new id, by a repair":                 {requeued, 1, true},
		"not where its id was given to another":       {`UPDATE outbox_messages SET event_id = gen_random_uuid()`, 1, false},
		"not where it is not":                         {`DELETE FROM outbox_messages`, 1, false},
		"not by a tenant who does not see its tables": {`SELECT`, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			db := testkit.Postgres(t)
			api := db.Pool(t, postgres.RoleAPI)
			events := []event.Event{newEvent("1", `1`), newEvent("2", `2`)}
			appended := func(tenant int64, in bool) (there bool) {
				t.Helper()
				err := postgres.InTenant(t.Context(), api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
					if in {
						err = Append(t.Context(), tx, events)
					} else {
						there, err = Appended(t.Context(), tx, events)
					}
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				return there
			}
			appended(1, true)
			if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), c.sql); err != nil {
				t.Fatal(err)
			}
			if got := appended(c.tenant, false); got != c.want {
				t.Errorf("found: %t, want %t", got, c.want)
			}
		})
	}
}

// TestWhatIsAppendedCanBePublished appends the largest allowed events. Their text in the table is
// longer than the input.
func TestWhatIsAppendedCanBePublished(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fits := func(payload func(n int) string) (most string) {
		low, high := 1, MaxMessage
		for low+1 < high {
			n := (low + high) / 2
			e := newEvent("1", payload(n))
			if check(&e) == nil {
				low = n
			} else {
				high = n
			}
		}
		return payload(low)
	}
	events := appendRows(t, pool,
		newEvent("1", fits(func(n int) string { return `"` + strings.Repeat("x", n) + `"` })),
		newEvent("1", fits(func(n int) string { return `[1` + strings.Repeat(",1", n) + `]` })),
		newEvent("1", fits(func(n int) string {
			var members strings.Builder
			for i := range n / 8 {
				fmt.Fprintf(&members, `"%07d":1,`, i)
			}
			return `{` + members.String() + `"":1}`
		})))
	c := exchange(t, pool, Round{MaxBytes: 10 << 20})
	if len(c.Rows) != len(events) {
		t.Fatalf("claimed %d rows", len(c.Rows))
	}
	for i, r := range c.Rows {
		if err := r.Validate(1 << 20); err != nil || len(r.Payload) < MaxMessage*99/100 {
			t.Errorf("event %d, %d bytes of payload in the table: %v", i, len(r.Payload), err)
		}
	}
}

func TestATimeThatTheRelayCannotReadIsRefusedByTheTable(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleWriter)
	for _, at := range []string{"infinity", "-infinity", "10000-01-01 00:00:00Z", "0001-01-01 00:00:00Z BC", "9999-12-31 23:59:59Z",
		"0001-01-01 00:00:00Z"} {
		_, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload,
			occurred_at) VALUES (1, 'like', 42, 'created', '{}', $1::text::timestamptz)`, at)
		var refused *pgconn.PgError
		if good := strings.HasPrefix(at, "9") || at == "0001-01-01 00:00:00Z"; good && err != nil {
			t.Errorf("%s: %v", at, err)
		} else if !good && (!errors.As(err, &refused) || refused.ConstraintName != "outbox_messages_occurred_at_check") {
			t.Errorf("%s: %v, want an error", at, err)
		}
	}
	if c := exchange(t, db.Pool(t, postgres.RoleSystem), Round{}); len(c.Rows) != 2 {
		t.Errorf("claimed %v", c.Rows)
	}
}
