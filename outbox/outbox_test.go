package outbox

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func appendRows(t *testing.T, pool *pgxpool.Pool, events ...event.Event) []event.Event {
	t.Helper()
	err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return Append(t.Context(), tx, events) })
	if err != nil {
		t.Fatal(err)
	}
	return events
}

func newEvent(aggregate int64, payload string) event.Event {
	return event.Event{TenantID: 1, AggregateType: "post", AggregateID: aggregate, Type: "created", Payload: json.RawMessage(payload)}
}

func everything() (partitions []int) {
	for p := range event.Partitions {
		partitions = append(partitions, p)
	}
	return partitions
}

func TestWhatIsAppendedIsClaimedInItsOrder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent(1, `{"n": 1}`), newEvent(1, `{"n": 2}`), newEvent(1, `{"n": 3}`))
	batches, err := Claim(t.Context(), pool, everything(), 10, 1<<20, 1<<20)
	if err != nil || len(batches) != 1 {
		t.Fatalf("got %d batches, %v", len(batches), err)
	}
	b := batches[0]
	if b.More || len(b.Held) > 0 || b.Partition != in[0].Partition {
		t.Errorf("got %+v", b)
	}
	for i, r := range b.Rows {
		got, want := r.Event, in[i]
		if want.OutboxID != in[0].OutboxID+int64(i) || want.ID == "" {
			t.Errorf("Append filled in %+v", want)
		}
		got.OccurredAt = want.OccurredAt
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("row %d (-appended +claimed):\n%s", i, diff)
		}
	}
}

func TestAClaimIsBoundedByRowsAndBytesWithoutGaps(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	big := `"` + strings.Repeat("x", 998) + `"`
	var in []event.Event
	for range 10 {
		in = append(in, newEvent(1, big))
	}
	in = append(in, newEvent(1, `1`))
	appendRows(t, pool, in...)
	for name, c := range map[string]struct {
		limit, bytes, total, want int
		more                      bool
	}{
		"everything fits":            {11, 1 << 20, 1 << 20, 11, true}, // the limit is met, so there may be more
		"more room than rows":        {12, 1 << 20, 1 << 20, 11, false},
		"by rows":                    {4, 1 << 20, 1 << 20, 4, true},
		"by bytes of the partition":  {20, 3500, 1 << 20, 3, true},
		"one row over the bytes":     {20, 10, 1 << 20, 1, true},
		"by the bytes of all claims": {20, 1 << 20, 1500, 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			batches, err := Claim(t.Context(), pool, everything(), c.limit, c.bytes, c.total)
			if err != nil || len(batches) != 1 || len(batches[0].Rows) != c.want || batches[0].More != c.more {
				t.Fatalf("got %d rows, more %t, %v; want %d, %t", len(batches[0].Rows), batches[0].More, err, c.want, c.more)
			}
			for i, r := range batches[0].Rows {
				if r.OutboxID != in[0].OutboxID+int64(i) && r.OutboxID != batches[0].Rows[0].OutboxID+int64(i) {
					t.Errorf("row %d has id %d: a row before it was left out", i, r.OutboxID)
				}
			}
		})
	}
}

func TestAFailureIsCountedOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent(1, `1`))
	batches, err := Claim(t.Context(), pool, everything(), 10, 1<<20, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	failures := []Failure{{Row: batches[0].Rows[0], Error: "no"}}
	if putOff, dead, err := Fail(t.Context(), pool, failures); putOff != 1 || dead != 0 || err != nil {
		t.Fatalf("got %d, %d, %v", putOff, dead, err)
	}
	if putOff, dead, err := Fail(t.Context(), pool, failures); putOff != 0 || dead != 0 || err != nil {
		t.Errorf("a second relay with the same claim counted again: %d, %d, %v", putOff, dead, err)
	}
}

func TestAMarkWithAnotherTailMarksNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent(1, `1`))[0]
	mark := func(old, next uint64, eventID string) ([]int, error) {
		return MarkPublished(t.Context(), pool, 1, []Mark{{Partition: in.Partition, OldTail: old, NewTail: next,
			Rows: []Published{{ID: in.OutboxID, EventID: eventID, Seq: next}}}})
	}
	if held, err := mark(5, 6, in.ID); err != nil || len(held) != 0 {
		t.Errorf("another tail: %v, %v", held, err)
	}
	if held, err := mark(0, 6, "00000000-0000-4000-8000-000000000000"); err == nil {
		t.Errorf("another event with the row's id was marked: %v", held)
	}
	if tail, _, err := Tail(t.Context(), pool, in.Partition); err != nil || tail != 0 {
		t.Fatalf("the tail moved to %d (%v)", tail, err)
	}
	if held, err := mark(0, 6, in.ID); err != nil || len(held) != 1 {
		t.Errorf("the right mark: %v, %v", held, err)
	}
	var seq int64
	if err := pool.QueryRow(t.Context(), `SELECT stream_seq FROM outbox_messages WHERE processed_at IS NOT NULL`).Scan(&seq); err != nil || seq != 6 {
		t.Errorf("stream_seq is %d (%v)", seq, err)
	}
}

