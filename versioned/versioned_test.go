package versioned

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
	"pgregory.net/rapid"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type settings struct {
	PostID int64  `json:"post_id,string"`
	Title  string `json:"title"`
}

type bond struct {
	FollowerID int64  `json:"follower_id,string"`
	FolloweeID int64  `json:"followee_id,string"`
	Version    int64  `json:"version"`
	Note       string `json:"note"`
}

func threads() *Table[settings] {
	return New[settings](Definition{Table: "threads", Sequence: "object_version_id", Key: []Column{{"post_id", "bigint"}}})
}

func bonds() *Table[bond] {
	return New[bond](Definition{Table: "follow_history", Sequence: "history_version_id", Version: "version",
		Key: []Column{{"follower_id", "bigint"}, {"followee_id", "bigint"}}})
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
		for i, sql := range slices.Concat(threads().statements(), bonds().statements()) {
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

// state is a version as the invariants see it.
type state struct {
	Title, By string
	State     State
}

func history(t testing.TB, pool *pgxpool.Pool, post int64) (all []state) {
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
			{1, settings{7, "a"}, "alice", at}, {1, settings{8, "other"}, "alice", at}, {1, settings{7, "b"}, "leo", at},
			{2, settings{7, "another tenant's"}, "eve", at}})
		return err
	})
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		got, err := table.Get(ctx, tx, 1, Key{7})
		if err != nil {
			return err
		}
		if got.Object.Title != "b" || got.Metadata.CreatedBy != "leo" || !got.Metadata.LastUpdateTime.Equal(at) {
			t.Errorf("got %+v", got)
		}
		ids, err := table.Delete(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{PostID: 7}, By: "john"}, {TenantID: 1, Object: settings{PostID: 99}, By: "john"}})
		if len(ids) != 1 {
			t.Errorf("deleted %v, want one version", ids)
		}
		return err
	})
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := table.Get(ctx, tx, 1, Key{7}); !errors.Is(err, ErrNotFound) {
			t.Errorf("get a deleted object: %v", err)
		}
		if ids, err := table.Delete(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{PostID: 7}, By: "john"}}); err != nil || len(ids) != 0 {
			t.Errorf("delete it again: %v, %v", ids, err)
		}
		list, err := table.List(ctx, tx, 1, nil, 10)
		if len(list) != 1 || list[0].Object.PostID != 8 {
			t.Errorf("list: %+v", list)
		}
		return err
	})
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := table.Upsert(ctx, tx, []Change[settings]{{1, settings{7, "c"}, "alice", at}})
		return err
	})
	want := []state{{"a", "alice", Archived}, {"b", "leo", Archived}, {"b", "john", Archived}, {"c", "alice", Latest}}
	if diff := cmp.Diff(want, history(t, pool, 7)); diff != "" {
		t.Errorf("history (-want +got):\n%s", diff)
	}
}

func TestAWriteWithoutACreatorIsRefused(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := threads().Upsert(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{7, "a"}}}); !errors.Is(err, ErrNoCreator) {
			t.Errorf("upsert: %v", err)
		}
		return nil
	})
}

func TestAVersionWithoutAStateIsRefused(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for _, s := range []string{"UNDEFINED", "", "latest"} {
		_, err := pool.Exec(context.Background(), `INSERT INTO threads (tenant_id, object, metadata)
		  VALUES (1, '{"post_id": 1}', jsonb_build_object('version_id', 1, 'version_state', $1::text, 'created_by', 'x'))`, s)
		if !postgres.IsCheck(err) {
			t.Errorf("state %q: %v", s, err)
		}
		if err := new(State).UnmarshalText([]byte(s)); err == nil {
			t.Errorf("state %q was read", s)
		}
	}
}

