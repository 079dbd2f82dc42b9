//go:build faults

package status_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/doctor"
	"github.com/tidings/tidings/ops/status"
)

// TestReadSeesServersGoAndComeBack keeps its connections, as `tidings status --watch` does.
func TestReadSeesServersGoAndComeBack(t *testing.T) {
	n, pg := testkit.NATSProcess(t), testkit.PostgresProcess(t)
	cfg, pool := n.Config(), pg.DB(t).Pool(t, postgres.RoleSystem)
	cfg.Timeout = 2 * time.Second
	nc := n.Connect(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	src := status.Sources{Truth: pool, Projections: pool, NATS: nc, JetStream: js, Broker: cfg, Consumers: []string{"threadcache"}}
	read := func(when string, unavailable ...string) status.State {
		t.Helper()
		var st status.State
		testkit.Eventually(t, when, func() (bool, error) {
			var err error
			if st, err = status.Read(t.Context(), src); postgres.IsTransient(err) || broker.IsTransient(err) {
				return false, nil // the server became unavailable between two calls
			}
			all := len(st.Unavailable) == len(unavailable)
			for _, server := range unavailable {
				all = all && st.IsUnavailable(server)
			}
			return all, err
		})
		if len(st.Lagging()) < len(unavailable) || len(doctor.Fleet(st)) < len(unavailable) {
			t.Errorf("%s: Lagging or the doctor leaves a server out: %+v", when, st)
		}
		return st
	}
	st := read("both answer")
	if st.Outbox == nil || len(st.Partitions) != 1 || st.Partitions[0].Replicas != 1 || len(st.Consumers) != 1 ||
		st.Consumers[0].Unknown != "" || len(st.Unheld) != 2 {
		t.Errorf("both answer: %+v", st)
	}
	n.Freeze(t)
	if st := read("NATS is unavailable", status.ServerNATS); st.Outbox == nil || st.Partitions[0].Unknown != status.ServerNATS ||
		st.Consumers[0].Unknown == "" {
		t.Errorf("without NATS: %+v", st)
	}
	n.Thaw(t)
	read("NATS is available again")
	pg.Freeze(t)
	st = read("PostgreSQL is unavailable", status.ServerTruth, status.ServerProjections)
	if st.Outbox != nil || len(st.Partitions) != 1 || st.Partitions[0].Unknown != status.ServerTruth || st.Partitions[0].Replicas != 1 ||
		len(st.Consumers) != 0 {
		t.Errorf("without PostgreSQL: %+v", st)
	}
	n.Kill(t)
	read("both are unavailable", status.ServerTruth, status.ServerProjections, status.ServerNATS)
}
