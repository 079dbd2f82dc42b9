package relay

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// wrote is an outbox with some rows, all of them published, and no relay.
func wrote(t *testing.T) (*pgxpool.Pool, *testkit.Broker, jetstream.Stream) {
	t.Helper()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	stop := start(t, newRelay(t, pool, b))
	if err := appendPairs(t.Context(), pool, seeded(t), 100); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, 20*time.Second)
	stop()
	var all []int
	for p := range event.Partitions {
		all = append(all, p)
	}
	for range 2 { // so that what a repair publishes again lies below the floors
		if err := outbox.RaiseFloors(t.Context(), pool, all); err != nil {
			t.Fatal(err)
		}
	}
	return pool, b, streamOf(t, b)
}

func streamOf(t *testing.T, b *testkit.Broker) jetstream.Stream {
	t.Helper()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), b.Config().Stream)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func repair(t *testing.T, pool *pgxpool.Pool, b *testkit.Broker, o RepairOptions) (RepairReport, error) {
	t.Helper()
	return Repair(t.Context(), pool, b.Config(), testkit.Logger(t), o)
}

// goesOn fails unless a relay takes up its work and everything is on the stream once and in order.
func goesOn(t *testing.T, pool *pgxpool.Pool, b *testkit.Broker) {
	t.Helper()
	start(t, newRelay(t, pool, b))
	if err := appendPairs(t.Context(), pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, 20*time.Second)
	checkStream(t, t.Context(), pool, b)
}

