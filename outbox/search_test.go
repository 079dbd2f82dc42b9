package outbox

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestEventsAreSearchedDownTheIDs(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 4, 10*archiveDay) // ids 1 to 4, of posts 1 to 4
	leave(t, pool, 8*archiveDay)
	archive(t, newArchive(t, pool))
	fill(t, pool, 1, 4, 2*time.Hour) // 50000001 to 4
	fill(t, pool, 2, 4, time.Hour)   // 50000005 to 8
	exec(t, pool, `UPDATE outbox_messages SET event_type = 'edited' WHERE id = 50000003`)
	exec(t, pool, `UPDATE outbox_messages SET processed_at = NULL, attempts = 2 WHERE id = 50000004`)
	exec(t, pool, `UPDATE outbox_messages_archive SET occurred_at = inserted_at, partition = 0`)
	exec(t, pool, `WITH d AS (DELETE FROM outbox_messages WHERE id IN (50000002, 50000006) RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
		inserted_at, slot FROM d`)
	const trace = `SET trace_id = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01' WHERE id = `
	exec(t, pool, `UPDATE outbox_messages `+trace+`50000007`)
	exec(t, pool, `UPDATE outbox_messages_archive `+trace+`3`)
	now := time.Now()
	for name, c := range map[string]struct {
		q    SearchQuery
		want string
	}{
		"all":            {SearchQuery{}, "50000008 50000007 50000006 50000005 50000004 50000003 50000002 50000001 4 3 2 1"},
		"a tenant":       {SearchQuery{TenantID: 2}, "50000008 50000007 50000006 50000005"},
		"a type":         {SearchQuery{EventType: "edited"}, "50000003"},
		"an aggregate":   {SearchQuery{TenantID: 1, AggregateType: "post", AggregateID: "2"}, "50000002 2"},
		"one that waits": {SearchQuery{TenantID: 1, AggregateType: "post", AggregateID: "4"}, "50000004 4"},
		"an aggregate, lately": {SearchQuery{TenantID: 1, AggregateType: "post", AggregateID: "3", Since: now.Add(-24 * time.Hour)},
			"50000003"},
		"an aggregate and a type": {SearchQuery{TenantID: 1, AggregateType: "post", AggregateID: "3", EventType: "created"}, "3"},
		"a time": {SearchQuery{Since: now.Add(-11 * archiveDay), Until: now.Add(-90 * time.Minute)},
			"50000004 50000003 50000002 50000001 4 3 2 1"},
		"until then":               {SearchQuery{Until: now.Add(-9 * archiveDay)}, "4 3 2 1"},
		"a time of a tenant":       {SearchQuery{Since: now.Add(-90 * time.Minute), TenantID: 1}, ""},
		"an aggregate of another":  {SearchQuery{TenantID: 3, AggregateType: "post", AggregateID: "3"}, ""},
		"an aggregate type":        {SearchQuery{AggregateType: "user"}, ""},
		"below an id of a search":  {SearchQuery{Before: 50000002, EventType: "created"}, "50000001 4 3 2 1"},
		"pending":                  {SearchQuery{State: StatePending}, "50000004"},
		"dead":                     {SearchQuery{State: StateDead}, "50000006 50000002"},
		"published":                {SearchQuery{State: StatePublished}, "50000008 50000007 50000005 50000003 50000001 4 3 2 1"},
		"dead of an aggregate":     {SearchQuery{State: StateDead, TenantID: 1, AggregateType: "post", AggregateID: "2"}, "50000002"},
		"a trace":                  {SearchQuery{TraceID: "0af7651916cd43dd8448eb211c80319c"}, "50000007 3"},
		"another trace":            {SearchQuery{TraceID: "1af7651916cd43dd8448eb211c80319c"}, ""},
		"an aggregate below an id": {SearchQuery{Before: 50000002, TenantID: 1, AggregateType: "post", AggregateID: "2"}, "2"},
	} {
		for _, limit := range []int{1, 2, 100} {
			c.q.Limit = limit
			var got []string
			pages := 0
			for q := c.q; ; pages++ {
				s, err := Search(t.Context(), pool, q)
				if err != nil || len(s.Found) > limit || pages > 20 {
					t.Fatalf("%s: page %d of %d: %+v, %v", name, pages, limit, s, err)
				}
				for _, f := range s.Found {
					got = append(got, fmt.Sprint(f.OutboxID))
					if f.InsertedAt.IsZero() || (f.Where == InDLQ) == f.DeadAt.IsZero() {
						t.Errorf("%s: %+v", name, f)
					}
				}
				if q.Before = s.Next; s.Next == 0 {
					break
				}
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("%s, by %d: %v; want %s", name, limit, got, c.want)
			}
		}
	}
	one := SearchQuery{TenantID: 1, AggregateType: "post", AggregateID: "4", Limit: 9}
	for state, want := range map[State]int64{StatePending: 50000004, StatePublished: 4} {
		one.State = state
		if s, err := Search(t.Context(), pool, one); err != nil || len(s.Found) != 1 || s.Found[0].OutboxID != want {
			t.Errorf("%s of an aggregate: %+v, %v; want %d", state, s, err, want)
		}
	}
	for _, q := range []SearchQuery{{}, {State: "lost", Limit: 1}, {AggregateID: "3", Limit: 1},
		{AggregateID: "3", TenantID: 1, Limit: 1}} {
		if _, err := Search(t.Context(), pool, q); err == nil {
			t.Errorf("%+v: no error", q)
		}
	}
}

