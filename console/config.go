package console

import (
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
)

// Config is the console's environment.
type Config struct {
	On       bool `env:"CONSOLE, default=false"`           // serve /console/ on the API's port
	ReadOnly bool `env:"CONSOLE_READ_ONLY, default=false"` // offer and take no act
	// TraceURL is where a trace is shown, with {trace_id} in the place of its id; without it an event's page has the id alone.
	TraceURL string `env:"CONSOLE_TRACE_URL"`
}

// Conns is how many connections each of the console's pools wants: it reads once a second for all who look, and few people act at once.
const Conns = 4

// Deps are what the console works with. Both pools act as postgres.RoleSystem.
type Deps struct {
	Truth       *pgxpool.Pool
	Projections *pgxpool.Pool
	NATS        *nats.Conn
	JetStream   jetstream.JetStream // of NATS; may be away: then pages say so
	Broker      broker.Config
	Kinds       *kinds.Catalog // which kinds are in force, by the truth
	Fleet       []projections.Projection
	Wake        func(slot int) // the relay, after a write that makes events; nil: it polls
	// OwnerURL is of Projections with a login that owns its tables, for replays; empty: the console names the command instead.
	OwnerURL string
	Postgres postgres.Config // of the connections of a replay
	Keys     [][]byte        // of sessions: the first seals, each opens; api.Config.CursorKeys
	Log      *slog.Logger
}
