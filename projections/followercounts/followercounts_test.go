package followercounts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// tested are the kinds of the tests: one whose two ends are of one object type, and one with an
// attribute to filter by.
var tested = []lifecycle{{kind("follow"), 2}, {kind("membership"), 3}}

func kind(name string) kinds.Edge {
	k, ok := kinds.Builtin().Edge(name)
	if !ok {
		panic(name)
	}
	return k
}

// lifecycle has the states of an edge by version: created, updated if there are three versions, and
// removed.
type lifecycle struct {
	kinds.Edge
	versions int64
}

func (l lifecycle) active(version int64) bool { return version%l.versions != 0 }

// position gives two consecutive creations the same time, to test ties.
func (l lifecycle) position(version int64) time.Time {
	return start.Add(time.Duration((version+l.versions-1)/l.versions/2) * time.Second)
}

var roles = []string{"member", "moderator", "owner"}

func (l lifecycle) role(from event.ID, version int64) string {
	if len(l.Attributes) == 0 {
		return ""
	}
	return roles[(int64(testkit.Number(from))+version)%3]
}

// event returns the event of an edge's version.
func (l lifecycle) event(tenant int64, from, to event.ID, version int64) event.Event {
	e := event.Edge{From: from, To: to, Status: event.StatusActive, Version: version, Actor: "test"}
	typ := event.Updated
	switch {
	case !l.active(version):
		e.Status, typ = event.StatusRemoved, event.Removed
	case version%l.versions == 1:
		typ = event.Created
	}
	if role := l.role(from, version); role != "" {
		e.Attributes = json.RawMessage(`{"role":"` + role + `"}`)
	}
	e.PositionedAt.Time = l.position(version)
	e.CreatedAt, e.UpdatedAt = e.PositionedAt, e.PositionedAt
	payload, err := e.Encode(l.Names())
	if err != nil {
		panic(err)
	}
	return event.Event{ID: fmt.Sprintf("%d-%s-%s-%d", tenant, from, to, version), TenantID: tenant, AggregateType: l.Name,
		AggregateID: to, Type: typ, Version: 1, Payload: payload}
}

// projection knows the built-in kinds.
var projection = New(kinds.Builtin)

