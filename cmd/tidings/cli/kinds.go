package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
)

// appliedKinds is the output of `tidings kinds apply --json`.
type appliedKinds struct {
	kinds.Applied
	DryRun bool `json:"dry_run"`
}

// listedKind is a line of `tidings kinds list --json`.
type listedKind struct {
	Name      string   `json:"name"`
	Archetype string   `json:"archetype"` // edge or child
	Plural    string   `json:"plural"`
	From      string   `json:"from,omitempty"`
	To        string   `json:"to,omitempty"`
	Parent    string   `json:"parent,omitempty"`
	Has       []string `json:"has"` // capabilities and attributes
	BuiltIn   bool     `json:"built_in"`
}

// kindsVersion is a line of `tidings kinds history --json`.
type kindsVersion struct {
	Version int64          `json:"version"`
	At      time.Time      `json:"at"`
	Actor   string         `json:"actor"`
	Reason  string         `json:"reason,omitempty"`
	Changes []kinds.Change `json:"changes"`
}

func (p Process) kindsCommand() *cobra.Command {
	c := &cobra.Command{Use: "kinds", Short: "List, add and change the kinds of edges and children"}
	c.AddCommand(p.kindsApplyCommand(), p.kindsDiffCommand(), p.kindsListCommand(), p.kindsShowCommand(), p.kindsHistoryCommand())
	return c
}

// truthPool connects to the database of the truth.
func (p Process) truthPool(ctx context.Context, data, name string) (*pgxpool.Pool, error) {
	s, err := p.servers(ctx, data)
	if err != nil {
		return nil, err
	}
	pool, err := postgres.Open(ctx, s.DatabaseURL, s.Postgres, postgres.RoleSystem, name)
	if err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, pool, migrations.Truth); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

// kindsInForce reads the kinds of the truth.
func (p Process) kindsInForce(ctx context.Context, data string) (*kinds.Set, error) {
	pool, err := p.truthPool(ctx, data, "kinds")
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	return truthKinds(ctx, pool)
}

// truthKinds reads the kinds in force in the truth.
func truthKinds(ctx context.Context, truth *pgxpool.Pool) (*kinds.Set, error) {
	return kindsOf(ctx, truth, kinds.Truth)
}

// kindsOf reads the kinds in force in one of the databases.
func kindsOf(ctx context.Context, pool *pgxpool.Pool, of kinds.Database) (*kinds.Set, error) {
	c := kinds.NewCatalog(pool, of, slog.New(slog.DiscardHandler))
	if err := c.Load(ctx); err != nil {
		return nil, err
	}
	return c.Now(), nil
}

