package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/store"
)

// archivesShown is the number of runs that moved threads which `tidings archive status` shows.
const archivesShown = 20

// undone is the output of `tidings archive undo --json`.
type undone struct {
	ArchiveID int64 `json:"archive_id"`
	Threads   int64 `json:"threads"`
	Comments  int64 `json:"comments"`
}

func (p Process) archiveUndoCommand() *cobra.Command {
	var (
		data   string
		id     int64
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "undo --id ID",
		Short: "Bring back the threads of comments that one run of the archiver moved",
		Long: `Undo brings back every thread that one run of the archiver moved. tidings archive status shows the
ids of the runs. The threads do not move again until comment_archive_after (tidings archive
settings) has passed once more. No job runs meanwhile. Ctrl-C stops undo after the current slice;
the same command continues.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if id < 1 {
				return &usageError{errors.New("undo needs the --id of an archive run")}
			}
			d, err := p.databases(c.Context(), data, "archive")
			if err != nil {
				return err
			}
			defer d.close()
			log := daemon.CommandLogger(p.Stderr, slog.LevelWarn)
			now, err := truthKinds(c.Context(), d.truth)
			if err != nil {
				return err
			}
			archiver, err := store.NewArchiver(d.truth, nil, func() *kinds.Set { return now }, log, prometheus.NewRegistry())
			if err != nil {
				return err
			}
			u := undone{ArchiveID: id}
			err = p.withoutJobs(c.Context(), d.truth, "archive-undo", func(ctx context.Context, h *jobs.Hold) (err error) {
				u.Threads, u.Comments, err = archiver.Undo(ctx, h, id)
				return err
			})
			if errors.Is(err, store.ErrNotFound) {
				return &usageError{fmt.Errorf("no archive run with id %d moved a thread: see `tidings archive status`", id)}
			}
			if err != nil {
				return fmt.Errorf("after %s: %w", words.Of(u.Threads, "thread"), err)
			}
			if asJSON {
				return p.writeJSON(u)
			}
			_, err = fmt.Fprintf(p.Stdout, "Archive %d: %s with %s returned.\n", id, words.Of(u.Threads, "thread"),
				words.Of(u.Comments, "comment"))
			if err != nil {
				return fmt.Errorf("write the result: %w", err)
			}
			return nil
		},
	}
	c.Flags().Int64Var(&id, "id", 0, "the `id` of the archive run")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}
