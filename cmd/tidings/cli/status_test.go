package cli

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestStatusAnswersWithoutNATSOrPostgreSQL checks that status names the server without its
// password, and shows the state of the other one.
func TestStatusAnswersWithoutNATSOrPostgreSQL(t *testing.T) {
	t.Parallel()
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
		"Partition 0 has no stream yet (follows from unheld-partition relay)",
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
		[]string{"mailer             " + cfg.StreamName(0) + "  1       1               0            ", "working\n",
			"threadcache-host-7 could not serve partition 0 of threadcache, and does not take it back before 2"}, "passing")
	n.Kill(t)
	check("without NATS", exitAgain, []string{"NATS is unavailable (" + n.URL + "): ", "3 messages failed",
		"No running relay holds partition 0 (follows from unavailable NATS)",
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
