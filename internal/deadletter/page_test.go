package deadletter_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestThePagesOfAFilterHaveTheLettersOfItsList compares the pages with the list, which reads every
// letter: with few letters, which an index finds, and with so many that Page reads windows of them.
func TestThePagesOfAFilterHaveTheLettersOfItsList(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	const most, size = 300, 30
	for _, n := range []int{most, 4 * most} {
		if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `TRUNCATE consumer_dead_letters`); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id,
				aggregate_type, aggregate_id, event_id, event_type, event_version, headers, payload, error, cause, dead_at)
			SELECT 'c' || g % 2, g, 'EVENTS-0', 1 + g % 3, 'comment', g % 40, gen_random_uuid(), 'type' || g % 2, 1, '{}', '', 'e', 'cause',
				timestamptz '2030-01-01' - make_interval(secs => g % 200) FROM generate_series(1, $1::int) g`, n); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), `UPDATE consumer_dead_letters SET event_type = 'rare' WHERE stream_seq IN (5, $1::int - 3)`,
			n); err != nil {
			t.Fatal(err)
		}
		r := consumers.NewDeadLetters[consumers.Projection](pool).Reader
		r.Narrow(40, 3, most)
		groups, _, err := r.Groups(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		var group string
		for _, g := range groups {
			if g.Consumer == "c0" && g.EventType == "type0" {
				group = g.ID
			}
		}
		first, late := time.Date(2029, 12, 31, 23, 57, 0, 0, time.UTC), time.Date(2029, 12, 31, 23, 59, 0, 0, time.UTC)
		for name, f := range map[string]deadletter.Filter{
			"all": {}, "a tenant": {TenantID: 2}, "a rare type": {EventType: "rare"}, "a type": {EventType: "type1", Consumer: "c1"},
			"no such type": {EventType: "none"}, "a time": {DeadAfter: first, DeadBefore: late}, "another time": {DeadBefore: first},
			"no time":           {DeadAfter: late.AddDate(1, 0, 0)},
			"an aggregate":      {TenantID: 2, AggregateType: "comment", AggregateID: event.IDOf(4)},
			"an aggregate type": {AggregateType: "comment"}, "another aggregate type": {AggregateType: "post"},
			"a group": {Group: group}, "a group of a tenant": {Group: group, TenantID: 3},
			"a group at a time":         {Group: group, DeadAfter: first},
			"the first ones of a group": {Group: group, First: true}, "ids": {IDs: []int64{3, 1, 2}},
		} {
			want, err := postgres.Collect(r.List(t.Context(), f, -1))
			if err != nil {
				t.Fatal(err)
			}
			var got []deadletter.Letter
			var next deadletter.Place
			for pages := 0; pages == 0 || next.ID != 0; pages++ {
				var page []deadletter.Letter
				if page, next, err = deadletter.Page(t.Context(), &r, f, next, size); err != nil || len(page) > size || pages > n {
					t.Fatalf("%d letters, %s: page %d has %d letters: %v", n, name, pages, len(page), err)
				}
				got = append(got, page...)
			}
			if f.Group != "" {
				slices.SortStableFunc(want, func(a, b deadletter.Letter) int { return a.DeadAt.Compare(b.DeadAt) })
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%d letters, %s: the pages have %d letters, want %d", n, name, len(got), len(want))
			}
			counted, few, err := deadletter.CountFew(t.Context(), &r, f)
			if err != nil || few && counted != int64(len(want)) || !few && n == most {
				t.Errorf("%d letters, %s: counted %d, %v, %v; want %d", n, name, counted, few, err, len(want))
			}
		}
	}
}

// TestTheOutboxHasPagesToo has letters whose ids are not in the order in which they died.
func TestTheOutboxHasPagesToo(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type,
			event_version, payload, occurred_at, available_at, attempts, event_id, inserted_at, slot, cause, dead_at)
		SELECT g, 7, 'post', 1, 'made', 1, '{}', now(), now(), 11, gen_random_uuid(), now(), 0, 'cause', now() - make_interval(secs => g)
		FROM generate_series(1, 3) g`); err != nil {
		t.Fatal(err)
	}
	r := outbox.NewDLQ(pool, nil).Reader
	groups, _, err := r.Groups(t.Context(), 7)
	if err != nil || len(groups) != 1 {
		t.Fatal(groups, err)
	}
	for _, c := range []struct {
		filter deadletter.Filter
		want   []int64
	}{
		{deadletter.Filter{Group: groups[0].ID}, []int64{3, 2, 1}},
		{deadletter.Filter{TenantID: 7, AggregateType: "post", AggregateID: "1"}, []int64{1, 2, 3}},
		{deadletter.Filter{TenantID: 8}, nil},
	} {
		page, next, err := deadletter.Page(t.Context(), &r, c.filter, deadletter.Place{}, 3)
		var got []int64
		for _, l := range page {
			got = append(got, l.ID)
		}
		if err != nil || !slices.Equal(got, c.want) || next.ID != 0 {
			t.Errorf("%+v: %v, next %v, %v; want %v", c.filter, got, next, err, c.want)
		}
	}
	for _, conn := range pool.AcquireAllIdle(t.Context()) { // PostgreSQL may plan a prepared statement for any arguments
		var prepared string
		err := conn.QueryRow(t.Context(), `SELECT coalesce(string_agg(statement, E'\n'), '') FROM pg_prepared_statements
			WHERE statement ~ '/[*] deadletter[.](list|ids)'`).Scan(&prepared)
		conn.Release()
		if err != nil || prepared != "" {
			t.Errorf("prepared: %s, %v", prepared, err)
		}
	}
}
