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
	"github.com/tidings/tidings/internal/redact"
	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

// The stores that hold an author's texts and edges, as reports name them.
const (
	Edges       = "edges"
	Children    = "children"
	Acts        = "settings and requests"
	Keys        = "idempotency keys"
	Outbox      = "outbox"
	DLQ         = "outbox DLQ"
	Archive     = "outbox archive"
	DeadLetters = "dead letters"
	Stream      = "stream"
	Cold        = "cold files"

	SubscriberLetters = "subscriber letters"
)

// Stores returns all of them in the order of reports. Each projection is a store under its own
// name.
func Stores(fleet []projections.Projection) []string {
	all := []string{Edges, Children, Acts, Keys, Outbox, DLQ, Archive, DeadLetters}
	for _, p := range fleet {
		all = append(all, p.Name())
	}
	return append(all, Stream, SubscriberLetters, Cold)
}

// Deps are the dependencies of an erasure.
type Deps struct {
	Truth, Projections *pgxpool.Pool // act as the system role
	Kinds              *kinds.Set    // in force in the truth; children and edges of every kind are erased
	Fleet              []projections.Projection
	JetStream          jetstream.JetStream
	Broker             broker.Config
	Wake               func(partition int) // wakes the relay; may be nil

	// Fence is called first in every transaction of the truth. It fails if the jobs' lease is lost,
	// and keeps others from taking it.
	Fence func(ctx context.Context, tx pgx.Tx) error
	// Excluded returns an error if projections may be replayed meanwhile, because the erasure
	// cannot see a replay's copies.
	Excluded func(ctx context.Context) error
	// Cold redacts the ranges of the archive that are in files. It may be nil.
	Cold func(ctx context.Context, c ColdRequest) (ColdReport, error)
}

// ColdRequest selects the rows of a person in the files.
type ColdRequest struct {
	TenantID int64
	Person   event.ID
	DryRun   bool // only count
	// Redact returns the new payload of one of the tenant's rows, nil if it does not change, and
	// whether its message leaves the stream. It may be called for the same row again.
	Redact func(aggregateType, eventType string, payload []byte) (redacted []byte, off bool, err error)
}

// ColdReport is the result for the files.
type ColdReport struct {
	Rows    int      // redacted rows or, with DryRun, rows to redact
	Remains int      // with DryRun, ended exports that still have files
	Unread  []string // unreadable files that may hold data of the person, each with its problem
}

// Options select the person to erase.
type Options struct {
	TenantID int64
	AuthorID event.ID
	Actor    string // in the events, the histories and the record
	Reason   string
	DryRun   bool          // only count; records nothing and needs no lease
	Wait     time.Duration // the most time, in total, to wait for the relay and the consumers
	Progress func(string)  // called with the present step; may be nil

	at func(step string) error // a test's hook: an error ends the run there
}

// Report has the counts over all runs of this erasure or, in a dry run, the counts that it would
// have.
type Report struct {
	TenantID    int64          `json:"tenant_id,string"`
	AuthorID    event.ID       `json:"author_id"`
	Done        bool           `json:"done"` // a scan of everything found nothing more
	DryRun      bool           `json:"dry_run"`
	Runs        int            `json:"runs"`
	RequestedBy string         `json:"requested_by,omitempty"`
	RequestedAt time.Time      `json:"requested_at,omitzero"`
	FinishedAt  *time.Time     `json:"finished_at,omitempty"`
	Counts      map[string]int `json:"counts"`            // rows, messages and rows in files, by store
	Unread      []string       `json:"unread,omitempty"`  // unreadable files that may hold data of the person
	Waiting     []string       `json:"waiting,omitempty"` // what it waited for when the time was up
}

// ErrUnfinished reports an erasure that must be requested again: it waited too long, or could not
// read files. Report.Waiting and Report.Unread have the details.
var ErrUnfinished = errors.New("erasure: not finished")

const (
	slice     = 500 // rows or messages of one transaction
	maxPasses = 5   // over the tenant's children of a kind, for those that the author writes meanwhile
	maxRounds = 10  // from the truth to the scan
	pollFor   = 200 * time.Millisecond
)

// eraser is one run of an erasure.
type eraser struct {
	Deps
	o        Options
	store    *store.Store
	report   *Report
	person   string // the person as an actor
	by       string // the actor of the erasure's events
	kinds    []*erasing
	edges    []*edgeErasure
	told     []int // the first slots of the partitions that have the last person.erased
	deadline time.Time
}

