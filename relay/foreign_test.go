package relay

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// measured is a relay whose metrics the test reads.
func measured(t *testing.T, pool *pgxpool.Pool, b *testkit.Broker) (*Relay, *prometheus.Registry) {
	t.Helper()
	reg := prometheus.NewRegistry()
	r, err := New(testConfig(), pool, b.Config(), testkit.Logger(t), reg)
	if err != nil {
		t.Fatal(err)
	}
	return r, reg
}

// metric returns the sum over all labels that contain label.
func metric(t *testing.T, reg *prometheus.Registry, name, label string) (sum float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if label == "" || strings.Contains(fmt.Sprint(m.GetLabel()), label) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// stray publishes messages that no relay wrote to every partition, and outside of them, and returns how many are in partitions.
func stray(t *testing.T, b *testkit.Broker) (n int) {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	publish := func(subject string, header nats.Header) {
		if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: subject, Header: header, Data: []byte("hello")}); err != nil {
			t.Fatal(err)
		}
	}
	prefix := b.Config().Prefix
	for p := range event.Partitions {
		publish(fmt.Sprintf("%s.p%02d.x", prefix, p), nil)
		publish(fmt.Sprintf("%s.p%02d.t1.follow.created", prefix, p), nats.Header{event.HeaderID: {"7"}, event.HeaderSource: {"/orders"}, event.HeaderPrev: {"1"}})
	}
	publish(prefix+".x", nil)
	publish(prefix+".p99.x", nil)
	return 2 * event.Partitions
}

func TestMessagesThatNoRelayWroteAreSkippedAndCounted(t *testing.T) {
	pool, b, stream := wrote(t)
	r, reg := measured(t, pool, b)
	stop := start(t, r)
	strays := stray(t, b)
	if err := appendPairs(t.Context(), pool, seeded(t), 200); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, 20*time.Second)
	checkStream(t, t.Context(), pool, b)
	if err := r.Ready(t.Context()); err != nil {
		t.Errorf("ready: %v", err)
	}
	if got := metric(t, reg, "relay_foreign_messages_total", "foreign"); got == 0 || got > float64(strays) {
		t.Errorf("%v strays counted, want some of %d", got, strays)
	}
	stop()

	stray(t, b) // now they are the last ones, of a relay that starts
	goesOn(t, pool, b)
	stray(t, b)
	want := int64(3 * (strays + 2))
	report, err := repair(t, pool, b, RepairOptions{})
	if err != nil || !report.Healthy || report.Foreign != want || report.Deleted != 0 {
		t.Errorf("repair found %+v, %v: want a healthy stream with %d strays", report, err, want)
	}
	if report, err = repair(t, pool, b, RepairOptions{DeleteForeign: true, DryRun: true}); err != nil || !report.Healthy || report.Deleted != 0 {
		t.Errorf("a dry run: %+v, %v", report, err)
	}
	report, err = repair(t, pool, b, RepairOptions{DeleteForeign: true})
	if err != nil || !report.Healthy || report.Deleted != want {
		t.Errorf("repair took off %+v, %v: want %d strays", report, err, want)
	}
	info, err := stream.Info(t.Context())
	if err != nil || int64(info.State.Msgs) != count(t, pool, `SELECT count(*) FROM outbox_messages`) {
		t.Errorf("%d messages are left of %d rows, %v", info.State.Msgs, count(t, pool, `SELECT count(*) FROM outbox_messages`), err)
	}
	goesOn(t, pool, b)
}

func lastSeq(t *testing.T, stream jetstream.Stream) uint64 {
	t.Helper()
	info, err := stream.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return info.State.LastSeq
}

