package console

import (
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections"
)

// Config is the console's environment.
type Config struct {
	On       bool `env:"CONSOLE, default=false"`           // serve /console/
	ReadOnly bool `env:"CONSOLE_READ_ONLY, default=false"` // offer and take no act
	// TraceURL is the address of a trace viewer, with {trace_id} in place of the trace's id.
	// Without it, an event's page shows the id alone.
	TraceURL string `env:"CONSOLE_TRACE_URL"`
}

// Conns is the number of connections of each of the console's pools. Few are enough: all watchers
// share one read per second, and few people act at once.
const Conns = 4

// Deps are the dependencies of the console. Both pools act as postgres.RoleSystem.
type Deps struct {
	Truth       *pgxpool.Pool
	Projections *pgxpool.Pool
	NATS        *nats.Conn
	JetStream   jetstream.JetStream // on NATS; pages report when its servers are unavailable
	Broker      broker.Config
	Kinds       *catalog.Catalog // the kinds that the truth has in force
	Fleet       []projections.Projection
	Wake        func(slot int) // wakes the relay after a write that appended events; nil: the relay polls
	// OwnerURL connects to the database of Projections with a login that owns its tables, for
	// replays. If it is empty, the console names the command instead.
	OwnerURL string
	Postgres postgres.Config // for the connections of a replay
	Keys     [][]byte        // encrypt sessions: the first key seals, every key opens; from api.Config.CursorKeys
	Log      *slog.Logger
}
