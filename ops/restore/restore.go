package restore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/erasure"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// Deps are the dependencies of a restore: those of package verify, with the kinds of the
// projections, and the following.
type Deps struct {
	verify.Deps
	TruthKinds *kinds.Set                                                     // the kinds that the truth knows
	Erase      func(ctx context.Context, tenant int64, person event.ID) error // runs an erasure
	Replay     func(ctx context.Context, consumer string) error               // replays a consumer
}

// Options control a restore.
type Options struct {
	Since    time.Time     // the time of the oldest restored backup, or earlier: erasures since then run again
	Wait     time.Duration // the longest wait for relays and consumers in each step
	Limit    int           // the largest number of differences listed
	DryRun   bool          // report, and change nothing
	Progress func(string)  // gets the current step; may be nil
}

// Report is the result of a restore, or of a dry run.
type Report struct {
	DryRun  bool               `json:"dry_run"`
	Streams relay.RepairReport `json:"streams"`
	// Overtaken is the number of entities that got a new write with the version of a lost one:
	// restore publishes their state again.
	Overtaken int                   `json:"overtaken"`
	History   int                   `json:"from_history"` // lost writes that only a history had
	Renewed   []int                 `json:"renewed"`      // partitions replaced by new ones with new streams
	Replayed  []string              `json:"replayed"`     // consumers that could not continue
	Erased    []broker.ErasedPerson `json:"erased"`       // persons whose erasure ran again
	Verified  verify.Report         `json:"verified"`
}

var (
	// ErrUnfinished reports that a step did not finish in time. Run it again: it continues.
	ErrUnfinished = errors.New("restore: not finished: run it again")
	// ErrFuture reports Options.Since after the current time of the truth's database.
	ErrFuture = errors.New("in the future")
	// ErrKindUnknown reports lost writes of a kind that the restored truth does not know. Apply the
	// file of kinds first.
	ErrKindUnknown = errors.New("restore: the restored truth does not know a kind: run `tidings kinds apply` with your " +
		"file, and then this command again")
)

// Actor is the actor of events that publish the state of overtaken entities.
const Actor = "restore"

