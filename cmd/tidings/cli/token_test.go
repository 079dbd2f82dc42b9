package cli

import (
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/tokens"
)

func TestTokenCreate(t *testing.T) {
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

	code, stdout, stderr = run(t, env, "", "token", "create", "--tenant", "7", "--name", "console", "--roles", "read,moderate,admin", "--expires", "720h", "--json")
	var made createdToken
	if err := json.Unmarshal([]byte(stdout), &made); code != exitOK || err != nil {
		t.Fatalf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	if p, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(made.Token)); err != nil || !slices.Equal(p.Roles, []string{"read", "moderate", "admin"}) || made.Expires == nil {
		t.Errorf("%+v, %v; %+v", p, err, made)
	}

	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"a name that is taken": {[]string{"--tenant", "7", "--name", "importer"}, exitError, `tenant 7 has a token named "importer" already`},
		"no tenant":            {[]string{"--name", "x"}, exitInput, "wants --tenant"},
		"a tenant of 0":        {[]string{"--tenant", "0", "--name", "x"}, exitInput, "wants --tenant"},
		"an unknown role":      {[]string{"--tenant", "7", "--name", "x", "--roles", "root"}, exitInput, `role "root"`},
		"an end in the past":   {[]string{"--tenant", "7", "--name", "x", "--expires", "2001-01-01"}, exitInput, "has passed already"},
		"a rate of nothing":    {[]string{"--tenant", "7", "--name", "x", "--rate-read", "0/1s"}, exitInput, `--rate-read`},
		"an overlap alone":     {[]string{"--tenant", "7", "--name", "x", "--overlap", "1h"}, exitInput, "--overlap goes with --replace"},
		"nothing to replace":   {[]string{"--tenant", "7", "--name", "x", "--replace"}, exitError, `no token named "x" that works`},
		"no end at all":        {[]string{"--tenant", "7", "--name", "x", "--expires", "soon"}, exitInput, `"soon" is no duration`},
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

func TestTokensAreReplacedListedAndRevoked(t *testing.T) {
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
	if !strings.Contains(said, "The token that it replaces ends 2") {
		t.Errorf("when the first one ends: %s", said)
	}
	for _, token := range []string{first, second} {
		if p, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(strings.TrimSpace(token))); err != nil || p.Name != "importer" {
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
	if !slices.Equal(states, []string{"replaced 50/10s", "current 50/10s"}) || strings.Count(table, "importer") != 3 || !strings.Contains(table, "replaced, until 2") {
		t.Errorf("%v\n%s", states, table)
	}
	if strings.Contains(table+lines, "tdg_") || regexp.MustCompile(`[0-9a-f]{32}`).MatchString(table+lines) {
		t.Errorf("a token or its hash is listed:\n%s%s", table, lines)
	}
	revoked, _ := ok("revoke", "--tenant", "7", "--name", "importer")
	again, _ := ok("revoke", "--tenant", "7", "--name", "importer", "--json")
	var r revokedToken
	if err := json.Unmarshal([]byte(again), &r); err != nil || r.Ended != 0 || !strings.Contains(revoked, utc(&r.Revoked)) {
		t.Errorf("%v: %s%s", err, revoked, again)
	}
	for _, token := range []string{first, second} {
		if _, _, err := tokens.NewLookup(pool).Find(t.Context(), tokens.HashOf(strings.TrimSpace(token))); !errors.Is(err, tokens.ErrUnauthenticated) {
			t.Errorf("a revoked token: %v", err)
		}
	}
	if table, _ := ok("list", "--tenant", "7"); strings.Count(table, "revoked 2") != 2 {
		t.Errorf("two are revoked:\n%s", table)
	}
	if code, _, stderr := run(t, env, "", "token", "revoke", "--tenant", "7", "--name", "nobody"); code != exitError || !strings.Contains(stderr, `no token named "nobody"`) {
		t.Errorf("a token that never was: exit code %d: %s", code, stderr)
	}
	if code, _, _ := run(t, env, "", "token", "revoke", "--tenant", "7"); code != exitInput {
		t.Errorf("no name: exit code %d", code)
	}
}

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
