package lease

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const partitions = 32

func newGroup(t *testing.T, pool *pgxpool.Pool, owner string) *Group {
	t.Helper()
	g, err := New(Config{TTL: time.Minute}, pool, "work", owner, partitions, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func beat(t *testing.T, groups ...*Group) {
	t.Helper()
	for _, g := range groups {
		if err := g.heartbeat(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// expire makes the leases and the membership of owner end, as if it had died a TTL ago.
func expire(t *testing.T, pool *pgxpool.Pool, owner string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `
		WITH m AS (UPDATE lease_members SET expires_at = now() - interval '1 s' WHERE owner = $1)
		UPDATE leases SET expires_at = now() - interval '1 s' WHERE owner = $1`, owner); err != nil {
		t.Fatal(err)
	}
}

// checkShares fails unless the groups hold every partition once, in shares that differ by at most one.
func checkShares(t *testing.T, groups ...*Group) {
	t.Helper()
	var all []int
	for _, g := range groups {
		held := g.Held()
		if n := len(held); n < partitions/len(groups) || n > partitions/len(groups)+1 {
			t.Errorf("%s holds %d of %d partitions among %d", g.owner, n, partitions, len(groups))
		}
		all = append(all, held...)
	}
	slices.Sort(all)
	want := make([]int, partitions)
	for i := range want {
		want[i] = i
	}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("partitions held (-want +got):\n%s", diff)
	}
}

func TestPartitionsAreSharedEvenlyAsInstancesComeAndGo(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a, b, c := newGroup(t, pool, "a"), newGroup(t, pool, "b"), newGroup(t, pool, "c")

	beat(t, a)
	checkShares(t, a)

	// b joins; a sheds its surplus at once, frees it with its next heartbeat, and b takes it with its own.
	beat(t, b, a)
	if len(a.Held()) != partitions/2 || len(b.Held()) != 0 {
		t.Fatalf("after b joined: a holds %d, b %d", len(a.Held()), len(b.Held()))
	}
	beat(t, a, b)
	checkShares(t, a, b)

	beat(t, c, a, b, a, b, c)
	checkShares(t, a, b, c)

	// b stops cleanly: the others take its part with their next heartbeat.
	if err := b.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if held := b.Held(); held != nil {
		t.Errorf("b left and holds %v", held)
	}
	beat(t, a, c)
	checkShares(t, a, c)

	// c dies: a takes its part once the leases have expired.
	beat(t, a)
	if len(a.Held()) != partitions/2 {
		t.Errorf("a took what c still holds: %d", len(a.Held()))
	}
	expire(t, pool, "c")
	beat(t, a)
	if len(a.Held()) != partitions {
		t.Errorf("c is dead and a holds %d", len(a.Held()))
	}
}

func TestAHolderThatThawsFindsItsLeasesGone(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a, b := newGroup(t, pool, "a"), newGroup(t, pool, "b")
	beat(t, a)
	epoch := epochOf(t, pool, 0)
	expire(t, pool, "a") // frozen past the TTL
	beat(t, b)
	if got := len(b.Held()); got != partitions {
		t.Fatalf("b holds %d", got)
	}
	if got := epochOf(t, pool, 0); got != epoch+1 {
		t.Errorf("epoch is %d after the takeover of %d", got, epoch)
	}
	beat(t, a)
	if held := a.Held(); len(held) != 0 {
		t.Errorf("a thawed and believes to hold %v", held)
	}
	beat(t, b, b, a)
	checkShares(t, a, b)
}

func TestLeasesThatCannotBeRenewedAreNotTrusted(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	g, err := New(Config{TTL: 500 * time.Millisecond}, pool, "work", "a", partitions, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	beat(t, g)
	if len(g.Held()) != partitions {
		t.Fatal("nothing held")
	}
	testkit.Eventually(t, 5*time.Second, "the trust to end before the lease does", func() (bool, error) {
		var live int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM leases WHERE expires_at > now()`).Scan(&live); err != nil {
			return false, err
		}
		held := g.Held()
		if len(held) > 0 && live == 0 {
			t.Fatal("the lease has expired and is still trusted")
		}
		return len(held) == 0, nil
	})
}

func TestAnInstanceFrozenInItsHeartbeatHoldsUpNobodyForLong(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ttl := Config{TTL: time.Second}
	a, err := New(ttl, pool, "work", "a", partitions, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(ttl, pool, "work", "b", partitions, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	beat(t, a)
	// What a's heartbeat has done when it is frozen before its commit: every row of its own is locked.
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }() // the server has ended it
	args := pgx.NamedArgs{"kind": "work", "owner": "a", "ttl": ttl.TTL, "partitions": partitions, "drop": []int{}, "ttl_ms": "1000"}
	for _, sql := range []string{boundSQL, joinSQL, renewSQL} {
		if _, err := tx.Exec(t.Context(), sql, args); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	testkit.Eventually(t, 3*ttl.TTL+2*time.Second, "b to take over", func() (bool, error) {
		return len(b.Held()) == partitions, b.heartbeat(t.Context())
	})
	if took := time.Since(start); took > 3*ttl.TTL+time.Second {
		t.Errorf("it took %s with leases of %s", took, ttl.TTL)
	}
}

func TestRunHandsOverAtOnceWhenStopped(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	g, err := New(Config{TTL: 10 * time.Minute}, pool, "work", "a", partitions, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	select {
	case <-g.Changed():
	case <-time.After(10 * time.Second):
		t.Fatal("no lease within 10 s")
	}
	holders, err := Holders(t.Context(), pool, "work")
	if err != nil || len(holders) != partitions || holders[3].Owner != "a" {
		t.Fatalf("holders are %v, %v", holders, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	b := newGroup(t, pool, "b")
	beat(t, b)
	checkShares(t, b)
}

func epochOf(t *testing.T, pool *pgxpool.Pool, partition int) (epoch int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT epoch FROM leases WHERE kind = 'work' AND partition = $1`, partition).Scan(&epoch); err != nil {
		t.Fatal(err)
	}
	return epoch
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{
		"bound": boundSQL, "ensure": ensureSQL, "join": joinSQL, "share": shareSQL, "renew": renewSQL, "take": takeSQL, "leave": leaveSQL, "holders": holdersSQL,
	} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
}

func TestALonePartitionStaysWithItsHolder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	lone := func(owner string) *Group {
		g, err := New(Config{TTL: time.Minute}, pool, "lone", owner, 1, testkit.Logger(t))
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	b, a, c := lone("b"), lone("a"), lone("c")
	beat(t, b, a, c, b, a, c)
	if len(b.Held()) != 1 || len(a.Held())+len(c.Held()) != 0 {
		t.Fatalf("b holds %v, a %v, c %v: want it where it was", b.Held(), a.Held(), c.Held())
	}
	if err := b.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	beat(t, c, a)
	if len(c.Held()) != 1 || len(a.Held()) != 0 {
		t.Errorf("b left, c came first: c holds %v, a %v", c.Held(), a.Held())
	}
}