// kindsFile reads the file, or stdin for "-".
func (p Process) kindsFile(name string) ([]byte, error) {
	const most = 1 << 20
	in := p.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, &usageError{err}
		}
		defer func() { _ = f.Close() }() // the file is only read
		in = f
	}
	file, err := io.ReadAll(io.LimitReader(in, most+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(file) > most {
		return nil, &kinds.FileError{Err: fmt.Errorf("the file has more than %s bytes", count(most))}
	}
	return file, nil
}

func (p Process) kindsApplyCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
		r      kinds.Request
		sure   *asking
	)
	c := &cobra.Command{
		Use:   "apply FILE",
		Short: "Put the kinds of a file in force, beside the built-in ones",
		Long: `Apply checks the whole file, creates the tables of new kinds in both databases, and puts the file in
force. Processes use it within five seconds, without a restart. Apply removes kinds that the file
does not name, and asks for confirmation first. It refuses a change that would reinterpret existing
rows, and prints the reason. "-" reads the file from stdin. docs/kinds.md describes the file. After
a failure, run the same command again: it completes the change.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if err := setActor(&r.Actor); err != nil {
				return err
			}
			if r.File, err = p.kindsFile(args[0]); err != nil {
				return err
			}
			truth, err := p.truthPool(c.Context(), data, "kinds")
			if err != nil {
				return err
			}
			defer truth.Close()
			projections, err := p.projectionsPool(c.Context(), data, "kinds")
			if err != nil {
				return err
			}
			defer projections.Close()
			dbs := kinds.Databases{Truth: truth, Projections: projections}
			if !r.DryRun {
				if err := askKinds(c.Context(), dbs, r, sure); err != nil {
					return inFile(args[0], err)
				}
			}
			done, err := kinds.Apply(c.Context(), dbs, r)
			if err != nil {
				return inFile(args[0], err)
			}
			if asJSON {
				if done.Changes == nil {
					done.Changes = []kinds.Change{}
				}
				return p.writeJSON(appliedKinds{done, r.DryRun})
			}
			return p.sayApplied(done, r.DryRun)
		},
	}
	c.Flags().BoolVar(&r.DryRun, "dry-run", false, "show what the command would do, and change nothing")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	addActor(c, &r.Actor, &r.Reason)
	sure = p.destructive(c)
	dataFlag(c, &data)
	return c
}

// askKinds asks whether to remove kinds or parts of kinds. A change that only adds needs no
// confirmation.
func askKinds(ctx context.Context, dbs kinds.Databases, r kinds.Request, sure *asking) error {
	return sure.ask(func(w io.Writer) error {
		r.DryRun = true
		plan, err := kinds.Apply(ctx, dbs, r)
		if err != nil {
			return err
		}
		var gone []string
		for _, change := range plan.Changes {
			if change.Kind != "" { // such a change is possible only without rows that contradict it
				gone = append(gone, fmt.Sprintf("%s: %s", change.Path, change.What))
			}
		}
		return textLines("These changes remove or restrict kinds:", gone...)(w)
	})
}

// inFile names the file in an error about it.
func inFile(name string, err error) error {
	var bad *kinds.FileError
	if errors.As(err, &bad) {
		return fmt.Errorf("%s is not a file of kinds:\n%w", name, err)
	}
	var refused *kinds.RefusedError
	if errors.As(err, &refused) {
		return fmt.Errorf("%s is refused, and nothing was changed:\n%w", name, err)
	}
	return err
}

func (p Process) sayApplied(done kinds.Applied, dry bool) error {
	if err := p.sayChanges(done.Changes, false); err != nil {
		return err
	}
	text := fmt.Sprintf("These kinds are in force. All processes use them within 5 seconds. "+
		"`tidings kinds history` lists this change as version %d.", done.Version)
	switch {
	case len(done.Changes) == 0:
		text = "The file has the kinds in force. Nothing was changed."
	case dry:
		text = "Nothing was changed (--dry-run)."
	}
	if _, err := fmt.Fprintln(p.Stdout, text); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	return nil
}

// sayChanges prints a line for each change. With conditions it adds which changes are possible only
// without contradicting rows.
func (p Process) sayChanges(all []kinds.Change, conditions bool) error {
	for _, c := range all {
		line := fmt.Sprintf("%s: %s", c.Path, c.What)
		if conditions && c.Kind != "" {
			line += fmt.Sprintf(" (possible only if no row of %s prevents it; otherwise, %s)", c.Kind, c.Instead)
		}
		if _, err := fmt.Fprintln(p.Stdout, line); err != nil {
			return fmt.Errorf("write the result: %w", err)
		}
	}
	return nil
}

func (p Process) kindsDiffCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "diff FILE",
		Short: "Compare a file with the kinds in force",
		Long: `Diff checks the whole file and prints the changes that tidings kinds apply would make. It does not
read rows: tidings kinds apply --dry-run also finds rows that prevent a change.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			file, err := p.kindsFile(args[0])
			if err != nil {
				return err
			}
			to, err := kinds.Builtin().Extend(file)
			if err != nil {
				return inFile(args[0], &kinds.FileError{Err: err})
			}
			now, err := p.kindsInForce(c.Context(), data)
			if err != nil {
				return err
			}
			changes := kinds.Changes(now, to)
			if asJSON {
				for _, change := range changes {
					if err := p.writeJSON(change); err != nil {
						return err
					}
				}
				return nil
			}
			if len(changes) == 0 {
				return p.sayApplied(kinds.Applied{}, false)
			}
			return p.sayChanges(changes, true)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per change and line")
	dataFlag(c, &data)
	return c
}

