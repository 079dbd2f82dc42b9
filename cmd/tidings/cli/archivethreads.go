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

// shelvingsShown is the number of runs that moved threads which `tidings archive status` shows.
const shelvingsShown = 20

// undoResult is the output of `tidings archive undo --json`.
type undoResult struct {
	ArchiveID int64 `json:"archive_id"`
	Threads   int64 `json:"threads"`
	Comments  int64 `json:"comments"`
}

func (p Process) archiveUndoCommand() *cobra.Command {
	var id int64
	c := p.command(command{
		use:   "undo --id ID",
		short: "Bring back the threads of comments that one run of the archiver moved",
		long: `Undo brings back every thread that one run of the archiver moved. tidings archive status shows the
ids of the runs. The threads do not move again until comment_archive_after (tidings archive
settings) has passed once more. No job runs meanwhile. Ctrl-C stops undo after the current slice;
the same command continues.`,
		name: "archive", needs: needDatabases, json: oneObject,
		check: func(*session, []string) error {
			if id < 1 {
				return &usageError{errors.New("undo needs the --id of an archive run")}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			now, err := truthKinds(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			shelver, err := store.NewShelver(s.Truth, nil, func() *kinds.Set { return now },
				daemon.CommandLogger(s.Stderr, slog.LevelWarn), prometheus.NewRegistry())
			if err != nil {
				return nil, err
			}
			u := undoResult{ArchiveID: id}
			err = s.withoutJobs(ctx, s.Truth, "archive-undo", func(ctx context.Context, h *jobs.Hold) (err error) {
				u.Threads, u.Comments, err = shelver.Undo(ctx, h, id)
				return err
			})
			if errors.Is(err, store.ErrNotFound) {
				return nil, &usageError{fmt.Errorf("no archive run with id %d moved a thread: see `tidings archive status`", id)}
			}
			if err != nil {
				return nil, fmt.Errorf("after %s: %w", words.Of(u.Threads, "thread"), err)
			}
			return reports(u, sentence("Archive %d: %s with %s returned.\n", id, words.Of(u.Threads, "thread"),
				words.Of(u.Comments, "comment"))), nil
		},
	})
	c.Flags().Int64Var(&id, "id", 0, "the `id` of the archive run")
	return c
}
