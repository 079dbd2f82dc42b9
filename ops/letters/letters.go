package letters

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/deadletter"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/outbox"
)

const (
	leaseFor     = 30 * time.Second // a process that updates nothing for this long has lost the operation
	searchEvery  = 5 * time.Second  // between searches for operations without a process
	outboxSlice  = 200              // messages per transaction: a retry copies their payloads
	lettersSlice = 50               // letters of consumers per query
)

// Desk works on dead letters. It is safe for concurrent use, by any number of processes.
type Desk struct {
	sources   map[string]source // deadletter.Outbox and deadletter.Consumers
	truth     *pgxpool.Pool
	dlq       *outbox.DLQ
	letters   *consumers.DeadLetters
	worker    string
	lease     time.Duration
	log       *slog.Logger
	at        func(step string) error // set by tests: an error ends the slice at that step
	completed func(Operation)
}

// sourceNames has the sources in the order in which Run searches them.
var sourceNames = []string{deadletter.Outbox, deadletter.Consumers}

// source is a database with letters.
type source struct {
	ledger
	reader *deadletter.Reader
	slice  func(ctx context.Context, o Operation) (Operation, error)
}

// New returns a Desk. The pools are those of the truth and of the projections, and act as the
// system role. dlq and letters use the same pools. It starts nothing.
func New(truth, projections *pgxpool.Pool, dlq *outbox.DLQ, letters *consumers.DeadLetters, log *slog.Logger) *Desk {
	d := &Desk{truth: truth, dlq: dlq, letters: letters, worker: rand.Text(), lease: leaseFor, log: log.With("component", "dead-letters"),
		at: func(string) error { return nil }, completed: func(Operation) {}}
	d.sources = map[string]source{
		deadletter.Outbox: {ledger{deadletter.Outbox, truth, "outbox_dlq_operations"}, &dlq.Reader, d.sliceMessages},
		deadletter.Consumers: {ledger{deadletter.Consumers, projections, "consumer_dead_letter_operations"}, &letters.Reader,
			d.sliceLetters},
	}
	return d
}

// OnCompleted makes Run call fn with each operation that it has finished. Call it before Run.
func (d *Desk) OnCompleted(fn func(Operation)) { d.completed = fn }

func (d *Desk) sourceOf(name string) (source, error) {
	s, ok := d.sources[name]
	if !ok {
		return s, fmt.Errorf("letters: unknown source %q", name)
	}
	return s, nil
}

// Reader returns the Reader of a source, deadletter.Outbox or deadletter.Consumers.
func (d *Desk) Reader(source string) *deadletter.Reader { return d.sources[source].reader }

// ActionsOn returns the actions of operators on the dead letters of a tenant's event: those in the
// outbox, where it may also have been delayed, and then those of consumers, each in order.
func (d *Desk) ActionsOn(ctx context.Context, tenant int64, eventID string) ([]deadletter.Action, error) {
	did, err := outbox.ActionsOn(ctx, d.truth, tenant, eventID)
	if err != nil {
		return nil, err
	}
	parked, err := d.letters.ActionsOn(ctx, tenant, eventID)
	return append(did, parked...), err
}

// Start inserts an operation, which Work or Run then carries out. If the id exists, it returns that
// operation.
func (d *Desk) Start(ctx context.Context, o Operation) (Operation, error) {
	s, err := d.sourceOf(o.Source)
	if err != nil {
		return Operation{}, err
	}
	total, err := s.reader.Count(ctx, o.filter())
	if err != nil {
		return Operation{}, err
	}
	if _, err := s.pool.Exec(ctx, s.sql(startSQL), pgx.StrictNamedArgs{"id": o.ID, "tenant": o.TenantID, "action": o.Action,
		"filter": o.Filter, "actor": o.Actor, "reason": o.Reason, "total": total}); err != nil {
		return Operation{}, fmt.Errorf("start operation %s on %d dead letters: %w", o.ID, total, err)
	}
	return s.get(ctx, o.ID)
}

// Count returns the Total that an operation would get. few is false if it would have to read more
// than deadletter.MaxCount letters.
func (d *Desk) Count(ctx context.Context, o Operation) (n int64, few bool, err error) {
	s, err := d.sourceOf(o.Source)
	if err != nil {
		return 0, false, err
	}
	return deadletter.CountFew(ctx, s.reader, o.filter())
}

// Get returns an operation of the tenant, or ErrNotFound. Tenant 0 means any tenant.
func (d *Desk) Get(ctx context.Context, tenant int64, source, id string) (Operation, error) {
	s, err := d.sourceOf(source)
	if err != nil {
		return Operation{}, ErrNotFound
	}
	o, err := s.get(ctx, id)
	if err == nil && tenant != 0 && o.TenantID != tenant {
		return Operation{}, ErrNotFound
	}
	return o, err
}

