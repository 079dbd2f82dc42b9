package cli

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

// The commands of an outbox that is alone in somebody's database.
func TestCommandsWorkWithTheOutboxAlone(t *testing.T) {
	t.Parallel()
	db, b := testkit.EmptyPostgres(t), testkit.NATS(t)
	cfg := b.Config()
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": b.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix}
	says := func(want int, text string, args ...string) string {
		t.Helper()
		code, stdout, stderr := run(t, env, "", args...)
		if code != want || !strings.Contains(stdout+stderr, text) {
			t.Errorf("%s: exit code %d, want %d and %q\n%s%s", strings.Join(args, " "), code, want, text, stdout, stderr)
		}
		return stdout
	}
	says(exitInput, "want outbox", "migrate", "--only", "truth")
	says(exitInput, "--schema needs --only outbox", "migrate", "--schema", "x")
	says(exitInput, "a to z, 0 to 9 and _", "migrate", "--only", "outbox", "--schema", "Our events")
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `CREATE SCHEMA shop; CREATE TABLE shop.orders (id int)`); err != nil {
		t.Fatal(err)
	}
	says(exitError, "the schema has tables of others; choose another with --schema: shop",
		"migrate", "--only", "outbox", "--schema", "shop")
	says(exitOK, "Add search_path=tidings to DATABASE_URL", "migrate", "--only", "outbox")

	for _, command := range []string{"status", "outbox list", "dlq outbox list"} {
		says(exitError, "lacks the schema of the tables: add search_path=tidings", strings.Fields(command)...)
	}
	says(exitAgain, "add search_path=tidings", "doctor")
	env["DATABASE_URL"] = db.In(t, "tidings").URL
	says(exitOK, `{"outbox":0,"schema":"tidings"}`, "migrate", "--only", "outbox", "--json")
	says(exitInput, "leave out one", "migrate", "--only", "outbox", "--schema", "other")

	in := db.In(t, "tidings")
	defer relayOf(t, in, cfg)()
	appendOrder(t, in, "7")
	testkit.Eventually(t, "the event's publish", func() (bool, error) {
		code, stdout, _ := run(t, env, "", "events", "find", "--aggregate", "order/7", "--tenant", "1", "--json")
		return code == exitOK && strings.Contains(stdout, `"stream_seq"`), nil
	})

	var st status.State
	if err := json.Unmarshal([]byte(says(exitOK, "", "status", "--json")), &st); err != nil || len(st.Partitions) != 1 ||
		st.Outbox == nil || len(st.Consumers) != 0 {
		t.Errorf("%+v, %v", st, err)
	}
	for line := range strings.Lines(says(exitAgain, "", "doctor", "--json")) {
		if !strings.Contains(line, `"check":"fsync"`) && !strings.Contains(line, `"check":"full-page-writes"`) { // the server of the tests
			t.Error(line)
		}
	}
	says(exitOK, cfg.StreamName(0), "partitions", "list")
	says(exitOK, "Repair has nothing to do", "repair", "stream", "--dry-run")
	says(exitOK, "order/7", "events", "find", "--since", "1h", "--type", "paid")
	watchOrders(t, env, in)
	says(exitOK, "", "dlq", "outbox", "list")
	says(exitOK, "", "outbox", "list")
	says(exitOK, "age 48h0m0s", "stream", "configure", "--max-age", "48h", "--yes")
	says(exitOK, "outbox_archive_after", "archive", "settings", "outbox_archive_after=24h", "--yes")
	says(exitOK, "outbox-archive", "archive", "run", "--yes")
	says(exitOK, "outbox-ranges", "archive", "status")
	says(exitOK, "", "archive", "exports")
	says(exitOK, "", "archive", "hold", "list")
	says(exitOK, "replaces partition 0", "partitions", "resize", "--to", "2", "--yes", "--wait", "0")

	dir := t.TempDir()
	file := filepath.Join(dir, "order.yaml")
	if err := os.WriteFile(file, []byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n"+
		"events: {paid: {versions: {1: {type: object}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	says(exitOK, "", "nats", "durable", "--name", "mailer", "--filter", "order.paid")
	says(exitAgain, "there is no kind or upstream order", "doctor")
	says(exitOK, "upstream order: added", "upstream", "add", "order", "--file", file)
	if _, out, _ := run(t, env, "", "doctor"); strings.Contains(out, "subscriber-undeclared") {
		t.Errorf("a declared subscriber: %s", out)
	}
	says(exitOK, "com.example.order.paid.v1", "upstream", "list", "--json")
	says(exitOK, "5 files", "contracts", "write", dir)

	for _, command := range []string{"kinds list", "token list", "verify", "replay --consumer archiver", "restore --since 1h",
		"edges remove --tenant 1 --id 1",
		"erase --tenant 1 --author 1", "pause --consumer archiver", "dlq consumer list"} {
		if code, stdout, stderr := run(t, env, "", strings.Fields(command)...); code == exitOK ||
			!strings.Contains(stderr, "DATABASE_URL has the outbox alone") {
			t.Errorf("%s: exit code %d\n%s%s", command, code, stdout, stderr)
		}
	}
}

