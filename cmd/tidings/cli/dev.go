package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"github.com/spf13/cobra"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/services"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/console"
)

// The tenant of dev's token, and the token's name.
const (
	devTenant = 1
	devName   = "dev"
)

// devHeartbeat is dev's HEARTBEAT_INTERVAL. It is short so that a new user soon sees events.
const devHeartbeat = 10 * time.Second

// devConfig is dev's environment. Dev starts its own servers for the URLs that are not set.
type devConfig struct {
	DatabaseURL            string `env:"DATABASE_URL"`
	ProjectionsDatabaseURL string `env:"PROJECTIONS_DATABASE_URL"`
	NATSURL                string `env:"NATS_URL"`
	OpsAddr                string `env:"OPS_ADDR, default=127.0.0.1:9180"`
	Token                  string `env:"DEV_TOKEN"`
	Log                    daemon.LogConfig
	Postgres               postgres.Config
	Broker                 broker.Config
	API                    api.Config
	Console                console.Config

	parts          map[string]string // variables of the parts that dev sets
	traceFile      string
	sharedDatabase bool // migrate a database that has tables of others
}

func (p Process) devCommand() *cobra.Command {
	var dir, spans string
	var readOnly, shared bool
	c := &cobra.Command{
		Use:   "dev",
		Short: "Run everything in one process",
		Long: `Dev runs the API with the console, the relay and the consumers in one process, with its own
PostgreSQL and NATS servers on loopback. If DATABASE_URL or NATS_URL is set, it uses that server
instead. It prints the database first, and refuses one that has another program's tables and none of
Tidings, unless --shared-database is set. The data directory keeps the data, the tokens, and the
port and the password of NATS: the next start continues with them, also after a kill. API_ADDR and
OPS_ADDR set the other ports. With --data, give the same --data to the other commands. Ctrl-C stops
everything.

With --trace it writes spans as lines of JSON. tidings events find --id ID --trace shows the path of
one event.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := p.devConfig(c.Context(), readOnly)
			if err != nil {
				return &usageError{err}
			}
			cfg.sharedDatabase = shared
			if dir == "" {
				if dir, err = p.defaultData(); err != nil {
					return err
				}
			}
			dir, err := filepath.Abs(dir)
			if err != nil {
				return fmt.Errorf("absolute path of %s: %w", dir, err)
			}
			log, flush, err := daemon.NewLogger(p.Stderr, cfg.Log)
			if err != nil {
				return &usageError{err}
			}
			defer flush()
			if cfg.traceFile, err = traceFile(spans, dir); err != nil {
				return err
			}
			err = p.dev(c.Context(), cfg, dir, log)
			if c.Context().Err() != nil && errors.Is(err, context.Canceled) {
				return nil // stopped while it started
			}
			return err
		},
	}
	c.Flags().StringVar(&dir, "data", "", "the `directory` of its data (default: /var/lib/tidings/dev as root, else tidings/dev in "+
		"$XDG_DATA_HOME or ~/.local/share)")
	c.Flags().BoolVar(&readOnly, "console-read-only", false, "make the console read-only")
	c.Flags().BoolVar(&shared, "shared-database", false, "create tables in DATABASE_URL even if it has another program's tables")
	c.Flags().StringVar(&spans, "trace", "", "write spans to this `file`")
	c.Flags().Lookup("trace").NoOptDefVal = traceDefault
	return c
}

// devConfig reads the environment. Its defaults are those of one person on one machine.
func (p Process) devConfig(ctx context.Context, readOnly bool) (cfg devConfig, err error) {
	if err := envconfig.ProcessWith(ctx, &envconfig.Config{Target: &cfg, Lookuper: p.Env}); err != nil {
		return cfg, fmt.Errorf("read the environment: %w", err)
	}
	cfg.parts = map[string]string{}
	if _, set := p.Env.Lookup("CONSOLE"); !set {
		cfg.Console.On, cfg.parts["CONSOLE"] = true, "true"
	}
	if readOnly {
		cfg.parts["CONSOLE_READ_ONLY"] = "true"
	}
	if _, set := p.Env.Lookup("HEARTBEAT_INTERVAL"); !set {
		cfg.parts["HEARTBEAT_INTERVAL"] = devHeartbeat.String()
	}
	if cfg.API.TLSCert != "" {
		return cfg, errors.New("dev answers plain HTTP on loopback: unset API_TLS_CERT and API_TLS_KEY")
	}
	cfg.Log.Level, cfg.Log.Format = orDefault(cfg.Log.Level, "warn"), orDefault(cfg.Log.Format, "text") // a person reads dev's log
	// Before any server starts: the values that are still to come are all valid.
	example := instance{DatabaseURL: "postgres:///", NATSURL: "nats://127.0.0.1"}
	_, err = services.Configure(ctx, p.partsOf(cfg, example, strings.Repeat("0", 64)), nil, nil)
	return cfg, err
}

// partsOf returns the environment of dev's parts.
func (p Process) partsOf(cfg devConfig, in instance, cursorKey string) envconfig.Lookuper {
	maps.Copy(cfg.parts, map[string]string{
		"DATABASE_URL": in.DatabaseURL, "PROJECTIONS_DATABASE_URL": orDefault(in.ProjectionsDatabaseURL, in.DatabaseURL),
		"NATS_URL": in.NATSURL, "API_CURSOR_KEY": orDefault(cfg.API.CursorKey, cursorKey),
		// Dev's login may do all that the console offers.
		"CONSOLE_DATABASE_URL": "", "CONSOLE_PROJECTIONS_DATABASE_URL": "",
		"CONSOLE_OWNER_DATABASE_URL": orDefault(in.ProjectionsDatabaseURL, in.DatabaseURL),
	})
	return envconfig.MultiLookuper(envconfig.MapLookuper(cfg.parts), p.Env)
}

// dev starts the servers, then the parts, and stops them in the opposite order when ctx ends.
func (p Process) dev(ctx context.Context, cfg devConfig, dir string, log *slog.Logger) (stopErr error) {
	lock, err := lockData(ctx, dir)
	if err != nil {
		return err
	}
	defer func() { stopErr = errors.Join(stopErr, unlock(lock)) }()

	if err := p.checkDatabases(ctx, cfg); err != nil {
		return err
	}
	ctx, stopTracing, err := p.trace(ctx, cfg.traceFile, log)
	if err != nil {
		return err
	}
	defer func() { stopErr = errors.Join(stopErr, stopTracing()) }()

	// Ports first: a port in use is the most frequent error, so report it at once.
	apiListener, err := listen("API_ADDR", cfg.API.Addr)
	if err != nil {
		return err
	}
	defer apiListener.Close() // the server may have closed it already
	ops := daemon.NewOps("dev", cfg.OpsAddr, prometheus.NewRegistry(), log)
	opsAddr, err := ops.Listen()
	if err != nil {
		return portError("OPS_ADDR", cfg.OpsAddr, err)
	}

	state, err := readState(dir, cfg.Token)
	if err != nil {
		return err
	}
	in := instance{API: httpURL(apiListener.Addr()), Ops: httpURL(opsAddr), Token: state.Token, DatabaseURL: cfg.DatabaseURL,
		ProjectionsDatabaseURL: cfg.ProjectionsDatabaseURL, NATSURL: cfg.NATSURL, Trace: cfg.traceFile, PID: os.Getpid()}
	if cfg.Console.On {
		in.Console, in.ConsoleToken = in.API+"/console/", state.ConsoleToken
	}

	var last []daemon.Part // they watch the servers that the other parts need
	if in.DatabaseURL == "" {
		pg, err := startPostgres(ctx, filepath.Join(dir, "postgres"), p.Stderr)
		if err != nil {
			return err
		}
		defer abortAtSecondSignal(pg)()
		defer func() { stopErr = errors.Join(stopErr, pg.Stop()) }()
		if in.DatabaseURL, err = ownDatabase(ctx, pg); err != nil {
			return err
		}
		last = append(last, daemon.Part{Name: "PostgreSQL", Run: func(ctx context.Context) error { return watch(ctx, pg, dir) }})
	}
	if in.ProjectionsDatabaseURL == "" {
		in.ProjectionsDatabaseURL = in.DatabaseURL
	}
	if in.NATSURL == "" {
		server, err := startNATS(filepath.Join(dir, "nats"), state.NATSPort, state.NATSPassword, log)
		if err != nil {
			return err
		}
		defer server.Shutdown()
		in.NATSURL, state.NATSPort = server.URL(), portOf(server.URL())
		cfg.Broker.Unmanaged, cfg.parts["NATS_MANAGE"] = false, "true" // nobody else has streams there
	}
	if err := state.write(dir); err != nil {
		return err
	}
	cfg.Broker.URL = in.NATSURL

	if err := in.migrate(ctx, log); err != nil {
		return err
	}
	parts, err := services.Configure(ctx, p.partsOf(cfg, in, state.CursorKey), nil, apiListener)
	if err != nil {
		return err
	}
	return p.runDev(ctx, cfg, in, dir, log, append(parts.Stages(ops, log), append(last, daemon.Part{Name: "ops", Run: ops.Run})))
}

// runDev prepares the servers, greets, and runs the parts.
func (p Process) runDev(ctx context.Context, cfg devConfig, in instance, dir string, log *slog.Logger, stages [][]daemon.Part) error {
	connected, err := prepareServers(ctx, cfg, in, log)
	if err != nil {
		return err
	}
	if err := in.write(dir); err != nil {
		return err
	}
	// Requests that arrive before the API serves wait in its listener.
	if err := greet(p.Stdout, in, dir, cfg.NATSURL != "", connected); err != nil {
		return err
	}
	return daemon.RunStages(ctx, stages...)
}

// checkDatabases prints the databases that the environment names. It returns an error if one has
// tables of others, and none of Tidings: the variable may be left over from another program.
func (p Process) checkDatabases(ctx context.Context, cfg devConfig) error {
	for i, url := range []string{cfg.DatabaseURL, cfg.ProjectionsDatabaseURL} {
		name := []string{"DATABASE_URL", "PROJECTIONS_DATABASE_URL"}[i]
		if url == "" || i > 0 && url == cfg.DatabaseURL {
			continue
		}
		place, err := migrations.FindPlace(ctx, url)
		if err != nil {
			return fmt.Errorf("open %s: %w", name, err)
		}
		if place.Others > 0 && !cfg.sharedDatabase {
			return &usageError{fmt.Errorf("%s is %s, which has %s of others and none of Tidings: unset it to let dev start PostgreSQL, "+
				"or set --shared-database to make the tables of Tidings there", name, place, words.Of(int64(place.Others), "table"))}
		}
		if _, err := fmt.Fprintf(p.Stdout, "%s is %s.\n", name, place); err != nil {
			return err
		}
	}
	return nil
}

// trace starts tracing, to the file unless it is "", else as the environment configures it.
func (p Process) trace(ctx context.Context, file string, log *slog.Logger) (context.Context, func() error, error) {
	if file == "" {
		ctx, stop, err := daemon.Trace(ctx, p.Env, "dev", log, nil)
		return ctx, func() error { stop(); return nil }, err
	}
	f, err := openSpans(file)
	if err != nil {
		return ctx, nil, err
	}
	exporter, err := stdouttrace.New(stdouttrace.WithWriter(f))
	if err != nil {
		return ctx, nil, errors.Join(fmt.Errorf("write spans: %w", err), f.Close())
	}
	ctx, stop, err := daemon.Trace(ctx, p.Env, "dev", log, exporter)
	if err != nil {
		return ctx, nil, errors.Join(err, f.Close())
	}
	return ctx, func() error { stop(); return f.Close() }, nil
}

// watch returns an error when the server has ended by itself, and nil when ctx ends.
func watch(ctx context.Context, pg *pglocal.Server, dir string) error {
	select {
	case <-pg.Done():
		return fmt.Errorf("ended; its log is %s", filepath.Join(dir, "postgres", "postgres.log"))
	case <-ctx.Done():
		return nil
	}
}

// migrate migrates both databases to this program's schemas.
func (in instance) migrate(ctx context.Context, log *slog.Logger) error {
	if _, err := migrations.Up(ctx, in.DatabaseURL, migrations.Truth, log); err != nil {
		return err
	}
	_, err := migrations.Up(ctx, in.ProjectionsDatabaseURL, migrations.Projections, log)
	return err
}
