package tokens_test

import (
	"errors"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/store"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type fixture struct{ api, system *pgxpool.Pool }

func open(t *testing.T) fixture {
	db := testkit.Postgres(t)
	return fixture{db.Pool(t, postgres.RoleAPI), db.Pool(t, postgres.RoleSystem)}
}

func TestTokens(t *testing.T) {
	f := open(t)
	ctx := t.Context()
	token, err := tokens.Create(ctx, f.system, 3, "importer", []string{tokens.RoleRead, tokens.RoleWrite}, time.Time{})
	if err != nil || !regexp.MustCompile(`^tdg_[A-Za-z0-9_-]{43}$`).MatchString(token) {
		t.Fatalf("token %q, %v", token, err)
	}
	want := tokens.Principal{TenantID: 3, Name: "importer", Roles: []string{tokens.RoleRead, tokens.RoleWrite}, Limits: "importer"}
	if got, _, err := tokens.NewLookup(f.api).Find(ctx, tokens.HashOf(token)); err != nil || !cmp.Equal(got, want) ||
		!got.Has(tokens.RoleWrite) || got.Has(tokens.RoleAdmin) {
		t.Errorf("authenticate: %+v, %v", got, err)
	}
	refused := func(name, token string) {
		t.Helper()
		if _, _, err := tokens.NewLookup(f.api).Find(ctx, tokens.HashOf(token)); !errors.Is(err, tokens.ErrUnauthenticated) {
			t.Errorf("%s: %v, want ErrUnauthenticated", name, err)
		}
	}
	refused("an unknown token", token+"x")
	refused("nothing", "")
	if _, err := tokens.Create(ctx, f.system, 3, "importer", []string{tokens.RoleRead}, time.Time{}); !errors.Is(err, tokens.ErrExists) {
		t.Errorf("a name twice: %v", err)
	}
	old, err := tokens.Create(ctx, f.system, 3, "old", []string{tokens.RoleRead}, time.Now().Add(-time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	refused("an expired token", old)
	for name, create := range map[string]func() error{
		"no role": func() error { _, err := tokens.Create(ctx, f.system, 3, "a", nil, time.Time{}); return err },
		"unknown role": func() error {
			_, err := tokens.Create(ctx, f.system, 3, "a", []string{"root"}, time.Time{})
			return err
		},
		"no name": func() error {
			_, err := tokens.Create(ctx, f.system, 3, "", tokens.Roles(), time.Time{})
			return err
		},
		"no tenant": func() error {
			_, err := tokens.Create(ctx, f.system, -1, "a", tokens.Roles(), time.Time{})
			return err
		},
		"a blank token": func() error { return tokens.Ensure(ctx, f.system, 3, "a", "a b", tokens.Roles()) },
	} {
		if err := create(); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	for range 2 {
		if err := tokens.Ensure(ctx, f.system, 1, "dev", "first", tokens.Roles()); err != nil {
			t.Fatal(err)
		}
	}
	if p, _, err := tokens.NewLookup(f.api).Find(ctx, tokens.HashOf("first")); err != nil || p.TenantID != 1 {
		t.Errorf("ensured: %+v, %v", p, err)
	}
	if err := tokens.Ensure(ctx, f.system, 1, "dev", "second", tokens.Roles()); err != nil {
		t.Fatal(err)
	}
	refused("a replaced token", "first")
	if err := tokens.Ensure(ctx, f.system, 1, "other", "second", tokens.Roles()); !errors.Is(err, tokens.ErrExists) {
		t.Errorf("a token under another name: %v", err)
	}
	if _, _, err := tokens.Revoke(ctx, f.system, 1, "dev"); err != nil {
		t.Fatal(err)
	}
	if err := tokens.Ensure(ctx, f.system, 1, "dev", "first", tokens.Roles()); err != nil {
		t.Errorf("a token that was revoked before: %v", err)
	}
	accepted(t, f, "first")
	refused("a replaced token", "second")
}

func accepted(t *testing.T, f fixture, all ...string) {
	t.Helper()
	for _, token := range all {
		if p, _, err := tokens.NewLookup(f.api).Find(t.Context(), tokens.HashOf(token)); err != nil {
			t.Errorf("a token that works: %+v, %v", p, err)
		}
	}
}

func TestATokenIsReplacedWithoutAnOutage(t *testing.T) {
	f := open(t)
	ctx := t.Context()
	spec := tokens.Spec{TenantID: 3, Name: "importer", Roles: []string{tokens.RoleWrite}, ReadRate: &tokens.Rate{},
		WriteRate: &tokens.Rate{N: 5, Window: time.Minute}}
	issue := func() string {
		t.Helper()
		made, err := tokens.Issue(ctx, f.system, spec)
		if err != nil {
			t.Fatal(err)
		}
		return made.Token
	}
	refused := func(all ...string) {
		t.Helper()
		for _, token := range all {
			if _, _, err := tokens.NewLookup(f.api).Find(ctx, tokens.HashOf(token)); !errors.Is(err, tokens.ErrUnauthenticated) {
				t.Errorf("a token that ended: %v", err)
			}
		}
	}
	first := issue()
	if p, _, err := tokens.NewLookup(f.api).Find(ctx, tokens.HashOf(first)); err != nil || !p.ReadRate.Off() ||
		*p.WriteRate != *spec.WriteRate {
		t.Errorf("its rates: %+v, %v", p, err)
	}
	spec = tokens.Spec{TenantID: 3, Name: "importer", Replace: true, Overlap: time.Hour}
	second := issue()
	accepted(t, f, first, second)
	if p, _, err := tokens.NewLookup(f.api).Find(ctx, tokens.HashOf(second)); err != nil ||
		!cmp.Equal(p.Roles, []string{tokens.RoleWrite}) || !p.ReadRate.Off() || p.WriteRate.N != 5 {
		t.Errorf("the new token lacks the roles and rates of the old one: %+v, %v", p, err)
	}
	if _, err := tokens.Issue(ctx, f.system, tokens.Spec{TenantID: 4, Name: "importer", Replace: true}); !errors.Is(err,
		tokens.ErrUnknown) {
		t.Errorf("another tenant's: %v", err)
	}
	spec.Roles = tokens.Roles()
	if _, err := tokens.Create(ctx, f.system, 3, "importer", spec.Roles, time.Time{}); !errors.Is(err, tokens.ErrExists) {
		t.Errorf("a third beside them: %v", err)
	}
	spec.Overlap = 0
	third := issue()
	accepted(t, f, first, third)
	refused(second)

	// Several replacements at once may all succeed, one after the other: the name has one current
	// token.
	spec.Overlap = time.Hour
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := tokens.Issue(ctx, f.system, spec); err != nil && !errors.Is(err, tokens.ErrExists) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	list, err := tokens.List(ctx, f.system, 3)
	if err != nil {
		t.Fatal(err)
	}
	current := 0
	for _, l := range list {
		if l.Replaced == nil {
			current++
		}
	}
	if current != 1 {
		t.Errorf("%d current tokens, want 1: %+v", current, list)
	}

	// Revocation ends all tokens of the name, once. Then the name is free.
	n, at, err := tokens.Revoke(ctx, f.system, 3, "importer")
	if err != nil || n != int64(len(list)) {
		t.Errorf("%d of %d ended, %v", n, len(list), err)
	}
	refused(first, third)
	if again, then, err := tokens.Revoke(ctx, f.system, 3, "importer"); err != nil || again != 0 || !then.Equal(at) {
		t.Errorf("revoked again: %d at %s, %v, want 0 at %s", again, then, err, at)
	}
	if _, _, err := tokens.Revoke(ctx, f.system, 4, "importer"); !errors.Is(err, tokens.ErrUnknown) {
		t.Errorf("another tenant's token: %v", err)
	}
	spec.Replace, spec.Expires = false, time.Now().Add(-time.Minute)
	expired := issue()
	refused(expired)
	spec.Expires = time.Time{}
	accepted(t, f, issue()) // an expired token gives way too
	refused(first, expired)
}

func TestParseRate(t *testing.T) {
	for text, want := range map[string]tokens.Rate{
		"off": {}, "1/1s": {N: 1, Window: time.Second}, "300/1m": {N: 300, Window: time.Minute},
		"9999999/99999s": {N: 9_999_999, Window: 99_999 * time.Second},
	} {
		got, err := tokens.ParseRate(text)
		if err != nil || got != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
		if back, err := tokens.ParseRate(got.String()); err != nil || back != want {
			t.Errorf("%s: %s is read as %v, %v", text, got, back, err)
		}
	}
	for _, text := range []string{"", "0/1s", "-1/1s", "1", "1/", "1/0s", "1/1500ms", "1/500ms", "10000000/1s", "1/28h", "on"} {
		if got, err := tokens.ParseRate(text); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%q: %v, %v, want ErrInvalid", text, got, err)
		}
	}
}

func TestExpiringCountsTheTokensThatSomebodyMustReplaceSoon(t *testing.T) {
	f := open(t)
	for name, c := range map[string]struct {
		made, ends string // from now
		more       string // a further change
		counts     int
	}{
		"never ends":                        {"-1 year", "infinity", "", 0},
		"ends in half a year":               {"-1 year", "180 days", "", 0},
		"ends in thirteen days":             {"-1 year", "13 days", "", 1},
		"made for thirteen days just now":   {"-1 hour", "13 days", "", 0},
		"made for four hours, ends in one":  {"-220 minutes", "20 minutes", "", 1},
		"made for four hours, ends in four": {"0 hours", "4 hours", "", 0},
		"has ended":                         {"-1 year", "-1 day", "", 0},
		"is revoked":                        {"-1 year", "13 days", "revoked_at = now()", 0},
		"is replaced":                       {"-1 year", "13 days", "replaced_at = now()", 0},
	} {
		if _, err := tokens.Create(t.Context(), f.system, 1, name, []string{tokens.RoleRead}, time.Time{}); err != nil {
			t.Fatal(err)
		}
		before, err := tokens.Expiring(t.Context(), f.system)
		if err != nil {
			t.Fatal(err)
		}
		set := `created_at = now() + $1::interval, expires_at = CASE WHEN $2 = 'infinity' THEN NULL ELSE now() + nullif($2, ` +
			`'infinity')::interval END`
		if c.more != "" {
			set += ", " + c.more
		}
		if _, err := f.system.Exec(t.Context(), `UPDATE api_tokens SET `+set+` WHERE name = $3`, c.made, c.ends, name); err != nil {
			t.Fatal(err)
		}
		if after, err := tokens.Expiring(t.Context(), f.system); err != nil || after-before != c.counts {
			t.Errorf("one that %s counts %d, %v, want %d", name, after-before, err, c.counts)
		}
	}
}

func TestATokenMakesNoMoreThanItHas(t *testing.T) {
	f := open(t)
	ctx := t.Context()
	issue := func(spec tokens.Spec) tokens.Hash {
		t.Helper()
		made, err := tokens.Issue(ctx, f.system, spec)
		if err != nil {
			t.Fatal(err)
		}
		return tokens.HashOf(made.Token)
	}
	find := func(h tokens.Hash) (tokens.Principal, error) {
		p, _, err := tokens.NewLookup(f.api).Find(ctx, h)
		return p, err
	}
	ends := time.Now().Add(time.Hour)
	admin := issue(tokens.Spec{TenantID: 3, Name: "admin", Roles: []string{tokens.RoleRead, tokens.RoleAdmin}, Expires: ends,
		WriteRate: &tokens.Rate{N: 5, Window: time.Minute}})
	stranger := issue(tokens.Spec{TenantID: 4, Name: "stranger", Roles: tokens.Roles()})
	issue(tokens.Spec{TenantID: 3, Name: "writer", Roles: []string{tokens.RoleWrite}})
	for name, c := range map[string]struct {
		spec tokens.Spec
		want error
	}{
		"a role that the maker lacks": {tokens.Spec{Name: "a", Roles: []string{tokens.RoleRead, tokens.RoleWrite},
			Maker: &admin}, tokens.ErrNotHeld},
		"a token with such a role": {tokens.Spec{Name: "writer", Replace: true, Maker: &admin}, tokens.ErrNotHeld},
		"another tenant's": {tokens.Spec{Name: "a", Roles: []string{tokens.RoleRead},
			Maker: &stranger}, tokens.ErrUnauthenticated},
	} {
		c.spec.TenantID = 3
		if _, err := tokens.Issue(ctx, f.system, c.spec); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}

	child := issue(tokens.Spec{TenantID: 3, Name: "child", Roles: []string{tokens.RoleAdmin, tokens.RoleRead}, Maker: &admin,
		WriteRate: &tokens.Rate{}})
	grandchild := issue(tokens.Spec{TenantID: 3, Name: "grandchild", Roles: []string{tokens.RoleRead}, Maker: &child,
		Expires: time.Now().AddDate(1, 0, 0)})
	// A service's token that the admin replaces becomes the admin's, with its limits, and so does
	// the admin's next one.
	issue(tokens.Spec{TenantID: 3, Name: "reader", Roles: []string{tokens.RoleRead}, WriteRate: &tokens.Rate{}})
	replaced := issue(tokens.Spec{TenantID: 3, Name: "reader", Replace: true, Overlap: time.Hour, Maker: &admin})
	next := issue(tokens.Spec{TenantID: 3, Name: "admin", Replace: true, Overlap: time.Minute, Maker: &admin})
	all := map[string]tokens.Hash{"child": child, "grandchild": grandchild, "replaced": replaced, "next": next}
	for name, h := range all {
		p, err := find(h)
		if err != nil || p.Limits != "admin" || p.WriteRate == nil || p.WriteRate.N != 5 || p.ReadRate != nil || p.Lives <= 0 ||
			p.Lives > time.Until(ends)+time.Minute {
			t.Errorf("%s: %+v, %v: want the limits and the end of its maker", name, p, err)
		}
	}
	list, err := tokens.List(ctx, f.system, 3)
	if err != nil {
		t.Fatal(err)
	}
	var ending []string
	for _, token := range tokens.RevokedWith(list, 3, "admin") {
		ending = append(ending, token.Name)
	}
	if diff := cmp.Diff([]string{"admin", "admin", "child", "grandchild", "reader"}, ending); diff != "" {
		t.Errorf("what a revocation would end (-want +got):\n%s", diff)
	}
	// A maker that is revoked while it makes a token ends that one as well.
	tx, err := f.system.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(ctx) // after the commit
	if _, err := tx.Exec(ctx, `SELECT FROM api_tokens WHERE token_hash = $1 FOR NO KEY UPDATE`, next[:]); err != nil {
		t.Fatal(err)
	}
	late := tokens.HashOf("late")
	if _, err := tx.Exec(ctx, `INSERT INTO api_tokens (token_hash, tenant_id, name, roles, made_by) VALUES ($1, 3, 'late', '{read}', $2)`,
		late[:], next[:]); err != nil {
		t.Fatal(err)
	}
	revoked := make(chan error, 1)
	go func() {
		_, _, err := tokens.Revoke(ctx, f.system, 3, "admin")
		revoked <- err
	}()
	testkit.Eventually(t, "the revocation to wait for the maker", func() (waits bool, err error) {
		err = f.system.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid IN (
			SELECT pid FROM pg_stat_activity WHERE datname = current_database()))`).Scan(&waits)
		return waits, err
	})
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-revoked; err != nil {
		t.Fatal(err)
	}
	all["late"] = late
	for name, h := range all {
		if _, err := find(h); !errors.Is(err, tokens.ErrUnauthenticated) {
			t.Errorf("%s outlives its maker: %v", name, err)
		}
	}
	if _, err := find(stranger); err != nil {
		t.Errorf("another tenant's: %v", err)
	}
	if _, err := tokens.Issue(ctx, f.system, tokens.Spec{TenantID: 3, Name: "b", Roles: []string{tokens.RoleRead}, Maker: &child}); !errors.
		Is(err, tokens.ErrUnauthenticated) {
		t.Errorf("a revoked maker: %v", err)
	}
	changed, _, _, _, err := tokens.NewLookup(f.api).Changed(ctx, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, h := range all {
		if !slices.Contains(changed, h) {
			t.Errorf("processes that know %s do not hear of its end", name)
		}
	}
}
