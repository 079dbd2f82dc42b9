//go:build faults

package relay

import (
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

func TestNothingIsRepairedWhileAStreamHasNoLeader(t *testing.T) {
	t.Parallel()
	c := testkit.NATSCluster(t, 3)
	d := wrote(t, c.Nodes[0])
	_, others := c.Leader(t, "EVENTS-0")
	for _, b := range others {
		b.Freeze(t)
	}
	js, err := jetstream.New(c.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the leader to notice that it is alone", func() (bool, error) {
		_, err := broker.ReadStream(t.Context(), js, c.Config(), 0)
		return errors.Is(err, broker.ErrNoLeader), nil
	})
	// By its own marks the partition is lost.
	d.exec(`UPDATE outbox_partitions SET tail_seq = tail_seq + 1000`)
	before := d.count(`SELECT sum(hashtext(p::text)) FROM outbox_partitions p`)
	_, err = Repair(t.Context(), d.pool, c.Config(), testkit.Logger(t), RepairOptions{DeleteUnknown: true})
	if !errors.Is(err, broker.ErrNoLeader) {
		t.Errorf("got %v, want ErrNoLeader", err)
	}
	if d.count(`SELECT sum(hashtext(p::text)) FROM outbox_partitions p`) != before {
		t.Error("the repair changed something")
	}
}
