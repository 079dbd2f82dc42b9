package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// bury inserts events with SQL, because Append would refuse them, and fails them until they are
// dead. It returns their ids. The events died an hour apart, the last one now.
func bury(t *testing.T, pool *pgxpool.Pool, events ...event.Event) []int64 {
	t.Helper()
	for i := range events {
		e := &events[i]
		e.Payload, e.Version = []byte(fmt.Sprintf(`{"n": %d}`, i)), 1
		if err := pool.QueryRow(t.Context(), `
			INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, occurred_at, trace_id)
			VALUES ($1, $2, $3, $4, $5, $6, $7)
			RETURNING id, event_id::text, slot`, e.TenantID, e.AggregateType, e.AggregateID, e.Type, e.Payload, e.OccurredAt, e.TraceParent,
		).Scan(&e.OutboxID, &e.ID, &e.Slot); err != nil {
			t.Fatal(err)
		}
	}
	ids := make([]int64, len(events))
	failures := make([]Failure, len(events))
	for i, e := range events {
		ids[i] = e.OutboxID
		failures[i] = Failure{Row: Row{Event: e, Attempts: MaxAttempts}, Error: "no token"}
	}
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET attempts = $1 WHERE id = ANY($2)`, MaxAttempts, ids); err != nil {
		t.Fatal(err)
	}
	if _, dead, err := Fail(t.Context(), pool, failures); err != nil || dead != len(events) {
		t.Fatalf("%d of %d are dead, %v", dead, len(events), err)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages_dlq
		SET dead_at = now() - (SELECT count(*) FROM unnest($1::bigint[]) AS i WHERE i > id) * interval '1 hour'
		WHERE id = ANY($1)`, ids); err != nil {
		t.Fatal(err)
	}
	return ids
}

