package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/cmd/internal/services"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/relay"
)

// wiring creates the parts that dev runs, and owns their shared connections.
type wiring struct {
	cfg devConfig
	in  instance
	reg *prometheus.Registry
	ops *daemon.Ops
	log *slog.Logger

	truth, projections *pgxpool.Pool // as the system role
	nc                 *nats.Conn
	js                 jetstream.JetStream
	kinds              *kinds.Catalog // of the projections' database
	closers            []func()
}

// close closes the shared connections. The parts have ended.
func (w *wiring) close() {
	for _, c := range slices.Backward(w.closers) {
		c()
	}
}

func (w *wiring) pool(ctx context.Context, url string, role postgres.Role, name string) (*pgxpool.Pool, error) {
	pool, err := postgres.Open(ctx, url, w.cfg.Postgres, role, name)
	if err == nil {
		w.closers = append(w.closers, pool.Close)
	}
	return pool, err
}

// metrics returns the registerer of a part: all parts share the ops port, and a label names the
// part.
func (w *wiring) metrics(part string) prometheus.Registerer {
	return prometheus.WrapRegistererWith(prometheus.Labels{"part": part}, w.reg)
}

// connect opens the shared connections, and prepares the databases and the first stream.
func (w *wiring) connect(ctx context.Context) (err error) {
	if w.truth, err = w.pool(ctx, w.in.DatabaseURL, postgres.RoleSystem, "relay"); err != nil {
		return err
	}
	if w.projections, err = w.pool(ctx, w.in.ProjectionsDatabaseURL, postgres.RoleSystem, "consumers"); err != nil {
		return err
	}
	if w.nc, err = broker.Connect(w.cfg.Broker, "dev", w.log); err != nil {
		return err
	}
	w.closers = append(w.closers, w.nc.Close)
	if w.js, err = jetstream.New(w.nc); err != nil {
		return fmt.Errorf("use JetStream: %w", err)
	}
	if err := tokens.Ensure(ctx, w.truth, devTenant, devName, w.in.Token, tokens.Roles()); err != nil {
		return err
	}
	if w.cfg.Console.On {
		roles := []string{tokens.RoleRead, tokens.RoleModerate, tokens.RoleAdmin}
		if err := tokens.Ensure(ctx, w.truth, tokens.SystemTenant, devName, w.in.ConsoleToken, roles); err != nil {
			return err
		}
	}
	if w.cfg.DatabaseURL != "" {
		return nil
	}
	// Only this dev uses the database, so a killed earlier one no longer needs its leases.
	if err := lease.Clear(ctx, w.truth); err != nil {
		return err
	}
	first, err := outbox.ReadPartition(ctx, w.truth, 0)
	if err != nil || first.Stream != "" || w.cfg.NATSURL != "" {
		return err // the relay checks that a stream is still the one that the database knows
	}
	// Consumers start together with the relay, and need the stream.
	_, err = broker.Declare(ctx, w.js, w.cfg.Broker, broker.Partition{FirstSlot: first.FirstSlot, LastSlot: first.LastSlot}, w.log)
	return err
}

