package cli

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// TestStatusShowsAStreamWithoutALeaderAndVerifyWaitsForIt stops two servers of three, and starts them again while
// verify waits.
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
	testkit.Eventually(t, time.Minute, "status to show all replicas", func() (bool, error) { // NATS_TIMEOUT is short
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
	testkit.Eventually(t, time.Minute, "the stream to have no leader", func() (bool, error) {
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

// TestStatusAnswersWithoutNATSOrPostgreSQL checks that status names the server without its password, and shows the
// state of the other one.
func TestStatusAnswersWithoutNATSOrPostgreSQL(t *testing.T) {
	n, pg := testkit.NATSProcess(t), testkit.PostgresProcess(t)
	cfg, db := n.Config(), pg.DB(t)
	pool := db.Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload,
		attempts, last_error, available_at)
		SELECT 1, 'post', g, 'created', '{}', 1, 'no token', now() + interval '1 hour' FROM generate_series(1, 3) g`); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": strings.Replace(n.URL, "nats://", "nats://u:sesame@", 1),
		"NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix, "NATS_TIMEOUT": "10s"}
	check := func(when string, code int, says []string, not ...string) {
		t.Helper()
		got, stdout, stderr := run(t, env, "", "status")
		if got != code {
			t.Errorf("%s: exit code %d, want %d: %s", when, got, code, stderr)
		}
		for _, s := range says {
			if !strings.Contains(stdout, s) {
				t.Errorf("%s: it does not say %q:\n%s%s", when, s, stdout, stderr)
			}
		}
		for _, s := range append(not, "sesame") {
			if strings.Contains(stdout+stderr, s) {
				t.Errorf("%s: it says %q:\n%s%s", when, s, stdout, stderr)
			}
		}
	}
	check("both answer", exitOK, []string{
		"3 messages failed and will be retried: `tidings outbox list`", "No running relay holds partition 0",
		"No running threadcache holds partition 0",
		"Partition 0 has no stream yet: the first relay that holds it creates " + cfg.StreamName(0),
	}, "unavailable", "unknown")
	js, err := jetstream.New(n.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	for name, durable := range map[string]string{"mailer": "mailer", "passing": ""} {
		if _, err := js.CreateConsumer(t.Context(), cfg.StreamName(0),
			jetstream.ConsumerConfig{Name: name, Durable: durable, AckPolicy: jetstream.AckExplicitPolicy,
				InactiveThreshold: time.Hour}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, err := js.Publish(t.Context(), cfg.Prefix+".0.t1.post.created", nil); err != nil {
			t.Fatal(err)
		}
	}
	mailer, err := js.Consumer(t.Context(), cfg.StreamName(0), "mailer")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := mailer.Next(); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO leases (kind, partition, refused_by, refused_until)
		VALUES ('threadcache', 0, 'threadcache-host-7', now() + interval '1 hour')`); err != nil {
		t.Fatal(err)
	}
	check("beside a subscriber and a refusal", exitAgain,
		[]string{"mailer             " + cfg.StreamName(0) + "  1       1\n",
			"threadcache-host-7 could not serve partition 0 of threadcache, and does not take it back before 2"}, "passing")
	n.Kill(t)
	check("without NATS", exitAgain, []string{"NATS is unavailable (" + n.URL + "): ", "3 messages failed",
		cfg.StreamName(0) + "  0-31   open   unknown", "threadcache     unknown"}, "no stream", "PostgreSQL")
	n.Restart(t)
	pg.Kill(t)
	check("without PostgreSQL", exitAgain, []string{"PostgreSQL is unavailable (postgres://", cfg.StreamName(0) + "  0-31   unknown"},
		"NATS is", "No running", "of the projections")
	code, stdout, _ := run(t, env, "", "status", "--json")
	if code != exitAgain || !strings.Contains(stdout, `"unavailable":[{"server":"PostgreSQL","url":"postgres://`) ||
		strings.Contains(stdout, `"outbox"`) {
		t.Errorf("as JSON: exit code %d: %s", code, stdout)
	}
	n.Kill(t)
	check("without both", exitAgain, []string{"PostgreSQL is unavailable", "NATS is unavailable"})
}

// TestStatusAndDoctorAnswerWhileATableIsLocked checks that both commands show the rest, and name the session that holds the lock. No other
// session of Tidings waits for it.
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
