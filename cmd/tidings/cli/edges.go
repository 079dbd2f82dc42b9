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
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/store"
)

func (p Process) edgesCommand() *cobra.Command {
	c := &cobra.Command{Use: "edges", Short: "Remove all edges of an object"}
	c.AddCommand(p.edgesRemoveCommand())
	return c
}

func (p Process) edgesRemoveCommand() *cobra.Command {
	var (
		data, direction string
		tenant          int64
		names           []string
		asJSON          bool
		r               store.RemovalRequest
		sure            *asking
	)
	c := &cobra.Command{
		Use:   "remove --tenant T --id ID",
		Short: "Remove all edges of an object, such as a user who leaves",
		Long: `Remove does the same as POST /v1/users/{id}:remove-edges, and works beside the archivers until the
removal is complete. It removes every edge that exists at the start, each with its own version and
event. You may stop it: the archivers continue, and the same command shows the progress.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r.Direction = store.Direction(direction)
			switch {
			case tenant <= 0 || r.ID <= 0:
				return &usageError{errors.New("--tenant and --id are required, both positive numbers")}
			case !slices.Contains([]store.Direction{store.DirectionFrom, store.DirectionTo, store.DirectionBoth}, r.Direction):
				return &usageError{fmt.Errorf("--direction is %q: want from, to or both", direction)}
			}
			if err := setActor(&r.Actor); err != nil {
				return err
			}
			m, err := p.removeEdges(c.Context(), data, tenant, r, names, sure)
			if err != nil {
				return err
			}
			if asJSON {
				return p.writeJSON(m.Removed)
			}
			rows := [][]string{{"KIND", "REMOVED"}}
			for _, kind := range m.Kinds {
				rows = append(rows, []string{kind, count(m.Removed[kind])})
			}
			return p.table(rows...)
		},
	}
	c.Flags().Int64Var(&tenant, "tenant", 0, "the tenant")
	c.Flags().StringVar(&r.Object, "object", kinds.Author, "the type of the object, as the kinds name it")
	c.Flags().Int64Var(&r.ID, "id", 0, "the object's id")
	c.Flags().StringSliceVar(&names, "kind", nil, "only of this `kind`; repeatable (default: every kind)")
	c.Flags().StringVar(&direction, "direction", string(store.DirectionBoth), "the edges from the object (from), to it (to), or both")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	c.Flags().StringVar(&r.Actor, "actor", "", "the actor to record (default: the user of this system)")
	c.Flags().StringVar(&r.Reason, "reason", "", "the reason to record")
	sure = p.destructive(c)
	dataFlag(c, &data)
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
		return errNothingGoes
	}
	fmt.Fprintf(w, "The command removes these edges of %s %d of tenant %d (--direction %s):\n", r.Object, r.ID, tenant, r.Direction)
	return tableTo(w, rows...)
}

// removeEdges requests the removal and works until it is complete.
func (p Process) removeEdges(ctx context.Context, data string, tenant int64, r store.RemovalRequest, names []string,
	sure *asking) (m store.Removal, err error) {
	truth, err := p.truthPool(ctx, data, "edges remove")
	if err != nil {
		return m, err
	}
	defer truth.Close()
	now, err := truthKinds(ctx, truth)
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
	s := store.New(truth, nil)
	if err := sure.ask(func(w io.Writer) error { return showEdges(ctx, w, s, now, tenant, r) }); err != nil {
		return m, err
	}
	if m, err = s.RequestRemoval(ctx, tenant, r); err != nil {
		return m, err
	}
	log := daemon.CommandLogger(p.Stderr, slog.LevelInfo) // the remover and this function both log; a logger has a lock
	remover, err := store.NewRemover(truth, nil, func() *kinds.Set { return now }, log, prometheus.NewRegistry())
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
		select {
		case <-ctx.Done():
			return m, errors.New("stopped before the end: the archivers continue; run the same command again to see the progress")
		case <-time.After(time.Second / 4):
		}
		if m, err = s.GetRemoval(ctx, tenant, m.ID); err != nil {
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
