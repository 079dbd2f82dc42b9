package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/sethvargo/go-envconfig"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/brokermetrics"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/ops/console"
)

// apiName is the name of the API, as a binary and as a part.
const apiName = "api"

type apiConfig struct {
	DatabaseURL            string `env:"DATABASE_URL, required"`
	ProjectionsDatabaseURL string `env:"PROJECTIONS_DATABASE_URL, default=$DATABASE_URL"`
	OpsAddr                string `env:"OPS_ADDR, default=127.0.0.1:9181"`
	Postgres               postgres.Config
	Broker                 broker.Config
	API                    api.Config
	Console                console.Config
	// The port of the console alone. The API's port has no page of it.
	ConsoleAddr string `env:"CONSOLE_ADDR, default=127.0.0.1:8081"`
	// The login may act as tidings_system. For empty URLs see consoleDatabases. Without the console
	// the API needs no such login.
	ConsoleDatabaseURL            string `env:"CONSOLE_DATABASE_URL"`
	ConsoleProjectionsDatabaseURL string `env:"CONSOLE_PROJECTIONS_DATABASE_URL"`
	// The login owns the projections' tables, for replays. If it is empty, the console offers no
	// replay.
	ConsoleOwnerDatabaseURL string `env:"CONSOLE_OWNER_DATABASE_URL"`
}

// API runs the HTTP API. Any number of processes may run at once, with the same API_CURSOR_KEY.
func API() { daemon.Main(apiName, runAPI) }

func runAPI(ctx context.Context, env envconfig.Lookuper) error {
	var cfg apiConfig
	if err := daemon.Configure(ctx, env, &cfg); err != nil {
		return err
	}
	return daemon.Alone(ctx, apiName, cfg.OpsAddr, cfg.run(nil))
}

// apiPart returns the API, with the console if it is on, as a part of a process. It needs
// DATABASE_URL, PROJECTIONS_DATABASE_URL and NATS. Without l it opens its ports itself. Otherwise
// it serves the API on l, and the console too.
func apiPart(l net.Listener) configure {
	return func(ctx context.Context, env envconfig.Lookuper) (daemon.Run, error) {
		var cfg apiConfig
		err := daemon.Configure(ctx, env, &cfg)
		return cfg.run(l), err
	}
}

func (cfg apiConfig) run(l net.Listener) daemon.Run {
	return func(ctx context.Context, h daemon.Host) error { return cfg.serve(ctx, h, l) }
}

