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

// ErrUnknownMessages reports messages on a stream that have no row. The database went back in time
// and lost the writes that they describe. Repair changed nothing. RepairOptions.DeleteUnknown
// deletes the messages from the stream.
var ErrUnknownMessages = errors.New("relay: the stream holds messages of writes that this database no longer has")

// RepairOptions are the permissions of a repair.
type RepairOptions struct {
	DryRun        bool // change nothing: report what the same call without DryRun would do
	DeleteUnknown bool // delete messages without a row from the streams
	DeleteForeign bool // read all streams, and delete messages that no relay wrote
	// Redo writes the writes that a restore undid to the database again, with their rows
	// (outbox.Redo). lost has their events, of one stream and in its order. moved has the ids of
	// the events whose rows got new ids: Repair deletes their messages, and the relay publishes
	// them again. nil means no redo.
	Redo func(ctx context.Context, lost []event.Event) (moved []string, err error)
	Held bool // pool is one of outbox.Exclusive: the caller has locked out other repairs and restores

	at func(step string) error // set by tests: an error ends the repair at that step
}

// RepairReport is what a repair found and did. A dry run reports what the repair would do, in the
// same form.
type RepairReport struct {
	DryRun     bool              `json:"dry_run"`
	Healthy    bool              `json:"healthy"`  // there was nothing to do
	Repaired   bool              `json:"repaired"` // the repair is complete
	Partitions []PartitionReport `json:"partitions"`
}

// PartitionReport is what a repair found of one partition and did, or would do.
type PartitionReport struct {
	Partition  int             `json:"partition"`
	Stream     string          `json:"stream"`
	Problem    string          `json:"problem,omitempty"` // the disagreement; empty if there is none
	Republish  int64           `json:"republish"`         // rows whose message is missing: the relay publishes them again
	Holes      int64           `json:"holes"`             // missing sequences in the middle that were not erased
	Unmarked   int64           `json:"unmarked"`          // messages whose rows the relay will mark by itself
	Unknown    int64           `json:"unknown"`           // messages without a row
	Redone     int64           `json:"redone,omitempty"`  // messages whose writes were written again
	Duplicates int64           `json:"duplicates"`        // later messages of an event that has an earlier one: the first counts
	Foreign    int64           `json:"foreign"`           // messages that no relay wrote: every reader skips them
	Deleted    int64           `json:"deleted"`           // of the unknown and the foreign messages
	Adopt      bool            `json:"adopt,omitempty"`   // add the partition to the database again
	Bind       bool            `json:"bind,omitempty"`    // bind the partition to its stream
	Close      bool            `json:"close,omitempty"`   // close its stream again, which has lost its end
	ReplacedBy []int           `json:"replaced_by,omitempty"`
	Left       uint64          `json:"left"` // the last sequence of a replaced stream, before the closing message
	Successors []broker.Stream `json:"-"`    // streams of ReplacedBy that exist
}

