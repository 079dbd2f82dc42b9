package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/ops/jobs"
	"github.com/tidings/tidings/ops/replay"
	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/outbox/coldstore"
)

// cold has the session and the progress bar of the commands on exports.
type cold struct {
	*session
	bar *replayBar
}

func coldOf(s *session) cold { return cold{s, newReplayBar(s.Stderr)} }

const oneLine = "print JSON objects, one per line"

// store returns the store of exports. Without a fence it can only read.
func (c cold) store(url string, fence coldstore.Fence) *coldstore.Store {
	return coldstore.New(c.Truth, url, fence, nil, func(p coldstore.Progress) {
		c.bar.show(replay.Progress{Step: p.Step, Done: p.Done, Total: p.Total})
	})
}

// held calls fn with a store that can write, while no job runs anywhere.
func (c cold) held(ctx context.Context, name, url string, fn func(ctx context.Context, h *jobs.Hold, s *coldstore.Store) error) error {
	defer c.bar.end()
	return c.withoutJobs(ctx, c.Truth, name, func(ctx context.Context, h *jobs.Hold) error {
		s := c.store(url, h.Fence)
		return errors.Join(fn(ctx, h, s), s.Close())
	})
}

// coldExport is a line of the output of export and exports with --json.
type coldExport struct {
	Month string `json:"month"`
	coldstore.Export
}

func coldRows(all []coldstore.Export) [][]string {
	rows := [][]string{{"MONTH", "RANGE FROM", "ROWS", "MIB", "EXPORTED", "VERIFIED", "NOTE", "EXPORT"}}
	when := func(t *time.Time) string {
		if t == nil {
			return ""
		}
		return t.UTC().Format(time.RFC3339)
	}
	for _, e := range all {
		note := ""
		switch {
		case e.StaleAt != nil:
			note = "stale"
		case e.ReleasedAt != nil:
			note = "may be dropped"
		}
		rows = append(rows, []string{e.Month.Format("2006-01"), count(e.Range), count(e.Rows),
			fmt.Sprintf("%.1f", float64(e.Bytes)/(1<<20)), when(e.ExportedAt), when(e.VerifiedAt),
			note, e.String()})
	}
	return rows
}

func exports(all []coldstore.Export) *report {
	var months []coldExport
	for _, e := range all {
		months = append(months, coldExport{e.Month.Format("2006-01"), e})
	}
	return lists(months, rowsOf(coldRows(all)...))
}

func (p Process) coldListCommand() *cobra.Command {
	return p.command(command{
		use: "exports", short: "List the exported ranges of the archive", name: "archive", needs: needDatabases | orOutbox, json: oneLine,
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			all, err := coldOf(s).store("", nil).List(ctx)
			if err != nil {
				return nil, err
			}
			return exports(all), nil
		},
	})
}

