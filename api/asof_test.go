package api_test

import (
	"testing"
	"time"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

// asOfTest is an API whose relay and consumers the test plays.
type asOfTest struct {
	fixture
	tail int64
}

func (f *asOfTest) set(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := f.system.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// publish does the relay's work for the rows that where names.
func (f *asOfTest) publish(t *testing.T, where string) {
	t.Helper()
	f.tail++
	f.set(t, `WITH m AS (UPDATE outbox_messages SET processed_at = now(), partition = 0, stream_seq = $1 WHERE processed_at IS NULL AND `+
		where+`)
		UPDATE outbox_partitions SET stream = 'EVENTS-0', created = now(), tail_seq = $1`, f.tail)
}

// apply does a consumer's work for all messages of the stream.
func (f *asOfTest) apply(t *testing.T, consumer string) {
	t.Helper()
	f.set(t, `INSERT INTO consumer_offsets AS o (consumer_name, partition_key, last_processed_id, as_of) VALUES ($1, 'EVENTS-0', $2, now())
		ON CONFLICT (consumer_name, partition_key) DO UPDATE SET last_processed_id = $2, as_of = now()`, consumer, f.tail)
}

func (f *asOfTest) now(t *testing.T) (now time.Time) {
	t.Helper()
	if err := f.system.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now
}

// asOf calls look, and returns the as_of of a user's counts (followercounts) or of a thread
// (threadcache).
func (f *asOfTest) asOf(t *testing.T, path string, headers ...string) time.Time {
	t.Helper()
	if err := f.Handler.(*api.Handler).Look(t.Context()); err != nil {
		t.Fatal(err)
	}
	at, err := time.Parse(time.RFC3339Nano, f.want(t, 200, "GET", path, "", headers...).text("as_of"))
	if err != nil {
		t.Fatal(err)
	}
	return at
}

const (
	mutualsPath = "/v1/users/1/mutuals/2"
	threadPath  = "/v1/posts/5/comments"
)

// TestAsOfIsUpToWhenCommittedWritesAreIn goes through the reasons why a projection lacks a
// committed write.
func TestAsOfIsUpToWhenCommittedWritesAreIn(t *testing.T) {
	t.Parallel()
	f := &asOfTest{fixture: open(t)}
	other := "Authorization: Bearer " + f.newToken(t, 2, "other", "read", "write")
	check := func(what string, got, from, before time.Time) {
		t.Helper()
		if got.Before(from) || !got.Before(before) {
			t.Errorf("%s: as_of %s, want from %s and before %s", what, got.Format(time.RFC3339Nano), from.Format(time.RFC3339Nano),
				before.Format(time.RFC3339Nano))
		}
	}
	later := func() time.Time { return f.now(t).Add(time.Hour) }
	epoch := time.Unix(0, 0)
	check("before a consumer has run", f.asOf(t, mutualsPath), epoch, epoch.Add(1))

	f.publish(t, "true")
	f.apply(t, followercounts.Name)
	f.apply(t, threadcache.Name)
	quiet := f.now(t)
	check("all is in", f.asOf(t, mutualsPath), quiet.Add(-time.Millisecond), later())

	// The relays are stopped. The consumers have reached the end of the streams, and confirm it.
	begun := f.now(t)
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	written := f.now(t)
	f.apply(t, followercounts.Name)
	check("a write waits in the outbox", f.asOf(t, mutualsPath), begun.Add(-time.Millisecond), written)
	check("a moment later", f.asOf(t, mutualsPath), begun.Add(-time.Millisecond), written)
	f.publish(t, "true")
	check("it is published, and not applied", f.asOf(t, mutualsPath), begun.Add(-time.Millisecond), written)
	f.apply(t, followercounts.Name)
	f.apply(t, threadcache.Name)
	check("it is applied", f.asOf(t, mutualsPath), written, later())

	// An uncommitted transaction holds nothing back, and its commit does not decrease as_of.
	tx, err := f.owner.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		VALUES (1, 'follow', 2, 'created', '{}')`); err != nil {
		t.Fatal(err)
	}
	open := f.now(t)
	at := f.asOf(t, mutualsPath)
	check("a transaction is open", at, open.Add(-time.Millisecond), later())
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	committed := f.now(t)
	check("it has committed", f.asOf(t, mutualsPath), at, committed)

	// A failing message holds back its tenant, in the projections that want it. So does a message
	// in the DLQ, but not a writer's later time.
	f.set(t, `UPDATE outbox_messages SET attempts = 3, available_at = now() + interval '1 minute' WHERE processed_at IS NULL`)
	for _, what := range []string{"one is retried", "one is in the DLQ"} {
		before := f.now(t)
		check(what, f.asOf(t, mutualsPath), begun, committed)
		check(what+", of another tenant", f.asOf(t, mutualsPath, other), before.Add(-time.Millisecond), later())
		check(what+", of another type", f.asOf(t, threadPath), before.Add(-time.Millisecond), later())
		f.set(t, `WITH gone AS (DELETE FROM outbox_messages WHERE processed_at IS NULL RETURNING *)
			INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
			available_at, attempts, event_id, inserted_at, slot)
			SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, 11, event_id,
			inserted_at, slot FROM gone`)
	}
	f.set(t, `DELETE FROM outbox_messages_dlq`)
	f.set(t, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES (1, 'follow', 2, 'created', '{}', now() + interval '9 days')`)
	before := f.now(t)
	at = f.asOf(t, mutualsPath)
	check("a writer asked for a later time", at, before.Add(-time.Millisecond), later())

	// A resize and a new consumer.
	f.set(t, `UPDATE outbox_partitions SET final_seq = tail_seq, closing = true`)
	f.set(t, `INSERT INTO outbox_partitions (partition, first_slot, last_slot, after, stream, created, tail_seq)
		VALUES (1, 0, 31, '{0}', 'EVENTS-1', now(), 7)`)
	f.set(t, `UPDATE consumer_offsets SET closed = true WHERE consumer_name = $1`, followercounts.Name)
	if got := f.asOf(t, mutualsPath); got != at {
		t.Errorf("the next stream is not begun: as_of %s, want that of before, %s", got, at)
	}
	f.set(t, `DELETE FROM consumer_offsets`)
	f.set(t, `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id) VALUES ($1, 'EVENTS-1', 7)`,
		followercounts.Name)
	before = f.now(t)
	check("a consumer that never had the closed stream", f.asOf(t, mutualsPath), before.Add(-time.Millisecond), later())
}

// TestAsOfOfAConsumerThatLagsIsTheLatestLookThatItHasReached keeps a consumer behind for longer
// than all looks are kept.
func TestAsOfOfAConsumerThatLagsIsTheLatestLookThatItHasReached(t *testing.T) {
	t.Parallel()
	f := &asOfTest{fixture: open(t)}
	f.publish(t, "true")
	f.apply(t, followercounts.Name)
	first := f.asOf(t, mutualsPath)
	f.publish(t, "true")
	for range 700 {
		if err := f.Handler.(*api.Handler).Look(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if at := f.asOf(t, mutualsPath); at != first {
		t.Errorf("as_of %s, want that of the last look that it has reached, %s", at, first)
	}
	f.set(t, `UPDATE outbox_partitions SET tail_seq = $1`, f.tail+1)
	f.apply(t, followercounts.Name) // one message behind
	if at := f.asOf(t, mutualsPath); !at.After(first) {
		t.Errorf("as_of %s does not move from %s", at, first)
	}
}
