package broker

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// TestOnlyALeaderDescribesAStream has the answers of a leader and of a replica, which nats-server
// allows in the first seconds of a replica and during an election. A replica lists its leader among
// the others.
func TestOnlyALeaderDescribesAStream(t *testing.T) {
	peer := func(name string) *jetstream.PeerInfo {
		return &jetstream.PeerInfo{Name: name, Current: true, Active: time.Second}
	}
	info := &jetstream.StreamInfo{
		Config:  jetstream.StreamConfig{Name: "EVENTS-0", Replicas: 3, Metadata: map[string]string{MetaSlots: "0-31"}},
		Cluster: &jetstream.ClusterInfo{Name: "c", Leader: "n0", Replicas: []*jetstream.PeerInfo{peer("n1"), peer("n2")}}}
	cfg := Config{Stream: "EVENTS"}
	if s, err := describe(cfg, info); err != nil || s.Leader != "n0" {
		t.Errorf("a leader: %+v, %v", s, err)
	}
	info.Cluster.Replicas = []*jetstream.PeerInfo{peer("n0"), peer("n2")}
	if s, err := describe(cfg, info); !errors.Is(err, ErrNoLeader) {
		t.Errorf("a replica: %+v, %v", s, err)
	}
}