// Repair makes the streams and the database agree again, according to the rows of the outbox. If a
// stream is gone, was recreated or lost its end, a new partition takes over its slots. The relay
// first publishes the missing events there, in their order. If messages are missing in the middle
// of a stream, the relay publishes them again at its end. Erased rows are never published again.
//
// Relays may run meanwhile, but no other repair and no restore: Repair returns
// outbox.ErrNotExclusive beside one, and outbox.ErrExclusiveLost if it has lost its connection.
// After an interruption at any point, Repair can be called again. It returns broker.ErrNoLeader if
// a stream has no leader, because the stream's state is then unknown.
//
// A dry run writes nothing. It returns the report and error that the repair would return if nothing
// changes in between.
func Repair(ctx context.Context, pool *pgxpool.Pool, cfg broker.Config, log *slog.Logger,
	o RepairOptions) (report RepairReport, err error) {
	report.DryRun = o.DryRun
	if !o.DryRun && !o.Held {
		exclusive, free, err := outbox.Exclusive(ctx, pool, "repair")
		if err != nil {
			return report, err
		}
		defer free()
		pool = exclusive
	}
	nc, js, err := broker.Open(cfg, "repair", log)
	if err != nil {
		return report, err
	}
	defer nc.Close()
	if o.at == nil {
		o.at = func(string) error { return nil }
	}
	r := &repairer{pool: pool, cfg: cfg, js: js, log: log, o: o, redone: make(map[int]int64)}
	if err := r.redoAndInspect(ctx); err != nil {
		return report, err
	}
	unknown := int64(0)
	report.Healthy = len(r.strays) == 0
	for _, f := range r.found {
		unknown += f.report.Unknown
		report.Healthy = report.Healthy && !f.needsRepair(o)
	}
	switch {
	case unknown > 0 && !o.DeleteUnknown && o.Redo == nil:
		err = fmt.Errorf("%w: %d in total. First verify that NATS_URL and NATS_STREAM name this installation's streams. Then stop "+
			"the API and run `tidings restore`, which writes them again; if the database has the outbox alone, --delete-unknown "+
			"deletes their messages (docs/runbook/OutboxPartitionStuck.md)", ErrUnknownMessages, unknown)
	case o.DryRun:
		err = r.previewRepair(ctx)
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

// redoAndInspect writes unknown events again, if it may, and inspects all partitions.
func (r *repairer) redoAndInspect(ctx context.Context) error {
	redo := r.o.Redo != nil && !r.o.DryRun
	for try := 1; ; try++ {
		if redo {
			if err := r.redoAll(ctx); err != nil {
				return err
			}
		}
		if err := r.inspectAll(ctx); err != nil || !redo || !r.redoMissedSome() {
			return err
		}
		if try == maxRedos {
			return fmt.Errorf("%w, and %d attempts to write them again missed some: run it again", ErrUnknownMessages, try)
		}
	}
}

type repairer struct {
	pool   *pgxpool.Pool
	cfg    broker.Config
	js     jetstream.JetStream
	log    *slog.Logger
	o      RepairOptions
	next   int                // a partition number that was never used
	strays []outbox.Partition // partitions that have streams but are unknown to this database
	found  []*finding
	redone map[int]int64 // number of messages, by partition
}

// finding is the comparison of one partition with its stream.
type finding struct {
	p       outbox.Partition
	stream  broker.Stream
	exists  bool // the stream, whether or not it is the expected one
	lost    bool // its end, or all of it
	left    uint64
	missing []uint64           // sequences in the middle
	doomed  []outbox.Published // unknown and foreign messages to delete, ascending; foreign ones have only Seq
	report  PartitionReport
}

// needsRepair reports whether the partition needs a repair.
func (f *finding) needsRepair(o RepairOptions) bool {
	return f.lost || len(f.missing) > 0 || f.report.Unknown > 0 || f.unbound() || f.report.Foreign > 0 && o.DeleteForeign
}

// unbound reports that the stream has messages but the database has no record of the stream.
func (f *finding) unbound() bool { return f.p.Stream == "" && f.stream.Last > 0 }

// layout returns the partitions that this database knows, and records those that only the broker
// knows. It changes nothing.
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
		r.strays = append(r.strays, outbox.Partition{Number: s.Number, FirstSlot: s.FirstSlot, LastSlot: s.LastSlot, After: s.After,
			Stream: s.Name, Created: s.Created})
	}
	return all, nil
}

