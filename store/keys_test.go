package store_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

// A create meets a key, and finds it purged when it reads the key's child. It then counts as the
// first create with the key.
func TestACreateWhoseKeyIsPurgedMeanwhileMakesAChild(t *testing.T) {
	t.Parallel()
	f := open(t)
	first := f.mustCreate(t, store.NewChild{Object: "1", AuthorID: "5", Body: "once", Key: "a"})
	other, err := f.system.Begin(t.Context()) // holds key b, so the create waits there, after it met a
	if err != nil {
		t.Fatal(err)
	}
	defer other.Rollback(context.Background()) // rolled back at the end
	if _, err := other.Exec(t.Context(), `INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id)
		VALUES ($1, 'comment', 5, 'b', '', gen_random_uuid())`, tenant); err != nil {
		t.Fatal(err)
	}
	type result struct {
		out []store.ChildOutcome
		err error
	}
	told := make(chan result, 1)
	go func() {
		out, err := f.CreateChildren(context.Background(), tenant, commentKind, []store.NewChild{
			{Meta: meta(), Object: "1", AuthorID: "5", Body: "once", Key: "a"},
			{Meta: meta(), Object: "1", AuthorID: "5", Body: "twice", Key: "b"}})
		told <- result{out, err}
	}()
	testkit.Eventually(t, "the create waits for the key b", func() (waits bool, err error) {
		err = f.system.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'
			AND transactionid::text = $1)`,
			xid(t, other)).Scan(&waits)
		return waits, err
	})
	if _, err := f.system.Exec(t.Context(), `DELETE FROM child_keys WHERE idempotency_key = 'a'`); err != nil {
		t.Fatal(err)
	}
	if err := other.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := <-told
	if r.err != nil {
		t.Fatal(r.err)
	}
	for i, o := range r.out {
		if o.Err != nil || !o.Changed || o.Replayed || o.Child.ID == first.ID {
			t.Errorf("create %d: %+v", i, o)
		}
	}
	if again := f.create(t, store.NewChild{Object: "1", AuthorID: "5", Body: "once", Key: "a"}); !again.Replayed ||
		again.Child.ID != r.out[0].Child.ID {
		t.Errorf("the same create again: %+v, want %s", again, r.out[0].Child.ID)
	}
}

func xid(t *testing.T, tx pgx.Tx) (id string) {
	t.Helper()
	if err := tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::xid::text`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	return id
}

// TestKeysArePurgedInSlicesBesideWriters purges 30,000 old keys while four writers create and retry
// with keys of their own. After a run dies between two slices, the next one purges the rest.
func TestKeysArePurgedInSlicesBesideWriters(t *testing.T) {
	t.Parallel()
	f := open(t)
	const old, keep = 30_000, 24 * time.Hour
	if _, err := f.system.Exec(t.Context(), `
INSERT INTO child_keys (tenant_id, kind, author_id, idempotency_key, request_hash, child_id)
SELECT $1, (ARRAY['comment', 'review'])[n % 2 + 1], n % 100 + 1, 'old-' || n,
	CASE n % 1000 WHEN 0 THEN ''::bytea ELSE sha256(n::text::bytea) END,
       (lpad(to_hex((extract(epoch FROM now() - interval '25 hours') * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1,
       3) || '8' || substr(md5(n::text), 4, 15))::uuid
  FROM generate_series(1, $2::int) n`, tenant, old); err != nil {
		t.Fatal(err)
	}
	keys := func(where string) (n int) {
		t.Helper()
		if err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM child_keys WHERE idempotency_key LIKE `+where).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	in := store.NewChild{Object: "1", AuthorID: "5", Body: "within the time", Key: "young"}
	first := f.mustCreate(t, in)
	place := store.NewChild{Object: "1", AuthorID: "5", Body: "one per author", Key: "old-review",
		Attributes: json.RawMessage(`{"rating": 5}`)}
	review := createReview(t, f, place)
	if _, err := f.system.Exec(t.Context(), `UPDATE child_keys SET child_id = '00000000-0000-7000-8000-000000000000'
		WHERE idempotency_key = 'old-review'`); err != nil {
		t.Fatal(err)
	}

	// Retention of a history is under way, too.
	if _, err := f.system.Exec(t.Context(), `INSERT INTO retention_cursors (table_name, step, after_tenant, after_key)
		VALUES ('comment_history', 'delete', 1, '{00000000-0000-7000-8000-000000000000}')`); err != nil {
		t.Fatal(err)
	}
	var planned, purged, slices int64
	count := func(n *int64) func(int64, int64, int64) { return func(_, p, _ int64) { *n += p } }
	if err := store.PurgeKeys(t.Context(), f.system, versioned.Terms{Done: count(&purged)}); err != nil || purged != 0 {
		t.Errorf("without a time: %d, %v", purged, err)
	}
	if err := store.PurgeKeys(t.Context(), f.system, versioned.Terms{After: keep, DryRun: true, Done: count(&planned)}); err != nil ||
		planned != old-old/1000+1 {
		t.Errorf("plan: %d, %v; want all old keys except the %d of erased authors", planned, err, old/1000)
	}
	killed := errors.New("killed")
	err := store.PurgeKeys(t.Context(), f.system, versioned.Terms{After: keep, Done: count(&purged),
		Fence: func(context.Context, pgx.Tx) error {
			if slices++; slices > 2 {
				return killed
			}
			return nil
		}})
	if left := keys(`'old-%'`); !errors.Is(err, killed) || purged == 0 || left == old/1000 || left != old+1-int(purged) {
		t.Errorf("killed before the third slice: %v, %d are purged, %d left", err, purged, left)
	}

	stop, writers := make(chan struct{}), sync.WaitGroup{}
	for author := range int64(4) {
		writers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				in := store.NewChild{Meta: meta(), Object: "2", AuthorID: event.IDOf(author + 1), Body: fmt.Sprint("body ", n),
					Key: fmt.Sprint("new-", n)}
				var made [2]store.ChildOutcome
				for i := range made {
					out, err := f.CreateChildren(context.Background(), tenant, commentKind, []store.NewChild{in})
					if err != nil {
						t.Error(err)
						return
					}
					made[i] = out[0]
				}
				if made[0].Err != nil || !made[0].Changed || !made[1].Replayed || !cmp.Equal(made[0].Child, made[1].Child) {
					t.Errorf("created and retried: %+v", made)
				}
			}
		})
	}
	for range 3 { // the first purges the rest, the others find nothing
		if err := store.PurgeKeys(t.Context(), f.system, versioned.Terms{After: keep, Done: count(&purged)}); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	writers.Wait()
	if purged != planned || keys(`'old-%'`) != old/1000 || keys(`'new-%'`) == 0 {
		t.Errorf("purged %d of %d, %d old ones are left, want %d; %d are new", purged, planned, keys(`'old-%'`), old/1000, keys(`'new-%'`))
	}
	if again := f.create(t, in); !again.Replayed || !cmp.Equal(again.Child, first) {
		t.Errorf("a retry within the time: %+v, want %+v", again, first)
	}
	var taken *store.TakenError // the place belongs to the child and outlives the key
	in = place
	in.Meta = meta()
	if out, err := f.CreateChildren(t.Context(), tenant, reviews, []store.NewChild{in}); err != nil || !errors.As(out[0].Err, &taken) ||
		taken.Child.ID != review {
		t.Errorf("a retry after the key was purged, in a kind with one child per author: %+v, %v", out, err)
	}
}

var reviews = kinds.Builtin().Children["review"]

func createReview(t *testing.T, f fixture, in store.NewChild) string {
	t.Helper()
	in.Meta = meta()
	out, err := f.CreateChildren(t.Context(), tenant, reviews, []store.NewChild{in})
	if err != nil || !out[0].Changed {
		t.Fatal(err, out)
	}
	return out[0].Child.ID
}
