package relay

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestAClaimMayBeginWhereNoTransactionThatRunsCanAddARow(t *testing.T) {
	for name, c := range map[string]struct {
		samples [][2]int64 // id and transaction id
		running []uint64
		xmax    uint64
		upto    int64
		inHand  []int64
		floor   int64 // the floor after the claim; it begins at 5
		above   int64
		open    []outbox.Open
		kept    int
	}{
		"nothing is known yet":                       {nil, nil, 100, math.MaxInt64, nil, 5, 5, nil, 0},
		"no transaction from before the sample runs": {[][2]int64{{10, 50}}, []uint64{50, 60}, 100, math.MaxInt64, nil, 10, 10, nil, 1},
		"of two samples the later one counts": {[][2]int64{{10, 50}, {20, 60}}, []uint64{60}, 100,
			math.MaxInt64, nil, 20, 20, nil, 1},
		"one runs that may add rows up to the sample": {[][2]int64{{10, 50}}, []uint64{49}, 100, math.MaxInt64, nil, 5, 10,
			[]outbox.Open{{XID: 49, Above: 5}}, 1},
		"one runs from between two samples": {[][2]int64{{10, 50}, {20, 60}}, []uint64{55}, 100, math.MaxInt64, nil, 10, 20,
			[]outbox.Open{{XID: 55, Above: 10}}, 2},
		"a long one and short ones": {[][2]int64{{10, 50}, {20, 60}, {30, 70}, {40, 80}}, []uint64{45, 75}, 100,
			math.MaxInt64, nil, 5, 40, []outbox.Open{{XID: 45, Above: 5}, {XID: 75, Above: 30}}, 2},
		"a claim left a row": {[][2]int64{{10, 50}, {20, 60}}, []uint64{55}, 100, 7, nil, 7, 7,
			[]outbox.Open{{XID: 55, Above: 7}}, 2},
		"a row is in hand":                              {[][2]int64{{10, 50}}, nil, 100, math.MaxInt64, []int64{9}, 8, 10, nil, 1},
		"the sample is of a server that is ahead":       {[][2]int64{{10, 50}, {20, 101}}, nil, 100, math.MaxInt64, nil, 10, 10, nil, 2},
		"the first sample is of a server that is ahead": {[][2]int64{{10, 101}}, nil, 100, math.MaxInt64, nil, 5, 5, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			h := horizon{floor: 5}
			for _, s := range c.samples {
				h.samples = append(h.samples, outbox.Horizon{LastID: s[0], XID: uint64(s[1])})
			}
			var rows []outbox.Row
			for _, id := range c.inHand {
				rows = append(rows, outbox.Row{Event: event.Event{OutboxID: id}})
			}
			h.claimed(&outbox.Claimed{Upto: c.upto, Running: c.running, Xmax: c.xmax}, rows,
				[]outbox.Row{{Event: event.Event{OutboxID: 1}, Delayed: true}})
			above, open := h.begin()
			if h.floor != c.floor || above != c.above || len(h.samples) != c.kept {
				t.Errorf("the floor is %d, claims begin above %d, %d samples remain; want %d, %d, %d", h.floor, above, len(h.samples),
					c.floor, c.above, c.kept)
			}
			if diff := cmp.Diff(c.open, open); diff != "" {
				t.Errorf("open transactions (-want +got):\n%s", diff)
			}
		})
	}
}

