package outbox

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestEventsAreFoundWhereverTheyAre(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 4, 10*archiveDay) // ids 1 to 4, of posts 1 to 4
	leave(t, pool, 8*archiveDay)
	archive(t, newArchive(t, pool))
	fill(t, pool, 1, 4, 2*time.Hour) // 50000001 to 4
	fill(t, pool, 2, 4, time.Hour)   // 50000005 to 8
	exec(t, pool, `UPDATE outbox_messages_archive SET occurred_at = inserted_at`)
	exec(t, pool, `WITH d AS (DELETE FROM outbox_messages WHERE id IN (50000002, 50000006) RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
		inserted_at, slot FROM d`)
	exec(t, pool, `UPDATE outbox_messages_dlq SET event_type = 'sold' WHERE id = 50000002`)
	exec(t, pool, `UPDATE outbox_messages_archive SET event_type = 'sold' WHERE id = 3`)
	eventID := func(table string, id int64) string {
		return scalar[string](t, pool, `SELECT event_id::text FROM `+table+` WHERE id = $1`, id)
	}
	now := time.Now()
	for name, c := range map[string]struct {
		q    FindQuery
		want string
	}{
		"an id of the outbox":     {FindQuery{OutboxID: 50000001}, "outbox 50000001"},
		"an id of the archive":    {FindQuery{OutboxID: 3}, "archive 3"},
		"an id of the DLQ":        {FindQuery{OutboxID: 50000002}, "dlq 50000002"},
		"an id of another tenant": {FindQuery{OutboxID: 50000002, TenantID: 2}, ""},
		"an event of the archive": {FindQuery{EventID: eventID("outbox_messages_archive", 2)}, "archive 2"},
		"an event of the DLQ":     {FindQuery{EventID: eventID("outbox_messages_dlq", 50000006)}, "dlq 50000006"},
		"an event of the outbox":  {FindQuery{EventID: eventID("outbox_messages", 50000001)}, "outbox 50000001"},
		"an aggregate":            {FindQuery{TenantID: 1, AggregateType: "post", AggregateID: "2"}, "archive 2, dlq 50000002"},
		"an aggregate, fresh":     {FindQuery{TenantID: 1, AggregateType: "post", AggregateID: "3"}, "archive 3, outbox 50000003"},
		"an aggregate, first":     {FindQuery{TenantID: 2, AggregateType: "post", AggregateID: "3", Limit: 1}, "outbox 50000007"},
		"an aggregate, lately": {FindQuery{TenantID: 1, AggregateType: "post", AggregateID: "2", Since: now.Add(-24 * time.Hour)},
			"dlq 50000002"},
		"an aggregate, of a type": {FindQuery{TenantID: 1, AggregateType: "post", AggregateID: "2", EventType: "sold"},
			"dlq 50000002"},
		"an id of another type": {FindQuery{OutboxID: 4, EventType: "sold"}, ""},
		"a time, of a type":     {FindQuery{Since: now.Add(-11 * archiveDay), EventType: "sold"}, "archive 3, dlq 50000002"},
		"a time": {FindQuery{Since: now.Add(-11 * archiveDay), Until: now.Add(-90 * time.Minute)},
			"archive 1, archive 2, archive 3, archive 4, outbox 50000001, dlq 50000002, outbox 50000003, outbox 50000004"},
		"a time, to now, of a tenant": {FindQuery{Since: now.Add(-3 * time.Hour), TenantID: 2},
			"outbox 50000005, dlq 50000006, outbox 50000007, outbox 50000008"},
		"a time, the first": {FindQuery{Since: now.Add(-11 * archiveDay), Limit: 6},
			"archive 1, archive 2, archive 3, archive 4, outbox 50000001, dlq 50000002"},
		"a time in which nothing happened": {FindQuery{Since: now.Add(-5 * archiveDay), Until: now.Add(-4 * archiveDay)}, ""},
	} {
		if c.q.Limit == 0 {
			c.q.Limit = 100
		}
		found, err := Find(t.Context(), pool, c.q)
		var got []string
		for _, f := range found {
			got = append(got, fmt.Sprint(f.Where, " ", f.OutboxID))
			if f.Payload != nil {
				t.Errorf("%s: a payload that was not asked for", name)
			}
		}
		if strings.Join(got, ", ") != c.want || err != nil {
			t.Errorf("%s: %v, %v; want %s", name, got, err, c.want)
		}
	}
	found, err := Find(t.Context(), pool, FindQuery{OutboxID: 3, Limit: 1, Payload: true})
	if err != nil || len(found) != 1 {
		t.Fatal(found, err)
	}
	if diff := cmp.Diff(`{"n": 1}`, string(found[0].Payload)); diff != "" || found[0].StreamSeq != 3 || found[0].ProcessedAt.IsZero() {
		t.Errorf("found %+v", found[0])
	}
	exec(t, pool, `UPDATE outbox_messages SET partition = 7 WHERE id = 50000001`)
	for id, want := range map[int64]int{50000001: 7, 50000003: -1, 50000002: -1} {
		if found, err := Find(t.Context(), pool, FindQuery{OutboxID: id, Limit: 1}); err != nil || len(found) != 1 ||
			found[0].Partition != want {
			t.Errorf("message %d: %+v, %v; want partition %d", id, found, err, want)
		}
	}
	for _, q := range []FindQuery{{}, {AggregateType: "post", AggregateID: "2"}, {Until: now}, {TenantID: 1}} {
		if _, err := Find(t.Context(), pool, q); !errors.Is(err, ErrFindQuery) {
			t.Errorf("%+v: %v, want ErrFindQuery", q, err)
		}
	}
}

