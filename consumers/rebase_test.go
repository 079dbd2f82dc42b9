package consumers_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestARebaseLeavesConsumersThatHaveSomethingLeftToRead checks that consumers first read the rest
// of a stream that lost its end, because a repair does not publish the rest again.
func TestARebaseLeavesConsumersThatHaveSomethingLeftToRead(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	if _, err := pool.Exec(t.Context(), `INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id)
		VALUES ('behind', 'EVENTS-0', 4), ('there', 'EVENTS-0', 5), ('ahead', 'EVENTS-0', 9), ('ahead', 'EVENTS-1', 2)`); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second call changes nothing
		if err := consumers.Rebase(t.Context(), pool, "EVENTS-0", 5,
			broker.Stream{Name: "EVENTS-2", Created: time.Unix(1, 0)}); err != nil {
			t.Fatal(err)
		}
	}
	rows, _ := pool.Query(t.Context(), `SELECT consumer_name || ' ' || partition_key || ' ' || last_processed_id || ' ' || closed
		FROM consumer_offsets ORDER BY 1`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"ahead EVENTS-0 9 true", "ahead EVENTS-1 2 false", "ahead EVENTS-2 0 false", "behind EVENTS-0 4 false",
		"there EVENTS-0 5 true", "there EVENTS-2 0 false"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestAReaderAtTheNumberOfTheClosingMessageStops has an offset that is one message above the
// remaining stream. A repair cannot see the offsets of other databases, so the closing message gets
// the number of the offset.
func TestAReaderAtTheNumberOfTheClosingMessageStops(t *testing.T) {
	r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
	in := r.run(r.system, logbook{})
	r.publish(follow("1", "3", 1), follow("2", "3", 1))
	r.awaitLag(0)
	in.stop()
	r.exec(`UPDATE consumer_offsets SET last_processed_id = last_processed_id + 1`)
	r.close(0)
	r.declare(broker.Partition{Number: 1, FirstSlot: 0, LastSlot: 31, After: []int{0}})
	r.publish(follow("1", "3", 2))
	r.awaitStuck(r.run(r.system, logbook{}), 1, "its closing message is 3, and the offset is 3")
}

// TestABatchIsNotAppliedAfterItsOffsetHasChanged changes the offset between the reading of a batch
// and its transaction.
func TestABatchIsNotAppliedAfterItsOffsetHasChanged(t *testing.T) {
	for what, change := range map[string]string{
		"another instance has moved it": `last_processed_id = last_processed_id + 1`,
		"it belongs to another stream":  `stream_created = now()`,
		"a repair has closed it":        `closed = true`,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testkit.Postgres(t), testkit.NATS(t))
			in := r.run(r.system, logbook{})
			r.publish(follow("1", "3", 1))
			r.awaitLag(0)
			err := postgres.InTx(t.Context(), r.owner, pgx.TxOptions{}, func(tx pgx.Tx) error {
				if _, err := tx.Exec(t.Context(), `UPDATE consumer_offsets SET `+change); err != nil {
					return err
				}
				r.publish(follow("1", "3", 2))
				r.awaitOffsetLock()
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			in.stop() // the batch in hand has ended
			r.wantLines([]line{{"1", "3", 1}})
		})
	}
}