func (cfg apiConfig) serve(ctx context.Context, h daemon.Host, l net.Listener) error {
	log := h.Log
	truth, tokens, projections, closePools, err := databases(ctx, cfg)
	if err != nil {
		return err
	}
	defer closePools()
	// For wake-ups and cached pages: neither reads nor writes need a broker.
	nc, err := broker.Connect(cfg.Broker, apiName, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	a, err := newAPI(cfg.API, truth, tokens, projections, nc, cfg.Broker, h.Metrics, log)
	if err != nil {
		return err
	}
	truthURL, projectionsURL := consoleDatabases(cfg)
	see, closeConsole, err := a.openConsole(ctx, cfg.Console, cfg.Postgres, truthURL, projectionsURL, cfg.ConsoleOwnerDatabaseURL)
	if err != nil {
		return err
	}
	defer closeConsole()
	h.Metrics.MustRegister(daemon.NewCertificates(map[string]daemon.Expiry{
		"api": daemon.FileExpiry(cfg.API.TLSCert), "nats": daemon.FileExpiry(cfg.Broker.TLSCert),
		"postgres": postgres.CertificateExpiry(truth), "postgres_projections": postgres.CertificateExpiry(projections),
	}), brokermetrics.NewCredentials(cfg.Broker.Credentials))
	var listening atomic.Bool
	g, ctx := errgroup.WithContext(ctx)
	h.Ready(map[string]func(context.Context) error{
		"truth": truth.Ping, "truth schema": migrations.Ready(truth, migrations.Truth),
		"projections": projections.Ping, "projections schema": migrations.Ready(projections, migrations.Projections),
		"load": a.handler.Ready, "stopping": func(context.Context) error { return ctx.Err() },
		"port": func(context.Context) error {
			if !listening.Load() {
				return errors.New("waiting for the databases' schemas")
			}
			return nil
		},
	})
	drained, end := context.WithCancel(context.WithoutCancel(ctx)) // the requests in flight still need the waker
	g.Go(func() error { return a.waker.Run(drained) })
	g.Go(func() error { return broker.Watch(ctx, nc) })
	serving, stop := daemon.Delay(ctx, cfg.API.StopDelay)
	defer stop()
	g.Go(func() error { return broker.Listen(serving, nc, cfg.Broker, a.pages, log) }) // renews cached pages
	g.Go(func() error {
		defer end()
		if err := await(ctx, truth, projections, a, log); err != nil {
			return err
		}
		g.Go(func() error { return a.kinds.Run(ctx) })
		g.Go(func() error { return a.handler.Run(serving) })
		g.Go(func() error { return a.sampler(truth).Run(serving) })
		g.Go(func() error { return see.Run(serving) })
		log := log.With("component", apiName)
		l, served, err := cfg.open(serving, g, l, a.handler, see, log)
		if err != nil {
			return err
		}
		listening.Store(true)
		return daemon.Serve(serving, l, served, cfg.API.AddressConnections, log)
	})
	return g.Wait()
}

// open returns l with a handler that serves the API and the console on it. Without l, it opens the
// API's port, and the console's, which it serves in g.
func (cfg apiConfig) open(ctx context.Context, g *errgroup.Group, l net.Listener, api http.Handler, see *console.Console,
	log *slog.Logger) (net.Listener, http.Handler, error) {
	if l != nil && see != nil {
		api = see.Front(api)
	}
	if l != nil {
		return l, api, nil
	}
	l, err := daemon.Listen(cfg.API.Addr, cfg.API.TLSCert, cfg.API.TLSKey, log)
	if err != nil {
		return nil, nil, err
	}
	if see != nil {
		if err := serveConsole(ctx, g, cfg, see, log); err != nil {
			return nil, nil, errors.Join(err, l.Close())
		}
	}
	return l, api, nil
}

// serveConsole opens the console's port and serves it in g.
func serveConsole(ctx context.Context, g *errgroup.Group, cfg apiConfig, see *console.Console, log *slog.Logger) error {
	l, err := daemon.Listen(cfg.ConsoleAddr, cfg.API.TLSCert, cfg.API.TLSKey, log)
	if err != nil {
		return fmt.Errorf("serve the console: %w", err)
	}
	g.Go(func() error {
		return daemon.Serve(ctx, l, see.Front(http.NotFoundHandler()), cfg.API.AddressConnections, log)
	})
	return nil
}

// consoleDatabases returns the URLs of the console. If truth and projections are in one database,
// the console uses one login for both.
func consoleDatabases(cfg apiConfig) (truth, projections string) {
	truth, projections = cmp.Or(cfg.ConsoleDatabaseURL, cfg.DatabaseURL), cfg.ProjectionsDatabaseURL
	if projections == cfg.DatabaseURL {
		projections = truth
	}
	return truth, cmp.Or(cfg.ConsoleProjectionsDatabaseURL, projections)
}

// databases opens the pools of the truth for requests, of the truth for tokens, and of the
// projections.
func databases(ctx context.Context, cfg apiConfig) (truth, tokens, projections *pgxpool.Pool, closeAll func(), err error) {
	few := cfg.Postgres
	few.MaxConns = api.TokenConns
	var open []*pgxpool.Pool
	closeAll = func() {
		for _, pool := range open {
			pool.Close()
		}
	}
	for _, p := range []struct {
		to  **pgxpool.Pool
		url string
		cfg postgres.Config
	}{{&truth, cfg.DatabaseURL, cfg.Postgres}, {&tokens, cfg.DatabaseURL, few}, {&projections, cfg.ProjectionsDatabaseURL, cfg.Postgres}} {
		if *p.to, err = postgres.Open(ctx, p.url, p.cfg, postgres.RoleAPI, apiName); err != nil {
			closeAll()
			return nil, nil, nil, nil, err
		}
		open = append(open, *p.to)
	}
	return truth, tokens, projections, closeAll, nil
}

// await waits for the databases' schemas and loads the data that requests need.
func await(ctx context.Context, truth, projections *pgxpool.Pool, a *apiParts, log *slog.Logger) error {
	if err := migrations.Await(ctx, truth, migrations.Truth, log); err != nil {
		return err
	}
	if err := migrations.Await(ctx, projections, migrations.Projections, log); err != nil {
		return err
	}
	if err := a.kinds.Load(ctx); err != nil {
		return err
	}
	return a.handler.Look(ctx)
}
