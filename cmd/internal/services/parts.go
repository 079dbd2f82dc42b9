package services

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/cmd/internal/relayservice"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// configure reads a part's environment and returns the part.
type configure func(ctx context.Context, env envconfig.Lookuper) (daemon.Run, error)

const relayName = "relay"

type named struct {
	name string
	part configure
}

// parts returns all parts. They stop in the order of the stages: requests first, then what reads
// the streams, and then the relay, which writes them. api is the API's port, or nil.
func parts(api net.Listener) [][]named {
	return [][]named{
		{{apiName, apiPart(api)}},
		append(projectionParts(), named{jobsName, jobsPart}),
		{{relayName, relayservice.Part}},
	}
}

// projectionParts returns the consumer of each projection of the fleet.
func projectionParts() (all []named) {
	for i, name := range fleet.Names() {
		all = append(all, named{name, consumer(func(now func() *kinds.Set) projections.Projection { return fleet.Projections(now)[i] })})
	}
	return all
}

// Parts returns the names of the parts that one process can run together.
func Parts() (names []string) {
	for _, stage := range parts(nil) {
		for _, p := range stage {
			names = append(names, p.name)
		}
	}
	return names
}

// ErrOutboxAlone reports a part that needs the rest of the truth.
var ErrOutboxAlone = errors.New("DATABASE_URL has the outbox alone (docs/your-tables.md): run `tidings serve relay jobs`")

// CheckOutboxAlone returns ErrOutboxAlone if the outbox is alone in its database and names, or all
// parts without names, has a part that could only wait there. It returns nil if it cannot ask the
// database now, for example because the login may not act as tidings_system: the parts wait, and
// report why.
func CheckOutboxAlone(ctx context.Context, env envconfig.Lookuper, names []string) error {
	waits := func(name string) bool { return name != relayName && name != jobsName }
	if len(names) > 0 && !slices.ContainsFunc(names, waits) {
		return nil
	}
	var cfg struct {
		DatabaseURL string `env:"DATABASE_URL"`
		Postgres    postgres.Config
	}
	if err := daemon.Configure(ctx, env, &cfg); err != nil || cfg.DatabaseURL == "" {
		return err
	}
	pool, err := postgres.Open(ctx, cfg.DatabaseURL, cfg.Postgres, postgres.RoleSystem, "serve")
	if err != nil {
		return err
	}
	defer pool.Close()
	if alone, err := migrations.IsOutboxAlone(ctx, pool); err != nil || !alone {
		return nil
	}
	return ErrOutboxAlone
}

// Together is a process of several parts. Each has the pools and the role in the database that it
// has as a binary.
type Together [][]member

type member struct {
	name string
	run  daemon.Run
}

// Configure reads the environment of the parts in names, or of all without names. Its error lists
// every variable that is missing or out of bounds. If api is not nil, the API serves on it, and the
// console too.
func Configure(ctx context.Context, env envconfig.Lookuper, names []string, api net.Listener) (t Together, err error) {
	var bad []string
	for _, name := range names {
		if !slices.Contains(Parts(), name) {
			bad = append(bad, fmt.Sprintf("%q is no part: want some of %s", name, strings.Join(Parts(), ", ")))
		}
	}
	for _, stage := range parts(api) {
		var members []member
		for _, p := range stage {
			if len(names) > 0 && !slices.Contains(names, p.name) {
				continue
			}
			run, err := p.part(ctx, env)
			if err != nil {
				bad = append(bad, strings.Split(err.Error(), "\n")...)
			}
			members = append(members, member{p.name, run})
		}
		t = append(t, members)
	}
	if len(bad) == 0 {
		return t, nil
	}
	slices.Sort(bad) // several parts read one variable
	return nil, errors.New(strings.Join(slices.Compact(bad), "\n"))
}

// Stages returns the parts on the hosts of a process, in the order in which daemon.RunStages stops
// them.
func (t Together) Stages(ops *daemon.Ops, log *slog.Logger) (stages [][]daemon.Part) {
	for _, members := range t {
		var stage []daemon.Part
		for _, m := range members {
			h := ops.Host(m.name, log)
			stage = append(stage, daemon.Part{Name: m.name, Run: func(ctx context.Context) error { return m.run(ctx, h) }})
		}
		stages = append(stages, stage)
	}
	return stages
}

// Named returns the service with the name of its command, or nil if no service has the name.
func Named(name string) func() {
	switch name { // not a map, which would link every service into every command
	case apiName:
		return API
	case relayName:
		return relayservice.Main
	case followercounts.Name:
		return FollowerCounts
	case threadcache.Name:
		return ThreadCache
	case history.Name:
		return Archiver
	}
	return nil
}
