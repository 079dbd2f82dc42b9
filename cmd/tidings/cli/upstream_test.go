package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// newLogin returns a name of a login, and drops that login when the test ends.
func newLogin(t *testing.T, db *testkit.DB) string {
	t.Helper()
	login, owner := "orders_"+strings.ToLower(rand.Text()[:12]), db.Pool(t, postgres.RoleOwner)
	t.Cleanup(func() {
		if _, err := owner.Exec(context.WithoutCancel(t.Context()), "DROP ROLE IF EXISTS "+login); err != nil {
			t.Error(err)
		}
	})
	return login
}

func TestUpstreamsAreDeclaredListedAndRemoved(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	dir := t.TempDir()
	file, contracts := filepath.Join(dir, "order.yaml"), filepath.Join(dir, "contracts")
	const declaration = `upstream: order
type_prefix: com.example
source: https://orders.example.com
tenants: [1, 2]
events:
  placed: {summary: A customer placed an order., versions: {1: {type: object, required: [total]}}}
`
	if err := os.WriteFile(file, []byte(declaration), 0o600); err != nil {
		t.Fatal(err)
	}
	login := newLogin(t, db)
	const added = "upstream order: added\n"
	for _, c := range []struct {
		args           string
		code           int
		stdout, stderr string // regular expressions
	}{
		{"upstream list", exitOK, `^NAME +EVENTS .*\n$`, ""},
		{"upstream add order --file FILE --login LOGIN --dry-run", exitOK, "^" + added + `Nothing was changed \(--dry-run\)`, ""},
		{"upstream show order", exitError, "", "order: there is no such upstream"},
		{"upstream add order", exitError, "", "order: there is no such upstream"},
		{"upstream add invoice --file FILE", exitInput, "", "declares the upstream order, not invoice"},
		{"upstream add order --file FILE.no", exitInput, "", "no such file"},
		{"upstream add order --file FILE --login LOGIN --reason shop", exitOK,
			"^" + added + "The new login LOGIN has this password, which is shown only now: [A-Z0-9]{26}\nThe outbox checks", ""},
		{"upstream add order --file FILE --login LOGIN --json", exitOK,
			`^\{"changes":null,"version":[0-9]+,"new":false,"upstream":"order","dry_run":false,"logins":\[\{"name":"LOGIN"\}\]\}\n$`, ""},
		{"upstream add order --login LOGIN", exitOK, "^The role LOGIN exists, and keeps its password.\n.* Nothing was changed", ""},
		{"upstream show order", exitOK, "(?s)^upstream: order\n.*required:\n +- total", ""},
		{"upstream list", exitOK, `\norder +placed +2 +65536 +https://orders\.example\.com +LOGIN\n$`, ""},
		{"upstream list --json", exitOK, `"types":\["com\.example\.order\.placed\.v1"\]`, ""},
		{"upstream add order --revoke-login LOGIN", exitOK, "^logins: LOGIN removed\n", ""},
		{"contracts write DIR", exitOK, "files in", ""},
		{"upstream remove order --yes --reason closed", exitOK, "^The outbox refuses events of order now", ""},
		{"upstream remove order --yes", exitError, "", "there is no such upstream"},
		{"upstream history order", exitOK,
			"(?s)^Version [0-9]+, .*: shop\n  upstream order: added\n.*: closed\n  upstream order: removed\n$", ""},
		{"upstream history order --json", exitOK, `(?s)"reason":"closed","removed":true`, ""},
		{"upstream history invoice", exitError, "", "invoice: there is no such upstream"},
	} {
		named := strings.NewReplacer("FILE", file, "LOGIN", login, "DIR", contracts)
		code, stdout, stderr := run(t, env, "", strings.Fields(named.Replace(c.args))...)
		if code != c.code || !regexp.MustCompile(named.Replace(c.stdout)).MatchString(stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%s: exit code %d, %q, %q: want %d, %q, %q", c.args, code, stdout, stderr, c.code, c.stdout, c.stderr)
		}
	}
	if schema, err := os.ReadFile(filepath.Join(contracts, "schemas", "com.example.order.placed.v1.json")); err != nil ||
		!strings.Contains(string(schema), `"$id": "urn:tidings:order:placed:v1"`) || !strings.Contains(string(schema), `"total"`) {
		t.Errorf("the schema: %s, %v", schema, err)
	}
	if document, err := os.ReadFile(filepath.Join(contracts, "asyncapi.json")); err != nil ||
		!strings.Contains(string(document), `"events.{partition}.t{tenant}.order.placed"`) ||
		!strings.Contains(string(document), `"const": "https://orders.example.com"`) {
		t.Errorf("the document has no order.placed, %v", err)
	}
}

