package cli

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/migrations"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/store"
	"github.com/tidings/tidings/versioned"
)

// historyFlags are what all commands below history take.
type historyFlags struct {
	data   string
	tenant int64
	limit  int
	asJSON bool
}

func (p Process) historyCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "history",
		Short: "Who did what to a comment, a pair or a thread, and when",
		Long: `History shows versions as they were recorded, also of what is hidden or deleted now: it is for people on call. The API shows the same to those
who may see it (GET .../versions). Versions of comments and follows come from the archiver's histories, which are behind by its lag (tidings status).`,
	}
	var f historyFlags
	c.AddCommand(
		historyOf(p, &f, "comment ID", "The versions of a comment, newest first", 1, p.commentHistory),
		historyOf(p, &f, "follow FOLLOWER FOLLOWEE", "The versions of a pair, newest first", 2, p.followHistory),
		historyOf(p, &f, "thread POST", "The versions of the settings of a post's thread, newest first", 1, p.threadHistory),
		historyOf(p, &f, "author ID", "The comments of an author that they have not deleted, as they are now, oldest first", 1, p.authorHistory),
	)
	return c
}

func historyOf(p Process, f *historyFlags, use, short string, args int, show func(ctx context.Context, f historyFlags, args []string) error) *cobra.Command {
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(args),
		RunE: func(c *cobra.Command, args []string) error {
			if f.tenant <= 0 || f.limit < 1 {
				return &usageError{errors.New("history wants --tenant, a positive number, and a --limit of 1 or more")}
			}
			return show(c.Context(), *f, args)
		},
	}
	c.Flags().Int64Var(&f.tenant, "tenant", 0, "the tenant")
	c.Flags().IntVar(&f.limit, "limit", 100, "versions to show at most")
	c.Flags().BoolVar(&f.asJSON, "json", false, "print one JSON object")
	dataFlag(c, &f.data)
	return c
}

// showVersions prints what read returns, and closes the pool.
func showVersions[T any](ctx context.Context, p Process, f historyFlags, pool *pgxpool.Pool, header []string, row func(v versioned.Version[T]) []string,
	read func(ctx context.Context, pool *pgxpool.Pool) ([]versioned.Version[T], error)) error {
	defer pool.Close()
	all, err := read(ctx, pool)
	if err != nil {
		return err
	}
	if f.asJSON {
		return p.writeJSON(map[string][]versioned.Version[T]{"items": append([]versioned.Version[T]{}, all...)})
	}
	rows := [][]string{append([]string{"VERSION ID", "STATE", "AT", "BY"}, header...)}
	for _, v := range all {
		rows = append(rows, append([]string{strconv.FormatInt(v.Metadata.VersionID, 10), string(v.Metadata.VersionState),
			v.Metadata.LastUpdateTime.UTC().Format(event.TimeFormat), printable(v.Metadata.CreatedBy)}, row(v)...))
	}
	if err := p.table(rows...); err != nil {
		return err
	}
	if len(all) == 0 {
		fmt.Fprintf(p.Stderr, "There is none: it never was, the archiver has not come to it, or retention has purged it.\n")
	}
	if len(all) == f.limit {
		fmt.Fprintf(p.Stderr, "There may be more: this is as many as --limit says.\n")
	}
	return nil
}

// inTx is a read of showVersions by fn, in a transaction.
func inTx[T any](fn func(ctx context.Context, tx pgx.Tx) ([]T, error)) func(ctx context.Context, pool *pgxpool.Pool) ([]T, error) {
	return func(ctx context.Context, pool *pgxpool.Pool) (all []T, err error) {
		err = postgres.InTx(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
			all, err = fn(ctx, tx)
			return err
		})
		return all, err
	}
}

// printable is s as a terminal can show it, and no longer than a line has room for.
func printable(s string) string {
	const room = 60
	if r := []rune(s); len(r) > room {
		s = string(r[:room-1]) + "…"
	}
	quoted := strconv.Quote(s)
	return quoted[1 : len(quoted)-1]
}

