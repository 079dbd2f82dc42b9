package cli

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/broker"
)

func (p Process) natsRevokeCommand() *cobra.Command {
	var seed, conf, creds, key string
	c := &cobra.Command{
		Use:   "revoke --operator-seed FILE --conf FILE (--creds FILE | --user-key KEY)",
		Short: "Revoke a credentials file before it expires",
		Long: `Revoke makes the user's account refuse the credentials, and writes that into nats-account.conf (tidings
nats account). Name the user by the credentials file, or by the public key that tidings nats creds
printed.

The servers learn of it when you reload them. Then they close the user's connections and admit no
new ones. Credentials that you sign afterwards have another key, so they are valid.`,
		Example: `  tidings nats revoke --operator-seed keys/operator.seed --conf keys/nats-account.conf --creds acme.creds`,
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if seed == "" || conf == "" || (creds == "") == (key == "") {
				return &usageError{errors.New("want --operator-seed, --conf, and either --creds or --user-key")}
			}
			user := broker.User{Key: key}
			if creds != "" {
				var err error
				if user, err = broker.ReadUser(creds); err != nil {
					return err
				}
			}
			secret, err := os.ReadFile(seed)
			if err != nil {
				return err
			}
			info, err := os.Stat(conf)
			if err != nil {
				return err
			}
			text, err := os.ReadFile(conf)
			if err != nil {
				return err
			}
			revoked, err := broker.Revoke(string(text), string(secret), user)
			if err != nil {
				return fmt.Errorf("%s: %w", conf, err)
			}
			if err := replace(conf, []byte(revoked), info.Mode().Perm()); err != nil {
				return err
			}
			fmt.Fprintf(p.Stdout, "Wrote %s, which revokes %s (%s).\n"+
				"Install it on every NATS server, and reload each one: nats-server --signal reload.\n"+
				"Until then the server accepts the credentials.\n", conf, user.Key, cmp.Or(user.Name, "name unknown"))
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&seed, "operator-seed", "", "file with the seed of the operator")
	f.StringVar(&conf, "conf", "", "the servers' nats-account.conf, which the command replaces")
	f.StringVar(&creds, "creds", "", "the credentials file to revoke")
	f.StringVar(&key, "user-key", "", "the public key of the user to revoke, U...")
	return c
}