// TestClaimsPassWhatIsPublishedWhileATransactionStaysOpen: once the transaction has ended, claims
// find its rows before all later ones.
func TestClaimsPassWhatIsPublishedWhileATransactionStaysOpen(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	r := newRelay(t, pool, testkit.NATS(t))
	r.floorEvery = time.Millisecond
	w := connected(t, r)
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // the transaction may have ended
	var late int64
	if err := tx.QueryRow(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'post', 1, 'created', '{}') RETURNING id`).
		Scan(&late); err != nil {
		t.Fatal(err)
	}
	var last int64
	for n := range int64(50) {
		last = insertRow(t, pool, 2+n, "created")
	}
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	r.step = func(string) {
		if above, _ := w.horizon.begin(); above >= last {
			stop()
		}
	}
	if err := w.rounds(ctx, t.Context()); err != nil {
		t.Fatal(err)
	}
	if above, open := w.horizon.begin(); above < last || len(open) == 0 || w.horizon.floor >= late {
		t.Fatalf("claims begin above %d while %v run, the floor is %d: want at least %d, and a floor below %d", above, open,
			w.horizon.floor, last, late)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	next := insertRow(t, pool, 1, "edited")
	c, err := w.exchange(t.Context(), nil, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	var got []int64
	for _, row := range c.Rows {
		got = append(got, row.OutboxID)
	}
	if !slices.Equal(got, []int64{late, next}) {
		t.Errorf("the next claim returns %v: want %d, committed late, and %d", got, late, next)
	}
}

// TestARangeOfIdsEndsUnderARelay: claims and the floor reach the range's end, and claims continue
// in the next range. A delayed row is published from the default range, where it went when its
// range moved.
func TestARangeOfIdsEndsUnderARelay(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	r := newRelay(t, pool, testkit.NATS(t))
	r.floorEvery = time.Millisecond
	w := connected(t, r)
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	get := func(into any, sql string, args ...any) {
		t.Helper()
		if err := pool.QueryRow(t.Context(), sql, args...).Scan(into); err != nil {
			t.Fatal(err)
		}
	}
	until := func(what string, done func() bool) {
		t.Helper()
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
		defer stop()
		was := false
		r.step = func(string) {
			if was = was || done(); was {
				stop()
			}
		}
		if err := w.rounds(ctx, t.Context()); err != nil || !was {
			t.Fatalf("%s: %t, %v", what, was, err)
		}
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // the transaction may have ended
	if _, err := tx.Exec(t.Context(), `SELECT pg_current_xact_id()`); err != nil {
		t.Fatal(err)
	}
	const insert = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'post', $1, 'created', '{}', now() + $2) RETURNING id`
	var waiting, end, late int64
	get(&waiting, insert, "9", time.Hour)
	insertRow(t, pool, 2, "created")
	get(&end, `SELECT min(to_id) - 1 FROM outbox_ranges WHERE state = 'OPEN'`)
	var cut bool
	if get(&cut, `SELECT outbox_range_cut($1)`, end+1); !cut {
		t.Fatal("the range has not ended")
	}
	rounds := 0
	until("claims begin at the range's end, for some rounds", func() bool {
		if above, _ := w.horizon.begin(); above >= end {
			rounds++
		}
		return rounds == 20
	})
	if w.horizon.floor >= end {
		t.Errorf("the floor is %d while a transaction older than the range's end, %d, runs", w.horizon.floor, end)
	}
	if err := tx.QueryRow(t.Context(), insert, "1", time.Duration(0)).Scan(&late); err != nil {
		t.Fatal(err)
	}
	next := insertRow(t, pool, 3, "created")
	until("what follows is published", func() bool {
		var is bool
		get(&is, `SELECT processed_at IS NOT NULL FROM outbox_messages WHERE id = $1`, next)
		return is
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	until("all but what waits is published, and the floor is stored", func() bool {
		var is bool
		get(&is, `SELECT processed_at IS NOT NULL AND (SELECT min(floor_id) FROM outbox_partitions) >= $2 FROM outbox_messages
			WHERE id = $1`, late, next)
		return is
	})
	var outcome, table string
	if get(&outcome, `SELECT outbox_range_archive(1, 10)`); outcome != "archived" || late <= end || waiting >= end {
		t.Fatalf("the range is %s; ids %d, %d, it ends at %d", outcome, waiting, late, end)
	}
	if get(&table, `UPDATE outbox_messages SET available_at = inserted_at + interval '1 ms' WHERE id = $1
		RETURNING tableoid::regclass::text`, waiting); table != "outbox_messages_default" {
		t.Errorf("the delayed row is in %s", table)
	}
	until("what waited is published", func() bool {
		var is bool
		get(&is, `SELECT processed_at IS NOT NULL FROM outbox_messages WHERE id = $1`, waiting)
		return is
	})
}

// The end of a range leaves unused ids. The check below the floor covers the last rows, however far
// below the floor they are.
func TestTheLookBelowTheFloorCoversRowsAndNotIds(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	r := newRelay(t, pool, testkit.NATS(t))
	w := connected(t, r)
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	var ids []int64
	for aggregate := range int64(3) {
		ids = append(ids, insertRow(t, pool, aggregate, "created"))
	}
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec(`UPDATE outbox_messages SET processed_at = now()`)
	exec(`SELECT outbox_range_cut(min(to_id)) FROM outbox_ranges WHERE state = 'OPEN'`)
	look := func(floor int64) float64 {
		t.Helper()
		w.horizon.floor = floor
		if err := w.checkBelowFloor(t.Context()); err != nil {
			t.Fatal(err)
		}
		return testutil.ToFloat64(w.metrics.belowFloor)
	}
	end := int64(50_000_000)
	if n := look(end); n != 0 {
		t.Fatalf("found %v rows below the floor although all are published", n)
	}
	exec(`UPDATE outbox_messages SET processed_at = NULL WHERE id = $1`, ids[1]) // to the relay, the row looks committed late
	if n := look(end); n != 1 || w.horizon.floor != ids[1]-1 {
		t.Errorf("found %v rows below the floor, now %d; want 1, and a floor of %d", n, w.horizon.floor, ids[1]-1)
	}
}

// A database that loses marks has pending rows below the floor that the relay remembers. They do
// not disprove the floor, because the tail went back too.
func TestMarksThatTheDatabaseLosesAreNotTakenForRowsBelowTheFloor(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	r := newRelay(t, pool, testkit.NATS(t))
	w := connected(t, r)
	if err := w.catchUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	insertRow(t, pool, 1, "created")
	_, claimed, err := w.round(t.Context(), nil, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	mark, _, err := w.round(t.Context(), claimed.Rows, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.round(t.Context(), nil, mark, false); err != nil || w.stored == 0 {
		t.Fatalf("no row is marked: %v", err)
	}
	w.horizon.floor = 1 << 20
	if _, err := pool.Exec(t.Context(), loseMarksSQL); err != nil {
		t.Fatal(err)
	}
	if err := w.checkBelowFloor(t.Context()); !errors.Is(err, errTailMoved) {
		t.Errorf("the relay returns %v, want errTailMoved", err)
	}
	if n := testutil.ToFloat64(w.metrics.belowFloor); n != 0 {
		t.Errorf("%v rows are counted below the floor", n)
	}
}