// TestALoginWhosePasswordNobodySawDoesNotExist ends the command when it prints the password, as the
// loss of its terminal does.
func TestALoginWhosePasswordNobodySawDoesNotExist(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	login, file := newLogin(t, db), filepath.Join(t.TempDir(), "order.yaml")
	if err := os.WriteFile(file, []byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n"+
		"events: {placed: {versions: {1: {type: object}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"upstream", "add", "order", "--file", file, "--login", login}
	for _, form := range [][]string{nil, {"--json"}} {
		reader, stdout, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0], append(args, form...)...)
		cmd.Env, cmd.Stdout = append(os.Environ(), childVariable+"=1", "DATABASE_URL="+db.URL), stdout
		err = errors.Join(reader.Close(), cmd.Run(), stdout.Close())
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGPIPE {
			t.Fatalf("the command ends with %v, want SIGPIPE", err)
		}
		var roles int
		if err := db.Pool(t, postgres.RoleOwner).QueryRow(t.Context(), "SELECT count(*) FROM pg_roles WHERE rolname = $1",
			login).Scan(&roles); err != nil || roles != 0 {
			t.Fatalf("the login exists, and nobody saw its password: %v", err)
		}
	}
	code, stdout, stderr := run(t, map[string]string{"DATABASE_URL": db.URL}, "", args...)
	_, password, _ := strings.Cut(stdout, "only now: ")
	password, _, _ = strings.Cut(password, "\n")
	u, err := url.Parse(db.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(login, password)
	conn, err := pgx.Connect(t.Context(), u.String())
	if code != exitOK || err != nil {
		t.Fatalf("exit code %d, %s%s: %v", code, stdout, stderr, err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestALoginThatMayNotMakeRolesGetsTheSQL asks for two logins, and runs what the command prints.
func TestALoginThatMayNotMakeRolesGetsTheSQL(t *testing.T) {
	t.Parallel()
	db, file := testkit.Postgres(t), filepath.Join(t.TempDir(), "order.yaml")
	if err := os.WriteFile(file, []byte("upstream: order\ntype_prefix: com.example\nsource: /shop\n"+
		"events: {placed: {versions: {1: {type: object}}}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	operator, one, other, owner := newLogin(t, db), newLogin(t, db), newLogin(t, db), db.Pool(t, postgres.RoleOwner)
	if _, err := owner.Exec(t.Context(), "CREATE ROLE "+operator+" LOGIN PASSWORD '"+operator+"' IN ROLE tidings_system"); err != nil {
		t.Fatal(err)
	}
	add := func() (stdout string) {
		t.Helper()
		code, stdout, stderr := run(t, map[string]string{"DATABASE_URL": db.As(t, operator).URL}, "", "upstream", "add", "order",
			"--file", file, "--login", one, "--login", other)
		if code != exitOK {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		return stdout
	}
	printed := add()
	for _, login := range []string{one, other} {
		sql := `CREATE ROLE "` + login + `" LOGIN PASSWORD '...';` + "\n  " + `GRANT tidings_upstream TO "` + login + `";`
		if !strings.Contains(printed, sql) {
			t.Errorf("%s\nlacks %s", printed, sql)
		}
		if _, err := owner.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil { // it changed nothing
			t.Error(err)
		}
	}
	for _, login := range []string{one, other} {
		if again := add(); !strings.Contains(again, "The role "+login+" exists, and keeps its password.") {
			t.Error(again)
		}
	}
}
