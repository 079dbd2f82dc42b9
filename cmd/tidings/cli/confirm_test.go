package cli

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// harmless are the commands that delete nothing permanently. A new command fails the test until it
// is in this list or destructive.
var harmless = []string{
	"archive export", "archive exports", "archive hold add", "archive hold list", "archive restore", "archive status",
	"archive undo", "archive verify",
	"bench archive", "bench child", "bench latency", "bench neighbors", "bench overload", "bench project", "bench read", "bench relay",
	"bench serve",
	"bench sizes", "bench subscribe", "bench trace", "bench write",
	"consume", "contracts write", "demo", "dev", "doctor", "dlq consumer list", "dlq consumer retry", "dlq consumer show",
	"dlq outbox list", "dlq outbox retry", "dlq outbox show", "events find", "events watch",
	"history author", "history child", "history comment", "history edge", "history follow", "history thread", "kinds diff", "kinds history",
	"kinds list", "kinds show",
	"load", "migrate", "nats account", "nats creds", "nats durable", "nats revoke", "nats users", "outbox list",
	"outbox retry", "outbox show", "partitions list", "pause",
	"ready", "resume", "serve", "status", "stream plan", "token create", "token identify", "token list",
	"upstream add", "upstream history", "upstream list", "upstream show", "verify", "version",
}

// unrecorded are the destructive commands whose actor and reason are not stored.
var unrecorded = []string{"partitions resize", "repair stream", "replay", "restore", "stream configure", "token revoke"}

// destructiveCase has the arguments and the expected texts of a destructive command.
type destructiveCase struct {
	args          string
	shows         []string // texts of the question
	before, after string   // SQL before and after the refused attempts
	code          int      // with a yes; -1: other tests run the command
}

var destructiveCases = map[string]destructiveCase{
	"archive hold release": {args: "1", shows: []string{"HOLD", "kept by ann"}},
	"archive run": {args: "--job outbox-archive",
		shows: []string{"range 1 to 50000000 of the outbox's archive", "MONTHS", "ROWS (ESTIMATE)", "MIB (ESTIMATE)"}},
	"archive settings": {args: "outbox_archive_keep=168h",
		shows: []string{"outbox_archive_keep  2160h0m0s  168h0m0s", "range 1 to 50000000"}},
	"dlq consumer discard": {args: "--all", shows: []string{"2 messages to discard", "deleted permanently"}},
	"dlq outbox discard":   {args: "--all", shows: []string{"3 messages to discard", "deleted permanently"}},
	"edges remove":         {args: "--tenant 1 --id 8 --kind follow", shows: []string{"follow  2"}},
	"erase": {args: "--tenant 1 --author 7 --wait 0s",
		shows: []string{"of author 7 of tenant 1", "children", "FOUND"}, code: exitAgain},
	"upstream remove":   {args: "order", shows: []string{"Writers of order", "orders_service"}},
	"kinds apply":       {args: "KINDS", shows: []string{"remove or restrict kinds", "edges.block"}},
	"outbox kill":       {args: "60000001 --reason x", shows: []string{"post/7", "later"}},
	"partitions resize": {args: "--to 2", shows: []string{"There is 1 partition now", "cannot undo a resize"}, code: -1},
	"repair stream": {shows: []string{"Partition 0"}, code: -1,
		before: `UPDATE outbox_partitions SET stream = 'EVENTS-0', created = '2020-01-01'`,
		after:  `UPDATE outbox_partitions SET stream = NULL, created = NULL`},
	"replay": {args: "--consumer followercounts", shows: []string{"replace the live ones", "edge_counts"}, code: -1},
	"restore": {args: "--since 2026-01-01T00:00:00Z", code: -1,
		shows: []string{"Writes that the truth lost and the streams still have: ", "Erasures to repeat: "}},
	"stream configure": {args: "--max-age 1h", shows: []string{"events stay for 1h0m0s instead of"}},
	"token revoke":     {args: "--tenant 1 --name web", shows: []string{"web", "active"}},
}

