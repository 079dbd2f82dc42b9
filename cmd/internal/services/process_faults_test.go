//go:build faults

package services

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAnAPIKilledUnderLoadKeepsWhatItAnswered kills the process again and again while callers
// write, and starts another. The callers repeat what got no answer. Each of their writes exists
// once, with one event.
func TestAnAPIKilledUnderLoadKeepsWhatItAnswered(t *testing.T) {
	const callers, kills = 8, 5
	db := testkit.Postgres(t)
	system := db.Pool(t, postgres.RoleSystem)
	c, addr := newCaller(t, system), testkit.FreeAddr(t)
	var stop atomic.Bool
	var answered, unanswered, found atomic.Int64
	var mu sync.Mutex
	want := map[string]string{} // the body of each comment after its edit
	// ask repeats a request until it is answered.
	ask := func(method, path, body, header string) (a answer, repeated bool) {
		testkit.Eventually(t, method+" "+path, func() (bool, error) {
			var err error
			if a, err = c.do(t.Context(), method, addr+path, body, header); err != nil || a.status == http.StatusServiceUnavailable {
				repeated = true
				unanswered.Add(1)
				return false, err
			}
			return true, nil
		})
		return a, repeated
	}
	p := startProcess(t, addr, db.URL)
	var load sync.WaitGroup
	for w := range callers {
		load.Go(func() {
			for n := 0; !stop.Load(); n++ {
				first := fmt.Sprintf("comment %d of %d", n, w)
				a, repeated := ask("POST", "/v1/posts/5/comments", fmt.Sprintf(`{"author_id":"%d","body":"%s"}`, w+1, first),
					fmt.Sprintf("Idempotency-Key: %d", n))
				if a.status != http.StatusCreated || a.text("body") != first || a.replayed != "" && !repeated {
					t.Errorf("%s: %+v, repeated %t", first, a, repeated)
					return
				}
				if a.replayed != "" {
					found.Add(1)
				}
				id, second := a.text("comment_id"), first+", edited"
				a, repeated = ask("PATCH", "/v1/comments/"+id, fmt.Sprintf(`{"body":"%s"}`, second), `If-Match: "1"`)
				switch current, _ := a.body["current"].(map[string]any); {
				case a.status == http.StatusOK && a.tag == `"2"`:
				case a.status == http.StatusPreconditionFailed && repeated && current["body"] == second:
					found.Add(1)
				default:
					t.Errorf("%s: %+v, repeated %t", second, a, repeated)
					return
				}
				mu.Lock()
				want[id] = second
				mu.Unlock()
				answered.Add(2)
			}
		})
	}
	for range kills {
		before := answered.Load()
		testkit.Eventually(t, "more writes", func() (bool, error) { return t.Failed() || answered.Load() > before+60, nil })
		p.Kill()
		p = startProcess(t, addr, db.URL)
	}
	stop.Store(true)
	load.Wait()
	t.Logf("%d writes, %d attempts without an answer, %d of them had been written", answered.Load(), unanswered.Load(), found.Load())
	if unanswered.Load() == 0 {
		t.Error("no kill hit a write")
	}
	rows, err := system.Query(t.Context(), `SELECT comment_id::text, body, version, ARRAY(SELECT payload->>'version' FROM outbox_messages
		WHERE payload->>'comment_id' = comment_id::text ORDER BY id)::text FROM comments`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		var id, body, events string
		var version int
		if err := rows.Scan(&id, &body, &version, &events); err != nil {
			t.Fatal(err)
		}
		if body != want[id] || version != 2 || events != "{1,2}" {
			t.Errorf("comment %s: %q of version %d, events %s, want %q", id, body, version, events, want[id])
		}
	}
	if err := rows.Err(); err != nil || n != len(want) {
		t.Errorf("%d comments of %d answered: %v", n, len(want), err)
	}
}

