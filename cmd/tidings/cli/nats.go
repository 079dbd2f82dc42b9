package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/words"
)

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
	c := p.command(command{
		use:   "users",
		short: "Print the accounts and users of a NATS server with their permissions",
		long: `Users prints a part of a server's configuration, with the users relay, api, consumer, operator and
the subscribers that you name, each in its account. Include it in nats.conf. It denies everything
that a user does not need. The server's environment variable NATS_PASSWORD_NAME has the password of
a user: plain text that begins with a letter, or a bcrypt hash.

` + subscriberHelp + `

A process needs its user in NATS_URL (nats://relay:PASSWORD@host:4222) and
NATS_INBOX_PREFIX=_INBOX_USER. The command reads NATS_STREAM, NATS_SUBJECT_PREFIX,
NATS_LIVE_PREFIX and NATS_LIVE_OBJECTS like the binaries.`,
		example: `  tidings nats users --subscriber name=feed,tenant=7 --subscriber ` +
			`name=mailer,tenant=7,durable,filter=follow.created`,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			cfg, err := s.naming(ctx)
			if err != nil {
				return nil, err
			}
			all, err := parseSubscribers(subscribers)
			if err != nil {
				return nil, err
			}
			return reports(nil, sentence("# tidings nats users; see docs/security.md\n%s", broker.Users(cfg, all))), nil
		},
	})
	c.Flags().StringArrayVar(&subscribers, "subscriber", nil, subscriberFlag)
	return c
}

const (
	subscriberFlag = "a subscriber: name=NAME[,tenant=N][,durable][,filter=KIND.EVENT]; repeatable"
	subscriberHelp = `A subscriber of tenant 7 with the name mailer is the user t7_mailer, in an account that all
subscribers of that tenant share. It gets live.t7.> over plain NATS, and with durable it also reads
its durable consumers t7_mailer, which tidings nats durable creates. Without a tenant it gets the
events of all tenants.`
)

// parseSubscribers returns our own principals and the named subscribers.
func parseSubscribers(texts []string) ([]broker.Principal, error) {
	var all []broker.Principal
	for _, text := range texts {
		s, err := parseSubscriber(text)
		if err != nil {
			return nil, &usageError{fmt.Errorf("subscriber %s: %w", text, err)}
		}
		all = append(all, s)
	}
	all, err := broker.Complete(all)
	if err != nil {
		return nil, &usageError{err}
	}
	return all, nil
}

// parseSubscriber reads name=mailer,tenant=7,durable,filter=follow.created.
func parseSubscriber(text string) (s broker.Principal, err error) {
	s.Role = broker.Subscriber
	for field := range strings.SplitSeq(text, ",") {
		key, value, given := strings.Cut(field, "=")
		switch {
		case key == "name" && given:
			s.Name = value
		case key == "tenant" && given:
			if s.Tenant, err = strconv.ParseInt(value, 10, 64); err != nil || s.Tenant < 1 {
				return s, fmt.Errorf("the tenant is %q: want a positive number", value)
			}
		case key == "durable" && !given:
			s.Durable = true
		case key == "filter" && given:
			s.Filter = value
		default:
			return s, fmt.Errorf("%q: want name=NAME, tenant=N, durable and filter=KIND.EVENT", field)
		}
	}
	return s, nil
}

// The files of a directory of keys, beside a NAME.seed for each key.
const (
	serversFile     = "nats-account.conf"
	subscribersFile = "subscribers"
	seedSuffix      = ".seed"
)

func (p Process) natsAccountCommand() *cobra.Command {
	var subscribers []string
	c := p.command(command{
		use:   "account DIR",
		short: "Create the operator and the accounts for NATS servers in operator mode, or add subscribers to them",
		long: `Account creates the keys that DIR lacks, and writes DIR/nats-account.conf, a part of the servers'
configuration: include it in nats.conf. DIR/subscribers has the subscribers, one per line.
To add one, use --subscriber or edit that file, run the command again, give the new
nats-account.conf to all servers, and reload them (nats-server --signal reload). Then tidings nats
creds signs credentials.

` + subscriberHelp + `

The files DIR/*.seed are secrets: operator.seed signs accounts, the others sign users. Put none of
them on a server.`,
		example: `  tidings nats account keys --subscriber name=mailer,tenant=7,durable,filter=follow.created`,
		args:    exactArgs(1),
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			cfg, err := s.naming(ctx)
			if err != nil {
				return nil, err
			}
			dir := args[0]
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return nil, err
			}
			d, err := readKeyDir(dir, subscribers...)
			if err != nil {
				return nil, err
			}
			added, err := d.keys.Add(d.all)
			if err != nil {
				return nil, err
			}
			for _, name := range added { // first, because the configuration is worth nothing without them
				if err := writeNew(filepath.Join(dir, name+seedSuffix), []byte(d.keys[name]+"\n")); err != nil {
					return nil, err
				}
			}
			text := "# one subscriber per line; then run tidings nats account again\n" + strings.Join(append(d.lines, ""), "\n")
			if err := errors.Join(writeFile(filepath.Join(dir, subscribersFile), []byte(text)), d.writeServers(cfg)); err != nil {
				return nil, err
			}
			return reports(nil, sentence("Wrote %s, with %s. New keys: %d.\n", filepath.Join(dir, serversFile),
				words.Of(int64(len(d.lines)), "subscriber"), len(added))), nil
		},
	})
	c.Flags().StringArrayVar(&subscribers, "subscriber", nil, subscriberFlag)
	return c
}

