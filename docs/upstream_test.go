package docs_test

import (
	"context"
	"crypto/rand"
	"errors"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/outbox"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// blocks returns the page's blocks of code in a language.
func blocks(page, language string) (all []string) {
	for _, m := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(page, -1) {
		all = append(all, m[1])
	}
	return all
}

// TestTheUpstreamPageWorks declares the upstream of upstream.md, and runs the page's code with the
// login that it names. It also checks every right of this login, and of one that writes kinds.
func TestTheUpstreamPageWorks(t *testing.T) {
	content, err := os.ReadFile("upstream.md")
	if err != nil {
		t.Fatal(err)
	}
	login := "bookmarks_" + strings.ToLower(rand.Text()[:12]) // logins belong to the server, not to the test's database
	page := strings.ReplaceAll(string(content), "bookmarks_service", login)
	db := testkit.Postgres(t)
	owner := db.Pool(t, postgres.RoleOwner)
	inSQL, inGo, inPython := blocks(page, "sql"), blocks(page, "go"),
		regexp.MustCompile(`execute\("([^"]+)"`).FindAllStringSubmatch(page, -1)
	inYAML := blocks(page, "yaml")
	if len(inYAML) != 1 || len(inSQL) != 2 || len(inGo) != 1 || len(inPython) != 2 {
		t.Fatalf("the page has %d blocks of SQL, %d of Go and %d statements in Python", len(inSQL), len(inGo), len(inPython))
	}
	if example, err := os.ReadFile("../outbox/example_test.go"); err != nil || !strings.Contains(string(example), "\n"+inGo[0]) {
		t.Errorf("the Go block differs from outbox/example_test.go, %v", err)
	}

	order, err := kindfile.ReadUpstream([]byte(inYAML[0]))
	if err != nil {
		t.Fatal(err)
	}
	order.Logins = []string{login}
	if _, err := declared.Add(t.Context(), db.Pool(t, postgres.RoleSystem),
		declared.Request{Upstream: *order, Actor: "test"}); err != nil {
		t.Fatal(err)
	}
	made := testkit.UpstreamLogin(t, db, login)
	t.Cleanup(func() {
		for _, sql := range []string{"DROP OWNED BY ", "DROP ROLE "} {
			for _, role := range []string{login, login + "_kinds"} {
				if _, err := owner.Exec(context.WithoutCancel(t.Context()), sql+role); err != nil { // the pool is closed after this
					t.Error(err)
				}
			}
		}
	})
	if _, err := owner.Exec(t.Context(), inSQL[0]+"CREATE ROLE "+login+"_kinds IN ROLE tidings_writer"); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, made.Password)
	service, err := pgx.Connect(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close(t.Context())
	exec := func(sql string) error {
		_, err := service.PgConn().Exec(t.Context(), sql).ReadAll()
		return err
	}
	for _, sql := range []string{inSQL[1], inPython[0][1],
		strings.Replace(inPython[1][1], "%s", `'{"user_id": "8", "post_id": "42", "version": 1}'`, 1)} {
		if err := exec(sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	claimed, err := outbox.Exchange(t.Context(), db.Pool(t, postgres.RoleSystem),
		outbox.Round{LastSlot: event.Slots - 1, Limit: 10, MaxBytes: 1 << 20, MaxMessage: 1 << 20})
	if err != nil || len(claimed.Rows) != 2 {
		t.Fatalf("the relay finds %+v, %v: want two events of the post", claimed, err)
	}
	for _, r := range claimed.Rows {
		if err := r.Validate(outbox.MaxMessage); err != nil {
			t.Error(err)
		}
	}

	want := []string{
		"bookmarks INSERT",
		"bookmarks SELECT",
		"bookmarks UPDATE",
		"function upstream_accepts(bigint,text,text,text,smallint,jsonb,integer,text)",
		"function upstream_of(text)",
		"outbox_messages INSERT aggregate_id aggregate_type available_at event_type event_version occurred_at payload tenant_id trace_id",
		"outbox_messages SELECT event_id id slot",
		"role tidings_upstream",
		"sequence outbox_messages_id_seq USAGE",
	}
	writes := []string{
		"all_comments SELECT",
		"all_messages SELECT",
		"all_reviews SELECT",
		"archived_threads SELECT",
		"children_archive_comment SELECT",
		"children_archive_message SELECT",
		"children_archive_review SELECT",
		"children_comment INSERT",
		"children_comment SELECT",
		"children_comment UPDATE attributes author_state body updated_at version",
		"children_message INSERT",
		"children_message SELECT",
		"children_message UPDATE attributes author_state body updated_at version",
		"children_review INSERT",
		"children_review SELECT",
		"children_review UPDATE attributes author_state body updated_at version",
		"comment_likes INSERT",
		"comment_likes SELECT",
		"comment_likes UPDATE attributes positioned_at status updated_at version",
		"comments INSERT",
		"comments SELECT",
		"comments UPDATE attributes author_state body updated_at version",
		"edges INSERT",
		"edges SELECT",
		"edges UPDATE attributes positioned_at status updated_at version",
		"edges_follow INSERT",
		"edges_follow SELECT",
		"edges_follow UPDATE attributes positioned_at status updated_at version",
		"edges_like INSERT",
		"edges_like SELECT",
		"edges_like UPDATE attributes positioned_at status updated_at version",
		"edges_like_comment INSERT",
		"edges_like_comment SELECT",
		"edges_like_comment UPDATE attributes positioned_at status updated_at version",
		"edges_membership INSERT",
		"edges_membership SELECT",
		"edges_membership UPDATE attributes positioned_at status updated_at version",
		"edges_share INSERT",
		"edges_share SELECT",
		"edges_share UPDATE attributes positioned_at status updated_at version",
		"edges_vote INSERT",
		"edges_vote SELECT",
		"edges_vote UPDATE attributes positioned_at status updated_at version",
		"follows INSERT",
		"follows SELECT",
		"follows UPDATE attributes positioned_at status updated_at version",
		"function child_event_fits(bigint,text,text,jsonb)",
		"function is_kind(text)",
		"function upstream_accepts(bigint,text,text,text,smallint,jsonb,integer,text)",
		"function upstream_of(text)",
		"likes INSERT",
		"likes SELECT",
		"likes UPDATE attributes positioned_at status updated_at version",
		"memberships INSERT",
		"memberships SELECT",
		"memberships UPDATE attributes positioned_at status updated_at version",
		"messages INSERT",
		"messages SELECT",
		"messages UPDATE attributes author_state body updated_at version",
		"outbox_messages INSERT aggregate_id aggregate_type available_at event_type event_version occurred_at payload tenant_id trace_id",
		"outbox_messages SELECT delayed event_id id slot",
		"reviews INSERT",
		"reviews SELECT",
		"reviews UPDATE attributes author_state body updated_at version",
		"role tidings_writer",
		"sequence outbox_messages_id_seq USAGE",
		"shares INSERT",
		"shares SELECT",
		"shares UPDATE attributes positioned_at status updated_at version",
		"votes INSERT",
		"votes SELECT",
		"votes UPDATE attributes positioned_at status updated_at version",
	}
	for role, want := range map[string][]string{login: want, login + "_kinds": writes} {
		if diff := cmp.Diff(want, rightsOf(t, owner, role)); diff != "" {
			t.Errorf("rights of %s (-want +got):\n%s", role, diff)
		}
	}

	rows, _ := owner.Query(t.Context(), `SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()
		AND table_type = 'BASE TABLE'`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		name := pgx.Identifier{table}.Sanitize()
		tries := []string{"DELETE FROM " + name, "TRUNCATE " + name, "ALTER TABLE " + name + " DISABLE ROW LEVEL SECURITY"}
		if !slices.Contains(want, table+" SELECT") {
			tries = append(tries, "SELECT * FROM "+name)
		}
		for _, sql := range tries {
			var refused *pgconn.PgError
			if err := exec(sql); !errors.As(err, &refused) || refused.Code != "42501" {
				t.Errorf("%s: %v, want a refusal", sql, err)
			}
		}
	}
}

// rightsOf returns every right that a login has in the schema.
func rightsOf(t *testing.T, owner *pgxpool.Pool, login string) []string {
	t.Helper()
	rows, _ := owner.Query(t.Context(), `
		WITH columns AS (
		  SELECT c.table_name, p.privilege, has_column_privilege($1, format('%I.%I', c.table_schema, c.table_name), c.column_name,
		  p.privilege) AS may, c.column_name
		    FROM information_schema.columns c JOIN information_schema.tables USING (table_schema, table_name)
		   CROSS JOIN unnest('{SELECT,INSERT,UPDATE,REFERENCES}'::text[]) AS p(privilege) WHERE c.table_schema = current_schema())
		SELECT concat_ws(' ', table_name, privilege, CASE WHEN NOT bool_and(may) THEN string_agg(column_name, ' '
		ORDER BY column_name COLLATE "C") FILTER (WHERE may) END)
		  FROM columns GROUP BY table_name, privilege HAVING bool_or(may)
		UNION ALL
		SELECT concat_ws(' ', table_name, privilege) FROM information_schema.tables
		CROSS JOIN unnest('{DELETE,TRUNCATE,TRIGGER}'::text[]) AS p(privilege)
		 WHERE table_schema = current_schema() AND has_table_privilege($1, format('%I.%I', table_schema, table_name), privilege)
		UNION ALL
		SELECT concat_ws(' ', 'sequence', oid::regclass, privilege) FROM pg_class
		CROSS JOIN unnest('{USAGE,SELECT,UPDATE}'::text[]) AS p(privilege)
		 WHERE relnamespace = current_schema()::regnamespace AND CASE WHEN relkind = 'S' THEN has_sequence_privilege($1, oid, privilege) END
		UNION ALL
		SELECT concat_ws(' ', 'function', oid::regprocedure) FROM pg_proc WHERE prosecdef AND has_function_privilege($1, oid, 'EXECUTE')
		UNION ALL
		SELECT concat_ws(' ', 'role', rolname) FROM pg_roles WHERE rolname <> $1 AND pg_has_role($1, oid, 'MEMBER')
		UNION ALL
		SELECT 'schema' WHERE has_schema_privilege($1, current_schema(), 'CREATE')`, login)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	return got
}