// checkInvariants reads the table behind the layer's back.
func checkInvariants(ctx context.Context, tx pgx.Tx, table, keys, order string, versions int64) error {
	for what, sql := range map[string]string{
		"objects without exactly one head": `SELECT count(*) FROM (SELECT 1 FROM ` + table + ` GROUP BY tenant_id, ` + keys + `
		   HAVING count(*) FILTER (WHERE version_state IN ('LATEST', 'DELETED')) <> 1) x`,
		"archived versions that nothing follows": `SELECT count(*) FROM (SELECT version_state, lead(` + order + `) OVER (PARTITION BY tenant_id, ` + keys + ` ORDER BY ` + order + `) AS next
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

func TestAnySeriesOfWritesKeepsTheInvariants(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	tenant := int64(0)
	rapid.Check(t, func(rt *rapid.T) {
		ctx := context.Background()
		tenant++
		alive := map[int64]bool{}
		want := map[int64][]string{}
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `DELETE FROM threads`); err != nil {
				return err
			}
			var versions int64
			for range rapid.IntRange(1, 6).Draw(rt, "statements") {
				var changes []Change[settings]
				for range rapid.IntRange(0, 5).Draw(rt, "changes") {
					post := rapid.Int64Range(1, 4).Draw(rt, "post")
					changes = append(changes, Change[settings]{TenantID: tenant, Object: settings{post, fmt.Sprint(len(changes), rapid.Int().Draw(rt, "title"))}, By: "x"})
				}
				if rapid.Bool().Draw(rt, "delete") {
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
				} else {
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
					return fmt.Errorf("history of %d: %s", post, diff)
				}
				if head := all[len(all)-1].Metadata.VersionState; (head == Latest) != alive[post] {
					return fmt.Errorf("head of %d is %s", post, head)
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
		var all []Entry[bond]
		objects := rapid.Int64Range(1, 3).Draw(rt, "objects")
		for o := int64(1); o <= objects; o++ {
			for v := int64(1); v <= 5; v++ {
				all = append(all, Entry[bond]{Change[bond]{1, bond{o, 99, v, fmt.Sprint("v", v)}, "x", time.Time{}}, v%2 == 0})
			}
		}
		sent := rapid.Permutation(slices.Concat(all, all[:len(all)/2])).Draw(rt, "order")
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
				if err := checkInvariants(ctx, tx, "follow_history", "follower_id, followee_id", "version", added); err != nil {
					return fmt.Errorf("after %d of %d: %w", len(sent)-len(rest), len(sent), err)
				}
			}
			if added != int64(len(all)) {
				return fmt.Errorf("added %d, want %d", added, len(all))
			}
			for o := int64(1); o <= objects; o++ {
				got, err := table.History(ctx, tx, 1, Key{o, 99}, 0, 1000)
				if err != nil {
					return err
				}
				for i, v := range got {
					want := Archived
					if i == 4 {
						want = Latest
					}
					if v.Object.Version != int64(i+1) || v.Metadata.VersionState != want {
						return fmt.Errorf("object %d, place %d: version %d, %s", o, i, v.Object.Version, v.Metadata.VersionState)
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
				changes := []Change[settings]{{1, settings{1, "x"}, "w", time.Time{}}, {1, settings{2, "x"}, "w", time.Time{}}, {1, settings{3, "x"}, "w", time.Time{}}}
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
		return checkInvariants(ctx, tx, "threads", "post_id", "version_id", 3*writers*rounds)
	})
}

func TestATenantSeesItsOwnObjectsOnly(t *testing.T) {
	db := testkit.Postgres(t)
	ctx, api := context.Background(), db.Pool(t, postgres.RoleAPI)
	for _, tenant := range []int64{1, 2} {
		err := postgres.InTenant(ctx, api, tenant, pgx.TxOptions{}, func(tx pgx.Tx) error {
			_, err := threads().Upsert(ctx, tx, []Change[settings]{{tenant, settings{7, fmt.Sprint("tenant ", tenant)}, "x", time.Time{}}})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	err := postgres.InTenant(ctx, api, 2, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := threads().Get(ctx, tx, 1, Key{7})
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
