//go:build faults

package cli

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// TestStatusShowsAStreamWithoutALeaderAndVerifyWaitsForIt stops two servers of three, and starts
// them again while verify waits.
func TestStatusShowsAStreamWithoutALeaderAndVerifyWaitsForIt(t *testing.T) {
	c, db := testkit.NATSCluster(t, 3), testkit.Postgres(t)
	cfg := c.Config()
	js, err := jetstream.New(c.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Bind(t.Context(), db.Pool(t, postgres.RoleSystem), 0, stream.Name, stream.Created); err != nil {
		t.Fatal(err)
	}
	c.AwaitReplicas(t, stream.Name)
	leader, others := c.Leader(t, stream.Name)
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": others[0].URL, "NATS_STREAM": cfg.Stream,
		"NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix, "NATS_REPLICAS": "3", "NATS_TIMEOUT": "1s"}
	testkit.Eventually(t, "status to show all replicas", func() (bool, error) { // NATS_TIMEOUT is short
		code, stdout, stderr := run(t, env, "", "status")
		if code != exitOK || !strings.Contains(stdout, "3 of 3") || !strings.Contains(stdout, stream.Leader) {
			return false, fmt.Errorf("exit code %d\n%s\n%s", code, stdout, stderr)
		}
		return true, nil
	})
	leader.Kill(t)
	others[1].Kill(t)
	lone, err := jetstream.New(others[0].Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the stream to have no leader", func() (bool, error) {
		_, err := broker.ReadStream(t.Context(), lone, cfg, 0)
		return errors.Is(err, broker.ErrNoLeader), nil
	})
	env["NATS_TIMEOUT"] = "5s"
	if code, stdout, stderr := run(t, env, "", "status"); code != exitOK ||
		!strings.Contains(stdout, "Partition 0 waits for a leader of its stream") || strings.Contains(stdout, "repair") {
		t.Errorf("status without a leader: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	verified := make(chan string, 1)
	go func() {
		code, stdout, stderr := run(t, env, "", "verify", "--wait", "2m")
		if code == exitOK {
			stdout = ""
		}
		verified <- stdout + stderr
	}()
	leader.Restart(t)
	others[1].Restart(t)
	if got := <-verified; got != "" {
		t.Errorf("verify: %s", got)
	}
}

// TestStatusAndDoctorAnswerWhileATableIsLocked checks that both commands show the rest, and name
// the session that holds the lock. No other session of Tidings waits for it.
func TestStatusAndDoctorAnswerWhileATableIsLocked(t *testing.T) {
	n, db := testkit.NATS(t), testkit.Postgres(t)
	cfg, owner := n.Config(), db.Pool(t, postgres.RoleOwner)
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": n.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix, "POSTGRES_STATEMENT_TIMEOUT": "8s"}
	for _, c := range []struct {
		command, tables string
		says            []string // regular expressions
	}{
		{"status", "outbox_messages", []string{`Blocked: session .* \(tidings status\) has waited `, `No running relay holds`,
			`(?m)^outbox: unknown, because another session locks a table`, `threadcache +0 +0\.0 s`}},
		{"doctor", "outbox_partitions, leases, consumer_offsets, job_runs, outbox_archive_exports", []string{
			`warning +blocked-session`, `error +unread +outbox`, `error +unread +partitions`, `error +unread +consumers`,
			`error +unread +leases of the relays`, `error +unread +leases of the consumers`, `error +unread +jobs +it is unknown, because`,
			`error +unread +archive`, `fsync is off`}},
	} {
		tx, err := owner.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var pid int
		if _, err := tx.Exec(t.Context(), `SET LOCAL idle_in_transaction_session_timeout = 0; LOCK TABLE `+c.tables+
			` IN ACCESS EXCLUSIVE MODE`); err != nil {
			t.Fatal(err)
		}
		if err := tx.QueryRow(t.Context(), `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		code, stdout, stderr := run(t, env, "", c.command)
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if code != exitAgain {
			t.Errorf("%s: exit code %d: %s", c.command, code, stderr)
		}
		for _, want := range append(c.says, fmt.Sprintf("for a lock of session %d, user", pid)) {
			if !regexp.MustCompile(want).MatchString(stdout) {
				t.Errorf("%s lacks %s:\n%s", c.command, want, stdout)
			}
		}
		if c.command == "doctor" && strings.Contains(stdout, "no running process") {
			t.Errorf("doctor says that nobody holds leases that it could not read:\n%s", stdout)
		}
	}
	if code, state, _ := run(t, env, "", "status"); code != exitOK || strings.Contains(state, "unknown") {
		t.Errorf("after the lock: exit code %d\n%s", code, state)
	}
}
