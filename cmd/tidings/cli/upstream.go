package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/kinds/declared"
	"github.com/tidings/tidings/kinds/kindfile"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/migrations"
)

// addedUpstream is the output of `tidings upstream add --json`.
type addedUpstream struct {
	declared.Added
	Upstream string                     `json:"upstream"`
	DryRun   bool                       `json:"dry_run"`
	Logins   []migrations.UpstreamLogin `json:"logins,omitempty"`
}

// listedUpstream is a line of `tidings upstream list --json`.
type listedUpstream struct {
	Name       string   `json:"name"`
	Types      []string `json:"types"` // ce-type
	Source     string   `json:"source"`
	Tenants    []int64  `json:"tenants,omitempty"` // absent: all
	MaxPayload int      `json:"max_payload"`
	Logins     []string `json:"logins"`
}

// upstreamVersion is a line of `tidings upstream history --json`.
type upstreamVersion struct {
	Version int64     `json:"version"`
	At      time.Time `json:"at"`
	Actor   string    `json:"actor"`
	Reason  string    `json:"reason,omitempty"`
	Removed bool      `json:"removed,omitempty"`
	Changes []string  `json:"changes"`
}

func (p Process) upstreamFile(name string) (*upstreams.Upstream, error) {
	file, err := p.declaration(name)
	if err != nil {
		return nil, err
	}
	u, err := kindfile.ReadUpstream(file)
	if err != nil {
		return nil, &fileError{fmt.Errorf("%s is not a file of an upstream:\n%w", name, err)}
	}
	return u, nil
}

func (p Process) upstreamAddCommand() *cobra.Command {
	var (
		r    declared.Request
		file string
	)
	c := p.command(command{
		use:   "add NAME",
		short: "Declare events that a service appends from tables of its own, or change the declaration",
		long: `Add declares the aggregate type NAME with its event types, their versions and JSON Schemas, its
tenants and its largest payload. From the next transaction on, the outbox refuses what does not fit,
at INSERT, with the reason. Without --file, the declaration stays as it is and only logins change.
docs/upstream.md describes the file; "-" reads it from stdin.

--login names a role of PostgreSQL that may append these events, and nothing else; its members may
too. If there is no such role, add creates a login. It prints a random password before the login
exists, so after an interruption run it again. An existing role keeps its password; \password in
psql sets another. If your own login may not create roles, add prints the SQL for somebody who may.

A declared event version keeps its schema: add another version instead. Names, ids and event types
stay too. docs/upstream.md lists what may change.`,
		args: exactArgs(1), name: "upstream", needs: needTruth | orOutbox, json: oneObject,
		actor: &r.Actor, reason: &r.Upstream.Reason, dryRun: &r.DryRun,
		check: func(s *session, args []string) error {
			if file == "" {
				return nil
			}
			u, err := s.upstreamFile(file)
			if err != nil {
				return err
			}
			if u.Name != args[0] {
				return &usageError{fmt.Errorf("%s declares the upstream %s, not %s", file, u.Name, args[0])}
			}
			u.Logins, u.Reason = r.Upstream.Logins, r.Upstream.Reason
			r.Upstream = *u
			return nil
		},
		run: func(ctx context.Context, s *session, args []string) (_ *report, err error) {
			if file == "" {
				was, err := findUpstream(ctx, s, args[0])
				if err != nil {
					return nil, err
				}
				was.Logins, was.Reason = r.Upstream.Logins, r.Upstream.Reason
				r.Upstream = *was
			}
			return nil, s.addUpstream(ctx, args[0], r)
		},
	})
	c.Flags().StringVar(&file, "file", "", "the `file` of the declaration")
	c.Flags().StringArrayVar(&r.Upstream.Logins, "login", []string{}, "a `role` that may append these events; may be repeated")
	c.Flags().StringArrayVar(&r.Revoke, "revoke-login", nil, "a `role` that may no longer append them; may be repeated")
	return c
}

// addUpstream declares the upstream and creates its logins. It prints them before they exist.
func (s *session) addUpstream(ctx context.Context, name string, r declared.Request) (err error) {
	done := addedUpstream{Upstream: name, DryRun: r.DryRun}
	if done.Added, err = declared.Add(ctx, s.Truth, r); err != nil {
		return err
	}
	show := func(logins []migrations.UpstreamLogin) error {
		done.Logins = logins
		return s.print(reports(done, func(w io.Writer) error { return sayAdded(w, done) }))
	}
	if r.DryRun || len(r.Upstream.Logins) == 0 {
		return show(nil)
	}
	_, err = migrations.MakeUpstreamLogins(ctx, s.env.DatabaseURL, r.Upstream.Logins, show)
	return err
}