// keyDir is a directory of keys.
type keyDir struct {
	dir   string
	lines []string           // of its file of subscribers
	all   []broker.Principal // our own, and those of the lines
	keys  broker.Keys
}

// readKeyDir reads a directory of keys, and adds the subscribers that it does not have.
func readKeyDir(dir string, more ...string) (d keyDir, err error) {
	d.dir = dir
	if d.lines, err = linesOf(filepath.Join(dir, subscribersFile)); err != nil {
		return d, err
	}
	for _, s := range more {
		if !slices.Contains(d.lines, s) {
			d.lines = append(d.lines, s)
		}
	}
	if d.all, err = parseSubscribers(d.lines); err != nil {
		return d, err
	}
	d.keys, err = readKeys(dir)
	return d, err
}

// linesOf returns the lines of a file, without empty ones and comments. A missing file has none.
func linesOf(path string) (lines []string, err error) {
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// readKeys returns the keys of a directory.
func readKeys(dir string) (broker.Keys, error) {
	keys := make(broker.Keys)
	paths, err := filepath.Glob(filepath.Join(dir, "*"+seedSuffix))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		seed, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		keys[strings.TrimSuffix(filepath.Base(path), seedSuffix)] = strings.TrimSpace(string(seed))
	}
	return keys, nil
}

func (p Process) natsCredsCommand() *cobra.Command {
	var (
		who      broker.Principal
		dir, out string
		expires  time.Duration
	)
	c := p.command(command{
		use:   "creds --keys DIR --role ROLE --out FILE",
		short: "Write a credentials file for one binary or subscriber",
		long: `Creds signs credentials with a key of the directory that tidings nats account made. They allow what
the role needs and nothing else. A process reads them with NATS_CREDENTIALS=FILE and
NATS_INBOX_PREFIX=_INBOX_USER, which the command prints. It reads the file at each connection, so
replace the file before the credentials expire. tidings nats revoke ends them earlier.

The roles are serve (a process with all parts), relay, api, consumer (also for the archiver),
operator (for the program tidings) and subscriber. A subscriber needs its --name, and its --tenant
if it has one. DIR/subscribers says what it gets.`,
		example: `  tidings nats creds --keys keys --role relay --out relay.creds
  tidings nats creds --keys keys --role subscriber --name mailer --tenant 7 --expires 2160h --out mailer.creds`,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			return s.writeCreds(ctx, who, dir, out, expires)
		},
	})
	f := c.Flags()
	f.StringVar(&dir, "keys", "", "directory of tidings nats account")
	f.StringVar(&out, "out", "", "file to write, mode 0600; a process that reads it sees the old file or the new one")
	f.StringVar(&who.Role, "role", "", "the role: "+strings.Join(broker.Roles(), ", "))
	f.StringVar(&who.Name, "name", "", "a subscriber's name, or that of a program such as threadcache (default: the role)")
	f.Int64Var(&who.Tenant, "tenant", 0, "the tenant")
	f.DurationVar(&expires, "expires", 90*24*time.Hour, "how long the credentials are valid; 0 for no limit")
	return c
}

