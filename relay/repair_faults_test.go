//go:build faults

package relay

import (
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"maps"
	"path/filepath"
	"slices"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestNothingIsRepairedWhileAStreamHasNoLeader(t *testing.T) {
	t.Parallel()
	c := testkit.NATSCluster(t, 3)
	d := wrote(t, c.Nodes[0])
	_, others := c.Leader(t, "EVENTS-0")
	for _, b := range others {
		b.Freeze(t)
	}
	js, err := jetstream.New(c.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the leader to notice that it is alone", func() (bool, error) {
		_, err := broker.ReadStream(t.Context(), js, c.Config(), 0)
		return errors.Is(err, broker.ErrNoLeader), nil
	})
	// By its own marks the partition is lost.
	d.exec(`UPDATE outbox_partitions SET tail_seq = tail_seq + 1000`)
	before := d.count(`SELECT sum(hashtext(p::text)) FROM outbox_partitions p`)
	_, err = Repair(t.Context(), d.pool, c.Config(), testkit.Logger(t), RepairOptions{DeleteUnknown: true})
	if !errors.Is(err, broker.ErrNoLeader) {
		t.Errorf("got %v, want ErrNoLeader", err)
	}
	if d.count(`SELECT sum(hashtext(p::text)) FROM outbox_partitions p`) != before {
		t.Error("the repair changed something")
	}
}

// TestAnInterruptedRepairIsSimplyRunAgain: the repair is killed once at each step. One partition is
// lost, one has a hole, and one has messages without rows.
func TestAnInterruptedRepairIsSimplyRunAgain(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	if _, err := outbox.Resize(t.Context(), d.pool, 4); err != nil {
		t.Fatal(err)
	}
	d.write(200)
	d.deleteStream(1)
	d.deleteMessages(2, 1+uint64(d.count(`SELECT min(stream_seq) FROM outbox_messages WHERE partition = 2`)))
	ours := &nats.Msg{Subject: d.b.Config().Prefix + ".3.t1.post.created",
		Header: (&event.Event{ID: "8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3c", OutboxID: 1 << 40}).Headers()}
	d.publish(ours)
	if err := appendPairs(t.Context(), d.pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	killed, died := errors.New("killed"), []string{}
	for err := killed; errors.Is(err, killed); {
		var report RepairReport
		report, err = d.repair(RepairOptions{DeleteUnknown: true, at: func(step string) error {
			if slices.Contains(died, step) {
				return nil
			}
			died = append(died, step)
			return killed
		}})
		if err != nil && !errors.Is(err, killed) {
			t.Fatalf("%+v, %v", report, err)
		}
	}
	want := []string{"compared", "fenced", "declared", "restored", "ended", "closed", "requeued", "recorded", "classified"}
	if !slices.Equal(died, want) {
		t.Errorf("the repair died at %q, want %q", died, want)
	}
	if got := d.healthy("after it was killed often enough"); len(got) != 6 || !slices.Equal(got[1].ReplacedBy, []int{5}) {
		t.Errorf("got %+v", got)
	}
	d.write(10)
	d.once()
}

// TestAPowerCutThatTakesTheEndOfAStreamAndItsMarksLosesNoEvent: the stored tail is then above, at
// or below the stream's end. Only a tail above the end needs a repair. Of the unmarked rows, the
// relay marks those that the stream has and publishes the others again.
func TestAPowerCutThatTakesTheEndOfAStreamAndItsMarksLosesNoEvent(t *testing.T) {
	t.Parallel()
	for name, above := range map[string]int64{"above the end": 5, "at the end": 0, "below the end": -7} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := testkit.NATSProcess(t)
			d := wrote(t, b)
			putBack := d.saved("")
			end := d.count(`SELECT tail_seq FROM outbox_partitions`)
			d.write(20)
			putBack()
			if _, err := d.pool.Exec(t.Context(), `
WITH back AS (UPDATE outbox_partitions SET tail_seq = $1, floor_id = 0 RETURNING partition, tail_seq)
UPDATE outbox_messages m SET processed_at = NULL, stream_seq = NULL, partition = NULL
  FROM back WHERE m.partition = back.partition AND m.stream_seq > back.tail_seq`, end+above); err != nil {
				t.Fatal(err)
			}
			if above > 0 {
				d.refused()
				if got := d.repaired(RepairOptions{})[0]; got.Republish != above || !slices.Equal(got.ReplacedBy, []int{1}) {
					t.Errorf("got %+v, want %d events to be published", got, above)
				}
			}
			d.write(10)
			checkStream(t, t.Context(), d.pool, b)
			d.healthy("after the cut")
		})
	}
}

