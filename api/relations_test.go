package api_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/internal/tokens"
)

// list makes a JSON array of n elements.
func list(n int, element func(i int) string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = element(i)
	}
	return "[" + strings.Join(all, ",") + "]"
}

func pairs(n int) string {
	return `{"pairs":` + list(n, func(i int) string {
		return fmt.Sprintf(`{"follower_id":"%d","followee_id":"9223372036854775807"}`, i+1)
	}) + `}`
}

func ids(n int) string {
	return `{"ids":` + list(n, func(i int) string { return fmt.Sprintf(`"%d"`, 9223372036854775807-i) }) + `}`
}

func TestManyPairsAreAnsweredInTheirOrder(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.exec(t, `INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at) VALUES
		(1, 'follow', 7, 42, true, 1, '2026-01-01'), (1, 'follow', 42, 7, true, 3, '2026-01-02'),
		(1, 'follow', 7, 8, true, 1, '2026-01-03'), (1, 'follow', 7, 9, false, 2, '2026-01-04'),
		(2, 'follow', 8, 7, true, 1, '2026-01-05')`)

	reader := f
	reader.token = f.newToken(t, tenant, "reader", tokens.RoleRead)
	a := reader.want(t, 200, "POST", "/v1/follows:check",
		`{"pairs":[{"follower_id":"7","followee_id":"8"},{"follower_id":"42","followee_id":"7"},
		{"follower_id":"7","followee_id":"9"},{"follower_id":"8","followee_id":"7"},
		{"follower_id":"7","followee_id":"7"},{"follower_id":"7","followee_id":"8"}]}`)
	relation := func(follower, followee, positioned string, back bool) any {
		m := map[string]any{"follower_id": follower, "followee_id": followee, "following": positioned != "", "followed_by": back}
		if positioned != "" {
			m["positioned_at"] = positioned + "T00:00:00.000000Z"
		}
		return m
	}
	want := []any{relation("7", "8", "2026-01-03", false), relation("42", "7", "2026-01-02", true), relation("7", "9", "", false),
		relation("8", "7", "", true), relation("7", "7", "", false), relation("7", "8", "2026-01-03", false)}
	if diff := cmp.Diff(want, a.json["items"]); diff != "" || a.text("as_of") == "" {
		t.Errorf("relations (-want +got):\n%s", diff)
	}
	if a := reader.want(t, 200, "POST", "/v1/follows:check", pairs(500)); len(itemsOf(a)) != 500 {
		t.Errorf("%d items, want 500", len(itemsOf(a)))
	}
}

func TestMutualsOverHTTP(t *testing.T) {
	t.Parallel()
	f := open(t)
	// 1 follows 10 to 29; the even ones follow 2, and 14 and 15 follow 1.
	f.exec(t, `INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		SELECT 1, 'follow', 1, g, true, 1, timestamptz '2026-01-01' + (g / 4) * interval '1 s' FROM generate_series(10, 29) g
		UNION ALL SELECT 1, 'follow', g, 2, true, 1, timestamptz '2026-01-01' FROM generate_series(10, 29, 2) g
		UNION ALL SELECT 1, 'follow', g, 1, g <> 16, 1, timestamptz '2026-01-01' FROM generate_series(14, 16) g`)
	users := func(path string) (got []string, truncated bool) {
		a := f.want(t, 200, "GET", path, "")
		for _, item := range a.json["items"].([]any) {
			got = append(got, item.(map[string]any)["user_id"].(string))
		}
		return got, a.json["truncated"].(bool)
	}
	all := []string{"28", "26", "24", "22", "20", "18", "16", "14", "12", "10"}
	for limit := range 12 {
		got, truncated := users(fmt.Sprintf("/v1/users/1/mutuals/2?limit=%d", limit+1))
		if want := all[:min(limit+1, len(all))]; !slices.Equal(got, want) || truncated != (limit+1 < len(all)) {
			t.Errorf("limit %d: %v, truncated %t", limit+1, got, truncated)
		}
	}
	if got, truncated := users("/v1/users/1/mutuals/1"); !slices.Equal(got, []string{"15", "14"}) || truncated {
		t.Errorf("mutual followers: %v, truncated %t", got, truncated)
	}
	if got, truncated := users("/v1/users/77/mutuals/2"); len(got) > 0 || truncated {
		t.Errorf("of an unknown user: %v, truncated %t", got, truncated)
	}
}
