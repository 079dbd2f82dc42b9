package followercounts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/projections"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// follow is the event of a pair's version: ACTIVE when odd. Every other active version is at the same time, to test ties.
func follow(tenant, follower, followee, version int64) event.Event {
	f := event.Follow{FollowerID: event.ID(follower), FolloweeID: event.ID(followee), Status: event.StatusActive, Version: version, Actor: "test"}
	typ := event.Created
	if version%2 == 0 {
		f.Status, typ = event.StatusRemoved, event.Removed
	}
	f.PositionedAt.Time = start.Add(time.Duration((version+1)/2/2) * time.Second)
	f.CreatedAt, f.UpdatedAt = f.PositionedAt, f.PositionedAt
	payload, err := json.Marshal(f)
	if err != nil {
		panic(err)
	}
	return event.Event{ID: fmt.Sprintf("%d-%d-%d-%d", tenant, follower, followee, version), TenantID: tenant, AggregateType: event.AggregateFollow,
		AggregateID: followee, Type: typ, Version: 1, Payload: payload}
}

func apply(t testing.TB, pool *pgxpool.Pool, events ...event.Event) {
	t.Helper()
	ctx := context.Background()
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return New().Apply(ctx, tx, events) }); err != nil {
		t.Fatal(err)
	}
}

