package relay

import (
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// pastOf returns rows of which the earlier part is on a stream of the past.
func pastOf(t *testing.T) (*damaged, *testkit.Past) {
	t.Helper()
	b := testkit.NATSProcess(t)
	d := wrote(t, b)
	p := testkit.NewPast(t, b, b.Config().StreamName(0))
	d.write(60)
	return d, p
}

// repairsNothing fails if a repair that talks to the past's leaders finds anything.
func (d *damaged) repairsNothing(p *testkit.Past, o RepairOptions) {
	d.t.Helper()
	report, err := Repair(d.t.Context(), d.pool, p.Through(d.b).Config(), testkit.Logger(d.t), o)
	if err != nil || !report.Healthy {
		d.t.Errorf("%+v, %v", report, err)
	}
	if n := d.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`); n > 0 {
		d.t.Errorf("%d rows of messages that exist are pending again", n)
	}
	d.write(10)
	checkStream(d.t, d.t.Context(), d.pool, d.b)
}

// TestACatchUpSkipsNothingThatALeaderForgot undoes the last marks. The catch-up then reads messages
// from a leader that knows them only later.
func TestACatchUpSkipsNothingThatALeaderForgot(t *testing.T) {
	for name, forget := range map[string]func(*testkit.Past){
		"the messages":             func(p *testkit.Past) { p.Forget("MSG.GET", 3*readAhead) },
		"the end":                  func(p *testkit.Past) { p.Forget("INFO", 5) },
		"the end and the messages": func(p *testkit.Past) { p.Forget("INFO", 3); p.Forget("MSG.GET", readAhead) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := testkit.NATSProcess(t)
			d := wrote(t, b)
			tail := d.count(`SELECT tail_seq FROM outbox_partitions`)
			p := testkit.NewPast(t, b, b.Config().StreamName(0))
			d.write(60)
			d.exec(`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL WHERE stream_seq > $1`, tail)
			d.exec(`UPDATE outbox_partitions SET tail_seq = $1, floor_id = 0`, tail)
			forget(p)
			start(t, newRelay(t, d.pool, p.Through(b)))
			insertRow(t, d.pool, 1, "created", `{"version": 1}`)
			awaitDrained(t, t.Context(), d.pool, time.Minute)
			if !p.Forgot("INFO") || !p.Forgot("MSG.GET") {
				t.Error("the relay did not ask the leader that forgets")
			}
			checkStream(t, t.Context(), d.pool, b)
		})
	}
}

func jetStream(t *testing.T, b *testkit.Broker) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// TestARelayThatIsNotTheFirstBindsNothing lets another relay bind a partition and publish while
// this one asks for the stream, and answers with the stream of before or after that.
func TestARelayThatIsNotTheFirstBindsNothing(t *testing.T) {
	for name, before := range map[string]bool{"the stream has messages": false, "the stream was empty": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, b := testkit.Postgres(t).Pool(t, postgres.RoleSystem), testkit.NATS(t)
			js := jetStream(t, b)
			if _, err := broker.Declare(t.Context(), js, b.Config(), broker.Partition{LastSlot: event.Slots - 1},
				testkit.Logger(t)); err != nil {
				t.Fatal(err)
			}
			insertRow(t, pool, 1, "created", `{"version": 1}`)
			a := testkit.NewAnswers(t, b)
			w := connected(t, newRelay(t, pool, a.Through(b)))
			var first sync.Once
			a.Answer(func(subject string, body []byte) (answer []byte) {
				if subject != "$JS.API.STREAM.INFO."+b.Config().StreamName(0) {
					return nil
				}
				first.Do(func() {
					if m, err := js.Conn().Request(subject, body, 5*time.Second); err == nil && before {
						answer = m.Data
					}
					stop := start(t, newRelay(t, pool, b))
					awaitDrained(t, t.Context(), pool, time.Minute)
					stop()
				})
				return answer
			})
			if err := w.catchUp(t.Context()); err != nil || w.tail != 1 {
				t.Errorf("tail %d, %v", w.tail, err)
			}
		})
	}
}
