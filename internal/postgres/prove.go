package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var (
	// ErrUnmigrated reports a database without the roles that the migrations create. Run `tidings
	// migrate`.
	ErrUnmigrated = errors.New("postgres: the database is not migrated; run `tidings migrate`")
	// ErrPooler reports a connection pooler between this program and PostgreSQL. A pooler sends the
	// transactions of one connection to several sessions, and not all of them would act as the role
	// that separates tenants.
	ErrPooler = errors.New("postgres: the connection goes through a connection pooler (for example PgBouncer); " +
		"use the URL of PostgreSQL itself")
	// ErrUnproven reports a connection that does not act as its role, or lacks a setting: something
	// between this program and PostgreSQL drops parts of the request.
	ErrUnproven = errors.New("postgres: the connection does not have the requested role and settings")
)

// roleSQL makes the connection act as a role. A proxy could drop the role if it were a start-up
// parameter.
const roleSQL = `SELECT /* postgres.role */ set_config('role', $1, false)`

// proveSQL reads the properties that a connection must have before its first use. While
// row_security is on, row-level security applies to each role that is not exempt. Owners and
// superusers are exempt.
const proveSQL = `
SELECT /* postgres.prove */ pg_backend_pid()::bigint, current_user::text, rolsuper OR rolbypassrls, current_setting('row_security'),
       (extract(epoch FROM current_setting('statement_timeout')::interval) * 1000)::bigint::text,
       (extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval) * 1000)::bigint::text,
       current_setting('default_transaction_isolation'), current_setting('client_min_messages')
  FROM pg_roles WHERE rolname = current_user`

// prove makes the connection act as role. It returns an error if a pooler is in between, or if the
// role or a setting of want is not in force.
func prove(ctx context.Context, conn *pgx.Conn, role Role, want map[string]string) error {
	var (
		b                                                pgx.Batch
		pid                                              int64
		user, security, timeout, idle, isolate, messages string
		exempt                                           bool
	)
	if role != RoleOwner {
		b.Queue(roleSQL, string(role))
	}
	b.Queue(proveSQL).QueryRow(func(row pgx.Row) error {
		return row.Scan(&pid, &user, &exempt, &security, &timeout, &idle, &isolate, &messages)
	})
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		const invalidParameterValue = "22023" // of SET ROLE
		if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == invalidParameterValue && role != RoleOwner {
			return fmt.Errorf("%w: %s", ErrUnmigrated, pg.Message)
		}
		return fmt.Errorf("prepare a connection: %w", err)
	}
	if pid != int64(conn.PgConn().PID()) {
		return ErrPooler
	}
	for _, c := range []struct{ what, got, want string }{
		{"statement_timeout (ms)", timeout, want["statement_timeout"]},
		{"idle_in_transaction_session_timeout (ms)", idle, want["idle_in_transaction_session_timeout"]},
		{"default_transaction_isolation", isolate, want["default_transaction_isolation"]},
		{"client_min_messages", messages, want["client_min_messages"]},
		{"role", user, string(role)},
		{"row_security", security, "on"},
		{"exempt from row security", strconv.FormatBool(exempt), "false"},
	} {
		if c.want != "" && c.got != c.want && (role != RoleOwner || c.what != "exempt from row security") {
			return fmt.Errorf("%w: %s is %s, not %s; does a proxy drop start-up parameters?", ErrUnproven, c.what, c.got, c.want)
		}
	}
	return nil
}