func inTenant(t testing.TB, pool *pgxpool.Pool, tenant int64, fn func(ctx context.Context, tx pgx.Tx) error) {
	t.Helper()
	ctx := context.Background()
	if err := postgres.InTenant(ctx, pool, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error { return fn(ctx, tx) }); err != nil {
		t.Fatal(err)
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	for i, sql := range []string{followersSQL, followingSQL, countsSQL, relationsSQL, mutualsOfFollowingSQL, mutualsOfFollowersSQL, edgesSQL, gainSQL, holdCountsSQL, addCountsSQL,
		edgeRowsSQL, countRowsSQL, windowCountsSQL, dropEdgesSQL, recountSQL} {
		query, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, nil, sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, fmt.Sprintf("PREPARE s%d AS %s", i, query)); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

func counts(t testing.TB, pool *pgxpool.Pool, tenant int64, users ...int64) (got map[int64]Counts) {
	inTenant(t, pool, tenant, func(ctx context.Context, tx pgx.Tx) (err error) {
		got, err = ReadCounts(ctx, tx, users)
		return err
	})
	return got
}

func TestCountsMoveOnlyWhenAPairsStateDoes(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, step := range []struct {
		name   string
		events []event.Event
		want   map[int64]Counts
	}{
		{"a follow counts on both sides", []event.Event{follow(1, 7, 42, 1)}, map[int64]Counts{7: {0, 1}, 42: {1, 0}, 9: {}}},
		{"the same event again counts nothing", []event.Event{follow(1, 7, 42, 1), follow(1, 7, 42, 1)}, map[int64]Counts{7: {0, 1}, 42: {1, 0}, 9: {}}},
		{"removed and followed again in one batch is no change", []event.Event{follow(1, 7, 42, 2), follow(1, 7, 42, 3)}, map[int64]Counts{7: {0, 1}, 42: {1, 0}, 9: {}}},
		{"an old event is passed over", []event.Event{follow(1, 7, 42, 2)}, map[int64]Counts{7: {0, 1}, 42: {1, 0}, 9: {}}},
		{"one account may gain and lose in one batch", []event.Event{follow(1, 7, 42, 4), follow(1, 9, 7, 1)}, map[int64]Counts{7: {1, 0}, 42: {0, 0}, 9: {0, 1}}},
		{"a pair first heard of when removed counts nothing", []event.Event{follow(1, 5, 9, 2)}, map[int64]Counts{7: {1, 0}, 42: {0, 0}, 9: {0, 1}}},
		{"its older event, late, counts nothing", []event.Event{follow(1, 5, 9, 1)}, map[int64]Counts{7: {1, 0}, 42: {0, 0}, 9: {0, 1}}},
		{"another tenant's pair is another pair", []event.Event{follow(2, 7, 42, 1)}, map[int64]Counts{7: {1, 0}, 42: {0, 0}, 9: {0, 1}}},
	} {
		apply(t, pool, step.events...)
		if diff := cmp.Diff(step.want, counts(t, pool, 1, 7, 9, 42)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
	}
	if diff := cmp.Diff(map[int64]Counts{7: {0, 1}}, counts(t, pool, 2, 7)); diff != "" {
		t.Errorf("tenant 2 (-want +got):\n%s", diff)
	}
}

func TestAPayloadThatIsNoFollowIsPermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	bad := map[string]func(*event.Event){
		"not JSON":            func(e *event.Event) { e.Payload = []byte("{") },
		"another aggregate's": func(e *event.Event) { e.AggregateID = 41 },
		"no version":          func(e *event.Event) { e.Payload = []byte(`{"follower_id":"7","followee_id":"42","status":"ACTIVE"}`) },
		"an unknown status": func(e *event.Event) {
			e.Payload = []byte(`{"follower_id":"7","followee_id":"42","status":"MUTED","version":1}`)
		},
		"a type of the future":    func(e *event.Event) { e.Type = "muted" },
		"a version of the future": func(e *event.Event) { e.Version = 2 },
	}
	for name, change := range bad {
		e := follow(1, 7, 42, 1)
		change(&e)
		ctx := context.Background()
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return New().Apply(ctx, tx, []event.Event{e}) })
		if !event.IsPermanent(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// walk reads all pages of limit.
func walk(read func(after *EdgeCursor) ([]Edge, error), limit int) (all []Edge, err error) {
	var after *EdgeCursor
	for {
		page, err := read(after)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if len(page) < limit {
			return all, nil
		}
		after = &EdgeCursor{page[limit-1].PositionedAt, page[limit-1].UserID}
	}
}

// TestAnyDeliveryEndsInAFoldOfTheTruth delivers histories in any order, cut anywhere, with repetitions, and compares what readers
// see with a fold of the newest version delivered of each pair.
func TestAnyDeliveryEndsInAFoldOfTheTruth(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	tenant := int64(0)
	projection := Projection{splitAt: 2} // so that shards rise in every run: to two with two followers, to four with four
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant++
		const users = 6
		newest := map[pair]int64{}
		for range rapid.IntRange(1, 5).Draw(rt, "batches") {
			var batch []event.Event
			for range rapid.IntRange(0, 12).Draw(rt, "events") {
				a := rapid.Int64Range(1, users).Draw(rt, "follower")
				b := rapid.Int64Range(1, users).Filter(func(b int64) bool { return b != a }).Draw(rt, "followee")
				v := rapid.Int64Range(1, 8).Draw(rt, "version")
				batch = append(batch, follow(tenant, a, b, v))
				newest[pair{tenant, a, b}] = max(newest[pair{tenant, a, b}], v)
			}
			if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return projection.Apply(ctx, tx, batch) }); err != nil {
				rt.Fatal(err)
			}
			err := postgres.InTenant(ctx, api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error { return compare(ctx, tx, newest, users) })
			if err != nil {
				rt.Fatal(err)
			}
		}
	})
}

func compare(ctx context.Context, tx pgx.Tx, newest map[pair]int64, users int64) error {
	followers, following := map[int64][]Edge{}, map[int64][]Edge{}
	for k, v := range newest {
		if v%2 == 1 {
			at := start.Add(time.Duration((v+1)/2/2) * time.Second)
			followers[k.followee] = append(followers[k.followee], Edge{k.follower, at})
			following[k.follower] = append(following[k.follower], Edge{k.followee, at})
		}
	}
	newestFirst := func(a, b Edge) int {
		if c := b.PositionedAt.Compare(a.PositionedAt); c != 0 {
			return c
		}
		return int(b.UserID - a.UserID)
	}
	for u := int64(1); u <= users; u++ {
		got, err := ReadCounts(ctx, tx, []int64{u})
		if err != nil {
			return err
		}
		if want := (Counts{int64(len(followers[u])), int64(len(following[u]))}); got[u] != want {
			return fmt.Errorf("counts of %d: got %v, want %v", u, got[u], want)
		}
		for _, side := range []struct {
			want []Edge
			read func(context.Context, pgx.Tx, int64, *EdgeCursor, int) ([]Edge, error)
		}{{followers[u], Followers}, {following[u], Following}} {
			slices.SortFunc(side.want, newestFirst)
			const limit = 2
			got, err := walk(func(after *EdgeCursor) ([]Edge, error) { return side.read(ctx, tx, u, after, limit) }, limit)
			if err != nil {
				return err
			}
			if diff := cmp.Diff(side.want, got); diff != "" {
				return fmt.Errorf("page of %d (-want +got):\n%s", u, diff)
			}
		}
	}
	return compareRelations(ctx, tx, followers, following, users)
}

