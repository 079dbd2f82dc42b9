package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// exchange carries out a round about partition 0. Limits that the round leaves at 0 become large. A
// round without a mark changes nothing, so exchange compares it with a claim of few rows.
func exchange(t *testing.T, pool *pgxpool.Pool, r Round) Claimed {
	t.Helper()
	c, err := Exchange(t.Context(), pool, withRoom(r))
	if err != nil {
		t.Fatal(err)
	}
	if r.Mark == nil && !r.Few {
		r.Few = true
		checkFew(t, exchange(t, pool, r), c)
	}
	return c
}

// checkFew checks a claim of few rows: it has the first rows of the other claim, and leaves the
// others to a later one.
func checkFew(t *testing.T, few, all Claimed) {
	t.Helper()
	n := len(few.Rows)
	if n > len(all.Rows) || !slices.Equal(claimedIDs(few), claimedIDs(all)[:n]) {
		t.Errorf("a claim of few takes %v, want the first rows of %v", claimedIDs(few), claimedIDs(all))
		return
	}
	left := slices.MinFunc(append(slices.Clone(all.Rows[n:]), Row{Event: event.Event{OutboxID: math.MaxInt64}}),
		func(a, b Row) int { return cmp.Compare(a.OutboxID, b.OutboxID) }).OutboxID
	if n < len(all.Rows) && !few.More || few.Upto >= left && left < math.MaxInt64 || few.Upto > all.Upto || all.More && !few.More {
		t.Errorf("a claim of few leaves %d and more; it says that nothing is left up to %d, and more: %t", left, few.Upto, few.More)
	}
	if !slices.Equal(few.Held, all.Held[:min(len(few.Held), len(all.Held))]) || !few.More && len(few.Held) != len(all.Held) {
		t.Errorf("a claim of few holds %v, want %v", few.Held, all.Held)
	}
}

func withRoom(r Round) Round {
	if r.FirstSlot == 0 && r.LastSlot == 0 {
		r.LastSlot = event.Slots - 1
	}
	r.Limit, r.MaxBytes, r.MaxMessage = cmp.Or(r.Limit, 100), cmp.Or(r.MaxBytes, 8<<20), cmp.Or(r.MaxMessage, 1<<20)
	return r
}

func claimedIDs(c Claimed) (ids []int64) {
	for _, r := range c.Rows {
		ids = append(ids, r.OutboxID)
	}
	return ids
}

func checkClaimed(t *testing.T, pool *pgxpool.Pool, r Round, want ...int64) Claimed {
	t.Helper()
	c := exchange(t, pool, r)
	if got := claimedIDs(c); !slices.Equal(got, want) {
		t.Errorf("claimed %v, want %v", got, want)
	}
	return c
}

func TestWhatIsAppendedIsClaimedInItsOrder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent("1", `{"n": 1}`), newEvent("2", `{"n": 2}`), newEvent("1", `{"n": 3}`))
	c := exchange(t, pool, Round{})
	if c.More || len(c.Held) > 0 || len(c.Rows) != 3 || c.Upto != math.MaxInt64 || c.Sample != (Horizon{}) ||
		c.Tail != 0 || c.Closing || c.Closed {
		t.Errorf("got %+v", c)
	}
	for i, r := range c.Rows {
		got, want := r.Event, in[i]
		if want.OutboxID != in[0].OutboxID+int64(i) || want.ID == "" {
			t.Errorf("Append set %+v", want)
		}
		got.OccurredAt = want.OccurredAt
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("row %d (-appended +claimed):\n%s", i, diff)
		}
	}
	checkClaimed(t, pool, Round{Above: in[0].OutboxID, InFlight: []int64{in[1].OutboxID}}, in[2].OutboxID)
	checkClaimed(t, pool, Round{FirstSlot: in[1].Slot, LastSlot: in[1].Slot}, in[1].OutboxID)
}

