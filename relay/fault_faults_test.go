//go:build faults

package relay

import (
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
)

func TestPostgreSQLIsShutDownAtOnceAndRestarted(t *testing.T) {
	server := testkit.PostgresProcess(t)
	f := newFleet(t, server.DB(t))
	f.relay("", 0)
	f.relay("", 0)
	f.awaitTakeover()
	server.Restart(t)
	testkit.Eventually(t, "PostgreSQL to answer", func() (bool, error) { return f.pool.Ping(t.Context()) == nil, nil })
	f.awaitTakeover()
	f.check()
}

// TestARelayFrozenInATransactionFreesItsLocks: the frozen relay holds the partition's row, and its transaction keeps the
// floor down. PostgreSQL ends it.
func TestARelayFrozenInATransactionFreesItsLocks(t *testing.T) {
	f := newFleet(t, testkit.Postgres(t))
	f.relay("after ack", syscall.SIGKILL).AwaitEnd()
	victim := f.relay("in a transaction", syscall.SIGSTOP)
	victim.AwaitStopped()
	var pid int
	var last int64
	if err := f.pool.QueryRow(t.Context(), `SELECT pid, (SELECT max(id) FROM outbox_messages) FROM pg_locks
		 WHERE relation = 'outbox_partitions'::regclass AND mode = 'RowExclusiveLock' AND granted`).Scan(&pid, &last); err != nil {
		t.Fatalf("the frozen relay has no transaction: %v", err)
	}
	f.start(options{floorEvery: 100 * time.Millisecond})
	f.awaitTakeover()
	testkit.Eventually(t, "the floor to rise above the rows of that time", func() (risen bool, err error) {
		err = f.pool.QueryRow(t.Context(), `SELECT min(floor_id) >= $1 FROM outbox_partitions WHERE final_seq IS NULL`, last).Scan(&risen)
		return risen, err
	})
	if frozen, err := victim.Stopped(); err != nil || !frozen {
		t.Fatalf("the relay is frozen: %v, %v", frozen, err)
	}
	var there bool
	if err := f.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1)`,
		pid).Scan(&there); err != nil || there {
		t.Errorf("the frozen relay still has its transaction: %v, %v", there, err)
	}
	victim.Signal(syscall.SIGCONT)
	f.awaitTakeover()
	f.check()
}