func TestTheSpecsInsertWorksAndPartitionsAreStable(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleWriter)
	var partition int
	var delayed bool
	if err := pool.QueryRow(t.Context(), `
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
		VALUES (1, 'Order', 42, 'OrderConfirmed', '{}', 'trace') RETURNING partition, delayed`).Scan(&partition, &delayed); err != nil {
		t.Fatal(err)
	}
	if partition != 25 || delayed { // md5("1/Order/42") begins with 79, and 0x79 & 31 is 25
		t.Errorf("partition %d, delayed %t: want 25, false. A partition that changes breaks the order of every aggregate.", partition, delayed)
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{
		"append": appendSQL, "appended": appendedSQL, "claim": claimSQL, "park": parkSQL, "release": releaseSQL, "fail": failSQL, "mark": markSQL,
		"tail": tailSQL, "stream": streamSQL, "bind": bindSQL, "stats": statsSQL, "last id": lastIDSQL, "lock floors": lockFloorsSQL, "raise floors": raiseFloorsSQL, "below floor": belowFloorSQL, "lower floors": lowerFloorsSQL, "fence": fenceSQL, "published": countPublishedSQL,
		"list DLQ": listDLQSQL, "count DLQ": countDLQSQL, "get of DLQ": getDLQSQL, "retry": retryDLQSQL, "discard": discardDLQSQL,
		"slice": sliceSQL, "cursor": cursorSQL, "move cursor": moveCursorSQL, "plan": planSQL, "months": monthsSQL, "make month": makeMonthSQL,
		"drop month": dropMonthSQL, "bound locks": boundLocksSQL, "trim default": trimDefaultSQL, "count default": countDefaultSQL,
		"sweep end": sweepEndSQL, "sweep": sweepOutboxSQL, "sweep of DLQ": sweepDLQSQL, "sweep of archive": sweepArchiveSQL, "pending of": pendingOfSQL,
		"redact": redactSQLOf(TableOutbox), "redact in DLQ": redactSQLOf(TableDLQ), "redact in archive": redactSQLOf(TableArchive),
		"unmark": strings.ReplaceAll(unmarkSQL, "{table}", TableOutbox), "unmark in archive": strings.ReplaceAll(unmarkSQL, "{table}", TableArchive),
		"find by id": archiveRow + byID, "find by event": dlqRow + byEvent, "find by recent event": outboxRow + byRecentEvent,
		"find by aggregate": archiveRow + byAggregate, "find by aggregate in the DLQ": dlqRow + dlqByAggregate, "find by time": archiveRow + byTime, "find by range": outboxRow + byIDRange,
		"probe": probeSQL, "edges": edgesSQL, "lock holds": lockHoldsSQL,
		"add hold": addHoldSQL, "list holds": listHoldsSQL, "release hold": releaseHoldSQL, "held whole": heldWholeSQL,
		"walk archive": walkArchiveSQL, "count archive": countArchiveSQL, "next archived": nextArchivedSQL, "no month": noMonthSQL, "restore archive": restoreArchiveSQL, "canonical archive": canonicalArchiveSQL,
	} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
}

func TestAClaimWalksThePendingIndexAndMeetsNoDelayedRow(t *testing.T) {
	for name, processed := range map[string]string{"most are published": "n % 10 > 0", "none is published": "false"} {
		t.Run(name, func(t *testing.T) {
			db := testkit.Postgres(t)
			owner := db.Pool(t, postgres.RoleOwner)
			if _, err := owner.Exec(t.Context(), `
				INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, processed_at)
				SELECT 1, 'post', n, 'created', '{}', CASE WHEN n % 3 = 0 THEN now() + interval '1 day' ELSE now() END, CASE WHEN `+processed+` THEN now() END
				  FROM generate_series(1, 60000) n`); err != nil {
				t.Fatal(err)
			}
			if _, err := owner.Exec(t.Context(), `ANALYZE outbox_messages`); err != nil {
				t.Fatal(err)
			}
			pool := db.Pool(t, postgres.RoleSystem)
			for what, q := range map[string]struct {
				sql  string
				args pgx.StrictNamedArgs
			}{
				"claim": {claimSQL, pgx.StrictNamedArgs{"partitions": []int16{1, 2, 3}, "limit": 50}},
				"raise": {raiseFloorsSQL, pgx.StrictNamedArgs{"partitions": []int16{1, 2, 3}, "last": 60000}},
				"below": {belowFloorSQL, pgx.StrictNamedArgs{"partitions": []int16{1, 2, 3}, "depth": belowFloorDepth}},
				"stats": {statsSQL, pgx.StrictNamedArgs{"bound": 1000, "partitions": event.Partitions, "sample": 100}},
			} {
				rows, _ := pool.Query(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) "+q.sql, pgx.QueryExecModeExec, q.args)
				lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
				if err != nil {
					t.Fatal(err)
				}
				plan := strings.Join(lines, "\n")
				// (The stats may sort the few rows that are put off when they are few.)
				if !strings.Contains(plan, "using outbox_messages_pending_idx") || what != "stats" && strings.Contains(plan, "Sort") || strings.Contains(plan, "Seq Scan on outbox_messages ") ||
					what != "stats" && strings.Contains(plan, "outbox_messages_pkey") || strings.Contains(plan, "Rows Removed by Filter") {
					t.Errorf("%s meets rows that it throws away, or sorts:\n%s", what, plan)
				}
			}
		})
	}
}
