package restore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/erasure"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/status"
	"github.com/tidings/tidings/internal/verify"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// Deps are what a restore works with: verify's, whose kinds are those of the projections.
type Deps struct {
	verify.Deps
	TruthKinds *kinds.Set                                            // in force in the truth
	Erase      func(ctx context.Context, tenant, person int64) error // runs an erasure
	Replay     func(ctx context.Context, consumer string) error      // replays a consumer
}

// Options say what was restored.
type Options struct {
	Since    time.Time     // of the oldest backup that was restored, or earlier: erasures since then run again
	Wait     time.Duration // for relays and consumers, at each step
	Limit    int           // of differences that are named
	DryRun   bool          // only look
	Progress func(string)  // what it does now; nil for none
}

// Report says what a restore did, or, of a dry run, what it found.
type Report struct {
	DryRun    bool                  `json:"dry_run"`
	Streams   relay.RepairReport    `json:"streams"`
	Overtaken int                   `json:"overtaken"`    // entities that were written again since, with a lost write's version: their state is announced anew
	History   int                   `json:"from_history"` // lost writes that only a history told of
	Renewed   []int                 `json:"renewed"`      // partitions that new ones with new streams replace
	Replayed  []string              `json:"replayed"`     // consumers that could not read on
	Erased    []broker.ErasedPerson `json:"erased"`       // whose erasure ran again
	Verified  verify.Report         `json:"verified"`
}

var (
	// ErrUnfinished reports that something did not happen in time: the same call goes on.
	ErrUnfinished = errors.New("restore: not finished: run it again")
	// ErrKindUnknown reports lost writes of a kind that the restored truth does not know: apply the file of kinds first.
	ErrKindUnknown = errors.New("restore: the truth went back to before it knew a kind: run `tidings kinds apply` with your file, and then this again")
)

// Actor is who announces the state of entities that were overtaken.
const Actor = "restore"

// Run brings everything together. Relays and consumers run; the API does not, or some entities may be announced anew. Each step may be
// repeated, so a run that failed or was interrupted is run again. It returns ErrUnfinished and ErrKindUnknown.
func Run(ctx context.Context, d Deps, o Options) (report Report, err error) {
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	report = Report{DryRun: o.DryRun, Renewed: []int{}, Replayed: []string{}, Erased: []broker.ErasedPerson{}}
	r := &restore{Deps: d, o: o, report: &report, store: store.New(d.Truth, nil)}
	if o.DryRun {
		return report, r.look(ctx)
	}
	for _, s := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"writing again what the streams have and the truth has lost", r.streams},
		{"writing again what the histories have and the truth has lost", r.histories},
		{"replacing the streams", r.renew},
		{"replaying consumers that cannot read on", r.replay},
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
	o      Options
	report *Report
	store  *store.Store
}

// look says what there is to do, as far as that is known before it is done.
func (r *restore) look(ctx context.Context) (err error) {
	if r.report.Erased, err = r.erasures(ctx); err != nil {
		return err
	}
	r.report.Streams, err = relay.Repair(ctx, r.Truth, r.Broker, slog.New(slog.DiscardHandler), relay.RepairOptions{DryRun: true})
	if errors.Is(err, relay.ErrUnknownMessages) { // that is what it is for
		err = nil
	}
	return err
}

