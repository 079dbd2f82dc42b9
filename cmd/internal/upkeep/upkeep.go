// Package upkeep lists the scheduled jobs of a fleet in one place: for the archiver and dev, which run them when they are due, and
// for the commands that run them at once.
package upkeep

import (
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/internal/jobs"
)

// Config is the environment of all jobs.
type Config struct{}

// Validate reports every value out of bounds.
func (c Config) Validate() error { return nil }

// Deps are what jobs work with. The pools act as the system role; that of the projections may be that of the truth.
type Deps struct {
	Truth, Projections *pgxpool.Pool
	Registry           prometheus.Registerer
	Log                *slog.Logger
}

// Jobs returns every job. It starts nothing.
func Jobs(cfg Config, d Deps) ([]jobs.Job, error) {
	return nil, cfg.Validate()
}
