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

// coldFlags are the flags of the commands on exports.
type coldFlags struct {
	data, month string
	asJSON      bool
}

func (f *coldFlags) add(c *cobra.Command) {
	c.Flags().BoolVar(&f.asJSON, "json", false, "print JSON objects, one per line")
	dataFlag(c, &f.data)
}

// at returns --month, or the zero time without it.
func (f *coldFlags) at() (time.Time, error) {
	if f.month == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse("2006-01", f.month)
	if err != nil {
		return t, &usageError{fmt.Errorf("--month is %q: want a month such as 2026-08", f.month)}
	}
	return t, nil
}

// cold has the databases and the progress bar of these commands.
type cold struct {
	databases
	p   Process
	bar *replayBar
}

func (p Process) cold(ctx context.Context, data string) (c cold, err error) {
	c.p, c.bar = p, newReplayBar(p.Stderr)
	c.databases, err = p.databases(ctx, data, "archive")
	return c, err
}

// store returns the store of exports. Without a fence it can only read.
func (c cold) store(url string, fence coldstore.Fence) *coldstore.Store {
	return coldstore.New(c.truth, url, fence, nil, func(p coldstore.Progress) {
		c.bar.show(replay.Progress{Step: p.Step, Done: p.Done, Total: p.Total})
	})
}

