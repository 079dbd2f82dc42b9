package cli

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/archive"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// devParts makes what dev runs, in the order in which it stops. closeParts closes what they share.
func devParts(ctx context.Context, cfg devConfig, in instance, state devState, alone bool, apiListener net.Listener, reg *prometheus.Registry,
	ops *daemon.Ops, log *slog.Logger) (stages [][]part, closeParts func(), err error) {
	var closers []func()
	closeParts = func() {
		for _, c := range slices.Backward(closers) {
			c()
		}
	}
	defer func() {
		if err != nil {
			closeParts()
		}
	}()
	open := func(url string, role postgres.Role, name string) *pgxpool.Pool {
		if err != nil {
			return nil
		}
		var pool *pgxpool.Pool
		if pool, err = postgres.Open(ctx, url, cfg.Postgres, role, name); err == nil {
			closers = append(closers, pool.Close)
		}
		return pool
	}
	truthAPI := open(in.DatabaseURL, postgres.RoleAPI, "api")
	projectionsAPI := open(in.ProjectionsDatabaseURL, postgres.RoleAPI, "api")
	truth := open(in.DatabaseURL, postgres.RoleSystem, "relay")
	projections := open(in.ProjectionsDatabaseURL, postgres.RoleSystem, "consumers")
	if err != nil {
		return nil, nil, err
	}
	if err := store.EnsureToken(ctx, truth, devTenant, devName, in.Token, store.Roles()); err != nil {
		return nil, nil, err
	}
	if alone {
		for _, pool := range []*pgxpool.Pool{truth, projections} {
			if err := lease.Clear(ctx, pool); err != nil {
				return nil, nil, err
			}
		}
	}
	metricsOf := func(part string) prometheus.Registerer {
		return prometheus.WrapRegistererWith(prometheus.Labels{"part": part}, reg)
	}

	nc, err := broker.Connect(cfg.Broker, "dev", log)
	if err != nil {
		return nil, nil, err
	}
	closers = append(closers, nc.Close)
	waker := broker.NewWaker(nc)
	cfg.API.CursorKey = state.CursorKey
	handler, err := api.New(cfg.API, api.Deps{Store: store.New(truthAPI, waker.Wake), Projections: projectionsAPI, Log: log, Reg: metricsOf("api")})
	if err != nil {
		return nil, nil, err
	}
	r, err := relay.New(cfg.Relay, truth, cfg.Broker, log, metricsOf("relay"))
	if err != nil {
		return nil, nil, err
	}
	metricsOf("relay").MustRegister(outbox.NewCollector(truth, log))
	metricsOf(archive.Name).MustRegister(outbox.NewCollector(truth, log)) // a dead relay is seen there
	ops.Ready("relay", r.Ready)
	ops.Ready("truth", truth.Ping)
	ops.Ready("projections", projections.Ping)
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, nil, fmt.Errorf("use JetStream: %w", err)
	}
	var consuming []part
	for _, projection := range []consumers.Projection{followercounts.New(), threadcache.New(), archive.New()} {
		name := projection.Name()
		c, err := consumers.New(cfg.Consumers, consumers.Deps{Pool: projections, JetStream: js, Broker: cfg.Broker, Registry: metricsOf(name), Log: log}, projection)
		if err != nil {
			return nil, nil, err
		}
		ops.Ready(name, c.Ready)
		consuming = append(consuming, part{name, c.Run})
	}
	return [][]part{
		{{"api", func(ctx context.Context) error { return daemon.Serve(ctx, apiListener, handler, log) }}, {"waker", waker.Run}},
		consuming,
		{{"relay", r.Run}},
	}, closeParts, nil
}