func apply(t testing.TB, pool *pgxpool.Pool, events ...event.Event) {
	t.Helper()
	ctx := context.Background()
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return projection.Apply(ctx, tx, events) }); err != nil {
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
	for i, sql := range []string{incomingSQL.plain, incomingSQL.attributes, incomingSQL.filtered, outgoingSQL.plain, outgoingSQL.attributes,
		countsSQL, reachedSQL, relationsSQL, mutualsOfOutgoingSQL, mutualsOfIncomingSQL, edgesSQL, gainCountsSQL, holdCountsSQL,
		addCountsSQL, edgeRowsSQL, countRowsSQL, windowCountsSQL, dropEdgesSQL, recountSQL, forgetSQL, forgetCountsSQL, leftCountsSQL,
		freshSQL, newSQL, aggregatesSQL, readAggregatesSQL, ranksSQL, sumRowsSQL, truthSumsSQL, windowSumsSQL, scoreRowsSQL,
		truthScoresSQL, windowScoresSQL, rankRowsSQL, clearRanksSQL, recountAggregatesSQL, rescoreSQL} {
		query, _, err := pgx.NamedArgs{}.RewriteQuery(ctx, nil, sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(ctx, fmt.Sprintf("PREPARE s%d AS %s", i, query)); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

func (l lifecycle) counts(t testing.TB, pool *pgxpool.Pool, tenant int64, ids ...event.ID) map[event.ID]Counts {
	t.Helper()
	got := make(map[event.ID]Counts)
	inTenant(t, pool, tenant, func(ctx context.Context, tx pgx.Tx) error {
		all, err := ReadCounts(ctx, tx, []string{l.Name}, ids)
		for _, id := range ids {
			got[id] = all[Object{l.Name, id}]
		}
		return err
	})
	return got
}

func TestCountsMoveOnlyWhenAnEdgesStateDoes(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, l := range tested {
		n := l.versions // removed with it, there again with the next one
		for _, step := range []struct {
			name   string
			events []event.Event
			want   map[event.ID]Counts
		}{
			{"an edge counts on both sides", []event.Event{l.event(1, "7", "42", 1)},
				map[event.ID]Counts{"7": {0, 1}, "42": {1, 0}, "9": {}}},
			{"the same event again counts nothing", []event.Event{l.event(1, "7", "42", 1), l.event(1, "7", "42", 1)},
				map[event.ID]Counts{"7": {0, 1}, "42": {1, 0}, "9": {}}},
			{"removed and there again in one batch is no change", []event.Event{l.event(1, "7", "42", n), l.event(1, "7", "42", n+1)},
				map[event.ID]Counts{"7": {0, 1}, "42": {1, 0}, "9": {}}},
			{"an old event is passed over", []event.Event{l.event(1, "7", "42", n)},
				map[event.ID]Counts{"7": {0, 1}, "42": {1, 0}, "9": {}}},
			{"an object may gain and lose in one batch, where an older version comes later",
				[]event.Event{l.event(1, "7", "42", 2*n), l.event(1, "7", "42", 2*n-1), l.event(1, "9", "7", 1)},
				map[event.ID]Counts{"7": {1, 0}, "42": {0, 0}, "9": {0, 1}}},
			{"an edge whose first event is its removal does not count", []event.Event{l.event(1, "5", "9", n)},
				map[event.ID]Counts{"7": {1, 0}, "42": {0, 0}, "9": {0, 1}}},
			{"its older event, late, counts nothing", []event.Event{l.event(1, "5", "9", 1)},
				map[event.ID]Counts{"7": {1, 0}, "42": {0, 0}, "9": {0, 1}}},
			{"another tenant's edge is another edge", []event.Event{l.event(2, "7", "42", 1)},
				map[event.ID]Counts{"7": {1, 0}, "42": {0, 0}, "9": {0, 1}}},
			{"an edge of another kind is another edge", []event.Event{lifecycle{kind("like"), 2}.event(1, "9", "7", 1)},
				map[event.ID]Counts{"7": {1, 0}, "42": {0, 0}, "9": {0, 1}}},
		} {
			apply(t, pool, step.events...)
			if diff := cmp.Diff(step.want, l.counts(t, pool, 1, "7", "9", "42")); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", l.Name, step.name, diff)
			}
		}
		if diff := cmp.Diff(map[event.ID]Counts{"7": {0, 1}}, l.counts(t, pool, 2, "7")); diff != "" {
			t.Errorf("%s: tenant 2 (-want +got):\n%s", l.Name, diff)
		}
	}
	inTenant(t, pool, 1, func(ctx context.Context, tx pgx.Tx) error {
		got, err := ReadCounts(ctx, tx, []string{"follow", "like", "membership", "share"}, []event.ID{"7", "9", "100"})
		want := map[Object]Counts{{"follow", "7"}: {1, 0}, {"follow", "9"}: {0, 1}, {"membership", "7"}: {1, 0},
			{"membership", "9"}: {0, 1}, {"like", "7"}: {1, 0}, {"like", "9"}: {0, 1}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("all kinds (-want +got):\n%s", diff)
		}
		return err
	})
}

func TestAPayloadThatIsNoEdgeIsPermanent(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	bad := map[string]func(*event.Event){
		"not JSON":            func(e *event.Event) { e.Payload = []byte("{") },
		"another aggregate's": func(e *event.Event) { e.AggregateID = "41" },
		"no version":          func(e *event.Event) { e.Payload = []byte(`{"follower_id":"7","followee_id":"42","status":"ACTIVE"}`) },
		"an unknown status": func(e *event.Event) {
			e.Payload = []byte(`{"follower_id":"7","followee_id":"42","status":"MUTED","version":1}`)
		},
		"to itself, of a kind that forbids it": func(e *event.Event) { *e = tested[0].event(1, "7", "7", 1) },
		"an unknown kind":                      func(e *event.Event) { e.AggregateType = "muting" },
		"a type of the future":                 func(e *event.Event) { e.Type = "muted" },
		"a version of the future":              func(e *event.Event) { e.Version = 2 },
	}
	for name, change := range bad {
		e := tested[0].event(1, "7", "42", 1)
		change(&e)
		ctx := context.Background()
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return projection.Apply(ctx, tx, []event.Event{e}) })
		if !event.IsPermanent(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	apply(t, pool, tested[1].event(1, "7", "7", 1)) // a user and a group
}

// walk reads all pages of limit entries.
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
		after = &EdgeCursor{page[limit-1].PositionedAt, page[limit-1].ID}
	}
}

