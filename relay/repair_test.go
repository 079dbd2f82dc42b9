package relay

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// damaged is an outbox whose rows are all published. A test then damages its streams. No relay
// runs.
type damaged struct {
	t    *testing.T
	pool *pgxpool.Pool
	b    *testkit.Broker
	js   jetstream.JetStream
	own  *pgxpool.Pool // as the owner of the tables
}

func wrote(t *testing.T, b *testkit.Broker) *damaged {
	t.Helper()
	db := testkit.Postgres(t)
	d := &damaged{t: t, pool: db.Pool(t, postgres.RoleSystem), own: db.Pool(t, postgres.RoleOwner), b: b}
	var err error
	if d.js, err = jetstream.New(b.Connect(t)); err != nil {
		t.Fatal(err)
	}
	d.write(60)
	return d
}

// write appends transactions, and a relay publishes them.
func (d *damaged) write(transactions int) {
	d.t.Helper()
	stop := start(d.t, newRelay(d.t, d.pool, d.b))
	if err := appendPairs(d.t.Context(), d.pool, seeded(d.t), transactions); err != nil {
		d.t.Fatal(err)
	}
	awaitDrained(d.t, d.t.Context(), d.pool, time.Minute)
	stop()
}

func (d *damaged) exec(sql string, args ...any) int64 {
	d.t.Helper()
	tag, err := d.pool.Exec(d.t.Context(), sql, args...)
	if err != nil {
		d.t.Fatal(err)
	}
	return tag.RowsAffected()
}

func (d *damaged) count(sql string, args ...any) (n int64) {
	d.t.Helper()
	if err := d.pool.QueryRow(d.t.Context(), sql, args...).Scan(&n); err != nil {
		d.t.Fatal(err)
	}
	return n
}

func (d *damaged) rows() int64 { d.t.Helper(); return d.count(`SELECT count(*) FROM outbox_messages`) }

func (d *damaged) stream(partition int) jetstream.Stream {
	d.t.Helper()
	stream, err := d.js.Stream(d.t.Context(), d.b.Config().StreamName(partition))
	if err != nil {
		d.t.Fatal(err)
	}
	return stream
}

func (d *damaged) deleteStream(partition int) {
	d.t.Helper()
	if err := d.js.DeleteStream(d.t.Context(), d.b.Config().StreamName(partition)); err != nil {
		d.t.Fatal(err)
	}
}

func (d *damaged) deleteMessages(partition int, seqs ...uint64) {
	d.t.Helper()
	for _, seq := range seqs {
		if err := d.stream(partition).DeleteMsg(d.t.Context(), seq); err != nil {
			d.t.Fatal(err)
		}
	}
}

// publish publishes a message that no relay would publish.
func (d *damaged) publish(m *nats.Msg) {
	d.t.Helper()
	if _, err := d.js.PublishMsg(d.t.Context(), m); err != nil {
		d.t.Fatal(err)
	}
}

func (d *damaged) foreign(partition int) *nats.Msg {
	return &nats.Msg{Subject: fmt.Sprintf("%s.%d.t1.post.created", d.b.Config().Prefix, partition), Data: []byte("hello")}
}

// repair repairs after a dry run. The dry run must report the same, unless the repair is to be
// interrupted.
func (d *damaged) repair(o RepairOptions) (RepairReport, error) {
	d.t.Helper()
	if o.at != nil || o.DryRun {
		return Repair(d.t.Context(), d.pool, d.b.Config(), testkit.Logger(d.t), o)
	}
	dry := o
	dry.DryRun = true
	said, refused := Repair(d.t.Context(), d.pool, d.b.Config(), testkit.Logger(d.t), dry)
	did, err := Repair(d.t.Context(), d.pool, d.b.Config(), testkit.Logger(d.t), o)
	if diff := cmp.Diff(said.Partitions, did.Partitions, cmpopts.IgnoreFields(PartitionReport{}, "Successors", "Unmarked")); diff != "" ||
		said.Healthy != did.Healthy || fmt.Sprint(refused) != fmt.Sprint(err) {
		d.t.Errorf("the dry run and the repair differ: %v, %v (-dry +real):\n%s", refused, err, diff)
	}
	return did, err
}

