//go:build faults

package lease

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestLeasesThatCannotBeRenewedAreNotTrusted(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	g := newGroupOf(t, pool, "a", 4*time.Second, numbers(0, partitions))
	beatUntilHeld(t, g)
	testkit.Eventually(t, "the trust to end before the lease does", func() (bool, error) {
		var live int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM leases WHERE expires_at > now()`).Scan(&live); err != nil {
			return false, err
		}
		held := g.Held()
		if len(held) > 0 && live == 0 {
			t.Fatal("the lease has expired but is still trusted")
		}
		return len(held) == 0, nil
	})
}

func TestAnInstanceFrozenInItsHeartbeatHoldsUpNobodyForLong(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	const ttl = 3 * time.Second
	a, b := newGroupOf(t, pool, "a", ttl, numbers(0, partitions)), newGroupOf(t, pool, "b", ttl, numbers(0, partitions))
	beatUntilHeld(t, a)
	// The state of a's heartbeat that freezes before its commit: it holds locks on all its rows.
	// The statements go together, because the server also ends a transaction that pauses between
	// two of them for too long.
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // the server has ended it
	args := pgx.NamedArgs{"kind": "work", "owner": "a", "ttl": ttl, "partitions": numbers(0, partitions), "drop": []int{},
		"ttl_ms": strconv.FormatInt(ttl.Milliseconds(), 10)}
	var batch pgx.Batch
	for _, sql := range []string{boundSQL, joinSQL, renewSQL} {
		batch.Queue(sql, args)
	}
	if err := tx.SendBatch(t.Context(), &batch).Close(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "b to take over, because the server ends the frozen transaction", func() (bool, error) {
		return len(b.Held()) == partitions, b.heartbeat(t.Context())
	})
}
