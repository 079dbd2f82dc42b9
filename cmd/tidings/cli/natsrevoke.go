package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/broker"
)

// revokedFile has the revocations of a directory of keys, one per line. They only grow.
const revokedFile = "revoked"

func (p Process) natsRevokeCommand() *cobra.Command {
	var dir, creds, key string
	c := p.command(command{
		use:   "revoke --keys DIR (--creds FILE | --user-key KEY)",
		short: "Revoke a credentials file before it expires",
		long: `Revoke makes the accounts refuse the credentials. It adds the user to DIR/revoked and writes
DIR/nats-account.conf again, as tidings nats account does. Name the user by the credentials file, or
by the public key that tidings nats creds printed.

The revocation takes effect when you give the servers the new nats-account.conf and reload them
(nats-server --signal reload): they close the user's connections and admit no new ones. Credentials
that you sign afterwards have another key, so they are valid.`,
		example: `  tidings nats revoke --keys keys --creds mailer.creds`,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			cfg, err := s.naming(ctx)
			if err != nil {
				return nil, err
			}
			if dir == "" || (creds == "") == (key == "") {
				return nil, &usageError{errors.New("want --keys, and either --creds or --user-key")}
			}
			user := broker.User{Key: key}
			if creds != "" {
				if user, err = broker.ReadUser(creds); err != nil {
					return nil, err
				}
			}
			// The clock of the machine that signed the credentials may be ahead. Each credentials
			// file has a key of its own, so a later time revokes no other one.
			r := broker.Revocation{Key: user.Key, Account: user.Account, At: time.Now().Add(24 * time.Hour)}
			if err := r.Validate(); err != nil {
				return nil, &usageError{err}
			}
			d, err := readKeyDir(dir)
			if err != nil {
				return nil, err
			}
			if user.Account != "" && !d.keys.HasAccount(user.Account) {
				return nil, fmt.Errorf("no key in %s belongs to the account of %s (%s)", dir, creds, user.Account)
			}
			if err := appendRevoked(dir, r); err != nil { // first, because every later configuration must have it
				return nil, err
			}
			if err := d.writeServers(cfg); err != nil {
				return nil, err
			}
			return reports(nil, sentence("Wrote %s, which revokes %s (%s).\n"+
				"Install it on every NATS server, and reload each one: nats-server --signal reload.\n"+
				"Until then the server accepts the credentials.\n",
				filepath.Join(dir, serversFile), user.Key, cmp.Or(user.Name, "name unknown"))), nil
		},
	})
	f := c.Flags()
	f.StringVar(&dir, "keys", "", "directory of tidings nats account")
	f.StringVar(&creds, "creds", "", "the credentials file to revoke")
	f.StringVar(&key, "user-key", "", "the public key of the user to revoke, U...")
	return c
}

// appendRevoked adds a revocation to a directory of keys. It never replaces the file: two commands
// at once lose none.
func appendRevoked(dir string, r broker.Revocation) error {
	before, err := readRevoked(dir)
	if err != nil || slices.ContainsFunc(before, func(b broker.Revocation) bool { return b.Key == r.Key }) {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, revokedFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(r.String() + "\n")
	return errors.Join(err, f.Sync(), f.Close())
}

// readRevoked returns the revocations of a directory of keys.
func readRevoked(dir string) (all []broker.Revocation, err error) {
	path := filepath.Join(dir, revokedFile)
	lines, err := linesOf(path)
	if err != nil {
		return nil, err
	}
	for _, line := range lines {
		r, err := broker.ParseRevocation(line)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		all = append(all, r)
	}
	return all, nil
}

// writeServers writes the servers' configuration with the accounts of all and every revocation.
func (d keyDir) writeServers(cfg broker.Config) error {
	revoked, err := readRevoked(d.dir)
	if err != nil {
		return err
	}
	conf, err := d.keys.Server(cfg, d.all, revoked...)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(d.dir, serversFile), []byte(conf))
}
