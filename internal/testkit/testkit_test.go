package testkit_test

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestEachTestHasAMigratedDatabaseOfItsOwn(t *testing.T) {
	ctx := t.Context()
	one, two := testkit.Postgres(t), testkit.Postgres(t)
	p1, p2 := one.Pool(t, postgres.RoleSystem), two.Pool(t, postgres.RoleSystem)
	for _, set := range []migrations.Set{migrations.Truth, migrations.Projections} {
		if err := migrations.Check(ctx, p1, set); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p1.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, 2, 3)`); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := p2.QueryRow(ctx, `SELECT count(*) FROM follows`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Fatalf("a row of one test's database is in the database of another test")
	}
}

func TestPoolActsAsItsRole(t *testing.T) {
	db := testkit.Postgres(t)
	for _, role := range []postgres.Role{postgres.RoleAPI, postgres.RoleSystem, postgres.RoleWriter} {
		var got string
		if err := db.Pool(t, role).QueryRow(t.Context(), `SELECT current_user`).Scan(&got); err != nil {
			t.Fatal(err)
		}
		if got != string(role) {
			t.Errorf("current_user is %s, want %s", got, role)
		}
	}
}

func TestDatabaseIsDroppedWhenTheTestEnds(t *testing.T) {
	keeper := testkit.Postgres(t)
	var name string
	t.Run("inner", func(t *testing.T) {
		db := testkit.Postgres(t)
		if err := db.Pool(t, postgres.RoleOwner).QueryRow(t.Context(), `SELECT current_database()`).Scan(&name); err != nil {
			t.Fatal(err)
		}
	})
	var n int
	if err := keeper.Pool(t, postgres.RoleOwner).QueryRow(t.Context(), `SELECT count(*) FROM pg_database WHERE datname = $1`,
		name).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 0 {
		t.Errorf("database %s still exists", name)
	}
}

func TestPostgresProcessKeepsCommitsOverKillAndRestart(t *testing.T) {
	ctx := t.Context()
	pg := testkit.PostgresProcess(t)
	pool := pg.DB(t).Pool(t, postgres.RoleSystem)
	insert := func(follower string) {
		t.Helper()
		if _, err := pool.Exec(ctx, `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, $1, 1000)`,
			follower); err != nil {
			t.Fatal(err)
		}
	}
	answers := func() (bool, error) {
		var n int
		err := pool.QueryRow(ctx, `SELECT count(*) FROM follows`).Scan(&n)
		return err == nil, err
	}
	insert("1")
	pg.Kill(t)
	if err := pool.Ping(ctx); err == nil {
		t.Fatal("a killed server answers")
	}
	pg.Restart(t)
	testkit.Eventually(t, "the restarted server answers on the same port", answers)
	insert("2")
	pg.Restart(t) // without a kill: an immediate shutdown
	testkit.Eventually(t, "the server answers after a second restart", answers)
	var n int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM follows`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if n != 2 {
		t.Errorf("%d of 2 committed rows remain", n)
	}
}

func TestFrozenPostgresHoldsConnectionsOpenAndAnswersNobody(t *testing.T) {
	pg := testkit.PostgresProcess(t)
	pool := pg.DB(t).Pool(t, postgres.RoleSystem)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	answer := make(chan error, 1)
	pg.Freeze(t)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), `SELECT 1`)
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Fatalf("a frozen server answered: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	pg.Thaw(t)
	if err := <-answer; err != nil {
		t.Fatalf("the thawed server: %v", err)
	}
}

func TestFrozenPostgresIsThawedWhenTheTestEnds(t *testing.T) {
	pg := testkit.PostgresProcess(t)
	db := pg.DB(t) // its drop must follow the thaw, else this test hangs
	t.Run("inner", func(t *testing.T) { pg.Freeze(t) })
	if err := db.Pool(t, postgres.RoleOwner).Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	pg.Freeze(t)
	pg.Restart(t) // also from the frozen state
}

func publish(t *testing.T, b *testkit.Broker, js jetstream.JetStream) {
	t.Helper()
	if _, err := js.Publish(t.Context(), b.Config().Prefix+".0.t1.follow.created", []byte("{}"),
		jetstream.WithRetryAttempts(0)); err != nil {
		t.Fatal(err)
	}
}

