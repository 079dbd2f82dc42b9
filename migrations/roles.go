package migrations

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// ErrForeign reports a schema that has tables of others. Choose another one.
var ErrForeign = errors.New("migrations: the schema has tables of others; choose another with --schema")

// NeedsError reports rights that the login does not have. Nothing has changed.
type NeedsError struct {
	Login      string
	Statements []string // that an administrator runs in the database of the tables
}

func (e *NeedsError) Error() string {
	return fmt.Sprintf("the login %s lacks rights, and nothing has changed; an administrator must run in this database:\n\n%s\n\n"+
		"Then run this command again.", e.Login, strings.Join(e.Statements, ";\n")+";")
}

// roles returns the roles that the set's tables name.
func (s Set) roles() []postgres.Role {
	switch s {
	case Outbox:
		return []postgres.Role{postgres.RoleSystem, postgres.RoleRelay, postgres.RoleReader, postgres.RoleWriter,
			postgres.RoleUpstream}
	case Truth:
		return append(Outbox.roles(), postgres.RoleAPI)
	case Projections:
		return []postgres.Role{postgres.RoleSystem, postgres.RoleConsumer, postgres.RoleReader, postgres.RoleAPI}
	}
	return nil
}

// readers returns the roles that check the versions of the set's tables.
func (s Set) readers() []postgres.Role {
	return slices.DeleteFunc(s.roles(), func(r postgres.Role) bool { return r == postgres.RoleWriter || r == postgres.RoleUpstream })
}

func list(roles []postgres.Role) string {
	var names []string
	for _, r := range roles {
		names = append(names, string(r))
	}
	return strings.Join(names, ", ")
}

// needsSQL reads the statements that are missing before the migrations can run. Roles are global to
// the server: another database of it may have made them already. tidings_system may do everything
// that the relay, the consumers and the reader may. The login acts as the system and as the API.
// The schema must be the login's own, so that the login can grant and revoke rights on it.
const needsSQL = `
SELECT statement FROM (
  SELECT 1, format('CREATE ROLE %I NOLOGIN', r) FROM unnest(@roles::text[]) r WHERE to_regrole(r) IS NULL
  UNION ALL
  SELECT 2, format('GRANT %I TO tidings_system', r) FROM unnest(@roles::text[]) r
   WHERE r IN ('tidings_relay', 'tidings_consumer', 'tidings_reader')
     AND CASE WHEN to_regrole(r) IS NULL OR to_regrole('tidings_system') IS NULL THEN true
              ELSE NOT pg_has_role(to_regrole('tidings_system'), to_regrole(r), @acts) END
  UNION ALL
  SELECT 3, format('GRANT %I TO %I', r, current_user) FROM unnest(@roles::text[]) r
   WHERE r IN ('tidings_system', 'tidings_api')
     AND CASE WHEN to_regrole(r) IS NULL THEN NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
              ELSE NOT pg_has_role(to_regrole(r), @acts) END
  UNION ALL
  SELECT 4, format('CREATE SCHEMA %I AUTHORIZATION %I', @schema::text, current_user)
   WHERE @schema <> '' AND to_regnamespace(quote_ident(@schema)) IS NULL
  UNION ALL
  SELECT 5, format('ALTER SCHEMA %I OWNER TO %I', nspname, current_user) FROM pg_namespace
   WHERE nspname = @schema AND NOT pg_has_role(nspowner, 'USAGE')
) AS missing (step, statement) ORDER BY step, statement`

// foreignSQL counts the relations of a schema that has no migrations of ours.
const foreignSQL = `
SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND NOT EXISTS (SELECT FROM pg_class m WHERE m.relnamespace = n.oid AND m.relname LIKE 'tidings\_%\_migrations')`

// prepare makes the roles and the schema, if they are missing, in one transaction. It
// returns a *NeedsError if the login may not, and ErrForeign if the schema has tables of others.
func prepare(ctx context.Context, conn *pgx.Conn, roles []postgres.Role, schema string) error {
	var foreign int
	if err := conn.QueryRow(ctx, foreignSQL, schema).Scan(&foreign); err != nil {
		return err
	}
	if foreign > 0 {
		return fmt.Errorf("%w: %s", ErrForeign, schema)
	}
	acts := "MEMBER"
	var version int
	if err := conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int`).Scan(&version); err != nil {
		return err
	}
	if version >= 160000 {
		acts = "SET" // who creates a role there is a member, and may not act as it
	}
	for {
		rows, _ := conn.Query(ctx, needsSQL, pgx.StrictNamedArgs{"roles": roles, "acts": acts, "schema": schema})
		missing, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil || len(missing) == 0 {
			return err
		}
		err = pgx.BeginFunc(ctx, conn, func(pgx.Tx) error { return run(ctx, conn, strings.Join(missing, ";\n")) })
		switch {
		case err == nil:
			return nil
		case postgres.IsPermission(err):
			return &NeedsError{conn.Config().User, missing}
		case !postgres.IsDuplicate(err):
			return errors.Join(errors.New("make the roles"), err)
		}
		// Another database's migration has made a role meanwhile.
	}
}
