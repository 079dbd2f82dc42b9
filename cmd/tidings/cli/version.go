package cli

import (
	"context"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/migrations"
)

// build is the output of `tidings version --json`.
type build struct {
	Version     string `json:"version"`
	Revision    string `json:"revision,omitempty"`
	Go          string `json:"go"`
	Outbox      int64  `json:"outbox_schema"` // part of the truth, or alone
	Truth       int64  `json:"truth_schema"`
	Projections int64  `json:"projections_schema"`
	Slots       int    `json:"slots"`
}

func (p Process) versionCommand() *cobra.Command {
	return p.command(command{
		use: "version", short: "Show the version of this program and the schemas that it needs", json: oneObject,
		run: func(context.Context, *session, []string) (*report, error) {
			b := build{daemon.Version(), daemon.Revision(), runtime.Version(), migrations.Latest(migrations.Outbox),
				migrations.Latest(migrations.Truth), migrations.Latest(migrations.Projections), event.Slots}
			of := ""
			if b.Revision != "" {
				of = " of revision " + b.Revision
			}
			return reports(b,
				sentence("tidings %s%s, built with %s\nschemas: outbox %d, truth %d, projections %d\nslots: %d (the most partitions)\n",
					b.Version, of, b.Go, b.Outbox, b.Truth, b.Projections, b.Slots)), nil
		},
	})
}
