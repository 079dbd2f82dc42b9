package cli

import (
	"fmt"
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
	Truth       int64  `json:"truth_schema"`
	Projections int64  `json:"projections_schema"`
	Slots       int    `json:"slots"`
}

func (p Process) versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program and the schemas that it needs",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			b := build{daemon.Version(), daemon.Revision(), runtime.Version(), migrations.Latest(migrations.Truth),
				migrations.Latest(migrations.Projections), event.Slots}
			if asJSON {
				return p.writeJSON(b)
			}
			of := ""
			if b.Revision != "" {
				of = " of revision " + b.Revision
			}
			_, err := fmt.Fprintf(p.Stdout,
				"tidings %s%s, built with %s\nschemas: truth %d, projections %d\nslots: %d (the most partitions)\n",
				b.Version, of, b.Go, b.Truth, b.Projections, b.Slots)
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return c
}
