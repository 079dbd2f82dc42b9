//go:build faults

package outbox

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAHundredThousandDeadMessagesAreGroupedByFewPages has large groups and many groups, with older
// statistics. A statement reads some pages per group, or per message that it counts. To read all
// messages for each group takes millions.
func TestAHundredThousandDeadMessagesAreGroupedByFewPages(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	exec(t, pool, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at, attempts,
		       event_id, inserted_at, slot, last_error, cause, dead_at)
		SELECT g, CASE WHEN g % 20 < 10 THEN 1 ELSE 2 END, 'post', g, 'created', 1, jsonb_build_object('text', repeat('x', 300)), now(),
		now(), 11, gen_random_uuid(), now(), 0, 'e', CASE WHEN g % 200 = 0 THEN 'rare ' || g ELSE 'often' END, now()
		  FROM generate_series(1, 100000) g`)
	d := NewDLQ(pool, nil)
	for i, tenant := range []int64{0, 1} {
		all, _, err := d.Groups(t.Context(), tenant)
		if err == nil {
			err = d.CountGroups(t.Context(), tenant, all[:50], time.Time{})
		}
		if err != nil || len(all) != 501 {
			t.Fatalf("tenant %d: %d groups, want 501: %v", tenant, len(all), err)
		}
		var groups []string
		for _, g := range all[:50] {
			groups = append(groups, g.ID)
		}
		for what, sql := range map[string]string{"find": deadTable.Statements()[3+i], "count": deadTable.Statements()[5+i]} {
			n := pagesRead(t, pool, sql, pgx.NamedArgs{"tenant": tenant, "limit": deadletter.MaxGroups + 1, "groups": groups,
				"since": time.Time{}, "most": deadletter.MaxCount + 1})
			t.Logf("tenant %d: to %s the groups takes %d pages", tenant, what, n)
			if n == 0 || n > 30_000 {
				t.Errorf("tenant %d: to %s the groups takes %d pages", tenant, what, n)
			}
		}
	}
}
