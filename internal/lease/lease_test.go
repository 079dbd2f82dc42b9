package lease

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const partitions = 32

func newGroup(t *testing.T, pool *pgxpool.Pool, owner string) *Group {
	t.Helper()
	return newGroupOf(t, pool, owner, time.Minute, numbers(0, partitions))
}

func newGroupOf(t *testing.T, pool *pgxpool.Pool, owner string, ttl time.Duration, shared []int) *Group {
	t.Helper()
	g, err := New(Config{TTL: ttl}, pool, "work", owner, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	g.Share(shared)
	return g
}

// numbers returns n partitions from first on.
func numbers(first, n int) (all []int) {
	for p := range n {
		all = append(all, first+p)
	}
	return all
}

func beat(t *testing.T, groups ...*Group) {
	t.Helper()
	for _, g := range groups {
		if err := g.heartbeat(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// beatUntilHeld makes g take all partitions. A heartbeat may take half of the TTL, so a busy
// machine may need several.
func beatUntilHeld(t *testing.T, g *Group) {
	t.Helper()
	testkit.Eventually(t, g.owner+" to take all partitions", func() (bool, error) {
		err := g.heartbeat(t.Context())
		return len(g.Held()) == partitions, err
	})
}

// expire ends the leases and the membership of owner, as if it had died a TTL ago.
func expire(t *testing.T, pool *pgxpool.Pool, owner string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `
		WITH m AS (UPDATE lease_members SET expires_at = now() - interval '1 s' WHERE owner = $1)
		UPDATE leases SET expires_at = now() - interval '1 s' WHERE owner = $1`, owner); err != nil {
		t.Fatal(err)
	}
}

// TestADeadInstancesLeasesEndAlthoughTheClockWasSetBack: an hour ago by the database's clock, which
// was set back since, an instance died.
func TestADeadInstancesLeasesEndAlthoughTheClockWasSetBack(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	dead, alive := newGroup(t, pool, "dead"), newGroup(t, pool, "alive")
	beat(t, dead)
	if _, err := pool.Exec(t.Context(), `WITH m AS (UPDATE lease_members SET expires_at = expires_at + interval '1 h')
		UPDATE leases SET expires_at = expires_at + interval '1 h'`); err != nil {
		t.Fatal(err)
	}
	beat(t, alive)
	checkShares(t, alive)
}

// TestARestartedInstanceWaitsForNoLeaseOfItsPredecessor: the leases of an ended process are taken
// at once, and those of others are not.
func TestARestartedInstanceWaitsForNoLeaseOfItsPredecessor(t *testing.T) {
	ended := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		owner string
		want  int
	}{
		"a process that ended":                   {ownerOf("relay-here", ended.Process.Pid, "AAAAAA", 1), partitions},
		"one with the same id, as in containers": {ownerOf("relay-here", os.Getpid(), "AAAAAA", 1), partitions},
		"one that runs":                          {ownerOf("relay-here", os.Getppid(), "AAAAAA", 1), 0},
		"another instance of this process":       {ownerOf("relay-here", os.Getpid(), incarnation, 1), 0},
		"a process of another host":              {ownerOf("relay-there", ended.Process.Pid, "AAAAAA", 1), 0},
		"an instance with a name of its own":     {"a", 0},
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			restarted := newGroup(t, pool, ownerOf("relay-here", os.Getpid(), incarnation, 2))
			beat(t, newGroup(t, pool, c.owner), restarted)
			if n := len(restarted.Held()); n != c.want {
				t.Errorf("it holds %d of %d partitions", n, partitions)
			}
			beat(t, restarted)
			if n := len(restarted.Held()); n != c.want {
				t.Errorf("it holds %d of %d partitions after another heartbeat", n, partitions)
			}
		})
	}
}

// TestInstancesThatTakeEachOtherForDeadShareSoon: both run, in containers with one host name and
// process id.
func TestInstancesThatTakeEachOtherForDeadShareSoon(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a := newGroup(t, pool, ownerOf("relay-here", 1, "AAAAAA", 1))
	b := newGroup(t, pool, ownerOf("relay-here", 1, "BBBBBB", 1))
	beat(t, a, b)
	checkShares(t, b)
	beat(t, a, b, b, a) // a joins again, b gives up its surplus and frees it, and a takes that
	checkShares(t, a, b)
	beat(t, a, b, a, b)
	checkShares(t, a, b)
}

