package migrations

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
)

// Place is a database, and whose tables are in it.
type Place struct {
	Name   string // of the database
	Server string // host:port, or the directory of a socket
	Schema string // in which Up makes tables
	Ours   bool   // it has the truth or the projections already
	Others int    // tables in any schema, if it has neither; tables of extensions do not count
}

// String names the database, without the login.
func (p Place) String() string {
	return fmt.Sprintf("the database %q at %s, schema %s", p.Name, p.Server, p.Schema)
}

// placeSQL reads whose tables a database has.
const placeSQL = `
SELECT current_database(), coalesce(current_schema(), ''), to_regclass(@truth) IS NOT NULL OR to_regclass(@projections) IS NOT NULL,
       (SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.relkind IN ('r', 'p', 'f') AND NOT c.relispartition AND n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
           AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'))::int`

// FindPlace reads the database of url before Up changes it. It writes nothing.
func FindPlace(ctx context.Context, url string) (p Place, err error) {
	cfg, err := postgres.ParseConfig(url)
	if err != nil {
		return p, err
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if p.Server = conn.Config().Host; p.Server == "" || p.Server[0] != '/' {
		p.Server = net.JoinHostPort(p.Server, strconv.Itoa(int(conn.Config().Port)))
	}
	err = conn.QueryRow(ctx, placeSQL, pgx.StrictNamedArgs{"truth": Truth.table(), "projections": Projections.table()}).
		Scan(&p.Name, &p.Schema, &p.Ours, &p.Others)
	if err != nil {
		return p, fmt.Errorf("read whose tables are in the database: %w", err)
	}
	if p.Ours {
		p.Others = 0
	}
	return p, nil
}
