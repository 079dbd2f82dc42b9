package erasure

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// The stores that hold what an author wrote and whom their edges lead to and from, as reports name them.
const (
	Edges       = "edges"
	Children    = "children"
	Keys        = "idempotency keys"
	Outbox      = "outbox"
	DLQ         = "outbox DLQ"
	Archive     = "outbox archive"
	DeadLetters = "dead letters"
	Stream      = "stream"
	Cold        = "cold files"
)

// Stores are all of them, in the order of reports; a projection is one under its own name.
func Stores(fleet []projections.Projection) []string {
	all := []string{Edges, Children, Keys, Outbox, DLQ, Archive, DeadLetters}
	for _, p := range fleet {
		all = append(all, p.Name())
	}
	return append(all, Stream, Cold)
}

// Deps are what an erasure works with.
type Deps struct {
	Truth, Projections *pgxpool.Pool // act as the system role
	Kinds              *kinds.Set    // in force in the truth: the author's children and edges of every kind are erased
	Fleet              []projections.Projection
	JetStream          jetstream.JetStream
	Broker             broker.Config
	Wake               func(partition int) // tells the relay of events; may be nil

	// Fence is called first in every transaction of the truth: it fails when the jobs' lease is lost, and keeps it from being taken.
	Fence func(ctx context.Context, tx pgx.Tx) error
	// Excluded returns an error when projections may be replayed meanwhile: the copies that a replay builds from are seen by nobody.
	Excluded func(ctx context.Context) error
	// Cold redacts the archive months that stand in files, and returns how many of their rows it redacted, or with look how many it would.
	// concerns returns the payload that a row of this tenant and aggregate type is to have, if it is to have another. May be nil.
	Cold func(ctx context.Context, tenant int64, look bool, concerns func(kind, eventType string, payload []byte) ([]byte, bool, error)) (int, error)
}

// Options say whom to erase.
type Options struct {
	TenantID, AuthorID int64
	Actor              string // who wants it: in the events, the histories and the record
	Reason             string
	DryRun             bool          // only count; nothing is noted, and nothing needs the lease
	Wait               time.Duration // at most, in all, for the relay and the consumers
	Progress           func(string)  // what is done now; nil for none

	at func(step string) error // a test's: an error ends the run there
}

// Report says what was erased, over all runs of this erasure; in a dry run, what would be.
type Report struct {
	TenantID    int64          `json:"tenant_id,string"`
	AuthorID    int64          `json:"author_id,string"`
	Done        bool           `json:"done"` // a scan of everything has found nothing more
	DryRun      bool           `json:"dry_run"`
	Runs        int            `json:"runs"`
	RequestedBy string         `json:"requested_by,omitempty"`
	RequestedAt time.Time      `json:"requested_at,omitzero"`
	FinishedAt  *time.Time     `json:"finished_at,omitempty"`
	Counts      map[string]int `json:"counts"`            // rows, messages and files' rows by store
	Waiting     []string       `json:"waiting,omitempty"` // for what, when the time was over
}

// ErrUnfinished reports an erasure that has to be asked for again: what it waited for did not happen in its time. Report.Waiting says what.
var ErrUnfinished = errors.New("erasure: not finished")

const (
	slice     = 500 // rows or messages of one transaction
	maxPasses = 5   // over the tenant's children of a kind for those that the author writes meanwhile
	maxRounds = 10  // from the truth to the scan
	pollFor   = 200 * time.Millisecond
)

// eraser is one run.
type eraser struct {
	Deps
	o        Options
	store    *store.Store
	report   *Report
	kinds    []*erasing
	edges    []*severing
	deadline time.Time
}

// erasing is what a run knows of one kind of children.
type erasing struct {
	kinds.Child
	children map[string]int64 // the erased ones of the author, with their objects
	objects  map[int64]bool   // theirs, and those that others' events of them are of
}

// found are the kinds of which the author has children.
func (e *eraser) found() (some []*erasing) {
	for _, k := range e.kinds {
		if len(k.children) > 0 {
			some = append(some, k)
		}
	}
	return some
}

