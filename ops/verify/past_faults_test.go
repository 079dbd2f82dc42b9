//go:build faults

package verify_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/testkit/system"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
)

// TestAStreamLacksNothingThatALeaderForgot compares a stream of which a leader knows only the
// beginning, and later all.
func TestAStreamLacksNothingThatALeaderForgot(t *testing.T) {
	t.Parallel()
	db, b := testkit.Postgres(t), testkit.NATSProcess(t)
	pool := db.Pool(t, postgres.RoleSystem)
	publish := func(rows int) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			SELECT 1, 'post', n, 'created', '{}' FROM generate_series(1, $1) n`, rows); err != nil {
			t.Fatal(err)
		}
		stop := system.Start(t, system.Relay(t, system.RelayConfig(), db.Pool(t, postgres.RoleRelay), b.Config()).Run)
		system.AwaitPublished(t, pool)
		stop()
	}
	publish(20)
	p := testkit.NewPast(t, b, b.Config().StreamName(0))
	publish(20)
	// one message more than rows: verify compares them one by one
	if _, err := b.Connect(t).RequestMsg(&nats.Msg{Subject: b.Config().Prefix + ".0.x", Data: []byte("hello")}, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	nc := p.Through(b).Connect(t)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	src := status.Sources{Truth: pool, Projections: pool, NATS: nc, JetStream: js, Broker: b.Config(), Consumers: []string{"c"}}
	for verb, n := range map[string]int{"INFO": 2, "MSG.GET": 4} {
		p.Forget(verb, n)
		v, err := verify.Run(t.Context(), verify.Deps{Sources: src, Kinds: kinds.Builtin}, verify.Options{})
		if err != nil || len(v.Streams) != 1 || !v.Streams[0].OK() || v.Streams[0].Published != 40 || v.Streams[0].Foreign != 1 {
			t.Errorf("%s: %+v, %v", verb, v.Streams, err)
		}
	}

	if _, err := pool.Exec(t.Context(), `
		INSERT INTO consumer_offsets (consumer_name, partition_key, last_processed_id, as_of, stream_created)
		SELECT 'c', stream, 40, now(), created FROM outbox_partitions`); err != nil {
		t.Fatal(err)
	}
	src.Truth = nil // reading the partitions would wait for the leader
	p.Forget("INFO", 2)
	st, err := status.Read(t.Context(), src)
	if err != nil || len(st.Consumers) != 1 || len(st.Stopped()) > 0 || st.Consumers[0].Messages != 1 {
		t.Errorf("%+v, %v", st, err)
	}
	if !p.Forgot("INFO") || !p.Forgot("MSG.GET") {
		t.Error("nobody asked the leader that forgets")
	}
}