// TestAnAPIThatThawsRepeatsNoWrite freezes the process at the COMMIT of a PUT that PostgreSQL does
// not get. In time, the process would run the PUT again. It thaws later: the caller has left, has
// sent the PUT to another process, and has deleted the edge. The process that thawed leaves it
// deleted.
func TestAnAPIThatThawsRepeatsNoWrite(t *testing.T) {
	for name, late := range map[string]bool{"in time": false, "late": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testkit.Postgres(t)
			system := db.Pool(t, postgres.RoleSystem)
			c := newCaller(t, system)
			gate, through := newCommitGate(t, db.URL)
			frozen, other := startProcess(t, testkit.FreeAddr(t), through), startProcess(t, testkit.FreeAddr(t), db.URL)
			const edge = "/v1/follows/1/2"
			gate.armed.Store(true)
			got := make(chan answer, 1)
			left, leave := context.WithCancel(t.Context())
			defer leave()
			asked := time.Now()
			go func() {
				a, _ := c.do(left, "PUT", frozen.addr+edge, "") // the caller may leave
				got <- a
			}()
			gate.awaitHeld(t, system)
			frozen.Signal(syscall.SIGSTOP)
			since := time.Now()
			gate.forward <- false
			testkit.Eventually(t, "the transaction to end", func() (bool, error) { return writing(t, system) == 0, nil })
			if late {
				leave()
				<-got
				for _, ask := range []struct {
					method string
					status int
				}{{"PUT", 201}, {"DELETE", 204}} {
					if a, err := c.do(t.Context(), ask.method, other.addr+edge, ""); err != nil || a.status != ask.status {
						t.Fatalf("%s through another process: %+v, %v", ask.method, a, err)
					}
				}
				testkit.Eventually(t, "the time of the write to pass", func() (bool, error) {
					return time.Since(since) > 7*time.Second, nil
				})
			}
			frozen.Signal(syscall.SIGCONT)
			if !late {
				a := <-got
				if a.status == http.StatusServiceUnavailable && time.Since(asked) > 4*time.Second {
					var err error // the machine was too slow, and the caller repeats its write
					if a, err = c.do(t.Context(), "PUT", frozen.addr+edge, ""); err != nil {
						t.Fatal(err)
					}
				}
				if a.status != http.StatusCreated {
					t.Errorf("a write that is repeated in time: %+v", a)
				}
			}
			// A later write through the same process; the stop of the process waits for the writes
			// that it has taken.
			if a, err := c.do(t.Context(), "PUT", frozen.addr+"/v1/follows/1/3", ""); err != nil || a.status != http.StatusCreated {
				t.Errorf("a write after the thaw: %+v, %v", a, err)
			}
			frozen.Signal(syscall.SIGTERM)
			<-frozen.Ended()
			var events string
			if err := system.QueryRow(t.Context(), `SELECT string_agg(event_type, ' ' ORDER BY id) FROM outbox_messages
				WHERE payload->>'followee_id' = '2'`).Scan(&events); err != nil {
				t.Fatal(err)
			}
			if want := map[bool]string{true: "created removed", false: "created"}[late]; events != want {
				t.Errorf("events %q, want %q", events, want)
			}
		})
	}
}

// TestPostgreSQLIsAwayForLongerThanAWriteWaits asks an API without a PostgreSQL for longer than 5
// s. Each answer is 503 until PostgreSQL is back, and then the same process continues.
func TestPostgreSQLIsAwayForLongerThanAWriteWaits(t *testing.T) {
	for name, f := range map[string]struct{ goes, comes func(pg *testkit.PG) }{
		"killed": {func(pg *testkit.PG) { pg.Kill(t) }, func(pg *testkit.PG) { pg.Restart(t) }},
		"frozen": {func(pg *testkit.PG) { pg.Freeze(t) }, func(pg *testkit.PG) { pg.Thaw(t) }},
	} {
		t.Run(name, func(t *testing.T) {
			pg := testkit.PostgresProcess(t)
			db := pg.DB(t)
			system := db.Pool(t, postgres.RoleSystem)
			c := newCaller(t, system)
			p := startProcess(t, testkit.FreeAddr(t), db.URL)
			put := func(to int) (answer, error) {
				return c.do(t.Context(), "PUT", fmt.Sprintf("%s/v1/follows/1/%d", p.addr, to), "")
			}
			if a, err := put(2); err != nil || a.status != http.StatusCreated {
				t.Fatalf("%+v, %v", a, err)
			}
			f.goes(pg)
			since := time.Now()
			refused := func(what string, a answer, err error) {
				t.Helper()
				if err != nil || a.status != http.StatusServiceUnavailable || a.text("code") != "unavailable" || a.retryAfter == "" {
					t.Errorf("%s after %s: %+v, %v", what, time.Since(since), a, err)
				}
			}
			testkit.Eventually(t, "longer than a write waits", func() (bool, error) {
				a, err := put(3)
				refused("a write", a, err)
				return time.Since(since) > 6*time.Second, nil
			})
			a, err := c.do(t.Context(), "GET", p.addr+"/v1/follows/1/2", "")
			refused("a read", a, err)
			f.comes(pg)
			testkit.Eventually(t, "writes to work again", func() (bool, error) {
				a, err := put(3)
				return a.status == http.StatusCreated || a.status == http.StatusOK, err
			})
			var edges, events int
			testkit.Eventually(t, "a connection", func() (bool, error) {
				err := system.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM follows), (SELECT count(*) FROM outbox_messages)`).
					Scan(&edges, &events)
				return err == nil, err
			})
			if edges != 2 || events != 2 {
				t.Errorf("%d edges, %d events, want 2 of each", edges, events)
			}
		})
	}
}
