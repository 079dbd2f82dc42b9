package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
)

// historyFlags are the flags of all commands below history.
type historyFlags struct {
	kind   string
	tenant int64
	limit  int
	ids    []event.ID // the arguments
	child  uuid.UUID  // the argument of the commands on one child
}

func (p Process) historyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "history",
		Short: "Show who changed an edge, a child or a thread, and when",
		Long: `History shows recorded versions, also of hidden and deleted content. It is for people on call. The
API shows them to callers with the right roles (GET .../versions). The versions of edges and
children come from the archiver's histories, so they are late by the archiver's lag (tidings
status). tidings kinds list shows the kinds in force.`,
	}
	follow, comment := historyFlags{kind: event.AggregateFollow}, historyFlags{kind: event.AggregateComment}
	c.AddCommand(
		p.historyOf(historyFlags{}, true, "edge FROM TO --tenant T --kind KIND",
			"Show the versions of an edge of --kind, newest first", 2, edgeHistory),
		p.historyOf(historyFlags{}, true, "child ID --tenant T --kind KIND",
			"Show the versions of a child of --kind, newest first", 1, childHistory),
		p.historyOf(follow, false, "follow FOLLOWER FOLLOWEE --tenant T",
			"Show the versions of a follow, newest first", 2, edgeHistory),
		p.historyOf(comment, false, "comment ID --tenant T",
			"Show the versions of a comment, newest first", 1, childHistory),
		p.historyOf(comment, true, "thread ID --tenant T",
			"Show the versions of the settings of an object's thread, newest first", 1, threadHistory),
		p.historyOf(comment, true, "author ID --tenant T",
			"Show an author's children as they are now, without those that the author deleted, oldest first", 1, authorHistory),
	)
	return c
}

// historyReader is where a command below history reads, and how.
type historyReader struct {
	in      needs
	ofChild bool // the argument is the id of a child
	show    func(ctx context.Context, s *session, now *kinds.Set, f historyFlags) error
}

var (
	edgeHistory   = historyReader{in: needProjections, show: showEdgeHistory}
	childHistory  = historyReader{in: needProjections, ofChild: true, show: showChildHistory}
	authorHistory = historyReader{in: needProjections, show: showAuthorHistory}
	threadHistory = historyReader{in: needTruth, show: showThreadHistory}
)

// historyOf returns one command below history. With anyKind it has the flag --kind, and f's kind is
// the default.
func (p Process) historyOf(f historyFlags, anyKind bool, use, short string, args int, r historyReader) *cobra.Command {
	c := p.command(command{
		use: use, short: short, args: exactArgs(args), name: "history", needs: r.in, json: oneObject,
		check: func(_ *session, args []string) (err error) {
			switch {
			case f.tenant <= 0:
				return &usageError{errors.New("--tenant is required, a positive number")}
			case f.kind == "":
				return &usageError{errors.New("--kind is required")}
			case f.limit < 1:
				return &usageError{fmt.Errorf("--limit is %d: want 1 or more", f.limit)}
			case !r.ofChild:
				f.ids, err = parseIDs(args)
				return err
			}
			if f.child, err = uuid.Parse(args[0]); err != nil {
				return &usageError{fmt.Errorf("%s %q: %w", f.kind, args[0], err)}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			pool, of := s.Projections, catalog.Projections
			if r.in == needTruth {
				pool, of = s.Truth, catalog.Truth
			}
			now, err := kindsOf(ctx, pool, of)
			if err != nil {
				return nil, err
			}
			return nil, r.show(ctx, s, now, f)
		},
	})
	if anyKind {
		c.Flags().StringVar(&f.kind, "kind", f.kind, "the `kind`")
	}
	c.Flags().Int64Var(&f.tenant, "tenant", 0, "the tenant")
	c.Flags().IntVar(&f.limit, "limit", 100, "at most this many rows")
	return c
}

// noKind returns the error that no kind in force has the name.
func noKind(archetype, name string) error {
	return fmt.Errorf("there is no kind %q of %s: `tidings kinds list` lists all of them", name, archetype)
}

// showVersions prints the versions that read returns. With --json, encode writes each object.
func showVersions[T any](s *session, f historyFlags, header []string, row func(T) []string, encode func(T) ([]byte, error),
	read func() ([]versioned.Version[T], error)) error {
	all, err := read()
	if err != nil {
		return err
	}
	items := make([]versioned.Version[json.RawMessage], len(all))
	rows := [][]string{append([]string{"ID", "STATE", "AT", "ACTOR"}, header...)}
	for i, v := range all {
		items[i] = versioned.Version[json.RawMessage]{Metadata: v.Metadata, Position: v.Position}
		if items[i].Object, err = encode(v.Object); err != nil {
			return err
		}
		rows = append(rows, append([]string{strconv.FormatInt(v.Metadata.VersionID, 10), string(v.Metadata.VersionState),
			v.Metadata.LastUpdateTime.UTC().Format(event.TimeFormat), printable(v.Metadata.CreatedBy)}, row(v.Object)...))
	}
	if err := s.print(reports(map[string]any{"items": items}, rowsOf(rows...))); err != nil || s.asJSON {
		return err
	}
	if len(all) == 0 {
		fmt.Fprintln(s.Stderr, "No history recorded: the object never existed, is not archived yet, or was purged.")
	}
	if len(all) == f.limit {
		fmt.Fprintln(s.Stderr, "There may be more: use a higher --limit.")
	}
	return nil
}

// inTx returns a read function for showVersions that calls fn in a transaction.
func inTx[T any](ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) ([]T, error)) func() ([]T, error) {
	return func() (all []T, err error) {
		err = postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
			all, err = fn(tx)
			return err
		})
		return all, err
	}
}

