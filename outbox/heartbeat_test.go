package outbox

import (
	"encoding/json"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestHeartbeatsAreOnePerPartitionAndInterval(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	resize(t, pool, event.Slots, "1:0-0<0 2:1-1<0 3:2-2<0 4:3-3<0 5:4-4<0 6:5-5<0 7:6-6<0 8:7-7<0 9:8-8<0 10:9-9<0 11:10-10<0 12:11-11<0 "+
		"13:12-12<0 14:13-13<0 15:14-14<0 16:15-15<0 "+
		"17:16-16<0 18:17-17<0 19:18-18<0 20:19-19<0 21:20-20<0 22:21-21<0 23:22-22<0 24:23-23<0 25:24-24<0 26:25-25<0 27:26-26<0 "+
		"28:27-27<0 29:28-28<0 30:29-29<0 31:30-30<0 32:31-31<0")
	beat := func(interval time.Duration) int64 {
		t.Helper()
		var written atomic.Int64
		var g errgroup.Group
		for range 6 { // relays
			g.Go(func() error {
				n, next, err := Heartbeat(t.Context(), pool, interval)
				written.Add(int64(n))
				if err == nil && (next <= 0 || next > interval) {
					t.Errorf("next after %s, of %s", next, interval)
				}
				return err
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		return written.Load()
	}
	wants := func(what string, got, want int64) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %d heartbeats, want %d", what, got, want)
		}
	}
	wants("the partition that has not closed yet", beat(time.Hour), 1)
	wants("again", beat(time.Hour), 0)
	closeAt(t, pool, 0, 0, 1)
	wants("those behind it", beat(time.Hour), event.Slots)
	wants("these again", beat(time.Hour), 0)
	shift := func(by string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `UPDATE outbox_partitions SET heartbeat_at = heartbeat_at + $1::interval WHERE partition > 30`,
			by); err != nil {
			t.Fatal(err)
		}
	}
	shift("-61 min")
	wants("an hour later", beat(time.Hour), 2)
	shift("1 day")
	wants("behind a server whose clock was ahead", beat(time.Hour), 2)
	wants("at last", beat(time.Hour), 0)

	type row struct {
		Tenant, Slot  int64
		Type, Event   string
		Payload       json.RawMessage
		Partition     int64
		Delayed, Just bool
	}
	rows, _ := pool.Query(t.Context(), `SELECT tenant_id, slot, aggregate_type, event_type, payload, (payload->>'partition')::bigint,
		delayed, occurred_at BETWEEN now() - interval '1 min' AND now()
		FROM outbox_messages ORDER BY id LIMIT 33`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil || len(all) != 33 {
		t.Fatalf("%d rows, %v", len(all), err)
	}
	for i, r := range all {
		var h event.Heartbeat
		if err := json.Unmarshal(r.Payload, &h); err != nil || h != (event.Heartbeat{Partition: int(r.Partition), IntervalSeconds: 3600}) {
			t.Errorf("payload %s: %+v, %v", r.Payload, h, err)
		}
		r.Payload = nil
		// partitions 1 to 32 have one slot each
		want := row{event.SystemTenant, int64(max(i-1, 0)), event.AggregateHeartbeat, event.Sent, nil, int64(i), false, true}
		if d := cmp.Diff(want, r); d != "" {
			t.Errorf("row %d (-want +got):\n%s", i, d)
		}
	}
}