// writeCreds signs the credentials of who with a key of dir, and writes them to out.
func (s *session) writeCreds(ctx context.Context, who broker.Principal, dir, out string, expires time.Duration) (*report, error) {
	cfg, err := s.naming(ctx)
	if err != nil {
		return nil, err
	}
	if err := who.Validate(); err != nil {
		return nil, &usageError{err}
	}
	if s.changed("tenant") && who.Tenant == 0 { // 0 would mean all tenants
		return nil, &usageError{errors.New("--tenant is 0: want 1 or more")}
	}
	switch {
	case dir == "":
		return nil, &usageError{errors.New("--keys is required, the directory of tidings nats account")}
	case out == "":
		return nil, &usageError{errors.New("--out is required, the file to write")}
	case expires < 0:
		return nil, &usageError{fmt.Errorf("--expires is %s: want 0 or more", expires)}
	}
	d, err := readKeyDir(dir)
	if err != nil {
		return nil, err
	}
	if who, err = d.known(who); err != nil {
		return nil, err
	}
	creds, err := d.keys.Credentials(cfg, who, expires)
	if err != nil {
		return nil, err
	}
	if err := writeFile(out, creds); err != nil {
		return nil, err
	}
	user, err := broker.ReadUser(out)
	if err != nil {
		return nil, err
	}
	until := "never expires"
	if expires > 0 {
		until = "expires at " + user.Expires.UTC().Format(time.RFC3339)
	}
	return reports(nil, sentence("Wrote %s, which %s. Use it with NATS_INBOX_PREFIX=%s.\n"+
		"Its public key, by which you can revoke it without the file: %s\n", out, until, who.InboxPrefix(), user.Key)), nil
}

// known returns a principal with what the directory's file of subscribers says of it.
func (d keyDir) known(who broker.Principal) (broker.Principal, error) {
	i := slices.IndexFunc(d.all, func(p broker.Principal) bool { return p.Role == who.Role && p.Login() == who.Login() })
	if i >= 0 {
		return d.all[i], nil
	}
	if who.Role == broker.Subscriber {
		return who, &usageError{fmt.Errorf("%s has no subscriber %s: add it with tidings nats account --subscriber",
			filepath.Join(d.dir, subscribersFile), who.Login())}
	}
	return who, nil
}

func (p Process) natsDurableCommand() *cobra.Command {
	var (
		who   broker.Principal
		how   broker.Subscription
		cfg   struct{ Broker broker.Config }
		since string
	)
	c := p.command(command{
		use:   "durable --name NAME",
		short: "Create the durable consumers of a subscriber",
		long: `Durable creates a subscriber's durable consumers: on each stream, and on the stream of its dead
letters. After a resize, a relay creates them on the new streams. A subscriber's own login cannot
create them, because the request names the subject to which NATS delivers. Existing consumers get
the settings and keep their positions. The command needs the login operator.

The consumers of subscriber mailer of tenant 7 are named t7_mailer. Without a tenant they have the
name that subscribe.Handle uses: mailer-follow-created with --filter follow.created. Use the same
name, tenant and filter as in tidings nats users or tidings nats account.`,
		example: `  tidings nats durable --name mailer --tenant 7 --filter follow.created`,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			if err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: &cfg, Lookuper: s.Env}); err != nil {
				return nil, &usageError{fmt.Errorf("read the environment: %w", err)}
			}
			who.Role, who.Durable = broker.Subscriber, true
			if s.changed("tenant") && who.Tenant == 0 { // 0 would mean all tenants
				return nil, &usageError{errors.New("--tenant is 0: want 1 or more")}
			}
			err := who.Validate()
			if since != "" && err == nil {
				how.Since, err = parseAge(since, time.Now())
			}
			if err != nil {
				return nil, &usageError{err}
			}
			return s.createDurables(ctx, cfg.Broker, who, how)
		},
	})
	f := c.Flags()
	f.StringVar(&who.Name, "name", "", "the subscriber's name")
	f.Int64Var(&who.Tenant, "tenant", 0, "the tenant")
	f.StringVar(&who.Filter, "filter", "", "the events that it gets, KIND.EVENT or KIND.*; default: all")
	f.DurationVar(&how.AckWait, "ack-wait", 10*time.Second, "NATS delivers an event again if it is not acknowledged in time")
	f.BoolVar(&how.InOrder, "in-order", false, "one instance at a time reads a stream: subscribe.InOrder()")
	f.StringVar(&since, "since", "", "only events stored since then: a duration ago such as 24h, a date, or a time in RFC 3339")
	return c
}

// createDurables creates the durable consumers of who that do not exist.
func (s *session) createDurables(ctx context.Context, cfg broker.Config, who broker.Principal, how broker.Subscription) (*report, error) {
	nc, js, err := broker.Open(cfg, "nats durable", daemon.CommandLogger(s.Stderr, slog.LevelError), nats.RetryOnFailedConnect(false))
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	created, err := broker.Subscribe(ctx, js, cfg, who, how)
	switch {
	case len(created) > 0:
		return reports(nil, sentence("Created consumer %s on %s.\n", who.DurableName(), strings.Join(created, ", "))), err
	case err != nil:
		return nil, err
	}
	return reports(nil, sentence("Consumer %s exists on every stream.\n", who.DurableName())), nil
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
