package subscribe_test

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

func heartbeat() event.Event {
	return event.Event{ID: uuid.NewString(), TenantID: event.SystemTenant, AggregateType: event.AggregateHeartbeat, AggregateID: "3",
		Type: event.Sent, Version: 1, OccurredAt: time.Now(), Payload: json.RawMessage(`{"partition": 5, "interval_seconds": 60}`)}
}

func TestHeartbeatsAreForThoseWhoAskForThem(t *testing.T) {
	r := newRig(t, 1)
	pool := r.logged()
	if err := projector.Migrate(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	var follows, beats, others atomic.Int32
	count := func(e *event.Event) {
		switch {
		case e.AggregateType == event.AggregateFollow:
			follows.Add(1)
		case e.AggregateType == event.AggregateHeartbeat && e.Type == event.Sent && e.TenantID == event.SystemTenant:
			beats.Add(1)
		default:
			others.Add(1)
		}
	}
	read := func(ask func(ctx context.Context) error, wantFollows, wantBeats int32) {
		t.Helper()
		follows.Store(0)
		beats.Store(0)
		run := r.start(ask)
		r.await("the events", func() (bool, error) { return follows.Load() >= wantFollows && beats.Load() >= wantBeats, nil })
		if err := run.stop(); err != nil {
			t.Error(err)
		}
		if follows.Load() != wantFollows || beats.Load() != wantBeats || others.Load() > 0 {
			t.Errorf("%d follows, %d heartbeats, %d others, want %d and %d", follows.Load(), beats.Load(),
				others.Load(), wantFollows, wantBeats)
		}
	}
	// a subscriber of heartbeats gets them before the last follow
	r.publish(heartbeat(), follow("1", "2", 1), heartbeat(), follow("1", "2", 2))
	handle := func(name, eventType string) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			return subscribe.Handle(ctx, r.nc, name, eventType, func(_ context.Context, e subscribe.Event[json.RawMessage]) error {
				count(&e.Event)
				return nil
			}, subscribe.Log(testkit.Logger(t)), subscribe.InOrder())
		}
	}
	project := func(name string, opts ...subscribe.Option) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			return projector.Project(ctx, r.nc, pool, name, func(_ context.Context, _ pgx.Tx, batch []event.Event) error {
				for i := range batch {
					count(&batch[i])
				}
				return nil
			}, append(opts, subscribe.Log(testkit.Logger(t)))...)
		}
	}
	read(handle("others", "follow.*"), 2, 0)
	read(handle("any", "heartbeat.*"), 0, 2)
	read(handle("sent", "heartbeat.sent"), 0, 2)
	read(project("all"), 2, 0)
	read(project("both", subscribe.Only("follow", "heartbeat")), 2, 2)
	read(project("beats", subscribe.Only("heartbeat")), 0, 2)
}
