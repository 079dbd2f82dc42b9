//go:build faults

package threadcache

import (
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAPageForModeratorsCostsItsRows has 20,000 pending, 20,000 hidden and 20,000 visible children,
// before and after the planner has statistics.
func TestAPageForModeratorsCostsItsRows(t *testing.T) {
	db := testkit.Postgres(t)
	owner, api := db.Pool(t, postgres.RoleOwner), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	if _, err := owner.Exec(ctx, `
INSERT INTO child_lists (tenant_id, kind, child_id, object_id, slug, path, author_id, body, author_state, moderation_state, version,
	created_at, updated_at, visible, shown)
SELECT 1, 'comment', ('00000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid, 1 + n % 5, lpad(n::text, 8, '0'),
	lpad(n::text, 22, '0'), 1 + n % 7, 'body', 'ACTIVE',
       (ARRAY['PENDING', 'HIDDEN', 'NONE'])[1 + n % 3], 1, $1::timestamptz + n * interval '1 second', $1, n % 3 = 2, n % 3 = 2
  FROM generate_series(1, 60000) n`, start); err != nil {
		t.Fatal(err)
	}
	const limit = 50
	for _, when := range []string{"before", "after"} {
		err := postgres.InTenant(ctx, api, 1, pgx.TxOptions{}, func(tx pgx.Tx) error {
			for name, of := range map[string]Moderated{
				"child_lists_moderated_idx":        {State: event.ModerationPending},
				"child_lists_moderated_object_idx": {State: event.ModerationHidden, Object: "3"},
				"child_lists_moderated_author_idx": {State: event.ModerationPending, Author: "4"},
			} {
				sql, args := of.sql("comment")
				args["limit"], args["created_at"], args["child_id"] = limit, start.Add(9e12), zeroID
				rows, indexes, err := explain(ctx, tx, sql, args)
				if diff := gocmp.Diff(map[string]bool{name: true}, indexes); err != nil || diff != "" || rows["child_lists"] != limit {
					t.Errorf("%s ANALYZE, %+v reads %v, %v (-want +got):\n%s", when, of, rows, err, diff)
				}
			}
			rows, indexes, err := explain(ctx, tx, waitingSQL,
				pgx.StrictNamedArgs{"kind": "comment", "after": "2", "limit": 2, "most": limit})
			want := map[string]bool{"child_lists_moderated_object_idx": true, "child_settings_pkey": true}
			if diff := gocmp.Diff(want, indexes); err != nil || diff != "" || rows["child_lists"] > 2*limit+10 {
				t.Errorf("%s ANALYZE, threads that wait read %v, %v (-want +got):\n%s", when, rows, err, diff)
			}
			got, err := WaitingThreads(ctx, tx, "comment", "3", 9)
			if err != nil || len(got) != 2 || got[0].Object != "4" || got[0].Children != maxWaiting || got[1].Object != "5" {
				t.Errorf("threads that wait: %+v, %v", got, err)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := owner.Exec(ctx, "ANALYZE child_lists"); err != nil {
			t.Fatal(err)
		}
	}
}