// TestTheEventsBesideAnEventAreFound walks an aggregate's events from the archive through the DLQ
// and the outbox, in both directions.
func TestTheEventsBesideAnEventAreFound(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	fill(t, pool, 1, 4, 10*archiveDay) // ids 1 to 4, of posts 1 to 4
	leave(t, pool, 8*archiveDay)
	archive(t, newArchive(t, pool))
	fill(t, pool, 1, 4, 2*time.Hour) // 50000001 to 4
	exec(t, pool, `UPDATE outbox_messages SET aggregate_id = '2'`)
	exec(t, pool, `UPDATE outbox_messages SET processed_at = NULL, attempts = 2 WHERE id = 50000004`)
	exec(t, pool, `WITH d AS (DELETE FROM outbox_messages WHERE id = 50000002 RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
		available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
		inserted_at, slot FROM d`)
	exec(t, pool, `INSERT INTO outbox_messages (id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT id + 30000, gen_random_uuid(), tenant_id, aggregate_type, aggregate_id, event_type, payload FROM outbox_messages
		 WHERE id = 50000003`)
	all, err := Search(t.Context(), pool, SearchQuery{TenantID: 1, AggregateType: "post", AggregateID: "2", Limit: 10})
	if err != nil || len(all.Found) != 6 {
		t.Fatalf("%+v, %v", all, err)
	}
	for i, f := range all.Found {
		want := [2]string{}
		if i > 0 && i < 5 { // those before the latest are more than 20,000 ids away
			want[0] = all.Found[i+1].ID
		}
		if i > 1 {
			want[1] = all.Found[i-1].ID
		}
		before, after, err := Neighbors(t.Context(), pool, f.Event)
		if err != nil || before != want[0] || after != want[1] {
			t.Errorf("beside %d: %s and %s, %v; want %v", f.OutboxID, before, after, err, want)
		}
	}
}

func TestASearchLooksAtABoundedNumberOfRows(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	exec(t, pool, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, inserted_at, available_at,
		processed_at)
		SELECT 1, 'post', n, CASE WHEN n = 1000 THEN 'rare' ELSE 'created' END, '{}', now() - interval '1 h', now() - interval '1 h', now()
		FROM generate_series(1, 205000) n`)
	first, err := Search(t.Context(), pool, SearchQuery{EventType: "rare", Limit: 5})
	if err != nil || len(first.Found) != 0 || first.Next > 6000 || first.Next < 4000 || first.Back.IsZero() {
		t.Errorf("%+v, %v", first, err)
	}
	short, err := Search(t.Context(), pool, SearchQuery{EventType: "rare", Limit: 5, Windows: 1})
	if err != nil || len(short.Found) != 0 || short.Next < 180_000 {
		t.Errorf("one window: %+v, %v", short, err)
	}
	second, err := Search(t.Context(), pool, SearchQuery{EventType: "rare", Limit: 5, Before: first.Next})
	if err != nil || len(second.Found) != 1 || second.Next != 0 {
		t.Errorf("%+v, %v", second, err)
	}
}

func TestAnEventIsFoundByItsSequence(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	publish := func(partition int) { // publishes all rows without a partition, in the order of ids, from sequence 1 on
		exec(t, pool, `UPDATE outbox_messages m SET partition = $1, stream_seq = s.n
			FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM outbox_messages WHERE partition IS NULL) s
			WHERE m.id = s.id`, partition)
	}
	fill(t, pool, 1, 300, 10*archiveDay)
	publish(0)
	leave(t, pool, 8*archiveDay)
	archive(t, newArchive(t, pool))
	fill(t, pool, 1, 300, time.Hour) // 50000001 and up
	publish(1)
	// delayed
	exec(t, pool, `UPDATE outbox_messages m SET stream_seq = CASE id WHEN 50000020 THEN 40 ELSE stream_seq - 1 END WHERE id BETWEEN 50000020
		AND 50000040`)
	// erased
	exec(t, pool, `UPDATE outbox_messages m SET stream_seq = NULL WHERE id = 50000100`)
	for _, c := range []struct {
		partition int
		seq       uint64
		want      []int64
	}{{0, 1, []int64{1}}, {0, 300, []int64{300}}, {0, 301, nil}, {0, 77, []int64{77}}, {1, 1, []int64{50000001}},
		{1, 40, []int64{50000020}}, {1, 39, []int64{50000040}},
		{1, 200, []int64{50000200}}, {1, 300, []int64{50000300}}, {1, 100, nil}, {2, 1, nil}} {
		found, err := FindPublished(t.Context(), pool, 0, Partition{Number: c.partition}, c.seq)
		var got []int64
		for _, f := range found {
			got = append(got, f.OutboxID)
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("sequence %d of %d: %v, %v; want %v", c.seq, c.partition, got, err, c.want)
		}
	}
	if found, err := FindPublished(t.Context(), pool, 2, Partition{Number: 0}, 77); err != nil || len(found) != 0 {
		t.Errorf("of another tenant: %+v, %v", found, err)
	}
	for id, want := range map[int64]string{7: RangeArchived, 50000007: RangeOpen} {
		if p, ok, err := PlaceOf(t.Context(), pool, id); err != nil || !ok || p.State != want || id < p.From || id >= p.To ||
			(want == RangeArchived) == p.ArchivedAt.IsZero() {
			t.Errorf("%d: %+v, %t, %v", id, p, ok, err)
		}
	}
	if _, ok, err := PlaceOf(t.Context(), pool, 1<<62); err != nil || ok {
		t.Errorf("%t, %v", ok, err)
	}
}