// erasing is a run's state for one kind of children.
type erasing struct {
	kinds.Child
	children map[string]event.ID // the author's erased children, with their objects
	objects  map[event.ID]bool   // the objects of these children and of all events about them
}

// found returns the kinds in which the author has children.
func (e *eraser) found() (some []*erasing) {
	for _, k := range e.kinds {
		if len(k.children) > 0 {
			some = append(some, k)
		}
	}
	return some
}

// Run erases an author's children of every kind, and the edges from and to the author, from every
// store. The caller holds the jobs' lease. After an error the next Run resumes; ErrUnfinished means
// that only a wait took too long or files could not be read. Texts that the author writes while the
// erasure runs may or may not be erased. Texts written after it finished remain.
func Run(ctx context.Context, deps Deps, o Options) (Report, error) {
	report := Report{TenantID: o.TenantID, AuthorID: o.AuthorID, DryRun: o.DryRun, Counts: make(map[string]int)}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	if len(deps.Fleet) == 0 {
		return report, errors.New("erasure: no projections given, so their content would remain")
	}
	if deps.Kinds == nil {
		return report, errors.New("erasure: no kinds given, so their children would remain")
	}
	if _, err := event.ParseID(string(o.AuthorID)); o.TenantID <= 0 || err != nil || !store.ValidActor(o.Actor) ||
		!store.ValidReason(o.Reason) {
		return report, fmt.Errorf("erase author %s of tenant %d, by %.80q: %w", o.AuthorID, o.TenantID, o.Actor, store.ErrInvalid)
	}
	e := &eraser{Deps: deps, o: o, store: store.New(deps.Truth, deps.Wake), report: &report, edges: newEdgeErasures(deps.Kinds),
		deadline: time.Now().Add(o.Wait), person: fmt.Sprintf("%s:%s", kinds.Author, o.AuthorID), by: o.Actor}
	if e.by == e.person { // the person's own erasure must not name them
		e.by = event.ErasedActor
	}
	for _, k := range deps.Kinds.AllChildren() {
		e.kinds = append(e.kinds, &erasing{k, make(map[string]event.ID), make(map[event.ID]bool)})
	}
	var err error
	if o.DryRun {
		err = e.dryRun(ctx)
	} else {
		err = e.run(ctx)
	}
	if err != nil {
		err = fmt.Errorf("erase author %s of tenant %d: %w", o.AuthorID, o.TenantID, err)
	}
	return report, err
}

func (e *eraser) at(step string) error {
	if e.o.at != nil {
		return e.o.at(step)
	}
	return nil
}

// tally counts rows and messages by store. It has no store without any.
type tally map[string]int

func (t tally) add(store string, n int) {
	if n > 0 {
		t[store] += n
	}
}

// count counts in the report.
func (e *eraser) count(store string, n int) { tally(e.report.Counts).add(store, n) }

