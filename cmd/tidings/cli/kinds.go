package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/kinds/kindfile"
)

// appliedKinds is the output of `tidings kinds apply --json`.
type appliedKinds struct {
	catalog.Applied
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
	Changed   bool     `json:"changed,omitempty"` // a built-in kind that the file changes
}

// kindsVersion is a line of `tidings kinds history --json`.
type kindsVersion struct {
	Version int64          `json:"version"`
	At      time.Time      `json:"at"`
	Actor   string         `json:"actor"`
	Reason  string         `json:"reason,omitempty"`
	Changes []kinds.Change `json:"changes"`
}

// fileError reports a file that is not a valid file of kinds.
type fileError struct{ error }

// declaration reads the file, or stdin for "-".
func (p Process) declaration(name string) ([]byte, error) {
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
		return nil, &fileError{fmt.Errorf("the file has more than %s bytes", count(most))}
	}
	return file, nil
}

// verbatim prints a file as it is.
func verbatim(file []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := w.Write(file)
		return err
	}
}

func (p Process) kindsFile(name string) (*kinds.Set, error) {
	file, err := p.declaration(name)
	if err != nil {
		return nil, err
	}
	set, err := kindfile.Extend(kinds.Builtin(), file)
	if err != nil {
		return nil, &fileError{fmt.Errorf("%s is not a file of kinds:\n%w", name, err)}
	}
	return set, nil
}

func (p Process) kindsApplyCommand() *cobra.Command {
	var r catalog.Request
	return p.command(command{
		use:   "apply FILE",
		short: "Make the kinds of a file the kinds in force, beside the built-in ones",
		long: `Apply checks the whole file, creates the tables of new kinds in both databases, and puts the file in
force. Processes use it within five seconds, without a restart. Apply removes kinds that the file
does not name, and asks for confirmation first. A built-in kind that the file does not name stays,
without earlier changes. Apply refuses a change that would reinterpret existing rows, and prints the
reason. "-" reads the file from stdin. docs/kinds.md describes the file. After a failure, run the
command again: it completes the change.`,
		args: exactArgs(1), name: "kinds", needs: needDatabases, json: oneObject,
		actor: &r.Actor, reason: &r.Reason, dryRun: &r.DryRun, destructive: true,
		check: func(s *session, args []string) (err error) {
			r.Kinds, err = s.kindsFile(args[0])
			return err
		},
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			dbs := catalog.Databases{Truth: s.Truth, Projections: s.Projections}
			if err := askKinds(ctx, dbs, r, s); err != nil {
				return nil, inFile(args[0], err)
			}
			done, err := catalog.Apply(ctx, dbs, r)
			if err != nil {
				return nil, inFile(args[0], err)
			}
			if done.Changes == nil {
				done.Changes = []kinds.Change{}
			}
			return reports(appliedKinds{done, r.DryRun}, func(w io.Writer) error { return sayApplied(w, done, r.DryRun) }), nil
		},
	})
}

