//go:build faults

package store_test

import (
	"errors"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestNoWriteThatWasAnsweredIsLostWhenPostgreSQLCrashes(t *testing.T) {
	seed, _ := testkit.Seed(t)
	crashes(t, seed, 5)
}

// A server that returns as a standby may not know the transaction yet. After its promotion it does.
func TestAStandbyIsNotAskedWhatWasCommittedBeforeItsPromotion(t *testing.T) {
	pg := testkit.PostgresProcess(t, append(lateFlush(100*time.Millisecond), "wal_level=replica", "hot_standby=on")...)
	db := pg.DB(t)
	f, owner := on(t, db), db.Pool(t, postgres.RoleOwner)
	standby := `DO $$ BEGIN EXECUTE format('COPY (SELECT) TO %L', current_setting('data_directory') || '/standby.signal'); END $$`
	shows(t, func(follower event.ID) bool {
		f.follow(t, follower, "1")
		if _, err := owner.Exec(t.Context(), standby); err != nil {
			t.Fatal(err)
		}
		told := start(f, follower)
		awaitBackend(t, owner, told, "COMMIT to wait for the flush", `state = 'active' AND query = 'commit'`)
		pg.Kill(t)
		early := len(told) > 0 // the answer came before the crash
		pg.Restart(t)
		awaitBackend(t, owner, told, "the standby to be asked", `pg_is_in_recovery() AND query = 'rollback'`)
		select {
		case a := <-told:
			if !early && !errors.Is(a.err, postgres.ErrUnknown) {
				t.Errorf("the standby gave an answer: %+v, %v", a.out, a.err)
			}
			told <- a
		default:
		}
		if _, err := owner.Exec(t.Context(), `SELECT pg_promote()`); err != nil {
			t.Fatal(err)
		}
		return f.made(t, follower, <-told) && !early
	})
}

// A crash interrupts a COMMIT that waits for a standby. The transaction exists after it, without
// the wait.
func TestACommitThatIsFoundIsOnTheStandbysToo(t *testing.T) {
	pg := testkit.PostgresProcess(t, "wal_level=replica", "max_wal_senders=2")
	db := pg.DB(t)
	f, owner := on(t, db), db.Pool(t, postgres.RoleOwner)
	set := func(sql string) {
		t.Helper()
		for _, sql := range []string{sql, `SELECT pg_reload_conf()`} {
			if _, err := owner.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
	}
	shows(t, func(follower event.ID) bool {
		f.follow(t, follower, "1")
		set(`ALTER SYSTEM SET synchronous_standby_names = 'nobody'`)
		testkit.Eventually(t, "the server to want a standby", func() (names bool, err error) {
			return names, owner.QueryRow(t.Context(), `SELECT current_setting('synchronous_standby_names') <> ''`).Scan(&names)
		})
		told := start(f, follower)
		awaitBackend(t, owner, told, "COMMIT to wait for a standby", `wait_event = 'SyncRep'`)
		pg.Restart(t)
		awaitBackend(t, owner, told, "the answer to wait for a standby", `wait_event = 'SyncRep'`)
		select {
		case a := <-told:
			if !errors.Is(a.err, postgres.ErrUnknown) {
				// For a moment after its start the server does not know about standbys and lets
				// COMMITs pass. Try again.
				t.Logf("answered without a standby: %+v, %v", a.out, a.err)
				set(`ALTER SYSTEM RESET synchronous_standby_names`)
				return false
			}
			told <- a
		default:
		}
		set(`ALTER SYSTEM RESET synchronous_standby_names`)
		return f.made(t, follower, <-told)
	})
}

// The server loses a transaction whose COMMIT it was executing. Another transaction gets its id and
// commits.
func TestTheCommitOfAStrangerWithTheSameIDIsNotTaken(t *testing.T) {
	pg := testkit.PostgresProcess(t, lateFlush(100*time.Millisecond)...)
	db := pg.DB(t)
	f, owner := on(t, db), db.Pool(t, postgres.RoleOwner)
	answers := func() (bool, error) { return owner.Ping(t.Context()) == nil, nil }
	id := func() (next uint64) {
		if err := owner.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text::bigint`).Scan(&next); err != nil {
			t.Fatal(err)
		}
		return next
	}
	shows(t, func(follower event.ID) (arranged bool) {
		f.follow(t, follower, "1") // a connection with prepared statements
		for range 20 {             // also lost: ids for other transactions beside the writer's retry
			id()
		}
		told := start(f, follower)
		var lost uint64 // stays 0 if the answer comes before anybody has seen the wait
		testkit.Eventually(t, "COMMIT to wait for the flush", func() (bool, error) {
			err := owner.QueryRow(t.Context(), `SELECT coalesce(max(backend_xid::text::bigint), 0) FROM pg_stat_activity
				WHERE datname = current_database() AND state = 'active' AND query = 'commit'`).Scan(&lost)
			return lost > 0 || len(told) > 0, err
		})
		pg.Restart(t)
		testkit.Eventually(t, "PostgreSQL to answer", answers)
		for id() <= lost { // other transactions commit
			arranged = true
		}
		return f.made(t, follower, <-told) && arranged
	})
}