func TestAClaimIsBoundedByRowsAndBytesWithoutGaps(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	big := `"` + strings.Repeat("x", 998) + `"`
	var in []event.Event
	for range 10 {
		in = append(in, newEvent("1", big))
	}
	in = append(in, newEvent("1", `1`))
	appendRows(t, pool, in...)
	for name, c := range map[string]struct {
		limit, bytes, want int
		more               bool
	}{
		"everything fits":           {11, 1 << 20, 11, true}, // the claim reaches the limit, so more rows may exist
		"more room than rows":       {12, 1 << 20, 11, false},
		"by rows":                   {4, 1 << 20, 4, true},
		"by bytes":                  {20, 3500, 3, true},
		"by bytes that fit exactly": {20, 3000, 3, true},
		"all bytes that there are":  {20, 10_001, 11, false},
		"one row over the bytes":    {20, 10, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			got := exchange(t, pool, Round{Limit: c.limit, MaxBytes: c.bytes})
			if len(got.Rows) != c.want || got.More != c.more {
				t.Fatalf("got %d rows, more %t; want %d, %t", len(got.Rows), got.More, c.want, c.more)
			}
			for i, r := range got.Rows {
				if r.OutboxID != got.Rows[0].OutboxID+int64(i) {
					t.Errorf("row %d has id %d: an earlier row is missing", i, r.OutboxID)
				}
			}
		})
	}
}

// TestAClaimOfFewRows: it ends before a payload that takes more than its share, and at fewRows. The
// next claim takes what it left. While a transaction is open, another claim takes all.
func TestAClaimOfFewRows(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	var in []event.Event
	for range fewRows + 1 {
		in = append(in, newEvent("1", `1`))
	}
	in = append(in, newEvent("1", `"`+strings.Repeat("x", 1000)+`"`), newEvent("1", `2`), newEvent("2", `2`))
	in = appendRows(t, pool, in...)
	few := Round{Few: true, MaxBytes: fewRows * 900}
	for name, c := range map[string]struct {
		from, want int
		more       bool
		open       []Open
	}{
		"to its limit":           {0, fewRows, true, nil},
		"to the large payload":   {2, fewRows - 1, true, nil},
		"from the large payload": {fewRows + 1, 0, true, nil},
		"after it":               {fewRows + 2, 2, false, nil},
		"beside a transaction":   {0, len(in), false, []Open{{1 << 40, 0}}},
	} {
		t.Run(name, func(t *testing.T) {
			r := few
			r.Above, r.Open = in[c.from].OutboxID-1, c.open
			got := exchange(t, pool, r)
			if len(got.Rows) != c.want || got.More != c.more {
				t.Errorf("it takes %d rows, more: %t; want %d, %t", len(got.Rows), got.More, c.want, c.more)
			}
		})
	}
}

// TestAPayloadTooLargeIsNotLoaded: the size of the published text counts. The table's form is
// smaller if the text has blanks and repetitions, and larger if it has many short numbers.
func TestAPayloadTooLargeIsNotLoaded(t *testing.T) {
	db := testkit.Postgres(t)
	pool, writer := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleWriter)
	// Without declarations: the rules of the table alone must hold.
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`ALTER POLICY writer_appends ON outbox_messages WITH CHECK (true)`); err != nil {
		t.Fatal(err)
	}
	insert := func(payload string) (id int64, err error) {
		err = writer.QueryRow(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, 'post', 1, 'created', `+payload+`) RETURNING id`).Scan(&id)
		return id, err
	}
	const kb = 1 << 10
	for _, c := range []struct {
		payload  string
		oversize int
	}{
		{`to_jsonb(repeat('x', 2000))`, 2002},
		{`to_jsonb(repeat('x', 1000))`, 0},
		{`to_jsonb(repeat('x', 8000000))`, 8_000_002}, // a hundredth of that in the table
		{`(SELECT jsonb_agg(n % 10) FROM generate_series(1, 300) n)`, 0},
		{`'[1e5000]'`, 5003}, // a few bytes in the table
	} {
		id, err := insert(c.payload)
		if err != nil {
			t.Fatal(err)
		}
		got := checkClaimed(t, pool, Round{Above: id - 1, MaxMessage: kb}, id)
		if r := got.Rows[0]; r.Oversize != c.oversize || (len(r.Payload) == 0) != (c.oversize > 0) {
			t.Errorf("%s: %d bytes over, %d loaded; want %d over", c.payload, r.Oversize, len(r.Payload), c.oversize)
		}
	}
	for _, payload := range []string{`to_jsonb(repeat('x', 8388607))`, `('[' || repeat('1e131071,', 100) || '1]')::jsonb`} {
		var refused *pgconn.PgError
		if _, err := insert(payload); !errors.As(err, &refused) || refused.ConstraintName != "outbox_messages_payload_check" {
			t.Errorf("%s: %v, want an error", payload, err)
		}
	}
}

func TestAFailureIsCountedOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("1", `1`))
	failures := []Failure{{Row: exchange(t, pool, Round{}).Rows[0], Error: "no"}}
	if putOff, dead, err := Fail(t.Context(), pool, failures); putOff != 1 || dead != 0 || err != nil {
		t.Fatalf("got %d, %d, %v", putOff, dead, err)
	}
	if putOff, dead, err := Fail(t.Context(), pool, failures); putOff != 0 || dead != 0 || err != nil {
		t.Errorf("a second relay with the same claim counted again: %d, %d, %v", putOff, dead, err)
	}
}

// delay makes rows due after d; a negative d is in the past.
func delay(t *testing.T, pool *pgxpool.Pool, d time.Duration, ids ...int64) {
	t.Helper()
	exec(t, pool, `UPDATE outbox_messages SET inserted_at = least(inserted_at, now() + $1::interval - interval '1 hour'),
		available_at = now() + $1::interval WHERE id = ANY($2)`, d, ids)
}

func publishAll(t *testing.T, pool *pgxpool.Pool, ids ...int64) {
	t.Helper()
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now() WHERE id = ANY($1)`, ids)
}