// Find uses the id in the event_id, and the recorded ids of an event that got others.
func TestAnEventIsFoundByItsNameWhateverBecameOfIt(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	events := appendRows(t, pool, newEvent("1", `{}`), newEvent("2", `{}`), newEvent("3", `{}`))
	if first := events[0]; !strings.HasPrefix(first.ID, fmt.Sprintf("%08x-%04x-8", first.OutboxID>>16, first.OutboxID&0xffff)) {
		t.Errorf("event %d is %s, which does not contain its id", first.OutboxID, first.ID)
	}
	exec(t, pool, `WITH d AS (DELETE FROM outbox_messages WHERE id = 2 RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
		inserted_at, slot FROM d`)
	if _, err := NewDLQ(pool, nil).Retry(t.Context(), DLQRequest{Limit: 1, Actor: "a"}); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), partition = 0, stream_seq = id WHERE id <> 2`)
	if n, err := Requeue(t.Context(), pool, Lost{Behind: NoneBehind, Seqs: []uint64{3}}, nil); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	exec(t, pool, `UPDATE outbox_messages SET processed_at = now(), inserted_at = now() - interval '2 days'`)
	find := func(where string) {
		t.Helper()
		for i, want := range []int64{1, 4, 5} {
			found, err := Find(t.Context(), pool, FindQuery{EventID: events[i].ID, Limit: 10})
			if err != nil || len(found) != 1 || found[0].OutboxID != want || found[0].Where != where {
				t.Errorf("event %s: %+v, %v; want %d in the %s", events[i].ID, found, err, want, where)
			}
		}
	}
	find(InOutbox)
	leave(t, pool, 8*archiveDay)
	archive(t, newArchive(t, pool))
	find(InArchive)
	if _, err := AddHold(t.Context(), pool, ArchiveHold{TenantID: 1, Reason: "r", CreatedBy: "a"}); err != nil {
		t.Fatal(err)
	}
	older(t, pool, 91*archiveDay)
	archive(t, newArchive(t, pool))
	find(InArchive)
	if got, want := counts(t, pool), "outbox 0, of these default 0, archive 0, kept 3"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestEachWayToFindAnEventIsByAnIndex(t *testing.T) {
	db := testkit.Postgres(t)
	owner, pool := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleSystem)
	for range 2 {
		fill(t, owner, 1, 5000, 10*archiveDay)
		exec(t, owner, `UPDATE outbox_messages SET aggregate_id = '7' WHERE id % 3 = 0`) // an aggregate that is too large to sort
		leave(t, pool, 8*archiveDay)
		archive(t, newArchive(t, pool))
	}
	fill(t, owner, 1, 10000, archiveDay)
	exec(t, owner, `INSERT INTO outbox_messages_kept (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, processed_at, attempts, event_id, inserted_at)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, now() - id * interval '1 s', available_at,
		processed_at, 0, event_id, inserted_at FROM outbox_messages_archive LIMIT 3000`)
	exec(t, owner, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
		inserted_at, slot FROM outbox_messages LIMIT 3000`)
	exec(t, owner, `ANALYZE outbox_messages, outbox_messages_archive, outbox_messages_kept, outbox_messages_dlq`)
	first := scalar[int64](t, owner, `SELECT min(id) + 3000 FROM outbox_messages`)
	args := pgx.NamedArgs{
		"id": first, "event_id": "00000000-0000-4000-8000-000000000001", "ids": []int64{first, 17}, "tenant": int64(1),
		"aggregate_type": "post", "aggregate_id": "7",
		"since": time.Now().Add(-60 * archiveDay), "until": time.Now(), "limit": 5, "payload": true, "first": first,
		"last": first + 1000, "from": first,
	}
	for name, sql := range map[string]string{
		"outbox by id": outboxRow + byID, "archive by id": archiveRow + byID, "kept by id": keptRow + byID, "DLQ by id": dlqRow + byID,
		"outbox by event": outboxRow + byIDAndEvent, "archive by event": archiveRow + byIDAndEvent, "kept by event": keptRow + byIDAndEvent,
		"DLQ by event":         dlqRow + byEvent,
		"archive by aggregate": archiveRow + byAggregate, "kept by aggregate": keptRow + byAggregate,
		"DLQ by aggregate": dlqRow + dlqByAggregate, "kept by time": keptRow + byTime, "DLQ by time": dlqRow + byTime,
		"outbox by range": outboxRow + byIDRange, "archive by range": archiveRow + byIDRange, "probe": probeSQL, "edges": edgesSQL,
	} {
		args["first"], args["last"] = first, first+1000
		if name == "archive by range" {
			args["first"], args["last"] = 1000, 2000
		}
		rows, _ := pool.Query(t.Context(), "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) "+sql, pgx.QueryExecModeExec, args)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		plan := strings.Join(lines, "\n")
		for i, line := range lines { // any plan may read an empty range and the list of ranges
			if strings.Contains(line, "Seq Scan") && !strings.Contains(line, "actual rows=0") &&
				!strings.Contains(line, "never executed") && !strings.Contains(line, "outbox_ranges") && !strings.Contains(line, "id_seq") {
				t.Errorf("%s reads a table through: %s", name, lines[i])
			}
		}
		// the index lacks the id, but such rows are few
		sorts := strings.Contains(plan, "Sort Method") && name != "DLQ by aggregate" && name != "probe"
		if sorts || strings.Contains(plan, "Rows Removed by Filter") && name != "edges" && !strings.Contains(name, "by event") {
			t.Errorf("%s reads rows that it discards, or sorts:\n%s", name, plan)
		}
	}
}