// askKinds asks whether to remove kinds or parts of kinds. A change that only adds needs no
// confirmation.
func askKinds(ctx context.Context, dbs catalog.Databases, r catalog.Request, s *session) error {
	return s.ask(func(w io.Writer) error {
		r.DryRun = true
		plan, err := catalog.Apply(ctx, dbs, r)
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
	var refused *catalog.RefusedError
	if errors.As(err, &refused) {
		return fmt.Errorf("%s is refused, and nothing was changed:\n%w", name, err)
	}
	return err
}

func sayApplied(w io.Writer, done catalog.Applied, dry bool) error {
	text := fmt.Sprintf("These kinds are in force. All processes use them within 5 seconds. "+
		"`tidings kinds history` lists this change as version %d.", done.Version)
	switch {
	case len(done.Changes) == 0:
		text = "The file has the kinds in force. Nothing was changed."
	case dry:
		text = "Nothing was changed (--dry-run)."
	}
	sayChanges(w, done.Changes, false)
	_, err := fmt.Fprintln(w, text)
	return err
}

// sayChanges prints a line for each change. With conditions it adds which changes are possible only
// without contradicting rows.
func sayChanges(w io.Writer, all []kinds.Change, conditions bool) {
	for _, c := range all {
		line := fmt.Sprintf("%s: %s", c.Path, c.What)
		if conditions && c.Kind != "" {
			line += fmt.Sprintf(" (possible only if no row of %s prevents it; otherwise, %s)", c.Kind, c.Instead)
		}
		fmt.Fprintln(w, line)
	}
}

func (p Process) kindsDiffCommand() *cobra.Command {
	var to *kinds.Set
	return p.command(command{
		use:   "diff FILE",
		short: "Compare a file with the kinds in force",
		long: `Diff checks the whole file and prints the changes that tidings kinds apply would make. It does not
read rows: tidings kinds apply --dry-run also finds rows that prevent a change.`,
		args: exactArgs(1), name: "kinds", needs: needTruth, json: onePer("change"),
		check: func(s *session, args []string) (err error) {
			to, err = s.kindsFile(args[0])
			return err
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			now, err := truthKinds(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			changes := kinds.Changes(now, to)
			return lists(changes, func(w io.Writer) error {
				if len(changes) == 0 {
					return sayApplied(w, catalog.Applied{}, false)
				}
				sayChanges(w, changes, true)
				return nil
			}), nil
		},
	})
}

func (p Process) kindsListCommand() *cobra.Command {
	return p.command(command{
		use: "list", short: "List the kinds in force", name: "kinds", needs: needTruth, json: onePer("kind"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			now, err := truthKinds(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			all, rows := listed(now), [][]string{{"NAME", "TYPE", "PLURAL", "OBJECTS", "CAPABILITIES", "SOURCE"}}
			for _, k := range all {
				of, from := k.Parent, "file"
				if k.Archetype == "edge" {
					of = k.From + " → " + k.To
				}
				switch {
				case k.Changed:
					from = "built in, changed"
				case k.BuiltIn:
					from = "built in"
				}
				rows = append(rows, []string{k.Name, k.Archetype, k.Plural, of, strings.Join(k.Has, ", "), from})
			}
			return lists(all, rowsOf(rows...)), nil
		},
	})
}

// listed returns the kinds, sorted by archetype and name.
func listed(s *kinds.Set) []listedKind {
	builtIn, stated := kinds.Builtin(), s.Without(kinds.Builtin())
	all := []listedKind{}
	for _, e := range s.AllEdges() {
		old := builtIn.Has(e.Name)
		all = append(all, listedKind{Name: e.Name, Archetype: "edge", Plural: e.Plural, From: e.From, To: e.To, BuiltIn: old,
			Changed: old && stated.Has(e.Name),
			Has:     capabilities(e.Attributes, map[string]bool{"self": e.Self, "partitions": e.Partitions > 0})})
	}
	for _, ch := range s.AllChildren() {
		old := builtIn.Has(ch.Name)
		all = append(all, listedKind{Name: ch.Name, Archetype: "child", Plural: ch.Plural, Parent: ch.Parent, BuiltIn: old,
			Changed: old && stated.Has(ch.Name),
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
	return append(names, slices.Sorted(maps.Keys(attributes))...)
}

func (p Process) kindsShowCommand() *cobra.Command {
	return p.command(command{
		use: "show NAME", short: "Print a kind as a file for tidings kinds apply", args: exactArgs(1), name: "kinds", needs: needTruth,
		run: func(ctx context.Context, s *session, args []string) (*report, error) {
			now, err := truthKinds(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			one := &kinds.Set{Objects: map[string]kinds.Object{}, Edges: map[string]kinds.Edge{}, Children: map[string]kinds.Child{}}
			if !addKind(one, now, args[0]) {
				return nil, fmt.Errorf("there is no kind %q: `tidings kinds list` lists all of them", args[0])
			}
			file, err := kindfile.Write(one)
			return reports(nil, verbatim(file)), err
		},
	})
}

// addKind adds a kind to the set one, with the objects and kinds to which it refers.
func addKind(one, now *kinds.Set, name string) bool {
	if one.Has(name) {
		return true
	}
	if e, ok := now.Edge(name); ok {
		one.Edges[name], one.Objects[e.From] = e, now.Objects[e.From]
		if !addKind(one, now, e.To) {
			one.Objects[e.To] = now.Objects[e.To]
		}
		return true
	}
	ch, ok := now.Child(name)
	if ok {
		one.Children[name], one.Objects[ch.Parent] = ch, now.Objects[ch.Parent]
		addKind(one, now, ch.RankedBy)
	}
	return ok
}

// sayVersion prints the heading of a version of a declaration.
func sayVersion(w io.Writer, version int64, at time.Time, actor, reason string) {
	if reason != "" {
		reason = ": " + reason
	}
	fmt.Fprintf(w, "Version %d, %s, %s%s\n", version, utc(&at), actor, reason)
}

func (p Process) kindsHistoryCommand() *cobra.Command {
	return p.command(command{
		use: "history", short: "List who applied which kinds, when and why", name: "kinds", needs: needTruth, json: onePer("version"),
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			all, err := catalog.History(ctx, s.Truth)
			if err != nil {
				return nil, err
			}
			var versions []kindsVersion
			for _, v := range all {
				versions = append(versions, kindsVersion{v.Version, v.At.UTC(), v.By, v.Reason, v.Changes})
			}
			return lists(versions, func(w io.Writer) error {
				for _, v := range versions {
					sayVersion(w, v.Version, v.At, v.Actor, v.Reason)
					for _, change := range v.Changes {
						fmt.Fprintf(w, "  %s: %s\n", change.Path, change.What)
					}
				}
				return nil
			}), nil
		},
	})
}