// ids have the forms of ids.
var ids = []event.ID{"2", "10", "01", "7b0c2f52-5f0e-4d3a-9a51-6c1d7a3e9f10", "auth0|5f7c-12", "a.b@example.com"}

// TestAnyDeliveryEndsInAFoldOfTheTruth delivers histories in any order, cut at any place, with
// repetitions. It compares the answers that readers get with a fold of the newest delivered version
// of each edge.
func TestAnyDeliveryEndsInAFoldOfTheTruth(t *testing.T) {
	db := testkit.Postgres(t)
	pool, api := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleAPI)
	tenant := int64(0)
	projection := Projection{kinds: kinds.Builtin, splitAt: 2} // two edges get two shards, four get four, so every run has splits
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant++
		newest := map[string]map[key]int64{}
		for _, l := range tested {
			newest[l.Name] = map[key]int64{}
		}
		for range rapid.IntRange(1, 5).Draw(rt, "batches") {
			var batch []event.Event
			for range rapid.IntRange(0, 12).Draw(rt, "events") {
				l := rapid.SampledFrom(tested).Draw(rt, "kind")
				a := rapid.SampledFrom(ids).Draw(rt, "from")
				b := rapid.SampledFrom(ids).Filter(func(b event.ID) bool { return b != a || !l.NoSelf() }).Draw(rt, "to")
				v := rapid.Int64Range(1, 8).Draw(rt, "version")
				batch = append(batch, l.event(tenant, a, b, v))
				newest[l.Name][key{tenant, a, b}] = max(newest[l.Name][key{tenant, a, b}], v)
			}
			if err := postgres.InTx(ctx, pool, pgx.TxOptions{},
				func(tx pgx.Tx) error { return projection.Apply(ctx, tx, batch) }); err != nil {
				rt.Fatal(err)
			}
		}
		for _, l := range tested { // at the history's end alone: a shorter history is one that is drawn too
			err := postgres.InTenant(ctx, api, tenant, pgx.TxOptions{},
				func(tx pgx.Tx) error { return l.compare(ctx, tx, newest[l.Name]) })
			if err != nil {
				rt.Fatal(err)
			}
		}
	})
}

// line is an edge as a page has it.
func (l lifecycle) line(k key, id event.ID, version int64) Edge {
	e := Edge{ID: id, PositionedAt: l.position(version)}
	if role := l.role(k.from, version); role != "" {
		e.Attributes = json.RawMessage(`{"role": "` + role + `"}`)
	}
	return e
}

func newestFirst(a, b Edge) int {
	if c := b.PositionedAt.Compare(a.PositionedAt); c != 0 {
		return c
	}
	return strings.Compare(string(b.ID), string(a.ID))
}

func (l lifecycle) compare(ctx context.Context, tx pgx.Tx, newest map[key]int64) error {
	incoming, outgoing := map[event.ID][]Edge{}, map[event.ID][]Edge{}
	for k, v := range newest {
		if l.active(v) {
			incoming[k.to] = append(incoming[k.to], l.line(k, k.from, v))
			outgoing[k.from] = append(outgoing[k.from], l.line(k, k.to, v))
		}
	}
	for _, id := range ids {
		got, err := ReadCounts(ctx, tx, []string{l.Name}, []event.ID{id})
		if err != nil {
			return err
		}
		if want := (Counts{int64(len(incoming[id])), int64(len(outgoing[id]))}); got[Object{l.Name, id}] != want {
			return fmt.Errorf("%s: counts of %s: got %v, want %v", l.Name, id, got, want)
		}
		for _, side := range []struct {
			want []Edge
			read func(context.Context, pgx.Tx, kinds.Edge, event.ID, string, *EdgeCursor, int) ([]Edge, error)
			by   []string // filters
		}{{incoming[id], Incoming, l.filters()}, {outgoing[id], unfiltered, []string{""}}} {
			slices.SortFunc(side.want, newestFirst)
			for _, filter := range side.by {
				want := slices.DeleteFunc(slices.Clone(side.want),
					func(e Edge) bool { return !strings.Contains(string(e.Attributes), filter) })
				const limit = 2
				got, err := walk(func(after *EdgeCursor) ([]Edge, error) {
					return side.read(ctx, tx, l.Edge, id, filter, after, limit)
				},
					limit)
				if err != nil {
					return err
				}
				if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
					return fmt.Errorf("%s: page of %s, filter %q (-want +got):\n%s", l.Name, id, filter, diff)
				}
			}
		}
	}
	return l.compareRelations(ctx, tx, incoming, outgoing)
}

