package outbox

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// made is the creation time of partition 0's stream.
var made = time.Date(2026, 5, 1, 12, 0, 0, 123456000, time.UTC)

// bound returns a pool on a database whose partition 0 has a stream.
func bound(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if err := Bind(t.Context(), pool, 0, "EVENTS-0", made); err != nil {
		t.Fatal(err)
	}
	return pool
}

func markOf(old, next uint64, rows ...Published) *Mark {
	return &Mark{Created: made, OldTail: old, NewTail: next, Rows: rows}
}

func published(e event.Event, seq uint64) Published {
	return Published{ID: e.OutboxID, EventID: e.ID, Seq: seq}
}

func tailOf(t *testing.T, pool *pgxpool.Pool, partition int) (tail, floor int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT tail_seq, floor_id FROM outbox_partitions WHERE partition = $1`,
		partition).Scan(&tail, &floor); err != nil {
		t.Fatal(err)
	}
	return tail, floor
}

func TestAMarkRecordsWhatWasPublishedWithTheNextClaim(t *testing.T) {
	pool := bound(t)
	in := appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`), newEvent("1", `3`))
	mark := markOf(0, 2, published(in[0], 1), published(in[1], 2))
	mark.Floor = in[1].OutboxID
	c := checkClaimed(t, pool, Round{Mark: mark}, in[2].OutboxID)
	if c.Tail != 2 || c.Sample.XID == 0 || c.Sample.LastID != in[2].OutboxID {
		t.Errorf("the round found %+v", c)
	}
	if tail, floor := tailOf(t, pool, 0); tail != 2 || floor != in[1].OutboxID {
		t.Errorf("tail %d, floor %d", tail, floor)
	}
	if got := scalar[[]int64](t, pool, `SELECT array_agg(partition::bigint * 100 + stream_seq ORDER BY id) FROM outbox_messages
		WHERE processed_at IS NOT NULL`); !cmp.Equal(got, []int64{1, 2}) {
		t.Errorf("partition and sequence are %v", got)
	}
	exchange(t, pool, Round{Mark: markOf(2, 3, published(in[2], 3))}) // a mark without a floor
	if tail, floor := tailOf(t, pool, 0); tail != 3 || floor != in[1].OutboxID {
		t.Errorf("tail %d, floor %d", tail, floor)
	}
}

