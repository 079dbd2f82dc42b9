package relay

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// TestOneRepairOrRestoreAtATime freezes a repair that deletes messages without a row. Meanwhile a restore gives these
// messages their rows, but only once the repair has lost its connection. The thawed repair then takes no event away.
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
