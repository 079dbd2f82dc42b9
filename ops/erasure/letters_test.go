package erasure

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/subscribe"
)

// TestDeadLettersAndTheirErrorsAreErased: a subscriber could not handle an event of the author, and
// a consumer neither. Both kept the text, also in the error.
func TestDeadLettersAndTheirErrorsAreErased(t *testing.T) {
	w := newWorld(t)
	w.relay()
	w.consume(w.projections)
	ctx, nc := t.Context(), w.nats.Connect(t)
	fault := errors.New("the index refuses " + w.secret)
	system.Start(t, func(ctx context.Context) error {
		return subscribe.Handle(ctx, nc, "search", "comment.*", func(context.Context, subscribe.Event[event.Comment]) error {
			return subscribe.Permanent(fault)
		}, subscribe.Log(testkit.Logger(t)))
	})
	letters, err := subscribe.HandlerDeadLetters(nc)
	if err != nil {
		t.Fatal(err)
	}
	await := func(n int) (all []subscribe.Letter) {
		t.Helper()
		testkit.Eventually(t, "the subscriber's dead letters", func() (_ bool, err error) {
			all, err = postgres.Collect(letters.List(ctx, "*", 0))
			return len(all) == n, err
		})
		return all
	}
	c := w.comment(tenant, w.author, "10", "", "", w.secret)
	other := w.comment(tenant, "8", "10", "", "", "another author's")
	w.settle(w.projections)
	for _, l := range await(2) { // one of them waits for another attempt, and fails again
		if l.Event.AggregateID == "10" && bytes.Contains(l.Event.Payload, []byte(c.ID)) {
			if err := letters.Retry(ctx, l.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	testkit.Eventually(t, "the retry to fail", func() (bool, error) {
		all, err := postgres.Collect(letters.List(ctx, "*", 0))
		return len(all) == 2 && all[1].ID > 2, err
	})
	// A letter of a consumer, a failed retry of it, and one in the DLQ of the outbox.
	w.exec(w.projections, `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type,
			aggregate_id, event_id, event_type, event_version, headers, payload, error, cause)
		SELECT 'threadcache', 1, 'EVENTS-0', 1, 'comment', 10, $1::text::uuid, 'edited', 1, '{}', $2, $3, $3`, c.ID,
		[]byte(`{"comment_id": "`+c.ID+`", "post_id": "10", "author_id": "`+string(w.author)+`", "body": "`+w.secret+`", "version": 1}`),
		fault.Error())
	w.exec(w.projections, `INSERT INTO consumer_dead_letter_actions (actor, action, dead_letter_id, consumer_name, stream_seq, tenant_id,
			aggregate_type, aggregate_id, event_id, event_type, error)
		SELECT 'ann', 'retry', 1, 'threadcache', 1, 1, 'comment', 10, $1::text::uuid, 'edited', $2`, c.ID, fault.Error())
	w.exec(w.truth, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
			occurred_at, available_at, attempts, last_error, event_id, inserted_at, slot, cause)
		SELECT 1000000, tenant_id, aggregate_type, aggregate_id, 'edited', 1, payload, now(), now(), 11, $1, gen_random_uuid(), now(), slot,
			'the index refuses "…"' FROM outbox_messages WHERE payload ->> 'comment_id' = $2`, fault.Error(), c.ID)

	report, err := w.erase(Options{Wait: time.Minute})
	if err != nil || !report.Done || report.Counts[SubscriberLetters] != 1 || report.Counts[DeadLetters] < 2 {
		t.Fatalf("%+v, %v", report, err)
	}
	all := await(2) // of the other author's comment, and KIND.erased
	for _, l := range all {
		if bytes.Contains(l.Event.Payload, []byte(w.secret)) {
			t.Errorf("left is the letter %+v", l)
		}
	}
	if !bytes.Contains(all[0].Event.Payload, []byte(other.ID)) {
		t.Errorf("left is %s, not the other author's comment", all[0].Event.Payload)
	}
	// The handler's error is its own words in each case: only those about the author's events are
	// gone.
	for _, l := range all {
		if err := letters.Discard(ctx, l.ID); err != nil {
			t.Fatal(err)
		}
	}
	w.gone("after the erasure")
	var cause string
	if err := w.truth.QueryRow(ctx, `SELECT last_error FROM outbox_messages_dlq WHERE id = 1000000`).Scan(&cause); err != nil ||
		cause != `the index refuses "…"` {
		t.Errorf("the DLQ's error is %q, %v", cause, err)
	}
}