func compareRelations(ctx context.Context, tx pgx.Tx, followers, following map[int64][]Edge, users int64) error {
	find := func(edges []Edge, user int64) int {
		return slices.IndexFunc(edges, func(e Edge) bool { return e.UserID == user })
	}
	var pairs []Pair
	var want []Relation
	for a := int64(1); a <= users; a++ {
		for b := int64(1); b <= users; b++ {
			pairs = append(pairs, Pair{a, b})
			r := Relation{FollowedBy: find(followers[a], b) >= 0}
			if i := find(following[a], b); i >= 0 {
				r.Following, r.PositionedAt = true, following[a][i].PositionedAt
			}
			want = append(want, r)
			var mutual []Edge
			for _, e := range following[a] {
				if find(followers[b], e.UserID) >= 0 {
					mutual = append(mutual, e)
				}
			}
			for _, limit := range []int{1, int(users)} {
				got, truncated, err := Mutuals(ctx, tx, a, b, limit)
				if err != nil {
					return err
				}
				if n := min(limit, len(mutual)); !cmp.Equal(got, mutual[:n], cmpopts.EquateEmpty()) || truncated != (n < len(mutual)) {
					return fmt.Errorf("mutuals %d/%d by %d: got %v (truncated %t) of %v", a, b, limit, got, truncated, mutual)
				}
			}
		}
	}
	got, err := Relations(ctx, tx, pairs)
	if err != nil {
		return err
	}
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("relations (-want +got):\n%s", diff)
	}
	return nil
}

// TestMutualsOfTheCelebratedAreTheBeginningOfTheList has accounts with more edges than are looked at, on either side and on both.
func TestMutualsOfTheCelebratedAreTheBeginningOfTheList(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	// 1 follows 100001 to 107000, the last first; every third of them and 7,000 others follow 2; 3 is followed by 9 of them.
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO follow_edges (tenant_id, follower_id, followee_id, active, version, positioned_at)
		SELECT 1, 1, 100000 + g, true, 1, timestamptz '2026-01-01' - (g / 5) * interval '1 s' FROM generate_series(1, 7000) g
		UNION ALL SELECT 1, 100000 + g, 2, true, 1, '2026-01-01' FROM generate_series(3, 7000, 3) g
		UNION ALL SELECT 1, 200000 + g, 2, true, 1, '2026-01-01' FROM generate_series(1, 7000) g
		UNION ALL SELECT 1, 106000 + g, 3, true, 1, '2026-01-01' FROM generate_series(1, 9) g
		UNION ALL SELECT 1, 4, 106000 + g, true, 1, '2026-01-01' FROM generate_series(1, 9) g`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO follower_counts (tenant_id, user_id, followers, following) VALUES (1, 1, 0, 7000), (1, 2, 9333, 0), (1, 3, 9, 0), (1, 4, 0, 9)`); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `ANALYZE follow_edges`); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		user, other  int64
		limit, found int
		truncated    bool
	}{
		"a page of two celebrated accounts":                     {1, 2, 200, 200, true},
		"all that is looked at of two celebrated accounts":      {1, 2, 10000, MutualsCap/3 + 1, true},
		"one who follows many, and few followers":               {1, 3, 200, 9, false},
		"one who follows few, and many followers":               {4, 2, 200, 3, false},
		"few on both sides":                                     {4, 3, 200, 9, false},
		"few on both sides, of which there are more than asked": {4, 3, 8, 8, true},
	} {
		inTenant(t, db.Pool(t, postgres.RoleAPI), 1, func(ctx context.Context, tx pgx.Tx) error {
			all, _, err := Mutuals(ctx, tx, c.user, c.other, c.limit)
			if err != nil {
				return err
			}
			rows, _ := tx.Query(ctx, `SELECT a.followee_id, a.positioned_at FROM follow_edges a JOIN follow_edges b ON b.follower_id = a.followee_id AND b.followee_id = $2
				WHERE a.follower_id = $1 ORDER BY 2 DESC, 1 DESC LIMIT $3`, c.user, c.other, c.found)
			want, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Edge])
			if err != nil {
				return err
			}
			if diff := cmp.Diff(want, all); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			_, truncated, err := Mutuals(ctx, tx, c.user, c.other, c.limit)
			if truncated != c.truncated {
				t.Errorf("%s: truncated is %t", name, truncated)
			}
			return err
		})
	}
}