func TestRowsThatFallDueAreClaimedInTheOrderOfTheirAggregate(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("1", `1`), newEvent("2", `2`), newEvent("1", `3`), newEvent("1", `4`), newEvent("2", `5`),
		newEvent("3", `6`))
	delay(t, pool, -time.Second, 1, 4)
	delay(t, pool, time.Hour, 2, 3)

	c := checkClaimed(t, pool, Round{}, 6) // 5 waits for 2
	if diff := gocmp.Diff([]Held{{5, 2}}, c.Held); diff != "" || c.Upto != 4 {
		t.Errorf("claimed up to %d, held (-want +got):\n%s", c.Upto, diff)
	}
	c = checkClaimed(t, pool, Round{Due: true}, 1, 6) // 4 is due, and waits for 3
	if diff := gocmp.Diff([]Held{{4, 3}, {5, 2}}, c.Held); diff != "" || !c.Rows[0].Delayed || c.Rows[1].Delayed {
		t.Errorf("rows %+v, held (-want +got):\n%s", c.Rows, diff)
	}
	delay(t, pool, -time.Second, 3)
	checkClaimed(t, pool, Round{Due: true}, 1, 3, 4, 6)
	checkClaimed(t, pool, Round{Due: true, InFlight: []int64{1}}, 6) // the later rows of its aggregate wait for it
	checkClaimed(t, pool, Round{Due: true, Limit: 2}, 1, 3)
	checkClaimed(t, pool, Round{Due: true, FirstSlot: 31, LastSlot: 31})
}

// TestADueRowDoesNotOvertakeItsAggregate: an earlier row may still be pending, whether or not this
// round read it.
func TestADueRowDoesNotOvertakeItsAggregate(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("2", `1`), newEvent("2", `2`), newEvent("1", `3`), newEvent("1", `4`), newEvent("3", `5`))
	delay(t, pool, -time.Second, 4)
	c := checkClaimed(t, pool, Round{Due: true, Limit: 2}, 1, 2)
	if !c.More {
		t.Error("the claim reports no more rows")
	}
	checkClaimed(t, pool, Round{Due: true, Limit: 3}, 1, 2, 3)
	checkClaimed(t, pool, Round{Due: true, MaxBytes: 2}, 1, 2)
	checkClaimed(t, pool, Round{Due: true}, 1, 2, 3, 5)
	publishAll(t, pool, 1, 3)
	checkClaimed(t, pool, Round{Due: true}, 4, 2, 5)
}