func (p Process) kindsListCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "list",
		Short: "List the kinds in force",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			now, err := p.kindsInForce(c.Context(), data)
			if err != nil {
				return err
			}
			rows := [][]string{{"NAME", "TYPE", "PLURAL", "OBJECTS", "CAPABILITIES", "SOURCE"}}
			for _, k := range listed(now) {
				if asJSON {
					if err := p.writeJSON(k); err != nil {
						return err
					}
					continue
				}
				of, from := k.Parent, "file"
				if k.Archetype == "edge" {
					of = k.From + " → " + k.To
				}
				if k.BuiltIn {
					from = "built in"
				}
				rows = append(rows, []string{k.Name, k.Archetype, k.Plural, of, strings.Join(k.Has, ", "), from})
			}
			if asJSON {
				return nil
			}
			return p.table(rows...)
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per kind and line")
	dataFlag(c, &data)
	return c
}

// listed returns the kinds, sorted by archetype and name.
func listed(s *kinds.Set) []listedKind {
	added := s.Without(kinds.Builtin())
	all := []listedKind{}
	for _, e := range s.AllEdges() {
		_, ours := added.Edge(e.Name)
		all = append(all, listedKind{Name: e.Name, Archetype: "edge", Plural: e.Plural, From: e.From, To: e.To, BuiltIn: !ours,
			Has: capabilities(e.Attributes, map[string]bool{"self": e.Self, "partitions": e.Partitions > 0})})
	}
	for _, ch := range s.AllChildren() {
		_, ours := added.Child(ch.Name)
		all = append(all, listedKind{Name: ch.Name, Archetype: "child", Plural: ch.Plural, Parent: ch.Parent, BuiltIn: !ours,
			Has: capabilities(ch.Attributes, map[string]bool{"threaded": ch.Threaded, "moderated": ch.Moderated,
				"one_per_author": ch.OnePerAuthor, "partitions": ch.Partitions > 0})})
	}
	return all
}

func capabilities(attributes map[string]kinds.Attribute, flags map[string]bool) []string {
	names := []string{}
	for name, on := range flags {
		if on {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var more []string
	for name := range attributes {
		more = append(more, name)
	}
	slices.Sort(more)
	return append(names, more...)
}

func (p Process) kindsShowCommand() *cobra.Command {
	var data string
	c := &cobra.Command{
		Use:   "show NAME",
		Short: "Print a kind in the format of a file of kinds",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			now, err := p.kindsInForce(c.Context(), data)
			if err != nil {
				return err
			}
			one := kinds.Set{Objects: map[string]string{}}
			if e, ok := now.Edge(args[0]); ok {
				one.Edges = map[string]kinds.Edge{e.Name: e}
				one.Objects[e.From], one.Objects[e.To] = now.Objects[e.From], now.Objects[e.To]
			} else if ch, ok := now.Child(args[0]); ok {
				one.Children = map[string]kinds.Child{ch.Name: ch}
				one.Objects[ch.Parent] = now.Objects[ch.Parent]
			} else {
				return fmt.Errorf("there is no kind %q: `tidings kinds list` lists all of them", args[0])
			}
			enc := yaml.NewEncoder(p.Stdout)
			enc.SetIndent(2)
			if err := errors.Join(enc.Encode(one), enc.Close()); err != nil {
				return fmt.Errorf("write the kind: %w", err)
			}
			return nil
		},
	}
	dataFlag(c, &data)
	return c
}

func (p Process) kindsHistoryCommand() *cobra.Command {
	var (
		data   string
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "history",
		Short: "List who applied which kinds, when and why",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			pool, err := p.truthPool(c.Context(), data, "kinds")
			if err != nil {
				return err
			}
			defer pool.Close()
			all, err := kinds.History(c.Context(), pool)
			if err != nil {
				return err
			}
			for _, v := range all {
				if asJSON {
					if err := p.writeJSON(kindsVersion{v.Version, v.At.UTC(), v.By, v.Reason, v.Changes}); err != nil {
						return err
					}
					continue
				}
				why := ""
				if v.Reason != "" {
					why = ": " + v.Reason
				}
				if _, err := fmt.Fprintf(p.Stdout, "Version %d, %s, %s%s\n", v.Version, utc(&v.At), v.By, why); err != nil {
					return fmt.Errorf("write the result: %w", err)
				}
				for _, change := range v.Changes {
					if _, err := fmt.Fprintf(p.Stdout, "  %s: %s\n", change.Path, change.What); err != nil {
						return fmt.Errorf("write the result: %w", err)
					}
				}
			}
			return nil
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON objects, one per version and line")
	dataFlag(c, &data)
	return c
}
