package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/outbox"
)

// ErrUnknownMessages reports messages on a stream that have no row: this database went back in time, and they tell of writes
// that it no longer has. Nothing was repaired; RepairOptions.DeleteUnknown takes them off the stream.
var ErrUnknownMessages = errors.New("relay: the stream holds messages of writes that this database no longer has")

// RepairOptions say what a repair may do.
type RepairOptions struct {
	DryRun        bool // say what the same call without it would do, and change nothing
	DeleteUnknown bool // take messages without a row off the streams
	DeleteForeign bool // read all streams, and take messages that no relay wrote off them
	// Redo writes into the database again what messages without a row tell of, with their rows (outbox.Redo): a restore took these writes back. They are of one
	// stream, in its order. Events that it returns got new ids: their messages are deleted, and the relay publishes them again. nil for none.
	Redo func(ctx context.Context, lost []event.Event) (moved []string, err error)

	at func(step string) error // a test's: an error ends the repair there
}

// RepairReport says what a repair found and did, or, of a dry run, what it would do: the same.
type RepairReport struct {
	DryRun     bool              `json:"dry_run"`
	Healthy    bool              `json:"healthy"`  // there was nothing to do
	Repaired   bool              `json:"repaired"` // what there was is done
	Partitions []PartitionReport `json:"partitions"`
}

// PartitionReport is what a repair found of one partition, and did or would do.
type PartitionReport struct {
	Partition  int             `json:"partition"`
	Stream     string          `json:"stream"`
	Problem    string          `json:"problem,omitempty"` // what is wrong; empty when nothing is
	Republish  int64           `json:"republish"`         // rows whose message is missing: the relay publishes them again
	Holes      int64           `json:"holes"`             // sequences in the middle that are missing and were not erased
	Unmarked   int64           `json:"unmarked"`          // messages whose rows the relay has still to mark, as it does by itself
	Unknown    int64           `json:"unknown"`           // messages without a row
	Redone     int64           `json:"redone,omitempty"`  // messages whose writes were written again
	Duplicates int64           `json:"duplicates"`        // messages of an event that an earlier one has: the first counts
	Foreign    int64           `json:"foreign"`           // messages that no relay wrote: everybody skips them
	Deleted    int64           `json:"deleted"`           // of the unknown and the foreign ones
	Adopt      bool            `json:"adopt,omitempty"`   // take the partition back into the database
	Bind       bool            `json:"bind,omitempty"`    // bind it to its stream
	Close      bool            `json:"close,omitempty"`   // close its stream again, which has lost its end
	ReplacedBy []int           `json:"replaced_by,omitempty"`
	Left       uint64          `json:"left"` // where a replaced one's stream ends now, but for the closing message
	Successors []broker.Stream `json:"-"`    // those that the broker has of ReplacedBy
}

// Repair makes the streams and the database agree again, from what the rows say. A partition whose stream is gone, was recreated or has
// lost its end is replaced: a new partition takes over its slots, and publishes first what is missing, in its order. Messages that are missing
// in the middle of a stream are published again at its end. Erased rows never are. Relays may run meanwhile. It may be
// repeated after it was interrupted at any point. While a stream has no leader nothing is known of it: broker.ErrNoLeader.
//
// A dry run does not write. It returns the report and the error that the repair would return, as long as nobody else changes what it has seen.
func Repair(ctx context.Context, pool *pgxpool.Pool, cfg broker.Config, log *slog.Logger, o RepairOptions) (report RepairReport, err error) {
	report.DryRun = o.DryRun
	nc, err := broker.Connect(cfg, "repair", log)
	if err != nil {
		return report, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return report, err
	}
	if o.at == nil {
		o.at = func(string) error { return nil }
	}
	r := &repairer{pool: pool, cfg: cfg, js: js, log: log, o: o, redone: make(map[int]int64)}
	if o.Redo != nil && !o.DryRun {
		if err := r.redoAll(ctx); err != nil {
			return report, err
		}
	}
	if err := r.inspectAll(ctx); err != nil {
		return report, err
	}
	unknown := int64(0)
	report.Healthy = len(r.strays) == 0
	for _, f := range r.found {
		unknown += f.report.Unknown
		report.Healthy = report.Healthy && !f.wrong(o)
	}
	switch {
	case unknown > 0 && !o.DeleteUnknown && o.Redo == nil:
		err = fmt.Errorf("%w: %d of them; --delete-unknown takes them off", ErrUnknownMessages, unknown)
	case o.DryRun:
		err = r.foresee(ctx)
	case !report.Healthy:
		err = r.repairAll(ctx)
		report.Repaired = err == nil
	}
	if err == nil && !o.DryRun {
		err = r.findSuccessors(ctx)
	}
	for _, f := range r.found {
		report.Partitions = append(report.Partitions, f.report)
	}
	return report, err
}

