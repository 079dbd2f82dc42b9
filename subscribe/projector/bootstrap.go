package projector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/work"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/internal/settings"
)

// options are the options of this package.
type options struct {
	clear   func(ctx context.Context, tx pgx.Tx) error
	clients []*client.Client
	erased  func(ctx context.Context, tx pgx.Tx, tenant int64, person event.ID) error
}

func option(name string, set func(*options)) subscribe.Option {
	return settings.Of(settings.Project, name, func(s *settings.Settings) {
		o, ok := s.Fill.(*options)
		if !ok {
			o = new(options)
			s.Fill = o
		}
		set(o)
	})
}

// check returns ErrOption if the options do not fit together.
func (o *options) check() error {
	whole := o.clear != nil && len(o.clients) > 0 && !slices.Contains(o.clients, nil) && o.erased != nil
	if (o.clear != nil || len(o.clients) > 0) && !whole {
		return fmt.Errorf("%w: Bootstrap needs a function that empties your tables, clients, and the option Erased", subscribe.ErrOption)
	}
	return nil
}

// Bootstrap makes Project begin with the states of exports, for a truth that is older than the
// streams, and then read the streams after them. Each client reads the exports of its tenant; its
// token needs the role export. The option Erased is necessary too.
//
// apply gets each state as an event without Stream and Seq. Its payload is the whole state of an
// entity, also of removed and deleted ones, and its type is that of an event that leads to it. The
// streams may repeat what the exports include: apply an event of an edge if its (created_at,
// version) is later than yours, and any other if its version is higher. Project retries a batch of
// states after an error of apply.
//
// Project continues where it was after a crash, and one instance at a time reads exports. If events
// expire before Project reads them, or an export no longer joins the streams, it begins again:
// clear empties your tables, and the exports fill them. It returns the API's error if that refuses,
// for example a token.
func Bootstrap(clear func(ctx context.Context, tx pgx.Tx) error, clients ...*client.Client) subscribe.Option {
	return option("Bootstrap", func(o *options) { o.clear, o.clients = clear, clients })
}

// Erased makes Project call fn for each erased person, in tx and in the order of the events: delete
// what you have of the person. Each partition calls it, behind everything about the person. Without
// the option, apply gets the event person.erased, unless Only excludes it.
func Erased(fn func(ctx context.Context, tx pgx.Tx, tenant int64, person event.ID) error) subscribe.Option {
	return option("Erased", func(o *options) { o.erased = fn })
}

// filler fills a projection from exports.
type filler struct {
	*projection
	claim   consumers.Bootstrap
	expired chan consumers.Start
	most    int // states of a batch
}

func (p *projection) filler(pool *pgxpool.Pool) *filler {
	return &filler{p, consumers.Bootstrap{Pool: pool, Consumer: p.Name(), Owner: lease.Owner(p.Name()), Takeover: p.Takeover},
		make(chan consumers.Start, 1), p.Batch}
}

// expire makes refill run soon.
func (f *filler) expire(at consumers.Start) {
	select {
	case f.expired <- at:
	default: // it runs
	}
}

// fill returns nil when the projection has positions on the streams, or ctx has ended. Without the
// option Bootstrap it does nothing.
func (f *filler) fill(ctx context.Context) error {
	for failures := 0; ctx.Err() == nil && f.clear != nil; {
		mine, filled, err := f.claim.Claim(ctx)
		if filled {
			return nil
		}
		if mine {
			err = f.exportAll(ctx)
		}
		switch {
		case mine && err == nil:
			return nil
		case client.HasCode(err, client.CodeExportOutdated):
			f.Log.InfoContext(ctx, "an export no longer joins the streams; beginning again", "err", err)
			err = f.claim.Restart(ctx, f.clear)
		case settings.IsRefused(err):
			return err
		}
		if failures++; err == nil || errors.Is(err, consumers.ErrClaim) {
			failures = 1 // another instance works
		} else {
			settings.SetReady(f.Health, func(context.Context) error { return err })
			f.Log.WarnContext(ctx, "reading exports failed, retrying", "err", err)
		}
		work.Sleep(ctx, work.Retry(failures))
	}
	return nil
}

// exportAll exports while it renews the claim: the API may take longer for an answer than Takeover.
func (f *filler) exportAll(ctx context.Context) error {
	keeping, stop := context.WithCancel(ctx)
	var kept sync.WaitGroup
	kept.Go(func() { f.claim.Keep(keeping) })
	defer kept.Wait()
	defer stop()
	return f.export(ctx)
}

// export reads what is missing of all exports, and joins the streams.
func (f *filler) export(ctx context.Context) error {
	for _, c := range f.clients {
		for _, plural := range f.plurals() {
			if err := f.exportOf(ctx, c, plural); err != nil {
				return fmt.Errorf("export %s: %w", plural, err)
			}
		}
	}
	return f.claim.Join(ctx, func(all []consumers.Exported) (map[int]consumers.Start, error) {
		exports := make([][]Position, len(all))
		for i := range all {
			if err := json.Unmarshal(all[i].Streams, &exports[i]); err != nil {
				return nil, err
			}
		}
		return starts(exports), nil
	})
}