// filters are the filters of a list, including no filter.
func (l lifecycle) filters() []string {
	if _, ok := l.Filter(); ok {
		return append([]string{""}, roles...)
	}
	return []string{""}
}

func unfiltered(ctx context.Context, tx pgx.Tx, k kinds.Edge, id event.ID, _ string, after *EdgeCursor, limit int) ([]Edge, error) {
	return Outgoing(ctx, tx, k, id, after, limit)
}

func (l lifecycle) compareRelations(ctx context.Context, tx pgx.Tx, incoming, outgoing map[event.ID][]Edge) error {
	find := func(edges []Edge, id event.ID) int {
		return slices.IndexFunc(edges, func(e Edge) bool { return e.ID == id })
	}
	var pairs []Pair
	var want [][]Relation
	for _, a := range ids {
		for _, b := range ids {
			pairs = append(pairs, Pair{a, b})
			r := Relation{Back: l.From == l.To && find(incoming[a], b) >= 0}
			if i := find(outgoing[a], b); i >= 0 {
				r.There, r.PositionedAt, r.Attributes = true, outgoing[a][i].PositionedAt, outgoing[a][i].Attributes
			}
			want = append(want, []Relation{r})
			var mutual []Edge
			for _, e := range outgoing[a] {
				if find(incoming[b], e.ID) >= 0 {
					mutual = append(mutual, Edge{ID: e.ID, PositionedAt: e.PositionedAt})
				}
			}
			for _, limit := range []int{1, len(ids)} {
				got, truncated, err := Mutuals(ctx, tx, l.Name, a, b, limit)
				if err != nil {
					return err
				}
				if n := min(limit, len(mutual)); !cmp.Equal(got, mutual[:n], cmpopts.EquateEmpty()) || truncated != (n < len(mutual)) {
					return fmt.Errorf("%s: mutuals %s/%s by %d: got %v (truncated %t) of %v", l.Name, a, b, limit, got, truncated, mutual)
				}
			}
		}
	}
	got, err := Relations(ctx, tx, []kinds.Edge{l.Edge}, pairs)
	if err != nil {
		return err
	}
	if diff := cmp.Diff(want, got); diff != "" {
		return fmt.Errorf("%s: relations (-want +got):\n%s", l.Name, diff)
	}
	return nil
}

