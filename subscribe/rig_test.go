package subscribe_test

import (
	"context"
	"fmt"
	neturl "net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// rig has a broker with streams, and a publisher that acts as a relay.
type rig struct {
	t    testing.TB
	b    *testkit.Broker
	nc   *nats.Conn
	js   jetstream.JetStream
	cfg  broker.Config
	open []broker.Stream
	n    int64
}

func newRig(t testing.TB, partitions int) *rig {
	t.Helper()
	r := &rig{t: t, b: testkit.NATS(t)}
	r.nc, r.cfg = r.b.Connect(t), r.b.Config()
	var err error
	if r.js, err = jetstream.New(r.nc); err != nil {
		t.Fatal(err)
	}
	for i := range partitions {
		r.declare(broker.Partition{Number: i, FirstSlot: i * event.Slots / partitions, LastSlot: (i+1)*event.Slots/partitions - 1})
	}
	return r
}

func (r *rig) declare(p broker.Partition) {
	r.t.Helper()
	s, err := broker.Declare(context.Background(), r.js, r.cfg, p, testkit.Logger(r.t))
	if err != nil {
		r.t.Fatal(err)
	}
	r.open = append(r.open, s)
}

// recreate deletes the only stream and declares it again, empty.
func (r *rig) recreate() {
	r.t.Helper()
	r.declare(r.remove())
}

// remove deletes the first stream, and returns its partition.
func (r *rig) remove() broker.Partition {
	r.t.Helper()
	if err := r.js.DeleteStream(r.t.Context(), r.open[0].Name); err != nil {
		r.t.Fatal(err)
	}
	p := r.open[0].Partition
	r.open = nil
	return p
}

// resize replaces all streams by the given number of new ones. A foreign message follows each
// closing message.
func (r *rig) resize(partitions int) {
	r.t.Helper()
	var after []int
	next := 0
	for _, s := range r.open {
		subject, headers := event.ClosingMessage(r.cfg.Prefix, s.Number)
		r.send(&nats.Msg{Subject: subject, Header: headers})
		r.send(&nats.Msg{Subject: fmt.Sprintf("%s.%d.t1.follow.created", r.cfg.Prefix, s.Number), Data: []byte("foreign")})
		after, next = append(after, s.Number), max(next, s.Number+1)
	}
	r.open = nil
	for i := range partitions {
		r.declare(broker.Partition{Number: next + i, FirstSlot: i * event.Slots / partitions,
			LastSlot: (i+1)*event.Slots/partitions - 1, After: after})
	}
}

func (r *rig) send(m *nats.Msg) {
	r.t.Helper()
	if _, err := r.js.PublishMsg(context.Background(), m); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) message(e event.Event) *nats.Msg {
	r.n++
	e.OutboxID = r.n
	slot := testkit.Number(e.AggregateID) % event.Slots
	i := slices.IndexFunc(r.open, func(s broker.Stream) bool { return s.FirstSlot <= slot && slot <= s.LastSlot })
	return &nats.Msg{Subject: e.Subject(r.cfg.Prefix, r.open[i].Number), Header: e.Headers(), Data: e.Payload}
}

func (r *rig) publish(events ...event.Event) {
	r.t.Helper()
	for _, e := range events {
		r.send(r.message(e))
	}
}

// follow returns an event of a pair.
func follow(follower, followee event.ID, version int64) event.Event {
	payload, err := event.Edge{From: follower, To: followee, Status: event.StatusActive,
		Version: version, Actor: "test"}.Encode(
		event.EdgeNames{From: "follower_id", To: "followee_id"})
	if err != nil {
		panic(err)
	}
	return event.Event{ID: uuid.NewString(), TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: followee,
		Type: event.Created, Version: 1, OccurredAt: time.Now(), Payload: payload}
}

// damaged returns an event whose payload does not match its type.
func damaged(followee event.ID) event.Event {
	e := follow("1", followee, 1)
	e.Payload = []byte(`{"follower_id": 7}`)
	return e
}

// running is a call that runs until stop, which returns its error.
type running struct {
	stop func() error
	done chan struct{}
}

func (r *rig) start(call func(ctx context.Context) error) *running {
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	w := &running{done: make(chan struct{})}
	go func() {
		defer close(w.done)
		err = call(ctx)
	}()
	w.stop = sync.OnceValue(func() error {
		cancel()
		<-w.done
		return err
	})
	r.t.Cleanup(func() { _ = w.stop() })
	return w
}

// schema creates a schema. It returns a pool of connections with that search_path, and its URL. It
// uses no role of Tidings.
func (r *rig) schema(name string) (pool *pgxpool.Pool, url string) {
	r.t.Helper()
	db := testkit.Postgres(r.t)
	if _, err := db.Pool(r.t, postgres.RoleOwner).Exec(context.Background(), `CREATE SCHEMA `+name); err != nil {
		r.t.Fatal(err)
	}
	u, err := neturl.Parse(db.URL)
	if err != nil {
		r.t.Fatal(err)
	}
	q := u.Query()
	q.Set("search_path", name)
	u.RawQuery = q.Encode()
	if pool, err = pgxpool.New(context.Background(), u.String()); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(pool.Close)
	return pool, u.String()
}

// logged returns a schema with the table of logbook.
func (r *rig) logged() *pgxpool.Pool {
	r.t.Helper()
	pool, _ := r.schema("search")
	if _, err := pool.Exec(context.Background(),
		`CREATE TABLE log (id bigserial, tenant_id bigint, aggregate_id bigint, version bigint)`); err != nil {
		r.t.Fatal(err)
	}
	return pool
}

func (r *rig) await(what string, done func() (bool, error)) {
	r.t.Helper()
	testkit.Eventually(r.t, what, done)
}