// plurals returns the kinds that the projection wants, as the paths of their exports name them.
func (f *filler) plurals() (all []string) {
	for _, k := range f.Kinds.AllEdges() {
		if f.Wants(k.Name) {
			all = append(all, k.Plural)
		}
	}
	for _, k := range f.Kinds.AllChildren() {
		if f.Wants(k.Name) {
			all = append(all, k.Plural)
		}
	}
	if f.Wants(event.AggregateThread) {
		all = append(all, "threads")
	}
	return all
}

func (f *filler) exportOf(ctx context.Context, c *client.Client, plural string) error {
	at, err := f.begin(ctx, c, plural)
	if err != nil || at.Done {
		return err
	}
	var states []event.Event
	save := func() error {
		bounded, cancel := context.WithTimeout(ctx, f.Timeout)
		defer cancel()
		err := f.claim.Save(bounded, at, func(tx pgx.Tx) error {
			if len(states) == 0 {
				return nil
			}
			return f.Apply(bounded, tx, states)
		})
		if bounded.Err() != nil {
			f.most = max(f.most/2, 1)
		}
		states = states[:0]
		return err
	}
	for state, err := range c.Export(plural).Resume(at.Cursor, at.After).All(ctx) {
		if err != nil {
			return err
		}
		e, err := settings.StateEvent(at.Tenant, state)
		if err != nil {
			return err
		}
		states, at.After = append(states, e), state.After
		if len(states) >= f.most {
			if err := save(); err != nil {
				return err
			}
		}
	}
	at.Done = true
	return save()
}

// begin returns how far an export is read. It asks for the first state, because only an answer
// says whose export it is.
func (f *filler) begin(ctx context.Context, c *client.Client, plural string) (at consumers.Exported, err error) {
	x := c.Export(plural, client.ExportLines(1))
	for _, err := range x.All(ctx) {
		if err != nil {
			return at, err
		}
		break
	}
	head := x.Head()
	all, err := f.claim.Progress(ctx)
	if i := slices.IndexFunc(all, func(p consumers.Exported) bool { return p.Tenant == head.Tenant && p.Kind == head.Kind }); i >= 0 {
		return all[i], err
	}
	if err != nil {
		return at, err
	}
	at = consumers.Exported{Tenant: head.Tenant, Kind: head.Kind, Cursor: head.Cursor}
	if at.Streams, err = json.Marshal(head.Streams); err != nil {
		return at, err
	}
	return at, f.claim.Save(ctx, at, func(pgx.Tx) error { return nil })
}

// refill fills the projection again each time that events have expired before it read them. Then
// ready reports again whether it reads the streams.
func (f *filler) refill(ctx context.Context, ready func(context.Context) error) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case at := <-f.expired:
			if f.clear == nil {
				continue
			}
			f.Log.WarnContext(ctx, "events expired before they were read; filling the projection from exports", "stream", at.Stream,
				"seq", at.Seq)
			err := f.claim.Reset(ctx, at, f.clear)
			if err == nil {
				err = f.fill(ctx)
			}
			if settings.IsRefused(err) {
				return err
			}
			settings.SetReady(f.Health, ready)
			if err != nil {
				f.Log.WarnContext(ctx, "filling the projection failed, retrying", "err", err) // the consumer reports it again
			}
		}
	}
}

// ErrBegun reports a projection that already has a position on the streams, also if an instance
// that still runs has just made it. Replay makes the projection begin again.
var ErrBegun = errors.New("projector: the projection has already begun")

// Position is the sequence up to which an export covers a stream. It is an element of "streams" in
// the first line of GET /v1/{kind}:export.
type Position = client.ExportPosition

// Begin makes a projection that has not run yet continue after the states of exports, one for each
// kind. Call it in the transaction that writes the last state. Events that an export already
// includes may come again: apply an edge if (created_at, version) is newer, anything else if
// version is. It returns ErrBegun.
func Begin(ctx context.Context, tx pgx.Tx, name string, exports ...[]Position) error {
	if _, err := settings.New(name, settings.Project, nil); err != nil {
		return err
	}
	begun, err := consumers.HasOffset(ctx, tx, name)
	if err != nil {
		return err
	}
	if begun {
		return fmt.Errorf("%w: %s", ErrBegun, name)
	}
	return consumers.StartAt(ctx, tx, name, starts(exports))
}

// starts returns the earliest position after all exports on each stream. It does not have a stream
// that the exports do not cover at all: one that a partition did not have yet, and one that began
// and ended between two of the exports. Project reads it from its beginning.
func starts(exports [][]Position) map[int]consumers.Start {
	streams, last := make(map[int]consumers.Start), -1
	for _, positions := range exports {
		for _, p := range positions {
			if last = max(last, p.Partition); p.Stream != "" {
				streams[p.Partition] = consumers.Start{Stream: p.Stream, Created: p.Created, Seq: settings.Covered(exports, p.Partition)}
			}
		}
	}
	if len(streams) == 0 {
		return nil // the names of ended streams are unknown
	}
	for n := range last {
		if _, listed := streams[n]; !listed && settings.Covered(exports, n) == math.MaxUint64 {
			streams[n] = consumers.Start{Seq: math.MaxUint64}
		}
	}
	return streams
}