func declare(t *testing.T, b *testkit.Broker, js jetstream.JetStream) {
	t.Helper()
	if _, err := broker.Declare(t.Context(), js, b.Config(), broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
}

func jetStream(t *testing.T, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func TestEachTestHasAStreamOfItsOwn(t *testing.T) {
	one, two := testkit.NATS(t), testkit.NATS(t)
	js1, js2 := jetStream(t, one.Connect(t)), jetStream(t, two.Connect(t))
	declare(t, one, js1)
	declare(t, two, js2)
	publish(t, one, js1)
	for i, c := range []struct {
		b    *testkit.Broker
		js   jetstream.JetStream
		want uint64
	}{{one, js1, 1}, {two, js2, 0}} {
		s, err := broker.ReadStream(t.Context(), c.js, c.b.Config(), 0)
		if err != nil || s.Messages != c.want {
			t.Errorf("stream %d has %d messages, %v, want %d", i+1, s.Messages, err, c.want)
		}
	}
}

func TestNATSProcessKeepsMessagesOverKillAndRestart(t *testing.T) {
	b := testkit.NATSProcess(t)
	nc := b.Connect(t)
	js := jetStream(t, nc)
	declare(t, b, js)
	publish(t, b, js)
	b.Kill(t)
	testkit.Eventually(t, "the connection notices", func() (bool, error) { return !nc.IsConnected(), nil })
	if err := nc.Publish("x", nil); !errors.Is(err, nats.ErrReconnectBufExceeded) {
		t.Errorf("a publish without a server: %v, want a refusal", err)
	}
	b.Restart(t)
	testkit.Eventually(t, "the connection comes back", func() (bool, error) { return nc.IsConnected(), nil })
	publish(t, b, js)
	if s, err := broker.ReadStream(t.Context(), js, b.Config(), 0); err != nil || s.Messages != 2 {
		t.Errorf("%d of 2 acknowledged messages remain, %v", s.Messages, err)
	}
}

func TestFrozenNATSAnswersNobody(t *testing.T) {
	b := testkit.NATSProcess(t)
	nc := b.Connect(t)
	b.Freeze(t)
	if err := nc.FlushTimeout(300 * time.Millisecond); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("a frozen server: %v, want a timeout", err)
	}
	b.Thaw(t)
	testkit.Eventually(t, "the thawed server answers", func() (bool, error) {
		err := nc.FlushTimeout(time.Second)
		return err == nil, err
	})
}

// TestFaultKilledTestBinaryLeavesNothingBehind runs this test binary again as a child, which starts
// servers and kills itself.
func TestFaultKilledTestBinaryLeavesNothingBehind(t *testing.T) {
	if out := os.Getenv("TESTKIT_KILLED"); out != "" {
		pg, b := testkit.PostgresProcess(t), testkit.NATSProcess(t)
		pg.DB(t)
		if err := os.WriteFile(out, []byte(b.URL), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		select {}
	}
	if testing.Short() {
		t.Skip("needs a server")
	}
	tmp, out := t.TempDir(), filepath.Join(t.TempDir(), "url")
	for d := tmp; d != os.TempDir() && d != "/"; d = filepath.Dir(d) { // for root, PostgreSQL's user must be able to enter
		if err := os.Chmod(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestFaultKilledTestBinaryLeavesNothingBehind$")
	cmd.Env = append(os.Environ(), "TESTKIT_KILLED="+out, "TMPDIR="+tmp)
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != -1 {
		t.Fatalf("the child was not killed: %v", err)
	}
	url, err := os.ReadFile(out)
	if err != nil {
		t.Fatalf("the child started no servers: %v", err)
	}
	testkit.Eventually(t, "PostgreSQL has ended and its directory is removed", func() (bool, error) {
		left, err := filepath.Glob(filepath.Join(tmp, "tidings-test-*"))
		return len(left) == 0, err
	})
	testkit.Eventually(t, "the NATS server has ended", func() (bool, error) {
		conn, err := net.Dial("tcp", strings.TrimPrefix(string(url), "nats://"))
		if err != nil {
			return true, nil
		}
		return false, conn.Close()
	})
}