// Run erases an author's children of every kind, and the edges from and to them, from everything that holds them. The caller holds the jobs' lease. An error leaves what was done, and the
// next Run goes on; ErrUnfinished says that it only had to wait too long. What the author writes after the erasure has begun may or may not
// be erased with the rest; what they write after it has finished stays.
func Run(ctx context.Context, deps Deps, o Options) (Report, error) {
	report := Report{TenantID: o.TenantID, AuthorID: o.AuthorID, DryRun: o.DryRun, Counts: make(map[string]int)}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if len(deps.Fleet) == 0 {
		return report, errors.New("erasure: no projections are named, whose content would stay")
	}
	if deps.Kinds == nil {
		return report, errors.New("erasure: no kinds are named, whose children would stay")
	}
	if o.TenantID <= 0 || o.AuthorID <= 0 || !store.ValidActor(o.Actor) || !store.ValidReason(o.Reason) {
		return report, fmt.Errorf("erase author %d of tenant %d, by %.80q: %w", o.AuthorID, o.TenantID, o.Actor, store.ErrInvalid)
	}
	e := &eraser{Deps: deps, o: o, store: store.New(deps.Truth, deps.Wake), report: &report, edges: newSeverings(deps.Kinds), deadline: time.Now().Add(o.Wait)}
	for _, k := range deps.Kinds.AllChildren() {
		e.kinds = append(e.kinds, &erasing{k, make(map[string]int64), make(map[int64]bool)})
	}
	var err error
	if o.DryRun {
		err = e.dryRun(ctx)
	} else {
		err = e.run(ctx)
	}
	if err != nil {
		err = fmt.Errorf("erase author %d of tenant %d: %w", o.AuthorID, o.TenantID, err)
	}
	return report, err
}

func (e *eraser) at(step string) error {
	if e.o.at != nil {
		return e.o.at(step)
	}
	return nil
}

func (e *eraser) count(store string, n int) {
	if n > 0 {
		e.report.Counts[store] += n
	}
}

func (e *eraser) run(ctx context.Context) error {
	if err := e.begin(ctx); err != nil {
		return err
	}
	for range maxRounds {
		if err := e.round(ctx); err != nil {
			return errors.Join(err, e.save(context.WithoutCancel(ctx), false))
		}
		e.o.Progress("scanning everything once more")
		left, err := e.scanAll(ctx)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			if err := e.at("scanned"); err != nil {
				return err
			}
			written, err := e.forgetEdges(ctx)
			if err != nil {
				return errors.Join(err, e.save(context.WithoutCancel(ctx), false))
			}
			if written > 0 {
				left[Edges] = written
			}
		}
		if len(left) == 0 {
			if err := e.save(ctx, true); err != nil {
				return err
			}
			e.report.Done = true
			return nil
		}
		e.o.Progress("the scan has found more: " + describe(e.Fleet, left))
	}
	return fmt.Errorf("%w: something writes it again; %d rounds were not enough", ErrUnfinished, maxRounds)
}

func describe(fleet []projections.Projection, counts map[string]int) string {
	var all []string
	for _, s := range Stores(fleet) {
		if counts[s] > 0 {
			all = append(all, fmt.Sprintf("%s %d", s, counts[s]))
		}
	}
	return strings.Join(all, ", ")
}

// round goes through all stores once.
func (e *eraser) round(ctx context.Context) error {
	if e.Excluded != nil {
		if err := e.Excluded(ctx); err != nil {
			return err
		}
	}
	steps := []struct {
		what string
		do   func(context.Context) error
	}{
		{"removing edges", e.removeEdges},
		{"erasing children", e.eraseChildren},
		{"blanking idempotency keys", e.blankKeys},
		{"redacting the outbox", e.redactMessages},
		{"waiting for the relay", e.awaitPublished},
		{"reading the stream", e.pastStream},
		{"redacting cold files", e.redactCold},
	}
	for _, s := range steps {
		e.o.Progress(s.what)
		if err := s.do(ctx); err != nil {
			return err
		}
		if err := e.at(s.what); err != nil {
			return err
		}
		if err := e.save(ctx, false); err != nil {
			return err
		}
	}
	return nil
}

