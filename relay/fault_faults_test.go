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

// TestARelayFrozenInATransactionFreesItsLocks: the frozen relay holds the partition's row, and its
// transaction keeps the floor down. PostgreSQL ends it.
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
	victim.stop()
	f.check()
}

func TestARelayKilledAtAnyStepLosesAndDoublesNothing(t *testing.T) {
	for what, victims := range map[string][]options{
		"after claim":                  {{crash: crash{Step: "after claim"}}},
		"before the commit of a batch": {{crash: crash{Step: "before commit"}, atomicFrom: batches}},
		"between single publishes":     {{crash: crash{Step: "before commit", Nth: 30}, atomicFrom: singles}},
		"after ack":                    {{crash: crash{Step: "after ack"}}},
		"after ack of a batch":         {{crash: crash{Step: "after ack"}, atomicFrom: batches}},
		"before mark":                  {{crash: crash{Step: "before mark"}}},
		"after mark":                   {{crash: crash{Step: "after mark"}}},
		"catch-up":                     {{crash: crash{Step: "after ack"}}, {crash: crash{Step: "catch-up"}}},
		"in a catch-up's transaction":  {{crash: crash{Step: "after ack"}}, {crash: crash{Step: "in a transaction"}}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			killed(t, victims...)
		})
	}
}

func TestARelayFrozenPastItsLeaseThawsWithoutEffect(t *testing.T) {
	for what, o := range map[string]options{
		"after claim":                  {crash: crash{Step: "after claim", Then: "refused"}},
		"before the commit of a batch": {crash: crash{Step: "before commit", Then: "refused"}, atomicFrom: batches},
		"between single publishes":     {crash: crash{Step: "before commit", Nth: 30, Then: "refused"}, atomicFrom: singles},
		"after ack":                    {crash: crash{Step: "after ack"}},   // it has published: its lease may end before it marks
		"before mark":                  {crash: crash{Step: "before mark"}}, // it marks what another has marked meanwhile
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			frozen(t, o)
		})
	}
}

func TestARelayThatFailsAtAnyStepOfAResizeLosesAndDoublesNothing(t *testing.T) {
	for name, c := range map[string]crash{
		"killed before it closes": {Step: "before closing", Signal: syscall.SIGKILL},
		"killed behind it":        {Step: "after closing", Signal: syscall.SIGKILL},
		"frozen before it closes": {Step: "before closing", Signal: syscall.SIGSTOP, Then: "refused"},
		"frozen behind it":        {Step: "after closing", Signal: syscall.SIGSTOP},
		"frozen with rows":        {Step: "after claim", Signal: syscall.SIGSTOP, Then: "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			resizedBeside(t, c)
		})
	}
}
