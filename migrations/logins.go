package migrations

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// Login is a PostgreSQL user with the rights of its roles.
type Login struct {
	Name     string
	Roles    []postgres.Role
	Password string
}

// loginRoles are the roles that a login may have, by their names in ReadLogins.
var loginRoles = map[string][]postgres.Role{
	"api": {postgres.RoleAPI}, "relay": {postgres.RoleRelay}, "consumer": {postgres.RoleConsumer}, "reader": {postgres.RoleReader},
	"system": {postgres.RoleSystem}, "writer": {postgres.RoleWriter},
	"upstream": {postgres.RoleUpstream},
	"serve":    {postgres.RoleAPI, postgres.RoleSystem}, // for `tidings serve`, whose parts act as these and as roles within them
}

var (
	loginName     = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)
	loginPassword = regexp.MustCompile(`^[!-~]{8,512}$`) // characters that SCRAM does not normalize
)

// ErrLogin reports a login that cannot be made as requested.
var ErrLogin = errors.New("migrations: the login cannot be made")

// ReadLogins reads lines of NAME ROLE PASSWORD. It skips empty lines and lines that begin with #.
// Its errors contain no password.
func ReadLogins(r io.Reader) (all []Login, err error) {
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		f := strings.Fields(lines.Text())
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		bad := func(format string, args ...any) ([]Login, error) {
			return nil, fmt.Errorf("%w: line %d: %s", ErrLogin, n, fmt.Sprintf(format, args...))
		}
		if len(f) != 3 {
			return bad("want NAME ROLE PASSWORD")
		}
		roles, known := loginRoles[f[1]]
		switch {
		case !loginName.MatchString(f[0]) || strings.HasPrefix(f[0], "tidings_"):
			return bad("the name is %.80q: want 1 to 63 of a-z, 0-9 and _, beginning with a letter and not with tidings_", f[0])
		case !known:
			return bad("the role is %.80q: want api, relay, consumer, reader, system, writer, upstream or serve", f[1])
		case !loginPassword.MatchString(f[2]):
			return bad("the password of %s: want 8 to 512 printable ASCII characters", f[0])
		case slices.ContainsFunc(all, func(l Login) bool { return l.Name == f[0] }):
			return bad("%s occurs twice", f[0])
		}
		all = append(all, Login{f[0], roles, f[2]})
	}
	return all, lines.Err()
}

// loginSQL reports whether the roles exist, and for the login: whether it exists, whether it has
// more rights than a plain login, and its other Tidings roles. Its last column reports whether this
// session may grant pg_monitor.
const loginSQL = `
SELECT (SELECT count(*) FROM pg_roles WHERE rolname = ANY($2::text[])) = cardinality($2::text[]),
       EXISTS (SELECT FROM pg_roles WHERE rolname = $1),
       coalesce((SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls OR oid = current_user::regrole
                   FROM pg_roles WHERE rolname = $1), false),
       ARRAY(SELECT g.rolname::text FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid JOIN pg_roles l ON l.oid = m.member
              WHERE l.rolname = $1 AND g.rolname LIKE 'tidings\_%' AND g.rolname <> ALL($2::text[])),
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)`

