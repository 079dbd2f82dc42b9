package status_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/status"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestMovedCountsWhatWasPublishedAndApplied(t *testing.T) {
	state := func(last uint64, behind int64, unknown string) status.State {
		return status.State{Partitions: []status.Partition{{Partition: 0, LastSeq: last}, {Partition: 1, LastSeq: 7}},
			Consumers: []status.Consumer{{ConsumerLag: consumers.ConsumerLag{Consumer: "c", Messages: behind}, Unknown: unknown}}}
	}
	r := status.Moved(state(100, 50, ""), state(300, 10, ""), 2*time.Second)
	if r.Published != 100 || r.Applied["c"] != 120 {
		t.Errorf("200 published and 240 applied in 2 s: %+v", r)
	}
	if r := status.Moved(state(100, 50, "NATS is unavailable"), state(300, 10, ""), time.Second); len(r.Applied) != 0 {
		t.Errorf("a lag that was unknown counts as applied events: %+v", r)
	}
}

func TestAServerThatIsAwayKeepsItsPassword(t *testing.T) {
	a := status.NewUnavailable("NATS", "nats://u:sesame@a:4222,nats://u:sesame@b:4222", errors.New("no\n route"))
	if a.String() != "NATS is unavailable (nats://a:4222,nats://b:4222): no route" {
		t.Errorf("%s", a)
	}
	if a := status.NewUnavailable("PostgreSQL", "host=x password=sesame", errors.New("no route")); strings.Contains(a.URL, "sesame") {
		t.Errorf("%s", a)
	}
}