// held calls fn with a store that can write, while no job runs anywhere.
func (c cold) held(ctx context.Context, name, url string, fn func(ctx context.Context, h *jobs.Hold, s *coldstore.Store) error) error {
	return c.p.withoutJobs(ctx, c.truth, name, func(ctx context.Context, h *jobs.Hold) error {
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

func (p Process) printExports(all []coldstore.Export, asJSON bool) error {
	if !asJSON {
		return p.table(coldRows(all)...)
	}
	for _, e := range all {
		if err := p.writeJSON(coldExport{e.Month.Format("2006-01"), e}); err != nil {
			return err
		}
	}
	return nil
}

func (p Process) coldListCommand() *cobra.Command {
	var f coldFlags
	c := &cobra.Command{
		Use:   "exports",
		Short: "List the exported ranges of the archive",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cold, err := p.cold(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer cold.close()
			all, err := cold.store("", nil).List(c.Context())
			if err != nil {
				return err
			}
			return p.printExports(all, f.asJSON)
		},
	}
	f.add(c)
	return c
}

func (p Process) coldExportCommand() *cobra.Command {
	var (
		f   coldFlags
		all bool
		to  string
	)
	c := &cobra.Command{
		Use:   "export",
		Short: "Write ranges of the outbox's archive to a directory or to S3",
		Long: `Export writes ranges of the archive as compressed segments with checksums and a manifest, and reads
everything back (docs/archive.md). A range belongs to the month of its first message. The archiver
does the same by schedule before it drops a range. Export itself drops nothing. Give either --month
or --all.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			month, err := f.at()
			if err != nil {
				return err
			}
			if all == !month.IsZero() {
				return &usageError{errors.New("export needs either --month or --all")}
			}
			cold, err := p.cold(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer cold.close()
			if err := (coldstore.Config{URL: to}).Validate(); err != nil {
				return &usageError{fmt.Errorf("--to: %w", errors.Unwrap(err))}
			}
			if to == "" {
				s, _, err := upkeep.Read(c.Context(), cold.truth)
				if err != nil {
					return err
				}
				if to = s.OutboxExportURL; to == "" {
					return &usageError{
						errors.New("export needs the setting outbox_archive_export_url (`tidings archive settings`), or --to")}
				}
			}
			var done []coldstore.Export
			err = cold.held(c.Context(), "archive-export", to, func(ctx context.Context, _ *jobs.Hold, s *coldstore.Store) error {
				var err error
				if all {
					done, err = s.ExportDue(ctx, ctx.Err)
				} else {
					done, err = s.ExportMonth(ctx, month)
				}
				return err
			})
			cold.bar.end()
			return errors.Join(p.printExports(done, f.asJSON), err)
		},
	}
	c.Flags().StringVar(&f.month, "month", "", "export the ranges of this `month`, such as 2026-08, again if they are exported already")
	c.Flags().BoolVar(&all, "all", false, "export every range that is due")
	c.Flags().StringVar(&to, "to", "", "the target file:///DIR or s3://BUCKET?region=R (default: the setting outbox_archive_export_url)")
	f.add(c)
	return c
}

func (p Process) coldVerifyCommand() *cobra.Command {
	var f coldFlags
	c := &cobra.Command{
		Use:   "verify",
		Short: "Read exports from end to end, and compare them with their checksums and with the archive in the database",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			month, err := f.at()
			if err != nil {
				return err
			}
			cold, err := p.cold(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer cold.close()
			s := cold.store("", nil)
			bad := 0
			rows := [][]string{{"MONTH", "RANGE FROM", "ROWS", "FILES", "TABLE", "EXPORT"}}
			err = s.Verify(c.Context(), month, func(v coldstore.Finding) error {
				files := "ok"
				if v.Problem != "" {
					bad++
					files = "UNREAD"
				}
				if v.Damaged {
					files = "DAMAGED"
				}
				if f.asJSON {
					return p.writeJSON(v)
				}
				rows = append(rows, []string{v.Month, count(v.Export.Range), count(v.Export.Rows), files, v.Table, v.Export.String()})
				if v.Problem != "" {
					fmt.Fprintf(p.Stderr, "%s: %s\n", v.Month, v.Problem)
				}
				return nil
			})
			cold.bar.end()
			if err := errors.Join(err, s.Close()); err != nil {
				return err
			}
			if !f.asJSON {
				if err := p.table(rows...); err != nil {
					return err
				}
			}
			if bad > 0 {
				return errReported
			}
			return nil
		},
	}
	c.Flags().StringVar(&f.month, "month", "", "only exports with events of this `month`, such as 2026-08")
	f.add(c)
	return c
}

func (p Process) coldRestoreCommand() *cobra.Command {
	var (
		f           coldFlags
		from, actor string
	)
	c := &cobra.Command{
		Use:   "restore --month MONTH",
		Short: "Restore the exported events of a month into the database, and hold them there",
		Long: `Restore reads the exports with events of a month from end to end. Then it inserts the rows of that
month into outbox_messages_kept, where tidings events find finds them. It does not change rows that
the database has: after an interruption, run it again. Restore also creates a hold for the month,
because the archiver would otherwise drop the rows again. tidings archive hold release ends the
hold.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			month, err := f.at()
			if err != nil {
				return err
			}
			if month.IsZero() {
				return &usageError{errors.New("restore needs --month")}
			}
			if err := (coldstore.Config{URL: from}).Validate(); err != nil {
				return &usageError{fmt.Errorf("--from: %w", errors.Unwrap(err))}
			}
			if err := setActor(&actor); err != nil {
				return err
			}
			cold, err := p.cold(c.Context(), f.data)
			if err != nil {
				return err
			}
			defer cold.close()
			var r coldstore.Restored
			err = cold.held(c.Context(), "archive-restore", "", func(ctx context.Context, _ *jobs.Hold, s *coldstore.Store) (err error) {
				r, err = s.Restore(ctx, month, from, func(ctx context.Context) error { return cold.holdMonth(ctx, month, actor) })
				return err
			})
			cold.bar.end()
			if c.Context().Err() != nil && err != nil {
				err = errors.New("stopped before the end: run the same command again to continue")
			}
			if err != nil {
				return err
			}
			if f.asJSON {
				return p.writeJSON(r)
			}
			_, err = fmt.Fprintf(p.Stdout, "%s: %s rows read, %s of them restored. A hold keeps the month: `tidings archive hold list`.\n",
				r.Month, count(r.Read), count(r.Restored))
			return err
		},
	}
	c.Flags().StringVar(&f.month, "month", "", "the `month`, such as 2026-08")
	c.Flags().StringVar(&from, "from", "", "the source file:///DIR or s3://BUCKET?region=R (default: the places that the database knows)")
	c.Flags().StringVar(&actor, "actor", "", "the actor to record (default: the user of this system)")
	f.add(c)
	return c
}

// holdMonth adds a hold for the events of a month, unless one exists.
func (c cold) holdMonth(ctx context.Context, month time.Time, actor string) error {
	held, err := outbox.HeldMonth(ctx, c.truth, month)
	if err != nil || held {
		return err
	}
	_, err = outbox.AddHold(ctx, c.truth, outbox.ArchiveHold{From: month, To: month, Reason: "restored", CreatedBy: actor})
	return err
}