func sayAdded(w io.Writer, done addedUpstream) error {
	for _, change := range done.Changes {
		fmt.Fprintln(w, change)
	}
	for _, l := range done.Logins {
		switch {
		case len(l.SQL) > 0:
			fmt.Fprintf(w, "This login may not create or grant roles. Somebody who may has to run:\n  %s\n", strings.Join(l.SQL, "\n  "))
		case l.Password != "":
			fmt.Fprintf(w, "The new login %s has this password, which is shown only now: %s\n", l.Name, l.Password)
		default:
			fmt.Fprintf(w, "The role %s exists, and keeps its password.\n", l.Name)
		}
	}
	var err error
	switch {
	case len(done.Changes) == 0:
		_, err = fmt.Fprintf(w, "The upstream %s is declared like this. Nothing was changed.\n", done.Upstream)
	case done.DryRun:
		_, err = fmt.Fprintln(w, "Nothing was changed (--dry-run).")
	default:
		_, err = fmt.Fprintf(w,
			"The outbox checks events of %s by this declaration now. `tidings upstream history %s` lists it as version %d.\n",
			done.Upstream, done.Upstream, done.Version)
	}
	return err
}

// findUpstream returns the declared upstream of that name.
func findUpstream(ctx context.Context, s *session, name string) (*upstreams.Upstream, error) {
	all, err := declared.List(ctx, s.Truth)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(u upstreams.Upstream) bool { return u.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%s: %w", name, declared.ErrNotFound)
	}
	return &all[i], nil
}

func (p Process) upstreamListCommand() *cobra.Command {
	return p.command(command{
		use: "list", short: "List the declared upstreams", name: "upstream", needs: needTruth | orOutbox, json: onePer("upstream"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			declared, err := declared.List(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			all, rows := []listedUpstream{}, [][]string{{"NAME", "EVENTS", "TENANTS", "MAX PAYLOAD", "SOURCE", "LOGINS"}}
			for i := range declared {
				u := &declared[i]
				one := listedUpstream{Name: u.Name, Source: u.Source, Tenants: u.Tenants, MaxPayload: u.MaxPayload, Logins: u.Logins,
					Types: u.Types()}
				tenants := "all"
				if u.Tenants != nil {
					tenants = count(int64(len(u.Tenants)))
				}
				all = append(all, one)
				rows = append(rows, []string{u.Name, strings.Join(slices.Sorted(maps.Keys(u.Events)), ", "), tenants,
					fmt.Sprint(u.MaxPayload), u.Source, strings.Join(u.Logins, ", ")})
			}
			return lists(all, rowsOf(rows...)), nil
		},
	})
}

func (p Process) upstreamShowCommand() *cobra.Command {
	return p.command(command{
		use: "show NAME", short: "Print the file of a declared upstream", args: exactArgs(1), name: "upstream", needs: needTruth | orOutbox,
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			u, err := findUpstream(ctx, s, args[0])
			if err != nil {
				return nil, err
			}
			file, err := kindfile.WriteUpstream(u)
			if err != nil {
				return nil, err
			}
			return reports(nil, verbatim(file)), nil
		},
	})
}

func (p Process) upstreamRemoveCommand() *cobra.Command {
	var actor, reason string
	return p.command(command{
		use:   "remove NAME",
		short: "Refuse further events of an upstream",
		long: `Remove ends an upstream: the outbox refuses its events from the next transaction on. Events that it
has are published. Nothing is deleted: the history stays, and tidings upstream add declares the
upstream again, under the same rules of change.`,
		args: exactArgs(1), name: "upstream", needs: needTruth | orOutbox, json: oneObject, actor: &actor, reason: &reason,
		destructive: true,
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			u, err := findUpstream(ctx, s, args[0])
			if err != nil {
				return nil, err
			}
			if err := s.ask(sentence("Writers of %s (%s) will be refused.\n", u.Name, strings.Join(u.Logins, ", "))); err != nil {
				return nil, err
			}
			if err := declared.Remove(ctx, s.Truth, u.Name, actor, reason); err != nil {
				return nil, err
			}
			return reports(map[string]string{"removed": u.Name}, sentence("The outbox refuses events of %s now.\n", u.Name)), nil
		},
	})
}

func (p Process) upstreamHistoryCommand() *cobra.Command {
	return p.command(command{
		use: "history NAME", short: "List who declared what, when and why", args: exactArgs(1), name: "upstream",
		needs: needTruth | orOutbox,
		json:  onePer("version"),
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			all, err := declared.History(ctx, s.Truth, args[0])
			if err != nil {
				return nil, err
			}
			var versions []upstreamVersion
			for _, v := range all {
				versions = append(versions, upstreamVersion{v.Version, v.At.UTC(), v.By, v.Reason, v.Removed, v.Changes})
			}
			return lists(versions, func(w io.Writer) error {
				for _, v := range versions {
					sayVersion(w, v.Version, v.At, v.Actor, v.Reason)
					for _, change := range v.Changes {
						fmt.Fprintf(w, "  %s\n", change)
					}
				}
				return nil
			}), nil
		},
	})
}
