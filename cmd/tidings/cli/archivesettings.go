package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/ops/upkeep"
	"github.com/tidings/tidings/store"
)

// archiveSettings is the output of `tidings archive settings --json`.
type archiveSettings struct {
	Settings upkeep.Settings `json:"settings"`
	upkeep.Changed
}

func (p Process) archiveSettingsCommand() *cobra.Command {
	var actor, reason string
	return p.command(command{
		use:   "settings [NAME=VALUE...]",
		short: "Show or set what is archived and dropped, and when",
		long: `Settings shows when the archiver and the archive commands archive and drop rows. NAME=VALUE sets a
value, which applies from the next run of each job. Before that, the command shows what a run would
drop now, and asks for confirmation. The table archive_settings keeps every version, with actor and
reason.`,
		args: cobra.ArbitraryArgs, name: "archive", needs: needDatabases | orOutbox, json: oneObject,
		actor: &actor, reason: &reason, destructive: true,
		check: func(*session, []string) error {
			if !store.ValidReason(reason) {
				return &usageError{errReason}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			if len(args) > 0 {
				if err := s.setSettings(ctx, args, actor, reason); err != nil {
					return nil, err
				}
			}
			now, last, err := upkeep.Read(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			rows := [][]string{{"SETTING", "VALUE", "MEANING"}}
			for _, t := range upkeep.All {
				rows = append(rows, []string{t.Name, cell(t.Of(now)), t.Help})
			}
			return reports(archiveSettings{now, last}, func(w io.Writer) error {
				err := tableTo(w, rows...)
				if last.By != "" {
					fmt.Fprintf(w, "\nSet %s by %s: %s\n", utc(&last.At), cell(last.By), orDefault(cell(last.Reason), "no reason given"))
				}
				return err
			}), nil
		},
	})
}

// errReason reports a malformed --reason.
var errReason = fmt.Errorf("--reason must be at most %d bytes of UTF-8 without control characters", store.MaxReasonBytes)

// setSettings sets the settings that args give as NAME=VALUE.
func (s *session) setSettings(ctx context.Context, args []string, actor, reason string) error {
	before, _, err := upkeep.Read(ctx, s.Truth)
	if err != nil {
		return err
	}
	change := func(s *upkeep.Settings) error {
		for _, arg := range args {
			name, value, ok := strings.Cut(arg, "=")
			i := slices.IndexFunc(upkeep.All, func(t upkeep.Setting) bool { return t.Name == name })
			if !ok || i < 0 {
				return fmt.Errorf("%q is not the NAME=VALUE of a setting: `tidings archive settings` lists the names", arg)
			}
			if err := upkeep.All[i].Set(s, value); err != nil {
				return err
			}
		}
		return nil
	}
	after := before
	if err := errors.Join(change(&after)); err != nil {
		return &usageError{err}
	}
	if err := after.Validate(); err != nil {
		return &usageError{err}
	}
	if after == before { // no question about an empty table
		return nil
	}
	if err := s.ask(func(w io.Writer) error { return s.showSettings(ctx, w, before, after) }); err != nil {
		return err
	}
	_, err = upkeep.Write(ctx, s.Truth, actor, reason, change)
	return err
}

// showSettings shows the changed settings, and the rows that a run would drop with them now.
func (s *session) showSettings(ctx context.Context, w io.Writer, before, after upkeep.Settings) error {
	rows := [][]string{{"SETTING", "NOW", "NEW"}}
	for _, t := range upkeep.All {
		if t.Of(before) != t.Of(after) {
			rows = append(rows, []string{t.Name, cell(t.Of(before)), cell(t.Of(after))})
		}
	}
	if err := tableTo(w, rows...); err != nil {
		return err
	}
	list, err := s.jobs(ctx, s.system, func(context.Context) (upkeep.Settings, error) { return after, nil })
	if err != nil {
		return err
	}
	all, err := drops(ctx, list)
	if err != nil {
		return err
	}
	if len(all) == 0 {
		_, err = fmt.Fprintln(w, "With the new settings, a run would drop nothing now.")
		return err
	}
	fmt.Fprintln(w, "With the new settings, the next run drops this:")
	return tableTo(w, dropRows(all)...)
}