// TestBatchesThatShareAccountsDoNotDeadlock runs batches of different pairs over the same accounts, in opposite orders, gains and
// losses mixed.
func TestBatchesThatShareAccountsDoNotDeadlock(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	const users, rounds = 12, 8
	ctx := context.Background()
	done := make(chan error, 2)
	for w := range int64(2) {
		go func() {
			done <- func() error {
				for version := int64(1); version <= rounds; version++ {
					var events []event.Event
					for a := int64(1); a <= users; a++ {
						for b := int64(1); b <= users; b++ {
							if a != b && b%2 == w {
								events = append(events, follow(1, a, b, version))
							}
						}
					}
					if w == 1 {
						slices.Reverse(events)
					}
					tx, err := pool.Begin(ctx) // not InTx: a deadlock must not be retried away
					if err != nil {
						return err
					}
					if err := New().Apply(ctx, tx, events); err != nil {
						return errors.Join(err, tx.Rollback(ctx))
					}
					if err := tx.Commit(ctx); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(map[int64]Counts{1: {}, 2: {}}, counts(t, pool, 1, 1, 2)); diff != "" {
		t.Errorf("all removed (-want +got):\n%s", diff)
	}
}

func TestVerifyNamesEachDifference(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	apply(t, pool, follow(1, 1, 2, 1), follow(1, 1, 3, 1), follow(1, 2, 3, 2), follow(2, 1, 2, 1))
	if _, err := pool.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id, status, version, positioned_at)
	  SELECT tenant_id, follower_id, followee_id, CASE WHEN active THEN 'ACTIVE' ELSE 'REMOVED' END, version, positioned_at FROM follow_edges`); err != nil {
		t.Fatal(err)
	}
	verify := func() (got []string) {
		checked, err := New().Verify(ctx, pool, pool, func(d projections.Difference) { got = append(got, d.String()) })
		if err != nil {
			t.Fatal(err)
		}
		if checked < 4 {
			t.Errorf("checked %d", checked)
		}
		return got
	}
	if got := verify(); len(got) > 0 {
		t.Errorf("equal tables differ: %q", got)
	}
	for _, sql := range []string{`UPDATE follows SET version = 3, status = 'ACTIVE' WHERE tenant_id = 1 AND follower_id = 2`,
		`DELETE FROM follows WHERE tenant_id = 2`, `UPDATE follower_counts SET following = 5 WHERE tenant_id = 1 AND user_id = 1`,
		`UPDATE follow_edges SET shard_id = 3 WHERE tenant_id = 1 AND follower_id = 1`, `INSERT INTO follower_shards VALUES (1, 2, 4), (1, 3, 2)`} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{
		"followercounts: tenant 1, follow 1/3: shard_id is 3, want 0 to 1",
		"followercounts: tenant 1, follow 2/3: version is 2, want 3",
		"followercounts: tenant 1, follow 2/3: active is false, want true",
		"followercounts: tenant 2, follow 1/2: row is present, want absent",
		"followercounts: tenant 1, counts of user 1: following is 5, want 2",
		"followercounts: tenant 1, counts of user 2: following is 0, want 1",
		"followercounts: tenant 1, counts of user 3: followers is 1, want 2",
		"followercounts: tenant 2, counts of user 1: following is 1, want 0",
		"followercounts: tenant 2, counts of user 2: followers is 1, want 0",
	}
	if diff := cmp.Diff(want, verify()); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
}
