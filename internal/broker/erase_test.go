package broker_test

import (
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// block is the number of sequences per key of the record.
const block = 8192

func record(t *testing.T, s jetstream.JetStream, cfg broker.Config, stream string, seqs ...uint64) {
	t.Helper()
	if err := broker.RecordErased(t.Context(), s, cfg, stream, seqs); err != nil {
		t.Fatal(err)
	}
}

func checkErased(t *testing.T, s jetstream.JetStream, cfg broker.Config, stream string, first, last uint64, want bool) {
	t.Helper()
	if got, err := broker.Erased(t.Context(), s, cfg, stream, first, last); err != nil || got != want {
		t.Errorf("%s, %d to %d: erased %t, %v; want %t", stream, first, last, got, err, want)
	}
}

func TestWhatIsRecordedAsErasedIsLawfullyMissing(t *testing.T) {
	b := testkit.NATS(t)
	s, cfg := js(t, b.Connect(t)), b.Config()
	checkErased(t, s, cfg, "EVENTS-0", 1, 1, false) // before the first erasure
	record(t, s, cfg, "EVENTS-0")
	record(t, s, cfg, "EVENTS-0", 5, 7, 6)
	record(t, s, cfg, "EVENTS-0", 5) // repeated
	var border []uint64
	for seq := uint64(2*block - 3); seq <= 3*block+1; seq++ { // across two borders of blocks
		border = append(border, seq)
	}
	record(t, s, cfg, "EVENTS-0", border...)
	for _, c := range []struct {
		first, last uint64
		want        bool
	}{
		{5, 5, true}, {5, 7, true}, {4, 7, false}, {5, 8, false}, {4, 4, false},
		{2*block - 3, 3*block + 1, true}, {2*block - 1, 2 * block, true}, {2 * block, 2 * block, true}, {3*block - 1, 3*block + 1, true},
		{2*block - 4, 2 * block, false}, {2*block - 3, 3*block + 2, false}, {block, 2 * block, false}, {7, 2*block - 3, false},
		{9 * block, 9 * block, false},
	} {
		checkErased(t, s, cfg, "EVENTS-0", c.first, c.last, c.want)
	}
	checkErased(t, s, cfg, "EVENTS-1", 5, 5, false)
}

// TestRecordersAtOnceForgetNothing: erasures of several partitions, tenants and processes write the
// same keys.
func TestRecordersAtOnceForgetNothing(t *testing.T) {
	b := testkit.NATS(t)
	cfg := b.Config()
	const recorders, each = 8, 40
	var wg sync.WaitGroup
	for r := range recorders {
		s := js(t, b.Connect(t))
		wg.Go(func() {
			for i := range each {
				seq := uint64(block - recorders*each/2 + i*recorders + r) // interleaved, across a border of blocks
				if err := broker.RecordErased(t.Context(), s, cfg, "EVENTS-0", []uint64{seq}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	checkErased(t, js(t, b.Connect(t)), cfg, "EVENTS-0", block-recorders*each/2, block+recorders*each/2-1, true)
}

func TestAProcessWithFewerReplicasLeavesTheRecordAsItIs(t *testing.T) {
	b := testkit.NATSCluster(t, 3)
	s, cfg := js(t, b.Connect(t)), b.Config()
	bucket := "KV_" + cfg.Stream + "-erased"
	for _, c := range []struct{ replicas, want int }{{1, 1}, {3, 3}, {1, 3}} {
		cfg.Replicas = c.replicas
		testkit.Eventually(t, "it is recorded, also while the record moves", func() (bool, error) {
			err := broker.RecordErased(t.Context(), s, cfg, "EVENTS-0", []uint64{uint64(c.replicas)})
			return err == nil, err
		})
		if got := config(t, s, bucket).Replicas; got != c.want {
			t.Errorf("recorded with %d replicas: the record has %d, want %d", c.replicas, got, c.want)
		}
	}
	b.AwaitReplicas(t, bucket)
	var wg sync.WaitGroup // a replicated stream has its own error for a conflict
	for r := range uint64(4) {
		wg.Go(func() {
			for i := range uint64(10) {
				if err := broker.RecordErased(t.Context(), s, cfg, "EVENTS-0", []uint64{10 + 4*i + r}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	checkErased(t, s, cfg, "EVENTS-0", 10, 49, true)
}

func TestEraseTakesWhatItNamesAndRecordsItFirst(t *testing.T) {
	b := testkit.NATS(t)
	s, cfg := js(t, b.Connect(t)), b.Config()
	name := declare(t, s, cfg, whole).Name
	for i := range 6 {
		msg := nats.NewMsg(cfg.Prefix + ".0.t1.follow.created")
		msg.Header.Set(event.HeaderID, "event-"+strconv.Itoa(i+1))
		if _, err := s.PublishMsg(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := s.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteMsg(t.Context(), 5); err != nil { // by somebody else, so without a record
		t.Fatal(err)
	}
	doomed := []broker.ToErase{{Seq: 2, EventID: "event-2"}, {Seq: 3, EventID: "event-9"}, {Seq: 4, EventID: "event-4"},
		{Seq: 5, EventID: "event-5"}, {Seq: 99, EventID: "event-99"}}
	if n, err := broker.Erase(t.Context(), s, cfg, name, doomed); n != 2 || err != nil {
		t.Errorf("erased %d, %v; want 2", n, err)
	}
	if n, err := broker.Erase(t.Context(), s, cfg, name, doomed); n != 0 || err != nil {
		t.Errorf("erased %d again, %v", n, err)
	}
	var left []uint64
	for seq := uint64(1); ; seq++ {
		m, err := broker.Next(t.Context(), s, name, seq)
		if err != nil {
			t.Fatal(err)
		}
		if m == nil {
			break
		}
		seq = m.Seq
		left = append(left, seq)
	}
	if !slices.Equal(left, []uint64{1, 3, 6}) {
		t.Errorf("messages left: %v, want 1, 3 and 6", left)
	}
	for seq := range uint64(7) {
		checkErased(t, s, cfg, name, seq, seq, seq == 2 || seq == 4)
	}
}