// inspectAll compares every partition with its stream, including partitions unknown to this
// database. It changes nothing.
func (r *repairer) inspectAll(ctx context.Context) error {
	all, err := r.layout(ctx)
	if err != nil {
		return err
	}
	r.found = nil
	for i, p := range append(all, r.strays...) {
		f := &finding{p: p, report: PartitionReport{Partition: p.Number, Stream: r.cfg.StreamName(p.Number), Redone: r.redone[p.Number]}}
		if i >= len(all) {
			f.report.Adopt = true
			f.report.Problem = "this database does not know the partition: it went back to a time before the partition existed"
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
		f.lost, f.report.Problem = true, "an interrupted repair is replacing it"
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
	if err := r.o.at("compared"); err != nil {
		return err
	}
	if err := r.findHoles(ctx, f); err != nil {
		return err
	}
	return r.readBehind(ctx, f)
}

// compare finds out whether the partition's stream is lost, and what is left of it.
func (r *repairer) compare(ctx context.Context, f *finding) error {
	_, err := broker.ConfirmByQuorum(ctx, r.js, func(ctx context.Context) (broker.Stream, bool, error) {
		err := r.compareOnce(ctx, f)
		if err == nil && f.lost {
			err = r.stepBack(ctx, f)
		}
		return f.stream, f.lost, err
	})
	return err
}

// compareOnce is compare for one answer of the stream's leader.
func (r *repairer) compareOnce(ctx context.Context, f *finding) (err error) {
	f.lost, f.left, f.report.Problem, f.report.Left = false, 0, "", 0
	f.stream, err = broker.ReadStream(ctx, r.js, r.cfg, f.p.Number)
	f.exists = err == nil
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return err
	}
	if f.exists && f.unbound() { // a relay may have bound the partition since f has it
		if f.p, err = outbox.ReadPartition(ctx, r.pool, f.p.Number); err != nil {
			return err
		}
		if !f.unbound() {
			return r.compareOnce(ctx, f) // reads the stream after its marks
		}
	}
	switch {
	case f.p.Stream == "" || f.p.Closed && (!f.exists || !f.stream.Created.Equal(f.p.Created)):
		f.exists = f.exists && f.p.Stream == "" // an operator may have removed a closed stream
	case f.p.Stream != r.cfg.StreamName(f.p.Number):
		return fmt.Errorf("partition %d is on stream %s, not %s: correct NATS_STREAM or DATABASE_URL of this process", f.p.Number,
			f.p.Stream, r.cfg.StreamName(f.p.Number))
	case !f.exists:
		f.lost, f.report.Problem = true, "its stream is gone"
	case !f.stream.Created.Equal(f.p.Created):
		f.lost, f.report.Problem = true, fmt.Sprintf("its stream was recreated at %s", f.stream.Created.Format(time.RFC3339))
	case f.stream.Last < f.p.Tail:
		f.lost, f.left = true, f.stream.Last
		f.report.Problem = fmt.Sprintf("its stream ends at sequence %d, and its marks at %d", f.stream.Last, f.p.Tail)
	}
	f.report.Left = f.left
	return nil
}

// stepBack moves left of a stream that lost its end to the last message that is where its row has
// it. A relay that was frozen during the loss may have published later ones: their sequences belong
// to the lost messages of other rows. The row of an old message may have been dropped. That message
// counts as in place, because a consumer whose offset is left or higher is past it.
func (r *repairer) stepBack(ctx context.Context, f *finding) error {
	defer func() { f.report.Left = f.left }()
	for ; f.left > 0 && f.left >= f.stream.First; f.left-- {
		m, err := broker.Next(ctx, r.js, f.stream.Name, f.left)
		if err != nil {
			return err
		}
		if m == nil || m.Seq != f.left || !event.Ours(m.Header) {
			continue
		}
		id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has parsed it
		message := outbox.Published{ID: id, EventID: m.Header.Get(event.HeaderID), Seq: m.Seq}
		in, err := outbox.InPlace(ctx, r.pool, f.p.Number, []outbox.Published{message})
		if err != nil || in[m.Seq] {
			return err
		}
		known, err := outbox.Classify(ctx, r.pool, []outbox.Published{message})
		if err != nil || known[m.Seq] == outbox.Unknown {
			return err
		}
	}
	return nil
}

func (f *finding) lostRows() outbox.Lost {
	return outbox.Lost{Partition: f.p.Number, Behind: f.left}
}

func (f *finding) missingRows() outbox.Lost {
	return outbox.Lost{Partition: f.p.Number, Behind: outbox.NoneBehind, Seqs: f.missing}
}

// findHoles finds messages that are missing in the middle of the stream, up to the stored tail:
// later ones may belong to a mark in progress. Expired messages are not missing, and erased ones
// are recorded.
func (r *repairer) findHoles(ctx context.Context, f *finding) error {
	if _, err := broker.ConfirmByQuorum(ctx, r.js, func(ctx context.Context) (broker.Stream, bool, error) {
		stream, err := r.findHolesOnce(ctx, f)
		return stream, len(f.missing) > 0, err
	}); err != nil || len(f.missing) == 0 {
		return err
	}
	f.report.Holes = int64(len(f.missing))
	f.report.Problem = fmt.Sprintf("its stream lacks %s, the first at sequence %d",
		messages(f.report.Holes), f.missing[0])
	var err error
	f.report.Republish, err = outbox.CountLost(ctx, r.pool, f.missingRows())
	return err
}

// findHolesOnce is findHoles for one answer of the stream's leader. It keeps f.stream, which
// belongs to f.p: a relay may have bound an unbound partition since.
func (r *repairer) findHolesOnce(ctx context.Context, f *finding) (broker.Stream, error) {
	f.missing = nil
	stream, err := broker.ReadStream(ctx, r.js, r.cfg, f.p.Number)
	if err != nil || stream.Last == 0 || stream.Last < stream.First || stream.Messages == stream.Last-stream.First+1 {
		return stream, err
	}
	deleted, err := broker.Deleted(ctx, r.js, stream)
	if err != nil {
		return stream, err
	}
	deleted = slices.DeleteFunc(deleted, func(seq uint64) bool { return seq > f.p.Tail })
	f.missing, err = broker.NotErased(ctx, r.js, r.cfg, stream.Name, deleted)
	return stream, err
}

// readBehind reads the messages after the stored tail, or the whole stream if foreign messages are
// to be deleted.
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
				f.doomed = append(f.doomed, outbox.Published{Seq: m.Seq})
			}
			return nil
		case m.Seq <= f.p.Tail:
			return nil
		}
		id, _ := strconv.ParseInt(m.Header.Get(event.HeaderOutboxID), 10, 64) // Ours has parsed it
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
		f.report.Problem = fmt.Sprintf("its stream has %s without a row", messages(f.report.Unknown))
	case f.unbound():
		f.report.Problem = "this database does not know its stream: it went back to a time before the two were bound"
	case r.o.DeleteForeign && f.report.Foreign > 0:
		f.report.Problem = fmt.Sprintf("its stream has %s that no relay wrote", messages(f.report.Foreign))
	}
	return nil
}