type repairer struct {
	pool   *pgxpool.Pool
	cfg    broker.Config
	js     jetstream.JetStream
	log    *slog.Logger
	o      RepairOptions
	next   int                // a partition number that was never used
	strays []outbox.Partition // that have streams and are not known here
	found  []*finding
	redone map[int]int64 // messages, by partition
}

// finding is what is wrong with one partition.
type finding struct {
	p       outbox.Partition
	stream  broker.Stream
	exists  bool // the stream, whichever it is
	lost    bool // its end, or all of it
	left    uint64
	missing []uint64 // in the middle
	doomed  []uint64 // unknown and foreign messages, in their order
	report  PartitionReport
}

// wrong reports whether there is anything to do for a repair.
func (f *finding) wrong(o RepairOptions) bool {
	return f.lost || len(f.missing) > 0 || f.report.Unknown > 0 || f.unbound() || f.report.Foreign > 0 && o.DeleteForeign
}

// unbound reports a stream that has been published to, which this database has forgotten.
func (f *finding) unbound() bool { return f.p.Stream == "" && f.stream.Last > 0 }

// layout reads the partitions that this database knows, finds those that it knows no more, and changes nothing.
func (r *repairer) layout(ctx context.Context) ([]outbox.Partition, error) {
	streams, err := broker.Streams(ctx, r.js, r.cfg)
	if err != nil {
		return nil, err
	}
	all, err := outbox.Partitions(ctx, r.pool)
	if err != nil {
		return nil, err
	}
	r.strays = nil
	for _, s := range streams {
		if r.next = max(r.next, s.Number+1); slices.ContainsFunc(all, func(p outbox.Partition) bool { return p.Number == s.Number }) {
			continue
		}
		r.strays = append(r.strays, outbox.Partition{Number: s.Number, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot, After: s.After, Stream: s.Name, Created: s.Created})
	}
	return all, nil
}

// inspectAll looks at every partition, also at those that this database knows no more, and changes nothing.
func (r *repairer) inspectAll(ctx context.Context) error {
	all, err := r.layout(ctx)
	if err != nil {
		return err
	}
	for i, p := range append(all, r.strays...) {
		f := &finding{p: p, report: PartitionReport{Partition: p.Number, Stream: r.cfg.StreamName(p.Number), Redone: r.redone[p.Number]}}
		if i >= len(all) {
			f.report.Adopt = true
			f.report.Problem = "this database does not know the partition: it went back to before it was made"
		}
		if err := r.inspect(ctx, f); err != nil {
			return err
		}
		r.found = append(r.found, f)
	}
	return nil
}

// inspect compares one partition with its stream.
func (r *repairer) inspect(ctx context.Context, f *finding) (err error) {
	if f.p.Replaced() {
		f.left, f.report.Left = f.p.Tail, f.p.Tail
		if f.p.Closed {
			return nil
		}
		f.lost, f.report.Problem = true, "it is being replaced by a repair that was interrupted"
		if f.report.Republish, err = outbox.CountLost(ctx, r.pool, f.lostRows()); err != nil {
			return err
		}
		if f.stream, err = broker.ReadStream(ctx, r.js, r.cfg, f.p.Number); !errors.Is(err, jetstream.ErrStreamNotFound) {
			f.exists = err == nil
			return err
		}
		return nil
	}
	if err := r.compare(ctx, f); err != nil {
		return err
	}
	if f.lost {
		f.report.Republish, err = outbox.CountLost(ctx, r.pool, f.lostRows())
		return err
	}
	if !f.exists {
		return nil
	}
	if err := r.findHoles(ctx, f); err != nil {
		return err
	}
	return r.readBehind(ctx, f)
}

