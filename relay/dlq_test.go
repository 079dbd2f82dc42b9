package relay

import (
	"testing"
	"time"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestAMendedMessageOfTheDLQIsPublishedOnceWhenItIsRetried(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	poison := insertRow(t, pool, 7, "not a token", `{"version": 1, "follower_id": 1}`)
	behind := insertRow(t, pool, 7, "edited", `{"version": 1, "follower_id": 2}`)
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET attempts = $1, trace_id = 'trace' WHERE id = $2`,
		outbox.MaxAttempts, poison); err != nil {
		t.Fatal(err)
	}
	start(t, newRelay(t, pool, b))
	d := outbox.NewDLQ(pool, nil)
	testkit.Eventually(t, "the message to be dead", func() (bool, error) {
		n, err := d.Count(t.Context(), outbox.DLQFilter{IDs: []int64{poison}})
		return n == 1, err
	})
	awaitDrained(t, t.Context(), pool, time.Minute) // so that the floor continues to rise
	dead, err := d.Get(t.Context(), 1, poison)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages_dlq SET event_type = 'created' WHERE id = $1`, poison); err != nil {
		t.Fatal(err)
	}
	request := outbox.DLQRequest{DLQFilter: outbox.DLQFilter{IDs: []int64{poison}}, Limit: 1, Actor: "ann"}
	did, err := d.Retry(t.Context(), request)
	if err != nil || len(did) != 1 {
		t.Fatalf("%+v, %v", did, err)
	}
	if again, err := d.Retry(t.Context(), request); err != nil || len(again) != 0 {
		t.Errorf("a second retry: %+v, %v", again, err)
	}
	awaitDrained(t, t.Context(), pool, time.Minute)
	checkStream(t, t.Context(), pool, b)
	got := readStream(t, t.Context(), b)
	if len(got) != 2 || got[0].OutboxID != behind {
		t.Fatalf("on the stream: %+v, want message %d, then the retried one", got, behind)
	}
	if e := got[1]; e.ID != dead.Event.ID || e.OutboxID != did[0].NewID || e.Type != "created" ||
		string(e.Payload) != string(dead.Event.Payload) || !e.OccurredAt.Equal(dead.Event.OccurredAt) || e.TraceParent != "trace" {
		t.Errorf("retried: %+v", e)
	}
}
