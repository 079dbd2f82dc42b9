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
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
)

// historyFlags are the flags of all commands below history.
type historyFlags struct {
	data, kind string
	tenant     int64
	limit      int
	asJSON     bool
}

func (p Process) historyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "history",
		Short: "Show who changed an edge, a child or a thread, and when",
		Long: `History shows recorded versions, also of hidden and deleted content. It is for people on call. The
API shows the same to callers with the right roles (GET .../versions). The versions of edges and
children come from the archiver's histories, so they are late by the archiver's lag (tidings
status). tidings kinds list shows the kinds in force.`,
	}
	c.AddCommand(
		historyOf(historyFlags{}, true, "edge FROM TO --tenant T --kind KIND",
			"Show the versions of an edge of --kind, newest first", 2, p.edgeHistory),
		historyOf(historyFlags{}, true, "child ID --tenant T --kind KIND",
			"Show the versions of a child of --kind, newest first", 1, p.childHistory),
		historyOf(historyFlags{kind: event.AggregateFollow}, false, "follow FOLLOWER FOLLOWEE --tenant T",
			"Show the versions of a follow, newest first", 2, p.edgeHistory),
		historyOf(historyFlags{kind: event.AggregateComment}, false, "comment ID --tenant T",
			"Show the versions of a comment, newest first", 1, p.childHistory),
		historyOf(historyFlags{kind: event.AggregateComment}, true, "thread ID --tenant T",
			"Show the versions of the settings of an object's thread, newest first", 1, p.threadHistory),
		historyOf(historyFlags{kind: event.AggregateComment}, true, "author ID --tenant T",
			"Show an author's children as they are now, without those that the author deleted, oldest first", 1, p.authorHistory),
	)
	return c
}

// historyOf returns one command below history. With anyKind it has the flag --kind, and f's kind is
// the default.
func historyOf(f historyFlags, anyKind bool, use, short string, args int,
	show func(ctx context.Context, f historyFlags, args []string) error) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Args: exactArgs(args),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case f.tenant <= 0:
				return &usageError{errors.New("--tenant is required, a positive number")}
			case f.kind == "":
				return &usageError{errors.New("--kind is required")}
			case f.limit < 1:
				return &usageError{fmt.Errorf("--limit is %d: want 1 or more", f.limit)}
			}
			return show(c.Context(), f, args)
		},
	}
	if anyKind {
		c.Flags().StringVar(&f.kind, "kind", f.kind, "the `kind`")
	}
	c.Flags().Int64Var(&f.tenant, "tenant", 0, "the tenant")
	c.Flags().IntVar(&f.limit, "limit", 100, "at most this many rows")
	c.Flags().BoolVar(&f.asJSON, "json", false, "print one JSON object")
	dataFlag(c, &f.data)
	return c
}

// noKind returns the error that no kind in force has the name.
func noKind(archetype, name string) error {
	return fmt.Errorf("there is no kind %q of %s: `tidings kinds list` lists all of them", name, archetype)
}

// showVersions prints the versions that read returns. With --json, encode writes each object.
func showVersions[T any](ctx context.Context, p Process, f historyFlags, pool *pgxpool.Pool, header []string, row func(T) []string,
	encode func(T) ([]byte, error), read func(ctx context.Context, pool *pgxpool.Pool) ([]versioned.Version[T], error)) error {
	all, err := read(ctx, pool)
	if err != nil {
		return err
	}
	if f.asJSON {
		items := make([]versioned.Version[json.RawMessage], len(all))
		for i, v := range all {
			items[i] = versioned.Version[json.RawMessage]{Metadata: v.Metadata, Position: v.Position}
			if items[i].Object, err = encode(v.Object); err != nil {
				return err
			}
		}
		return p.writeJSON(map[string][]versioned.Version[json.RawMessage]{"items": items})
	}
	rows := [][]string{append([]string{"ID", "STATE", "AT", "ACTOR"}, header...)}
	for _, v := range all {
		rows = append(rows, append([]string{strconv.FormatInt(v.Metadata.VersionID, 10), string(v.Metadata.VersionState),
			v.Metadata.LastUpdateTime.UTC().Format(event.TimeFormat), printable(v.Metadata.CreatedBy)}, row(v.Object)...))
	}
	if err := p.table(rows...); err != nil {
		return err
	}
	if len(all) == 0 {
		fmt.Fprintln(p.Stderr, "No history recorded: the object never existed, is not archived yet, or was purged.")
	}
	if len(all) == f.limit {
		fmt.Fprintln(p.Stderr, "There may be more: use a higher --limit.")
	}
	return nil
}

