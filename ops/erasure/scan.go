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
func (e *eraser) scanAll(ctx context.Context) (map[string]int, error) {
	left := make(map[string]int)
	if active, err := e.countEdges(ctx); err != nil {
		return nil, err
	} else if active > 0 {
		left[Edges] = active
	}
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
	if err := e.countKeys(ctx, left); err != nil {
		return nil, err
	}
	if err := e.countActs(ctx, left); err != nil {
		return nil, err
	}
	if err := e.countMessages(ctx, left); err != nil {
		return nil, err
	}
	found, err := e.scan(ctx)
	if err != nil {
		return nil, err
	}
	if found.left > 0 {
		left[Stream] = found.left
	}
	behind, err := e.notPast(ctx, found)
	if err != nil {
		return nil, err
	}
	if len(behind) > 0 { // a new consumer
		left[Stream] += len(behind)
	}
	if err := e.redactProjections(ctx, true, left); err != nil {
		return nil, err
	}
	if err := e.deleteLetters(ctx, true, left); err != nil {
		return nil, err
	}
	if err := e.countCold(ctx, left); err != nil {
		return nil, err
	}
	if e.Excluded != nil {
		err = e.Excluded(ctx)
	}
	return left, err
}

func (e *eraser) countKeys(ctx context.Context, left map[string]int) error {
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
func (e *eraser) countMessages(ctx context.Context, left map[string]int) error {
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
		if dead > 0 {
			left[DLQ] += dead
		}
		return nil
	})
}

func (e *eraser) countCold(ctx context.Context, left map[string]int) error {
	r, err := e.cold(ctx, true)
	if e.o.DryRun { // it counts rows alone
		r.Remains = 0
	}
	if n := r.Rows + r.Remains; n > 0 {
		left[Cold] = n
	}
	return err
}

func (e *eraser) countActs(ctx context.Context, left map[string]int) error {
	n, err := e.store.RedactActor(ctx, e.o.TenantID, e.person, true, e.Fence)
	if n > 0 {
		left[Acts] = int(n)
	}
	return err
}

// dryRun counts what an erasure would change now.
func (e *eraser) dryRun(ctx context.Context) error {
	counts := e.report.Counts
	if _, err := e.countEdges(ctx); err != nil {
		return err
	}
	for _, k := range e.edges {
		if len(k.last) > 0 {
			counts[Edges] += len(k.last)
		}
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
	if err := e.countKeys(ctx, counts); err != nil {
		return err
	}
	if err := e.countActs(ctx, counts); err != nil {
		return err
	}
	if err := e.countMessages(ctx, counts); err != nil {
		return err
	}
	found, err := e.scan(ctx)
	if err != nil {
		return err
	}
	if found.left > 0 {
		counts[Stream] = found.left
	}
	if err := e.redactProjections(ctx, true, counts); err != nil {
		return err
	}
	if err := e.deleteLetters(ctx, true, counts); err != nil {
		return err
	}
	return e.countCold(ctx, counts)
}