// repaired repairs, and fails unless the report says so.
func (d *damaged) repaired(o RepairOptions) []PartitionReport {
	d.t.Helper()
	report, err := d.repair(o)
	if err != nil || report.Healthy || !report.Repaired {
		d.t.Fatalf("got %+v, %v", report, err)
	}
	return report.Partitions
}

// previewed does a dry run, which must find damage and change no row.
func (d *damaged) previewed(o RepairOptions) []PartitionReport {
	d.t.Helper()
	state := `SELECT coalesce(sum(hashtext(m::text)), 0) + (SELECT sum(hashtext(p::text)) FROM outbox_partitions p) FROM outbox_messages m`
	before := d.count(state)
	o.DryRun = true
	report, err := d.repair(o)
	if err != nil || report.Healthy || report.Repaired {
		d.t.Errorf("a dry run: %+v, %v", report, err)
	}
	if d.count(state) != before {
		d.t.Error("a dry run changed the database")
	}
	return report.Partitions
}

// healthy fails unless a repair finds nothing to do.
func (d *damaged) healthy(when string) []PartitionReport {
	d.t.Helper()
	report, err := d.repair(RepairOptions{})
	if err != nil || !report.Healthy || report.Repaired {
		d.t.Errorf("%s: %+v, %v", when, report, err)
	}
	return report.Partitions
}

// refused fails unless a relay refuses the partition.
func (d *damaged) refused() {
	d.t.Helper()
	r := newRelay(d.t, d.pool, d.b)
	stop := start(d.t, r)
	defer stop()
	testkit.Eventually(d.t, "the relay to refuse the stream", func() (bool, error) {
		return errors.Is(r.Ready(d.t.Context()), ErrStreamRefused), nil
	})
}

// once fails unless the streams have the event of each row exactly once, and nothing else.
func (d *damaged) once() {
	d.t.Helper()
	left := make(map[string]bool)
	for _, m := range readStream(d.t, d.t.Context(), d.b) {
		if d.count(`SELECT count(*) FROM outbox_messages WHERE event_id = $1 AND partition = $2 AND stream_seq = $3`, m.ID, m.partition,
			int64(m.Seq)) != 1 || left[m.ID] {
			d.t.Errorf("message %d of partition %d has no row", m.Seq, m.partition)
		}
		left[m.ID] = true
	}
	if n := d.count(`SELECT count(*) FROM outbox_messages WHERE stream_seq IS NOT NULL OR processed_at IS NULL`); int(n) != len(left) {
		d.t.Errorf("%d rows, and %d events on the streams", n, len(left))
	}
}

// archive moves the current range to the archive, as the archiver does when the floors have passed
// it.
func (d *damaged) archive() {
	d.t.Helper()
	d.exec(`SELECT outbox_range_cut(50000001)`)
	d.exec(`UPDATE outbox_partitions SET floor_id = 50000000`)
	d.exec(`SELECT outbox_range_archive(1, 0)`)
	if n := d.count(`SELECT count(*) FROM outbox_messages_archive`); n == 0 || d.count(`SELECT count(*) FROM outbox_messages`) != 0 {
		d.t.Fatalf("%d rows were archived", n)
	}
}

func TestAHealthyStreamIsLeftAlone(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	before := d.stream(0).CachedInfo()
	for _, p := range d.healthy("untouched") {
		if p.Problem != "" || p.Republish+p.Unknown+p.Foreign+p.Deleted+p.Holes != 0 {
			t.Errorf("got %+v", p)
		}
	}
	if after := d.stream(0).CachedInfo(); after.State.LastSeq != before.State.LastSeq ||
		len(after.Config.Metadata) != len(before.Config.Metadata) {
		t.Errorf("the stream changed: %+v", after)
	}
	if p, err := outbox.ReadPartition(t.Context(), d.pool, 0); err != nil || p.Closing {
		t.Errorf("the partition changed: %+v, %v", p, err)
	}
}