// messages writes a number of messages with its noun.
func messages(n int64) string {
	if n == 1 {
		return "1 message"
	}
	return fmt.Sprintf("%d messages", n)
}

// classify counts our messages by what this database knows of them. seen has the rows whose first
// message was counted.
func (r *repairer) classify(ctx context.Context, f *finding, messages []outbox.Published, seen map[int64]bool) error {
	known, err := outbox.Classify(ctx, r.pool, messages)
	if err != nil {
		return err
	}
	for _, m := range messages {
		switch {
		case known[m.Seq] == outbox.Unknown:
			f.report.Unknown++
			f.doomed = append(f.doomed, m)
		case known[m.Seq] == outbox.Past || seen[m.ID]:
			f.report.Duplicates++
		default:
			seen[m.ID] = true
			f.report.Unmarked++
		}
	}
	return nil
}

// previewRepair fills in what repairAll and findSuccessors would report.
func (r *repairer) previewRepair(ctx context.Context) error {
	all, err := outbox.Partitions(ctx, r.pool)
	if err != nil {
		return err
	}
	all = outbox.Adopted(all, r.strays)
	for _, f := range r.found {
		f.report.Deleted, f.report.Bind, f.report.Close = int64(len(f.doomed)), f.unbound(), f.lost && f.p.Closed
		if f.lost && !f.p.Closed && len(outbox.Successors(all, f.p.Number)) == 0 {
			p := outbox.Partition{Number: max(r.next, all[len(all)-1].Number+1), FirstSlot: f.p.FirstSlot, LastSlot: f.p.LastSlot,
				After: []int{f.p.Number}}
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

// repairAll repairs every partition, in steps that can be repeated.
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

// fill makes the rows of messages missing in the middle pending again, and then records the holes
// as erased. Until then readers stop at a hole, and a repeated repair finds it again.
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

// delete records unwanted messages as erased, and then deletes from the stream those that still
// have no row. A restore that begins after a message was recorded does not rely on the message
// (withoutDoomed). So a repair that freezes between its last check and a deletion takes no event
// away.
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
	seqs := make([]uint64, len(f.doomed))
	for i, m := range f.doomed {
		seqs[i] = m.Seq
	}
	if err := broker.RecordErased(ctx, r.js, r.cfg, f.stream.Name, seqs); err != nil {
		return err
	}
	if err := r.o.at("recorded"); err != nil {
		return err
	}
	for page := range slices.Chunk(f.doomed, deletePage) {
		ours := slices.DeleteFunc(slices.Clone(page), func(m outbox.Published) bool { return m.EventID == "" })
		known, err := outbox.Classify(ctx, r.pool, ours)
		if err != nil {
			return err
		}
		if err := r.o.at("classified"); err != nil {
			return err
		}
		for _, m := range page {
			if m.EventID != "" && known[m.Seq] != outbox.Unknown {
				continue
			}
			if err := stream.DeleteMsg(ctx, m.Seq); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) &&
				!errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
				return fmt.Errorf("delete message %d of stream %s: %w", m.Seq, f.stream.Name, err)
			}
			f.report.Deleted++
		}
	}
	return nil
}