// List returns the latest operations of the tenant on a group, or without a group on any letters.
// Tenant 0 means all tenants.
func (d *Desk) List(ctx context.Context, tenant int64, group string, limit int) (all []Operation, err error) {
	for _, s := range d.sources {
		some, err := s.list(ctx, tenant, group, limit)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	slices.SortFunc(all, func(a, b Operation) int { return cmp.Or(b.Requested.Compare(a.Requested), cmp.Compare(a.ID, b.ID)) })
	return all[:min(len(all), limit)], nil
}

// Stop ends an operation early, and undoes nothing. ErrFinished reports an operation that has
// ended.
func (d *Desk) Stop(ctx context.Context, tenant int64, source, id, actor string) error {
	if _, err := d.Get(ctx, tenant, source, id); err != nil {
		return err
	}
	s := d.sources[source]
	tag, err := s.pool.Exec(ctx, s.sql(stopSQL), pgx.StrictNamedArgs{"id": id, "tenant": tenant, "actor": actor})
	if err != nil {
		return fmt.Errorf("stop operation %s: %w", id, err)
	}
	if tag.RowsAffected() == 0 {
		return ErrFinished
	}
	return nil
}

// Work carries out an operation until it ends, and calls progress after each slice. While another
// process works on it, Work waits. If ctx ends, Work leaves the rest to other processes and returns
// the context's error with the current operation. A database error also ends Work; Run retries.
func (d *Desk) Work(ctx context.Context, sourceName, id string, progress func(Operation)) (Operation, error) {
	s, err := d.sourceOf(sourceName)
	if err != nil {
		return Operation{}, err
	}
	for {
		o, err := d.workOn(ctx, s, id, progress)
		if !errors.Is(err, errLost) {
			return o, err
		}
		if work.Sleep(ctx, time.Second) != nil {
			return o, ctx.Err()
		}
		if o, err = s.get(ctx, id); err != nil || o.FinishedAt != nil {
			return o, err
		}
		progress(o)
	}
}

// workOn is Work by this process alone. It returns errLost if another process has the operation.
func (d *Desk) workOn(ctx context.Context, s source, id string, progress func(Operation)) (o Operation, err error) {
	o.Source = s.source
	err = s.pool.QueryRow(ctx, s.sql(claimSQL), pgx.StrictNamedArgs{"id": id, "worker": d.worker, "lease": d.lease}).Scan(o.fields()...)
	if errors.Is(err, pgx.ErrNoRows) {
		if o, err = s.get(ctx, id); err == nil && o.FinishedAt == nil {
			err = errLost
		}
		return o, err
	}
	if err != nil {
		return o, fmt.Errorf("claim operation %s: %w", id, err)
	}
	for o.FinishedAt == nil {
		progress(o)
		if err = d.at("slice"); err != nil {
			return o, err
		}
		var next Operation
		if next, err = s.slice(ctx, o); err != nil {
			break
		}
		o = next
	}
	switch {
	case err == nil:
		progress(o)
		d.log.InfoContext(ctx, "operation on dead letters ended", "operation", id, "source", s.source, "action", o.Action, "actor",
			o.Actor, "done", o.Done, "failed", o.Failed)
		return o, nil
	case errors.Is(err, errLost): // it was stopped, or another process has it
		if now, gerr := s.get(ctx, id); gerr != nil || now.FinishedAt != nil {
			return now, gerr
		}
		return o, err
	}
	text := err.Error()
	if ctx.Err() != nil {
		text = ""
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, rerr := s.pool.Exec(rctx, s.sql(releaseSQL), pgx.StrictNamedArgs{"id": id, "worker": d.worker, "error": text})
	return o, errors.Join(fmt.Errorf("operation %s: %w", id, err), rerr)
}

// Run carries out operations whose process has stopped or died. It returns nil when ctx ends. It
// logs failures and retries.
func (d *Desk) Run(ctx context.Context) error {
	tick := time.NewTicker(searchEvery)
	defer tick.Stop()
	for {
		if err := d.runOnce(ctx); err != nil && ctx.Err() == nil {
			d.log.WarnContext(ctx, "operation on dead letters failed; retrying", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// runOnce carries out the operations without a process.
func (d *Desk) runOnce(ctx context.Context) error {
	for _, name := range sourceNames {
		s := d.sources[name]
		for {
			var id string
			err := s.pool.QueryRow(ctx, s.sql(unfinishedSQL)).Scan(&id)
			if errors.Is(err, pgx.ErrNoRows) {
				break
			}
			if err != nil {
				return fmt.Errorf("search for operations on dead letters of the %s: %w", name, err)
			}
			o, err := d.workOn(ctx, s, id, func(Operation) {})
			if err != nil && !errors.Is(err, errLost) {
				return err
			}
			if err == nil {
				d.completed(o)
			}
		}
	}
	return nil
}

// move records the result of a slice.
func (d *Desk) move(ctx context.Context, q postgres.Querier, o Operation, m moved) (Operation, error) {
	return d.sources[o.Source].move(ctx, q, d.worker, d.lease, o.ID, m)
}

// pass skips a letter that cannot be processed.
func (d *Desk) pass(ctx context.Context, o Operation, letter int64, why error) (Operation, error) {
	m := moved{after: letter, seen: 1, err: why}
	if why != nil {
		m.failed = 1
	}
	return d.move(ctx, d.sources[o.Source].pool, o, m)
}

// before returns the time before which the letters of an operation died.
func (o *Operation) before() time.Time {
	if f := o.Filter.DeadBefore; o.Requested.IsZero() || !f.IsZero() && f.Before(o.Requested) {
		return f
	}
	return o.Requested
}

// oneLetterFails reports an error of the letter, not of a database.
func oneLetterFails(err error) bool {
	return !errors.Is(err, errLost) && !postgres.IsTransient(err) && !postgres.IsSystemic(err)
}

// filter selects the letters that the operation has not processed. A retry of consumers' letters
// begins with the first of each aggregate; all of the outbox's are first.
func (o *Operation) filter() deadletter.Filter {
	f := o.Filter
	f.TenantID, f.DeadBefore, f.First, f.After = o.TenantID, o.before(), o.Action == deadletter.Retry, o.after
	return f
}

// sliceMessages processes messages of the outbox's DLQ: many together or, if that fails, one of
// them.
func (d *Desk) sliceMessages(ctx context.Context, o Operation) (next Operation, err error) {
	next, err = d.someMessages(ctx, o, outboxSlice)
	if err == nil || !oneLetterFails(err) {
		return next, err
	}
	if next, err = d.someMessages(ctx, o, 1); err == nil || !oneLetterFails(err) {
		return next, err
	}
	first, lerr := postgres.Collect(d.dlq.List(ctx, o.filter(), 1))
	if lerr != nil || len(first) == 0 {
		return o, errors.Join(err, lerr)
	}
	return d.pass(ctx, o, first[0].ID, err)
}

func (d *Desk) someMessages(ctx context.Context, o Operation, limit int) (next Operation, err error) {
	do := d.dlq.Retry
	if o.Action == deadletter.Discard {
		do = d.dlq.Discard
	}
	_, err = do(ctx, outbox.DLQRequest{DLQFilter: o.filter(), Limit: limit, Actor: o.Actor, Reason: o.Reason,
		Within: func(ctx context.Context, tx pgx.Tx, did []outbox.DLQAction) (err error) {
			m := moved{seen: int64(len(did)), done: int64(len(did)), finished: len(did) == 0}
			if !m.finished {
				m.after = did[len(did)-1].ID
			}
			if next, err = d.move(ctx, tx, o, m); err == nil {
				err = d.at("moved")
			}
			return err
		}})
	return next, err
}

// sliceLetters processes letters of consumers: the first one of each aggregate, because later ones
// cannot precede it. After a discard the next letter of the aggregate becomes the first one and may
// belong to the operation too. So after_id does not move then.
func (d *Desk) sliceLetters(ctx context.Context, o Operation) (Operation, error) {
	f := o.filter()
	f.First = true
	some, err := postgres.Collect(d.letters.List(ctx, f, lettersSlice))
	if err != nil {
		return o, err
	}
	if len(some) == 0 {
		return d.move(ctx, d.sources[o.Source].pool, o, moved{after: o.after, finished: true})
	}
	do := d.letters.Retry
	if o.Action == deadletter.Discard {
		do = d.letters.Discard
	}
	for _, l := range some {
		_, err := do(ctx, consumers.DeadLetterRequest{ID: l.ID, Actor: o.Actor, Reason: o.Reason,
			Within: func(ctx context.Context, tx pgx.Tx, gone int, fault error) error {
				m := moved{after: l.ID, seen: 1, done: int64(gone), stays: o.Action == deadletter.Discard, err: fault}
				if fault != nil {
					m.failed = 1
				}
				next, err := d.move(ctx, tx, o, m)
				if err == nil {
					o.Seen, o.Done, o.Failed = next.Seen, next.Done, next.Failed
					err = d.at("moved")
				}
				return err
			}})
		var notFirst *consumers.NotFirstError
		switch {
		case err == nil:
		case errors.Is(err, consumers.ErrNotParked), errors.As(err, &notFirst): // another operator or process was faster
			_, err = d.pass(ctx, o, l.ID, nil)
		case oneLetterFails(err):
			_, err = d.pass(ctx, o, l.ID, err)
		}
		if err != nil {
			return o, err
		}
	}
	return d.sources[o.Source].get(ctx, o.ID)
}