func (p Process) coldExportCommand() *cobra.Command {
	var (
		all       bool
		month, to string
		at        time.Time
	)
	c := p.command(command{
		use:   "export",
		short: "Write ranges of the outbox's archive to a directory or to S3",
		long: `Export writes ranges of the archive as compressed segments with checksums and a manifest, and reads
everything back (docs/archive.md). A range belongs to the month of its first message. The archiver
does the same by schedule before it drops a range. Export itself drops nothing. Give either --month
or --all.`,
		name: "archive", needs: needDatabases | orOutbox, json: oneLine,
		check: func(*session, []string) (err error) {
			if at, err = parseMonth("--month", month, "2026-08"); err != nil {
				return err
			}
			if all == !at.IsZero() {
				return &usageError{errors.New("export needs either --month or --all")}
			}
			if err := (coldstore.Config{URL: to}).Validate(); err != nil {
				return &usageError{fmt.Errorf("--to: %w", errors.Unwrap(err))}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			if to == "" {
				settings, _, err := upkeep.Read(ctx, s.Truth)
				if err != nil {
					return nil, err
				}
				if to = settings.OutboxExportURL; to == "" {
					return nil, &usageError{
						errors.New("export needs the setting outbox_archive_export_url (`tidings archive settings`), or --to")}
				}
			}
			var done []coldstore.Export
			cold := coldOf(s)
			err := cold.held(ctx, "archive-export", to, func(ctx context.Context, _ *jobs.Hold, s *coldstore.Store) (err error) {
				if all {
					done, err = s.ExportDue(ctx, ctx.Err)
				} else {
					done, err = s.ExportMonth(ctx, at)
				}
				return err
			})
			return exports(done), err
		},
	})
	c.Flags().StringVar(&month, "month", "", "export the ranges of this `month`, such as 2026-08, again if they are exported already")
	c.Flags().BoolVar(&all, "all", false, "export every range that is due")
	c.Flags().StringVar(&to, "to", "", "the target file:///DIR or s3://BUCKET?region=R (default: the setting outbox_archive_export_url)")
	return c
}

func (p Process) coldVerifyCommand() *cobra.Command {
	var (
		month string
		at    time.Time
	)
	c := p.command(command{
		use:   "verify",
		short: "Read exports from end to end, and compare them with their checksums and with the archive in the database",
		name:  "archive", needs: needDatabases | orOutbox, json: oneLine,
		check: func(*session, []string) (err error) {
			at, err = parseMonth("--month", month, "2026-08")
			return err
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			cold := coldOf(s)
			exported := cold.store("", nil)
			var bad error
			rows := [][]string{{"MONTH", "RANGE FROM", "ROWS", "FILES", "TABLE", "EXPORT"}}
			err := exported.Verify(ctx, at, func(v coldstore.Finding) error {
				files := "ok"
				if v.Problem != "" {
					bad = errReported
					files = "UNREAD"
				}
				if v.Damaged {
					files = "DAMAGED"
				}
				if s.asJSON {
					return s.writeJSON(v)
				}
				rows = append(rows, []string{v.Month, count(v.Export.Range), count(v.Export.Rows), files, v.Table, v.Export.String()})
				if v.Problem != "" {
					fmt.Fprintf(s.Stderr, "%s: %s\n", v.Month, v.Problem)
				}
				return nil
			})
			cold.bar.end()
			if err := errors.Join(err, exported.Close()); err != nil {
				return nil, err
			}
			return &report{text: rowsOf(rows...)}, bad
		},
	})
	c.Flags().StringVar(&month, "month", "", "only exports with events of this `month`, such as 2026-08")
	return c
}

func (p Process) coldRestoreCommand() *cobra.Command {
	var (
		month, from, actor string
		at                 time.Time
	)
	c := p.command(command{
		use:   "restore --month MONTH",
		short: "Restore the exported events of a month into the database, and hold them there",
		long: `Restore reads the exports with events of a month from end to end. Then it inserts the rows of that
month into outbox_messages_kept, where tidings events find finds them. It does not change rows that
the database has: after an interruption, run it again. Restore also creates a hold for the month,
because the archiver would otherwise drop the rows again. tidings archive hold release ends the
hold.`,
		name: "archive", needs: needDatabases | orOutbox, json: oneLine, actor: &actor,
		check: func(*session, []string) (err error) {
			if at, err = parseMonth("--month", month, "2026-08"); err != nil {
				return err
			}
			if at.IsZero() {
				return &usageError{errors.New("restore needs --month")}
			}
			if err := (coldstore.Config{URL: from}).Validate(); err != nil {
				return &usageError{fmt.Errorf("--from: %w", errors.Unwrap(err))}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			cold := coldOf(s)
			var r coldstore.Restored
			err := cold.held(ctx, "archive-restore", "", func(ctx context.Context, _ *jobs.Hold, s *coldstore.Store) (err error) {
				r, err = s.Restore(ctx, at, from, func(ctx context.Context) error { return cold.holdMonth(ctx, at, actor) })
				return err
			})
			if ctx.Err() != nil && err != nil {
				err = errors.New("stopped before the end: run the same command again to continue")
			}
			if err != nil {
				return nil, err
			}
			return reports(r, sentence("%s: %s rows read, %s of them restored. A hold keeps the month: `tidings archive hold list`.\n",
				r.Month, count(r.Read), count(r.Restored))), nil
		},
	})
	c.Flags().StringVar(&month, "month", "", "the `month`, such as 2026-08")
	c.Flags().StringVar(&from, "from", "", "the source file:///DIR or s3://BUCKET?region=R (default: the places that the database knows)")
	return c
}

// holdMonth adds a hold for the events of a month, unless one exists.
func (c cold) holdMonth(ctx context.Context, month time.Time, actor string) error {
	held, err := outbox.HeldMonth(ctx, c.Truth, month)
	if err != nil || held {
		return err
	}
	_, err = outbox.AddHold(ctx, c.Truth, outbox.ArchiveHold{From: month, To: month, Reason: "restored", CreatedBy: actor})
	return err
}