// compare finds out whether the partition's stream is lost.
func (r *repairer) compare(ctx context.Context, f *finding) (err error) {
	var doubt broker.Doubt
	for {
		f.stream, err = broker.ReadStream(ctx, r.js, r.cfg, f.p.Number)
		f.exists = err == nil
		if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
		problem := ""
		switch {
		case f.p.Stream == "" || f.p.Closed && (!f.exists || !f.stream.Created.Equal(f.p.Created)):
			f.exists = f.exists && f.p.Stream == "" // a closed stream may be removed
		case f.p.Stream != r.cfg.StreamName(f.p.Number):
			return fmt.Errorf("%w: partition %d is on stream %s, not %s", ErrStreamRefused, f.p.Number, f.p.Stream, r.cfg.StreamName(f.p.Number))
		case !f.exists:
			problem = "its stream is gone"
		case !f.stream.Created.Equal(f.p.Created):
			problem = fmt.Sprintf("its stream was recreated at %s", f.stream.Created.Format(time.RFC3339))
		case f.stream.Last < f.p.Tail:
			problem, f.left = fmt.Sprintf("its stream ends at %d, and its marks at %d", f.stream.Last, f.p.Tail), f.stream.Last
		}
		if problem == "" {
			f.lost = false
			return nil
		}
		f.lost, f.report.Problem, f.report.Left = true, problem, f.left
		if doubt.Sure(r.js) {
			return nil
		}
		if sleep(ctx, time.Second); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

func (f *finding) lostRows() outbox.Lost {
	return outbox.Lost{Partition: f.p.Number, Behind: f.left}
}

func (f *finding) missingRows() outbox.Lost {
	return outbox.Lost{Partition: f.p.Number, Behind: outbox.NoneBehind, Seqs: f.missing}
}

// findHoles finds messages that are missing in the middle of the stream, up to the stored tail: no mark in flight tells of those. What has
// expired is not missing, and what was erased is recorded.
func (r *repairer) findHoles(ctx context.Context, f *finding) error {
	if f.stream.Last == 0 || f.stream.Last < f.stream.First || f.stream.Messages == f.stream.Last-f.stream.First+1 {
		return nil
	}
	stream, err := r.js.Stream(ctx, f.stream.Name)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", f.stream.Name, err)
	}
	info, err := stream.Info(ctx, jetstream.WithDeletedDetails(true))
	if err != nil {
		return fmt.Errorf("read what is missing from stream %s: %w", f.stream.Name, err)
	}
	deleted := slices.DeleteFunc(info.State.Deleted, func(seq uint64) bool { return seq > f.p.Tail })
	if f.missing, err = broker.NotErased(ctx, r.js, r.cfg, f.stream.Name, deleted); err != nil || len(f.missing) == 0 {
		return err
	}
	f.report.Holes = int64(len(f.missing))
	f.report.Problem = fmt.Sprintf("%d messages are missing from its stream, the first at %d", f.report.Holes, f.missing[0])
	f.report.Republish, err = outbox.CountLost(ctx, r.pool, f.missingRows())
	return err
}

// readBehind reads what stands behind the stored tail, all of the stream when foreign messages are to be deleted.
func (r *repairer) readBehind(ctx context.Context, f *finding) error {
	const page = 1000
	var rows []outbox.Published
	seen := make(map[int64]bool)
	from := f.p.Tail + 1
	if r.o.DeleteForeign {
		from = 1
	}
	if f.stream.Last < from {
		return nil
	}
	_, err := broker.Scan(ctx, r.js, r.cfg, f.p.Number, broker.Scanning{From: from, HeadersOnly: true}, func(m *broker.Stored) error {
		switch {
		case event.Closes(m.Subject, m.Header):
			return nil
		case !event.Ours(m.Header):
			if f.report.Foreign++; r.o.DeleteForeign {
				f.doomed = append(f.doomed, m.Seq)
			}
			return nil
		case m.Seq <= f.p.Tail:
			return nil
		}
		id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has read it
		if rows = append(rows, outbox.Published{ID: id, EventID: m.Header.Get(event.HeaderID), Seq: m.Seq}); len(rows) < page {
			return nil
		}
		some := rows
		rows = nil
		return r.classify(ctx, f, some, seen)
	})
	if err == nil {
		err = r.classify(ctx, f, rows, seen)
	}
	if err != nil {
		return err
	}
	switch {
	case f.report.Unknown > 0:
		f.report.Problem = fmt.Sprintf("%d messages have no row", f.report.Unknown)
	case f.unbound():
		f.report.Problem = "this database does not know its stream: it went back to before they met"
	case r.o.DeleteForeign && f.report.Foreign > 0:
		f.report.Problem = fmt.Sprintf("%d messages were written by no relay", f.report.Foreign)
	}
	return nil
}

// classify counts messages of ours by what this database knows of them. seen are the rows whose first message was met.
func (r *repairer) classify(ctx context.Context, f *finding, messages []outbox.Published, seen map[int64]bool) error {
	known, err := outbox.Classify(ctx, r.pool, messages)
	if err != nil {
		return err
	}
	for _, m := range messages {
		switch {
		case known[m.Seq] == outbox.Unknown:
			f.report.Unknown++
			f.doomed = append(f.doomed, m.Seq)
		case known[m.Seq] == outbox.Past || seen[m.ID]:
			f.report.Duplicates++
		default:
			seen[m.ID] = true
			f.report.Unmarked++
		}
	}
	return nil
}

// foresee fills in what repairAll and findSuccessors would report.
func (r *repairer) foresee(ctx context.Context) error {
	all, err := outbox.Partitions(ctx, r.pool)
	if err != nil {
		return err
	}
	all = outbox.Adopted(all, r.strays)
	for _, f := range r.found {
		f.report.Deleted, f.report.Bind, f.report.Close = int64(len(f.doomed)), f.unbound(), f.lost && f.p.Closed
		if f.lost && !f.p.Closed && len(outbox.Successors(all, f.p.Number)) == 0 {
			p := outbox.Partition{Number: max(r.next, all[len(all)-1].Number+1), FirstSlot: f.p.FirstSlot, LastSlot: f.p.LastSlot, After: []int{f.p.Number}}
			all, r.next = append(all, p), p.Number+1
		}
		if f.lost || f.p.Replaced() {
			for _, p := range outbox.Successors(all, f.p.Number) {
				f.report.ReplacedBy = append(f.report.ReplacedBy, p.Number)
			}
		}
	}
	return nil
}

// repairAll does what there is to do, each partition's in steps that may be repeated.
func (r *repairer) repairAll(ctx context.Context) error {
	if len(r.strays) > 0 {
		if err := outbox.Adopt(ctx, r.pool, r.strays); err != nil {
			return err
		}
		if err := r.o.at("adopted"); err != nil {
			return err
		}
	}
	for _, f := range r.found {
		if err := r.fill(ctx, f); err != nil {
			return err
		}
		if err := r.delete(ctx, f); err != nil {
			return err
		}
		if f.report.Bind = f.unbound(); f.report.Bind {
			if err := outbox.Bind(ctx, r.pool, f.p.Number, f.stream.Name, f.stream.Created); err != nil {
				return err
			}
		}
		do := r.replace
		if f.p.Closed {
			do = r.reclose
		}
		if f.lost {
			if err := do(ctx, f); err != nil {
				return err
			}
		}
	}
	return nil
}

// fill has what is missing in the middle published again, and only then lets readers pass: until the hole is recorded it is found again.
func (r *repairer) fill(ctx context.Context, f *finding) (err error) {
	if len(f.missing) == 0 {
		return nil
	}
	if f.report.Republish, err = outbox.Requeue(ctx, r.pool, f.missingRows(), nil); err != nil {
		return err
	}
	if err := r.o.at("requeued"); err != nil {
		return err
	}
	return broker.RecordErased(ctx, r.js, r.cfg, f.stream.Name, f.missing)
}

// delete takes messages off the stream that is to have no more of them, after it has recorded them.
func (r *repairer) delete(ctx context.Context, f *finding) error {
	if len(f.doomed) == 0 {
		return nil
	}
	stream, err := r.js.Stream(ctx, f.stream.Name)
	if err != nil {
		return fmt.Errorf("look up stream %s: %w", f.stream.Name, err)
	}
	if !stream.CachedInfo().Created.Truncate(time.Microsecond).Equal(f.stream.Created) {
		return fmt.Errorf("delete %d messages of stream %s: it was recreated meanwhile", len(f.doomed), f.stream.Name)
	}
	if err := broker.RecordErased(ctx, r.js, r.cfg, f.stream.Name, f.doomed); err != nil {
		return err
	}
	if err := r.o.at("recorded"); err != nil {
		return err
	}
	for _, seq := range f.doomed {
		if err := stream.DeleteMsg(ctx, seq); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
			return fmt.Errorf("delete message %d of stream %s: %w", seq, f.stream.Name, err)
		}
		f.report.Deleted++
	}
	return nil
}