// TestAPartitionWhoseStreamIsLostIsReplaced: the new partition first has the lost events in their
// order, then those written since.
func TestAPartitionWhoseStreamIsLostIsReplaced(t *testing.T) {
	for what, lose := range map[string]func(d *damaged){
		"gone": func(d *damaged) { d.deleteStream(0) },
		"made anew": func(d *damaged) {
			d.deleteStream(0)
			if _, err := broker.Declare(d.t.Context(), d.js, d.b.Config(), broker.Partition{LastSlot: event.Slots - 1},
				testkit.Logger(d.t)); err != nil {
				d.t.Fatal(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			d := wrote(t, testkit.NATS(t))
			erased := insertRow(t, d.pool, 1, "created")
			d.write(1)
			// One event was erased: its row is processed and has no sequence. Another one was
			// delayed once. All are in the archive.
			d.exec(`UPDATE outbox_messages SET stream_seq = NULL WHERE id = $1`, erased)
			d.exec(`UPDATE outbox_messages SET available_at = inserted_at + interval '1 millisecond', attempts = 3
				WHERE id = (SELECT max(id) FROM outbox_messages WHERE partition = 0 GROUP BY aggregate_id, payload ->> 'follower_id'
				HAVING count(*) > 2 LIMIT 1)`)
			want := d.count(`SELECT count(*) FROM outbox_messages WHERE partition = 0`) - 1 // without the erased one
			d.archive()
			lose(d)
			d.refused()
			if err := appendPairs(t.Context(), d.pool, seeded(t), 20); err != nil { // no relay runs yet
				t.Fatal(err)
			}
			dry := d.previewed(RepairOptions{})[0]
			if dry.Problem == "" || dry.Republish != want || !slices.Equal(dry.ReplacedBy, []int{1}) {
				t.Errorf("a dry run: %+v, want %d events to be published", dry, want)
			}
			got := d.repaired(RepairOptions{})[0]
			if got.Republish != want || !slices.Equal(got.ReplacedBy, []int{1}) || len(got.Successors) != 1 ||
				!got.Successors[0].Repaired || got.Left != 0 {
				t.Errorf("got %+v, want %d events to be published", got, want)
			}
			// A repetition reports the same to the consumers.
			if again := d.healthy("once more")[0]; len(again.Successors) != 1 ||
				again.Successors[0].Name != "EVENTS-1" || again.Republish != 0 {
				t.Errorf("a second repair: %+v", again)
			}
			d.write(10)
			d.once()
			d.exec(`DELETE FROM outbox_messages WHERE stream_seq IS NULL`) // apart from the erased event, everything must be complete
			checkStream(t, t.Context(), d.pool, d.b)
			d.healthy("after the repair")
		})
	}
}

// saved copies the server's files. The returned function restores them, and everything in between
// is lost.
func (d *damaged) saved(under string) (putBack func()) {
	d.t.Helper()
	dir, copied := filepath.Join(d.b.Dir(), under), filepath.Join(d.t.TempDir(), "copy")
	d.whileDown(func() error { return os.CopyFS(copied, os.DirFS(dir)) })
	return func() {
		d.t.Helper()
		d.whileDown(func() error { return errors.Join(os.RemoveAll(dir), os.CopyFS(dir, os.DirFS(copied))) })
	}
}

func (d *damaged) whileDown(fn func() error) {
	d.t.Helper()
	d.b.Kill(d.t)
	if err := fn(); err != nil {
		d.t.Fatal(err)
	}
	d.b.Restart(d.t)
	testkit.Eventually(d.t, "the server to answer again", func() (bool, error) {
		_, err := d.js.AccountInfo(d.t.Context())
		return err == nil, nil
	})
}

// TestALatePublishBehindALossHidesNoEvent: a relay was frozen before its publish. Others published
// and marked its row behind other rows, the stream lost all of them, and the relay thaws. Its
// message gets the sequence of another row.
func TestALatePublishBehindALossHidesNoEvent(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATSProcess(t))
	putBack := d.saved("")
	left := d.count(`SELECT tail_seq FROM outbox_partitions`)
	d.write(20)
	all := d.count(`SELECT tail_seq FROM outbox_partitions`)
	late, err := d.stream(0).GetMsg(t.Context(), uint64(all))
	if err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(late.Header, func(name string, _ []string) bool { return strings.HasPrefix(name, "Nats-") })
	putBack()
	d.publish(&nats.Msg{Subject: late.Subject, Header: late.Header, Data: late.Data})
	d.refused()
	got := d.repaired(RepairOptions{})[0]
	if got.Republish != all-left || got.Left != uint64(left) {
		t.Errorf("got %+v, want %d of %d events to be published", got, all-left, all)
	}
	d.write(10)
	if found := inspect(t, t.Context(), d.pool, d.b); found.Missing > 0 {
		t.Errorf("after the repair: %+v", found)
	}
}

