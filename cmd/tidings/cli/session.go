package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/status"
)

// command declares a command. Process.command adds the flags that it shares with others, connects
// to the servers that it needs, and prints its report.
type command struct {
	use, short, long, example string
	args                      cobra.PositionalArgs // nil: none

	name          string  // the application name of its connections
	needs         needs   // if any, the command has --data
	json          string  // the usage of --json; "": no such flag
	actor, reason *string // for --actor and --reason
	dryRun        *bool   // for --dry-run, with which ask returns nil
	destructive   bool    // it has --yes, and run calls ask before it deletes anything

	check func(s *session, args []string) error // flags and arguments, before the session connects
	run   func(ctx context.Context, s *session, args []string) (*report, error)
}

// needs are the servers to which a command connects.
type needs int

const (
	needServers     needs = 1 << iota // only their addresses
	needTruth                         // with this program's schema, like the next
	needOutbox                        // of the truth's database, only the outbox has to have it
	needProjections                   //
	needNATS                          //
	tolerant                          // the connection to an unavailable server is nil
	orOutbox                          // of the truth it uses only the outbox, and of the projections nothing that must be there
	needDatabases   = needTruth | needProjections
	needAll         = needDatabases | needNATS
)

// The usage of --json.
const oneObject = "print one JSON object"

func onePer(noun string) string { return "print JSON objects, one per " + noun + " and line" }

// session is one run of a command.
type session struct {
	Process
	*system // nil without needs
	cmd     *cobra.Command
	data    string // --data
	asJSON  bool   // --json
	dryRun  *bool
	sure    *asking
}

// changed reports whether the command line has the flag.
func (s *session) changed(flag string) bool { return s.cmd.Flags().Changed(flag) }

// ask is asking.ask, except that a dry run asks nothing.
func (s *session) ask(show func(w io.Writer) error) error {
	if s.dryRun != nil && *s.dryRun {
		return nil
	}
	return s.sure.ask(show)
}

// command makes the command that d declares.
func (p Process) command(d command) *cobra.Command {
	c := &cobra.Command{Use: d.use, Short: d.short, Long: d.long, Example: d.example, Args: d.args}
	if d.args == nil {
		c.Args = exactArgs(0)
	}
	s := &session{Process: p, cmd: c, dryRun: d.dryRun}
	if d.json != "" {
		c.Flags().BoolVar(&s.asJSON, "json", false, d.json)
	}
	if d.actor != nil {
		c.Flags().StringVar(d.actor, "actor", "", "the actor to record (default: the user of this system)")
	}
	if d.reason != nil {
		c.Flags().StringVar(d.reason, "reason", "", "the reason to record")
	}
	if d.dryRun != nil {
		c.Flags().BoolVar(d.dryRun, "dry-run", false, "show what the command would do, and change nothing")
	}
	if d.destructive {
		s.sure = p.destructive(c)
	}
	if d.needs != 0 {
		dataFlag(c, &s.data)
	}
	c.RunE = func(c *cobra.Command, args []string) (err error) {
		if d.check != nil {
			if err := d.check(s, args); err != nil {
				return err
			}
		}
		if d.actor != nil {
			if err := setActor(d.actor); err != nil {
				return err
			}
		}
		if d.needs&(needAll|needOutbox) != 0 {
			if s.system, err = p.open(c.Context(), s.data, d.name, d.needs); err != nil {
				return err
			}
			defer s.close()
		}
		r, err := d.run(c.Context(), s, args)
		if r == nil {
			return err
		}
		if unwritten := s.print(r); unwritten != nil {
			if silent(err) {
				return unwritten
			}
			return errors.Join(unwritten, err)
		}
		return err
	}
	return c
}

// report is the output of a command: values for --json, one per line, and a text for people.
type report struct {
	values []any
	text   func(w io.Writer) error
}

// reports returns a report of one value.
func reports(value any, text func(w io.Writer) error) *report { return &report{[]any{value}, text} }

// lists returns a report of one value per line.
func lists[T any](all []T, text func(w io.Writer) error) *report {
	r := &report{text: text}
	for _, v := range all {
		r.values = append(r.values, v)
	}
	return r
}

// sentence is a text of one or more lines.
func sentence(format string, args ...any) func(w io.Writer) error {
	return func(w io.Writer) error {
		_, err := fmt.Fprintf(w, format, args...)
		return err
	}
}

// rowsOf is a text of a table.
func rowsOf(rows ...[]string) func(w io.Writer) error {
	return func(w io.Writer) error { return tableTo(w, rows...) }
}

