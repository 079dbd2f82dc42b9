package erasure

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

// scanAll searches every store for remains of the erased children and of the edges, and returns
// their number by store. The map is empty if no store has any. scanAll reads the stream before the
// projections, so a consumer that begins to read afterward reads no content.
func (e *eraser) scanAll(ctx context.Context) (tally, error) {
	left := make(tally)
	active, err := e.countEdges(ctx)
	if err != nil {
		return nil, err
	}
	left.add(Edges, active)
	for _, k := range e.found() {
		if err := e.store.AuthorChildren(ctx, e.o.TenantID, k.Child, e.o.AuthorID, func(all []store.AuthorChild) error {
			for _, c := range all {
				if _, of := k.children[c.ID]; of && !c.Erased {
					left[Children]++
				}
			}
			return nil
		}); err != nil {
			return nil, err
		}
	}
	found, err := e.countRecords(ctx, left)
	if err != nil {
		return nil, err
	}
	behind, err := e.notPast(ctx, found)
	if err != nil {
		return nil, err
	}
	left.add(Stream, len(behind)) // of new consumers
	if err := e.countDerived(ctx, left); err != nil {
		return nil, err
	}
	if e.Excluded != nil {
		err = e.Excluded(ctx)
	}
	return left, err
}

// countRecords counts the keys, the acts and the messages of the truth, and the messages of the
// streams, which it also returns.
func (e *eraser) countRecords(ctx context.Context, left tally) (found onStream, err error) {
	for _, count := range []func(context.Context, tally) error{e.countKeys, e.countActs, e.countMessages} {
		if err := count(ctx, left); err != nil {
			return found, err
		}
	}
	found, err = e.scan(ctx)
	left.add(Stream, found.left)
	return found, err
}

// countDerived counts what consumers, subscribers and the cold store keep.
func (e *eraser) countDerived(ctx context.Context, left tally) error {
	if err := e.redactProjections(ctx, true, left); err != nil {
		return err
	}
	if err := e.deleteLetters(ctx, true, left); err != nil {
		return err
	}
	return e.countCold(ctx, left)
}

func (e *eraser) countKeys(ctx context.Context, left tally) error {
	for _, k := range e.found() {
		if err := e.store.AuthorKeys(ctx, e.o.TenantID, k.Child, e.o.AuthorID, func(byKey map[string]string) error {
			for _, id := range byKey {
				if _, of := k.children[id]; of {
					left[Keys]++
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// countMessages reads all tables in one snapshot, so a message that moves between them is in
// exactly one of them.
func (e *eraser) countMessages(ctx context.Context, left tally) error {
	return postgres.InTx(ctx, e.Truth, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, t := range tables { // reset after a failed attempt
			delete(left, t.store)
		}
		for _, t := range tables {
			if err := outbox.Sweep(ctx, tx, t.table, e.selection(), func(m outbox.Swept) error {
				e.noteObject(m)
				payload, _, err := e.redact(m.AggregateType, m.EventType, m.Payload)
				if payload != nil {
					left[t.store]++
				}
				return err
			}, nothing); err != nil {
				return err
			}
		}
		removals, dead := 0, 0
		if err := e.sweepDead(ctx, tx, &removals, &dead); err != nil {
			return err
		}
		left.add(DLQ, dead)
		return nil
	})
}

func (e *eraser) countCold(ctx context.Context, left tally) error {
	r, err := e.cold(ctx, true)
	if e.o.DryRun { // it counts rows alone
		r.Remains = 0
	}
	left.add(Cold, r.Rows+r.Remains)
	return err
}

func (e *eraser) countActs(ctx context.Context, left tally) error {
	n, err := e.store.RedactActor(ctx, e.o.TenantID, e.person, true, e.Fence)
	left.add(Acts, int(n))
	return err
}

// dryRun counts what an erasure would change now.
func (e *eraser) dryRun(ctx context.Context) error {
	counts := tally(e.report.Counts)
	if _, err := e.countEdges(ctx); err != nil {
		return err
	}
	for _, k := range e.edges {
		counts.add(Edges, len(k.last))
	}
	for _, k := range e.kinds {
		if err := e.store.AuthorChildren(ctx, e.o.TenantID, k.Child, e.o.AuthorID, func(all []store.AuthorChild) error {
			for _, c := range all {
				k.children[c.ID], k.objects[c.Object] = c.Object, true
				if !c.Erased {
					counts[Children]++
				}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	if _, err := e.countRecords(ctx, counts); err != nil {
		return err
	}
	return e.countDerived(ctx, counts)
}
