package consumers_test

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/testkit"
)

// inPast returns a stream with five applied events, of which the past has three.
func inPast(t *testing.T) (*rig, *testkit.Past, jetstream.JetStream) {
	t.Helper()
	b := testkit.NATSProcess(t)
	r := newRig(t, testkit.Postgres(t), b)
	in := r.run(r.system, logbook{})
	r.publish(follow("1", "3", 1), follow("1", "3", 2), follow("1", "3", 3))
	r.awaitLag(0)
	p := testkit.NewPast(t, b, r.cfg.StreamName(0))
	js, err := jetstream.New(p.Through(b).Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	r.publish(follow("1", "3", 4), follow("1", "3", 5))
	r.awaitLag(0)
	in.stop()
	return r, p, js
}

// TestAConsumerWaitsForALeaderThatForgets starts a consumer while a leader does not know the
// message at its offset, or not the messages behind it.
func TestAConsumerWaitsForALeaderThatForgets(t *testing.T) {
	for verb, behind := range map[string]bool{"INFO": false, "MSG.GET": true} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			r, p, js := inPast(t)
			want := []line{{"1", "3", 1}, {"1", "3", 2}, {"1", "3", 3}, {"1", "3", 4}, {"1", "3", 5}}
			if behind {
				r.publish(follow("1", "3", 6), follow("1", "3", 7))
				want = append(want, line{"1", "3", 6}, line{"1", "3", 7})
			}
			p.Forget(verb, 12)
			in := r.runWith(config(), js, r.system, logbook{})
			testkit.Eventually(t, "the consumer to be ready behind a leader that knows everything", func() (bool, error) {
				if in.metric(t, "tidings_consumer_partitions_stuck") > 0 {
					t.Fatalf("the consumer believed the leader: %v", in.Ready(t.Context()))
				}
				return p.Forgot(verb) && len(r.lines()) == len(want), in.Ready(t.Context())
			})
			r.publish(follow("1", "3", int64(len(want))+1))
			r.awaitLag(0)
			r.wantLines(append(want, line{"1", "3", int64(len(want)) + 1}))
		})
	}
}