// TestRowsBehindOneThatWaitsAreParkedUntilItWaitsNoLonger: for each way in which the first row's
// wait can end.
func TestRowsBehindOneThatWaitsAreParkedUntilItWaitsNoLonger(t *testing.T) {
	for name, c := range map[string]struct {
		becomes func(t *testing.T, pool *pgxpool.Pool)
		want    []int64
	}{
		"it is mended":    {func(t *testing.T, pool *pgxpool.Pool) { delay(t, pool, -time.Second, 1) }, []int64{1, 3, 4}},
		"it is published": {func(t *testing.T, pool *pgxpool.Pool) { publishAll(t, pool, 1) }, []int64{3, 4}},
		"it is deleted": {func(t *testing.T, pool *pgxpool.Pool) { exec(t, pool, `DELETE FROM outbox_messages WHERE id = 1`) },
			[]int64{3, 4}},
		"it is dead": {func(t *testing.T, pool *pgxpool.Pool) {
			exec(t, pool, `UPDATE outbox_messages SET attempts = $1 WHERE id = 1`, MaxAttempts)
			row := Row{Event: event.Event{OutboxID: 1, ID: scalar[string](t, pool,
				`SELECT event_id::text FROM outbox_messages WHERE id = 1`)}, Attempts: MaxAttempts}
			if _, dead, err := Fail(t.Context(), pool, []Failure{{Row: row, Error: "no"}}); err != nil || dead != 1 {
				t.Fatal(dead, err)
			}
		}, []int64{3, 4}},
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			appendRows(t, pool, newEvent("1", `1`), newEvent("2", `2`), newEvent("1", `3`), newEvent("1", `4`))
			delay(t, pool, 300*archiveDay, 1)
			held := checkClaimed(t, pool, Round{Due: true}, 2).Held
			if err := Park(t.Context(), pool, held); err != nil {
				t.Fatal(err)
			}
			publishAll(t, pool, 2)
			if c := checkClaimed(t, pool, Round{Due: true}); len(c.Held) != 0 || c.Upto != math.MaxInt64 {
				t.Errorf("parked rows are claimed: %+v", c)
			}
			if n, err := Unpark(t.Context(), pool); n != 0 || err != nil {
				t.Errorf("freed %d rows (%v) while the row ahead waits", n, err)
			}
			c.becomes(t, pool)
			if n, err := Unpark(t.Context(), pool); n != 2 || err != nil {
				t.Errorf("freed %d rows, %v; want 2", n, err)
			}
			checkClaimed(t, pool, Round{Due: true}, c.want...)
		})
	}
}

// TestAParkedRowFollowsTheOneAhead: if the first row is delayed again, the later rows remain behind
// it.
func TestAParkedRowFollowsTheOneAhead(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	appendRows(t, pool, newEvent("1", `1`), newEvent("1", `2`))
	delay(t, pool, time.Hour, 1)
	if err := Park(t.Context(), pool, exchange(t, pool, Round{}).Held); err != nil {
		t.Fatal(err)
	}
	delay(t, pool, 30*time.Minute, 1) // repaired to an earlier time
	if n, err := Unpark(t.Context(), pool); n != 1 || err != nil {
		t.Errorf("freed %d rows, %v; want the row parked again for the shorter time", n, err)
	}
	c := checkClaimed(t, pool, Round{Due: true})
	if diff := gocmp.Diff([]Held{{2, 1}}, c.Held); diff != "" {
		t.Errorf("held (-want +got):\n%s", diff)
	}
	if err := Park(t.Context(), pool, c.Held); err != nil {
		t.Fatal(err)
	}
	if !scalar[bool](t, pool, `SELECT bool_and(available_at BETWEEN now() + interval '29 minutes' AND now() + interval '31 minutes')
		FROM outbox_messages`) {
		t.Error("the parked row does not wait as long as the row ahead")
	}
}