// digest returns the content of all tables except the leases, by table.
func digest(t *testing.T, pool *pgxpool.Pool) map[string]string {
	t.Helper()
	rows, _ := pool.Query(t.Context(), `
		SELECT c.relname::text, query_to_xml(format('SELECT coalesce(string_agg(r::text, chr(10) ORDER BY r::text), '''') AS all FROM %I r',
		c.relname), false, true, '')::text
		  FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND c.relname NOT LIKE 'lease%'`)
	all := make(map[string]string)
	var name, text string
	if _, err := pgx.ForEachRow(rows, []any{&name, &text}, func() error { all[name] = text; return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

// prepareDestruction creates data that each of the commands can delete.
func prepareDestruction(t *testing.T, pool *pgxpool.Pool, nats *testkit.Broker, env map[string]string) {
	t.Helper()
	publishedRows(t, pool, 300)
	buryRows(t, pool, 3)
	parkFollows(t, pool, 2)
	for _, sql := range []string{
		`SELECT outbox_range_archive(1, 0)`, `SELECT outbox_range_index(1)`,
		`UPDATE outbox_ranges SET archived_at = now() - interval '100 d' WHERE from_id = 1`,
		`INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, payload, attempts, available_at, event_id)
		 VALUES (60000001, 1, 'post', 7, 'later', '{}', 2, now() + interval '1 hour', gen_random_uuid())`,
		`INSERT INTO outbox_archive_holds (tenant_id, from_month, to_month, reason, created_by)
			VALUES (9, '2001-01-01', '2001-01-01', 'kept by ann', 'ann')`,
		`INSERT INTO follows (tenant_id, follower_id, followee_id, status, version) VALUES (1, 8, 9, 'ACTIVE', 1), (1, 9, 8, 'ACTIVE', 1)`,
		`INSERT INTO comments (tenant_id, comment_id, post_id, slug, path, author_id, body)
			VALUES (1, gen_random_uuid(), 1, '00000001', '0000000000000000000001', 7, 'x')`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	js, err := jetstream.New(nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
		testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "kinds.yaml")
	for _, kinds := range []string{"edges: {block: {plural: blocks, from: user, to: user, ends: [blocker_id, blocked_id], forward: " +
		"blocked, reverse: blockers}}\n", "edges: {}\n"} {
		if err := os.WriteFile(file, []byte(kinds), 0o600); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(kinds, "block") {
			if code, _, stderr := run(t, env, "", "kinds", "apply", file); code != exitOK {
				t.Fatal(stderr)
			}
		}
	}
	env["KINDS"] = file
	if err := os.WriteFile(file+".order", []byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n"+
		"events: {placed: {versions: {1: {type: object}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := run(t, env, "", "upstream", "add", "order", "--file", file+".order"); code != exitOK {
		t.Fatal(stderr)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE upstreams SET object = jsonb_set(object, '{logins}', '["orders_service"]')`); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := run(t, env, "", "token", "create", "--tenant", "1", "--name", "web"); code != exitOK {
		t.Fatal(stderr)
	}
}

// leaves calls fn with every command that has no subcommands.
func leaves(c *cobra.Command, fn func(name string, c *cobra.Command)) {
	for _, sub := range c.Commands() {
		leaves(sub, fn)
	}
	if !c.HasSubCommands() {
		fn(strings.TrimPrefix(c.CommandPath(), "tidings "), c)
	}
}

// TestDestructiveCommandsShowWhatGoesAndAskOnce visits all commands: each one is in the list
// harmless, or asks.
func TestDestructiveCommandsShowWhatGoesAndAskOnce(t *testing.T) {
	t.Parallel()
	var marked []string
	leaves(Process{Env: envconfig.MapLookuper(nil)}.commands(), func(name string, c *cobra.Command) {
		switch {
		case c.Annotations[destructive] == "":
			if !slices.Contains(harmless, name) {
				t.Errorf("%s does not ask, and is not in the list harmless", name)
			}
			return
		case slices.Contains(harmless, name):
			t.Errorf("%s is in the list harmless, but asks", name)
		}
		marked = append(marked, name)
		if c.Flags().Lookup("yes") == nil || (c.Flags().Lookup("reason") == nil) != slices.Contains(unrecorded, name) {
			t.Errorf("%s lacks --yes or --reason, or has a --reason that is not stored", name)
		}
	})
	if diff := cmp.Diff(slices.Sorted(maps.Keys(destructiveCases)), slices.Sorted(slices.Values(marked))); diff != "" {
		t.Fatalf("the commands that ask (-want +got):\n%s", diff)
	}
	db, nats := testkit.Postgres(t), testkit.NATS(t)
	pool := db.Pool(t, postgres.RoleOwner)
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": nats.URL, "NATS_STREAM": nats.Config().Stream}
	prepareDestruction(t, pool, nats, env)
	tidings := func(answers bool, stdin, name, args string, more ...string) (int, string) {
		var out, errs bytes.Buffer
		code := Execute(t.Context(), slices.Concat(strings.Fields(name),
			strings.Fields(strings.ReplaceAll(args, "KINDS", env["KINDS"])), more),
			Process{Stdin: strings.NewReader(stdin), Stdout: &out, Stderr: &errs, Env: envconfig.MapLookuper(env), answers: answers,
				ran: noteRan})
		return code, out.String() + errs.String()
	}
	for _, name := range marked {
		c := destructiveCases[name]
		execSQL(t, pool, c.before)
		before := digest(t, pool)
		for _, try := range []struct {
			answers bool
			stdin   string
			code    int
			says    string
		}{{false, "yes\n", exitInput, "--yes"}, {true, "\n", exitError, "[y/N]"}, {true, "no\nyes\n", exitError, "[y/N]"}} {
			code, text := tidings(try.answers, try.stdin, name, c.args)
			for _, want := range append(slices.Clone(c.shows), try.says, "nothing was changed") {
				if code != try.code || !strings.Contains(text, want) || strings.Count(text, "[y/N]") > 1 {
					t.Errorf("%s, with a terminal %t, answer %q: exit code %d, want %d and %q:\n%s", name, try.answers, try.stdin,
						code, try.code, want, text)
				}
			}
		}
		if diff := cmp.Diff(before, digest(t, pool)); diff != "" {
			t.Errorf("%s, without a yes, changed:\n%s", name, diff)
		}
		execSQL(t, pool, c.after)
	}
	// Now each command runs: every second one with --yes, the others with a person's answer.
	slices.SortFunc(marked, func(a, b string) int { // archive run comes first, because it uses the settings that the question showed
		return strings.Compare(strings.Replace(a, "archive run", "0", 1), strings.Replace(b, "archive run", "0", 1))
	})
	for n, name := range marked {
		c, why := destructiveCases[name], "because of "+strings.ReplaceAll(name, " ", "-")
		if c.code < 0 {
			continue
		}
		before, more := digest(t, pool), []string{}
		if !slices.Contains(unrecorded, name) {
			more = append(more, "--reason", why)
		}
		if n%2 == 0 {
			more = append(more, "--yes")
		}
		code, text := tidings(n%2 == 1, "y\n", name, c.args, more...)
		if code != c.code || strings.Contains(text, "[y/N]") != (n%2 == 1) {
			t.Errorf("%s %q: exit code %d, want %d:\n%s", name, more, code, c.code, text)
		}
		after := digest(t, pool)
		kept := slices.ContainsFunc(slices.Collect(maps.Values(after)), func(text string) bool { return strings.Contains(text, why) })
		if kept == slices.Contains(unrecorded, name) || name != "stream configure" && cmp.Equal(before, after) {
			t.Errorf("%s: its reason is kept: %t; it changed something: %t\n%s", name, kept, !cmp.Equal(before, after), text)
		}
	}
}

func execSQL(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}
