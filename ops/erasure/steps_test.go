package erasure

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// editByAuthor edits a comment as its author.
func (w *world) editByAuthor(c event.Child, body string) {
	w.t.Helper()
	out, err := w.store.EditChildren(w.t.Context(), tenant, commentKind,
		[]store.ChildEdit{{Meta: store.Meta{Actor: w.user()}, ID: c.ID, Body: &body}})
	if err != nil || out[0].Err != nil {
		w.t.Fatal(err, out)
	}
}

// TestAnErasureDeletesNoMessageThatSomebodyHasToRead stops the relay, and then the consumers.
func TestAnErasureDeletesNoMessageThatSomebodyHasToRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stopRelay := w.relay()
	stopConsumers := w.consume(w.projections)
	c := w.comment(tenant, w.author, "10", "", "", w.secret)
	w.settle(w.projections)
	waits := func(whom string) {
		t.Helper()
		report, err := w.erase(Options{})
		if !errors.Is(err, ErrUnfinished) || len(report.Waiting) == 0 || !strings.Contains(report.Waiting[0], whom) {
			t.Errorf("without %s: %+v, %v", whom, report, err)
		}
		if m, err := broker.Next(t.Context(), w.js, w.newest(), 1); err != nil || m == nil || m.Seq != 1 {
			t.Errorf("without %s the first message is gone: %+v, %v", whom, m, err)
		}
	}
	stopRelay()
	w.edit(c, "second "+w.secret)
	waits("the relay")
	stopConsumers()
	w.relay()
	system.AwaitPublished(t, w.truth)
	waits("archiver")
}

// TestAMessageThatComesAfterItsErasureIsErasedToo erases a comment that its author wrote with a key
// and edited, and then again when an old text has come late.
func TestAMessageThatComesAfterItsErasureIsErasedToo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relay()
	w.consume(w.projections)
	c := w.comment(tenant, w.author, "10", "", "key", w.secret)
	w.editByAuthor(c, "second "+w.secret)
	w.settle(w.projections)
	if report, err := w.erase(Options{Wait: time.Minute}); err != nil || !report.Done || report.Counts[Keys] != 1 {
		t.Fatalf("%+v, %v", report, err)
	}
	w.gone("after the erasure")
	c.Body, c.Version, c.Actor = "late "+w.secret, 2, "sql"
	payload, err := c.Encode(commentKind.Names())
	if err != nil {
		t.Fatal(err)
	}
	w.exec(w.truth, appendSQL, "10", event.Edited, string(payload))
	w.settle(w.projections)
	if report, err := w.erase(Options{Wait: time.Minute}); err != nil || !report.Done || report.Counts[Children] != 1 {
		t.Fatalf("the late text: %+v, %v", report, err)
	}
	w.gone("after the second erasure")
	w.settle(w.projections)
	w.equal("after the second erasure", w.projections)
	if r, err := relay.Repair(t.Context(), w.truth, w.nats.Config(), testkit.Logger(t),
		relay.RepairOptions{DryRun: true}); err != nil || !r.Healthy {
		t.Errorf("%+v, %v: stream and database disagree", r, err)
	}
}

func TestAnErasureWithoutItsLeaseChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.comment(tenant, w.author, "10", "", "", w.secret)
	lost := errors.New("lost")
	deps := w.deps()
	deps.Fence = func(context.Context, pgx.Tx) error { return lost }
	report, err := Run(t.Context(), deps, Options{TenantID: tenant, AuthorID: w.author, Actor: "officer"})
	if !errors.Is(err, lost) || report.Runs != 0 {
		t.Errorf("%+v, %v", report, err)
	}
	if all, err := List(t.Context(), w.truth, nil, 10); err != nil || len(all) > 0 {
		t.Errorf("recorded are %+v, %v", all, err)
	}
	if got, err := w.store.GetChild(t.Context(), tenant, commentKind, c.ID); err != nil || got.Body != c.Body {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestEachPartitionTellsSubscribersOfAnErasure resizes the partitions after they had the event: the
// new ones need it too.
func TestEachPartitionTellsSubscribersOfAnErasure(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.relay()
	w.consume(w.projections)
	w.comment(tenant, w.author, "10", "", "", w.secret)
	w.settle(w.projections)
	resized := false
	report, err := w.erase(Options{Wait: time.Minute, at: func(step string) error {
		if step != "telling subscribers" || resized {
			return nil
		}
		resized = true
		if _, err := outbox.Resize(t.Context(), w.truth, 2); err != nil {
			return err
		}
		testkit.Eventually(t, "the old partition is closed", func() (bool, error) {
			all, err := outbox.Partitions(t.Context(), w.truth)
			return len(outbox.Active(all)) == 2, err
		})
		return nil
	}})
	if err != nil || !report.Done {
		t.Fatalf("%+v, %v", report, err)
	}
	w.settle(w.projections)
	rows, _ := w.truth.Query(t.Context(), `SELECT partition FROM outbox_messages WHERE tenant_id = $1 AND aggregate_type = 'person'
		AND event_type = 'erased' AND payload ->> 'person_id' = $2 AND stream_seq IS NOT NULL
		AND id > (SELECT max(id) FROM outbox_messages WHERE aggregate_type = 'comment') ORDER BY 1`, tenant, w.author)
	told, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil || !slices.Contains(told, 1) || !slices.Contains(told, 2) {
		t.Errorf("the partitions %v have the event after those of the person, %v", told, err)
	}
}
