package api_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// bury writes n dead messages of the tenant, with ids from first on. They died a day apart.
func (f fixture) bury(t *testing.T, tenant, first, n int) {
	t.Helper()
	f.exec(t, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
		occurred_at, available_at,
			attempts, last_error, event_id, inserted_at, slot, dead_at)
		SELECT g, $1, 'post', g % 3, 'type ' || g % 2, 1, jsonb_build_object('n', g), timestamptz '2026-01-01', now(), 11, 'no token',
		       ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid, timestamptz '2026-01-01', 0,
		       timestamptz '2026-02-01' + (g - $2::int) * interval '1 day'
		  FROM generate_series($2::int, $2::int + $3::int - 1) g`, tenant, first, n)
}

func TestTheDLQOverHTTP(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), reg: prometheus.NewRegistry()}
	pool := db.Pool(t, postgres.RoleAPI)
	var woken []int
	var err error
	f.Handler, err = api.New(config(), api.Deps{
		Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, func(p int) { woken = append(woken, p) }), Projections: pool,
		Fleet: fleet, Log: testkit.Logger(t), Reg: f.reg,
	})
	if err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "console", tokens.RoleAdmin)
	f.bury(t, tenant, 1, 10)
	f.bury(t, 2, 50, 1)
	const path = "/v1/outbox/dlq"

	for query, want := range map[string][]string{
		"?":                    {"1", "2", "3", "4", "5", "6", "7", "8", "9", "10"},
		"?event_type=type%200": {"2", "4", "6", "8", "10"},
		"?aggregate_id=2":      {"2", "5", "8"},
		"?aggregate_type=post&aggregate_id=1&event_type=type%201":                  {"1", "7"},
		"?dead_before=2026-02-03T00:00:00Z":                                        {"1", "2"},
		"?dead_after=2026-02-08T00:00:00Z&dead_before=2026-02-09T00:00:00.000001Z": {"8", "9"},
		"?aggregate_type=nope":                                                     nil,
	} {
		for _, limit := range []int{3, 200} {
			items, _ := f.walk(t, path+query, limit)
			var got []string
			for _, item := range items {
				got = append(got, item["id"].(string))
				if item["payload"] != nil {
					t.Errorf("a list has a payload: %v", item)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s by %d: %v, want %v", query, limit, got, want)
			}
		}
	}

	one := f.want(t, 200, "GET", path+"/2", "")
	want := map[string]any{
		"id": "2", "event_id": "00000000-0000-4000-8000-000000000002", "aggregate_type": "post",
		"aggregate_id": "2", "event_type": "type 0",
		"event_version": 1.0, "attempts": 11.0, "last_error": "no token", "occurred_at": "2026-01-01T00:00:00.000000Z",
		"inserted_at": "2026-01-01T00:00:00.000000Z", "dead_at": "2026-02-02T00:00:00.000000Z", "payload": map[string]any{"n": 2.0},
	}
	if diff := cmp.Diff(want, one.json); diff != "" {
		t.Errorf("a message (-want +got):\n%s", diff)
	}

	retried := f.want(t, 200, "POST", path+"/2:retry", `{"reason":"mended"}`, "Tidings-Actor: ann")
	want = map[string]any{
		"at": retried.text("at"), "actor": "ann", "action": "retry", "id": "2", "event_id": "00000000-0000-4000-8000-000000000002",
		"aggregate_type": "post", "aggregate_id": "2", "event_type": "type 0", "new_id": retried.text("new_id"), "reason": "mended",
	}
	if diff := cmp.Diff(want, retried.json); diff != "" || len(woken) != 1 {
		t.Errorf("a retry, which woke %v (-want +got):\n%s", woken, diff)
	}
	discarded := f.want(t, 200, "POST", path+"/3:discard", "")
	want = map[string]any{
		"at": discarded.text("at"), "actor": "console", "action": "discard", "id": "3", "event_id": "00000000-0000-4000-8000-000000000003",
		"aggregate_type": "post", "aggregate_id": "0", "event_type": "type 1",
	}
	if diff := cmp.Diff(want, discarded.json); diff != "" || len(woken) != 1 {
		t.Errorf("a discard, which woke %v (-want +got):\n%s", woken, diff)
	}

	before := f.rows(t)
	for _, c := range [][2]string{
		{"POST", "/2:retry"}, {"POST", "/2:discard"}, {"POST", "/3:retry"}, {"GET", "/3"}, // gone
		{"GET", "/50"}, {"POST", "/50:retry"}, {"POST", "/50:discard"}, // another tenant's
	} {
		if a := f.do(t, c[0], path+c[1], ""); a.StatusCode != 404 || a.text("code") != "not-found" {
			t.Errorf("%s %s: %d %s, want 404", c[0], c[1], a.StatusCode, a.body)
		}
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("something was written (-before +after):\n%s", diff)
	}
	var got string
	if err := f.system.QueryRow(t.Context(), `
		SELECT (SELECT string_agg(concat_ws(' ', actor, action, dlq_id, tenant_id, reason), '; ' ORDER BY id)
		FROM outbox_dlq_actions) || '; ' ||
		       (SELECT string_agg(concat_ws(' ', id, event_type, payload), '; ') FROM outbox_messages) || '; ' || (SELECT count(*)
		       FROM outbox_messages_dlq)`).Scan(&got); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf(`ann retry 2 1 mended; console discard 3 1 ; %s type 0 {"n": 2}; 9`, retried.text("new_id")); got != want {
		t.Errorf("the database has\n%s, want\n%s", got, want)
	}
	// Whatever actor the caller names, the audit has the token.
	if err := f.system.QueryRow(t.Context(), `SELECT string_agg(DISTINCT token, '; ') FROM outbox_dlq_actions`).Scan(&got); err != nil {
		t.Fatal(err)
	}
	if want := "console " + tokens.Fingerprint(f.token); got != want {
		t.Errorf("the audit has the tokens %q, want %q", got, want)
	}
	if page := f.want(t, 200, "GET", "/docs", "", "Authorization"); !strings.Contains(page.body, "/v1/outbox/dlq/{message_id}:retry") {
		t.Error("the page does not know the routes")
	}
}
