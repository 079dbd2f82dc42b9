package store_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

// lateFlush keeps each commit in the server's memory for a while before writing it. A crash
// meanwhile leaves no trace of the transaction, and another transaction gets its id.
func lateFlush(delay time.Duration) []string {
	return []string{"fsync=on", fmt.Sprintf("commit_delay=%d", delay.Microseconds()), "commit_siblings=0", "wal_writer_delay=10s"}
}

type answer struct {
	out []store.EdgeOutcome
	err error
}

// start makes follower follow 2.
func start(f fixture, follower event.ID) chan answer {
	told := make(chan answer, 1)
	go func() {
		out, err := f.PutEdges(context.Background(), tenant, follows, []store.EdgeWrite{{Meta: meta(), From: follower, To: "2"}})
		told <- answer{out, err}
	}()
	return told
}

// made checks that the follow was answered as made and that it exists, with one event. It returns
// false if the answer is that the result is unknown; that is correct, but proves nothing.
func (f fixture) made(t *testing.T, follower event.ID, a answer) bool {
	t.Helper()
	if errors.Is(a.err, postgres.ErrUnknown) {
		t.Log(a.err)
		return false
	}
	if a.err != nil || !a.out[0].Changed || a.out[0].Edge.Version != 1 {
		t.Errorf("follow: %+v, %v", a.out, a.err)
	}
	events := 0
	testkit.Eventually(t, "new connections after the crash", func() (bool, error) {
		got, err := f.GetEdge(t.Context(), tenant, follows, follower, "2")
		if err != nil || got.Version != 1 {
			return false, fmt.Errorf("the answered follow: %+v, %w", got, err)
		}
		err = f.system.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE aggregate_id = '2'
			AND payload ->> 'follower_id' = $1`, follower).Scan(&events)
		return err == nil, err
	})
	if events != 1 {
		t.Errorf("%d events, want 1", events)
	}
	return true
}

// shows calls arrange, each time with another follower, until it returns true.
func shows(t *testing.T, arrange func(follower event.ID) bool) {
	t.Helper()
	for follower := int64(100); !t.Failed(); follower++ {
		if arrange(event.IDOf(follower)) {
			return
		}
		if follower == 110 {
			t.Fatal("the situation was not reached in 11 attempts")
		}
	}
}

// awaitBackend waits, over restarts, until another connection meets the condition, or until the
// answer arrives.
func awaitBackend(t *testing.T, owner *pgxpool.Pool, told chan answer, what, condition string) {
	t.Helper()
	testkit.Eventually(t, what, func() (there bool, _ error) {
		err := owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND (`+condition+`))`).Scan(&there)
		return err == nil && there || len(told) > 0, nil
	})
}

