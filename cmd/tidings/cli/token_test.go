package cli

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

func TestTokenCreate(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	pool := db.Pool(t, postgres.RoleAPI)

	code, stdout, stderr := run(t, env, "", "token", "create", "--tenant", "7", "--name", "importer")
	token := strings.TrimSpace(stdout)
	if code != exitOK || strings.Contains(stderr, token) {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	p, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(token))
	if err != nil || p.TenantID != 7 || p.Name != "importer" || !slices.Equal(p.Roles, []string{"read", "write"}) {
		t.Errorf("%+v, %v", p, err)
	}

	code, stdout, stderr = run(t, env, "", "token", "create", "--tenant", "7", "--name", "console", "--roles", "read,moderate,admin",
		"--expires", "720h", "--json")
	var made createdToken
	if err := json.Unmarshal([]byte(stdout), &made); code != exitOK || err != nil {
		t.Fatalf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	if p, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(made.Token)); err != nil ||
		!slices.Equal(p.Roles, []string{"read", "moderate", "admin"}) || made.Expires == nil {
		t.Errorf("%+v, %v; %+v", p, err, made)
	}

	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"a name that is taken": {[]string{"--tenant", "7", "--name", "importer"}, exitError,
			`tenant 7 already has a token named "importer"`},
		"no tenant":          {[]string{"--name", "x"}, exitInput, "either --tenant"},
		"a tenant of 0":      {[]string{"--tenant", "0", "--name", "x"}, exitInput, "either --tenant"},
		"an unknown role":    {[]string{"--tenant", "7", "--name", "x", "--roles", "root"}, exitInput, `role "root"`},
		"an end in the past": {[]string{"--tenant", "7", "--name", "x", "--expires", "2001-01-01"}, exitInput, "is in the past"},
		"a rate of nothing":  {[]string{"--tenant", "7", "--name", "x", "--rate-read", "0/1s"}, exitInput, `--rate-read`},
		"an overlap alone":   {[]string{"--tenant", "7", "--name", "x", "--overlap", "1h"}, exitInput, "--overlap needs --replace"},
		"nothing to replace": {[]string{"--tenant", "7", "--name", "x", "--replace"}, exitError, `no valid token named "x"`},
		"no end at all":      {[]string{"--tenant", "7", "--name", "x", "--expires", "soon"}, exitInput, `"soon" is not a duration`},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(t, env, "", append([]string{"token", "create"}, c.args...)...)
			if code != c.code || stdout != "" || !strings.Contains(stderr, c.says) {
				t.Errorf("exit code %d, %q, %q: want %d and %q", code, stdout, stderr, c.code, c.says)
			}
		})
	}
	if _, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf("x")); !errors.Is(err, tokens.ErrUnauthenticated) {
		t.Errorf("a token that nobody made: %v", err)
	}
}

func TestSystemTokens(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	token := func(code int, args ...string) (stdout, stderr string) {
		t.Helper()
		got, stdout, stderr := run(t, env, "", append([]string{"token"}, args...)...)
		if got != code {
			t.Fatalf("token %v: exit code %d, want %d: %s", args, got, code, stderr)
		}
		return stdout, stderr
	}
	made, said := token(exitOK, "create", "--system", "--name", "anna")
	p, _, err := tokens.NewLookup(db.Pool(t, postgres.RoleAPI)).Find(t.Context(), tokens.HashOf(strings.TrimSpace(made)))
	if err != nil || !p.System() || !slices.Equal(p.Roles, []string{"read"}) ||
		!strings.Contains(said, `"anna" of the system, roles read,`) {
		t.Errorf("%+v, %v: %s", p, err, said)
	}
	token(exitOK, "create", "--system", "--name", "anna", "--replace", "--roles", "read,moderate,admin")
	token(exitOK, "create", "--tenant", "7", "--name", "anna")
	if _, said := token(exitError, "create", "--system", "--name", "anna"); !strings.Contains(said,
		`the system already has a token named "anna"`) {
		t.Error(said)
	}
	for _, args := range [][]string{{"create", "--system", "--tenant", "7", "--name", "x"}, {"create", "--system"},
		{"revoke", "--system", "--tenant", "7", "--name", "x"}, {"list", "--system", "--tenant", "7"}} {
		token(exitInput, args...)
	}
	if list, _ := token(exitOK, "list", "--system"); strings.Count(list, "anna") != 2 || strings.Count(list, " system ") != 2 {
		t.Errorf("the system's tokens: %s", list)
	}
	if list, _ := token(exitOK, "list"); strings.Count(list, "anna") != 3 {
		t.Errorf("all tokens: %s", list)
	}
	code, whose, stderr := run(t, env, made, "token", "identify", "--json")
	if code != exitOK || !strings.Contains(whose, `"tenant_id":"0"`) {
		t.Errorf("identify: %d %s%s", code, whose, stderr)
	}
	if said, _ := token(exitOK, "revoke", "--yes", "--system", "--name", "anna"); !strings.Contains(said,
		`Token "anna" of the system was revoked at`) {
		t.Error(said)
	}
	if list, _ := token(exitOK, "list", "--tenant", "7"); strings.Contains(list, "revoked") {
		t.Errorf("the tenant's token of the same name: %s", list)
	}
}

