package consumers_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestAStreamThatLostItsEndAndGrewAgainIsNotReadOn cuts the power of NATS and takes the end of a
// stream that the consumer has applied. As after the loss of the relay's marks, other events then
// get the lost sequences, and the stream grows past the offset.
func TestAStreamThatLostItsEndAndGrewAgainIsNotReadOn(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("consumer running: %v", running), func(t *testing.T) {
			t.Parallel()
			b := testkit.NATSProcess(t)
			r := newRig(t, testkit.Postgres(t), b, 2)
			in := r.run(r.system, logbook{})
			write := func(followee event.ID, versions ...int64) {
				for _, v := range versions {
					r.publish(follow("1", followee, v))
				}
			}
			write("3", 1, 2, 3, 4, 5)
			r.awaitLag(0)
			disk := b.Copy(t)
			write("3", 6, 7, 8)
			r.awaitLag(0)
			if !running {
				in.stop()
			}
			r.cutPower(b, disk)
			write("4", 1, 2, 3, 4, 5)
			write("3", 6, 7, 8, 9)
			if !running {
				in = r.run(r.system, logbook{})
			}
			r.awaitStuck(in, 1, "message 8 of stream EVENTS-0 was stored at ")
			if l := r.lag(); l.Messages == 0 || l.Seconds <= 0 || !slices.Equal(l.Lost, []string{"EVENTS-0"}) {
				t.Errorf("lag %+v", l)
			}
			if stranded, err := consumers.Stranded(t.Context(), r.system, r.js, r.cfg, name); err != nil || stranded[name] == nil {
				t.Errorf("stranded: %v, %v", stranded, err)
			}
			write("3", 10)
			write("20", 1) // the other partition continues
			testkit.Eventually(t, "the other partition", func() (bool, error) { return len(r.lines()) == 9, nil })
			r.awaitStuck(in, 1, "message 8 of stream EVENTS-0 was stored at ")

			in.stop()
			r.beginAgain()
			in = r.run(r.system, logbook{})
			r.awaitLag(0)
			want := []line{{"1", "4", 1}, {"1", "4", 2}, {"1", "4", 3}, {"1", "4", 4}, {"1", "4", 5}, {"1", "20", 1}}
			for v := range int64(10) {
				want = append(want, line{"1", "3", v + 1})
			}
			r.wantLines(want)
			if err := in.Ready(t.Context()); err != nil {
				t.Errorf("ready: %v", err)
			}
		})
	}
}

// cutPower kills the server and starts it with the files of an earlier time.
func (r *rig) cutPower(b *testkit.Broker, disk string) {
	r.t.Helper()
	b.Kill(r.t)
	if err := errors.Join(os.RemoveAll(b.Dir()), os.CopyFS(b.Dir(), os.DirFS(disk))); err != nil {
		r.t.Fatal(err)
	}
	b.Restart(r.t)
	testkit.Eventually(r.t, "the server to answer again", func() (bool, error) {
		for _, s := range r.open {
			now, err := broker.ReadStream(context.Background(), r.js, r.cfg, s.Number)
			if err != nil {
				return false, err
			}
			r.tails[s.Name] = now.Last
		}
		return true, nil
	})
}

// beginAgain empties the logbook and makes its consumer begin with the oldest events.
func (r *rig) beginAgain() {
	r.t.Helper()
	if err := postgres.InTx(context.Background(), r.owner, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if err := consumers.Forget(context.Background(), tx, name); err != nil {
			return err
		}
		_, err := tx.Exec(context.Background(), `DELETE FROM testlog`)
		return err
	}); err != nil {
		r.t.Fatal(err)
	}
}

// TestOnlyAnotherMessageAtTheOffsetStopsAConsumer restarts a consumer whose offset has no message
// to compare with: it is gone, or an older release has moved the offset and left the time of an
// earlier message.
func TestOnlyAnotherMessageAtTheOffsetStopsAConsumer(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	v := int64(0)
	in := r.run(r.system, logbook{})
	next := func() {
		t.Helper()
		v++
		r.publish(follow("1", "3", v))
		r.awaitLag(0)
	}
	restarted := func(what string) {
		t.Helper()
		in.stop()
		in = r.run(r.system, logbook{})
		next()
		if err := in.Ready(t.Context()); err != nil || len(r.lines()) != int(v) {
			t.Fatalf("%s: %d events are applied, want %d; ready: %v", what, len(r.lines()), v, err)
		}
	}
	const another = `UPDATE consumer_offsets SET stored_at = stored_at + interval '1 microsecond'`
	next()
	next()
	r.erase(0, 2)
	restarted("an erased message") // 3
	testkit.Expire(t, r.stream(0), 0)
	restarted("an expired message") // 4
	in.stop()
	r.exec(another)
	r.exec(`UPDATE consumer_offsets SET stored_id = 3`)
	restarted("an offset of an older release") // 5
	in.stop()
	r.exec(`UPDATE consumer_offsets SET stored_id = NULL, stored_at = NULL`)
	restarted("an offset that no release with the time has moved") // 6
	in.stop()
	v++
	r.publish(follow("1", "3", v))
	r.erase(0, uint64(v))
	in = r.run(r.system, logbook{})
	r.awaitLag(0) // the offset passes over the erased message
	v++
	r.publish(follow("1", "3", v)) // 8
	r.awaitLag(0)
	in.stop()
	r.exec(another)
	r.awaitStuck(r.run(r.system, logbook{}), 1, "message 8 of stream EVENTS-0 was stored at ")
}
