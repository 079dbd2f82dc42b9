package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/migrations"
)

func TestALoginHasTheRoleAndThePasswordOfTheLastFile(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	ctx, owner := t.Context(), db.Pool(t, postgres.RoleOwner)
	name := fmt.Sprintf("ann_%d", time.Now().UnixNano()) // logins belong to the server, which other tests use too
	t.Cleanup(func() {
		if _, err := owner.Exec(context.WithoutCancel(ctx), `DROP ROLE IF EXISTS `+name); err != nil {
			t.Error(err)
		}
	})
	login := func(password string) error {
		u, err := url.Parse(db.URL)
		if err != nil {
			t.Fatal(err)
		}
		u.User = url.UserPassword(name, password)
		conn, err := pgx.Connect(ctx, u.String())
		if err == nil {
			err = conn.Close(ctx)
		}
		return err
	}
	for _, line := range []string{"system first-password", "serve serves-password", "api second,pass%word$"} {
		role, password, _ := strings.Cut(line, " ")
		want := "tidings_" + role
		switch role {
		case "system":
			want = "pg_monitor " + want
		case "serve":
			want = "pg_monitor tidings_api tidings_system"
		}
		all, err := migrations.ReadLogins(strings.NewReader("# who\n\n" + name + " " + line + "\n"))
		if err != nil {
			t.Fatal(err)
		}
		if made, err := migrations.MakeLogins(ctx, db.URL, all); err != nil || !cmp.Equal(made, []string{name}) {
			t.Fatalf("%v, %v", made, err)
		}
		if err := login(password); err != nil {
			t.Error(err)
		}
		var roles string
		if err := owner.QueryRow(ctx, `SELECT string_agg(roleid::regrole::text, ' ' ORDER BY roleid::regrole::text) FROM pg_auth_members
			WHERE member = $1::regrole`, name).Scan(&roles); err != nil || roles != want {
			t.Errorf("the login is a member of %s, %v", roles, err)
		}
	}
	if err := login("first-password"); !postgres.IsLogin(err) {
		t.Errorf("with the old password: %v", err)
	}
	if _, err := owner.Exec(ctx, `ALTER ROLE `+name+` CREATEROLE`); err != nil {
		t.Fatal(err)
	}
	for _, special := range []string{name, "postgres"} {
		if _, err := migrations.MakeLogins(ctx, db.URL, []migrations.Login{{Name: special, Roles: []postgres.Role{postgres.RoleAPI},
			Password: "another-password"}}); !errors.Is(err, migrations.ErrLogin) {
			t.Errorf("%s: %v", special, err)
		}
	}
	if made, err := migrations.MakeLogins(ctx, db.URL,
		[]migrations.Login{{Name: "nobody", Roles: []postgres.Role{"tidings_absent"}, Password: "another-password"}}); err != nil ||
		made != nil {
		t.Errorf("a role that this server does not have: %v, %v", made, err)
	}
}

func TestALineThatIsNoLoginIsRefusedWithoutItsPassword(t *testing.T) {
	for name, text := range map[string]string{
		"two words":               "ann topsecret",
		"four words":              "ann api topsecret more",
		"no such role":            "ann admin topsecret",
		"the owner's role":        "ann owner topsecret",
		"a name in capitals":      "Ann api topsecret",
		"a name like a role":      "tidings_api api topsecret",
		"a short password":        "ann api top",
		"a password beyond ASCII": "ann api topsecretä",
		"a name that comes twice": "ann api topsecret\nann relay topsecret",
	} {
		if all, err := migrations.ReadLogins(strings.NewReader(text)); !errors.Is(err, migrations.ErrLogin) ||
			strings.Contains(err.Error(), "top") {
			t.Errorf("%s: %v, %v", name, all, err)
		}
	}
}