// watchOrders appends events until `events watch` has printed one. It must be a paid order.
func watchOrders(t *testing.T, env map[string]string, in *testkit.DB) {
	t.Helper()
	printed := make(chan string, 1)
	go func() {
		_, stdout, stderr := run(t, env, "", "events", "watch", "--kind", "order", "--type", "paid", "--limit", "1")
		printed <- stdout + stderr
	}()
	pool := in.Pool(t, postgres.RoleSystem)
	testkit.Eventually(t, "a watched order", func() (bool, error) {
		if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, 'order', 8, 'placed', '{}'), (1, 'parcel', 8, 'paid', '{}')`); err != nil {
			return false, err
		}
		appendOrder(t, in, "8")
		select {
		case out := <-printed:
			if !strings.Contains(out, "order.paid  8") {
				t.Fatalf("events watch prints %s", out)
			}
			return true, nil
		default:
			return false, nil
		}
	})
}

// TestServeRunsAGuestsRelayAndJobs runs the process of a guest on a server that has none of our
// roles before, with a login that owns nothing.
func TestServeRunsAGuestsRelayAndJobs(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts servers")
	}
	db, b := testkit.Business(t), testkit.NATS(t)
	owner := db.Pool(t, postgres.RoleOwner)
	if _, err := owner.Exec(t.Context(), `CREATE ROLE shop_tidings LOGIN PASSWORD 'shop_tidings'`); err != nil {
		t.Fatal(err)
	}
	in := db.As(t, "shop_tidings").In(t, "tidings")
	env := append(serversOf(in, b), "PROJECTIONS_DATABASE_URL=postgres://nobody@127.0.0.1:1/none")
	h := newServe(t, env, "relay", "jobs")
	testkit.Eventually(t, "both parts to say that they wait for the schema", func() (bool, error) {
		_, body := get(t, "http://"+h.ops[0]+"/readyz")
		return strings.Contains(body, `"relay: schema"`) && strings.Contains(body, `"jobs: truth schema"`), nil
	})

	cfg, dir := b.Config(), t.TempDir()
	vars := map[string]string{"DATABASE_URL": db.In(t, "tidings").URL, "NATS_URL": b.URL, "NATS_STREAM": cfg.Stream,
		"NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix}
	for name, content := range map[string]string{
		"logins": "shop_tidings system shop_tidings",
		"order.yaml": "upstream: order\ntype_prefix: com.example\nsource: /shop\n" +
			"events: {changed: {versions: {1: {type: object, required: [id, version]}}}}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{
		{"migrate", "--only", "outbox", "--logins", filepath.Join(dir, "logins")},
		{"upstream", "add", "order", "--file", filepath.Join(dir, "order.yaml"), "--login", "shop_app"},
	} {
		if code, stdout, stderr := run(t, vars, "", args...); code != exitOK {
			t.Fatalf("%s: exit code %d\n%s%s", args, code, stdout, stderr)
		}
	}
	h.ready(t)
	if _, err := db.As(t, "shop_app").Pool(t, postgres.RoleOwner).Exec(t.Context(), `INSERT INTO tidings.outbox_messages
		(tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'order', '7', 'changed', '{"id": 7, "version": 1}')`); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the event's publish and the jobs", func() (done bool, err error) {
		err = owner.QueryRow(t.Context(), `SELECT NOT EXISTS (SELECT FROM tidings.outbox_messages WHERE processed_at IS NULL)
			AND (SELECT array_agg(job ORDER BY job) @> '{outbox-archive,outbox-ranges}' FROM tidings.job_runs)`).Scan(&done)
		return done, err
	})
	code, _, stderr := run(t, map[string]string{"DATABASE_URL": in.URL, "API_CURSOR_KEY": strings.Repeat("ab", 32)}, "", "serve")
	if code != exitInput || !strings.Contains(stderr, "run `tidings serve relay jobs`") {
		t.Errorf("serve without parts: exit code %d\n%s", code, stderr)
	}
	h.processes[0].Signal(syscall.SIGTERM)
	if code := h.processes[0].AwaitEnd(); code != exitOK {
		t.Errorf("exit code %d after SIGTERM", code)
	}
}

// relayOf runs a relay of the database until stop.
func relayOf(t *testing.T, db *testkit.DB, b broker.Config) (stop func()) {
	t.Helper()
	var config relay.Config
	if err := envconfig.ProcessWith(t.Context(), &envconfig.Config{Target: &config, Lookuper: envconfig.MapLookuper(nil)}); err != nil {
		t.Fatal(err)
	}
	r, err := relay.New(config, db.Pool(t, postgres.RoleRelay), b, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// appendOrder commits an event of the order.
func appendOrder(t *testing.T, db *testkit.DB, id event.ID) {
	t.Helper()
	if err := pgx.BeginFunc(t.Context(), db.Pool(t, postgres.RoleSystem), func(tx pgx.Tx) error {
		return outbox.Append(t.Context(), tx, []event.Event{{TenantID: 1, AggregateType: "order", AggregateID: id, Type: "paid",
			Payload: json.RawMessage(`{"version": 1}`)}})
	}); err != nil {
		t.Fatal(err)
	}
}