// TestAProcessTakesFromOneThatSeemsDeadOnlyOnce: beside another process in a container with its
// host name, a relay has session after session, or a process runs job after job. Each joins, and
// none but the first takes what the other one holds.
func TestAProcessTakesFromOneThatSeemsDeadOnlyOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a := newGroup(t, pool, ownerOf("relay-here", 1, "AAAAAA", 1))
	b := newGroup(t, pool, ownerOf("relay-here", 1, "BBBBBB", 1))
	beat(t, a, b, a, b, b, a)
	checkShares(t, a, b)
	for n := range int64(3) {
		if err := b.leave(t.Context()); err != nil {
			t.Fatal(err)
		}
		b = newGroup(t, pool, ownerOf("relay-here", 1, "BBBBBB", 1+n/2)) // the same owner, and another one
		beat(t, b)
		checkShares(t, a, b)
	}
}

// checkShares fails unless the groups together hold every partition once, in shares that differ by
// at most one.
func checkShares(t *testing.T, groups ...*Group) {
	t.Helper()
	checkSharesOf(t, numbers(0, partitions), groups...)
}

func checkSharesOf(t *testing.T, want []int, groups ...*Group) {
	t.Helper()
	var all []int
	for _, g := range groups {
		held := g.Held()
		if n := len(held); n < len(want)/len(groups) || n > len(want)/len(groups)+1 {
			t.Errorf("%s holds %d of %d partitions among %d instances", g.owner, n, len(want), len(groups))
		}
		all = append(all, held...)
	}
	slices.Sort(all)
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("partitions held (-want +got):\n%s", diff)
	}
}

func TestPartitionsAreSharedEvenlyAsInstancesComeAndGo(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a, b, c := newGroup(t, pool, "a"), newGroup(t, pool, "b"), newGroup(t, pool, "c")

	beat(t, a)
	checkShares(t, a)

	// b joins. a gives up its surplus at once and frees it with its next heartbeat, and b takes it
	// with its own.
	beat(t, b, a)
	if len(a.Held()) != partitions/2 || len(b.Held()) != 0 {
		t.Fatalf("after b joined: a holds %d, b %d", len(a.Held()), len(b.Held()))
	}
	beat(t, a, b)
	checkShares(t, a, b)

	beat(t, c, a, b, a, b, c)
	checkShares(t, a, b, c)

	// b stops cleanly. The others take its partitions with their next heartbeat.
	if err := b.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	if held := b.Held(); held != nil {
		t.Errorf("b left but holds %v", held)
	}
	beat(t, a, c)
	checkShares(t, a, c)

	// c dies. a takes its partitions after their leases expire.
	beat(t, a)
	if len(a.Held()) != partitions/2 {
		t.Errorf("a took what c still holds: %d", len(a.Held()))
	}
	expire(t, pool, "c")
	beat(t, a)
	if len(a.Held()) != partitions {
		t.Errorf("c is dead, but a holds %d", len(a.Held()))
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
		t.Errorf("a thawed and still trusts %v", held)
	}
	beat(t, b, b, a)
	checkShares(t, a, b)
}

// TestLeasesThatWereNotRenewedInTimeAreNotTrusted moves the end of the trust to the past, as if
// this process had been frozen since its heartbeat.
func TestLeasesThatWereNotRenewedInTimeAreNotTrusted(t *testing.T) {
	t.Parallel()
	g := newGroup(t, testkit.Postgres(t).Pool(t, postgres.RoleSystem), "a")
	beat(t, g)
	if got := len(g.Held()); got != partitions {
		t.Fatalf("it holds %d", got)
	}
	if g.until.After(time.Now().Add(g.cfg.TTL)) {
		t.Errorf("it trusts its leases until %s, longer than their term of %s", g.until, g.cfg.TTL)
	}
	g.until = time.Now()
	if held := g.Held(); len(held) > 0 {
		t.Errorf("it trusts %v after their term", held)
	}
}

