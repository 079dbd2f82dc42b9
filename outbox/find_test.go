package outbox

import (
	"errors"
	"fmt"
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
	exec(t, pool, `SELECT outbox_archive_make_month(m::date) FROM unnest($1::date[]) m`, newArchive(t, pool, 1).cfg.wanted(time.Now()))
	fill(t, pool, 1, 4, 10*archiveDay) // ids 1 to 4, of the posts 1 to 4
	archive(t, newArchive(t, pool, 10))
	fill(t, pool, 1, 4, 2*time.Hour) // 5 to 8
	fill(t, pool, 2, 4, time.Hour)   // 9 to 12
	exec(t, pool, `WITH d AS (DELETE FROM outbox_messages WHERE id IN (6, 10) RETURNING *)
		INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id, inserted_at, slot FROM d`)
	eventID := func(table string, id int64) string {
		return scalar[string](t, pool, `SELECT event_id::text FROM `+table+` WHERE id = $1`, id)
	}
	now := time.Now()
	for name, c := range map[string]struct {
		q    FindQuery
		want string
	}{
		"an id of the outbox":              {FindQuery{OutboxID: 5}, "outbox 5"},
		"an id of the archive":             {FindQuery{OutboxID: 3}, "archive 3"},
		"an id of the DLQ":                 {FindQuery{OutboxID: 6}, "dlq 6"},
		"an id of another tenant":          {FindQuery{OutboxID: 6, TenantID: 2}, ""},
		"an event of the archive":          {FindQuery{EventID: eventID("outbox_messages_archive", 2)}, "archive 2"},
		"an event of the DLQ":              {FindQuery{EventID: eventID("outbox_messages_dlq", 10)}, "dlq 10"},
		"an event of the outbox":           {FindQuery{EventID: eventID("outbox_messages", 5), Recent: 8}, "outbox 5"},
		"an event of the outbox, too old":  {FindQuery{EventID: eventID("outbox_messages", 5), Recent: 7}, ""},
		"an aggregate":                     {FindQuery{TenantID: 1, AggregateType: "post", AggregateID: 2}, "archive 2, dlq 6"},
		"an aggregate, lately":             {FindQuery{TenantID: 1, AggregateType: "post", AggregateID: 2, Since: now.Add(-24 * time.Hour)}, "dlq 6"},
		"a time":                           {FindQuery{Since: now.Add(-11 * archiveDay), Until: now.Add(-90 * time.Minute)}, "archive 1, archive 2, archive 3, archive 4, outbox 5, dlq 6, outbox 7, outbox 8"},
		"a time, to now, of a tenant":      {FindQuery{Since: now.Add(-3 * time.Hour), TenantID: 2}, "outbox 9, dlq 10, outbox 11, outbox 12"},
		"a time, the first":                {FindQuery{Since: now.Add(-11 * archiveDay), Limit: 6}, "archive 1, archive 2, archive 3, archive 4, outbox 5, dlq 6"},
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
	exec(t, pool, `UPDATE outbox_messages SET partition = 7 WHERE id = 5`)
	for id, want := range map[int64]int{5: 7, 7: -1, 6: -1} {
		if found, err := Find(t.Context(), pool, FindQuery{OutboxID: id, Limit: 1}); err != nil || len(found) != 1 || found[0].Partition != want {
			t.Errorf("message %d: %+v, %v; want partition %d", id, found, err, want)
		}
	}
	for _, q := range []FindQuery{{}, {AggregateType: "post", AggregateID: 2}, {Until: now}, {TenantID: 1}} {
		if _, err := Find(t.Context(), pool, q); !errors.Is(err, ErrFindQuery) {
			t.Errorf("%+v: %v, want ErrFindQuery", q, err)
		}
	}
}

func TestEachWayToFindAnEventIsByAnIndex(t *testing.T) {
	db := testkit.Postgres(t)
	owner, pool := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleSystem)
	exec(t, pool, `SELECT outbox_archive_make_month(m::date) FROM unnest($1::date[]) m`, newArchive(t, pool, 1).cfg.wanted(time.Now()))
	fill(t, owner, 1, 5000, 40*archiveDay)
	fill(t, owner, 1, 5000, 10*archiveDay)
	exec(t, owner, `UPDATE outbox_messages SET aggregate_id = 7 WHERE id % 3 = 0`) // an aggregate too large to sort
	archive(t, newArchive(t, pool, 10000))
	fill(t, owner, 1, 10000, archiveDay)
	exec(t, owner, `UPDATE outbox_messages SET occurred_at = now() - id * interval '1 s'`)
	exec(t, owner, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, attempts, event_id, inserted_at, slot)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id, inserted_at, slot FROM outbox_messages LIMIT 3000`)
	exec(t, owner, `ANALYZE outbox_messages, outbox_messages_archive, outbox_messages_dlq`)
	args := pgx.NamedArgs{
		"id": int64(8000), "event_id": "00000000-0000-4000-8000-000000000001", "tenant": int64(1), "aggregate_type": "post", "aggregate_id": int64(7),
		"since": time.Now().Add(-60 * archiveDay), "until": time.Now(), "limit": 5, "payload": true, "above": int64(19_000), "first": int64(13_000), "last": int64(14_000),
	}
	for name, sql := range map[string]string{
		"outbox by id": outboxRow + byID, "archive by id": archiveRow + byID, "DLQ by id": dlqRow + byID,
		"archive by event": archiveRow + byEvent, "DLQ by event": dlqRow + byEvent,
		"archive by aggregate": archiveRow + byAggregate, "DLQ by aggregate": dlqRow + dlqByAggregate,
		"archive by time": archiveRow + byTime, "DLQ by time": dlqRow + byTime,
		"outbox by range": outboxRow + byIDRange, "outbox by recent event": outboxRow + byRecentEvent, "probe": strings.ReplaceAll(probeSQL, "@from", "@id"), "edges": edgesSQL,
	} {
		rows, _ := pool.Query(t.Context(), "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) "+sql, pgx.QueryExecModeExec, args)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		plan := strings.Join(lines, "\n")
		filtered := strings.Contains(plan, "Rows Removed by Filter") && name != "outbox by recent event" // which filters what it says
		for i, line := range lines {                                                                     // an empty partition may be read in any way
			if strings.Contains(line, "Seq Scan") && !strings.Contains(line, "actual rows=0") && !strings.Contains(line, "never executed") {
				t.Errorf("%s reads a table through: %s", name, lines[i])
			}
		}
		if filtered || strings.Contains(plan, "Sort Method") && name != "DLQ by aggregate" { // whose index does not have the id: they are few
			t.Errorf("%s meets rows that it throws away, or sorts:\n%s", name, plan)
		}
	}
}