// TestMutualsOfTheCelebratedAreTheBeginningOfTheList has accounts with more edges than Mutuals
// reads, on either side and on both.
func TestMutualsOfTheCelebratedAreTheBeginningOfTheList(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	// 1 follows 100001 to 107000, the last first; every third of them and 7,000 others follow 2; 3
	// is followed by 9 of them.
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO edge_lists (tenant_id, kind, from_id, to_id, active, version, positioned_at)
		SELECT 1, 'follow', 1, 100000 + g, true, 1, timestamptz '2026-01-01' - (g / 5) * interval '1 s' FROM generate_series(1, 7000) g
		UNION ALL SELECT 1, 'follow', 100000 + g, 2, true, 1, '2026-01-01' FROM generate_series(3, 7000, 3) g
		UNION ALL SELECT 1, 'follow', 200000 + g, 2, true, 1, '2026-01-01' FROM generate_series(1, 7000) g
		UNION ALL SELECT 1, 'follow', 106000 + g, 3, true, 1, '2026-01-01' FROM generate_series(1, 9) g
		UNION ALL SELECT 1, 'follow', 4, 106000 + g, true, 1, '2026-01-01' FROM generate_series(1, 9) g`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO edge_counts (tenant_id, kind, object_id, incoming, outgoing)
		VALUES (1, 'follow', 1, 0, 7000), (1, 'follow', 2, 9333, 0), (1, 'follow', 3, 9, 0), (1, 'follow', 4, 0, 9)`); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `ANALYZE edge_lists`); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		user, other  event.ID
		limit, found int
		truncated    bool
	}{
		"a page of two celebrated accounts":                         {"1", "2", 200, 200, true},
		"as many edges of two celebrated accounts as Mutuals reads": {"1", "2", 10000, MutualsCap/3 + 1, true},
		"one who follows many, and few followers":                   {"1", "3", 200, 9, false},
		"one who follows few, and many followers":                   {"4", "2", 200, 3, false},
		"few on both sides":                                         {"4", "3", 200, 9, false},
		"few on both sides, of which there are more than asked":     {"4", "3", 8, 8, true},
	} {
		inTenant(t, db.Pool(t, postgres.RoleAPI), 1, func(ctx context.Context, tx pgx.Tx) error {
			all, _, err := Mutuals(ctx, tx, "follow", c.user, c.other, c.limit)
			if err != nil {
				return err
			}
			rows, _ := tx.Query(ctx, `SELECT a.to_id, a.positioned_at, NULL::jsonb FROM edge_lists a
				JOIN edge_lists b ON b.from_id = a.to_id AND b.to_id = $2
				WHERE a.from_id = $1 ORDER BY 2 DESC, 1 DESC LIMIT $3`, c.user, c.other, c.found)
			want, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Edge])
			if err != nil {
				return err
			}
			if diff := cmp.Diff(want, all); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			_, truncated, err := Mutuals(ctx, tx, "follow", c.user, c.other, c.limit)
			if truncated != c.truncated {
				t.Errorf("%s: truncated is %t", name, truncated)
			}
			return err
		})
	}
}

// TestManyNewEdges applies batches of many first versions, of which the projection has some, all or
// none, and checks that new edges go to the shards of their target.
func TestManyNewEdges(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	projection := Projection{kinds: kinds.Builtin, splitAt: 4}
	for _, l := range tested {
		for _, step := range []struct{ first, last int }{{1, 60}, {1, 260}, {1, 260}, {261, 900}} {
			var events []event.Event
			for n := step.first; n <= step.last; n++ {
				version := int64(1)
				if n%10 == 0 {
					version = l.versions // an edge that is gone
				}
				events = append(events, l.event(1, event.IDOf(1000+n), "1", version))
			}
			if err := postgres.InTx(ctx, pool, pgx.TxOptions{},
				func(tx pgx.Tx) error { return projection.Apply(ctx, tx, events) }); err != nil {
				t.Fatal(err)
			}
			want := map[event.ID]Counts{"1": {Incoming: int64(step.last - step.last/10)}, "1001": {0, 1}, "1059": {0, 1}, "1060": {}}
			want[event.IDOf(1000+step.last-1)] = Counts{0, 1}
			if diff := cmp.Diff(want, l.counts(t, pool, 1, slices.Collect(maps.Keys(want))...)); diff != "" {
				t.Errorf("%s %d to %d (-want +got):\n%s", l.Name, step.first, step.last, diff)
			}
		}
		var shards int
		if err := pool.QueryRow(ctx, `SELECT count(DISTINCT shard_id) FROM edge_lists WHERE kind = $1 AND from_id > '1260'`,
			l.Name).Scan(&shards); err != nil || shards < 60 {
			t.Errorf("many new edges are in %d shards, %v", shards, err)
		}
	}
}

// TestBatchesThatShareAccountsDoNotDeadlock applies batches of different pairs of the same
// accounts, in opposite orders, with gains and losses.
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
								events = append(events, tested[0].event(1, event.IDOf(a), event.IDOf(b), version))
							}
						}
					}
					if w == 1 {
						slices.Reverse(events)
					}
					tx, err := pool.Begin(ctx) // not InTx, which would retry a deadlock
					if err != nil {
						return err
					}
					if err := projection.Apply(ctx, tx, events); err != nil {
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
	if diff := cmp.Diff(map[event.ID]Counts{"1": {}, "2": {}}, tested[0].counts(t, pool, 1, "1", "2")); diff != "" {
		t.Errorf("after all removals (-want +got):\n%s", diff)
	}
}