// TestConsumersReadTheRestOfALostStreamWhoseRowsAreDropped: Left decides which consumers skip the
// rest.
func TestConsumersReadTheRestOfALostStreamWhoseRowsAreDropped(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATSProcess(t))
	putBack := d.saved("")
	left := d.count(`SELECT tail_seq FROM outbox_partitions`)
	d.write(20)
	all := d.count(`SELECT tail_seq FROM outbox_partitions`)
	d.exec(`DELETE FROM outbox_messages WHERE stream_seq <= $1`, left)
	putBack()
	if got := d.repaired(RepairOptions{})[0]; got.Republish != all-left || got.Left != uint64(left) {
		t.Errorf("got %+v, want %d events to be published, behind %d", got, all-left, left)
	}
}

// TestARelayMarksNothingOfAPartitionThatIsReplaced: the relay has an ack of a message that the
// stream has lost since.
func TestARelayMarksNothingOfAPartitionThatIsReplaced(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	p, err := outbox.ReadPartition(t.Context(), d.pool, 0)
	if err != nil {
		t.Fatal(err)
	}
	id := insertRow(t, d.pool, 1, "created", `{"version": 1}`)
	var eventID string
	if err := d.pool.QueryRow(t.Context(), `SELECT event_id::text FROM outbox_messages WHERE id = $1`, id).Scan(&eventID); err != nil {
		t.Fatal(err)
	}
	d.deleteStream(0)
	mark := outbox.Mark{Created: p.Created, OldTail: p.Tail, NewTail: p.Tail + 1,
		Rows: []outbox.Published{{ID: id, EventID: eventID, Seq: p.Tail + 1}}}
	late := errors.New("killed")
	_, err = d.repair(RepairOptions{at: func(step string) error {
		if step == "fenced" {
			if _, err := outbox.MarkCaughtUp(t.Context(), d.pool, 0, mark); !errors.Is(err, outbox.ErrMarkFailed) {
				t.Errorf("a mark after the fence: %v", err)
			}
			return late
		}
		return nil
	}})
	if !errors.Is(err, late) || t.Failed() {
		t.Fatal(err)
	}
	d.refused()
	d.repaired(RepairOptions{})
	d.write(5)
	checkStream(t, t.Context(), d.pool, d.b)
}

func TestMessagesThatAreMissingInTheMiddleArePublishedAgainWhileRelaysRun(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	start(t, newRelay(t, d.pool, d.b))
	start(t, newRelay(t, d.pool, d.b))
	testkit.Eventually(t, "the floor to stay, because a relay stores it a second later", func() (bool, error) {
		// It rises to the last id that was assigned, also if that transaction was rolled back.
		return d.count(`SELECT count(*) FROM outbox_partitions WHERE floor_id >= (SELECT last_value FROM outbox_messages_id_seq)`) == 1, nil
	})
	last := d.stream(0).CachedInfo().State.LastSeq
	hole := []uint64{5, 6, last / 2, last - 2, last} // including the last one, which is the relay's tail
	if _, err := d.own.Exec(t.Context(),
		`CREATE TABLE archived PARTITION OF outbox_messages_archive FOR VALUES FROM (1) TO (50000001)`); err != nil {
		t.Fatal(err)
	}
	const columns = `id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, ` +
		`processed_at, attempts, event_id, stream_seq, inserted_at, partition`
	d.exec(`WITH old AS (DELETE FROM outbox_messages WHERE stream_seq = 6 RETURNING *) INSERT INTO outbox_messages_archive (` + columns +
		`) SELECT ` + columns + ` FROM old`)
	// Two messages were erased. The record has one of them, which is no hole.
	erased := []uint64{9, 10}
	d.exec(`UPDATE outbox_messages SET stream_seq = NULL WHERE stream_seq = ANY($1)`, []int64{9, 10})
	if err := broker.RecordErased(t.Context(), d.js, d.b.Config(), "EVENTS-0", erased[:1]); err != nil {
		t.Fatal(err)
	}
	d.deleteMessages(0, append(hole, erased...)...)
	if dry := d.previewed(RepairOptions{})[0]; dry.Holes != int64(len(hole)+1) || dry.Republish != int64(len(hole)) {
		t.Errorf("a dry run: %+v", dry)
	}
	if err := appendPairs(t.Context(), d.pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	// Relays publish meanwhile, so a dry run would see a different state.
	got := d.repaired(RepairOptions{at: func(string) error { return nil }})[0]
	if got.Holes != int64(len(hole)+1) || got.Republish != int64(len(hole)) || len(got.ReplacedBy) > 0 {
		t.Errorf("got %+v", got)
	}
	for _, seq := range append(hole, erased...) {
		if ok, err := broker.Erased(t.Context(), d.js, d.b.Config(), "EVENTS-0", seq, seq); err != nil || !ok {
			t.Errorf("readers stop at %d: %t, %v", seq, ok, err)
		}
	}
	if err := appendPairs(t.Context(), d.pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), d.pool, time.Minute)
	d.once()
	if n := d.count(`SELECT count(*) FROM outbox_messages_archive`); n != 0 {
		t.Errorf("%d rows are still in the archive", n)
	}
	d.healthy("after the repair")
}

