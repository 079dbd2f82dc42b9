package followercounts

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
)

// scanned runs a statement, and returns the number of rows that it read of each table, with the
// ones that it threw away.
func scanned(ctx context.Context, tx pgx.Tx, sql string, args pgx.StrictNamedArgs) (map[string]float64, error) {
	var raw []byte
	if err := tx.QueryRow(ctx, "EXPLAIN (ANALYZE, FORMAT JSON) "+sql, args).Scan(&raw); err != nil {
		return nil, err
	}
	var plans []map[string]any
	if err := json.Unmarshal(raw, &plans); err != nil {
		return nil, err
	}
	rows := make(map[string]float64)
	var visit func(node map[string]any)
	visit = func(node map[string]any) {
		if table, ok := node["Relation Name"].(string); ok {
			removed, _ := node["Rows Removed by Filter"].(float64)
			rows[table] += (node["Actual Rows"].(float64) + removed) * node["Actual Loops"].(float64)
		}
		children, _ := node["Plans"].([]any)
		for _, child := range children {
			visit(child.(map[string]any))
		}
	}
	visit(plans[0]["Plan"].(map[string]any))
	return rows, nil
}

// TestManyObjectsAreProbes reads the counts of 200 users of 5,000, and their relations to one user
// by three kinds, in tables with and without statistics.
func TestManyObjectsAreProbes(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	ctx := t.Context()
	const objects, asked = 5000, 200
	var ids, me []event.ID
	var pairs []Pair
	for n := range asked {
		ids, me = append(ids, event.IDOf(n*objects/asked+1)), append(me, "me")
		pairs = append(pairs, Pair{"me", ids[n]})
	}
	for _, sql := range []string{
		`INSERT INTO edge_counts (tenant_id, kind, object_id, incoming, outgoing)
		 SELECT 1, kind, n, 2, 3 FROM generate_series(1, $1::int) n, unnest('{follow,like,share,membership}'::text[]) kind`,
		`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at, attributes)
		 SELECT 1, kind, 'me', n, true, 1, '2026-01-01', jsonb_build_object('role', n::text)
		   FROM generate_series(1, $1::int) n, unnest('{follow,like,membership}'::text[]) kind`,
		`INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		 SELECT 1, kind, n, 'me', true, 1, '2026-01-01'
		   FROM generate_series(1, $1::int) n, unnest('{follow,like,membership}'::text[]) kind`,
	} {
		if _, err := pool.Exec(ctx, sql, objects); err != nil {
			t.Fatal(err)
		}
	}
	names, all := []string{"follow", "like", "membership"}, []kinds.Edge{kind("follow"), kind("like"), kind("membership")}
	for _, when := range []string{"without statistics", "with statistics"} {
		if when == "with statistics" {
			if _, err := db.Pool(t, postgres.RoleOwner).Exec(ctx, `ANALYZE edge_counts, edge_lists`); err != nil {
				t.Fatal(err)
			}
		}
		inTenant(t, api, 1, func(ctx context.Context, tx pgx.Tx) error {
			for _, c := range []struct {
				sql  string
				args pgx.StrictNamedArgs
				want map[string]float64
			}{
				{countsSQL, pgx.StrictNamedArgs{"kinds": names, "ids": ids}, map[string]float64{"edge_counts": 3 * asked}},
				{relationsSQL, pgx.StrictNamedArgs{"kinds": names, "mutual": []bool{true, false, false}, "froms": me, "tos": ids,
					"attributed": []bool{false, false, true}}, map[string]float64{"edge_lists": 3*asked + asked}},
			} {
				got, err := scanned(ctx, tx, c.sql, c.args)
				if err != nil {
					return err
				}
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Errorf("%s the statement reads other rows (-want +got):\n%s", when, diff)
				}
			}
			got, err := Relations(ctx, tx, all, append(pairs, Pair{"me", "none"}))
			if err != nil {
				return err
			}
			for i, rs := range got[:asked] {
				if !rs[0].There || !rs[0].Back || rs[0].Attributes != nil || !rs[1].There || rs[1].Back || rs[1].Attributes != nil ||
					rs[2].Back || string(rs[2].Attributes) != fmt.Sprintf(`{"role": %q}`, ids[i]) {
					t.Errorf("%s: %+v", ids[i], rs)
				}
			}
			if diff := cmp.Diff(make([]Relation, 3), got[asked]); diff != "" {
				t.Errorf("an unknown object (-want +got):\n%s", diff)
			}
			return nil
		})
	}
}
