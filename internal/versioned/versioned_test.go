package versioned_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	. "github.com/tidings/tidings/internal/versioned"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type settings struct {
	PostID event.ID `json:"post_id"`
	Title  string   `json:"title"`
}

type bond struct {
	FollowerID event.ID `json:"follower_id"`
	FolloweeID event.ID `json:"followee_id"`
	Version    int64    `json:"version"`
	Note       string   `json:"note"`
}

func threads() *Table[settings] {
	return New[settings](Definition{Table: "threads", Sequence: "object_version_id", Key: []Column{{"post_id", "text"}}})
}

func bonds() *Table[bond] {
	return New[bond](Definition{Table: "follow_history", Sequence: "history_version_id", Version: "version",
		Key: []Column{{"follower_id", "text"}, {"followee_id", "text"}}, Purged: "follow_history_purged"})
}

func inTx(t testing.TB, pool *pgxpool.Pool, fn func(ctx context.Context, tx pgx.Tx) error) {
	t.Helper()
	ctx := context.Background()
	if err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return fn(ctx, tx) }); err != nil {
		t.Fatal(err)
	}
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		for i, sql := range slices.Concat(threads().Statements(), bonds().Statements()) {
			args := pgx.NamedArgs{}
			query, _, err := args.RewriteQuery(ctx, tx.Conn(), sql, nil)
			if err != nil {
				return err
			}
			if _, err := tx.Prepare(ctx, fmt.Sprint("s", i), query); err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
		return nil
	})
}

// state is a version as the invariants use it.
type state struct {
	Title, By string
	State     State
}

func history(t testing.TB, pool *pgxpool.Pool, post event.ID) (all []state) {
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		versions, err := threads().History(ctx, tx, 1, Key{post}, 0, 1000)
		for _, v := range versions {
			all = append(all, state{v.Object.Title, v.Metadata.CreatedBy, v.Metadata.VersionState})
		}
		return err
	})
	return all
}

func TestAnObjectsLifeIsKept(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	at := time.Date(2026, 2, 3, 4, 5, 6, 789000, time.UTC)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := table.Upsert(ctx, tx, []Change[settings]{
			{1, settings{"7", "a"}, "alice", at}, {1, settings{"8", "other"}, "alice", at}, {1, settings{"7", "b"}, "leo", at},
			{2, settings{"7", "another tenant's"}, "eve", at}})
		return err
	})
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		got, err := table.Get(ctx, tx, 1, Key{"7"})
		if err != nil {
			return err
		}
		if got.Object.Title != "b" || got.Metadata.CreatedBy != "leo" || !got.Metadata.LastUpdateTime.Equal(at) {
			t.Errorf("got %+v", got)
		}
		ids, err := table.Delete(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{PostID: "7"}, By: "john"},
			{TenantID: 1, Object: settings{PostID: "99"}, By: "john"}})
		if len(ids) != 1 {
			t.Errorf("deleted %v, want one version", ids)
		}
		return err
	})
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := table.Get(ctx, tx, 1, Key{"7"}); !errors.Is(err, ErrNotFound) {
			t.Errorf("get a deleted object: %v", err)
		}
		if ids, err := table.Delete(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{PostID: "7"}, By: "john"}}); err != nil ||
			len(ids) != 0 {
			t.Errorf("delete it again: %v, %v", ids, err)
		}
		list, err := table.List(ctx, tx, 1, nil, 10)
		if len(list) != 1 || list[0].Object.PostID != "8" {
			t.Errorf("list: %+v", list)
		}
		return err
	})
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := table.Upsert(ctx, tx, []Change[settings]{{1, settings{"7", "c"}, "alice", at}})
		return err
	})
	want := []state{{"a", "alice", Archived}, {"b", "leo", Archived}, {"b", "john", Archived}, {"c", "alice", Latest}}
	if diff := cmp.Diff(want, history(t, pool, "7")); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
}

func TestAWriteWithoutACreatorIsRefused(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := threads().Upsert(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{"7", "a"}}}); !errors.Is(err,
			ErrNoCreator) {
			t.Errorf("upsert: %v", err)
		}
		return nil
	})
}