func dead(tenant int64, aggregateType string, aggregate event.ID, typ string) event.Event {
	return event.Event{TenantID: tenant, AggregateType: aggregateType, AggregateID: aggregate, Type: typ, TraceParent: "trace",
		OccurredAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
}

func idsOf(messages []DLQMessage) []int64 {
	var ids []int64
	for _, m := range messages {
		ids = append(ids, m.ID)
	}
	return ids
}

func actedOn(actions []DLQAction) []int64 {
	var ids []int64
	for _, a := range actions {
		ids = append(ids, a.ID)
	}
	return ids
}

// contents returns all rows of the three tables.
func contents(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT row_to_json(m)::text FROM outbox_messages m UNION ALL SELECT row_to_json(d)::text
		FROM outbox_messages_dlq d
		UNION ALL SELECT row_to_json(a)::text FROM outbox_dlq_actions a ORDER BY 1`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestTheDLQIsFilteredAndPaged(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ids := bury(t, pool, dead(1, "post", "7", "a b"), dead(1, "post", "8", "a b"), dead(1, "user", "7", "x.y"), dead(2, "post", "7", "x.y"))
	d := NewDLQ(pool, nil)
	now := time.Now()
	for name, c := range map[string]struct {
		filter DLQFilter
		want   []int
	}{
		"nothing":                 {DLQFilter{}, []int{0, 1, 2, 3}},
		"tenant":                  {DLQFilter{TenantID: 1}, []int{0, 1, 2}},
		"ids":                     {DLQFilter{IDs: []int64{ids[3], ids[0], 99}}, []int{0, 3}},
		"no id":                   {DLQFilter{IDs: []int64{}}, nil},
		"aggregate type":          {DLQFilter{AggregateType: "post"}, []int{0, 1, 3}},
		"aggregate":               {DLQFilter{TenantID: 1, AggregateType: "post", AggregateID: "7"}, []int{0}},
		"event type":              {DLQFilter{EventType: "x.y"}, []int{2, 3}},
		"dead for two and a half": {DLQFilter{DeadBefore: now.Add(-150 * time.Minute)}, []int{0}},
		"dead for less than that": {DLQFilter{DeadAfter: now.Add(-150 * time.Minute)}, []int{1, 2, 3}},
		"a span of time": {DLQFilter{DeadAfter: now.Add(-150 * time.Minute), DeadBefore: now.Add(-30 * time.Minute)},
			[]int{1, 2}},
		"ids and a filter":          {DLQFilter{IDs: ids, EventType: "a b"}, []int{0, 1}},
		"a type that nothing is of": {DLQFilter{EventType: "nope"}, nil},
	} {
		var want []int64
		for _, i := range c.want {
			want = append(want, ids[i])
		}
		got, err := postgres.Collect(d.List(t.Context(), c.filter, 10))
		if err != nil || !slices.Equal(idsOf(got), want) {
			t.Errorf("%s: listed %v, %v; want %v", name, idsOf(got), err, want)
		}
		if n, err := d.Count(t.Context(), c.filter); err != nil || int(n) != len(want) {
			t.Errorf("%s: counted %d, %v; want %d", name, n, err, len(want))
		}
		for _, act := range []func(context.Context, DLQRequest) ([]DLQAction, error){d.Retry, d.Discard} {
			actions, err := act(t.Context(), DLQRequest{DLQFilter: c.filter, Limit: 10, Actor: "a", DryRun: true})
			if err != nil || !slices.Equal(actedOn(actions), want) {
				t.Errorf("%s: a dry run of %v, %v; want %v", name, actedOn(actions), err, want)
			}
		}
	}
	var paged []int64
	for f := (DLQFilter{}); ; f.After = paged[len(paged)-1] {
		page, err := postgres.Collect(d.List(t.Context(), f, 3))
		if err != nil {
			t.Fatal(err)
		}
		if paged = append(paged, idsOf(page)...); len(page) < 3 {
			break
		}
	}
	if !slices.Equal(paged, ids) {
		t.Errorf("pages of 3: %v, want %v", paged, ids)
	}
}

func TestADeadMessageIsShown(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	in := dead(1, "post", "7", "a b")
	id := bury(t, pool, in)[0]
	d := NewDLQ(pool, nil)
	got, err := d.Get(t.Context(), 1, id)
	if err != nil {
		t.Fatal(err)
	}
	if time.Since(got.DeadAt) > time.Minute || time.Since(got.InsertedAt) > time.Minute || got.Event.ID == "" {
		t.Errorf("got %+v", got)
	}
	want := in
	want.OutboxID, want.Version, want.ID, want.Slot, want.Payload = id, 1, got.Event.ID, got.Event.Slot, []byte(`{"n": 0}`)
	if diff := cmp.Diff(DLQMessage{Source: deadletter.Outbox, ID: id, Event: want, Attempts: MaxAttempts + 1, Error: "no token",
		Group: got.Group, First: true}, got,
		cmpopts.IgnoreFields(DLQMessage{}, "InsertedAt", "DeadAt"), cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if listed, err := postgres.Collect(d.List(t.Context(), DLQFilter{}, 1)); err != nil || listed[0].Event.Payload != nil ||
		listed[0].Error != "no token" {
		t.Errorf("listed %+v, %v", listed, err)
	}
	for name, get := range map[string]func() (DLQMessage, error){
		"of another tenant": func() (DLQMessage, error) { return d.Get(t.Context(), 2, id) },
		"that never was":    func() (DLQMessage, error) { return d.Get(t.Context(), 0, id+1) },
		"without a tenant, as the API": func() (DLQMessage, error) {
			return NewDLQ(db.Pool(t, postgres.RoleAPI), nil).Get(t.Context(), 0, id)
		},
	} {
		if _, err := get(); !errors.Is(err, ErrNotInDLQ) {
			t.Errorf("a message %s: %v, want ErrNotInDLQ", name, err)
		}
	}
}

func TestARetryIsANewRowOfTheSameEvent(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	ids := bury(t, pool, dead(1, "post", "7", "a b"), dead(1, "post", "7", "c d"), dead(2, "post", "7", "a b"))
	later := appendRows(t, pool, newEvent("7", `{}`))[0]
	rows, _ := pool.Query(t.Context(), `SELECT event_id::text FROM outbox_messages_dlq ORDER BY id`)
	eventIDs, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	before := contents(t, pool)
	var woken []int
	d := NewDLQ(db.Pool(t, postgres.RoleAPI), func(p int) { woken = append(woken, p) })
	request := DLQRequest{DLQFilter: DLQFilter{TenantID: 1}, Limit: 10, Actor: "ann", Reason: "mended", DryRun: true}
	would, err := d.Retry(t.Context(), request)
	if err != nil || len(would) != 2 {
		t.Fatalf("a dry run: %+v, %v", would, err)
	}
	if diff := cmp.Diff(before, contents(t, pool)); diff != "" || len(woken) > 0 {
		t.Fatalf("a dry run changed something, and woke %v:\n%s", woken, diff)
	}

	request.DryRun = false
	did, err := d.Retry(t.Context(), request)
	if err != nil || len(did) != 2 || len(woken) != 2 {
		t.Fatalf("%+v, %v; woke %v", did, err, woken)
	}
	if diff := cmp.Diff(would, did, cmpopts.IgnoreFields(DLQAction{}, "NewID", "At")); diff != "" {
		t.Errorf("the dry run differs (-dry +real):\n%s", diff)
	}
	if did[0].NewID <= later.OutboxID || did[1].NewID <= did[0].NewID {
		t.Errorf("new ids %d, %d: want them above %d, in the order of the old ones", did[0].NewID, did[1].NewID, later.OutboxID)
	}
	slot := scalar[int](t, pool, `SELECT slot FROM outbox_messages WHERE id = $1`, did[0].NewID)
	if woken[0] != slot {
		t.Errorf("woke slot %d, the message went to %d", woken[0], slot)
	}
	claimed := exchange(t, pool, Round{FirstSlot: slot, LastSlot: slot})
	if len(claimed.Rows) != 3 {
		t.Fatalf("claimed %+v", claimed)
	}
	for i, r := range claimed.Rows[1:] {
		want := dead(1, "post", "7", []string{"a b", "c d"}[i])
		want.OutboxID, want.ID, want.Version, want.Slot, want.Payload = did[i].NewID, eventIDs[i], 1, slot,
			[]byte(fmt.Sprintf(`{"n": %d}`, i))
		if diff := cmp.Diff(Row{Event: want}, r, cmpopts.EquateApproxTime(0)); diff != "" {
			t.Errorf("row %d (-want +got):\n%s", i, diff)
		}
	}
	left, err := postgres.Collect(NewDLQ(pool, nil).List(t.Context(), DLQFilter{}, 10))
	if err != nil || !slices.Equal(idsOf(left), ids[2:]) {
		t.Errorf("left in the DLQ: %v, %v; want %v", idsOf(left), err, ids[2:])
	}
	checkAudit(t, pool, did)
}

// checkAudit fails unless outbox_dlq_actions has exactly these rows.
func checkAudit(t *testing.T, pool *pgxpool.Pool, want []DLQAction) {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `SELECT `+actionColumns+`, 0 FROM outbox_dlq_actions ORDER BY id`)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[DLQAction])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(DLQAction{}, "Slot"), cmpopts.EquateApproxTime(0)); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
	for _, a := range got {
		if time.Since(a.At) > time.Minute || a.EventID == "" {
			t.Errorf("audit: %+v", a)
		}
	}
}

func TestADiscardLeavesItsNoteAlone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ids := bury(t, pool, dead(1, "post", "7", "a b"), dead(1, "post", "8", "c d"), dead(1, "post", "9", "a b"))
	d := NewDLQ(pool, func(int) { t.Error("a discard woke the relay") })
	did, err := d.Discard(t.Context(), DLQRequest{DLQFilter: DLQFilter{EventType: "a b"}, Limit: 1, Actor: "bob"})
	if err != nil || len(did) != 1 || did[0].ID != ids[0] || did[0].NewID != 0 || did[0].Action != deadletter.Discard ||
		did[0].EventType != "a b" {
		t.Fatalf("%+v, %v", did, err)
	}
	checkAudit(t, pool, did)
	if left := contents(t, pool); len(left) != 3 || strings.Contains(strings.Join(left, ""), `{"n": 0}`) {
		t.Errorf("left: %v, want two messages and the record, without the payload of the first", left)
	}
	none, err := d.Discard(t.Context(), DLQRequest{DLQFilter: DLQFilter{IDs: ids[:1]}, Limit: 1, Actor: "bob"})
	if err != nil || len(none) != 0 {
		t.Errorf("a second discard: %+v, %v", none, err)
	}
	if _, err := d.Discard(t.Context(), DLQRequest{Limit: 9}); !postgres.IsCheck(err) {
		t.Errorf("without an actor: %v, want an error", err)
	}
}

func TestOfSeveralOperatorsOneGetsAMessage(t *testing.T) {
	db := testkit.Postgres(t)
	pool, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	var events []event.Event
	for i := range 60 {
		events = append(events, dead(1, "post", event.IDOf(i+1), "a b"))
	}
	ids := bury(t, pool, events...)
	d := NewDLQ(pool, nil)
	// One transaction holds the first message. Two others want it and wait.
	holding, release, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SELECT FROM outbox_messages_dlq WHERE id = $1 FOR UPDATE`, ids[0])
			close(holding)
			select {
			case <-release:
			case <-t.Context().Done():
			}
			return err
		})
	}()
	<-holding
	var mu sync.Mutex
	got := map[int64][]string{}
	var wg sync.WaitGroup
	act := func(do func(context.Context, DLQRequest) ([]DLQAction, error), r DLQRequest) {
		wg.Go(func() {
			actions, err := do(t.Context(), r)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, a := range actions {
				got[a.ID] = append(got[a.ID], a.Action)
			}
		})
	}
	backwards := slices.Clone(ids)
	slices.Reverse(backwards)
	act(d.Retry, DLQRequest{DLQFilter: DLQFilter{IDs: ids[:1]}, Limit: 1, Actor: "a"})
	act(d.Discard, DLQRequest{DLQFilter: DLQFilter{IDs: ids[:1]}, Limit: 1, Actor: "b"})
	act(d.Retry, DLQRequest{DLQFilter: DLQFilter{IDs: backwards}, Limit: 25, Actor: "c"})
	act(d.Discard, DLQRequest{DLQFilter: DLQFilter{TenantID: 1}, Limit: 25, Actor: "d"})
	testkit.Eventually(t, "all four to wait for the lock", func() (bool, error) {
		var n int
		err := owner.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock'`).Scan(&n)
		return n == 4, err
	})
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	var n, retried int
	for id, actions := range got {
		if n++; len(actions) != 1 {
			t.Errorf("message %d: %v", id, actions)
		}
		if actions[0] == deadletter.Retry {
			retried++
		}
	}
	var inDLQ, inOutbox, noted int
	if err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM outbox_messages_dlq), (SELECT count(*) FROM outbox_messages),
		(SELECT count(*) FROM outbox_dlq_actions)`).Scan(&inDLQ, &inOutbox, &noted); err != nil {
		t.Fatal(err)
	}
	// Each batch took 25 messages, whichever got the first one.
	if n < 50 || n > 51 || inDLQ != 60-n || inOutbox != retried || noted != n {
		t.Errorf("%d taken, %d of them retried; %d in the DLQ, %d in the outbox, %d recorded", n, retried, inDLQ, inOutbox, noted)
	}
}

func TestMessagesOfOneCauseAreAGroup(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	d := NewDLQ(pool, nil)
	fail := func(id int64, text string) {
		t.Helper()
		found, err := Find(t.Context(), pool, FindQuery{OutboxID: id, Limit: 1})
		if err != nil || len(found) != 1 {
			t.Fatal(found, err)
		}
		exec(t, pool, `UPDATE outbox_messages SET attempts = $1 WHERE id = $2`, MaxAttempts, id)
		if _, n, err := Fail(t.Context(), pool, []Failure{{Row: Row{Event: found[0].Event, Attempts: MaxAttempts},
			Error: text}}); err != nil || n != 1 {
			t.Fatal(n, err)
		}
	}
	var events []event.Event
	for i := range int64(4) {
		e := newEvent(event.IDOf(i+1), `{}`)
		e.TenantID = i/2 + 1
		events = append(events, e)
	}
	events = appendRows(t, pool, events...)
	for i, text := range []string{"message 1 is too large", "message 22 is too large", "message 3 is too large", `no stream "x"`} {
		fail(events[i].OutboxID, text)
	}
	if groups, _, err := NewDLQ(api, nil).Groups(t.Context(), 2); err != nil || len(groups) != 2 {
		t.Errorf("the API of tenant 2 sees %+v, %v", groups, err)
	}
	groups := func(tenant int64) (is []string, all []*deadletter.Group) {
		t.Helper()
		all, more, err := d.Groups(t.Context(), tenant)
		if err != nil || more {
			t.Fatal(err, more)
		}
		if err := d.CountGroups(t.Context(), tenant, all, time.Time{}); err != nil {
			t.Fatal(err)
		}
		for _, g := range all {
			if g.First.After(g.Last) || g.ID == "" || g.Consumer != "" {
				t.Errorf("%+v", g)
			}
			is = append(is, fmt.Sprintf("%s %s: %s: %d, %d again", g.EventType, g.Cause, g.Error, g.Count, g.Again))
		}
		return is, all
	}
	is, all := groups(0)
	if diff := cmp.Diff([]string{`created no stream "…": no stream "x": 1, 0 again`,
		"created message # is too large: message 3 is too large: 3, 0 again"}, is); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if is, _ := groups(1); !slices.Equal(is, []string{"created message # is too large: message 22 is too large: 2, 0 again"}) {
		t.Errorf("of tenant 1: %q", is)
	}
	// A retry of the group takes all its messages. Messages that fail again show their retries.
	refused := errors.New("refused")
	request := DLQRequest{DLQFilter: DLQFilter{Group: all[1].ID, TenantID: 1}, Limit: 10, Actor: "ann",
		Within: func(context.Context, pgx.Tx, []DLQAction) error { return refused }}
	if _, err := d.Retry(t.Context(), request); !errors.Is(err, refused) {
		t.Errorf("%v", err)
	}
	request.Within = nil
	did, err := d.Retry(t.Context(), request)
	if err != nil || !slices.Equal(actedOn(did), []int64{events[0].OutboxID, events[1].OutboxID}) {
		t.Fatalf("%+v, %v", did, err)
	}
	fail(did[0].NewID, "message 1 is too large")
	if is, _ := groups(1); !slices.Equal(is, []string{"created message # is too large: message 1 is too large: 1, 1 again"}) {
		t.Errorf("after a retry, of tenant 1: %q", is)
	}
	if m, err := d.Get(t.Context(), 1, did[0].NewID); err != nil || m.Retries != 1 || m.Group != all[1].ID {
		t.Errorf("%+v, %v", m, err)
	}
}

// pagesRead returns the number of pages that a statement reads.
func pagesRead(t *testing.T, pool *pgxpool.Pool, sql string, args pgx.NamedArgs) (pages int) {
	t.Helper()
	rows, _ := pool.Query(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) "+sql, args)
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range plan { // the first one has the sum
		if _, counts, ok := strings.Cut(line, "Buffers: shared "); ok {
			var hit, read int
			_, _ = fmt.Sscanf(counts, "hit=%d read=%d", &hit, &read) // the second one is there if it is not 0
			return hit + read
		}
	}
	t.Fatalf("no pages:\n%s", strings.Join(plan, "\n"))
	return 0
}