// inTx returns a read function for showVersions that calls fn in a transaction.
func inTx[T any](fn func(ctx context.Context, tx pgx.Tx) ([]T, error)) func(ctx context.Context, pool *pgxpool.Pool) ([]T, error) {
	return func(ctx context.Context, pool *pgxpool.Pool) (all []T, err error) {
		err = postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
			all, err = fn(ctx, tx)
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

// historyPool connects to the database of the histories, and reads the kinds in force there.
func (p Process) historyPool(ctx context.Context, f historyFlags) (*pgxpool.Pool, *kinds.Set, error) {
	pool, err := p.projectionsPool(ctx, f.data, "history")
	if err != nil {
		return nil, nil, err
	}
	set, err := kindsOf(ctx, pool, kinds.Projections)
	if err != nil {
		pool.Close()
		return nil, nil, err
	}
	return pool, set, nil
}

func (p Process) edgeHistory(ctx context.Context, f historyFlags, args []string) error {
	ids, err := parseIDs(args)
	if err != nil {
		return err
	}
	pool, set, err := p.historyPool(ctx, f)
	if err != nil {
		return err
	}
	defer pool.Close()
	k, ok := set.Edge(f.kind)
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
	return showVersions(ctx, p, f, pool, header, row, func(e event.Edge) ([]byte, error) { return e.Encode(k.Names()) },
		inTx(func(ctx context.Context, tx pgx.Tx) ([]versioned.Version[event.Edge], error) {
			return history.Edges(k).Recent(ctx, tx, f.tenant, versioned.Key{ids[0], ids[1]}, math.MaxInt64, f.limit)
		}))
}

// attributesColumn returns the cell of an entity's attributes. It returns no cell if the kind has
// no attributes.
func attributesColumn(all map[string]kinds.Attribute, has json.RawMessage) []string {
	if len(all) == 0 {
		return nil
	}
	return []string{strings.ReplaceAll(printable(string(event.OneForm(has))), `\"`, `"`)}
}

func (p Process) childHistory(ctx context.Context, f historyFlags, args []string) error {
	id, err := uuid.Parse(args[0])
	if err != nil {
		return &usageError{fmt.Errorf("%s %q: %w", f.kind, args[0], err)}
	}
	return p.showChildren(ctx, f, func(ctx context.Context, tx pgx.Tx,
		h *history.Table[event.Child]) ([]versioned.Version[event.Child], error) {
		return h.Recent(ctx, tx, f.tenant, versioned.Key{id.String()}, math.MaxInt64, f.limit)
	})
}

func (p Process) authorHistory(ctx context.Context, f historyFlags, args []string) error {
	ids, err := parseIDs(args)
	if err != nil {
		return err
	}
	return p.showChildren(ctx, f, func(ctx context.Context, tx pgx.Tx,
		h *history.Table[event.Child]) ([]versioned.Version[event.Child], error) {
		return h.Query(ctx, tx, f.tenant, []versioned.Field{{Name: "author_id", Value: ids[0]}}, nil, f.limit)
	})
}

// showChildren prints the versions that read returns from the history of f's kind.
func (p Process) showChildren(ctx context.Context, f historyFlags,
	read func(ctx context.Context, tx pgx.Tx, h *history.Table[event.Child]) ([]versioned.Version[event.Child], error)) error {
	pool, set, err := p.historyPool(ctx, f)
	if err != nil {
		return err
	}
	defer pool.Close()
	k, ok := set.Child(f.kind)
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
	return showVersions(ctx, p, f, pool, header, row, func(c event.Child) ([]byte, error) { return c.Encode(k.Names()) },
		inTx(func(ctx context.Context, tx pgx.Tx) ([]versioned.Version[event.Child], error) {
			return read(ctx, tx, history.Children(k))
		}))
}

func (p Process) threadHistory(ctx context.Context, f historyFlags, args []string) error {
	ids, err := parseIDs(args)
	if err != nil {
		return err
	}
	pool, err := p.truthPool(ctx, f.data, "history")
	if err != nil {
		return err
	}
	defer pool.Close()
	set, err := kindsOf(ctx, pool, kinds.Truth)
	if err != nil {
		return err
	}
	k, ok := set.Child(f.kind)
	if !ok || !k.Moderated {
		return noKind("moderated children", f.kind)
	}
	return showVersions(ctx, p, f, pool, []string{"VERSION", "LOCKED", "PREMODERATED", "TITLE"}, func(t event.Thread) []string {
		return []string{strconv.FormatInt(t.Version, 10), strconv.FormatBool(t.Locked),
			strconv.FormatBool(t.Premoderate), printable(t.Title)}
	}, func(t event.Thread) ([]byte, error) { return json.Marshal(t) },
		func(ctx context.Context, pool *pgxpool.Pool) ([]versioned.Version[event.Thread], error) {
			return store.New(pool, nil).ThreadVersions(ctx, f.tenant, k, ids[0], math.MaxInt64, f.limit)
		})
}

func parseIDs(args []string) ([]int64, error) {
	ids := make([]int64, len(args))
	for i, a := range args {
		id, err := event.ParseID(a)
		if err != nil {
			return nil, &usageError{err}
		}
		ids[i] = int64(id)
	}
	return ids, nil
}
