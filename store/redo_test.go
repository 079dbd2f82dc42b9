package store

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
)

// lostReview is the event of a review that the truth has lost.
func lostReview(t *testing.T, outboxID int64) event.Event {
	t.Helper()
	at := event.Time{Time: time.Now().UTC().Truncate(time.Microsecond)}
	e, err := ChildEvent(kinds.Builtin().Children["review"], &State[event.Child]{TenantID: 1, Object: event.Child{
		ID: "01a20a2e-ca7d-7255-91a9-86f6e7a7da30", Parent: "5", AuthorID: "7", Body: "lost", Attributes: json.RawMessage(`{"rating":4}`),
		AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: 1, CreatedAt: at, UpdatedAt: at, Actor: "tester"}})
	if err != nil {
		t.Fatal(err)
	}
	e.ID, e.Type, e.OutboxID, e.OccurredAt = "8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3c", event.Created, outboxID, at.Time
	return e
}

func TestAnEventWithItsRowIsNotRedoneAgain(t *testing.T) {
	t.Parallel()
	system := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	s, lost := New(system, nil), []event.Event{lostReview(t, 1)}
	type state struct{ Rows, Requeued, Version int64 }
	for _, when := range []string{"first", "again"} {
		moved, overtaken, err := s.RedoFromStream(t.Context(), kinds.Builtin(), lost, "restore")
		if err != nil || len(moved) > 0 || overtaken > 0 {
			t.Errorf("%s: moved %v, overtaken %d, %v", when, moved, overtaken, err)
		}
		var got state
		if err := system.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM outbox_messages), (SELECT count(*) FROM outbox_requeued),
			(SELECT max(version) FROM children)`).Scan(&got.Rows, &got.Requeued, &got.Version); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(state{1, 0, 1}, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", when, diff)
		}
	}
}

// The author's other review is committed while the redo waits for its place.
func TestALostReviewLosesToOneThatIsBeingWritten(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	system, owner := db.Pool(t, postgres.RoleSystem), db.Pool(t, postgres.RoleOwner)
	tx, err := owner.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `INSERT INTO children_review (tenant_id, child_id, object_id, author_id, body, attributes,
		moderation_state) VALUES (1, gen_random_uuid(), 5, 7, 'new', '{"rating":1}', 'NONE')`); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, overtaken, err := New(system, nil).RedoFromStream(t.Context(), kinds.Builtin(), []event.Event{lostReview(t, 1)}, "restore")
		if err != nil || overtaken != 1 {
			t.Errorf("overtaken %d, %v", overtaken, err)
		}
	})
	testkit.Eventually(t, "the redo to wait for the place", func() (waits bool, err error) {
		return waits, owner.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waits)
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	wg.Wait()
	var lost, states string
	if err := owner.QueryRow(t.Context(), `SELECT (SELECT author_state || version FROM children WHERE body = 'lost'),
		string_agg(event_type || (payload ->> 'version'), ' ' ORDER BY id) FROM outbox_messages`).Scan(&lost, &states); err != nil {
		t.Fatal(err)
	}
	if lost != "DELETED2" || states != "created1 edited2" {
		t.Errorf("the lost review is %s, its events are %s", lost, states)
	}
}

// TestLostChildrenOfAPartitionedKindAreRedone has a child that is gone, one that the truth has at
// an earlier version, and one that it has at a later one.
func TestLostChildrenOfAPartitionedKindAreRedone(t *testing.T) {
	t.Parallel()
	system := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	set := testkit.Kinds(t, `children: {note: {plural: notes, parent: post, partitions: 4}}`)
	for _, made := range catalog.Truth.MakeTables(set) {
		if _, err := system.Exec(t.Context(), made.SQL, made.Args...); err != nil {
			t.Fatal(made.What, err)
		}
	}
	s := New(system, nil)
	note := func(n, version int64, body string) event.Event {
		at := event.Time{Time: time.Now().UTC().Truncate(time.Microsecond)}
		e, err := ChildEvent(set.Children["note"], &State[event.Child]{TenantID: 1, Object: event.Child{
			ID: fmt.Sprintf("01a20a2e-ca7d-7255-91a9-%012d", n), Parent: event.IDOf(n), AuthorID: "7", Body: body,
			AuthorState: event.AuthorActive, ModerationState: event.ModerationNone, Version: version, CreatedAt: at, UpdatedAt: at,
			Actor: "tester"}})
		if err != nil {
			t.Fatal(err)
		}
		e.OccurredAt = at.Time
		return e
	}
	redo := func(want int, events ...event.Event) {
		t.Helper()
		if overtaken, err := s.RedoFromHistory(t.Context(), set, events, "restore"); err != nil || overtaken != want {
			t.Fatalf("overtaken %d, want %d, %v", overtaken, want, err)
		}
	}
	redo(0, note(1, 1, "first"), note(2, 5, "later"))
	redo(1, note(3, 1, "lost"), note(1, 2, "edited"), note(2, 3, "earlier"))
	rows, _ := system.Query(t.Context(), `SELECT body || version FROM children_note ORDER BY child_id`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if diff := cmp.Diff([]string{"edited2", "later6", "lost1"}, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}