// printable returns s with control characters quoted, cut to 60 characters.
func printable(s string) string {
	const room = 60
	if r := []rune(s); len(r) > room {
		s = string(r[:room-1]) + "…"
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

func showEdgeHistory(ctx context.Context, s *session, now *kinds.Set, f historyFlags) error {
	k, ok := now.Edge(f.kind)
	if !ok {
		return noKind("edges", f.kind)
	}
	header := []string{"VERSION", "STATUS"}
	if len(k.Attributes) > 0 {
		header = append(header, "ATTRIBUTES")
	}
	row := func(e event.Edge) []string {
		return append([]string{strconv.FormatInt(e.Version, 10), e.Status}, attributesColumn(k.Attributes, e.Attributes)...)
	}
	return showVersions(s, f, header, row, func(e event.Edge) ([]byte, error) { return e.Encode(k.Names()) },
		inTx(ctx, s.Projections, func(tx pgx.Tx) ([]versioned.Version[event.Edge], error) {
			return history.Edges(k).Recent(ctx, tx, f.tenant, versioned.Key{f.ids[0], f.ids[1]}, math.MaxInt64, f.limit)
		}))
}

// attributesColumn returns the cell of an entity's attributes. It returns no cell if the kind has
// no attributes.
func attributesColumn(all map[string]kinds.Attribute, has json.RawMessage) []string {
	if len(all) == 0 {
		return nil
	}
	return []string{strings.ReplaceAll(printable(string(store.CanonicalAttributes(has))), `\"`, `"`)}
}

func showChildHistory(ctx context.Context, s *session, now *kinds.Set, f historyFlags) error {
	return showChildren(ctx, s, now, f, func(tx pgx.Tx, h *history.Table[event.Child]) ([]versioned.Version[event.Child], error) {
		return h.Recent(ctx, tx, f.tenant, versioned.Key{f.child.String()}, math.MaxInt64, f.limit)
	})
}

func showAuthorHistory(ctx context.Context, s *session, now *kinds.Set, f historyFlags) error {
	return showChildren(ctx, s, now, f, func(tx pgx.Tx, h *history.Table[event.Child]) ([]versioned.Version[event.Child], error) {
		return h.Query(ctx, tx, f.tenant, []versioned.Field{{Name: "author_id", Value: f.ids[0]}}, nil, f.limit)
	})
}

// showChildren prints the versions that read returns from the history of f's kind.
func showChildren(ctx context.Context, s *session, now *kinds.Set, f historyFlags,
	read func(tx pgx.Tx, h *history.Table[event.Child]) ([]versioned.Version[event.Child], error)) error {
	k, ok := now.Child(f.kind)
	if !ok {
		return noKind("children", f.kind)
	}
	header := []string{"VERSION", strings.ToUpper(k.Name), strings.ToUpper(k.Parent), "AUTHOR", "VISIBILITY", "REASON", "BODY"}
	if len(k.Attributes) > 0 {
		header = append(header, "ATTRIBUTES")
	}
	row := func(c event.Child) []string {
		return append([]string{strconv.FormatInt(c.Version, 10), c.ID, c.Parent.String(), c.AuthorID.String(), c.State(),
			printable(c.Reason), printable(c.Body)},
			attributesColumn(k.Attributes, c.Attributes)...)
	}
	return showVersions(s, f, header, row, func(c event.Child) ([]byte, error) { return c.Encode(k.Names()) },
		inTx(ctx, s.Projections, func(tx pgx.Tx) ([]versioned.Version[event.Child], error) { return read(tx, history.Children(k)) }))
}

func showThreadHistory(ctx context.Context, s *session, now *kinds.Set, f historyFlags) error {
	k, ok := now.Child(f.kind)
	if !ok || !k.Moderated {
		return noKind("moderated children", f.kind)
	}
	return showVersions(s, f, []string{"VERSION", "LOCKED", "PREMODERATED", "TITLE"}, func(t event.Thread) []string {
		return []string{strconv.FormatInt(t.Version, 10), strconv.FormatBool(t.Locked),
			strconv.FormatBool(t.Premoderate), printable(t.Title)}
	}, func(t event.Thread) ([]byte, error) { return json.Marshal(t) }, func() ([]versioned.Version[event.Thread], error) {
		return store.New(s.Truth, nil).ThreadVersions(ctx, f.tenant, k, f.ids[0], math.MaxInt64, f.limit)
	})
}

// checkID returns a *usageError if the value of a flag is not an id.
func checkID(flag string, id event.ID) error {
	if _, err := event.ParseID(string(id)); err != nil {
		return &usageError{fmt.Errorf("%s: %w", flag, err)}
	}
	return nil
}

func parseIDs(args []string) ([]event.ID, error) {
	ids := make([]event.ID, len(args))
	for i, a := range args {
		id, err := event.ParseID(a)
		if err != nil {
			return nil, &usageError{err}
		}
		ids[i] = id
	}
	return ids, nil
}
