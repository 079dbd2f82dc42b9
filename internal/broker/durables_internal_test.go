package broker

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"
)

// TestADurableSaysWhetherSomebodyServesIt has a consumer in each state. Its server's clock is a day
// ahead of ours.
func TestADurableSaysWhetherSomebodyServesIt(t *testing.T) {
	now := time.Now().Add(24 * time.Hour)
	ago := func(d time.Duration) *time.Time { at := now.Add(-d); return &at }
	long, short := IdleSeconds*time.Second+time.Second, time.Second
	for name, c := range map[string]struct {
		info jetstream.ConsumerInfo
		want Durable
	}{
		"nothing waits": {jetstream.ConsumerInfo{AckFloor: jetstream.SequenceInfo{Stream: 7, Last: ago(long)}},
			Durable{State: CaughtUp, Idle: IdleSeconds + 1, Floor: 7}},
		"events wait, and nobody asks for them": {
			jetstream.ConsumerInfo{NumPending: 3, AckFloor: jetstream.SequenceInfo{Last: ago(long)}},
			Durable{State: Unserved, Idle: IdleSeconds + 1, Behind: 3}},
		"nobody ever asked": {jetstream.ConsumerInfo{NumPending: 3, Delivered: jetstream.SequenceInfo{Stream: 4}},
			Durable{State: Unserved, Idle: 2 * IdleSeconds, Behind: 3, Floor: 4}},
		"somebody has events in hand, and is dead": {jetstream.ConsumerInfo{NumAckPending: 2,
			Delivered: jetstream.SequenceInfo{Stream: 9, Last: ago(long)}, AckFloor: jetstream.SequenceInfo{Stream: 7}},
			Durable{State: Unserved, Idle: IdleSeconds + 1, Unacked: 2, Floor: 7}},
		"somebody asks": {jetstream.ConsumerInfo{NumPending: 3, NumWaiting: 1, Delivered: jetstream.SequenceInfo{Last: ago(long)}},
			Durable{State: Working, Idle: IdleSeconds + 1, Behind: 3, Waiting: 1}},
		"NATS pushes to somebody": {
			jetstream.ConsumerInfo{NumPending: 3, PushBound: true, Delivered: jetstream.SequenceInfo{Last: ago(long)}},
			Durable{State: Working, Idle: IdleSeconds + 1, Behind: 3, Waiting: 1}},
		"between two pulls": {jetstream.ConsumerInfo{NumPending: 3, Delivered: jetstream.SequenceInfo{Last: ago(long)},
			AckFloor: jetstream.SequenceInfo{Last: ago(short)}}, Durable{State: Working, Idle: 1, Behind: 3}},
		"it repeats a few": {jetstream.ConsumerInfo{NumAckPending: ManyRedelivered, NumRedelivered: ManyRedelivered,
			Delivered: jetstream.SequenceInfo{Last: ago(short)}},
			Durable{State: Working, Idle: 1, Unacked: ManyRedelivered, Redelivered: ManyRedelivered}},
		"it repeats many": {jetstream.ConsumerInfo{NumAckPending: 20, NumRedelivered: ManyRedelivered + 1,
			Delivered: jetstream.SequenceInfo{Last: ago(short)}},
			Durable{State: Redelivers, Idle: 1, Unacked: 20, Redelivered: ManyRedelivered + 1}},
	} {
		c.info.Name, c.info.TimeStamp, c.info.Created = "mailer", now, now.Add(-2*IdleSeconds*time.Second)
		c.want.Name, c.want.Stream, c.want.Last = "mailer", "EVENTS-0", 9
		if diff := cmp.Diff(c.want, durableOf(&c.info, "EVENTS-0", 9)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