func TestNobodyCanAskToWaitForMoreThanAYear(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleWriter)
	for after, ok := range map[string]bool{"365 days": true, "367 days": false, "infinity": false} {
		_, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload,
			available_at)
			VALUES (1, 'like', 42, 'created', '{}', CASE WHEN $1 = 'infinity' THEN 'infinity' ELSE now() + $1::interval END)`, after)
		if ok != (err == nil) || err != nil && !strings.Contains(err.Error(), "available_at_within_366_days") {
			t.Errorf("%s: %v", after, err)
		}
	}
}

// TestTheHorizonIsSampledBeforeTheRoundHasATransaction: a writer of an id up to the sample's has a
// transaction id below the sample's. A sequence that was never used reports its first value as the
// last one; the sample is then below the first row.
func TestTheHorizonIsSampledBeforeTheRoundHasATransaction(t *testing.T) {
	// A server of its own without autovacuum: a transaction in any other database would run beside
	// the round.
	pool := testkit.PostgresProcess(t, "autovacuum=off").DB(t).Pool(t, postgres.RoleSystem)
	if err := Bind(t.Context(), pool, 0, "EVENTS-0", made); err != nil {
		t.Fatal(err)
	}
	for want := range int64(3) {
		c := exchange(t, pool, Round{Mark: markOf(0, 0)})
		if c.Sample.LastID != want || c.Sample.XID < c.Xmax || c.Xmax == 0 || len(c.Running) > 0 {
			t.Errorf("after %d rows the sample is %+v, %v run below %d", want, c.Sample, c.Running, c.Xmax)
		}
		if rows := appendRows(t, pool, newEvent("1", `{}`)); rows[0].OutboxID != want+1 {
			t.Fatalf("row %d has id %d", want+1, rows[0].OutboxID)
		}
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if err := Append(t.Context(), tx, []event.Event{newEvent("1", `{}`)}); err != nil {
		t.Fatal(err)
	}
	var xid uint64
	if err := tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&xid); err != nil {
		t.Fatal(err)
	}
	sample := exchange(t, pool, Round{Mark: markOf(0, 0)}).Sample
	if c := exchange(t, pool, Round{}); sample.LastID != 4 || sample.XID <= xid ||
		!slices.Equal(c.Running, []uint64{xid}) || c.Xmax <= sample.XID {
		t.Errorf("a writer is open: sample %+v, %v run below %d, want %d", sample, c.Running, c.Xmax, xid)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c := exchange(t, pool, Round{}); len(c.Running) > 0 {
		t.Errorf("all writers have ended, but %v run", c.Running)
	}
}

// TestAClaimBeginsLowerOnceATransactionHasEnded: while a transaction runs, its rows are invisible,
// so claims pass them. When it ends, the next claim takes the lower rows first.
func TestAClaimBeginsLowerOnceATransactionHasEnded(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	first := appendRows(t, pool, newEvent("1", `1`))[0].OutboxID
	late := map[string]uint64{}
	ends := map[string]func() error{}
	for _, name := range []string{"first", "second"} {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // the transaction may have ended
		if err := Append(t.Context(), tx, []event.Event{newEvent("1", `2`)}); err != nil {
			t.Fatal(err)
		}
		var xid uint64
		if err := tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&xid); err != nil {
			t.Fatal(err)
		}
		late[name], ends[name] = xid, func() error { return tx.Commit(t.Context()) }
	}
	last := appendRows(t, pool, newEvent("1", `3`), newEvent("1", `4`))
	round := Round{Above: last[0].OutboxID, Open: []Open{{late["first"], first}, {late["second"], first + 1}}}
	checkClaimed(t, pool, round, last[1].OutboxID)
	if err := ends["second"](); err != nil {
		t.Fatal(err)
	}
	checkClaimed(t, pool, round, first+2, last[0].OutboxID, last[1].OutboxID)
	round.InFlight = []int64{last[0].OutboxID}
	checkClaimed(t, pool, round, first+2, last[1].OutboxID)
	if err := ends["first"](); err != nil {
		t.Fatal(err)
	}
	checkClaimed(t, pool, round, first+1, first+2, last[1].OutboxID)
}

// TestAClaimSaysUpToWhereNothingIsLeft: Upto is below each row that the claim saw and did not take.
func TestAClaimSaysUpToWhereNothingIsLeft(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	in := appendRows(t, pool, newEvent("1", `"12345678"`), newEvent("2", `"12345678"`), newEvent("3", `"12345678"`))
	for name, c := range map[string]struct {
		round Round
		want  int64
	}{
		"everything is taken":         {Round{}, math.MaxInt64},
		"the limit ends it":           {Round{Limit: 2}, in[1].OutboxID},
		"one row is over the bytes":   {Round{MaxBytes: 15}, in[0].OutboxID},
		"the first row alone is over": {Round{MaxBytes: 5}, in[0].OutboxID},
		"all are in flight":           {Round{InFlight: []int64{in[0].OutboxID, in[1].OutboxID, in[2].OutboxID}}, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			if got := exchange(t, pool, c.round); got.Upto != c.want {
				t.Errorf("no row is left up to %d, want %d", got.Upto, c.want)
			}
		})
	}
}

// smallRanges replaces the ranges of the outbox by smaller ones, without autovacuum.
func smallRanges(t testing.TB, owner *pgxpool.Pool, ranges, ids int) {
	t.Helper()
	if _, err := owner.Exec(t.Context(), `DO $$ DECLARE r record; BEGIN
		FOR r IN SELECT from_id FROM outbox_ranges LOOP EXECUTE format('DROP TABLE %I', 'outbox_messages_' || r.from_id); END LOOP;
		DELETE FROM outbox_ranges;
		END $$`); err != nil {
		t.Fatal(err)
	}
	for n := range ranges {
		if _, err := owner.Exec(t.Context(), fmt.Sprintf(`SELECT outbox_range_make(%d, %d); ALTER TABLE outbox_messages_%[1]d
			SET (autovacuum_enabled = off)`, 1+n*ids, 1+(n+1)*ids)); err != nil {
			t.Fatal(err)
		}
	}
}

var errUndo = errors.New("roll back the explained statement")

// explain runs a prepared statement and returns its plan, generic or for these values.
func explain(t *testing.T, pool *pgxpool.Pool, generic bool, sql string, args pgx.NamedArgs) string {
	t.Helper()
	var lines []string
	err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		text, values, err := args.RewriteQuery(t.Context(), tx.Conn(), sql, nil)
		if err != nil {
			return err
		}
		literals := make([]string, len(values))
		for i, v := range values {
			literals[i] = "'" + strings.NewReplacer("[", "{", "]", "}", " ", ",").Replace(fmt.Sprint(v)) + "'"
		}
		mode := "force_custom_plan"
		if generic {
			mode = "force_generic_plan"
		}
		call := "p"
		if len(values) > 0 {
			call += "(" + strings.Join(literals, ", ") + ")"
		}
		for _, sql := range []string{walkSQL, `SELECT set_config('plan_cache_mode', '` + mode + `', true)`, "PREPARE p AS " + text} {
			if _, err := tx.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
		}
		rows, _ := tx.Query(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) EXECUTE "+call, pgx.QueryExecModeSimpleProtocol)
		if lines, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return err
		}
		if _, err := tx.Exec(t.Context(), "DEALLOCATE p"); err != nil {
			return err
		}
		return errUndo
	})
	if !errors.Is(err, errUndo) {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// TestPlans: a round reads little more than it returns. This holds with many ranges of published
// rows, with and without statistics, and for generic and custom plans.
func TestPlans(t *testing.T) {
	for name, analyzed := range map[string]bool{"never analyzed": false, "analyzed": true} {
		t.Run(name, func(t *testing.T) {
			db := testkit.Postgres(t)
			owner := db.Pool(t, postgres.RoleOwner)
			smallRanges(t, owner, 20, 5000)
			exec(t, owner, `
				INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at, processed_at)
				SELECT 1, 'post', n, 'created', '{}', CASE WHEN n % 1000 = 0 THEN now() + interval '1 day' ELSE now() END,
				CASE WHEN n % 1000 > 0 AND n <= 99000 THEN now() END
				  FROM generate_series(1, 100000) n`)
			exec(t, owner, `UPDATE outbox_messages SET inserted_at = now() - interval '2 day', available_at = now() - interval '1 second'
				WHERE id IN (3000, 5000)`)
			exec(t, owner, `UPDATE outbox_partitions SET floor_id = 99000`)
			if analyzed {
				exec(t, owner, `ANALYZE outbox_messages`)
			}
			pool := db.Pool(t, postgres.RoleSystem)
			ids, eventIDs := []int64{99500, 99501, 99502}, scalar[[]string](t, owner,
				`SELECT array_agg(event_id::text ORDER BY id) FROM outbox_messages WHERE id IN (99500, 99501, 99502)`)
			claim, _ := (&Round{LastSlot: 31, Above: 99000, Open: []Open{{1 << 40, 98000}}, InFlight: []int64{99500}, Limit: 50,
				MaxMessage: 1 << 20, MaxBytes: 1 << 20}).args()
			args := pgx.NamedArgs(claim)
			maps.Copy(args, pgx.NamedArgs{"partition": 0, "bound": 1000, "sample": 100, "ids": ids, "event_ids": eventIDs, "seqs": ids,
				"new_tail": 3, "old_tail": 0, "mark_floor": 0, "created": "epoch", "count": 3, "floor": 100000, "depth": 1000, "id": 99500})
			for what, c := range map[string]struct {
				sql    string
				reads  int // most rows read from the table
				index  string
				prunes bool
			}{
				"claim":       {claimSQL, 102, "_95001_pkey", true}, // sizes and rows
				"claim few":   {fewSQL, 51, "_95001_pkey", true},
				"due":         {dueSQL, 10, "_available_at_id_idx", false},
				"stats":       {statsSQL, 2500, "_95001_pkey", false},
				"below floor": {belowFloorSQL, 1000, "_95001_pkey", true},
				"mark":        {strings.Replace(markSQL, "created = @created AND ", "", 1), 3, "_95001_pkey", false},
				"caught up":   {caughtUpSQL, 6, "_95001_pkey", false},
				"find": {strings.NewReplacer("@payload::boolean", "true", "@tenant", "NULL", "@since", "NULL", "@until",
					"NULL").Replace(outboxRow + byID), 1, "_95001_pkey", true},
				"find, event": {strings.NewReplacer("@payload::boolean", "true", "@tenant", "NULL", "@since", "NULL", "@until", "NULL",
					"@event_id", "gen_random_uuid()").Replace(outboxRow + byIDAndEvent), 1, "_95001_pkey", true},
			} {
				for kind, generic := range map[string]bool{"for all values": true, "for these": false} {
					plan := explain(t, pool, generic, c.sql, args)
					if !strings.Contains(plan, c.index) || strings.Contains(strings.ReplaceAll(plan, "outbox_messages_id_seq", ""),
						"Seq Scan on outbox_messages_") || strings.Contains(plan, "Sort  (") {
						t.Errorf("%s, a plan %s, does not walk %s, or sorts:\n%s", what, kind, c.index, plan)
					}
					if n := rowsRead(plan); n > c.reads {
						t.Errorf("%s, a plan %s, reads %d rows, want %d at most:\n%s", what, kind, n, c.reads, plan)
					}
					if c.prunes && (strings.Contains(plan, "outbox_messages_1_pkey") ||
						generic && !strings.Contains(plan, "Subplans Removed")) {
						t.Errorf("%s, a plan %s, does not skip the other ranges:\n%s", what, kind, plan)
					}
				}
			}
			lines, _ := pool.Query(t.Context(), `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, SUMMARY OFF) SELECT * FROM outbox_delivered(100)`)
			plan, err := pgx.CollectRows(lines, pgx.RowTo[string])
			var hit int
			if err == nil {
				_, err = fmt.Sscanf(strings.TrimSpace(plan[1]), "Buffers: shared hit=%d", &hit)
			}
			if err != nil || hit > 400 { // of at least 2,000
				t.Errorf("ReadDelivered reads %d pages (%v):\n%s", hit, err, strings.Join(plan, "\n"))
			}
		})
	}
}

// rowsRead adds up the rows that the scans of the outbox returned and removed.
func rowsRead(plan string) (n int) {
	inScan := false
	for line := range strings.Lines(plan) {
		var rows, loops, removed int
		if at := strings.Index(line, "(actual rows="); at >= 0 {
			inScan = strings.Contains(line, " on outbox_messages_")
			if _, err := fmt.Sscanf(line[at:], "(actual rows=%d loops=%d)", &rows, &loops); err == nil && inScan {
				n += rows * loops
			}
		}
		if _, err := fmt.Sscanf(strings.TrimSpace(line), "Rows Removed by Filter: %d", &removed); err == nil && inScan {
			n += removed
		}
	}
	return n
}