// TestNoSlotIsPublishedToTwoStreamsAfterAnOldBackup: the database is from before two resizes, and
// the streams between were removed since. So the predecessors of the last partitions are unknown.
func TestNoSlotIsPublishedToTwoStreamsAfterAnOldBackup(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"there", "removed"} {
		t.Run("the first stream is "+first, func(t *testing.T) {
			t.Parallel()
			d := wrote(t, testkit.NATS(t))
			for _, to := range []int{2, 4} {
				if _, err := outbox.Resize(t.Context(), d.pool, to); err != nil {
					t.Fatal(err)
				}
				d.write(20)
			}
			d.deleteStream(1)
			d.deleteStream(2)
			if first == "removed" {
				d.deleteStream(0)
			}
			d.exec(`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL WHERE partition > 2`)
			d.exec(`DELETE FROM outbox_messages WHERE partition IN (1, 2)`)
			d.exec(`DELETE FROM outbox_partitions WHERE partition > 0`)
			d.exec(`UPDATE outbox_partitions SET closing = false, final_seq = NULL, tail_seq = tail_seq - 1, floor_id = 0`)
			before := make(map[string]bool)
			for _, m := range readStream(t, t.Context(), d.b) {
				before[m.ID] = true
			}
			d.repaired(RepairOptions{})
			d.write(60)
			on := make(map[int64]map[int]bool)
			for _, m := range readStream(t, t.Context(), d.b) {
				if before[m.ID] {
					continue
				}
				slot := d.count(`SELECT slot FROM outbox_messages WHERE event_id = $1`, m.ID)
				if on[slot] == nil {
					on[slot] = make(map[int]bool)
				}
				if on[slot][m.partition] = true; len(on[slot]) > 1 {
					t.Errorf("slot %d is published to the partitions %v", slot, slices.Sorted(maps.Keys(on[slot])))
				}
			}
			d.healthy("after the repair")
		})
	}
}

// TestAClosedStreamThatLostItsEndEndsAgain: after a power loss, when the new partitions have
// continued.
func TestAClosedStreamThatLostItsEndEndsAgain(t *testing.T) {
	t.Parallel()
	b := testkit.NATSProcess(t)
	d := wrote(t, b)
	putBack := d.saved(filepath.Join("jetstream", "$G", "streams", "EVENTS-0"))
	left := d.count(`SELECT tail_seq FROM outbox_partitions`)
	d.write(10)
	if _, err := outbox.Resize(t.Context(), d.pool, 2); err != nil {
		t.Fatal(err)
	}
	d.write(10)
	final := d.count(`SELECT final_seq FROM outbox_partitions WHERE partition = 0`)
	putBack()
	got := d.repaired(RepairOptions{})[0]
	if got.Republish != final-1-left || !slices.Equal(got.ReplacedBy, []int{1, 2}) {
		t.Errorf("got %+v, want %d events to be published", got, final-1-left)
	}
	if n := d.count(`SELECT final_seq FROM outbox_partitions WHERE partition = 0`); n != left+1 {
		t.Errorf("the stream ends at %d, want %d", n, left+1)
	}
	d.write(10)
	d.once()
	d.healthy("after the repair")
}

func TestAStreamThatLostItsEndIsContinuedByAnother(t *testing.T) {
	t.Parallel()
	b := testkit.NATSProcess(t)
	d := wrote(t, b)
	putBack := d.saved("")
	left := d.count(`SELECT tail_seq FROM outbox_partitions`)
	d.write(20)
	all := d.count(`SELECT tail_seq FROM outbox_partitions`)
	d.archive()
	putBack()
	d.refused()
	if err := appendPairs(t.Context(), d.pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	if dry := d.previewed(RepairOptions{})[0]; dry.Republish != all-left || dry.Left != uint64(left) {
		t.Errorf("a dry run: %+v, want %d of %d events to be published", dry, all-left, all)
	}
	got := d.repaired(RepairOptions{})[0]
	if got.Republish != all-left || got.Left != uint64(left) || !slices.Equal(got.ReplacedBy, []int{1}) {
		t.Errorf("got %+v, want %d of %d events to be published", got, all-left, all)
	}
	// Readers of the damaged stream reach its end.
	s, err := broker.ReadStream(t.Context(), d.js, b.Config(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if final, err := broker.Closed(t.Context(), d.js, b.Config(), s); err != nil || final != uint64(left)+1 || s.Last != final {
		t.Errorf("the damaged stream ends at %d, its closing message is %d, %v", s.Last, final, err)
	}
	d.write(10)
	checkStream(t, t.Context(), d.pool, b)
	d.healthy("after the repair")
}
