package cli

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

func TestTokenCreate(t *testing.T) {
	db := testkit.Postgres(t)
	env := map[string]string{"DATABASE_URL": db.URL}
	s := store.New(db.Pool(t, postgres.RoleAPI), nil)

	code, stdout, stderr := run(t, env, "", "token", "create", "--tenant", "7", "--name", "importer")
	token := strings.TrimSpace(stdout)
	if code != exitOK || strings.Contains(stderr, token) {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	p, err := s.Authenticate(t.Context(), token)
	if err != nil || p.TenantID != 7 || p.Name != "importer" || !slices.Equal(p.Roles, []string{"read", "write"}) {
		t.Errorf("%+v, %v", p, err)
	}

	code, stdout, stderr = run(t, env, "", "token", "create", "--tenant", "7", "--name", "console", "--roles", "read,moderate,admin", "--expires", "720h", "--json")
	var made createdToken
	if err := json.Unmarshal([]byte(stdout), &made); code != exitOK || err != nil {
		t.Fatalf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	if p, err := s.Authenticate(t.Context(), made.Token); err != nil || !slices.Equal(p.Roles, []string{"read", "moderate", "admin"}) || made.Expires == nil {
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
		"no end at all":        {[]string{"--tenant", "7", "--name", "x", "--expires", "soon"}, exitInput, `"soon" is no duration`},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(t, env, "", append([]string{"token", "create"}, c.args...)...)
			if code != c.code || stdout != "" || !strings.Contains(stderr, c.says) {
				t.Errorf("exit code %d, %q, %q: want %d and %q", code, stdout, stderr, c.code, c.says)
			}
		})
	}
	if _, err := s.Authenticate(t.Context(), "x"); !errors.Is(err, store.ErrUnauthenticated) {
		t.Errorf("a token that nobody made: %v", err)
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