func count(t *testing.T, pool *pgxpool.Pool, sql string) (n int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestAHealthyStreamIsLeftAlone(t *testing.T) {
	pool, b, stream := wrote(t)
	report, err := repair(t, pool, b, RepairOptions{})
	if err != nil || !report.Healthy || report.Repaired || report.Messages != count(t, pool, `SELECT count(*) FROM outbox_messages`) {
		t.Errorf("got %+v, %v", report, err)
	}
	info, err := stream.Info(t.Context())
	if err != nil || info.Config.Metadata[broker.MetaGeneration] != "1" {
		t.Errorf("the stream was touched: %v, %v", info.Config.Metadata, err)
	}
	goesOn(t, pool, b)
}

func TestAStreamThatIsGoneIsPublishedAgain(t *testing.T) {
	pool, b, _ := wrote(t)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), b.Config().Stream); err != nil {
		t.Fatal(err)
	}
	// One event was erased: its row is processed and says of no message. Another is only in the archive.
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_messages SET stream_seq = NULL WHERE id = (SELECT max(id) FROM outbox_messages)`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `
		WITH old AS (DELETE FROM outbox_messages WHERE id = (SELECT min(id) FROM outbox_messages) RETURNING *)
		INSERT INTO outbox_messages_archive (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at,
		       attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition)
		SELECT id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, processed_at,
		       attempts, last_error, trace_id, event_id, stream_seq, inserted_at, partition FROM old`); err != nil {
		t.Fatal(err)
	}
	rows := count(t, pool, `SELECT count(*) FROM outbox_messages`) // without the archived one, with the erased one
	dry, err := repair(t, pool, b, RepairOptions{DryRun: true})
	if err != nil || dry.Repaired || !dry.MadeAnew || dry.Republish != rows {
		t.Errorf("a dry run found %+v, %v", dry, err)
	}
	if n := count(t, pool, `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`); n > 0 {
		t.Errorf("a dry run made %d rows pending", n)
	}
	report, err := repair(t, pool, b, RepairOptions{})
	if err != nil || !report.Repaired || report.Generation != 2 || report.Republish != rows {
		t.Fatalf("got %+v, %v", report, err)
	}
	start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, 20*time.Second)
	messages := readStream(t, t.Context(), b)
	if int64(len(messages)) != rows || messages[0].Generation != 2 {
		t.Errorf("%d messages of generation %d: want %d of generation 2", len(messages), messages[0].Generation, rows)
	}
	// Without the erased event everything is as it should be.
	if _, err := pool.Exec(t.Context(), `DELETE FROM outbox_messages WHERE stream_seq IS NULL`); err != nil {
		t.Fatal(err)
	}
	checkStream(t, t.Context(), pool, b)
}

func TestMessagesThatTheStreamLostArePublishedAgain(t *testing.T) {
	pool, b, stream := wrote(t)
	last := stream.CachedInfo().State.LastSeq
	for seq := last - 10; seq <= last; seq++ { // the ends of some partitions
		if err := stream.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	report, err := repair(t, pool, b, RepairOptions{})
	if err != nil || !report.Repaired || report.MadeAnew || report.Republish != 11 || report.Unknown != 0 {
		t.Fatalf("got %+v, %v", report, err)
	}
	goesOn(t, pool, b)
}

// TestAPartitionWhoseLastMessagesWereDeletedGoesOn: somebody erased them, rows first, so that no row says that anything is missing. The relay
// refuses the partition, and only the repair moves its mark back.
func TestAPartitionWhoseLastMessagesWereDeletedGoesOn(t *testing.T) {
	for what, messages := range map[string]string{
		"the last one":  "stream_seq = (SELECT max(stream_seq) FROM outbox_messages WHERE partition = $1)",
		"every message": "true",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			pool, b, stream := wrote(t)
			first, last := stream.CachedInfo().State.FirstSeq, stream.CachedInfo().State.LastSeq
			var partition int
			if err := pool.QueryRow(t.Context(), `SELECT partition FROM outbox_messages WHERE stream_seq NOT IN ($1, $2) GROUP BY partition HAVING count(*) > 1 LIMIT 1`,
				int64(first), int64(last)).Scan(&partition); err != nil {
				t.Fatal(err)
			}
			rows, _ := pool.Query(t.Context(), `DELETE FROM outbox_messages WHERE partition = $1 AND `+messages+` RETURNING stream_seq`, partition)
			seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			if err != nil {
				t.Fatal(err)
			}
			for _, seq := range seqs {
				if err := stream.DeleteMsg(t.Context(), uint64(seq)); err != nil {
					t.Fatal(err)
				}
			}
			dry, err := repair(t, pool, b, RepairOptions{DryRun: true})
			if err != nil || dry.Healthy || dry.Repaired || dry.Behind != 1 {
				t.Errorf("a dry run found %+v, %v", dry, err)
			}
			report, err := repair(t, pool, b, RepairOptions{})
			if err != nil || !report.Repaired || report.MadeAnew || report.Republish != 0 || report.Behind != 1 || report.Generation != 2 {
				t.Fatalf("got %+v, %v", report, err)
			}
			start(t, newRelay(t, pool, b))
			if err := appendTo(t.Context(), pool, partition); err != nil {
				t.Fatal(err)
			}
			awaitDrained(t, t.Context(), pool, 20*time.Second)
			if again, err := repair(t, pool, b, RepairOptions{}); err != nil || !again.Healthy || again.Behind != 0 {
				t.Errorf("after the repair: %+v, %v", again, err)
			}
		})
	}
}

// appendTo appends one event to a partition.
func appendTo(ctx context.Context, pool *pgxpool.Pool, partition int) error {
	for id := int64(1); ; id++ {
		err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
			e := []event.Event{{TenantID: 1, AggregateType: "like", AggregateID: id, Type: event.Created, Payload: []byte(`{}`)}}
			if err := outbox.Append(ctx, tx, e); err != nil {
				return err
			}
			if e[0].Partition != partition {
				return errElsewhere
			}
			return nil
		})
		if !errors.Is(err, errElsewhere) {
			return err
		}
	}
}

var errElsewhere = errors.New("of another partition")

func TestMessagesOfADatabaseThatWentBackAreTakenOffWhenTold(t *testing.T) {
	pool, b, _ := wrote(t)
	// Restored from before its last writes: their rows and the tails' last moves are gone.
	if _, err := pool.Exec(t.Context(), `DELETE FROM outbox_messages WHERE id IN (SELECT id FROM outbox_messages ORDER BY id DESC LIMIT 5)`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE outbox_partitions p SET tail_seq = coalesce((SELECT max(stream_seq) FROM outbox_messages m WHERE m.partition = p.partition), 0)`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `UPDATE follows f SET version = (SELECT count(*) FROM outbox_messages m WHERE m.payload->>'follower_id' = f.follower_id::text AND m.aggregate_id = f.followee_id)
		WHERE EXISTS (SELECT FROM outbox_messages m WHERE m.payload->>'follower_id' = f.follower_id::text AND m.aggregate_id = f.followee_id)`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `DELETE FROM follows f WHERE NOT EXISTS (SELECT FROM outbox_messages m WHERE m.payload->>'follower_id' = f.follower_id::text AND m.aggregate_id = f.followee_id)`); err != nil {
		t.Fatal(err)
	}
	report, err := repair(t, pool, b, RepairOptions{})
	if !errors.Is(err, ErrUnknownMessages) || report.Unknown != 5 || report.Repaired {
		t.Fatalf("got %+v, %v: want ErrUnknownMessages for 5", report, err)
	}
	report, err = repair(t, pool, b, RepairOptions{DeleteUnknown: true})
	if err != nil || !report.Repaired || report.Deleted != 5 {
		t.Fatalf("got %+v, %v", report, err)
	}
	goesOn(t, pool, b)
}