func TestAVersionWithoutAStateIsRefused(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, s := range []string{"UNDEFINED", "", "latest"} {
		_, err := pool.Exec(context.Background(), `INSERT INTO threads (tenant_id, object, metadata)
		  VALUES (1, '{"post_id": 1}', jsonb_build_object('version_id', 1, 'version_state', $1::text, 'created_by', 'x', 'last_update_time',
		  now()))`, s)
		if !postgres.IsCheck(err) {
			t.Errorf("state %q: %v", s, err)
		}
		if err := new(State).UnmarshalText([]byte(s)); err == nil {
			t.Errorf("accepted the state %q", s)
		}
	}
}

// checkInvariants reads the table with SQL of its own.
func checkInvariants(ctx context.Context, tx pgx.Tx, table, keys, order string, versions int64) error {
	for what, sql := range map[string]string{
		"objects without exactly one head": `SELECT count(*) FROM (SELECT 1 FROM ` + table + ` GROUP BY tenant_id, ` + keys + `
		   HAVING count(*) FILTER (WHERE version_state IN ('LATEST', 'DELETED')) <> 1) x`,
		"archived versions that nothing follows": `SELECT count(*) FROM (SELECT version_state, lead(` + order +
			`) OVER (PARTITION BY tenant_id, ` + keys + ` ORDER BY ` + order + `) AS next
		   FROM ` + table + `) x WHERE (version_state = 'ARCHIVED') <> (next IS NOT NULL)`,
		"versions that are gone, or too many": fmt.Sprintf(`SELECT abs(count(*) - %d) FROM %s`, versions, table),
	} {
		var n int64
		if err := tx.QueryRow(ctx, sql).Scan(&n); err != nil {
			return err
		}
		if n != 0 {
			return fmt.Errorf("%d %s", n, what)
		}
	}
	return nil
}

// checkFlawless runs Check.
func checkFlawless[T any](ctx context.Context, tx pgx.Tx, table *Table[T], versions int64) error {
	var flaws []Flaw[T]
	n, err := table.Check(ctx, tx, func(f Flaw[T]) { flaws = append(flaws, f) })
	if err == nil && (n != versions || len(flaws) > 0) {
		err = fmt.Errorf("%d versions, want %d; %+v", n, versions, flaws)
	}
	return err
}

