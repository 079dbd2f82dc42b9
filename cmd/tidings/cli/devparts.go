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

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/heads"
	"github.com/tidings/tidings/cmd/internal/projector"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/console"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
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
	kinds, truthKinds  *kinds.Catalog // of the projections' database, of the truth's
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
	waker, pages := broker.NewWaker(w.nc, w.cfg.Broker), api.NewPages(w.cfg.API, w.metrics("api"))
	serving, err := w.api(ctx, listener, waker, pages)
	if err != nil {
		return nil, err
	}
	w.kinds = kinds.NewCatalog(w.projections, kinds.Projections, w.log)
	consuming := []part{{"nats", func(ctx context.Context) error { return broker.Watch(ctx, w.nc) }}, {"wake", waker.Run},
		{"kinds", w.kinds.Run}, {"kinds of the truth", w.truthKinds.Run}, {"live", func(ctx context.Context) error {
			return broker.Listen(ctx, w.nc, w.cfg.Broker, event.AggregateFollow, pages, w.log)
		}}}
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
	list, err := upkeep.Jobs(w.cfg.Upkeep, upkeep.Deps{Truth: w.truth, Projections: w.projections, Cell: w.cfg.Broker.Stream,
		Kinds: w.truthKinds.Now, Registry: w.metrics(history.Name), Log: w.log}, upkeep.Current(w.truth))
	if err != nil {
		return nil, err
	}
	runner, err := jobs.New(w.truth, list, w.log, w.metrics(history.Name))
	if err != nil {
		return nil, err
	}
	remover, err := store.NewRemover(w.truth, waker.Wake, w.truthKinds.Now, w.log, w.metrics(history.Name))
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

func (w *wiring) api(ctx context.Context, listener net.Listener, waker *broker.Waker, pages *api.Pages) ([]part, error) {
	truth, err := w.pool(ctx, w.in.DatabaseURL, postgres.RoleAPI, "api")
	if err != nil {
		return nil, err
	}
	projections, err := w.pool(ctx, w.in.ProjectionsDatabaseURL, postgres.RoleAPI, "api")
	if err != nil {
		return nil, err
	}
	w.truthKinds = kinds.NewCatalog(truth, kinds.Truth, w.log)
	if err := w.truthKinds.Load(ctx); err != nil {
		return nil, err
	}
	handler, err := api.New(w.cfg.API, api.Deps{Store: store.New(truth, waker.Wake), Tokens: truth, DLQ: outbox.NewDLQ(truth, waker.Wake),
		Projections: projections, Kinds: w.truthKinds, Fleet: fleet.Projections(w.truthKinds.Now), Pages: pages,
		Streams: heads.Of(w.nc, w.cfg.Broker), Log: w.log, Reg: w.metrics("api")})
	if err != nil {
		return nil, err
	}
	w.ops.Ready("load", handler.Ready)
	if err := handler.Look(ctx); err != nil {
		return nil, err
	}
	served, parts := http.Handler(handler), []part{{"as_of", handler.Run}}
	if w.cfg.Console.On {
		see, err := w.console(ctx, waker)
		if err != nil {
			return nil, err
		}
		served, parts = see.Front(handler), append(parts, part{"console", see.Run})
	}
	return append(parts, part{"api", func(ctx context.Context) error {
		return daemon.Serve(ctx, listener, served, w.cfg.API.AddressConnections, w.log.With("component", "api"))
	}}), nil
}

// console creates the console with pools of its own, so that its readers take no connections from
// the other parts.
func (w *wiring) console(ctx context.Context, waker *broker.Waker) (*console.Console, error) {
	keys, err := w.cfg.API.CursorKeys()
	if err != nil {
		return nil, err
	}
	shared := w.cfg.Postgres.MaxConns
	w.cfg.Postgres.MaxConns = console.Conns
	defer func() { w.cfg.Postgres.MaxConns = shared }()
	truth, err := w.pool(ctx, w.in.DatabaseURL, postgres.RoleSystem, "console")
	if err != nil {
		return nil, err
	}
	projections, err := w.pool(ctx, w.in.ProjectionsDatabaseURL, postgres.RoleSystem, "console")
	if err != nil {
		return nil, err
	}
	return console.New(w.cfg.Console, console.Deps{Truth: truth, Projections: projections, NATS: w.nc, JetStream: w.js,
		Broker: w.cfg.Broker, Kinds: w.truthKinds,
		Fleet: fleet.Projections(w.truthKinds.Now), Wake: waker.Wake, OwnerURL: w.in.ProjectionsDatabaseURL, Postgres: w.cfg.Postgres,
		Keys: keys, Log: w.log})
}
