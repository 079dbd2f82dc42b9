package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/broker"
)

func (p Process) natsCommand() *cobra.Command {
	c := &cobra.Command{Use: "nats", Short: "Create the NATS users and credentials of binaries and subscribers"}
	c.AddCommand(p.natsUsersCommand(), p.natsAccountCommand(), p.natsCredsCommand(), p.natsRevokeCommand())
	return c
}

// naming reads the names of streams and subjects from the environment.
func (p Process) naming(ctx context.Context) (c broker.Config, err error) {
	err = envconfig.ProcessWith(ctx, &envconfig.Config{Target: &c, Lookuper: p.Env})
	if err = errors.Join(err, c.Validate()); err != nil {
		return c, &usageError{fmt.Errorf("read the environment: %w", err)}
	}
	return c, nil
}

func (p Process) natsUsersCommand() *cobra.Command {
	var subscribers []string
	c := &cobra.Command{
		Use:   "users",
		Short: "Print the users of a NATS server with their permissions",
		Long: `Users prints a part of a server's configuration, with the users relay, api, consumer, operator and
the subscribers that you name. Include it in nats.conf. It denies everything that a user does not
need. The server's environment variable NATS_PASSWORD_NAME has the password of a user: plain text
that begins with a letter, or a bcrypt hash.

A process needs its user in NATS_URL (nats://relay:PASSWORD@host:4222) and
NATS_INBOX_PREFIX=_INBOX_NAME. The command reads NATS_STREAM, NATS_SUBJECT_PREFIX and
NATS_LIVE_PREFIX like the binaries.`,
		Example: `  tidings nats users --subscriber name=acme,tenant=7 --subscriber ` +
			`name=mailer,tenant=7,durable=mailer,filter=follow.created`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := p.naming(c.Context())
			if err != nil {
				return err
			}
			all := []broker.Principal{{Role: broker.Relay}, {Role: broker.API}, {Role: broker.Consumer}, {Role: broker.Operator}}
			for _, text := range subscribers {
				s, err := parseSubscriber(text)
				if err != nil {
					return &usageError{fmt.Errorf("--subscriber %s: %w", text, err)}
				}
				all = append(all, s)
			}
			names := make(map[string]bool)
			for i := range all {
				if all[i], err = all[i].Complete(); err != nil {
					return &usageError{err}
				}
				if names[all[i].Variable()] {
					return &usageError{fmt.Errorf("two users have the name %s", all[i].Name)}
				}
				names[all[i].Variable()] = true
			}
			_, err = fmt.Fprint(p.Stdout, "# tidings nats users; see docs/security.md\n", broker.Users(cfg, all))
			return err
		},
	}
	c.Flags().StringArrayVar(&subscribers, "subscriber", nil,
		"a subscriber: name=NAME[,tenant=N][,durable=NAME][,filter=KIND.EVENT]; repeatable")
	return c
}

// parseSubscriber reads name=acme,tenant=7,durable=mailer,filter=follow.created.
func parseSubscriber(text string) (s broker.Principal, err error) {
	s.Role = broker.Subscriber
	for field := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "name":
			s.Name = value
		case "tenant":
			if s.Tenant, err = strconv.ParseInt(value, 10, 64); err != nil || s.Tenant < 1 {
				return s, fmt.Errorf("the tenant is %q: want a positive number", value)
			}
		case "durable":
			s.Durable = value
		case "filter":
			s.Filter = value
		default:
			return s, fmt.Errorf("%q: want name, tenant, durable and filter", field)
		}
	}
	return s, nil
}