// replace has new partitions take over the slots of one whose stream is lost. Behind the fence no relay marks its rows, and until it is
// closed none publishes to the new ones: in between the rows of lost messages become pending.
func (r *repairer) replace(ctx context.Context, f *finding) error {
	successors, err := outbox.Replace(ctx, r.pool, f.p, f.left, r.next)
	if err != nil {
		return err
	}
	if err := r.o.at("fenced"); err != nil {
		return err
	}
	for _, p := range successors {
		r.next = max(r.next, p.Number+1)
		if _, err := broker.Declare(ctx, r.js, r.cfg, broker.Partition{Number: p.Number, FirstSlot: p.FirstSlot, LastSlot: p.LastSlot, After: p.After}, r.log); err != nil {
			return err
		}
		if err := broker.MarkRepaired(ctx, r.js, r.cfg, p.Number); err != nil {
			return err
		}
	}
	if err := r.o.at("declared"); err != nil {
		return err
	}
	var killed error
	n, err := outbox.Restore(ctx, r.pool, f.lostRows(), successors, func() { killed = errors.Join(killed, r.o.at("restored")) })
	if f.report.Republish = n; err != nil || killed != nil {
		return errors.Join(err, killed)
	}
	final, err := r.end(ctx, f)
	if err != nil {
		return err
	}
	if err := r.o.at("ended"); err != nil {
		return err
	}
	if _, err := outbox.Close(ctx, r.pool, f.p.Number, f.left, final); err != nil {
		return err
	}
	return r.o.at("closed")
}