// parts creates everything that runs, in the order in which it stops.
func (w *wiring) parts(ctx context.Context, listener net.Listener) ([][]part, error) {
	a, serving, err := w.api(ctx, listener)
	if err != nil {
		return nil, err
	}
	w.kinds = kinds.NewCatalog(w.projections, kinds.Projections, w.log)
	consuming := []part{{"nats", func(ctx context.Context) error { return broker.Watch(ctx, w.nc) }}, {"wake", a.Waker.Run},
		{"kinds", w.kinds.Run}, {"kinds of the truth", a.Kinds.Run}, {"live", a.Listen}}
	for _, projection := range fleet.Projections(w.kinds.Now) {
		name := projection.Name()
		c, err := consumers.New(w.cfg.Consumers,
			consumers.Deps{Pool: w.projections, Kinds: w.kinds, JetStream: w.js,
				Streams:  consumers.Streams{Name: w.cfg.Broker.Stream, Prefix: w.cfg.Broker.Prefix, Timeout: w.cfg.Broker.Timeout},
				Registry: w.metrics(name), Log: w.log}, projection)
		if err != nil {
			return nil, err
		}
		w.ops.Ready(name, c.Ready)
		consuming = append(consuming, part{name, c.Run})
		drift, err := projector.NewDrift(w.cfg.Verify, w.truth, w.projections, w.js, w.cfg.Broker, projection, w.metrics(name), w.log)
		if err != nil {
			return nil, err
		}
		consuming = append(consuming, part{name + " verify", drift.Run})
	}
	runner, remover, err := services.NewArchiving(w.cfg.Upkeep, upkeep.Deps{Truth: w.truth, Projections: w.projections,
		Cell: w.cfg.Broker.Stream, Kinds: a.Kinds.Now, Registry: w.metrics(history.Name), Log: w.log}, a.Waker.Wake)
	if err != nil {
		return nil, err
	}
	consuming = append(consuming, part{"jobs", runner.Run}, part{"removals", remover.Run})
	r, err := relay.New(w.cfg.Relay, w.truth, w.cfg.Broker, w.log, w.metrics("relay"))
	if err != nil {
		return nil, err
	}
	w.ops.Ready("relay", r.Ready)
	w.ops.Ready("truth", w.truth.Ping)
	w.ops.Ready("projections", w.projections.Ping)
	for _, part := range []string{"relay", history.Name} { // in a fleet both export it, so that the archiver shows a dead relay's outbox
		w.metrics(part).MustRegister(outbox.NewCollector(w.truth, w.log))
	}
	w.metrics("relay").MustRegister(postgres.NewBlockedCollector(w.truth, w.log))
	w.metrics(history.Name).MustRegister(projector.NewLagCollector(w.projections, w.js, w.cfg.Broker, w.log),
		broker.NewCollector(w.js, w.cfg.Broker, w.log),
		prometheus.WrapCollectorWith(prometheus.Labels{"database": "truth and projections"}, postgres.NewSizesCollector(w.truth, w.log)))
	return [][]part{serving, consuming, {{"relay", r.Run}}}, nil
}

// api creates the API and the console, whose pools are their own.
func (w *wiring) api(ctx context.Context, listener net.Listener) (*services.APIParts, []part, error) {
	truth, err := w.pool(ctx, w.in.DatabaseURL, postgres.RoleAPI, "api")
	if err != nil {
		return nil, nil, err
	}
	projections, err := w.pool(ctx, w.in.ProjectionsDatabaseURL, postgres.RoleAPI, "api")
	if err != nil {
		return nil, nil, err
	}
	a, err := services.NewAPI(w.cfg.API, truth, truth, projections, w.nc, w.cfg.Broker, w.metrics("api"), w.log)
	if err != nil {
		return nil, nil, err
	}
	w.ops.Ready("load", a.Handler.Ready)
	if err := a.Load(ctx); err != nil {
		return nil, nil, err
	}
	served, parts := http.Handler(a.Handler), []part{{"as_of", a.Handler.Run}}
	see, closeConsole, err := a.OpenConsole(ctx, w.cfg.Console, w.cfg.Postgres,
		w.in.DatabaseURL, w.in.ProjectionsDatabaseURL, w.in.ProjectionsDatabaseURL)
	if err != nil {
		return nil, nil, err
	}
	w.closers = append(w.closers, closeConsole)
	if see != nil {
		served, parts = see.Front(a.Handler), append(parts, part{"console", see.Run})
	}
	return a, append(parts, part{"api", func(ctx context.Context) error {
		return daemon.Serve(ctx, listener, served, w.cfg.API.AddressConnections, w.log.With("component", "api"))
	}}), nil
}
