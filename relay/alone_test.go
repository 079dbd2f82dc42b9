package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// TestARepairDeletesNoMessageWhoseRowIsBack gives messages their rows again between the repair's
// look at them and their deletion.
func TestARepairDeletesNoMessageWhoseRowIsBack(t *testing.T) {
	t.Parallel()
	d := wrote(t, testkit.NATS(t))
	d.wentBack(5)
	d.exec(`UPDATE outbox_partitions SET tail_seq = (SELECT max(stream_seq) FROM outbox_messages), floor_id = 0`)
	enough := errors.New("enough")
	var lost []event.Event
	if _, err := Repair(t.Context(), d.pool, d.b.Config(), testkit.Logger(t),
		RepairOptions{Redo: func(_ context.Context, some []event.Event) ([]string, error) {
			lost = append(lost, some...)
			return nil, enough
		}}); !errors.Is(err, enough) || len(lost) != 5 {
		t.Fatalf("%d events are lost, %v: want 5", len(lost), err)
	}
	before := d.stream(0).CachedInfo().State.Msgs
	o := RepairOptions{DeleteUnknown: true, at: func(step string) error {
		if step != "recorded" {
			return nil
		}
		return pgx.BeginFunc(t.Context(), d.pool, func(tx pgx.Tx) error {
			_, _, err := outbox.Redo(t.Context(), tx, lost)
			return err
		})
	}}
	report, err := Repair(t.Context(), d.pool, d.b.Config(), testkit.Logger(t), o)
	if err != nil || len(report.Partitions) != 1 || report.Partitions[0].Deleted != 0 {
		t.Errorf("%+v, %v; want no deletion", report, err)
	}
	if after := d.stream(0).CachedInfo().State.Msgs; after != before {
		t.Errorf("%d messages remain of %d", after, before)
	}
}

// TestOneRepairOrRestoreAtATime freezes a repair that deletes messages without a row. Meanwhile a
// restore gives these messages their rows, but only once the repair has lost its connection. The
// thawed repair then takes no event away.
func TestOneRepairOrRestoreAtATime(t *testing.T) {
	for _, at := range []string{"recorded", "classified"} {
		t.Run("frozen when it has "+at, func(t *testing.T) {
			t.Parallel()
			d := wrote(t, testkit.NATS(t))
			lost := d.rows()
			d.wentBack(5)
			lost -= d.rows()
			d.exec(`UPDATE outbox_partitions SET tail_seq = (SELECT max(stream_seq) FROM outbox_messages), floor_id = 0`)
			redo := RepairOptions{Redo: func(ctx context.Context, lost []event.Event) (moved []string, err error) {
				err = pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
					moved, _, err = outbox.Redo(ctx, tx, lost)
					return err
				})
				return moved, err
			}}
			frozen, thaw, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			go func() {
				freeze := func(step string) error {
					if step == at {
						close(frozen)
						<-thaw
					}
					return nil
				}
				_, err := Repair(t.Context(), d.pool, d.b.Config(), testkit.Logger(t), RepairOptions{DeleteUnknown: true, at: freeze})
				done <- err
			}()
			select {
			case <-frozen:
			case err := <-done:
				t.Fatalf("the repair ended before it had %s: %v", at, err)
			case <-time.After(time.Minute):
				t.Fatalf("the repair has not %s", at)
			}
			if _, err := Repair(t.Context(), d.pool, d.b.Config(), testkit.Logger(t), redo); err == nil ||
				!strings.Contains(err.Error(), "another repair or restore is running") || !strings.Contains(err.Error(), "tidings repair") {
				t.Errorf("a restore beside the repair: %v, want an error that names the repair", err)
			}
			if _, err := d.own.Exec(t.Context(), fmt.Sprintf(`SELECT pg_terminate_backend(pid, 60000) FROM pg_locks
				JOIN pg_database b ON b.oid = database
				WHERE locktype = 'advisory' AND datname = current_database() AND objid = %d`, 0x74647270)); err != nil {
				t.Fatal(err)
			}
			report, err := Repair(t.Context(), d.pool, d.b.Config(), testkit.Logger(t), redo)
			if err != nil || report.Partitions[0].Redone != lost {
				t.Errorf("the restore: %+v, %v, want %d messages redone", report, err, lost)
			}
			close(thaw)
			if err := <-done; err == nil {
				t.Error("the thawed repair went on without its connection")
			}
			d.write(5)
			d.once()
			d.healthy("after both")
		})
	}
}
