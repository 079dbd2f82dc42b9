package versioned_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	. "github.com/tidings/tidings/internal/versioned"
)

func seen(t testing.TB, pool *pgxpool.Pool) []Head[settings] {
	t.Helper()
	var heads []Head[settings]
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
		heads, err = threads().Heads(ctx, tx, Head[settings]{}, 1000)
		return err
	})
	return heads
}

// lives returns all heads: tenant, object, state and creator.
func lives(t testing.TB, pool *pgxpool.Pool) (all []string) {
	t.Helper()
	for _, h := range seen(t, pool) {
		all = append(all, fmt.Sprintf("%d/%s %s %s", h.TenantID, h.Key[0], h.Metadata.VersionState, h.Metadata.CreatedBy))
	}
	return all
}

// old makes settings by alice with an old time.
func old(t testing.TB, pool *pgxpool.Pool, tenant int64, posts ...event.ID) {
	t.Helper()
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		var changes []Change[settings]
		for _, p := range posts {
			changes = append(changes, Change[settings]{tenant, settings{p, "a"}, "alice", time.Unix(1000, 0)},
				Change[settings]{tenant, settings{p, "b"}, "alice", time.Unix(2000, 0)})
		}
		_, err := threads().Upsert(ctx, tx, changes)
		return err
	})
}

func all[T any](_ context.Context, heads []Head[T]) ([]Head[T], error) { return heads, nil }

func none[T any](context.Context, []Head[T]) ([]Head[T], error) { return nil, nil }

func TestNothingGoesAMicrosecondEarly(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	at := time.Date(2026, 2, 3, 4, 5, 6, 789123000, time.UTC)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		table := threads()
		if _, err := table.Upsert(ctx, tx, []Change[settings]{{1, settings{"7", "a"}, "alice", at}}); err != nil {
			return err
		}
		heads, err := table.Heads(ctx, tx, Head[settings]{}, 10)
		if err != nil {
			return err
		}
		for _, c := range []struct {
			before time.Time
			want   int64
		}{{at.Add(-time.Microsecond), 0}, {at, 0}, {at.Add(time.Microsecond), 1}} {
			if n, err := table.Expire(ctx, tx, heads, c.before); n != c.want || err != nil {
				t.Errorf("expired %d heads made %s before the limit, %v: want %d", n, at.Sub(c.before), err, c.want)
			}
		}
		if heads, err = table.Heads(ctx, tx, Head[settings]{}, 10); err != nil {
			return err
		}
		at := heads[0].Metadata.LastUpdateTime // the deletion's time, from which the purge counts
		for _, c := range []struct {
			before        time.Time
			want, version int64
		}{{at, 0, 0}, {at.Add(time.Microsecond), 1, 2}} {
			if n, versions, err := table.Purge(ctx, tx, heads, c.before); n != c.want || versions != c.version || err != nil {
				t.Errorf("purged %d objects, %d versions, %v: want %d, %d", n, versions, err, c.want, c.version)
			}
		}
		return nil
	})
}

func TestRetentionOfWhatIsNotOldEnoughOrNotInvalidChangesNothing(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	old(t, pool, 1, "1", "2")
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := threads().Delete(ctx, tx, []Change[settings]{{TenantID: 1, Object: settings{PostID: "2"}, By: "alice"}})
		return err
	})
	want := []string{"1/1 LATEST alice", "1/2 DELETED alice"}
	age := time.Since(time.Unix(2000, 0))
	for name, r := range map[string]Retention[settings]{
		"kept for ever": {Invalid: all[settings], Slice: 10},
		"too young":     {Terms: Terms{After: age + time.Hour}, Invalid: all[settings], Slice: 10},
		"valid":         {Terms: Terms{After: time.Hour}, Invalid: none[settings], Slice: 10},
		"not ended":     {Terms: Terms{After: time.Microsecond}, Invalid: none[settings], Ended: none[settings], Slice: 10},
		"the lease's new": {Terms: Terms{After: time.Microsecond, Fence: func(context.Context, pgx.Tx) error { return errors.New("lost") }},
			Invalid: all[settings], Slice: 10},
		"a plan": {Terms: Terms{After: time.Microsecond, DryRun: true}, Invalid: all[settings], Slice: 1},
	} {
		err := threads().Retain(t.Context(), pool, r)
		if (err != nil) != (r.Fence != nil) {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, lives(t, pool)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestAWriterThatCameFirstWinsOverRetention(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	for post, was := range map[event.ID]State{"1": Latest, "2": Deleted} {
		old(t, pool, 1, post)
		if was == Deleted {
			inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := table.Delete(ctx, tx, []Change[settings]{{1, settings{PostID: post}, "alice", time.Unix(3000, 0)}})
				return err
			})
		}
		wrote := false
		err := table.Retain(t.Context(), pool, Retention[settings]{Terms: Terms{After: time.Hour}, Slice: 10,
			Invalid: all[settings]}.At(func(step string) {
			if step != "chosen" || wrote {
				return
			}
			wrote = true
			// As old as the chosen head: only its version differs.
			inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := table.Upsert(ctx, tx, []Change[settings]{{1, settings{post, "c"}, "bob", time.Unix(3001, 0)}})
				return err
			})
		}))
		if err != nil {
			t.Fatal(err)
		}
		// In the first round the writer's own version is old but not chosen: the walk is past it.
		got := history(t, pool, post)
		if len(got) == 0 || got[len(got)-1] != (state{"c", "bob", Latest}) {
			t.Errorf("written while its %s version was being retained: %+v", was, got)
		}
		inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `DELETE FROM threads`)
			return err
		})
	}
}

