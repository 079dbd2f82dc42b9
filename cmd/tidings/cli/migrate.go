package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
)

// migrated is the output of `tidings migrate --json`.
type migrated struct {
	Truth       int `json:"truth"`            // migrations applied now
	Projections int `json:"projections"`      // likewise
	Logins      int `json:"logins,omitempty"` // created, or changed to the file's password and role
}

// migratedOutbox is the output of `tidings migrate --only outbox --json`.
type migratedOutbox struct {
	Outbox int    `json:"outbox"` // migrations applied now
	Schema string `json:"schema"`
	Logins int    `json:"logins,omitempty"`
}

// schemaName is the form of a schema that needs no quotes.
var schemaName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}$`)

// outboxSchema is the schema of an outbox that is alone in a database of others.
const outboxSchema = "tidings"

func (p Process) migrateCommand() *cobra.Command {
	var logins, only, schema string
	c := p.command(command{
		use:   "migrate",
		short: "Upgrade both schemas to this program's version",
		long: `Migrate applies the missing migrations of both schemas: the truth in DATABASE_URL, and the
projections in PROJECTIONS_DATABASE_URL. Without that variable, both are in one database. The login
must own the tables. You can run it twice, or from two places at once. tidings dev migrates by
itself.

Migrate also creates the roles tidings_*. If the login may not create roles,
migrate changes nothing and prints the statements that an administrator must run first.

With --only outbox it creates only the outbox, in a schema of your own database: its tables, and what
a relay needs (docs/your-tables.md). Outside that schema only the roles are new. Every program then
needs the schema in its connection string: DATABASE_URL=...?search_path=tidings.

With --logins it then creates a login for each line of the file: NAME ROLE PASSWORD. The role is
api, relay, consumer, reader, system, writer, upstream or serve (docs/security.md). An existing login gets the
password, and this role as its only one. Logins that the file does not name stay unchanged.

While a statement waits for a lock, all other users of the table wait behind it. So migrate waits
for half a second at most, and then lets them go first. It retries each second until it gets the
lock or you press Ctrl-C, and logs the sessions that hold the lock.`,
		needs: needServers, json: oneObject,
		check: func(s *session, _ []string) error {
			switch {
			case only != "" && only != string(migrations.Outbox):
				return &usageError{fmt.Errorf("--only %s: want outbox", only)}
			case only == "" && schema != "":
				return &usageError{errors.New("--schema needs --only outbox")}
			case schema != "" && !schemaName.MatchString(schema):
				return &usageError{fmt.Errorf("--schema is %q: want a to z, 0 to 9 and _, at most 63, beginning with a letter", schema)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			at, err := s.servers(ctx, s.data)
			if err != nil {
				return nil, err
			}
			if only != "" {
				return s.migrateOutbox(ctx, at, schema, logins)
			}
			return s.migrateBoth(ctx, at, logins)
		},
	})
	c.Flags().StringVar(&only, "only", "", "`outbox`: migrate only the outbox, in a schema of its own")
	c.Flags().StringVar(&schema, "schema", "", "the `schema` of --only outbox (default: the search_path of DATABASE_URL, or tidings)")
	c.Flags().StringVar(&logins, "logins", "", "a `file` of logins to create")
	return c
}

// migrateBoth makes or upgrades both schemas.
func (s *session) migrateBoth(ctx context.Context, at servers, logins string) (_ *report, err error) {
	var m migrated
	log := daemon.CommandLogger(s.Stderr, slog.LevelInfo)
	if m.Truth, err = migrations.Up(ctx, at.DatabaseURL, migrations.Truth, log); err != nil {
		return nil, err
	}
	if m.Projections, err = migrations.Up(ctx, at.ProjectionsDatabaseURL, migrations.Projections, log); err != nil {
		return nil, err
	}
	if m.Logins, err = makeLogins(ctx, logins, at.DatabaseURL, at.ProjectionsDatabaseURL); err != nil {
		return nil, err
	}
	return reports(m, func(w io.Writer) error {
		if logins != "" {
			fmt.Fprintf(w, "Logins: %d.\n", m.Logins)
		}
		return tableTo(w,
			[]string{"schema", "version", "applied now"},
			[]string{string(migrations.Truth), fmt.Sprint(migrations.Latest(migrations.Truth)), fmt.Sprint(m.Truth)},
			[]string{string(migrations.Projections), fmt.Sprint(migrations.Latest(migrations.Projections)), fmt.Sprint(m.Projections)},
		)
	}), nil
}

// migrateOutbox makes or upgrades an outbox that is alone in a schema of the database.
func (s *session) migrateOutbox(ctx context.Context, at servers, schema, logins string) (*report, error) {
	cfg, err := postgres.ParseConfig(at.DatabaseURL)
	if err != nil {
		return nil, err
	}
	path := cfg.RuntimeParams["search_path"]
	first, _, _ := strings.Cut(path, ",")
	first = strings.Trim(strings.TrimSpace(first), `"`)
	schema = cmp.Or(schema, first, outboxSchema)
	if first != "" && first != schema {
		return nil, &usageError{fmt.Errorf("--schema is %s, and the search_path of DATABASE_URL is %s: leave out one", schema, path)}
	}
	m := migratedOutbox{Schema: schema}
	log := daemon.CommandLogger(s.Stderr, slog.LevelInfo)
	if m.Outbox, err = migrations.UpIn(ctx, at.DatabaseURL, migrations.Outbox, schema, log); err != nil {
		return nil, err
	}
	if m.Logins, err = makeLogins(ctx, logins, at.DatabaseURL); err != nil {
		return nil, err
	}
	return reports(m, func(w io.Writer) error {
		if logins != "" {
			fmt.Fprintf(w, "Logins: %d.\n", m.Logins)
		}
		if first == "" {
			fmt.Fprintf(w, "Add search_path=%s to DATABASE_URL for every program.\n", url.QueryEscape(schema))
		}
		return tableTo(w,
			[]string{"schema", "version", "applied now"},
			[]string{schema, fmt.Sprint(migrations.Latest(migrations.Outbox)), fmt.Sprint(m.Outbox)})
	}), nil
}

// makeLogins creates the logins of a file on the servers of the databases, and returns their
// number.
func makeLogins(ctx context.Context, path string, databases ...string) (n int, err error) {
	if path == "" {
		return 0, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }() // the file is only read
	all, err := migrations.ReadLogins(f)
	if err != nil {
		return 0, &usageError{fmt.Errorf("%s: %w", path, err)}
	}
	made := make(map[string]bool)
	for _, url := range databases {
		names, err := migrations.MakeLogins(ctx, url, all)
		if err != nil {
			return 0, err
		}
		for _, name := range names {
			made[name] = true
		}
	}
	return len(made), nil
}