func (e *eraser) run(ctx context.Context) error {
	if err := e.begin(ctx); err != nil {
		return err
	}
	for range maxRounds {
		if err := e.round(ctx); err != nil {
			return errors.Join(err, e.save(context.WithoutCancel(ctx), false))
		}
		e.o.Progress("scanning every store again")
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
		told, err := e.toldAll(ctx)
		if err != nil {
			return err
		}
		if len(left) == 0 && told {
			if len(e.report.Unread) > 0 {
				return errors.Join(fmt.Errorf("%w: everything else is erased, but these files may contain data of the person: %s",
					ErrUnfinished, strings.Join(e.report.Unread, "; ")),
					e.save(ctx, false))
			}
			if err := e.save(ctx, true); err != nil {
				return err
			}
			e.report.Done = true
			return nil
		}
		e.o.Progress("the scan has found more: " + describe(e.Fleet, left))
	}
	return fmt.Errorf("%w: content reappeared in each of %d rounds", ErrUnfinished, maxRounds)
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

// round works through all stores once.
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
		{"telling subscribers", e.tell},
		{"blanking idempotency keys", e.blankKeys},
		{"redacting settings and requests", e.redactActs},
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

// eraseChildren erases the author's children of each kind, in passes, until a pass finds none, and
// remembers their ids.
func (e *eraser) eraseChildren(ctx context.Context) error {
	for _, k := range e.kinds {
		for pass, found := 0, 1; found > 0 && pass < maxPasses; pass++ {
			found = 0
			err := e.store.AuthorChildren(ctx, e.o.TenantID, k.Child, e.o.AuthorID, func(all []store.AuthorChild) error {
				var ids []string
				for _, c := range all {
					k.children[c.ID], k.objects[c.Object] = c.Object, true // it is erased before any other step uses it
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
		n, err := e.store.EraseChildren(ctx, e.o.TenantID, k.Child, e.Kinds.EdgesTo(k.Name), some, again, store.Meta{Actor: e.by}, e.Fence)
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

// selection selects all of the tenant's messages. From the archive it selects those of the objects
// known so far, and those of the person's acts.
func (e *eraser) selection() outbox.Selection {
	all := make(map[string][]event.ID)
	for _, k := range e.found() {
		all[k.Name] = slices.Sorted(maps.Keys(k.objects))
	}
	for _, k := range e.edges {
		all[k.Name] = slices.Sorted(maps.Keys(k.objects))
	}
	return outbox.Selection{TenantID: e.o.TenantID, Aggregates: all, Actor: e.person}
}

// of returns the erased child that a payload names, in any form of the id, and its object. The
// child determines the author, not the payload.
func (k *erasing) of(payload []byte) (child string, object event.ID, is bool) {
	child = redact.ChildID(k.Names(), payload)
	object, is = k.children[child]
	return child, object, is
}

// redact returns the new payload of a message with content of an erased child. It returns nil for
// any other message.
func (k *erasing) redact(eventType string, payload []byte) ([]byte, bool, error) {
	if _, _, is := k.of(payload); !is || redact.IsRedacted(k.Names(), eventType, payload) {
		return nil, false, nil
	}
	redacted, err := redact.Child(k.Names(), payload)
	return redacted, err == nil, err
}

// child returns the state for a kind of children, or nil if it is no such kind or the author has no
// children of it.
func (e *eraser) child(kind string) *erasing {
	if i := slices.IndexFunc(e.kinds, func(k *erasing) bool { return k.Name == kind && len(k.children) > 0 }); i >= 0 {
		return e.kinds[i]
	}
	return nil
}

func (e *eraser) edge(kind string) *edgeErasure {
	if i := slices.IndexFunc(e.edges, func(k *edgeErasure) bool { return k.Name == kind }); i >= 0 {
		return e.edges[i]
	}
	return nil
}

// redact returns the new payload of a message, or nil if it does not change. off reports that the
// message leaves the stream, because it has content of an erased child or names the person as the
// end of an edge. A message that names the person only as its actor remains
// (docs/adr/0016-erased-actors.md).
func (e *eraser) redact(aggregateType, eventType string, payload []byte) (redacted []byte, off bool, err error) {
	if k := e.edge(aggregateType); k != nil && k.names(payload, e.o.AuthorID) {
		redacted, err = redact.Edge(payload)
		return redacted, true, err
	}
	if k := e.child(aggregateType); k != nil {
		if redacted, off, err = k.redact(eventType, payload); err != nil {
			return nil, false, err
		}
		if off {
			payload = redacted
		}
	}
	without, acted, err := redact.Actor(payload, e.person)
	if acted {
		redacted = without
	}
	return redacted, off, err
}

// noteObject remembers the object of a message about an erased child or an edge of the person,
// because selection needs it for the archive. It reports whether the message is about such an edge.
func (e *eraser) noteObject(m outbox.Swept) (edge bool) {
	if k := e.edge(m.AggregateType); k != nil && k.names(m.Payload, e.o.AuthorID) {
		k.objects[m.AggregateID] = true
		return true
	}
	if k := e.child(m.AggregateType); k != nil {
		if _, _, is := k.of(m.Payload); is {
			k.objects[m.AggregateID] = true
		}
	}
	return false
}

// tables are the tables with payloads, in the order in which messages move from one to the next.
var tables = []struct{ table, store string }{{outbox.TableDLQ, DLQ}, {outbox.TableOutbox, Outbox}, {outbox.TableArchive, Archive},
	{outbox.TableKept, Archive}}

// redactMessages redacts all messages except those of edges, which consumers need until they have
// applied the removals.
func (e *eraser) redactMessages(ctx context.Context) error {
	for _, t := range tables {
		var batch []outbox.Redacted
		if err := outbox.Sweep(ctx, e.Truth, t.table, e.selection(), func(m outbox.Swept) error {
			if e.noteObject(m) {
				return nil
			}
			payload, off, err := e.redact(m.AggregateType, m.EventType, m.Payload)
			if payload != nil {
				batch = append(batch, outbox.Redacted{ID: m.ID, EventID: m.EventID, Payload: string(payload), Stays: !off})
			}
			return err
		}, func() error {
			err := e.redactBatch(ctx, t.table, t.store, batch)
			batch = batch[:0]
			return err
		}); err != nil {
			return err
		}
	}
	return nil
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

// await calls ask until the list of what it waits for is empty, or the time is up. Between two
// calls it waits several times as long as a call takes.
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
		if err := work.Sleep(ctx, max(pollFor, 4*time.Since(start))); err != nil {
			return err
		}
	}
}

// awaitPublished waits until the relay has published every message of the erased children and of
// the removed edges. The last of these are the erasures and the removals.
func (e *eraser) awaitPublished(ctx context.Context) error {
	return e.await(ctx, func() (waiting []string, err error) {
		pending, removals, dead := 0, 0, 0
		sel := outbox.Selection{TenantID: e.o.TenantID, Pending: true}
		if err := outbox.Sweep(ctx, e.Truth, outbox.TableOutbox, sel, func(m outbox.Swept) error {
			if e.writes(m) {
				pending++
			}
			return nil
		}, nothing); err != nil {
			return nil, err
		}
		if err := e.sweepDead(ctx, e.Truth, &removals, &dead); err != nil {
			return nil, err
		}
		if pending > 0 {
			waiting = append(waiting, "the relay: "+words.Of(int64(pending), "message")+" about the author not published yet")
		}
		if removals > 0 {
			waiting = append(waiting, "you: "+words.Of(int64(removals), "removal")+" in the outbox DLQ; run tidings dlq outbox retry")
		}
		if dead > 0 {
			waiting = append(waiting, "you: "+words.Of(int64(dead), "erasure event")+" in the outbox DLQ; run tidings dlq outbox retry")
		}
		return waiting, nil
	})
}

func nothing() error { return nil }

// writes reports whether a message is about an erased child or an edge of the person.
func (e *eraser) writes(m outbox.Swept) bool {
	if e.noteObject(m) {
		return true
	}
	k := e.child(m.AggregateType)
	if k == nil {
		return false
	}
	_, _, is := k.of(m.Payload)
	return is
}

// sweepDead counts the removals of edges and the erasures of children in the DLQ.
func (e *eraser) sweepDead(ctx context.Context, q outbox.Querier, removals, erasures *int) error {
	return outbox.Sweep(ctx, q, outbox.TableDLQ, outbox.Selection{TenantID: e.o.TenantID}, func(m outbox.Swept) error {
		switch edge := e.noteObject(m); {
		case edge && m.EventType == event.Removed:
			*removals++
		case !edge && m.EventType == event.Erased && e.writes(m):
			*erasures++
		}
		return nil
	}, nothing)
}

// known returns the number of objects whose messages the erasure reads.
func (e *eraser) known() (n int) {
	for _, k := range e.kinds {
		n += len(k.objects)
	}
	return n
}

// pastStream waits for the consumers, redacts their tables, and deletes the messages before the
// erasures from the stream.
func (e *eraser) pastStream(ctx context.Context) error {
	known := e.known()
	found, err := e.scan(ctx)
	if err != nil {
		return err
	}
	if e.known() > known { // only the stream names these objects: redact their rows before their messages go
		if err := e.redactMessages(ctx); err != nil {
			return err
		}
	}
	if found.late > 0 { // the new KIND.erased comes after them, and the next round then deletes them
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
	all := found
	all.ends = found.heads // any message may name the person as its actor
	if err := e.await(ctx, func() ([]string, error) { return e.notPast(ctx, all) }); err != nil {
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
	e.o.Progress("erasing " + words.Of(int64(len(found.doomed)), "message") + " from the stream")
	if err := e.deleteDoomed(ctx, found); err != nil {
		return err
	}
	return e.deleteLetters(ctx, false, e.report.Counts)
}

func (e *eraser) notPast(ctx context.Context, found onStream) (waiting []string, err error) {
	behind, err := consumers.NotYetApplied(ctx, e.Projections, found.ends, found.created)
	if err != nil || len(behind) == 0 {
		return nil, err
	}
	pauses, err := consumers.Pauses(ctx, e.Projections)
	for _, name := range slices.Sorted(maps.Keys(behind)) {
		line := name + ": " + words.Of(int64(behind[name]), "stream")
		if p, ok := pauses[name]; ok {
			line += fmt.Sprintf(", paused by %s (tidings resume --consumer %s)", p.Actor, name)
		}
		waiting = append(waiting, line)
	}
	return waiting, err
}

// redactProjections redacts the consumers' tables or, with dryRun, counts the rows to redact. Dead
// letters go first, because the retry of one would write the others.
func (e *eraser) redactProjections(ctx context.Context, dryRun bool, counts tally) error {
	n, err := consumers.RedactDeadLetters(ctx, e.Projections, e.o.TenantID, dryRun, e.redactLetter)
	counts.add(DeadLetters, n)
	if err != nil {
		return err
	}
	about := e.selection().Aggregates
	for _, kind := range slices.Sorted(maps.Keys(about)) {
		for some := range slices.Chunk(about[kind], slice) {
			n, err := consumers.BlankErrors(ctx, e.Projections, e.o.TenantID, kind, some, dryRun)
			if counts.add(DeadLetters, int(n)); err != nil {
				return err
			}
		}
	}
	var all []string
	for _, k := range e.found() {
		all = slices.AppendSeq(all, maps.Keys(k.children))
	}
	slices.Sort(all)
	for ids := range slices.Chunk(all, slice) {
		for _, p := range e.Fleet {
			var n int64
			if err := postgres.InTx(ctx, e.Projections, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
				n, err = p.Redact(ctx, tx, e.o.TenantID, ids, dryRun)
				return err
			}); err != nil {
				return err
			}
			counts.add(p.Name(), int(n))
		}
	}
	if err := e.redactProjectedActs(ctx, dryRun, counts); err != nil {
		return err
	}
	return e.forgetProjected(ctx, dryRun, counts)
}

// redactLetter is redact for a dead letter. It leaves the dead letter of an edge of the person,
// which is discarded.
func (e *eraser) redactLetter(aggregateType string, payload []byte, headers map[string][]string) (*consumers.RedactedLetter, error) {
	if k := e.edge(aggregateType); k != nil && k.names(payload, e.o.AuthorID) {
		return nil, nil
	}
	eventType := ""
	if v := headers[event.HeaderType]; len(v) > 0 && strings.HasPrefix(v[0], "tidings."+aggregateType+"."+event.Erased+".") {
		eventType = event.Erased
	}
	payload, off, err := e.redact(aggregateType, eventType, payload)
	if off {
		headers = redact.Headers(headers)
	}
	if payload == nil || err != nil {
		return nil, err
	}
	return &consumers.RedactedLetter{Payload: payload, Headers: headers, Content: off}, nil
}

// redactProjectedActs replaces the person as the actor in the consumers' tables or, with dryRun,
// counts the rows.
func (e *eraser) redactProjectedActs(ctx context.Context, dryRun bool, counts tally) error {
	for _, p := range e.Fleet {
		for after := any(nil); ; {
			var n int64
			var next any
			if err := postgres.InTx(ctx, e.Projections, pgx.TxOptions{}, func(tx pgx.Tx) (err error) {
				n, next, err = p.RedactActor(ctx, tx, e.o.TenantID, e.person, after, dryRun)
				return err
			}); err != nil {
				return err
			}
			counts.add(p.Name(), int(n))
			if after = next; after == nil {
				break
			}
		}
	}
	return nil
}

// redactActs replaces the person as the actor in the truth.
func (e *eraser) redactActs(ctx context.Context) error {
	n, err := e.store.RedactActor(ctx, e.o.TenantID, e.person, false, e.Fence)
	e.count(Acts, int(n))
	return err
}

func (e *eraser) redactCold(ctx context.Context) error {
	r, err := e.cold(ctx, false)
	e.count(Cold, r.Rows)
	return err
}

// cold redacts the files. Unreadable files do not stop the erasure of everything else.
func (e *eraser) cold(ctx context.Context, dryRun bool) (r ColdReport, err error) {
	if e.Cold != nil {
		r, err = e.Cold(ctx, ColdRequest{e.o.TenantID, e.o.AuthorID, dryRun, e.redact})
	}
	e.report.Unread = r.Unread
	return r, err
}