// wentBack deletes the last rows, as a restore to an earlier time does.
func (d *damaged) wentBack(rows int) {
	d.t.Helper()
	if n := d.exec(`DELETE FROM outbox_messages WHERE id IN (SELECT id FROM outbox_messages ORDER BY id DESC LIMIT $1)`,
		rows); n != int64(rows) {
		d.t.Fatalf("%d rows were deleted", n)
	}
	d.exec(`UPDATE follows f SET version = (SELECT count(*) FROM outbox_messages m WHERE m.payload->>'follower_id' = f.follower_id
		AND m.aggregate_id = f.followee_id)
		WHERE EXISTS (SELECT FROM outbox_messages m WHERE m.payload->>'follower_id' = f.follower_id
		AND m.aggregate_id = f.followee_id)`)
	d.exec(`DELETE FROM follows f WHERE NOT EXISTS (SELECT FROM outbox_messages m WHERE m.payload->>'follower_id' = f.follower_id
		AND m.aggregate_id = f.followee_id)`)
}

func TestMessagesOfADatabaseThatWentBackAreTakenOffWhenTold(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	d.wentBack(5)
	// Three marks are lost too.
	tail := d.count(`SELECT max(stream_seq) - 3 FROM outbox_messages`)
	d.exec(`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL WHERE stream_seq > $1`, tail)
	d.exec(`UPDATE outbox_partitions SET tail_seq = $1, floor_id = 0`, tail)
	if dry := d.previewed(RepairOptions{DeleteUnknown: true})[0]; dry.Unknown != 5 || dry.Unmarked != 3 || dry.Deleted != 5 {
		t.Errorf("a dry run: %+v", dry)
	}
	report, err := d.repair(RepairOptions{})
	if !errors.Is(err, ErrUnknownMessages) || report.Repaired || len(report.Partitions) != 1 || report.Partitions[0].Unknown != 5 {
		t.Fatalf("got %+v, %v: want ErrUnknownMessages for 5", report, err)
	}
	if text := err.Error(); !strings.Contains(text, "5 in total. First verify that NATS_URL") ||
		!strings.Contains(text, "run `tidings restore`, which writes them again") { // another installation's events?
		t.Errorf("the refusal advises to delete without a warning: %s", text)
	}
	d.refused()
	before := d.stream(0).CachedInfo().State.LastSeq
	if got := d.repaired(RepairOptions{DeleteUnknown: true})[0]; got.Unknown != 5 || got.Deleted != 5 || len(got.ReplacedBy) > 0 {
		t.Errorf("got %+v", got)
	}
	if ok, err := broker.Erased(t.Context(), d.js, d.b.Config(), "EVENTS-0", before-4, before); err != nil || !ok {
		t.Errorf("readers stop at deleted messages: %t, %v", ok, err)
	}
	d.write(10)
	d.once()
	d.healthy("after the repair")
}

