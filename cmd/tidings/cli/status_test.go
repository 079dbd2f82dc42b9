package cli

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/outbox"
)

// TestStatusShowsAStreamWithoutALeaderAndVerifyWaitsForIt: two servers of three are gone, and come back while verify waits.
func TestStatusShowsAStreamWithoutALeaderAndVerifyWaitsForIt(t *testing.T) {
	c, db := testkit.NATSCluster(t, 3), testkit.Postgres(t)
	cfg := c.Config()
	js, err := jetstream.New(c.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	stream, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := outbox.Bind(t.Context(), db.Pool(t, postgres.RoleSystem), 0, stream.Name, stream.Created); err != nil {
		t.Fatal(err)
	}
	c.AwaitReplicas(t, stream.Name)
	leader, others := c.Leader(t, stream.Name)
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": others[0].URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix,
		"NATS_REPLICAS": "3", "NATS_TIMEOUT": "1s"}
	if code, stdout, stderr := run(t, env, "", "status"); code != exitOK || !strings.Contains(stdout, "3 of 3") || !strings.Contains(stdout, stream.Leader) {
		t.Errorf("status: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	leader.Kill(t)
	others[1].Kill(t)
	lone, err := jetstream.New(others[0].Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, time.Minute, "the stream to have no leader", func() (bool, error) {
		_, err := broker.ReadStream(t.Context(), lone, cfg, 0)
		return errors.Is(err, broker.ErrNoLeader), nil
	})
	if code, stdout, stderr := run(t, env, "", "status"); code != exitOK || !strings.Contains(stdout, "Partition 0 waits for a leader of its stream") || strings.Contains(stdout, "repair") {
		t.Errorf("status without a leader: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	verified := make(chan string, 1)
	go func() {
		code, stdout, stderr := run(t, env, "", "verify", "--wait", "2m")
		if code == exitOK {
			stdout = ""
		}
		verified <- stdout + stderr
	}()
	leader.Restart(t)
	others[1].Restart(t)
	if got := <-verified; got != "" {
		t.Errorf("verify: %s", got)
	}
}