func TestTokensAreReplacedListedAndRevoked(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	pool := db.Pool(t, postgres.RoleAPI)
	ok := func(args ...string) (stdout, stderr string) {
		t.Helper()
		code, stdout, stderr := run(t, env, "", append([]string{"token"}, args...)...)
		if code != exitOK {
			t.Fatalf("token %v: exit code %d: %s", args, code, stderr)
		}
		return stdout, stderr
	}
	first, _ := ok("create", "--tenant", "7", "--name", "importer", "--rate-write", "50/10s")
	ok("create", "--tenant", "8", "--name", "importer")
	second, said := ok("create", "--tenant", "7", "--name", "importer", "--replace", "--overlap", "1h")
	if !strings.Contains(said, "The replaced token expires at 2") {
		t.Errorf("when the first one ends: %s", said)
	}
	for _, token := range []string{first, second} {
		if p, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(strings.TrimSpace(token))); err != nil ||
			p.Name != "importer" {
			t.Errorf("%+v, %v", p, err)
		}
	}
	table, _ := ok("list")
	lines, _ := ok("list", "--tenant", "7", "--json")
	var states []string
	for line := range strings.Lines(lines) {
		var l listedToken
		if err := json.Unmarshal([]byte(line), &l); err != nil || l.TenantID != 7 || l.Revoked != nil || !l.Works {
			t.Errorf("%s: %v", line, err)
		}
		state := "current "
		if l.Replaced != nil {
			state = "replaced "
		}
		state += l.RateWrite.String()
		states = append(states, state)
	}
	if !slices.Equal(states, []string{"replaced 50/10s", "current 50/10s"}) || strings.Count(table, "importer") != 3 ||
		!strings.Contains(table, "replaced, until 2") {
		t.Errorf("%v\n%s", states, table)
	}
	if strings.Contains(table+lines, "tdg_") || regexp.MustCompile(`[0-9a-f]{32}`).MatchString(table+lines) {
		t.Errorf("a token or its hash is listed:\n%s%s", table, lines)
	}
	revoked, _ := ok("revoke", "--yes", "--tenant", "7", "--name", "importer")
	again, _ := ok("revoke", "--tenant", "7", "--name", "importer", "--json")
	var r revokedToken
	if err := json.Unmarshal([]byte(again), &r); err != nil || r.Ended != 0 || !strings.Contains(revoked, utc(&r.Revoked)) {
		t.Errorf("%v: %s%s", err, revoked, again)
	}
	for _, token := range []string{first, second} {
		if _, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(strings.TrimSpace(token))); !errors.Is(err,
			tokens.ErrUnauthenticated) {
			t.Errorf("a revoked token: %v", err)
		}
	}
	if table, _ := ok("list", "--tenant", "7"); strings.Count(table, "revoked 2") != 2 {
		t.Errorf("two are revoked:\n%s", table)
	}
	if code, _, stderr := run(t, env, "", "token", "revoke", "--tenant", "7", "--name", "nobody"); code != exitError ||
		!strings.Contains(stderr, `no token named "nobody"`) {
		t.Errorf("a token that never was: exit code %d: %s", code, stderr)
	}
	if code, _, _ := run(t, env, "", "token", "revoke", "--tenant", "7"); code != exitInput {
		t.Errorf("no name: exit code %d", code)
	}
}