func TestAnySeriesOfWritesKeepsTheInvariants(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	tenant := int64(0)
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant++
		alive := map[event.ID]bool{}
		want := map[event.ID][]string{}
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `DELETE FROM threads`); err != nil {
				return err
			}
			var versions int64
			for range rapid.IntRange(1, 6).Draw(rt, "statements") {
				var changes []Change[settings]
				for range rapid.IntRange(0, 5).Draw(rt, "changes") {
					post := rapid.SampledFrom([]event.ID{"1", "10", "2", "a.b@example.com", "B|b"}).Draw(rt, "post")
					changes = append(changes, Change[settings]{TenantID: tenant,
						Object: settings{post, fmt.Sprint(len(changes), rapid.Int().Draw(rt, "title"))}, By: "x",
						At: time.Unix(int64(rapid.IntRange(1, 1000).Draw(rt, "at")), 0)})
				}
				switch rapid.SampledFrom([]string{"upsert", "delete", "purge"}).Draw(rt, "what") {
				case "purge":
					heads, err := table.Heads(ctx, tx, Head[settings]{}, 100)
					if err != nil {
						return err
					}
					heads = slices.DeleteFunc(heads, func(h Head[settings]) bool {
						return !slices.ContainsFunc(changes, func(c Change[settings]) bool { return c.Object.PostID == h.Object.PostID })
					})
					_, n, err := table.Purge(ctx, tx, heads, time.Unix(1001, 0))
					if err != nil {
						return err
					}
					for _, c := range changes {
						if p := c.Object.PostID; !alive[p] {
							n -= int64(len(want[p]))
							versions -= int64(len(want[p]))
							delete(want, p)
						}
					}
					if n != 0 {
						return fmt.Errorf("purged %d versions too many", n)
					}
				case "delete":
					ids, err := table.Delete(ctx, tx, changes)
					if err != nil {
						return err
					}
					n := 0
					for _, c := range changes {
						if p := c.Object.PostID; alive[p] {
							alive[p] = false
							n++
							want[p] = append(want[p], want[p][len(want[p])-1])
						}
					}
					if len(ids) != n {
						return fmt.Errorf("deleted %d, want %d", len(ids), n)
					}
					versions += int64(n)
				default:
					ids, err := table.Upsert(ctx, tx, changes)
					if err != nil {
						return err
					}
					if len(ids) != len(changes) || !slices.IsSorted(ids) {
						return fmt.Errorf("version ids %v of %d changes", ids, len(changes))
					}
					for _, c := range changes {
						alive[c.Object.PostID] = true
						want[c.Object.PostID] = append(want[c.Object.PostID], c.Object.Title)
					}
					versions += int64(len(changes))
				}
				if err := checkInvariants(ctx, tx, "threads", "post_id", "version_id", versions); err != nil {
					return err
				}
				if err := checkFlawless(ctx, tx, table, versions); err != nil {
					return err
				}
			}
			for deleted, list := range map[bool]func(context.Context, pgx.Tx, int64, Key, int) ([]Version[settings],
				error){false: table.List, true: table.ListDeleted} {
				wanted, got, after := []event.ID{}, []event.ID{}, Key(nil)
				for post := range want {
					if alive[post] != deleted {
						wanted = append(wanted, post)
					}
				}
				slices.Sort(wanted)
				for {
					page, err := list(ctx, tx, tenant, after, 2)
					if err != nil {
						return err
					}
					for _, v := range page {
						got, after = append(got, v.Object.PostID), Key{v.Object.PostID}
					}
					if len(page) < 2 {
						break
					}
				}
				if diff := cmp.Diff(wanted, got); diff != "" {
					return fmt.Errorf("objects, deleted %t: %s", deleted, diff)
				}
			}
			for post, titles := range want {
				all, err := table.History(ctx, tx, tenant, Key{post}, 0, 1000)
				if err != nil {
					return err
				}
				var got []string
				for _, v := range all {
					got = append(got, v.Object.Title)
				}
				if diff := cmp.Diff(titles, got); diff != "" {
					return fmt.Errorf("history of %s: %s", post, diff)
				}
				var recent []Version[settings]
				for before := int64(math.MaxInt64); ; {
					page, err := table.Recent(ctx, tx, tenant, Key{post}, before, 2)
					if err != nil {
						return err
					}
					if recent = append(recent, page...); len(page) < 2 {
						break
					}
					before = page[1].Position
				}
				slices.Reverse(recent)
				if diff := cmp.Diff(all, recent); diff != "" {
					return fmt.Errorf("history of %s, backwards: %s", post, diff)
				}
				if head := all[len(all)-1].Metadata.VersionState; (head == Latest) != alive[post] {
					return fmt.Errorf("head of %s is %s", post, head)
				}
			}
			return nil
		})
		if err != nil {
			rt.Fatal(err)
		}
	})
}

func TestRecordPutsEveryVersionInItsPlaceWhateverTheOrder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := bonds()
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		var all, unrecorded []Entry[bond]
		objects := []event.ID{"1", "b", "B"}[:rapid.IntRange(1, 3).Draw(rt, "objects")]
		for _, o := range objects {
			for v := int64(1); v <= 5; v++ {
				all = append(all, Entry[bond]{Change[bond]{1, bond{o, "99", v, fmt.Sprint("v", v)}, "x", time.Time{}}, v%2 == 0})
			}
		}
		for _, e := range all {
			e.By, e.Object.Note = Unrecorded, "by nobody"
			unrecorded = append(unrecorded, e)
		}
		sent := rapid.Permutation(slices.Concat(all, all[:len(all)/2], unrecorded)).Draw(rt, "order")
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `DELETE FROM follow_history`); err != nil {
				return err
			}
			var added int64
			for rest := sent; len(rest) > 0; {
				n := rapid.IntRange(1, len(rest)).Draw(rt, "batch")
				got, err := table.Record(ctx, tx, rest[:n])
				if err != nil {
					return err
				}
				added += got
				rest = rest[n:]
				if err := errors.Join(checkInvariants(ctx, tx, "follow_history", "follower_id, followee_id", "version", added),
					checkFlawless(ctx, tx, table, added)); err != nil {
					return fmt.Errorf("after %d of %d: %w", len(sent)-len(rest), len(sent), err)
				}
			}
			if added != int64(len(all)) {
				return fmt.Errorf("added %d, want %d", added, len(all))
			}
			for _, o := range objects {
				got, err := table.History(ctx, tx, 1, Key{o, "99"}, 0, 1000)
				if err != nil {
					return err
				}
				for i, v := range got {
					want := Archived
					if i == 4 {
						want = Latest
					}
					if v.Object.Version != int64(i+1) || v.Metadata.VersionState != want || v.Metadata.CreatedBy != "x" ||
						v.Object.Note == "by nobody" {
						return fmt.Errorf("object %s, place %d: %+v", o, i, v)
					}
				}
			}
			return nil
		})
		if err != nil {
			rt.Fatal(err)
		}
	})
}

