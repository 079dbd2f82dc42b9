package erasure

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/redact"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// edgeErasure is a run's state for one kind of edges that have people as ends. The erasure deletes
// every trace of such an edge, because its existence reveals something about the person.
type edgeErasure struct {
	kinds.Edge
	ends    []kinds.End
	objects map[event.ID]bool // the aggregates of its events
	last    []store.EdgeOf    // the edges that the last scan found in the truth, all REMOVED; deleted once nothing else remains
}

func newEdgeErasures(set *kinds.Set) (all []*edgeErasure) {
	for _, k := range set.AllEdges() {
		if ends := k.EndsAt(kinds.Author); len(ends) > 0 {
			all = append(all, &edgeErasure{Edge: k, ends: ends, objects: make(map[event.ID]bool)})
		}
	}
	return all
}

// names reports whether a payload names the person as an end, in any form of the id.
func (k *edgeErasure) names(payload []byte, person event.ID) bool {
	from, to := redact.Ends(k.Names(), payload)
	return from == person && slices.Contains(k.ends, kinds.From) || to == person && slices.Contains(k.ends, kinds.To)
}

// eachEdge calls fn with the person's edges in the truth, in slices.
func (e *eraser) eachEdge(ctx context.Context, k *edgeErasure, fn func([]store.EdgeOf) error) error {
	for _, end := range k.ends {
		if err := e.store.EdgesOf(ctx, e.o.TenantID, k.Edge, e.o.AuthorID, end, func(all []store.EdgeOf) error {
			for _, edge := range all {
				k.objects[edge.To] = true
			}
			return fn(all)
		}); err != nil {
			return err
		}
	}
	return nil
}

// removeEdges removes the edges of each kind, in passes, until a pass finds none. The rows remain,
// REMOVED, until nothing else remains of them. If a writer puts an edge meanwhile, it continues its
// versions, as every consumer requires.
func (e *eraser) removeEdges(ctx context.Context) error {
	for _, k := range e.edges {
		for pass, found := 0, 1; found > 0 && pass < maxPasses; pass++ {
			found = 0
			if err := e.eachEdge(ctx, k, func(all []store.EdgeOf) error {
				if !slices.ContainsFunc(all, func(edge store.EdgeOf) bool { return edge.Active }) {
					return nil
				}
				found++
				if _, err := e.store.RemoveEdgesOf(ctx, e.o.TenantID, k.Edge, all, store.Meta{Actor: e.by}, e.Fence); err != nil {
					return err
				}
				return e.at("a slice of edges")
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// redactEdges redacts the published messages of the person's edges. It discards those that the
// relay moved to the DLQ, because nobody could apply them without their ends. It leaves removals in
// the DLQ, for which the erasure waits. Messages written meanwhile are pending, and the next round
// redacts them.
func (e *eraser) redactEdges(ctx context.Context) error {
	dlq := outbox.NewDLQ(e.Truth, nil)
	for _, t := range tables {
		var batch []outbox.Redacted
		var dead []int64
		if err := outbox.Sweep(ctx, e.Truth, t.table, e.selection(), func(m outbox.Swept) error {
			switch {
			case !e.noteObject(m) || m.Pending:
			case t.table != outbox.TableDLQ:
				payload, _, err := e.redact(m.AggregateType, m.EventType, m.Payload)
				batch = append(batch, outbox.Redacted{ID: m.ID, EventID: m.EventID, Payload: string(payload)})
				return err
			case m.EventType != event.Removed:
				dead = append(dead, m.ID)
			}
			return nil
		}, func() error {
			for some := range slices.Chunk(dead, outbox.MaxDLQBatch) {
				done, err := dlq.Discard(ctx, outbox.DLQRequest{DLQFilter: outbox.DLQFilter{TenantID: e.o.TenantID, IDs: some},
					Limit: len(some), Actor: e.by, Reason: e.o.Reason})
				e.count(t.store, len(done))
				if err != nil {
					return err
				}
			}
			err := e.redactBatch(ctx, t.table, t.store, batch)
			batch, dead = batch[:0], dead[:0]
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}

// forgetProjected deletes the person's edges from the consumers' tables or, with dryRun, counts
// them. Dead letters go first, because the retry of one would write the edge again.
func (e *eraser) forgetProjected(ctx context.Context, dryRun bool, counts tally) error {
	for _, k := range e.edges {
		n, err := consumers.DropDeadLetters(ctx, e.Projections, e.o.TenantID, k.Name, dryRun, e.by, e.o.Reason,
			func(payload []byte) bool { return k.names(payload, e.o.AuthorID) })
		counts.add(DeadLetters, n)
		if err != nil {
			return err
		}
		for _, p := range e.Fleet {
			for _, end := range k.ends {
				of := projections.EdgesOf{TenantID: e.o.TenantID, Kind: k.Edge, Object: e.o.AuthorID, End: end}
				for next := new(projections.Pair); next != nil; {
					var n int64
					if n, next, err = e.forget(ctx, p, of, *next, dryRun); err != nil {
						return err
					}
					counts.add(p.Name(), int(n))
				}
			}
		}
	}
	return nil
}

// forget deletes one slice. It holds the consumer only if there is something to delete.
func (e *eraser) forget(ctx context.Context, p projections.Projection, of projections.EdgesOf, after projections.Pair,
	dryRun bool) (n int64, next *projections.Pair, err error) {
	err = postgres.InTx(ctx, e.Projections, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		n, next, err = p.Forget(ctx, tx, of, after, true)
		return err
	})
	if err != nil || dryRun || n == 0 {
		return n, next, err
	}
	err = postgres.InTx(ctx, e.Projections, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := consumers.Hold(ctx, tx, p.Name()); err != nil {
			return err
		}
		n, next, err = p.Forget(ctx, tx, of, after, false)
		return err
	})
	return n, next, err
}

// countEdges counts the edges in the truth that a write made ACTIVE again, and stores all edges in
// last.
func (e *eraser) countEdges(ctx context.Context) (active int, err error) {
	for _, k := range e.edges {
		k.last = nil
		if err := e.eachEdge(ctx, k, func(all []store.EdgeOf) error {
			for _, edge := range all {
				if edge.Active {
					active++
				}
			}
			k.last = append(k.last, all...)
			return nil
		}); err != nil {
			return 0, err
		}
	}
	return active, nil
}

// forgetEdges deletes the edges of last from the truth. It returns the number of edges that
// somebody wrote since the scan.
func (e *eraser) forgetEdges(ctx context.Context) (written int, err error) {
	for _, k := range e.edges {
		for some := range slices.Chunk(k.last, slice) {
			n, err := e.store.ForgetEdges(ctx, e.o.TenantID, k.Edge, some, e.Fence)
			if err != nil {
				return 0, err
			}
			e.count(Edges, int(n))
			written += len(some) - int(n)
			if err := e.at("a slice of edges, forgotten"); err != nil {
				return 0, err
			}
		}
	}
	return written, nil
}