// crashes runs writers of several tenants and kinds, single and in slices, while the whole server
// or one of its processes crashes. Afterwards every answered write exists once, with its event.
func crashes(t *testing.T, seed uint64, rounds int) {
	pg := testkit.PostgresProcess(t, lateFlush(20*time.Millisecond)...)
	db := pg.DB(t)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(),
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$`); err != nil {
		t.Fatal(err) // writes are durable nevertheless
	}
	l := crashLoad{seed: seed, stores: []fixture{on(t, db), on(t, db)}, acked: make(map[string]bool)}
	owner := db.Pool(t, postgres.RoleOwner)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var writers sync.WaitGroup
	for w := range int64(24) {
		writers.Go(func() { l.write(ctx, t, w) })
	}
	r := rand.New(rand.NewPCG(seed, 1<<32))
	for range rounds {
		want := l.answered.Load() + 50 + r.Int64N(150)
		testkit.Eventually(t, "writes to be answered", func() (bool, error) { return l.answered.Load() >= want, nil })
		if r.IntN(3) > 0 {
			pg.Restart(t)
			continue
		}
		var pid int
		testkit.Eventually(t, "a process that commits", func() (bool, error) {
			err := owner.QueryRow(ctx, `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
				ORDER BY query <> 'commit', state <> 'active', random() LIMIT 1`).Scan(&pid)
			return err == nil, nil // the previous crash has ended the owner's connection too
		})
		pg.KillBackend(t, pid)
	}
	want := l.answered.Load() + 50
	testkit.Eventually(t, "writes to be answered after the last crash",
		func() (bool, error) { return l.answered.Load() >= want, nil })
	stop()
	writers.Wait()
	l.check(t)
}

type crashLoad struct {
	seed     uint64
	stores   []fixture
	answered atomic.Int64
	failed   atomic.Int64

	mu    sync.Mutex
	acked map[string]bool // acknowledged writes, named as in the truth and the outbox
}

// write makes writes that no other writer makes, until ctx ends.
func (l *crashLoad) write(ctx context.Context, t *testing.T, w int64) {
	s, tenant, r := l.stores[w%2], 1+w/2%6, rand.New(rand.NewPCG(l.seed, uint64(w)))
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for id := (w + 1) * 1_000_000; ctx.Err() == nil; id += 10 {
		var made []string
		var err error
		ack := func(changed bool, format string, args ...any) {
			name := fmt.Sprintf("%d ", tenant) + fmt.Sprintf(format, args...)
			if !changed {
				t.Errorf("%s: answered that nothing was made", name)
			}
			made = append(made, name)
		}
		bg := context.WithoutCancel(ctx) // finish the write in hand
		switch r.IntN(4) {
		case 0, 1:
			writes := make([]store.EdgeWrite, 1+r.IntN(4)/3*2)
			for i := range writes {
				writes[i] = store.EdgeWrite{Meta: meta(), From: event.IDOf(id + int64(i)), To: "1"}
			}
			var out []store.EdgeOutcome
			out, err = s.PutEdges(bg, tenant, follows, writes)
			for i := range out {
				ack(out[i].Changed, "follow %d 1 1", id+int64(i))
			}
		case 2:
			c := store.NewChild{Meta: meta(), Object: event.IDOf(id), AuthorID: "1", Body: "hello"}
			if r.IntN(2) == 0 {
				c.Key = fmt.Sprint(id)
			}
			var out []store.ChildOutcome
			out, err = s.CreateChildren(bg, tenant, commentKind, []store.NewChild{c})
			for _, o := range out {
				ack(o.Changed && o.Err == nil, "comment %d %s 1", id, o.Child.ID)
			}
		case 3:
			var out []store.ThreadOutcome
			out, err = s.SetThreads(bg, tenant, commentKind, []store.ThreadSettings{{Meta: meta(), Object: event.IDOf(id), Title: "title"}})
			for _, o := range out {
				ack(o.Changed && o.Err == nil, "thread %d 1", id)
			}
		}
		if err == nil {
			l.answered.Add(int64(len(made)))
			l.mu.Lock()
			for _, name := range made {
				l.acked[name] = true
			}
			l.mu.Unlock()
			continue
		}
		l.failed.Add(1)
		if !postgres.IsTransient(err) && !errors.Is(err, postgres.ErrUnknown) {
			t.Errorf("write: %v", err)
		}
		<-tick.C // the server is down
	}
}

// check compares the answered writes with the truth, and the truth with the outbox.
func (l *crashLoad) check(t *testing.T) {
	system := l.stores[0].system
	truth := names(t, system, `
SELECT format('%s follow %s %s %s', tenant_id, follower_id, followee_id, version) FROM follows
UNION ALL SELECT format('%s comment %s %s %s', tenant_id, post_id, comment_id, version) FROM comments
UNION ALL SELECT format('%s thread %s %s', tenant_id, post_id, object ->> 'version') FROM threads`)
	outbox := names(t, system, `
SELECT format('%s %s %s %s', tenant_id, aggregate_type, CASE aggregate_type
         WHEN 'follow' THEN format('%s %s', payload ->> 'follower_id', payload ->> 'followee_id')
         WHEN 'thread' THEN payload ->> 'post_id'
         ELSE format('%s %s', payload ->> 'post_id', payload ->> 'comment_id') END, payload ->> 'version')
  FROM outbox_messages`)
	var lost, silent int
	for name := range l.acked {
		if truth[name] != 1 {
			lost++
			t.Errorf("%s was answered, and the truth has it %d times", name, truth[name])
		}
	}
	for name, n := range truth {
		if outbox[name] != n || n != 1 {
			silent++
			t.Errorf("the truth has %s %d times, and the outbox %d times", name, n, outbox[name])
		}
	}
	t.Logf("%d answered, %d lost; %d failed, %d in the truth; %d without one event", len(l.acked), lost,
		l.failed.Load(), len(truth), silent)
	if len(outbox) != len(truth) {
		t.Errorf("%d events, want %d", len(outbox), len(truth))
	}
}

func names(t *testing.T, pool *pgxpool.Pool, sql string) map[string]int {
	t.Helper()
	rows, _ := pool.Query(t.Context(), sql)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	count := make(map[string]int, len(all))
	for _, name := range all {
		count[name]++
	}
	return count
}