func TestARangeIsIndexedOnceWhenItIsArchived(t *testing.T) {
	owner := testkit.Postgres(t).Pool(t, postgres.RoleOwner)
	smallRanges(t, owner, 3, 100)
	fill(t, owner, 1, 250, 10*archiveDay)
	exec(t, owner, `UPDATE outbox_partitions SET floor_id = 200`)
	exec(t, owner, `SELECT outbox_range_archive(1, 0), outbox_range_archive(101, 0)`)
	for _, c := range []struct {
		first int
		want  bool
	}{{1, true}, {1, false}, {201, false}, {101, true}, {101, false}} {
		if got := scalar[bool](t, owner, `SELECT outbox_range_index($1)`, c.first); got != c.want {
			t.Errorf("the range from %d is indexed now: %t, want %t", c.first, got, c.want)
		}
	}
}

// A hundred days of ranges: most archived, one dropped and restored. In each state an event is
// found by its id with one probe of one range, also by a generic plan.
func TestAnEventOfAnyAgeIsFoundInOneRangeAndInTime(t *testing.T) {
	db := testkit.Postgres(t)
	owner, pool := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleSystem)
	const ranges, ids = 100, 100
	smallRanges(t, owner, ranges, ids)
	fill(t, owner, 1, ranges*ids-50, 10*archiveDay)
	exec(t, owner, `UPDATE outbox_partitions SET floor_id = $1`, (ranges-10)*ids)
	for first := 1; first < (ranges-10)*ids; first += ids {
		exec(t, owner, `SELECT outbox_range_archive($1, 0), outbox_range_index($1)`, first)
	}
	exec(t, owner, `ANALYZE outbox_messages, outbox_messages_archive`)
	event := func(id int64) string {
		return scalar[string](t, owner, `SELECT event_id::text
			FROM (SELECT id, event_id FROM outbox_messages UNION ALL SELECT id, event_id FROM outbox_messages_archive) m WHERE id = $1`, id)
	}
	restored := event(77)
	exec(t, owner, `INSERT INTO outbox_messages_kept (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, processed_at, attempts, event_id, inserted_at)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at, 0,
		event_id, inserted_at FROM outbox_messages_archive WHERE id <= 100`)
	exec(t, owner, `SELECT outbox_range_drop(1)`)
	for where, id := range map[string]string{"the hot range": event(ranges*ids - 60), "the oldest range": event(150),
		"what was restored": restored} {
		times := make([]time.Duration, 9)
		for i := range times {
			pool.Reset() // a command has its own connection, without a cached plan
			start := time.Now()
			if found, err := Find(t.Context(), pool, FindQuery{EventID: id, Limit: 1}); err != nil || len(found) != 1 || found[0].ID != id {
				t.Fatalf("%s: %+v, %v", where, found, err)
			}
			times[i] = time.Since(start)
		}
		slices.Sort(times)
		t.Logf("%s: %s to %s, median %s", where, times[0], times[len(times)-1], times[len(times)/2])
		if times[0] > 500*time.Millisecond { // the fastest run: slower ones measure the load of the machine
			t.Errorf("an event of %s is found in %s", where, times)
		}
	}
	values := strings.NewReplacer("@payload::boolean", "true", "@tenant", "NULL", "@since", "NULL", "@until", "NULL", "@event_id",
		"gen_random_uuid()", "@limit", "1")
	for what, sql := range map[string]string{"the outbox": outboxRow + byIDAndEvent, "the archive": archiveRow + byIDAndEvent,
		"the outbox by id": outboxRow + byID, "the archive by id": archiveRow + byID} {
		for _, generic := range []bool{true, false} {
			plan := explain(t, pool, generic, values.Replace(sql), pgx.NamedArgs{"id": 150})
			if n := strings.Count(plan, "Index Scan using"); n > 1 || strings.Contains(plan, "Seq Scan") ||
				generic && !strings.Contains(plan, "Subplans Removed") {
				t.Errorf("%s, generic plan: %t, reads %d ranges:\n%s", what, generic, n, plan)
			}
		}
	}
}