// TestALeakedTokenIsIdentifiedAndNotShown identifies tokens in every state, from a pipe and from a
// terminal, but never from an argument.
func TestALeakedTokenIsIdentifiedAndNotShown(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	create := func(args ...string) string {
		t.Helper()
		code, stdout, stderr := run(t, env, "", append([]string{"token", "create", "--tenant", "7"}, args...)...)
		token := strings.TrimSpace(stdout)
		if code != exitOK || !strings.Contains(stderr, tokens.Fingerprint(token)) {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		return token
	}
	replaced, revoked, expired := create("--name", "importer"), create("--name", "gone"), create("--name", "old", "--expires", "1h")
	current := create("--name", "importer", "--replace")
	if code, _, stderr := run(t, env, "", "token", "revoke", "--tenant", "7", "--name", "gone", "--yes"); code != exitOK {
		t.Fatal(stderr)
	}
	if _, err := db.Pool(t, postgres.RoleSystem).Exec(t.Context(),
		`UPDATE api_tokens SET created_at = now() - interval '3 days', expires_at = now() - interval '2 days'
		 WHERE name = 'old'`); err != nil {
		t.Fatal(err)
	}
	nobodys := tokens.New()
	silent := func(token, said string) {
		t.Helper()
		hash := tokens.HashOf(token)
		if strings.Contains(said, token) || strings.Contains(said, token[5:20]) || strings.Contains(said, hex.EncodeToString(hash[:])) {
			t.Errorf("the token or its hash is shown: %s", said)
		}
	}
	list, _ := func() (string, string) { _, stdout, stderr := run(t, env, "", "token", "list"); return stdout, stderr }()
	for what, c := range map[string]struct {
		token, state string
		code         int
	}{
		"the current one": {current, "  active  ", exitOK}, "a replaced one": {replaced, "  replaced, until 2", exitOK},
		"a revoked one":  {revoked, "  revoked 2", exitOK},
		"an expired one": {expired, "  expired 2", exitOK}, "nobody's": {nobodys, "never created that token", exitError},
	} {
		for _, input := range []string{c.token, c.token + "\n", "  bearer " + c.token + "\r\nmore\n"} {
			code, stdout, stderr := run(t, env, input, "token", "identify")
			if code != c.code || !strings.Contains(stdout+stderr, c.state) ||
				code == exitOK && (strings.Count(stdout, "\n") != 2 || !strings.Contains(stdout, tokens.Fingerprint(c.token)+"  7  ") ||
					!strings.Contains(list, tokens.Fingerprint(c.token))) {
				t.Errorf("%s: exit code %d\n%s%s\n%s", what, code, stdout, stderr, list)
			}
			silent(c.token, stdout+stderr)
		}
		code, stdout, stderr := run(t, env, "", "token", "identify", c.token)
		if code != exitInput || !strings.Contains(stderr, "never") && !strings.Contains(stderr, "from its input") {
			t.Errorf("as an argument: exit code %d\n%s%s", code, stdout, stderr)
		}
		silent(c.token, stdout+stderr)
	}
	if code, _, stderr := run(t, env, "\n", "token", "identify"); code != exitInput || !strings.Contains(stderr, "no token in the input") {
		t.Errorf("an empty line: exit code %d: %s", code, stderr)
	}
	_, stdout, _ := run(t, env, current+"\n", "token", "identify", "--json")
	var l listedToken
	if err := json.Unmarshal([]byte(stdout), &l); err != nil || l.Fingerprint != tokens.Fingerprint(current) ||
		l.Name != "importer" || !l.Works {
		t.Errorf("%s: %v", stdout, err)
	}

	// A person is asked for the token.
	var out, prompt strings.Builder
	if code := Execute(t.Context(), []string{"token", "identify"},
		Process{Stdin: typed(current), Stdout: &out, Stderr: &prompt, Env: envconfig.MapLookuper(env)}); code != exitOK ||
		prompt.String() != "Token: \n" || !strings.Contains(out.String(), "importer") {
		t.Errorf("at a terminal: exit code %d\n%s%s", code, out.String(), prompt.String())
	}
	silent(current, out.String()+prompt.String())
}

// typed is a keyboard at which somebody types a line. A read that would show it fails.
type typed string

func (k typed) ReadPassword() ([]byte, error) { return []byte(k), nil }

func (typed) Read([]byte) (int, error) { return 0, errors.New("the line is shown") }

func TestParseExpires(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	for s, want := range map[string]time.Time{
		"24h":                       now.AddDate(0, 0, 1),
		"2030-02-01":                now.AddDate(0, 1, 0),
		"2030-01-01T03:00:00+02:00": now.Add(time.Hour),
	} {
		if got, err := parseExpires(s, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: %s, %v, want %s", s, got, err, want)
		}
	}
}