func TestConcurrentWritersOfTheSameObjectsAllSucceed(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	const writers, rounds = 8, 10
	g, ctx := errgroup.WithContext(context.Background())
	for w := range writers {
		g.Go(func() error {
			for i := range rounds {
				changes := []Change[settings]{{1, settings{"1", "x"}, "w", time.Time{}}, {1, settings{"2", "x"}, "w", time.Time{}},
					{1, settings{"3", "x"}, "w", time.Time{}}}
				if w%2 == 0 {
					slices.Reverse(changes)
				}
				tx, err := pool.Begin(ctx) // not InTx: a deadlock must not be retried away
				if err != nil {
					return err
				}
				if _, err := table.Upsert(ctx, tx, changes); err != nil {
					return errors.Join(fmt.Errorf("writer %d, round %d: %w", w, i, err), tx.Rollback(ctx))
				}
				if err := tx.Commit(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		// A writer that waited began before the one that it waited for, yet made the later version
		// at the later time.
		return errors.Join(checkInvariants(ctx, tx, "threads", "post_id", "version_id", 3*writers*rounds),
			checkFlawless(ctx, tx, table, 3*writers*rounds))
	})
}

func TestATenantSeesItsOwnObjectsOnly(t *testing.T) {
	db := testkit.Postgres(t)
	ctx, api := context.Background(), db.Pool(t, postgres.RoleAPI)
	for _, tenant := range []int64{1, 2} {
		err := postgres.InTenant(ctx, api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
			_, err := threads().Upsert(ctx, tx, []Change[settings]{{tenant, settings{"7", fmt.Sprint("tenant ", tenant)}, "x",
				time.Time{}}})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	err := postgres.InTenant(ctx, api, 2, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := threads().Get(ctx, tx, 1, Key{"7"})
		return err
	})
	if !errors.Is(err, ErrNotFound) {
		t.Errorf("tenant 2 reads tenant 1's object: %v", err)
	}
}

func TestNewRefusesNamesThatAreNotIdentifiers(t *testing.T) {
	for _, def := range []Definition{
		{Table: "threads; DROP TABLE threads", Sequence: "s", Key: []Column{{"k", "bigint"}}},
		{Table: "threads", Sequence: "s", Key: []Column{{"k", "bigint)"}}},
		{Table: "threads", Sequence: "s'", Key: []Column{{"k", "bigint"}}},
		{Table: "threads", Sequence: "s"},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v was accepted", def)
				}
			}()
			New[settings](def)
		}()
	}
}

func TestCheckNamesWhatHandsHaveBroken(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	at := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		var changes []Change[settings]
		for post := range int64(4) {
			changes = append(changes, Change[settings]{1, settings{event.IDOf(post + 1), "a"}, "x", at},
				Change[settings]{1, settings{event.IDOf(post + 1), "b"}, "x", at.Add(time.Minute)})
		}
		_, err := table.Upsert(ctx, tx, changes)
		return err
	})
	for _, sql := range []string{
		`UPDATE threads SET metadata = jsonb_set(metadata, '{version_state}', '"ARCHIVED"') WHERE post_id = '1'`,
		`UPDATE threads SET metadata = metadata || jsonb_build_object('version_id', version_id - 1000) WHERE post_id = '2'
			AND version_state = 'LATEST'`,
		`UPDATE threads SET metadata = jsonb_set(metadata, '{last_update_time}', '"2026-01-01T00:00:00Z"') WHERE post_id = '3'
			AND version_state = 'LATEST'`,
	} {
		if _, err := pool.Exec(context.Background(), sql); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL TimeZone = 'UTC'`); err != nil {
			return err
		}
		_, err := table.Check(ctx, tx, func(f Flaw[settings]) {
			got = append(got, fmt.Sprintf("%d/%s %s: %s is %s, want %s", f.TenantID, f.Object.PostID,
				f.Object.Title, f.Rule, f.Got, f.Want))
		})
		return err
	})
	want := []string{
		"1/1 b: state of the last version is ARCHIVED, want LATEST or DELETED",
		"1/2 b: state of an earlier version is LATEST, want ARCHIVED",
		"1/2 a: state of the last version is ARCHIVED, want LATEST or DELETED",
		"1/3 b: last_update_time is 2026-01-01 00:00:00+00, want not before 2026-02-03 04:05:06+00",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("flaws (-want +got):\n%s", diff)
	}
}

func TestTheTableRefusesAVersionThatNobodyMadeOrAtNoTime(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, table := range []string{"threads", "comment_history", "follow_history"} {
		for _, metadata := range []string{
			`{"version_id": 1, "version_state": "LATEST", "last_update_time": "2026-01-01T00:00:00Z"}`,
			`{"version_id": 1, "version_state": "LATEST", "created_by": "", "last_update_time": "2026-01-01T00:00:00Z"}`,
			`{"version_id": 1, "version_state": "LATEST", "created_by": "x"}`,
		} {
			_, err := pool.Exec(context.Background(), `INSERT INTO `+table+` (tenant_id, object, metadata)
			  VALUES (1, '{"post_id": 1, "comment_id": "00000000-0000-7000-8000-000000000000", "follower_id": 1, "followee_id": 2,
			  "version": 1}', $1::jsonb)`, metadata)
			if !postgres.IsCheck(err) {
				t.Errorf("%s took %s: %v", table, metadata, err)
			}
		}
	}
}