func commentColumns(v versioned.Version[event.Child]) []string {
	c := v.Object
	return []string{strconv.FormatInt(c.Version, 10), c.ID, c.Parent.String(), c.AuthorID.String(), c.State(), printable(c.Reason), printable(c.Body)}
}

var commentHeader = []string{"VERSION", "COMMENT", "POST", "AUTHOR", "IS", "REASON", "BODY"}

func (p Process) commentHistory(ctx context.Context, f historyFlags, args []string) error {
	id, err := uuid.Parse(args[0])
	if err != nil {
		return &usageError{fmt.Errorf("comment %q: %w", args[0], err)}
	}
	pool, err := p.projectionsPool(ctx, f.data, "history")
	if err != nil {
		return err
	}
	return showVersions(ctx, p, f, pool, commentHeader, commentColumns, inTx(func(ctx context.Context, tx pgx.Tx) ([]versioned.Version[event.Child], error) {
		return history.Children(kinds.Builtin().Children[event.AggregateComment]).Recent(ctx, tx, f.tenant, versioned.Key{id.String()}, math.MaxInt64, f.limit)
	}))
}

func (p Process) authorHistory(ctx context.Context, f historyFlags, args []string) error {
	ids, err := parseIDs(args)
	if err != nil {
		return err
	}
	pool, err := p.projectionsPool(ctx, f.data, "history")
	if err != nil {
		return err
	}
	return showVersions(ctx, p, f, pool, commentHeader, commentColumns, inTx(func(ctx context.Context, tx pgx.Tx) ([]versioned.Version[event.Child], error) {
		return history.Children(kinds.Builtin().Children[event.AggregateComment]).Query(ctx, tx, f.tenant, []versioned.Field{{Name: "author_id", Value: ids[0]}}, nil, f.limit)
	}))
}

func (p Process) followHistory(ctx context.Context, f historyFlags, args []string) error {
	ids, err := parseIDs(args)
	if err != nil {
		return err
	}
	pool, err := p.projectionsPool(ctx, f.data, "history")
	if err != nil {
		return err
	}
	return showVersions(ctx, p, f, pool, []string{"VERSION", "STATUS"}, func(v versioned.Version[event.Edge]) []string {
		return []string{strconv.FormatInt(v.Object.Version, 10), v.Object.Status}
	}, inTx(func(ctx context.Context, tx pgx.Tx) ([]versioned.Version[event.Edge], error) {
		return history.Edges(kinds.Builtin().Edges[event.AggregateFollow]).Recent(ctx, tx, f.tenant, versioned.Key{ids[0], ids[1]}, math.MaxInt64, f.limit)
	}))
}

func (p Process) threadHistory(ctx context.Context, f historyFlags, args []string) error {
	ids, err := parseIDs(args)
	if err != nil {
		return err
	}
	s, err := p.servers(ctx, f.data)
	if err != nil {
		return err
	}
	pool, err := postgres.Open(ctx, s.DatabaseURL, s.Postgres, postgres.RoleSystem, "history")
	if err != nil {
		return err
	}
	if err := migrations.Check(ctx, pool, migrations.Truth); err != nil {
		pool.Close()
		return err
	}
	return showVersions(ctx, p, f, pool, []string{"VERSION", "LOCKED", "PREMODERATED", "TITLE"}, func(v versioned.Version[event.Thread]) []string {
		t := v.Object
		return []string{strconv.FormatInt(t.Version, 10), strconv.FormatBool(t.Locked), strconv.FormatBool(t.Premoderate), printable(t.Title)}
	}, func(ctx context.Context, pool *pgxpool.Pool) ([]versioned.Version[event.Thread], error) {
		return store.New(pool, nil).ThreadVersions(ctx, f.tenant, kinds.Builtin().Children[event.AggregateComment], ids[0], math.MaxInt64, f.limit)
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