func TestRetentionGoesOnWhereItBrokeOff(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	old(t, pool, 1, "1", "2", "3", "4", "5")
	old(t, pool, 2, "1", "2")
	chosen := map[string]int{}
	var expired, purged, versions int64
	r := Retention[settings]{Slice: 2,
		Terms: Terms{After: time.Hour, Done: func(e, p, v int64) { expired, purged, versions = expired+e, purged+p, versions+v }},
		Invalid: func(_ context.Context, heads []Head[settings]) ([]Head[settings], error) { // even posts are invalid
			for _, h := range heads {
				chosen[fmt.Sprint(h.TenantID, "/", h.Object.PostID)]++
			}
			return slices.DeleteFunc(heads, func(h Head[settings]) bool { return testkit.Number(h.Object.PostID)%2 == 1 }), nil
		},
	}
	// Canceled at each step of each slice. Committed slices are not read again.
	died := errors.New("died")
	for kill := 1; ; kill++ {
		ctx, cancel := context.WithCancelCause(t.Context())
		steps := 0
		r = r.At(func(string) {
			if steps++; steps == kill%4+1 { // 1..4: chosen, changed, committed, chosen
				cancel(died)
			}
		})
		err := threads().Retain(ctx, pool, r)
		cancel(nil)
		if err == nil {
			break
		}
		if !errors.Is(err, context.Canceled) || kill > 60 {
			t.Fatalf("run %d: %v", kill, err)
		}
	}
	want := []string{"1/1 LATEST alice", "1/2 DELETED retention", "1/3 LATEST alice", "1/4 DELETED retention", "1/5 LATEST alice",
		"2/1 LATEST alice", "2/2 DELETED retention"}
	if diff := cmp.Diff(want, lives(t, pool)); diff != "" || expired != 3 {
		t.Errorf("after %d expired (-want +got):\n%s", expired, diff)
	}
	for post, n := range chosen {
		if n > 4 { // the attempts of its slice: the walk did not restart
			t.Errorf("%s was chosen from %d times", post, n)
		}
	}
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(ctx, `SELECT count(*) FROM retention_cursors`).Scan(&n); n != 0 {
			t.Errorf("%d cursors remain, %v", n, err)
		}
		// a long time later
		_, err := tx.Exec(ctx, `UPDATE threads SET metadata = jsonb_set(metadata, '{last_update_time}', '"2026-01-01T00:00:00Z"')
			WHERE version_state = 'DELETED'`)
		return err
	})
	r = r.At(nil)
	r.Invalid = none[settings]
	r.Ended = func(_ context.Context, heads []Head[settings]) ([]Head[settings], error) {
		return slices.DeleteFunc(heads, func(h Head[settings]) bool { return h.TenantID == 2 }), nil
	}
	if err := threads().Retain(t.Context(), pool, r); err != nil {
		t.Fatal(err)
	}
	want = slices.DeleteFunc(want, func(s string) bool { return s == "1/2 DELETED retention" || s == "1/4 DELETED retention" })
	if diff := cmp.Diff(want, lives(t, pool)); diff != "" || purged != 2 || versions != 6 {
		t.Errorf("after %d purged with %d versions (-want +got):\n%s", purged, versions, diff)
	}
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error { return checkFlawless(ctx, tx, threads(), 4*2+3) })
}

