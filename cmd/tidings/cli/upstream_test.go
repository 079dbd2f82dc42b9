package cli

import (
	"context"
	"crypto/rand"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

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
	login := "orders_" + strings.ToLower(rand.Text()[:12])
	owner := db.Pool(t, postgres.RoleOwner)
	t.Cleanup(func() {
		if _, err := owner.Exec(context.WithoutCancel(t.Context()), "DROP ROLE IF EXISTS "+login); err != nil {
			t.Error(err)
		}
	})
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
			"^" + added + "The login LOGIN was created. Its password is shown only now: [A-Z0-9]{26}\nThe outbox checks", ""},
		{"upstream add order --file FILE --login LOGIN --json", exitOK,
			`^\{"changes":null,"version":[0-9]+,"new":false,"upstream":"order","dry_run":false,"logins":\[\{"name":"LOGIN"\}\]\}\n$`, ""},
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