// print writes the report in the form that the user wants, at once.
func (s *session) print(r *report) error {
	var b bytes.Buffer
	if s.asJSON {
		enc := json.NewEncoder(&b)
		for _, v := range r.values {
			if err := enc.Encode(v); err != nil {
				return fmt.Errorf("write the result: %w", err)
			}
		}
	} else if err := r.text(&b); err != nil {
		return err
	}
	if _, err := s.Stdout.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// system has connections to the databases and to NATS. A connection that the command does not need
// is nil, and a tolerant one to an unavailable server.
type system struct {
	status.Sources
	env   servers
	kinds *catalog.Catalog // of the projections' database, loaded; only with all servers and unless OutboxAlone
}

// errOutboxAlone reports a command that needs more than a guest has.
var errOutboxAlone = errors.New("this command needs the truth and the projections, and DATABASE_URL has the outbox alone " +
	"(docs/your-tables.md lists the commands that work there)")

// open connects to servers. Unless needs is tolerant, it returns an error if one is unavailable. It
// returns an error if a database does not have this program's schema.
func (p Process) open(ctx context.Context, data, name string, needs needs) (_ *system, err error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, err
	}
	y := &system{Sources: status.Sources{Broker: s.Broker, Consumers: fleet.Names()}, env: s}
	defer func() {
		if err != nil {
			y.close()
		}
	}()
	all := needs&needNATS != 0
	if needs&(needTruth|needOutbox) != 0 {
		schema := migrations.Truth
		if needs&needOutbox != 0 {
			schema = migrations.Outbox
		}
		if y.Truth, err = y.database(ctx, status.ServerTruth, s.DatabaseURL, name, schema, all); err != nil {
			return nil, err
		}
	}
	if y.OutboxAlone && needs&orOutbox == 0 {
		return nil, errOutboxAlone
	}
	if y.OutboxAlone {
		y.Consumers = nil
	} else if needs&needProjections != 0 && len(y.Unavailable) == 0 || s.ProjectionsDatabaseURL != s.DatabaseURL && all {
		y.Projections, err = y.database(ctx, status.ServerProjections, s.ProjectionsDatabaseURL, name, migrations.Projections, all)
		if err != nil {
			return nil, err
		}
	}
	if !all {
		return y, nil
	}
	if err := y.connect(name, daemon.CommandLogger(p.Stderr, slog.LevelError)); err != nil {
		return nil, err
	}
	if needs&tolerant != 0 {
		return y, nil
	}
	if len(y.Unavailable) > 0 {
		return nil, errors.New(y.Unavailable[0].String())
	}
	if y.OutboxAlone {
		return y, nil
	}
	y.kinds, err = loadKinds(ctx, y.Projections, catalog.Projections, daemon.CommandLogger(p.Stderr, slog.LevelError))
	return y, err
}

// database connects to a database, which must have this program's schema. If it has the outbox
// alone instead of the truth, database notes that in OutboxAlone. If the server is unavailable, it
// returns nil and notes that with note, and otherwise an error.
func (y *system) database(ctx context.Context, server, url, name string, schema migrations.Set, note bool) (*pgxpool.Pool, error) {
	pool, err := postgres.Open(ctx, url, y.env.Postgres, postgres.RoleSystem, name)
	if err != nil {
		return nil, err
	}
	if note {
		if err := pool.Ping(ctx); postgres.IsTransient(err) {
			pool.Close()
			y.Unavailable = append(y.Unavailable, status.NewUnavailable(server, url, err))
			return nil, nil
		}
	}
	alone, err := checkSchema(ctx, pool, schema)
	if y.OutboxAlone = alone; alone && schema == migrations.Projections {
		err = errOutboxAlone
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// checkSchema is migrations.Check. alone reports that the database has only the outbox, which it
// then checks.
func checkSchema(ctx context.Context, pool *pgxpool.Pool, schema migrations.Set) (alone bool, err error) {
	if err = migrations.Check(ctx, pool, schema); !errors.Is(err, migrations.ErrOutdated) {
		return false, err
	}
	if alone, aerr := migrations.IsOutboxAlone(ctx, pool); aerr != nil || alone {
		return alone, errors.Join(aerr, migrations.Check(ctx, pool, migrations.Outbox))
	}
	return false, err
}

// connect connects to NATS, or notes that it is unavailable.
func (y *system) connect(name string, log *slog.Logger) (err error) {
	if err := y.Broker.Validate(); err != nil {
		return err
	}
	if y.NATS, err = broker.Connect(y.Broker, name, log, nats.RetryOnFailedConnect(false)); err != nil {
		y.Unavailable = append(y.Unavailable, status.NewUnavailable(status.ServerNATS, y.Broker.URL, err))
		return nil
	}
	if y.JetStream, err = jetstream.New(y.NATS); err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	return nil
}

func (y *system) close() {
	if y.NATS != nil {
		y.NATS.Close()
	}
	if y.Projections != nil {
		y.Projections.Close()
	}
	if y.Truth != nil {
		y.Truth.Close()
	}
}

// loadKinds reads the kinds in force in one of the databases.
func loadKinds(ctx context.Context, pool *pgxpool.Pool, of catalog.Database, log *slog.Logger) (*catalog.Catalog, error) {
	c := catalog.New(pool, of, log)
	return c, c.Load(ctx)
}

// truthKinds reads the kinds in force in the truth.
func truthKinds(ctx context.Context, truth *pgxpool.Pool) (*kinds.Set, error) {
	return kindsOf(ctx, truth, catalog.Truth)
}

// kindsOf reads the kinds in force in one of the databases.
func kindsOf(ctx context.Context, pool *pgxpool.Pool, of catalog.Database) (*kinds.Set, error) {
	c, err := loadKinds(ctx, pool, of, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	return c.Now(), nil
}