// eraseChildren erases what it finds of each kind until a pass finds nothing, and remembers all that is erased.
func (e *eraser) eraseChildren(ctx context.Context) error {
	for _, k := range e.kinds {
		for pass, found := 0, 1; found > 0 && pass < maxPasses; pass++ {
			found = 0
			err := e.store.AuthorChildren(ctx, e.o.TenantID, k.Child, e.o.AuthorID, func(all []store.AuthorChild) error {
				var ids []string
				for _, c := range all {
					k.children[c.ID], k.objects[c.Object] = c.Object, true // it is erased before anything else looks
					if !c.Erased {
						ids = append(ids, c.ID)
					}
				}
				found += len(ids)
				return e.erase(ctx, k, ids, false)
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (e *eraser) erase(ctx context.Context, k *erasing, ids []string, again bool) error {
	for some := range slices.Chunk(ids, store.MaxErase) {
		n, err := e.store.EraseChildren(ctx, e.o.TenantID, k.Child, some, again, store.Meta{Actor: e.o.Actor}, e.Fence)
		if err != nil {
			return err
		}
		e.count(Children, n)
		if err := e.at("a slice of children"); err != nil {
			return err
		}
	}
	return nil
}

func (e *eraser) blankKeys(ctx context.Context) error {
	for _, k := range e.found() {
		err := e.store.AuthorKeys(ctx, e.o.TenantID, k.Child, e.o.AuthorID, func(byKey map[string]string) error {
			var keys []string
			for key, id := range byKey {
				if _, of := k.children[id]; of {
					keys = append(keys, key)
				}
			}
			slices.Sort(keys)
			if len(keys) == 0 {
				return nil
			}
			n, err := e.store.BlankKeys(ctx, e.o.TenantID, k.Child, e.o.AuthorID, keys, e.Fence)
			e.count(Keys, int(n))
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (e *eraser) selection(k *erasing) outbox.Selection {
	return outbox.Selection{TenantID: e.o.TenantID, AggregateType: k.Name, AggregateIDs: slices.Sorted(maps.Keys(k.objects))}
}

// of returns the object of the erased child that a payload names, in whatever form. Who wrote it the child says, not the payload.
func (k *erasing) of(payload []byte) (child string, object int64, is bool) {
	child = k.Names().Named(payload)
	object, is = k.children[child]
	return child, object, is
}

// redact returns the payload that a message is to have, if it has content of an erased child.
func (k *erasing) redact(eventType string, payload []byte) ([]byte, bool, error) {
	if _, _, is := k.of(payload); !is || k.Names().Redacted(eventType, payload) {
		return nil, false, nil
	}
	redacted, err := k.Names().Redact(payload)
	return redacted, err == nil, err
}

// redactSwept is redact for a message of a table. It remembers which object the message is of: the archive is asked for it.
func (k *erasing) redactSwept(m outbox.Swept) ([]byte, bool, error) {
	if _, _, is := k.of(m.Payload); is {
		k.objects[m.AggregateID] = true
	}
	return k.redact(m.EventType, m.Payload)
}

// tables are those that hold payloads, in the order in which messages go from one to the next.
var tables = []struct{ table, store string }{{outbox.TableDLQ, DLQ}, {outbox.TableOutbox, Outbox}, {outbox.TableArchive, Archive}, {outbox.TableKept, Archive}}

func (e *eraser) redactMessages(ctx context.Context) error {
	for _, t := range tables {
		for _, k := range e.found() {
			if err := e.redactTable(ctx, t.table, t.store, k); err != nil {
				return err
			}
		}
	}
	return nil
}

func (e *eraser) redactTable(ctx context.Context, table, store string, k *erasing) error {
	var batch []outbox.Redacted
	return outbox.Sweep(ctx, e.Truth, table, e.selection(k), func(m outbox.Swept) error {
		payload, is, err := k.redactSwept(m)
		if is {
			batch = append(batch, outbox.Redacted{ID: m.ID, EventID: m.EventID, Payload: string(payload)})
		}
		return err
	}, func() error {
		err := e.redactBatch(ctx, table, store, batch)
		batch = batch[:0]
		return err
	})
}

func (e *eraser) redactBatch(ctx context.Context, table, store string, batch []outbox.Redacted) error {
	for some := range slices.Chunk(batch, slice) {
		var n int64
		if err := e.tx(ctx, func(tx pgx.Tx) (err error) {
			n, err = outbox.Redact(ctx, tx, table, some)
			return err
		}); err != nil {
			return err
		}
		e.count(store, int(n))
		if err := e.at("a slice of the " + store); err != nil {
			return err
		}
	}
	return nil
}

// await asks until what is nothing, or the time is over. It rests several times as long as an answer takes.
func (e *eraser) await(ctx context.Context, ask func() ([]string, error)) error {
	for {
		start := time.Now()
		waiting, err := ask()
		if err != nil || len(waiting) == 0 {
			e.report.Waiting = nil
			return err
		}
		if !slices.Equal(waiting, e.report.Waiting) {
			e.o.Progress("waiting for " + strings.Join(waiting, "; "))
		}
		e.report.Waiting = waiting
		if time.Now().After(e.deadline) {
			return fmt.Errorf("%w after waiting %s for %s", ErrUnfinished, e.o.Wait, strings.Join(waiting, "; "))
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(max(pollFor, 4*time.Since(start))):
		}
	}
}

// awaitPublished waits until the relay has published everything of the erased children and the removed edges, which ends with what says that they are that.
func (e *eraser) awaitPublished(ctx context.Context) error {
	return e.await(ctx, func() (waiting []string, err error) {
		n := 0
		for _, k := range e.found() {
			if err := outbox.PendingOf(ctx, e.Truth, e.selection(k), func(payload []byte) {
				if _, _, is := k.of(payload); is {
					n++
				}
			}); err != nil {
				return nil, err
			}
		}
		pending, removals, err := e.pendingEdges(ctx)
		if err != nil {
			return nil, err
		}
		if n += pending; n > 0 {
			waiting = append(waiting, fmt.Sprintf("the relay: %d messages of what the author wrote are not published", n))
		}
		if removals > 0 {
			waiting = append(waiting, fmt.Sprintf("you: %d messages of removals are in the outbox DLQ; retry them (tidings dlq outbox retry)", removals))
		}
		dead, err := e.deadErasures(ctx, e.Truth)
		if dead > 0 {
			waiting = append(waiting, fmt.Sprintf("you: %d messages of erasures are in the outbox DLQ; retry them (tidings dlq outbox retry)", dead))
		}
		return waiting, err
	})
}

// deadErasures counts the events of the erasure that the relay has given up.
func (e *eraser) deadErasures(ctx context.Context, q outbox.Querier) (n int, err error) {
	for _, k := range e.found() {
		if err := outbox.Sweep(ctx, q, outbox.TableDLQ, e.selection(k), func(m outbox.Swept) error {
			if _, _, is := k.of(m.Payload); is && m.EventType == event.Erased {
				n++
			}
			return nil
		}, func() error { return nil }); err != nil {
			return n, err
		}
	}
	return n, nil
}

// known counts the objects that messages are looked for at.
func (e *eraser) known() (n int) {
	for _, k := range e.kinds {
		n += len(k.objects)
	}
	return n
}

// pastStream waits for the consumers, redacts what they keep, and takes off the stream what stands before the erasures.
func (e *eraser) pastStream(ctx context.Context) error {
	known := e.known()
	found, err := e.scan(ctx)
	if err != nil {
		return err
	}
	if e.known() > known { // the stream alone names them: their rows go before its messages do
		if err := e.redactMessages(ctx); err != nil {
			return err
		}
	}
	if found.late > 0 { // only a message behind them makes them earlier ones: the next round finds them so
		for _, k := range e.found() {
			if err := e.erase(ctx, k, found.lateOf[k], true); err != nil {
				return err
			}
		}
		return nil
	}
	if err := e.at("read the stream"); err != nil {
		return err
	}
	e.o.Progress("waiting for the consumers")
	if err := e.await(ctx, func() ([]string, error) { return e.notPast(ctx, found) }); err != nil {
		return err
	}
	if err := e.at("passed by the consumers"); err != nil {
		return err
	}
	e.o.Progress("redacting dead letters and histories")
	if err := e.redactProjections(ctx, false, e.report.Counts); err != nil {
		return err
	}
	if err := e.at("redacted the projections"); err != nil {
		return err
	}
	if err := e.redactEdges(ctx); err != nil {
		return err
	}
	if err := e.at("redacted the messages of edges"); err != nil {
		return err
	}
	e.o.Progress(fmt.Sprintf("erasing %d messages from the stream", len(found.doomed)))
	return e.deleteDoomed(ctx, found)
}

func (e *eraser) notPast(ctx context.Context, found onStream) (waiting []string, err error) {
	behind, err := consumers.NotPast(ctx, e.Projections, found.ends, found.created)
	if err != nil || len(behind) == 0 {
		return nil, err
	}
	pauses, err := consumers.Pauses(ctx, e.Projections)
	for _, name := range slices.Sorted(maps.Keys(behind)) {
		line := fmt.Sprintf("%s: %d streams", name, behind[name])
		if p, ok := pauses[name]; ok {
			line += fmt.Sprintf(", paused by %s (tidings resume --consumer %s)", p.Actor, name)
		}
		waiting = append(waiting, line)
	}
	return waiting, err
}

// redactProjections redacts what consumers keep, or with look counts it: the dead letters first, for a retry of one writes the others.
func (e *eraser) redactProjections(ctx context.Context, look bool, counts map[string]int) error {
	add := func(store string, n int) {
		if n > 0 {
			counts[store] += n
		}
	}
	var all []string
	for _, k := range e.found() {
		n, err := consumers.RedactDeadLetters(ctx, e.Projections, e.o.TenantID, k.Name, look,
			func(payload []byte, headers map[string][]string) ([]byte, map[string][]string, bool, error) {
				eventType := ""
				if v := headers[event.HeaderType]; len(v) > 0 && strings.HasPrefix(v[0], "tidings."+k.Name+"."+event.Erased+".") {
					eventType = event.Erased
				}
				payload, is, err := k.redact(eventType, payload)
				return payload, event.RedactHeaders(headers), is, err
			})
		add(DeadLetters, n)
		if err != nil {
			return err
		}
		all = slices.AppendSeq(all, maps.Keys(k.children))
	}
	slices.Sort(all)
	for ids := range slices.Chunk(all, slice) {
		for _, p := range e.Fleet {
			var n int64
			if err := postgres.InTx(ctx, e.Projections, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
				n, err = p.Redact(ctx, tx, e.o.TenantID, ids, look)
				return err
			}); err != nil {
				return err
			}
			add(p.Name(), int(n))
		}
	}
	return e.forgetProjected(ctx, look, add)
}

func (e *eraser) redactCold(ctx context.Context) error {
	if e.Cold == nil {
		return nil
	}
	n, err := e.Cold(ctx, e.o.TenantID, false, e.concerns)
	e.count(Cold, n)
	return err
}

// concerns is redact for a row of the archive.
func (e *eraser) concerns(kind, eventType string, payload []byte) ([]byte, bool, error) {
	for _, k := range e.found() {
		if k.Name == kind {
			return k.redact(eventType, payload)
		}
	}
	for _, k := range e.edges {
		if k.Name == kind && k.names(payload, e.o.AuthorID) {
			redacted, err := k.Names().Redact(payload)
			return redacted, err == nil, err
		}
	}
	return nil, false, nil
}
