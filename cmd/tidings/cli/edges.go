package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

func (p Process) edgesRemoveCommand() *cobra.Command {
	var (
		direction string
		tenant    int64
		names     []string
		r         store.RemovalRequest
	)
	c := p.command(command{
		use:   "remove --tenant T --id ID",
		short: "Remove all edges of an object, such as a user who leaves",
		long: `Remove does the same as POST /v1/users/{user_id}:remove-edges, and works beside the archivers until the
removal is complete. It removes every edge that exists at the start, each with its own version and
event. You may stop it: the archivers continue, and the same command shows the progress. The object
may also be a child, such as a comment, if edges lead to its kind.`,
		name: "edges remove", needs: needTruth, json: oneObject, actor: &r.Actor, reason: &r.Reason, destructive: true,
		check: func(*session, []string) error {
			r.Direction = store.Direction(direction)
			switch {
			case tenant <= 0 || r.ID == "":
				return &usageError{errors.New("--tenant and --id are required, and the tenant is a positive number")}
			case !slices.Contains([]store.Direction{store.DirectionFrom, store.DirectionTo, store.DirectionBoth}, r.Direction):
				return &usageError{fmt.Errorf("--direction is %q: want from, to or both", direction)}
			}
			return checkID("--id", r.ID)
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			m, err := s.removeEdges(ctx, tenant, r, names)
			if err != nil {
				return nil, err
			}
			rows := [][]string{{"KIND", "REMOVED"}}
			for _, kind := range m.Kinds {
				rows = append(rows, []string{kind, count(m.Removed[kind])})
			}
			return reports(m.Removed, rowsOf(rows...)), nil
		},
	})
	c.Flags().Int64Var(&tenant, "tenant", 0, "the tenant")
	c.Flags().StringVar(&r.Object, "object", kinds.Author, "the type of the object, or the kind of the child, as the kinds name it")
	c.Flags().StringVar((*string)(&r.ID), "id", "", "the object's id")
	c.Flags().StringSliceVar(&names, "kind", nil, "only of this `kind`; repeatable (default: every kind)")
	c.Flags().StringVar(&direction, "direction", string(store.DirectionBoth), "the edges from the object (from), to it (to), or both")
	return c
}

// showEdges shows how many edges the command would remove.
func showEdges(ctx context.Context, w io.Writer, s *store.Store, now *kinds.Set, tenant int64, r store.RemovalRequest) error {
	rows, total := [][]string{{"KIND", "EDGES"}}, int64(0)
	for _, name := range r.Kinds {
		var n int64
		for _, end := range now.Edges[name].EndsAt(r.Object) {
			if !r.Direction.Has(end) {
				continue
			}
			if err := s.EdgesOf(ctx, tenant, now.Edges[name], r.ID, end, func(all []store.EdgeOf) error {
				for _, e := range all {
					if e.Active {
						n++
					}
				}
				return nil
			}); err != nil {
				return err
			}
		}
		rows = append(rows, []string{name, count(n)})
		total += n
	}
	if total == 0 {
		return errNothingToDelete
	}
	fmt.Fprintf(w, "The command removes these edges of %s %s of tenant %d (--direction %s):\n", r.Object, r.ID, tenant, r.Direction)
	return tableTo(w, rows...)
}

// removeEdges requests the removal and works until it is complete.
func (s *session) removeEdges(ctx context.Context, tenant int64, r store.RemovalRequest, names []string) (m store.Removal, err error) {
	now, err := truthKinds(ctx, s.Truth)
	if err != nil {
		return m, err
	}
	var ok bool
	if r.Kinds, ok = store.RemovalKinds(now, r.Object, r.Direction, names); !ok {
		if len(names) == 0 {
			return m, &usageError{fmt.Errorf("no kind has edges (--direction %s) of the object %s", r.Direction, r.Object)}
		}
		return m, &usageError{fmt.Errorf("not every kind of %v has edges (--direction %s) of the object %s", names, r.Direction, r.Object)}
	}
	of := store.New(s.Truth, nil)
	if err := s.ask(func(w io.Writer) error { return showEdges(ctx, w, of, now, tenant, r) }); err != nil {
		return m, err
	}
	if m, err = of.RequestRemoval(ctx, tenant, r); err != nil {
		return m, err
	}
	log := daemon.CommandLogger(s.Stderr, slog.LevelInfo) // the remover and this function both log; a logger has a lock
	remover, err := store.NewRemover(s.Truth, nil, func() *kinds.Set { return now }, log, prometheus.NewRegistry())
	if err != nil {
		return m, err
	}
	working, stop := context.WithCancel(ctx)
	g := new(errgroup.Group)
	g.Go(func() error { return remover.Run(working) })
	defer func() {
		stop()
		err = errors.Join(err, g.Wait())
	}()
	for before := int64(-1); m.FinishedAt == nil; {
		if total := sum(m.Removed); total != before {
			before = total
			log.InfoContext(ctx, "removing edges", "removed", total)
		}
		if work.Sleep(ctx, time.Second/4) != nil {
			return m, errors.New("stopped before the end: the archivers continue; run the same command again to see the progress")
		}
		if m, err = of.GetRemoval(ctx, tenant, m.ID); err != nil {
			return m, err
		}
	}
	return m, nil
}

func sum(counts map[string]int64) (total int64) {
	for n := range maps.Values(counts) {
		total += n
	}
	return total
}