// TestADatabaseThatWentBackBehindAResizeKnowsItsPartitionsAgain: the database no longer has the new
// partitions. One of the two has no stream yet.
func TestADatabaseThatWentBackBehindAResizeKnowsItsPartitionsAgain(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	if _, err := outbox.Resize(t.Context(), d.pool, 2); err != nil {
		t.Fatal(err)
	}
	d.write(20)
	d.deleteStream(2)
	d.exec(`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL WHERE partition > 0`)
	d.exec(`DELETE FROM outbox_partitions WHERE partition > 0`)
	d.exec(`UPDATE outbox_partitions SET closing = false, final_seq = NULL, tail_seq = tail_seq - 1, floor_id = 0`)
	dry := d.previewed(RepairOptions{})
	if len(dry) != 2 || dry[1].Partition != 1 || dry[1].Unmarked == 0 || dry[1].Unknown != 0 {
		t.Errorf("a dry run: %+v", dry)
	}
	d.repaired(RepairOptions{})
	all, err := outbox.Partitions(t.Context(), d.pool)
	if err != nil || len(all) != 3 || !all[0].Closing || all[2].FirstSlot != all[1].LastSlot+1 || all[2].LastSlot != event.Slots-1 {
		t.Errorf("the partitions are %+v, %v", all, err)
	}
	d.write(20)
	checkStream(t, t.Context(), d.pool, d.b)
	d.healthy("after the repair")
}

func TestADatabaseThatNeverMetItsStreamIsBoundToIt(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	d.exec(`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL`)
	d.exec(`UPDATE outbox_partitions SET stream = NULL, created = NULL, tail_seq = 0, floor_id = 0`)
	d.refused()
	if got := d.repaired(RepairOptions{})[0]; got.Unmarked != d.rows() || got.Problem == "" {
		t.Errorf("got %+v", got)
	}
	d.write(10)
	checkStream(t, t.Context(), d.pool, d.b)
	d.healthy("after the repair")
}

// TestARepairSeesAPartitionBeginWithoutAFinding: a relay binds a new partition and publishes while
// the repair compares it.
func TestARepairSeesAPartitionBeginWithoutAFinding(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	if _, err := outbox.Resize(t.Context(), d.pool, 2); err != nil {
		t.Fatal(err)
	}
	for p := 1; p <= 2; p++ {
		half := broker.Partition{Number: p, FirstSlot: 16 * (p - 1), LastSlot: 16*p - 1, After: []int{0}}
		if _, err := broker.Declare(t.Context(), d.js, d.b.Config(), half, testkit.Logger(t)); err != nil {
			t.Fatal(err)
		}
	}
	compared := 0
	report, err := d.repair(RepairOptions{DryRun: true, at: func(step string) error {
		if compared++; step != "compared" || compared != 2 {
			return nil
		}
		d.write(10)
		return nil
	}})
	if err != nil || !report.Healthy {
		t.Errorf("got %+v, %v", report, err)
	}
	if begun := d.count(`SELECT count(*) FROM outbox_partitions WHERE partition = 1 AND tail_seq > 0`); begun != 1 {
		t.Error("partition 1 has not begun: this test shows nothing")
	}
}

func TestForeignAndRepeatedMessagesAreCountedAndTakenOffWhenTold(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	d.publish(d.foreign(0))
	d.write(5) // the relay skips the message
	tail, err := broker.Next(t.Context(), d.js, "EVENTS-0", d.stream(0).CachedInfo().State.LastSeq)
	if err != nil {
		t.Fatal(err)
	}
	again := &nats.Msg{Subject: tail.Subject, Data: tail.Data, Header: nats.Header{}}
	for name, v := range tail.Header {
		if !strings.HasPrefix(name, "Nats-") {
			again.Header[name] = v
		}
	}
	d.publish(again)
	d.publish(d.foreign(0))
	if got := d.healthy("with foreign messages")[0]; got.Foreign != 1 || got.Duplicates != 1 || got.Unknown != 0 {
		t.Errorf("after the tail: %+v", got)
	}
	if dry := d.previewed(RepairOptions{DeleteForeign: true})[0]; dry.Foreign != 2 || dry.Deleted != 2 {
		t.Errorf("a dry run: %+v", dry)
	}
	if got := d.repaired(RepairOptions{DeleteForeign: true})[0]; got.Foreign != 2 || got.Deleted != 2 || got.Duplicates != 1 {
		t.Errorf("got %+v", got)
	}
	d.write(5)
	for _, m := range readStream(t, t.Context(), d.b) {
		if m.foreign {
			t.Errorf("message %d still exists", m.Seq)
		}
	}
	d.healthy("after the repair")
}
