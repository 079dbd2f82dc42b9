package services

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/heads"
	"github.com/tidings/tidings/event/contracts"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/ops/console"
	"github.com/tidings/tidings/ops/samples"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// apiParts are the parts of an API.
type apiParts struct {
	handler *api.Handler
	waker   *broker.Waker
	kinds   *catalog.Catalog // of the truth

	pages  *api.Pages
	cfg    api.Config
	nc     *nats.Conn
	broker broker.Config
	log    *slog.Logger
}

// newAPI returns the parts of an API. NATS only wakes relays and renews cached pages: neither reads
// nor writes need it.
func newAPI(cfg api.Config, truth, tokens, projections *pgxpool.Pool, nc *nats.Conn, b broker.Config, reg prometheus.Registerer,
	log *slog.Logger) (a *apiParts, err error) {
	a = &apiParts{waker: broker.NewWaker(nc, b), kinds: catalog.New(truth, catalog.Truth, log), pages: api.NewPages(cfg, reg),
		cfg: cfg, nc: nc, broker: b, log: log}
	a.handler, err = api.New(cfg, api.Deps{Store: store.New(truth, a.waker.Wake), Tokens: tokens, DLQ: outbox.NewDLQ(truth, a.waker.Wake),
		Projections: projections, Kinds: a.kinds, Fleet: fleet.Projections(a.kinds.Now), Pages: a.pages, Streams: heads.Of(nc, b),
		Names: contracts.Names{Stream: b.Stream, Prefix: b.Prefix, Live: b.LivePrefix, Source: b.Source, Objects: b.LiveObjects},
		Log:   log, Reg: reg,
		Upstreams: func(ctx context.Context) ([]upstreams.Upstream, error) { return declared.List(ctx, truth) }})
	return a, err
}

// sampler samples the requests of this process for the console.
func (a *apiParts) sampler(truth *pgxpool.Pool) samples.Sampler {
	return samples.Sampler{Pool: truth, Source: lease.Owner(apiName), Version: daemon.Version(), Log: a.log,
		Read: func(context.Context) (map[string]float64, error) {
			requests, p99 := a.handler.Traffic()
			figures := map[string]float64{samples.Requests: float64(requests)}
			if p99 > 0 {
				figures[samples.P99] = p99.Seconds()
			}
			return figures, nil
		}}
}

// openConsole returns a console beside the API, and a function that closes its pools. The console
// is nil if it is off. Its pools have few connections and act as the system role, and its readers
// take no connections from the other parts. The login of ownerURL owns the projections' tables, for
// replays; without it the console offers none.
func (a *apiParts) openConsole(ctx context.Context, cfg console.Config, few postgres.Config,
	truthURL, projectionsURL, ownerURL string) (*console.Console, func(), error) {
	if !cfg.On {
		return nil, func() {}, nil
	}
	keys, err := a.cfg.CursorKeys()
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(a.nc)
	if err != nil {
		return nil, nil, fmt.Errorf("use JetStream: %w", err)
	}
	few.MaxConns = console.Conns
	truth, err := postgres.Open(ctx, truthURL, few, postgres.RoleSystem, "console")
	if err != nil {
		return nil, nil, err
	}
	projections, err := postgres.Open(ctx, projectionsURL, few, postgres.RoleSystem, "console")
	if err != nil {
		truth.Close()
		return nil, nil, err
	}
	closePools := func() { projections.Close(); truth.Close() }
	c, err := console.New(cfg, console.Deps{Truth: truth, Projections: projections, NATS: a.nc, JetStream: js, Broker: a.broker,
		Kinds: a.kinds, Fleet: fleet.Projections(a.kinds.Now), Wake: a.waker.Wake, OwnerURL: ownerURL, Postgres: few, Keys: keys,
		Log: a.log})
	if err != nil {
		closePools()
	}
	return c, closePools, err
}