// article is an object of a table that only this test has.
type article struct {
	ID      int64    `json:"id"`
	Author  int64    `json:"author"`
	Section string   `json:"section"`
	Title   string   `json:"title"`
	Labels  []string `json:"labels,omitempty"` // added later
	Pinned  bool     `json:"pinned"`           // added later
}

func articles(t testing.TB, db *testkit.DB) *Table[article] {
	t.Helper()
	_, err := db.Pool(t, postgres.RoleOwner).Exec(context.Background(), `
CREATE SEQUENCE article_version_id AS bigint START 100000000001;
CREATE TABLE articles (
  tenant_id bigint NOT NULL, object jsonb NOT NULL, metadata jsonb NOT NULL,
  id            bigint GENERATED ALWAYS AS ((object ->> 'id')::bigint) STORED NOT NULL,
  version_id    bigint GENERATED ALWAYS AS ((metadata ->> 'version_id')::bigint) STORED NOT NULL,
  version_state text   GENERATED ALWAYS AS (metadata ->> 'version_state') STORED NOT NULL,
  PRIMARY KEY (tenant_id, id, version_id)
);
CREATE UNIQUE INDEX articles_head_idx ON articles (tenant_id, id) WHERE version_state IN ('LATEST', 'DELETED');
CREATE INDEX articles_author_idx ON articles (tenant_id, ((object ->> 'author')::bigint), (object ->> 'section'), id)
	WHERE version_state = 'LATEST';
GRANT SELECT, INSERT, UPDATE, DELETE ON articles TO tidings_system;
GRANT USAGE ON SEQUENCE article_version_id TO tidings_system;`)
	if err != nil {
		t.Fatal(err)
	}
	return New[article](Definition{Table: "articles", Sequence: "article_version_id", Key: []Column{{"id", "bigint"}},
		Indexes: [][]Column{{{"author", "bigint"}, {"section", "text"}}}})
}

