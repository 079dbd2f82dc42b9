//go:build faults

package services

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAFullDiskOfPostgreSQLRefusesWritesAndLosesNone fills the disk under an API that writes. At
// first no table can grow: writes get 503 until there is space again, and PostgreSQL continues.
// Then the log cannot grow either: PostgreSQL ends, and recovers when it starts with space. Each
// answered write is there, with one event.
func TestAFullDiskOfPostgreSQLRefusesWritesAndLosesNone(t *testing.T) {
	pg, disk := testkit.PostgresOnDisk(t, 400<<20)
	db := pg.DB(t)
	system := db.Pool(t, postgres.RoleSystem)
	c := newCaller(t, system)
	p := startProcess(t, testkit.FreeAddr(t), db.URL)
	var stop atomic.Bool
	var answered, refused atomic.Int64
	var mu sync.Mutex
	want := map[string]bool{}
	var load sync.WaitGroup
	for w := range 3 {
		load.Go(func() {
			pace := time.NewTicker(10 * time.Millisecond) // the load itself must not fill the disk
			defer pace.Stop()
			for n := 0; !stop.Load(); n++ {
				<-pace.C
				a, err := c.do(t.Context(), "POST", p.addr+"/v1/posts/5/comments",
					fmt.Sprintf(`{"author_id":"%d","body":"%s"}`, 3*n+w+1, strings.Repeat("x", 3000))) // one each: users have limits
				switch {
				case err == nil && a.status == http.StatusCreated:
					answered.Add(1)
					mu.Lock()
					want[a.text("comment_id")] = true
					mu.Unlock()
				case err == nil && a.status == http.StatusServiceUnavailable:
					refused.Add(1)
				default:
					t.Errorf("a write beside a full disk: %+v, %v", a, err)
					return
				}
			}
		})
	}
	t.Cleanup(func() { stop.Store(true); load.Wait() })
	more := func(what string, n *atomic.Int64) {
		t.Helper()
		at := n.Load()
		testkit.Eventually(t, what, func() (bool, error) { return t.Failed() || n.Load() >= at+20, nil })
	}
	started := func() (at time.Time) {
		t.Helper()
		testkit.Eventually(t, "PostgreSQL to answer", func() (bool, error) {
			err := system.QueryRow(t.Context(), `SELECT pg_postmaster_start_time()`).Scan(&at)
			return err == nil, err
		})
		return at
	}
	admin, err := pgx.Connect(t.Context(), db.URL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Exec(t.Context(), `SELECT pg_switch_wal()`); err != nil { // so that the log needs no new file for a while
		t.Fatal(err)
	}
	more("writes", &answered)
	before := started()
	disk.Fill(t, 0)
	more("writes to be refused", &refused)
	disk.Free(t)
	more("writes after there is space", &answered)
	if at := started(); !at.Equal(before) {
		t.Errorf("PostgreSQL has started again at %s: a table that cannot grow ends no server", at)
	}
	disk.Fill(t, 0)
	_, _ = admin.Exec(t.Context(), `SELECT pg_switch_wal()`) // it may end the server
	_ = admin.Close(t.Context())
	testkit.Eventually(t, "PostgreSQL to end", func() (bool, error) {
		conn, err := pgx.Connect(t.Context(), db.URL)
		if err == nil {
			_, _ = conn.Exec(t.Context(), `SELECT pg_switch_wal()`)
			_ = conn.Close(t.Context())
		}
		return err != nil || t.Failed(), nil
	})
	more("writes to be refused", &refused)
	disk.Free(t)
	pg.Restart(t)
	more("writes after the restart", &answered)
	stop.Store(true)
	load.Wait()
	t.Logf("%d writes, %d refused", answered.Load(), refused.Load())
	system.Reset() // closes connections to the server that ended
	rows, err := system.Query(t.Context(), `SELECT comment_id::text, count(m) FROM comments
		LEFT JOIN outbox_messages m ON m.payload->>'comment_id' = comment_id::text GROUP BY comment_id`)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	var id string
	var events int
	if _, err := pgx.ForEachRow(rows, []any{&id, &events}, func() error {
		found[id] = true
		if events != 1 {
			t.Errorf("comment %s has %d events", id, events)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	for id := range want {
		if !found[id] {
			t.Errorf("the answered comment %s is lost", id)
		}
	}
}