// reclose ends the stream of a closed partition again, which has lost its end. Its successors may be far ahead: what was lost comes late.
func (r *repairer) reclose(ctx context.Context, f *finding) (err error) {
	if f.report.Republish, err = outbox.Requeue(ctx, r.pool, f.lostRows(), nil); err != nil {
		return err
	}
	final, err := r.end(ctx, f)
	if err != nil {
		return err
	}
	f.report.Close = true
	return outbox.Reclose(ctx, r.pool, f.p.Number, final)
}

// end publishes the closing message to what is left of a stream, so that its readers go on to the next, and returns its sequence. It does
// nothing where the stream ends with one already, and returns 0 where there is no stream.
func (r *repairer) end(ctx context.Context, f *finding) (final uint64, err error) {
	if !f.exists {
		return 0, nil
	}
	stream, err := broker.ReadStream(ctx, r.js, r.cfg, f.p.Number)
	if err != nil {
		return 0, err
	}
	closed, err := broker.Closed(ctx, r.js, stream)
	if err != nil || closed {
		return stream.Last, err
	}
	answer, err := r.js.Conn().RequestMsgWithContext(ctx, closing(r.cfg, f.p.Number, stream.Last))
	if err != nil {
		return 0, fmt.Errorf("close stream %s: %w", stream.Name, err)
	}
	return readAck(answer.Data, 1)
}

// findSuccessors says of each partition that is replaced by which, also of those that an earlier repair has replaced: it may have been
// interrupted before the consumers were told.
func (r *repairer) findSuccessors(ctx context.Context) error {
	all, err := outbox.Partitions(ctx, r.pool)
	if err != nil {
		return err
	}
	for _, f := range r.found {
		i := slices.IndexFunc(all, func(p outbox.Partition) bool { return p.Number == f.p.Number })
		if i < 0 || !all[i].Replaced() {
			continue
		}
		f.report.ReplacedBy = nil
		for _, p := range outbox.Successors(all, f.p.Number) {
			f.report.ReplacedBy = append(f.report.ReplacedBy, p.Number)
			stream, err := broker.ReadStream(ctx, r.js, r.cfg, p.Number)
			if errors.Is(err, jetstream.ErrStreamNotFound) { // it is closed and removed by now: whoever reads here needs a replay
				continue
			}
			if err != nil {
				return err
			}
			f.report.Successors = append(f.report.Successors, stream)
		}
	}
	return nil
}