// streams brings the truth to what the streams have, and replaces those that lack something.
func (r *restore) streams(ctx context.Context) (err error) {
	r.report.Streams, err = relay.Repair(ctx, r.Truth, r.Broker, slog.New(slog.DiscardHandler), relay.RepairOptions{Redo: func(ctx context.Context, lost []event.Event) ([]string, error) {
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

// known refuses events of a kind that the projections know and the truth does not. Aggregates of services upstream are of no kind: their state is their owners'.
func (r *restore) known(events []event.Event) error {
	for _, e := range events {
		if r.Kinds().Has(e.AggregateType) && !r.TruthKinds.Has(e.AggregateType) {
			return fmt.Errorf("%w (%s)", ErrKindUnknown, e.AggregateType)
		}
	}
	return nil
}

// histories brings the truth to what the histories have: they may be all that is left of a write.
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
		if of, err := r.ofAny(persons, e); err != nil || of {
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

// ofAny reports whether an entity is an erased person's: the truth has it no more, and a history from before the erasure has it.
func (r *restore) ofAny(persons []broker.ErasedPerson, e event.Event) (bool, error) {
	is := func(id int64) bool {
		return slices.ContainsFunc(persons, func(p broker.ErasedPerson) bool { return p.TenantID == e.TenantID && p.PersonID == id })
	}
	if k, ok := r.Kinds().Child(e.AggregateType); ok {
		c, err := e.DecodeChild(k.Names())
		return is(int64(c.AuthorID)), err
	}
	k := r.Kinds().Edges[e.AggregateType]
	edge, err := e.DecodeEdge(k.Names())
	ends := k.EndsAt(kinds.Author)
	return slices.Contains(ends, kinds.From) && is(int64(edge.From)) || slices.Contains(ends, kinds.To) && is(int64(edge.To)), err
}

// renew replaces the partitions that are not new already. A reader may be ahead of a stream that was restored from a copy: the numbers that it has read would be given
// to other messages. Under a new number it meets nothing of the kind: its place is behind the old one's end, and it stops and says so.
func (r *restore) renew(ctx context.Context) error {
	fresh := make(map[int]bool)
	for _, p := range r.report.Streams.Partitions {
		for _, n := range p.ReplacedBy {
			fresh[n] = true
		}
	}
	var old []outbox.Partition
	err := r.await(ctx, "the relays to close the streams of an earlier resize", func() (bool, error) {
		all, err := outbox.Partitions(ctx, r.Truth)
		if err != nil {
			return false, err
		}
		if !slices.ContainsFunc(all, func(p outbox.Partition) bool { return !p.Closed && p.Stream != "" && p.Tail > 0 && !fresh[p.Number] }) {
			return true, nil
		}
		old, err = outbox.Renew(ctx, r.Truth)
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

// rebase lets Tidings' own consumers that are ahead of where the old streams end continue with the new ones.
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

// replay builds the tables of consumers anew that cannot read on.
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
		err = fmt.Errorf("%w: %s", ErrUnfinished, strings.Join(st.Lagging(), "; "))
	}
	return err
}

// erasures are those that were asked for since the backup, as far as the truth or the streams' record knows.
func (r *restore) erasures(ctx context.Context) (all []broker.ErasedPerson, err error) {
	if all, err = broker.ErasedPersons(ctx, r.JetStream, r.Broker); err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(p broker.ErasedPerson) bool { return p.Requested.Before(r.o.Since) })
	const page = 1000
	for before := (*time.Time)(nil); ; {
		records, err := erasure.List(ctx, r.Truth, before, page)
		if err != nil {
			return nil, err
		}
		for _, e := range records {
			if e.FinishedAt == nil || !e.FinishedAt.Before(r.o.Since) {
				all = append(all, broker.ErasedPerson{TenantID: e.TenantID, PersonID: e.AuthorID, Requested: e.RequestedAt.UTC()})
			}
		}
		if len(records) < page {
			break
		}
		before = &records[page-1].RequestedAt
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
		r.o.Progress(fmt.Sprintf("erasing again %d of %d: person %d of tenant %d", i+1, len(all), p.PersonID, p.TenantID))
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

// await asks until done says true.
func (r *restore) await(ctx context.Context, what string, done func() (bool, error)) error {
	for began := time.Now(); ; {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		if time.Since(began) > r.o.Wait {
			return fmt.Errorf("%w: waited for %s", ErrUnfinished, what)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(status.AwaitEvery):
		}
	}
}