func TestVerifyNamesEachDifference(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := context.Background()
	follow, member := tested[0].event, tested[1].event
	apply(t, pool, follow(1, "1", "2", 1), follow(1, "1", "3", 1), follow(1, "2", "3", 2), follow(2, "1", "2", 1), member(1, "1", "2", 2),
		member(1, "5", "2", 1), member(3, "5", "2", 1))
	if _, err := pool.Exec(ctx, `INSERT INTO edges (tenant_id, kind, from_id, to_id, status, version, positioned_at, attributes)
	  SELECT tenant_id, kind, from_id, to_id, CASE WHEN active THEN 'ACTIVE' ELSE 'REMOVED' END, version, positioned_at, attributes
	  FROM edge_lists`); err != nil {
		t.Fatal(err)
	}
	verify := func() (got []string) {
		checked, err := projection.Verify(ctx, pool, pool, func(d projections.Difference) { got = append(got, d.String()) })
		if err != nil {
			t.Fatal(err)
		}
		if checked < 7 {
			t.Errorf("checked %d", checked)
		}
		return got
	}
	if got := verify(); len(got) > 0 {
		t.Errorf("equal tables differ: %q", got)
	}
	for _, sql := range []string{`UPDATE follows SET version = 3, status = 'ACTIVE' WHERE tenant_id = 1 AND follower_id = '2'`,
		`DELETE FROM follows WHERE tenant_id = 2`, `UPDATE edge_counts SET outgoing = 5 WHERE tenant_id = 1 AND object_id = '1'`,
		`UPDATE edge_lists SET shard_id = 3 WHERE tenant_id = 1 AND kind = 'follow' AND from_id = '1'`,
		`INSERT INTO edge_shards VALUES (1, 'follow', 2, 4), (1, 'follow', 3, 2)`,
		`UPDATE memberships SET attributes = '{"role": "owner"}' WHERE tenant_id = 3`} {
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
		"followercounts: tenant 3, membership 5/2: filter is member, want owner",
		`followercounts: tenant 3, membership 5/2: attributes is {"role": "member"}, want {"role":"owner"}`,
		"followercounts: tenant 1, counts of user 1: groups is 5, want 1",
		`followercounts: tenant 3, counts of group 2: count of role "member" is 1, want 0`,
		`followercounts: tenant 3, counts of group 2: count of role "owner" is 0, want 1`,
	}
	if diff := cmp.Diff(want, verify()); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
	testMend(t, pool, verify)
}

// testMend finds the differences window by window, and repairs them kind by kind.
func testMend(t *testing.T, pool *pgxpool.Pool, verify func() []string) {
	t.Helper()
	ctx := context.Background()
	var windows []string
	var keys []projections.Key
	checked := int64(0)
	for next := any(nil); ; {
		n, after, err := projection.Window(ctx, pool, pool, next, 2,
			func(d projections.Difference) { windows, keys = append(windows, d.Entity), append(keys, d.Key) })
		if err != nil || n > 4 {
			t.Fatalf("a window of %d: %v", n, err)
		}
		checked += n
		if next = after; next == nil {
			break
		}
	}
	if checked != 7 || !slices.Contains(windows, "follow 2/3") || !slices.Contains(windows, "membership 5/2") ||
		!slices.Contains(windows, "counts of user 1") {
		t.Errorf("windows compared %d edges and found %q", checked, windows)
	}
	if _, err := projection.Verify(ctx, pool, pool, func(d projections.Difference) { keys = append(keys, d.Key) }); err != nil {
		t.Fatal(err)
	}
	nothing := func(int64, string, event.ID) bool { return false }
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := projection.Repair(ctx, tx, pool, keys, nothing)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if got := verify(); len(got) > 0 {
		t.Errorf("after the repair: %q", got)
	}
}