func (p Process) natsAccountCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "account DIR",
		Short: "Create an operator and an account for NATS servers in operator mode",
		Long: `Account writes three files to DIR, and refuses to replace one. nats-account.conf is a part of the
servers' configuration: include it in nats.conf. account.seed signs credentials (tidings nats
creds). operator.seed signs changes of the account. Keep both seeds secret, and put neither on a
server.`,
		Args: exactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			a, err := broker.NewAccount()
			if err != nil {
				return err
			}
			if err := os.MkdirAll(args[0], 0o700); err != nil {
				return err
			}
			for name, text := range map[string]string{"operator.seed": a.OperatorSeed + "\n", "account.seed": a.Seed + "\n",
				"nats-account.conf": a.Server} {
				if err := writeNew(filepath.Join(args[0], name), []byte(text)); err != nil {
					return err
				}
			}
			fmt.Fprintf(p.Stdout, "Wrote nats-account.conf, account.seed and operator.seed to %s.\n", args[0])
			return nil
		},
	}
}

func (p Process) natsCredsCommand() *cobra.Command {
	var (
		who       broker.Principal
		seed, out string
		expires   time.Duration
	)
	c := &cobra.Command{
		Use:   "creds --account-seed FILE --role ROLE --out FILE",
		Short: "Write a credentials file for one binary or subscriber",
		Long: `Creds signs credentials with the seed of an account. They allow what the role needs and nothing
else. A process reads them with NATS_CREDENTIALS=FILE and NATS_INBOX_PREFIX=_INBOX_NAME, where NAME
is the user's name (--name). It reads the file at each connection, so replace the file before the
credentials expire. tidings nats revoke ends them earlier.

The roles are relay, api, consumer (also for the archiver), operator (for the program tidings) and
subscriber. A subscriber gets live.> over plain NATS; --tenant and --filter narrow it. With
--durable it may also create and read one durable consumer of that name on each stream, with that
filter.`,
		Example: `  tidings nats creds --account-seed nats/account.seed --role relay --out relay.creds
  tidings nats creds --account-seed nats/account.seed --role subscriber --name acme --tenant 7 ` +
			`--durable acme --filter follow.created --expires 2160h --out acme.creds`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := p.naming(c.Context())
			if err != nil {
				return err
			}
			if who, err = who.Complete(); err != nil {
				return &usageError{err}
			}
			if c.Flags().Changed("tenant") && who.Tenant == 0 { // 0 would mean all tenants
				return &usageError{errors.New("--tenant is 0: want 1 or more")}
			}
			if seed == "" || out == "" || expires < 0 {
				return &usageError{errors.New("--account-seed and --out are required; --expires must be 0 or more")}
			}
			secret, err := os.ReadFile(seed)
			if err != nil {
				return err
			}
			creds, err := broker.Credentials(cfg, who, string(secret), expires)
			if err != nil {
				return err
			}
			if err := replace(out, creds, 0o600); err != nil {
				return err
			}
			user, err := broker.ReadUser(out)
			if err != nil {
				return err
			}
			until := "never expires"
			if expires > 0 {
				until = "expires at " + user.Expires.UTC().Format(time.RFC3339)
			}
			fmt.Fprintf(p.Stdout, "Wrote %s, which %s. Use it with NATS_INBOX_PREFIX=%s.\nIts public key, which `tidings nats revoke` needs without the file: %s\n",
				out, until, who.InboxPrefix(), user.Key)
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&seed, "account-seed", "", "file with the seed of the account")
	f.StringVar(&out, "out", "", "file to write, mode 0600; a process that reads it sees the old file or the new one")
	f.StringVar(&who.Role, "role", "", "the role: "+strings.Join(broker.Roles(), ", "))
	f.StringVar(&who.Name, "name", "", "the name of the user and of its inbox (default: the role)")
	f.Int64Var(&who.Tenant, "tenant", 0, "only of this tenant")
	f.StringVar(&who.Durable, "durable", "", "for a subscriber: the name of its durable consumer on each stream")
	f.StringVar(&who.Filter, "filter", "", "for a subscriber: the events that it gets, KIND.EVENT or KIND.*")
	f.DurationVar(&expires, "expires", 90*24*time.Hour, "how long the credentials are valid; 0 for no limit")
	return c
}

// writeNew creates a file that only its owner may read. It returns an error if the file exists.
func writeNew(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Close())
}

// replace creates or atomically replaces a file with the given mode.
func replace(path string, data []byte, mode os.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".tidings-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // fails harmlessly after the rename
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