// MakeLogins makes the logins on the server of url, or gives existing ones their password and their
// roles. It skips logins whose roles the server does not have, because the truth and the
// projections may be on two servers. It returns the names of the others. The server gets passwords
// as SCRAM verifiers, so no log contains one. A superuser also makes logins of the role system
// members of pg_monitor, so that commands and the archiver see which sessions block others.
// ErrLogin: a login of that name is a superuser or has other rights than to log in; it does not
// change.
func MakeLogins(ctx context.Context, url string, all []Login) (made []string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(x'74646c67'::bigint)`); err != nil { // "tdlg"
			return err
		}
		for _, l := range all {
			is, err := makeLogin(ctx, tx, l)
			if err != nil {
				return fmt.Errorf("make the login %s: %w", l.Name, err)
			}
			if is {
				made = append(made, l.Name)
			}
		}
		return nil
	})
	return made, err
}

func makeLogin(ctx context.Context, tx pgx.Tx, l Login) (made bool, err error) {
	var roleIs, loginIs, special, super bool
	var others []string
	if err := tx.QueryRow(ctx, loginSQL, l.Name, l.Roles).Scan(&roleIs, &loginIs, &special, &others, &super); err != nil || !roleIs {
		return false, err
	}
	if special {
		return false, fmt.Errorf("%w: %s has other rights than to log in; choose another name", ErrLogin, l.Name)
	}
	name, verb := pgx.Identifier{l.Name}.Sanitize(), "CREATE"
	if loginIs {
		verb = "ALTER"
	}
	verifier, err := scram(l.Password)
	if err != nil {
		return false, err
	}
	statements := []string{fmt.Sprintf(`%s ROLE %s LOGIN PASSWORD '%s'`, verb, name, verifier)}
	for _, role := range others {
		statements = append(statements, fmt.Sprintf(`REVOKE %s FROM %s`, pgx.Identifier{role}.Sanitize(), name))
	}
	for _, role := range l.Roles {
		statements = append(statements, fmt.Sprintf(`GRANT %s TO %s`, pgx.Identifier{string(role)}.Sanitize(), name))
	}
	switch {
	case super && slices.Contains(l.Roles, postgres.RoleSystem):
		statements = append(statements, `GRANT pg_monitor TO `+name)
	case super:
		statements = append(statements, `REVOKE pg_monitor FROM `+name)
	}
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return false, err
		}
	}
	return true, nil
}

// scram returns the verifier that PostgreSQL stores for a password (RFC 5803, RFC 7677).
func scram(password string) (string, error) {
	const rounds = 4096
	salt := make([]byte, 16)
	rand.Read(salt)
	salted, err := pbkdf2.Key(sha256.New, password, salt, rounds, sha256.Size)
	if err != nil {
		return "", err
	}
	key := func(text string) []byte {
		mac := hmac.New(sha256.New, salted)
		mac.Write([]byte(text))
		return mac.Sum(nil)
	}
	stored := sha256.Sum256(key("Client Key"))
	b64 := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("SCRAM-SHA-256$%d:%s$%s:%s", rounds, b64(salt), b64(stored[:]), b64(key("Server Key"))), nil
}

// UpstreamLogin is a role that may append the events of upstreams that name it.
type UpstreamLogin struct {
	Name     string   `json:"name"`
	Password string   `json:"password,omitempty"` // of a login that the call creates
	SQL      []string `json:"sql,omitempty"`      // what somebody with more rights must run, because this login may not
}

// MakeUpstreamLogins lets the roles append events of upstreams. For each role that does not exist
// it creates a login with a random password. It leaves the password and the other rights of an
// existing one. For a role that the login of url may not create or grant, it changes nothing and
// returns the SQL.
//
// It calls show before it commits, and changes nothing if show returns an error. So a login whose
// password nobody has seen does not exist, even if the process dies.
func MakeUpstreamLogins(ctx context.Context, url string, names []string, show func([]UpstreamLogin) error) (
	made []UpstreamLogin, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		for _, name := range names {
			l, err := makeUpstreamLogin(ctx, tx, name)
			if err != nil {
				return fmt.Errorf("make the login %s: %w", name, err)
			}
			made = append(made, l)
		}
		return show(made)
	})
	return made, err
}

func makeUpstreamLogin(ctx context.Context, tx pgx.Tx, name string) (l UpstreamLogin, err error) {
	l.Name = name
	var there, member bool
	if err := tx.QueryRow(ctx, upstreamLoginSQL, name).Scan(&there, &member); err != nil || member {
		return l, err
	}
	quoted, password := pgx.Identifier{name}.Sanitize(), rand.Text()
	verifier, err := scram(password)
	if err != nil {
		return l, err
	}
	var statements []string
	if !there {
		statements = append(statements, fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD '%s'`, quoted, verifier))
	}
	statements = append(statements, `GRANT tidings_upstream TO `+quoted)
	err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		for _, sql := range statements {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case postgres.IsPermission(err):
		if !there {
			statements[0] = fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD '...';`, quoted)
		}
		statements[len(statements)-1] += ";"
		l.SQL = statements
		return l, nil
	case err == nil && !there:
		l.Password = password
	}
	return l, err
}

// upstreamLoginSQL reports whether the role exists, and whether it may append events already.
const upstreamLoginSQL = `
SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1),
       EXISTS (SELECT FROM pg_roles WHERE rolname = $1 AND pg_has_role(oid, 'tidings_upstream', 'USAGE'))`
