package relay

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

func TestACheckSaysOfEachPartitionWhetherItsStreamIsTheOneThatIsKnown(t *testing.T) {
	type damage struct {
		do      func(t *testing.T, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config)
		refused string // part of the expected error; "" if there is none
	}
	exec := func(sql string) func(*testing.T, *pgxpool.Pool, jetstream.JetStream, broker.Config) {
		return func(t *testing.T, pool *pgxpool.Pool, _ jetstream.JetStream, _ broker.Config) {
			if _, err := pool.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(t *testing.T, _ *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config) {
		if err := js.DeleteStream(t.Context(), cfg.StreamName(0)); err != nil {
			t.Fatal(err)
		}
	}
	for name, d := range map[string]damage{
		"nothing happened":   {func(*testing.T, *pgxpool.Pool, jetstream.JetStream, broker.Config) {}, ""},
		"the stream is gone": {remove, "is gone"},
		"the stream was recreated": {func(t *testing.T, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config) {
			remove(t, pool, js, cfg)
			if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: 31}, testkit.Logger(t)); err != nil {
				t.Fatal(err)
			}
		}, "was made at"},
		"the stream ends before the marks": {exec(`UPDATE outbox_partitions SET tail_seq = 1000`), "ends at 1, its marks at 1000"},
		"the database is new and the stream is not": {exec(`UPDATE outbox_partitions SET stream = NULL, created = NULL, tail_seq = 0`),
			"another database"},
		"a repair was interrupted": {exec(`UPDATE outbox_partitions SET created = 'epoch', closing = true`),
			"interrupted"},
	} {
		t.Run(name, func(t *testing.T) {
			pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
			b := testkit.NATS(t)
			js, err := jetstream.New(b.Connect(t))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := Check(t.Context(), pool, js, b.Config()); err != nil || len(got) != 1 || got[0].Err != nil ||
				!got[0].Active || got[0].Stream != nil {
				t.Errorf("before the first relay: %+v, %v", got, err)
			}
			insertRow(t, pool, 1, "created")
			stop := start(t, newRelay(t, pool, b))
			awaitDrained(t, t.Context(), pool, time.Minute)
			stop()
			d.do(t, pool, js, b.Config())
			got, err := Check(t.Context(), pool, js, b.Config())
			if err != nil || len(got) != 1 {
				t.Fatalf("%+v, %v", got, err)
			}
			switch err := got[0].Err; {
			case d.refused == "" && (err != nil || got[0].Stream == nil || got[0].Stream.Last != 1):
				t.Errorf("%+v", got[0])
			case d.refused != "" && (!errors.Is(err, ErrStreamRefused) || !strings.Contains(err.Error(), d.refused) ||
				strings.Index(err.Error(), d.refused) > strings.Index(err.Error(), "run `tidings")):
				t.Errorf("got %v, want ErrStreamRefused with %q before the command", err, d.refused)
			}
		})
	}
}

func TestAClosedPartitionIsNotMissedWhenItsStreamIsRemoved(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	b := testkit.NATS(t)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	insertRow(t, pool, 1, "created")
	start(t, newRelay(t, pool, b))
	awaitDrained(t, t.Context(), pool, time.Minute)
	if _, err := outbox.Resize(t.Context(), pool, 2); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the new partitions to have streams", func() (bool, error) {
		got, err := Check(t.Context(), pool, js, b.Config())
		return err == nil && got[0].Closed && got[1].Stream != nil && got[2].Stream != nil, err
	})
	if err := js.DeleteStream(t.Context(), b.Config().StreamName(0)); err != nil {
		t.Fatal(err)
	}
	got, err := Check(t.Context(), pool, js, b.Config())
	if err != nil || len(got) != 3 || got[0].Active || got[0].Stream != nil || !got[1].Active {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, c := range got {
		if c.Err != nil {
			t.Errorf("partition %d: %v", c.Number, c.Err)
		}
	}
}
