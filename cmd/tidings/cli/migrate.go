package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/migrations"
)

// migrated is the output of `tidings migrate --json`.
type migrated struct {
	Truth       int `json:"truth"`            // migrations applied now
	Projections int `json:"projections"`      // likewise
	Logins      int `json:"logins,omitempty"` // created, or changed to the file's password and role
}

func (p Process) migrateCommand() *cobra.Command {
	var logins string
	c := p.command(command{
		use:   "migrate",
		short: "Upgrade both schemas to this program's version",
		long: `Migrate applies the missing migrations of both schemas: the truth in DATABASE_URL, and the
projections in PROJECTIONS_DATABASE_URL. Without that variable, both are in one database. The login
must own the tables, and must have the right to create roles. You can run it twice, or from two
places at once. tidings dev migrates by itself.

With --logins it then creates a login for each line of the file: NAME ROLE PASSWORD. The role is
api, relay, consumer, reader, system or writer (docs/security.md). An existing login gets the
password, and this role as its only one. Logins that the file does not name remain unchanged.

While a statement waits for a lock, all other users of the table wait behind that statement. So none
waits longer than half a second. Migrate retries each second until it gets the lock or you press
Ctrl-C, and logs the sessions that hold the lock.`,
		needs: needServers, json: oneObject,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			at, err := s.servers(ctx, s.data)
			if err != nil {
				return nil, err
			}
			var m migrated
			log := daemon.CommandLogger(s.Stderr, slog.LevelInfo)
			if m.Truth, err = migrations.Up(ctx, at.DatabaseURL, migrations.Truth, log); err != nil {
				return nil, err
			}
			if m.Projections, err = migrations.Up(ctx, at.ProjectionsDatabaseURL, migrations.Projections, log); err != nil {
				return nil, err
			}
			if m.Logins, err = makeLogins(ctx, at, logins); err != nil {
				return nil, err
			}
			return reports(m, func(w io.Writer) error {
				if logins != "" {
					fmt.Fprintf(w, "Logins: %d.\n", m.Logins)
				}
				return tableTo(w,
					[]string{"schema", "version", "applied now"},
					[]string{string(migrations.Truth), fmt.Sprint(migrations.Latest(migrations.Truth)), fmt.Sprint(m.Truth)},
					[]string{string(migrations.Projections), fmt.Sprint(migrations.Latest(migrations.Projections)),
						fmt.Sprint(m.Projections)},
				)
			}), nil
		},
	})
	c.Flags().StringVar(&logins, "logins", "", "a `file` of logins to create")
	return c
}

// makeLogins creates the logins of a file on the servers of both databases, and returns their
// number.
func makeLogins(ctx context.Context, s servers, path string) (n int, err error) {
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
	for _, url := range []string{s.DatabaseURL, s.ProjectionsDatabaseURL} {
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