// Run makes truth, streams and projections agree. Relays and consumers run. The API must not run,
// or restore may have to publish the state of more entities again. Each step may be repeated, so
// run it again after a failure or an interruption. It returns ErrUnfinished, ErrKindUnknown and
// ErrFuture, and outbox.ErrNotExclusive while another restore or a repair runs.
func Run(ctx context.Context, d Deps, o Options) (report Report, err error) {
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	report = Report{DryRun: o.DryRun, Renewed: []int{}, Replayed: []string{}, Erased: []broker.ErasedPerson{}}
	var now time.Time
	if err := d.Truth.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return report, fmt.Errorf("read the clock of the database: %w", err)
	}
	if o.Since.After(now) {
		return report, fmt.Errorf("--since is %s, %w: the clock of the database is at %s", o.Since.UTC().Format(time.RFC3339), ErrFuture,
			now.UTC().Format(time.RFC3339))
	}
	r := &restore{Deps: d, o: o, report: &report}
	if o.DryRun {
		return report, r.preview(ctx)
	}
	exclusive, free, err := outbox.Exclusive(ctx, d.Truth, "restore")
	if err != nil {
		return report, err
	}
	defer free()
	r.exclusive.Truth, r.store = exclusive, store.New(exclusive, nil)
	for _, s := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"restoring what the streams have and the truth lost", r.streams},
		{"restoring what the histories have and the truth lost", r.histories},
		{"replacing the streams", r.renew},
		{"replaying consumers that cannot continue", r.replay},
		{"waiting until everything is published and applied", r.settle},
		{"erasing again", r.erase},
		{"comparing everything", r.verify},
	} {
		o.Progress(s.what)
		if err := s.do(ctx); err != nil {
			return report, fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return report, nil
}

type restore struct {
	Deps
	o         Options
	report    *Report
	exclusive status.Sources // whose Truth excludes other restores and repairs: for all that must not run beside them
	store     *store.Store   // on the same

	highest int // the highest number of a partition or stream before the run
}

// preview reports the work as far as it is known beforehand.
func (r *restore) preview(ctx context.Context) (err error) {
	if r.report.Erased, err = r.erasures(ctx); err != nil {
		return err
	}
	r.report.Streams, err = relay.Repair(ctx, r.Truth, r.Broker, slog.New(slog.DiscardHandler), relay.RepairOptions{DryRun: true})
	if errors.Is(err, relay.ErrUnknownMessages) { // a restore recovers these messages
		err = nil
	}
	return err
}

// streams restores the writes of the streams to the truth, and replaces streams that lack messages.
func (r *restore) streams(ctx context.Context) (err error) {
	before, err := outbox.Partitions(ctx, r.Truth)
	if err != nil {
		return err
	}
	for _, p := range before {
		r.highest = max(r.highest, p.Number)
	}
	streams, err := broker.Streams(ctx, r.JetStream, r.Broker)
	if err != nil {
		return err
	}
	for _, s := range streams { // the database may not know all of them
		r.highest = max(r.highest, s.Number)
	}
	r.report.Streams, err = relay.Repair(ctx, r.exclusive.Truth, r.Broker, slog.New(slog.DiscardHandler),
		relay.RepairOptions{Held: true, Redo: func(ctx context.Context, lost []event.Event) ([]string, error) {
			if err := r.known(lost); err != nil {
				return nil, err
			}
			moved, overtaken, err := r.store.RedoFromStream(ctx, r.TruthKinds, lost, Actor)
			r.report.Overtaken += overtaken
			return moved, err
		}})
	if err != nil {
		return err
	}
	for _, p := range r.report.Streams.Partitions {
		for _, s := range p.Successors {
			if err := consumers.Rebase(ctx, r.Projections, p.Stream, p.Left, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// known returns an error for events of a kind that the projections know and the truth does not.
// Events of upstream services belong to no kind: their owners keep their state.
func (r *restore) known(events []event.Event) error {
	for _, e := range events {
		if r.Kinds().Has(e.AggregateType) && !r.TruthKinds.Has(e.AggregateType) {
			return fmt.Errorf("%w (%s)", ErrKindUnknown, e.AggregateType)
		}
	}
	return nil
}

// histories restores the writes of the histories to the truth. A history may have the only trace of
// a write.
func (r *restore) histories(ctx context.Context) error {
	const page = 500
	persons, err := r.erasures(ctx)
	if err != nil {
		return err
	}
	var some []event.Event
	write := func() error {
		if err := r.known(some); err != nil {
			return err
		}
		n, err := r.store.RedoFromHistory(ctx, r.TruthKinds, some, Actor)
		r.report.History, r.report.Overtaken, some = r.report.History+len(some), r.report.Overtaken+n, nil
		return err
	}
	for e, err := range history.New(r.Kinds).Ahead(ctx, r.Truth, r.Projections) {
		if err != nil {
			return err
		}
		if of, err := r.ofErasedPerson(persons, e); err != nil || of {
			if err != nil {
				return err
			}
			continue
		}
		if some = append(some, e); len(some) == page {
			if err := write(); err != nil {
				return err
			}
		}
	}
	if len(some) == 0 {
		return nil
	}
	return write()
}

// ofErasedPerson reports whether an entity belongs to an erased person. The truth no longer has it,
// but a history from before the erasure may.
func (r *restore) ofErasedPerson(persons []broker.ErasedPerson, e event.Event) (bool, error) {
	is := func(id event.ID) bool {
		return slices.ContainsFunc(persons, func(p broker.ErasedPerson) bool { return p.TenantID == e.TenantID && p.PersonID == id })
	}
	if k, ok := r.Kinds().Child(e.AggregateType); ok {
		c, err := e.DecodeChild(k.Names())
		return is(c.AuthorID), err
	}
	k := r.Kinds().Edges[e.AggregateType]
	edge, err := e.DecodeEdge(k.Names())
	ends := k.EndsAt(kinds.Author)
	return slices.Contains(ends, kinds.From) && is(edge.From) || slices.Contains(ends, kinds.To) && is(edge.To), err
}

// renew replaces the partitions that this run did not create. A reader may be ahead of a stream
// that was restored from a copy. On that stream other messages would get the numbers that it has
// read. Under a new number there is no such conflict: the reader's sequence is above the end of the
// old stream, and it stops and reports that.
func (r *restore) renew(ctx context.Context) error {
	var old []outbox.Partition
	err := r.await(ctx, "the relays to close the streams of an earlier resize", func() (bool, error) {
		all, err := outbox.Partitions(ctx, r.Truth)
		if err != nil {
			return false, err
		}
		isOld := func(p outbox.Partition) bool {
			return !p.Closed && p.Stream != "" && p.Tail > 0 && p.Number <= r.highest
		}
		if !slices.ContainsFunc(all, isOld) {
			return true, nil
		}
		old, err = outbox.Renew(ctx, r.exclusive.Truth)
		if errors.Is(err, outbox.ErrResizing) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		return err
	}
	for _, p := range old {
		r.report.Renewed = append(r.report.Renewed, p.Number)
	}
	var all []outbox.Partition
	if err := r.await(ctx, "the relays to open the new streams", func() (bool, error) {
		if all, err = outbox.Partitions(ctx, r.Truth); err != nil {
			return false, err
		}
		return !slices.ContainsFunc(all, func(p outbox.Partition) bool { return !p.Closed && (p.Closing || p.Stream == "") }), nil
	}); err != nil {
		return err
	}
	return r.rebase(ctx, all, old)
}

// rebase moves Tidings' own consumers that are ahead of the ends of the old streams to the new
// ones.
func (r *restore) rebase(ctx context.Context, all, old []outbox.Partition) error {
	for _, p := range old {
		i := slices.IndexFunc(all, func(now outbox.Partition) bool { return now.Number == p.Number })
		for _, next := range outbox.Successors(all, p.Number) {
			stream, err := broker.ReadStream(ctx, r.JetStream, r.Broker, next.Number)
			if err != nil {
				return err
			}
			if err := consumers.Rebase(ctx, r.Projections, p.Stream, all[i].Tail, stream); err != nil {
				return err
			}
		}
	}
	return nil
}

// replay rebuilds the tables of consumers that cannot continue.
func (r *restore) replay(ctx context.Context) error {
	stranded, err := consumers.Stranded(ctx, r.Projections, r.JetStream, r.Broker, r.Consumers...)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(stranded)) {
		r.o.Progress(fmt.Sprintf("replaying %s: %v", name, stranded[name]))
		if err := r.Replay(ctx, name); err != nil {
			return err
		}
		r.report.Replayed = append(r.report.Replayed, name)
	}
	return nil
}

func (r *restore) settle(ctx context.Context) error {
	st, err := status.Await(ctx, r.Sources, r.o.Wait, status.State.Settled)
	if err == nil && !st.Settled() {
		err = fmt.Errorf("%w: %s", ErrUnfinished, strings.Join(append(st.Stopped(), st.Lagging()...), "; "))
	}
	return err
}

// erasures returns the erasures that were requested since the backup, as far as the truth or the
// streams' record has them.
func (r *restore) erasures(ctx context.Context) (all []broker.ErasedPerson, err error) {
	if all, err = broker.ErasedPersons(ctx, r.JetStream, r.Broker); err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(p broker.ErasedPerson) bool { return p.Requested.Before(r.o.Since) })
	records, err := erasure.List(ctx, r.Truth, nil, math.MaxInt32)
	if err != nil {
		return nil, err
	}
	for _, e := range records {
		if e.FinishedAt == nil || !e.FinishedAt.Before(r.o.Since) {
			all = append(all, broker.ErasedPerson{TenantID: e.TenantID, PersonID: e.AuthorID, Requested: e.RequestedAt.UTC()})
		}
	}
	by := func(a, b broker.ErasedPerson) int {
		return cmp.Or(cmp.Compare(a.TenantID, b.TenantID), cmp.Compare(a.PersonID, b.PersonID))
	}
	slices.SortStableFunc(all, by)
	return slices.CompactFunc(all, func(a, b broker.ErasedPerson) bool { return by(a, b) == 0 }), nil
}

func (r *restore) erase(ctx context.Context) error {
	all, err := r.erasures(ctx)
	if err != nil {
		return err
	}
	for i, p := range all {
		r.o.Progress(fmt.Sprintf("erasing again %d of %d: person %s of tenant %d", i+1, len(all), p.PersonID, p.TenantID))
		if err := r.Erase(ctx, p.TenantID, p.PersonID); err != nil {
			return err
		}
		r.report.Erased = append(r.report.Erased, p)
	}
	return nil
}

func (r *restore) verify(ctx context.Context) (err error) {
	r.report.Verified, err = verify.Run(ctx, r.Deps.Deps, verify.Options{Wait: r.o.Wait, Limit: r.o.Limit, Repair: true})
	return err
}

// await calls done until it returns true.
func (r *restore) await(ctx context.Context, what string, done func() (bool, error)) error {
	for began := time.Now(); ; {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		if time.Since(began) > r.o.Wait {
			return fmt.Errorf("%w: waited for %s", ErrUnfinished, what)
		}
		if err := work.Sleep(ctx, status.AwaitEvery); err != nil {
			return err
		}
	}
}