func TestRunHandsOverAtOnceWhenStopped(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	g := newGroupOf(t, pool, "a", 10*time.Minute, numbers(0, partitions))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	select {
	case <-g.Changed():
	case <-time.After(time.Minute):
		t.Fatal("no lease within a minute")
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

func TestADeadlockDoesNotKeepTheLeasesOfAnInstanceThatStops(t *testing.T) {
	db := testkit.Postgres(t)
	pool := db.Pool(t, postgres.RoleSystem)
	g := newGroup(t, pool, "a")
	beat(t, g)
	// The first statement that removes the instance fails like the victim of a deadlock. A sequence
	// is not rolled back.
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `
		CREATE SEQUENCE removals;
		GRANT USAGE ON SEQUENCE removals TO PUBLIC;
		CREATE FUNCTION deadlock_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('removals') = 1 THEN RAISE SQLSTATE '40P01'; END IF;
			RETURN OLD;
		END $$;
		CREATE TRIGGER deadlock BEFORE DELETE ON lease_members FOR EACH ROW EXECUTE FUNCTION deadlock_once()`); err != nil {
		t.Fatal(err)
	}
	if err := g.leave(t.Context()); err != nil {
		t.Error(err)
	}
	if held, err := Holders(t.Context(), pool, "work"); err != nil || len(held) > 0 {
		t.Errorf("after the stop %d leases are held, %v", len(held), err)
	}
}

func epochOf(t *testing.T, pool *pgxpool.Pool, partition int) (epoch int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT epoch FROM leases WHERE kind = 'work' AND partition = $1`,
		partition).Scan(&epoch); err != nil {
		t.Fatal(err)
	}
	return epoch
}

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for name, sql := range map[string]string{
		"bound": boundSQL, "ensure": ensureSQL, "join": joinSQL, "share": shareSQL, "renew": renewSQL, "take": takeSQL,
		"leave": leaveSQL, "holders": holdersSQL,
	} {
		t.Run(name, func(t *testing.T) { testkit.Prepare(t, pool, sql) })
	}
}

// TestALoginChangesOnlyTheLeasesOfItsKinds: the truth and the projections share a database, so all
// kinds share a table.
func TestALoginChangesOnlyTheLeasesOfItsKinds(t *testing.T) {
	db := testkit.Postgres(t)
	roles := map[string]postgres.Role{"relay": postgres.RoleRelay, "followercounts": postgres.RoleConsumer, "jobs": postgres.RoleSystem}
	groups := map[string]*Group{}
	for kind, role := range roles {
		g, err := New(Config{TTL: time.Minute}, db.Pool(t, role), kind, "holder-of-"+kind, testkit.Logger(t))
		if err != nil {
			t.Fatal(err)
		}
		g.Share([]int{0})
		beat(t, g)
		groups[kind] = g
	}
	owner := db.Pool(t, postgres.RoleOwner)
	rows := func() (all []string) {
		got, _ := owner.Query(t.Context(), `SELECT l::text FROM leases l UNION ALL SELECT m::text FROM lease_members m ORDER BY 1`)
		all, err := pgx.CollectRows(got, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	before := rows()
	for attacker, others := range map[string][]string{
		"relay": {"followercounts", "jobs"}, "followercounts": {"relay", "jobs", "jobs-sweep"}} {
		pool := db.Pool(t, roles[attacker])
		for _, other := range others {
			for _, sql := range []string{
				`DELETE FROM leases WHERE kind = $1`,
				`UPDATE leases SET owner = 'x', expires_at = 'infinity', epoch = epoch + 1 WHERE kind = $1`,
				`UPDATE leases SET refused_by = owner, refused_until = 'infinity' WHERE kind = $1`,
				`INSERT INTO leases (kind, partition, owner, expires_at) VALUES ($1, 7, 'x', 'infinity')`,
				`DELETE FROM lease_members WHERE kind = $1`,
				`INSERT INTO lease_members (kind, owner, expires_at) VALUES ($1, 'x', 'infinity')`,
			} {
				_, _ = pool.Exec(t.Context(), sql, other) // refused or without effect: the rows tell
				if diff := cmp.Diff(before, rows()); diff != "" {
					t.Fatalf("%s with the login of %s: kind %s (-before +after):\n%s", sql, attacker, other, diff)
				}
			}
		}
		for _, sql := range []string{`DELETE FROM leases`, `UPDATE leases SET kind = 'jobs'`, `LOCK TABLE leases`} {
			if err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), sql)
				return err
			}); !denied(err) {
				t.Errorf("%s with the login of %s: %v, want it denied", sql, attacker, err)
			}
		}
	}
	for kind, g := range groups {
		beat(t, g)
		if diff := cmp.Diff([]int{0}, g.Held()); diff != "" {
			t.Errorf("%s holds other leases (-want +got):\n%s", kind, diff)
		}
	}
}

// denied reports whether PostgreSQL refused a statement for want of a right.
func denied(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "42501"
}

func TestAMissingRowIsMadeAgainAtTheNextHeartbeat(t *testing.T) {
	db := testkit.Postgres(t)
	var log bytes.Buffer
	g := newGroup(t, db.Pool(t, postgres.RoleSystem), "a")
	g.log = slog.New(slog.NewTextHandler(&log, nil))
	beat(t, g)
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `DELETE FROM leases WHERE partition IN (3, 5)`); err != nil {
		t.Fatal(err)
	}
	beat(t, g)
	checkShares(t, g)
	if !strings.Contains(log.String(), "lease rows were missing") {
		t.Errorf("the log does not say that rows were missing:\n%s", log.String())
	}
}

// TestAnInstanceWhoseHeartbeatsFailSaysSo: Err is nil while the leases are trusted, and names the
// reason after that.
func TestAnInstanceWhoseHeartbeatsFailSaysSo(t *testing.T) {
	db := testkit.Postgres(t)
	g := newGroupOf(t, db.Pool(t, postgres.RoleSystem), "a", 2*time.Second, numbers(0, partitions))
	beatUntilHeld(t, g)
	if err := g.Err(); err != nil {
		t.Errorf("with leases: %v", err)
	}
	owner := db.Pool(t, postgres.RoleOwner)
	if _, err := owner.Exec(t.Context(), `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE SQLSTATE '42501'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON leases FOR EACH STATEMENT EXECUTE FUNCTION refuse()`); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the instance to say why it has no leases", func() (bool, error) {
		if err := g.heartbeat(t.Context()); err == nil {
			t.Fatal("the heartbeat did not fail")
		}
		held, err := g.Held(), g.Err()
		if err != nil && !denied(err) {
			t.Fatalf("%v, want the reason", err)
		}
		if err != nil && len(held) > 0 && len(g.Held()) > 0 {
			t.Fatalf("%v although it trusts %v", err, held)
		}
		return err != nil, nil
	})
	if _, err := owner.Exec(t.Context(), `DROP TRIGGER refuse ON leases`); err != nil {
		t.Fatal(err)
	}
	beatUntilHeld(t, g)
	if err := g.Err(); err != nil {
		t.Errorf("with leases again: %v", err)
	}
}

func TestALonePartitionStaysWithItsHolder(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	lone := func(owner string) *Group { return newGroupOf(t, pool, owner, time.Minute, []int{0}) }
	b, a, c := lone("b"), lone("a"), lone("c")
	beat(t, b, a, c, b, a, c)
	if len(b.Held()) != 1 || len(a.Held())+len(c.Held()) != 0 {
		t.Fatalf("b holds %v, a %v, c %v: want no change", b.Held(), a.Held(), c.Held())
	}
	if err := b.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	beat(t, c, a)
	if len(c.Held()) != 1 || len(a.Held()) != 0 {
		t.Errorf("b left before c's heartbeat: c holds %v, a %v", c.Held(), a.Held())
	}
}

// TestPartitionsThatComeAndGoAreSharedAnew: a resize from one partition to four, then to two, while
// two instances share them.
func TestPartitionsThatComeAndGoAreSharedAnew(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a, b := newGroupOf(t, pool, "a", time.Minute, []int{0}), newGroupOf(t, pool, "b", time.Minute, []int{0})
	share := func(partitions ...int) { a.Share(partitions); b.Share(partitions) }
	beat(t, a, b, a, b)
	if diff := cmp.Diff([][]int{{0}, nil}, [][]int{a.Held(), b.Held()}); diff != "" {
		t.Fatalf("one partition (-want +got):\n%s", diff)
	}

	share(0, 1, 2, 3, 4) // the old one closes while the new ones exist
	beat(t, b, a, b, a)
	checkSharesOf(t, numbers(0, 5), a, b)

	share(4, 3, 2, 1) // in any order
	beat(t, a, b)
	for _, g := range []*Group{a, b} {
		if slices.Contains(g.Held(), 0) {
			t.Errorf("%s still holds the partition that closed", g.owner)
		}
	}
	beat(t, a, b, a, b)
	checkSharesOf(t, numbers(1, 4), a, b)
	var owner string
	if err := pool.QueryRow(t.Context(), `SELECT owner FROM leases WHERE kind = 'work' AND partition = 0`).Scan(&owner); err != nil ||
		owner != "" {
		t.Errorf("the closed partition's lease is %q's (%v), want it free", owner, err)
	}

	share(5, 6)
	beat(t, a, b, a, b, a, b)
	checkSharesOf(t, numbers(5, 2), a, b)
}

// TestThePartitionThatReplacesAnotherIsTakenAtOnce: partitions to give up do not count against the
// share, so a repair costs no heartbeat.
func TestThePartitionThatReplacesAnotherIsTakenAtOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a := newGroupOf(t, pool, "a", time.Minute, []int{0})
	beat(t, a)
	a.Share([]int{1})
	beat(t, a)
	if diff := cmp.Diff([]int{1}, a.Held()); diff != "" {
		t.Errorf("after one heartbeat (-want +got):\n%s", diff)
	}
}

// TestAnInstanceThatSharesNothingTakesNobodysShare: it does not know the partitions yet, or cannot
// reach any of them.
func TestAnInstanceThatSharesNothingTakesNobodysShare(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a, b, none := newGroup(t, pool, "a"), newGroup(t, pool, "b"), newGroupOf(t, pool, "0", time.Minute, nil)
	beat(t, none, a, b, a, none, b, a, b)
	checkShares(t, a, b)
	if held := none.Held(); len(held) != 0 {
		t.Errorf("the instance without partitions holds %v", held)
	}
	b.Share(nil)
	beat(t, b) // gives everything up,
	if held := b.Held(); len(held) != 0 {
		t.Errorf("b shares no partition but holds %v", held)
	}
	beat(t, b, a) // and frees it
	checkShares(t, a)
}

func TestAShareThatChangesIsAHeartbeatAtOnce(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	g := newGroupOf(t, pool, "a", 10*time.Minute, nil)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	for _, partitions := range [][]int{{0}, {0, 1}} {
		g.Share(partitions)
		testkit.Eventually(t, "what is to be shared is held",
			func() (bool, error) { return slices.Equal(g.Held(), partitions), nil })
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestARefusedLeaseGoesToAnotherForAWhile: each instance keeps its fair share, and the two do not
// exchange it repeatedly.
func TestARefusedLeaseGoesToAnotherForAWhile(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	a, b := newGroupOf(t, pool, "a", time.Minute, numbers(0, 4)), newGroupOf(t, pool, "b", time.Minute, numbers(0, 4))
	check := func(when string, wantA, wantB []int) {
		t.Helper()
		if diff := cmp.Diff([][]int{wantA, wantB}, [][]int{a.Held(), b.Held()}); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
	beat(t, a)
	a.Refuse(3)
	beat(t, a)
	check("nobody else is there", []int{0, 1, 2, 3}, nil)
	beat(t, b, a, a, b)
	check("shared", []int{0, 1}, []int{2, 3})
	// The instance has leases of another kind, too.
	if _, err := pool.Exec(t.Context(), `INSERT INTO leases (kind, partition, owner, epoch, expires_at)
		SELECT 'other', partition, owner, epoch, expires_at FROM leases`); err != nil {
		t.Fatal(err)
	}
	a.Refuse(1)
	beat(t, a, b)
	check("refused", []int{0}, []int{1, 2})
	var refused int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM leases WHERE kind = 'other' AND owner = ''`).Scan(&refused); err != nil ||
		refused != 0 {
		t.Errorf("%d leases of another kind are refused, %v", refused, err)
	}
	beat(t, b, a)
	check("and made good for", []int{0, 3}, []int{1, 2})
	b.Refuse(1)
	beat(t, b, a, b)
	check("refused again too soon", []int{0, 3}, []int{1, 2})
	if _, err := pool.Exec(t.Context(), `UPDATE leases SET refused_until = now() - interval '1 second' WHERE partition = 1`); err != nil {
		t.Fatal(err)
	}
	b.Refuse(1)
	beat(t, b, a, a, b)
	check("refused by the other", []int{0, 1}, []int{2, 3})
	if err := a.leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	beat(t, b)
	check("the other has left", nil, []int{0, 1, 2, 3})
}