func TestARepairUnderRunningRelaysEndsTheirSessions(t *testing.T) {
	pool, b, stream := wrote(t)
	start(t, newRelay(t, pool, b))
	start(t, newRelay(t, pool, b))
	if err := stream.DeleteMsg(t.Context(), stream.CachedInfo().State.LastSeq/2); err != nil {
		t.Fatal(err)
	}
	if err := appendPairs(t.Context(), pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	report, err := repair(t, pool, b, RepairOptions{})
	if err != nil || !report.Repaired || report.Republish != 1 {
		t.Fatalf("got %+v, %v", report, err)
	}
	if err := appendPairs(t.Context(), pool, seeded(t), 20); err != nil {
		t.Fatal(err)
	}
	awaitDrained(t, t.Context(), pool, 30*time.Second)
	found := 0
	for _, m := range readStream(t, t.Context(), b) {
		if m.Generation == 2 {
			found++
		}
	}
	if found == 0 {
		t.Error("no message of the new generation")
	}
	if again, err := repair(t, pool, b, RepairOptions{}); err != nil || !again.Healthy {
		t.Errorf("after the repair: %+v, %v", again, err)
	}
}

func TestAnInterruptedRepairIsSimplyRunAgain(t *testing.T) {
	pool, b, stream := wrote(t)
	last := stream.CachedInfo().State.LastSeq
	if err := stream.DeleteMsg(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	// Killed behind the fence; the database is of a generation that the stream is not.
	if err := outbox.Fence(t.Context(), pool, 2); err != nil {
		t.Fatal(err)
	}
	if _, err := newRelay(t, pool, b).connect(t.Context()); !errors.Is(err, ErrStreamRefused) {
		t.Fatalf("a relay begins in the middle of a repair: %v", err)
	}
	if report, err := repair(t, pool, b, RepairOptions{}); err != nil || !report.Repaired || report.Republish != 1 {
		t.Fatalf("got %+v, %v", report, err)
	}
	// Killed between the commit and the stream's new generation: the same disagreement, and nothing left to publish again.
	if err := outbox.Fence(t.Context(), pool, 9); err != nil {
		t.Fatal(err)
	}
	if report, err := repair(t, pool, b, RepairOptions{}); err != nil || !report.Repaired || report.Generation != 10 {
		t.Fatalf("got %+v, %v", report, err)
	}
	goesOn(t, pool, b)
}