// again publishes copies of messages that the stream holds, headers and all.
func again(t *testing.T, b *testkit.Broker, stream jetstream.Stream, seqs ...uint64) {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range seqs {
		raw, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			t.Fatal(err)
		}
		m := &nats.Msg{Subject: raw.Subject, Header: maps.Clone(raw.Header), Data: raw.Data}
		for name := range m.Header {
			if strings.HasPrefix(name, "Nats-") {
				m.Header.Del(name) // the duplicate check and the tail check are the server's
			}
		}
		if _, err := js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheSameEventTwiceIsKeptOnce(t *testing.T) {
	pool, b, stream := wrote(t)
	r, reg := measured(t, pool, b)
	stop := start(t, r)
	last := lastSeq(t, stream)
	if _, err := pool.Exec(t.Context(), `
		WITH old AS (DELETE FROM outbox_messages WHERE stream_seq = 1 RETURNING *)
		INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at,
		       attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at,
		       attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition FROM old`); err != nil {
		t.Fatal(err)
	}
	again(t, b, stream, 1, last, last, last-1) // the first of them is archived
	if err := appendPairs(t.Context(), pool, seeded(t), 200); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, 20*time.Second)
	stop()
	if got := metric(t, reg, "relay_foreign_messages_total", "duplicate"); got != 4 {
		t.Errorf("%v duplicates counted, want 4", got)
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_messages WHERE stream_seq > `+fmt.Sprint(last)+` AND stream_seq <= `+fmt.Sprint(last+4)); n > 0 {
		t.Errorf("%d rows name the copy of their message", n)
	}
	if d := inspect(t, t.Context(), pool, b); d.Duplicates != 3 || d.Unknown != 2 || d.Unmarked+d.Pending+d.FalseMarks+d.Missing > 0 || d.Gaps > 4 { // inspect does not know the archived one; a copy names what the first one followed
		t.Errorf("want 3 duplicates, 2 messages of the archived row and no other damage: %+v", d)
	}
	// Repair says the same, and a repair for another reason does not move the rows to the copies.
	report, err := repair(t, pool, b, RepairOptions{})
	if err != nil || !report.Healthy || report.Duplicates != 4 {
		t.Errorf("repair found %+v, %v: want a healthy stream with 4 duplicates", report, err)
	}
	if err := stream.DeleteMsg(t.Context(), last/2); err != nil {
		t.Fatal(err)
	}
	if report, err = repair(t, pool, b, RepairOptions{}); err != nil || !report.Repaired || report.Republish != 1 || report.Duplicates != 4 {
		t.Errorf("repair: %+v, %v", report, err)
	}
	start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, 20*time.Second)
	if d := inspect(t, t.Context(), pool, b); d.Unmarked+d.Pending+d.FalseMarks+d.Missing > 0 || d.Gaps > 5 {
		t.Errorf("after the repair: %+v", d)
	}
}

func TestAMessageOfALostRowStillStopsItsPartition(t *testing.T) {
	pool, b, stream := wrote(t)
	if _, err := pool.Exec(t.Context(), `DELETE FROM outbox_messages WHERE stream_seq = 1`); err != nil {
		t.Fatal(err)
	}
	r, reg := measured(t, pool, b)
	start(t, r)
	again(t, b, stream, 1)
	if err := appendPairs(t.Context(), pool, seeded(t), 100); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "the partition to be stuck", func() (bool, error) {
		return metric(t, reg, "outbox_partitions_stuck", "") == 1, nil
	})
}

// TestARunningRelayNoticesThatItsStreamIsGone has nothing to publish: only a look tells.
func TestARunningRelayNoticesThatItsStreamIsGone(t *testing.T) {
	for what, replace := range map[string]func(t *testing.T, js jetstream.JetStream, b *testkit.Broker){
		"deleted": func(*testing.T, jetstream.JetStream, *testkit.Broker) {},
		"made anew": func(t *testing.T, js jetstream.JetStream, b *testkit.Broker) {
			if _, err := broker.EnsureStream(t.Context(), js, b.Config()); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			b := testkit.NATS(t)
			r, reg := measured(t, pool, b)
			start(t, r)
			if err := appendPairs(t.Context(), pool, seeded(t), 20); err != nil {
				t.Fatal(err)
			}
			awaitDrained(t, t.Context(), pool, 20*time.Second)
			js, err := jetstream.New(b.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := js.DeleteStream(t.Context(), b.Config().Stream); err != nil {
				t.Fatal(err)
			}
			replace(t, js, b)
			testkit.Eventually(t, 15*time.Second, "the relay to say so", func() (bool, error) {
				err := r.Ready(context.Background())
				stuck, refused := metric(t, reg, "outbox_partitions_stuck", ""), metric(t, reg, "relay_stream_refused", "")
				if err == nil || !strings.Contains(err.Error(), "tidings repair stream") || stuck != event.Partitions || refused != 1 {
					return false, fmt.Errorf("ready: %v, stuck: %v, refused: %v", err, stuck, refused)
				}
				return true, nil
			})
			if report, err := repair(t, pool, b, RepairOptions{}); err != nil || !report.Repaired {
				t.Fatal(report, err)
			}
			awaitDrained(t, t.Context(), pool, 20*time.Second)
			testkit.Eventually(t, 15*time.Second, "the relay to be ready", func() (bool, error) {
				return r.Ready(context.Background()) == nil && metric(t, reg, "outbox_partitions_stuck", "") == 0 && metric(t, reg, "relay_stream_refused", "") == 0, nil
			})
			checkStream(t, t.Context(), pool, b)
		})
	}
}