func TestQueryFindsObjectsAsTheyAreByAnIndex(t *testing.T) {
	db := testkit.Postgres(t)
	table, pool := articles(t, db), db.Pool(t, postgres.RoleSystem)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		var changes []Change[article]
		for i := range int64(3000) {
			changes = append(changes, Change[article]{TenantID: 1 + i%2,
				Object: article{ID: i, Author: i % 50, Section: []string{"a", "b"}[i%3%2]}, By: "x"})
		}
		for i := range int64(1000) { // some change their author
			changes = append(changes, Change[article]{TenantID: 1 + i%2, Object: article{ID: i, Author: i % 40, Section: "b"}, By: "x"})
		}
		if _, err := table.Upsert(ctx, tx, changes); err != nil {
			return err
		}
		gone := Change[article]{TenantID: 1, Object: article{ID: 1002}, By: "x"}
		if _, err := table.Delete(ctx, tx, []Change[article]{gone}); err != nil {
			return err
		}
		now := map[int64]article{}
		for _, c := range changes {
			if c.TenantID == 1 && c.Object.ID != 1002 {
				now[c.Object.ID] = c.Object
			}
		}
		var want, got []int64
		for id, a := range now {
			if a.Author == 2 && a.Section == "b" {
				want = append(want, id)
			}
		}
		slices.Sort(want)
		var after Key
		for {
			page, err := table.Query(ctx, tx, 1, []Field{{"section", "b"}, {"author", 2}}, after, 7)
			if err != nil {
				return err
			}
			for _, v := range page {
				got, after = append(got, v.Object.ID), Key{v.Object.ID}
			}
			if len(page) < 7 {
				break
			}
		}
		if diff := cmp.Diff(want, got); diff != "" || len(want) < 20 {
			t.Errorf("articles of author 2 in section b (-want +got):\n%s", diff)
		}
		if _, err := table.Query(ctx, tx, 1, []Field{{"section", "b"}}, nil, 7); err == nil {
			t.Error("a query without an index succeeded")
		}
		if _, err := tx.Exec(ctx, `SET LOCAL plan_cache_mode = force_generic_plan`); err != nil {
			return err
		}
		plan := func(sql string, args pgx.StrictNamedArgs) string {
			t.Helper()
			rows, _ := tx.Query(ctx, "EXPLAIN "+sql, args)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				t.Fatal(err)
			}
			return strings.Join(lines, "\n")
		}
		for _, paged := range []bool{false, true} {
			args := pgx.StrictNamedArgs{"tenant": 1, "field0": 2, "field1": "b", "limit": 7}
			if paged {
				args["key0"] = 5
			}
			p := plan(table.SelectByFirstIndexSQL(paged), args)
			if !strings.Contains(p, "articles_author_idx") || strings.Contains(p, "Filter") || strings.Contains(p, "Sort") {
				t.Errorf("paged %t:\n%s", paged, p)
			}
		}
		return nil
	})
}

func TestAnObjectStoredBeforeAFieldWasThereIsRead(t *testing.T) {
	db := testkit.Postgres(t)
	table, pool := articles(t, db), db.Pool(t, postgres.RoleSystem)
	// Rows as the first release stored them, and one of a later release with a field that this
	// release does not know.
	rows, err := os.ReadFile("testdata/articles.json")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(context.Background(), `INSERT INTO articles (tenant_id, object, metadata)
		SELECT 1, r -> 'object', r -> 'metadata' FROM jsonb_array_elements($1::jsonb) r`, string(rows)); err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 678000, time.UTC)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if err := checkFlawless(ctx, tx, table, 3); err != nil {
			return err
		}
		got, err := table.History(ctx, tx, 1, Key{7}, 0, 10)
		if err != nil {
			return err
		}
		want := []Version[article]{
			{article{ID: 7, Author: 3, Section: "news", Title: "First"},
				Metadata{99999999991, Archived, "alice@corp.com", at}, 99999999991},
			{article{ID: 7, Author: 3, Section: "news", Title: "Second"},
				Metadata{99999999992, Latest, "leo@corp.com", at.Add(time.Second)}, 99999999992},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("history (-want +got):\n%s", diff)
		}
		later, err := table.Get(ctx, tx, 1, Key{8})
		if diff := cmp.Diff(article{ID: 8, Author: 4, Section: "news", Title: "Third", Labels: []string{"x"}, Pinned: true},
			later.Object); diff != "" {
			t.Errorf("of a later release (-want +got):\n%s", diff)
		}
		if err != nil {
			return err
		}
		if _, err := table.Upsert(ctx, tx, []Change[article]{{TenantID: 1, Object: article{ID: 7, Author: 3, Section: "news", Pinned: true},
			By: "x"}}); err != nil {
			return err
		}
		return checkFlawless(ctx, tx, table, 4)
	})
}