// deletePage is the number of messages that are deleted after one check of their rows.
const deletePage = 100

// replace makes new partitions take over the slots of one whose stream is lost. The fence keeps
// relays from marking its rows. No relay publishes to the new partitions before the old one is
// closed. In between, the rows of the lost messages become pending again.
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
		if _, err := broker.Declare(ctx, r.js, r.cfg, broker.Partition{Number: p.Number, FirstSlot: p.FirstSlot, LastSlot: p.LastSlot,
			After: p.After}, r.log); err != nil {
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

// reclose ends the stream of a closed partition again, which lost its end. Its successors may be
// far ahead, so the lost events come late.
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

// end publishes the closing message at the end of a damaged stream, so that readers continue with
// the next one, and returns its sequence. It publishes nothing if the stream already has one, and
// returns 0 if there is no stream.
func (r *repairer) end(ctx context.Context, f *finding) (final uint64, err error) {
	if !f.exists {
		return 0, nil
	}
	stream, err := broker.ReadStream(ctx, r.js, r.cfg, f.p.Number)
	if err != nil {
		return 0, err
	}
	if final, err = broker.Closed(ctx, r.js, r.cfg, stream); err != nil || final > 0 {
		return final, err
	}
	answer, err := r.js.Conn().RequestMsgWithContext(ctx, closing(r.cfg, f.p.Number, stream.Last))
	if err != nil {
		return 0, fmt.Errorf("close stream %s: %w", stream.Name, err)
	}
	return readAck(answer.Data, 1)
}

// findSuccessors reports the successors of each replaced partition, including those that an earlier
// repair replaced. That repair may have been interrupted before it informed the consumers.
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
			if errors.Is(err, jetstream.ErrStreamNotFound) { // closed and removed by now: a consumer at this point needs a replay
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