func TestSeveralRetentionsAtOnceBesideWritersKeepTheInvariants(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := threads()
	posts := make([]event.ID, 40)
	for i := range posts {
		posts[i] = event.IDOf(i + 1)
	}
	old(t, pool, 1, posts...)
	g, ctx := errgroup.WithContext(t.Context())
	for range 3 {
		g.Go(func() error {
			for range 10 {
				if err := table.Retain(ctx, pool, Retention[settings]{Terms: Terms{After: time.Microsecond}, Slice: 7,
					Invalid: all[settings]}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for w := range 2 {
		g.Go(func() error {
			for i := range 30 {
				err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
					_, err := table.Upsert(ctx, tx, []Change[settings]{{TenantID: 1,
						Object: settings{event.IDOf(i + 1), fmt.Sprint("by ", w)}, By: "w"}})
					return err
				})
				if err != nil {
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
		var flaws []Flaw[settings]
		_, err := table.Check(ctx, tx, func(f Flaw[settings]) { flaws = append(flaws, f) })
		if len(flaws) > 0 {
			t.Errorf("%+v", flaws)
		}
		return err
	})
}

func TestWhatWasPurgedDoesNotComeBackAndTheNextVersionGoesOn(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := bonds()
	entry := func(version int64) Entry[bond] {
		return Entry[bond]{Change[bond]{1, bond{"7", "42", version, "x"}, "alice", time.Unix(1000+version, 0)}, version%2 == 0}
	}
	record := func(want int64, versions ...int64) {
		t.Helper()
		inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
			var entries []Entry[bond]
			for _, v := range versions {
				entries = append(entries, entry(v))
			}
			if n, err := table.Record(ctx, tx, entries); n != want || err != nil {
				t.Errorf("recorded %d of %v, %v: want %d", n, versions, err, want)
			}
			return nil
		})
	}
	retain := func(invalid func(context.Context, []Head[bond]) ([]Head[bond], error)) {
		t.Helper()
		if err := table.Retain(t.Context(), pool, Retention[bond]{Terms: Terms{After: time.Hour}, Slice: 10,
			Invalid: invalid}); err != nil {
			t.Fatal(err)
		}
	}
	have := func() (got []string) {
		inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
			all, err := table.History(ctx, tx, 1, Key{"7", "42"}, 0, 10)
			for _, v := range all {
				got = append(got, fmt.Sprint(v.Object.Version, " ", v.Metadata.VersionState, " ", v.Metadata.CreatedBy))
			}
			return err
		})
		return got
	}
	record(2, 1, 2)
	retain(none[bond])
	record(0, 1, 2) // the same events again
	if got := have(); len(got) != 0 {
		t.Errorf("after the purge: %q", got)
	}
	record(1, 2, 3)
	record(1, 4, 1)
	if diff := cmp.Diff([]string{"3 ARCHIVED alice", "4 DELETED alice"}, have()); diff != "" {
		t.Errorf("versions after it (-want +got):\n%s", diff)
	}
	retain(none[bond])
	record(1, 1, 2, 3, 4, 5)
	if diff := cmp.Diff([]string{"5 LATEST alice"}, have()); diff != "" {
		t.Errorf("after a second purge (-want +got):\n%s", diff)
	}
	retain(all[bond]) // the next version deletes the object of a history
	if diff := cmp.Diff([]string{"5 ARCHIVED alice", "6 DELETED retention"}, have()); diff != "" {
		t.Errorf("expired (-want +got):\n%s", diff)
	}
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error { return checkFlawless(ctx, tx, table, 2) })
}

// Callers of Record wait only for retention, and retention waits for all of them: a version that
// arrives late cannot pass the purge of its object.
func TestThoseWhoRecordWaitForRetentionAlone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	table := bonds()
	entry := func(follower event.ID, version int64) []Entry[bond] {
		return []Entry[bond]{{Change[bond]{1, bond{follower, "42", version, "x"}, "alice", time.Unix(1000+version, 0)}, version%2 == 0}}
	}
	var heads []Head[bond]
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := table.Record(ctx, tx, entry("7", 2)); err != nil {
			return err
		}
		var err error
		heads, err = table.Heads(ctx, tx, Head[bond]{}, 10)
		return err
	})
	record := func(follower event.ID, version int64) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			_, err := table.Record(ctx, tx, entry(follower, version))
			return err
		}
	}
	purge := func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := table.Purge(ctx, tx, heads, time.Now())
		return err
	}
	for _, c := range []struct {
		name       string
		open, next func(context.Context, pgx.Tx) error
		waits      bool
	}{
		{"a record beside a record", record("8", 1), record("9", 1), false},
		{"retention beside a record of an earlier version", record("7", 1), purge, true},
		{"a record of an earlier version beside retention", purge, record("7", 1), true},
	} {
		open, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := c.open(t.Context(), open); err != nil {
			t.Fatal(err)
		}
		next, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		_, err = next.Exec(t.Context(), `SET LOCAL lock_timeout = '100ms'`)
		if err == nil {
			err = c.next(t.Context(), next)
		}
		if postgres.IsLockTimeout(err) != c.waits || err != nil && !c.waits {
			t.Errorf("%s: %v", c.name, err)
		}
		if err := errors.Join(next.Rollback(t.Context()), open.Rollback(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAWalkReadsARangeOfTheHeadIndex(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	inTx(t, pool, func(ctx context.Context, tx pgx.Tx) error {
		var changes []Change[settings]
		for i := range int64(3000) {
			changes = append(changes, Change[settings]{TenantID: 1 + i%3, Object: settings{event.IDOf(i + 1), "x"}, By: "x"})
		}
		if _, err := threads().Upsert(ctx, tx, changes); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `SET LOCAL plan_cache_mode = force_generic_plan`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, CursorSQL, pgx.StrictNamedArgs{"table": "threads"}); err != nil {
			return err
		}
		rows, _ := tx.Query(ctx, "EXPLAIN "+threads().HeadsAfterSQL(), pgx.StrictNamedArgs{"tenant": 2, "key0": "500", "limit": 100})
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if plan := strings.Join(lines, "\n"); !strings.Contains(plan, "Index Scan using threads_head_idx") ||
			strings.Contains(plan, "Sort") {
			t.Errorf("the walk's plan:\n%s", plan)
		}
		return err
	})
}