func TestAMarkThatDoesNotFitRecordsNothing(t *testing.T) {
	pool := bound(t)
	in := appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`))
	other := published(in[1], 2)
	other.EventID = "00000000-0000-4000-8000-000000000000"
	recreated := markOf(0, 1, published(in[0], 1))
	recreated.Created = made.Add(time.Microsecond)
	for name, mark := range map[string]*Mark{
		"another tail":                  markOf(5, 6, published(in[0], 6)),
		"another event of the row's id": markOf(0, 2, published(in[0], 1), other),
		"a row twice":                   markOf(0, 2, published(in[0], 1), published(in[0], 2)),
		"another stream":                recreated,
	} {
		if _, err := Exchange(t.Context(), pool, withRoom(Round{Mark: mark})); !errors.Is(err, ErrMarkFailed) {
			t.Errorf("%s: %v, want ErrMarkFailed", name, err)
		}
	}
	if tail, _ := tailOf(t, pool, 0); tail != 0 {
		t.Errorf("the tail moved to %d", tail)
	}
	checkClaimed(t, pool, Round{Mark: markOf(0, 1, published(in[0], 1))}, in[1].OutboxID)
	if _, err := Exchange(t.Context(), pool, withRoom(Round{Mark: markOf(1, 2, published(in[0], 2))})); !errors.Is(err, ErrMarkFailed) {
		t.Errorf("a row that was marked before: %v, want ErrMarkFailed", err)
	}
	exec(t, pool, `UPDATE outbox_partitions SET closing = true, final_seq = 1`)
	if _, err := Exchange(t.Context(), pool, withRoom(Round{Mark: markOf(1, 2, published(in[1], 2))})); !errors.Is(err, ErrMarkFailed) {
		t.Errorf("a closed partition: %v, want ErrMarkFailed", err)
	}
	if c := exchange(t, pool, Round{}); !c.Closed || !c.Closing {
		t.Errorf("the claim does not report the closed partition: %+v", c)
	}
}

func TestACatchUpMarksWhatItReadAndKeepsTheFirstOfEachEvent(t *testing.T) {
	pool := bound(t)
	in := appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`), newEvent("1", `3`), newEvent("2", `4`), newEvent("3", `5`))
	exchange(t, pool, Round{Mark: markOf(0, 1, published(in[0], 1))})
	exec(t, pool, `WITH d AS (DELETE FROM outbox_messages WHERE id = $1 RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
		inserted_at, slot FROM d`, in[3].OutboxID)
	read := *markOf(1, 6, published(in[1], 2), published(in[0], 3), published(in[1], 4), published(in[3], 5), published(in[2], 6))
	repeated, err := MarkCaughtUp(t.Context(), pool, 0, read)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]uint64{3, 4, 5}, repeated); diff != "" { // one marked before, one twice, one dead
		t.Errorf("repeated (-want +got):\n%s", diff)
	}
	if got := scalar[[]int64](t, pool,
		`SELECT array_agg(stream_seq ORDER BY id) FROM outbox_messages WHERE processed_at IS NOT NULL`); !cmp.Equal(got, []int64{1, 2, 6}) {
		t.Errorf("sequences are %v", got)
	}
	if tail, _ := tailOf(t, pool, 0); tail != 6 {
		t.Errorf("the tail is %d", tail)
	}

	// A relay that was frozen publishes the dead message, which an operator has meanwhile
	// discarded.
	dlq, request := NewDLQ(pool, nil), DLQRequest{DLQFilter: DLQFilter{IDs: []int64{in[3].OutboxID}}, Limit: 1, Actor: "ann"}
	if did, err := dlq.Discard(t.Context(), request); err != nil || len(did) != 1 {
		t.Fatalf("discarded %v, %v", did, err)
	}
	repeated, err = MarkCaughtUp(t.Context(), pool, 0, *markOf(6, 7, published(in[3], 7)))
	if err != nil || !cmp.Equal(repeated, []uint64{7}) {
		t.Errorf("a message that left the DLQ: repeated %v, %v", repeated, err)
	}

	if _, err := MarkCaughtUp(t.Context(), pool, 0, *markOf(1, 7, published(in[4], 7))); !errors.Is(err, ErrMarkFailed) {
		t.Errorf("from another tail: %v, want ErrMarkFailed", err)
	}
	lost := Published{ID: 99, EventID: "00000000-0000-4000-8000-000000000000", Seq: 9}
	if _, err := MarkCaughtUp(t.Context(), pool, 0, *markOf(7, 9, published(in[4], 8), lost)); !errors.Is(err, ErrRowsMissing) {
		t.Errorf("a message without a row: %v, want ErrRowsMissing", err)
	}
	lost.ID = in[4].OutboxID // another event has the id now
	if _, err := MarkCaughtUp(t.Context(), pool, 0, *markOf(7, 9, lost)); !errors.Is(err, ErrRowsMissing) {
		t.Errorf("a message whose id another row has: %v, want ErrRowsMissing", err)
	}
	if tail, _ := tailOf(t, pool, 0); tail != 7 {
		t.Errorf("the tail moved to %d", tail)
	}
	if repeated, err := MarkCaughtUp(t.Context(), pool, 0, *markOf(7, 9)); err != nil || repeated != nil { // only foreign messages
		t.Errorf("a catch-up without messages of ours: %v, %v", repeated, err)
	}
	checkClaimed(t, pool, Round{}, in[4].OutboxID)
}

// TestMarksTouchNoIndex: an update that is not heap-only adds an entry to each index. A held
// snapshot keeps all these entries.
func TestMarksTouchNoIndex(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	if err := Bind(t.Context(), pool, 0, "EVENTS-0", made); err != nil {
		t.Fatal(err)
	}
	smallRanges(t, owner, 2, 1_000_000)
	const rounds, each = 20, 100
	for range rounds {
		var in []event.Event
		for i := range each {
			in = append(in, newEvent(event.IDOf(i+1), `{"comment_id": "0196b2d4-7c00-7000-8000-000000000001", "body": "it is as long `+
				`as most of them are"}`))
		}
		appendRows(t, pool, in...)
	}
	held, err := owner.Begin(t.Context()) // keeps old row versions
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = held.Rollback(t.Context()) }()
	if _, err := held.Exec(t.Context(),
		`SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_messages`); err != nil {
		t.Fatal(err)
	}
	var tail uint64
	for c := exchange(t, pool, Round{Limit: each}); len(c.Rows) > 0; {
		mark := markOf(tail, tail+uint64(len(c.Rows)))
		for _, r := range c.Rows {
			tail++
			mark.Rows = append(mark.Rows, published(r.Event, tail))
		}
		c = exchange(t, pool, Round{Limit: each, Mark: mark})
	}
	pool.Close() // a session reports its counts when it ends, or after 10 s without work
	testkit.Eventually(t, "the statistics count the marks, 95 % of them heap-only", func() (bool, error) {
		var updates, hot int
		err := owner.QueryRow(t.Context(),
			`SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox_messages_1'`).Scan(&updates, &hot)
		if updates == rounds*each && hot < updates*95/100 {
			t.Fatalf("of %d marks %d were heap-only", updates, hot)
		}
		return updates == rounds*each, err
	})
}
