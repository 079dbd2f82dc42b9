package consumers_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
)

func heartbeat() event.Event {
	return event.Event{ID: uuid.NewString(), TenantID: event.SystemTenant, AggregateType: event.AggregateHeartbeat, AggregateID: "3",
		Type: event.Sent, Version: 1, OccurredAt: time.Now(), Payload: json.RawMessage(`{"partition": 0, "interval_seconds": 60}`)}
}

// path returns the number of heartbeats that the instance observed, and the sum of their ages.
func (in *instance) path(t *testing.T) (n uint64, age time.Duration) {
	t.Helper()
	families, err := in.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "tidings_path_latency_seconds" {
			h := f.GetMetric()[0].GetHistogram()
			return h.GetSampleCount(), time.Duration(h.GetSampleSum() * float64(time.Second))
		}
	}
	t.Fatal("no metric tidings_path_latency_seconds")
	return 0, 0
}

// TestAHeartbeatIsReadPastAndItsAgeObserved checks that a heartbeat becomes no row and no dead
// letter, and that the metric contains the time that a heartbeat had to wait.
func TestAHeartbeatIsReadPastAndItsAgeObserved(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(heartbeat(), follow("1", "2", 1), heartbeat(), follow("1", "2", 2), heartbeat())
	r.awaitLag(0)
	r.publish(heartbeat())
	last := r.tails[r.cfg.StreamName(0)]
	observed := func(want uint64) (age time.Duration) {
		t.Helper()
		testkit.Eventually(t, "the heartbeats to be observed", func() (bool, error) {
			var n uint64
			n, age = in.path(t)
			return n == want, nil
		})
		return age
	}
	before := observed(4)
	if before <= 0 || before > time.Minute {
		t.Errorf("the ages of four heartbeats add up to %s", before)
	}
	if lag := r.lag(); lag.Messages != 0 || lag.Seconds > 60 {
		t.Errorf("lag after a lone heartbeat: %+v", lag)
	}
	var offset uint64
	if err := r.system.QueryRow(t.Context(), `SELECT last_processed_id FROM consumer_offsets WHERE consumer_name = $1`,
		name).Scan(&offset); err != nil || offset != last {
		t.Errorf("the offset is %d, %v, want %d", offset, err, last)
	}

	if _, err := consumers.Pause(t.Context(), r.system, name, consumers.Paused{Actor: "ann", Reason: "to look"}); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the pause to be noticed",
		func() (bool, error) { return in.metric(t, "tidings_consumer_paused") == 1, nil })
	late := heartbeat()
	r.publish(late)
	r.awaitLag(1)
	waited := time.Since(late.OccurredAt)
	if _, err := consumers.Resume(t.Context(), r.system, name); err != nil {
		t.Fatal(err)
	}
	if age := observed(5) - before; age < waited {
		t.Errorf("a heartbeat waited for %s, the metric has %s", waited, age)
	}

	forged := heartbeat()
	forged.TenantID = 7 // a heartbeat of a tenant
	r.publish(forged, follow("1", "2", 3))
	r.awaitLag(0)
	if n, _ := in.path(t); n != 5 {
		t.Errorf("%d heartbeats are observed, want 5: a tenant's heartbeat must not count", n)
	}
	r.wantLines([]line{{"1", "2", 1}, {"1", "2", 2}, {"1", "2", 3}})
	if n := in.metric(t, "tidings_consumer_parked_total"); n > 0 {
		t.Errorf("%v events are parked", n)
	}
}
