package cli

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/relay"
)

func TestMessagesWithoutARowArePrintedOnce(t *testing.T) {
	var out strings.Builder
	printPartitions(&out, relay.RepairReport{Partitions: []relay.PartitionReport{
		{Stream: "EVENTS-0", Problem: "its stream has 12,000 messages without a row", Unknown: 12000}}})
	if want := "Partition 0 (EVENTS-0): its stream has 12,000 messages without a row. Repair: nothing.\n"; out.String() != want {
		t.Errorf("got %s, want %s", &out, want)
	}
}

func TestRepairStreamBringsALostStreamBack(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	spec := followGraph(40, 1000, 3)
	if code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=40,edges=1000,seed=3", "--data", d.dir); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t)
	if code, stdout, _ := run(t, nil, "", "repair", "stream", "--data", d.dir); code != exitOK ||
		!strings.Contains(stdout, "nothing to do") {
		t.Errorf("of a healthy stream: exit code %d\n%s", code, stdout)
	}

	nc, err := nats.Connect(d.instance(t).NATSURL, nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "events.0.x", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	repaired := func(want string, args ...string) {
		t.Helper()
		args = append([]string{"repair", "stream", "--data", d.dir}, args...)
		dryCode, said, dryErr := run(t, nil, "", append(args, "--dry-run")...)
		code, did, stderr := run(t, nil, "", append(args, "--yes")...)
		planned, _ := strings.CutSuffix(said, "Nothing was changed. Run the same command without --dry-run to take these steps.\n")
		done, _ := strings.CutSuffix(did, "The streams are repaired. The relay publishes the missing events.\n")
		if code != exitOK || dryCode != code || planned != done || len(planned) == len(said) || len(done) == len(did) ||
			!strings.Contains(planned, want) {
			t.Errorf("exit codes %d and %d; the dry run said\n%s%s, the repair did\n%s%s, want %q", dryCode, code, said,
				dryErr, did, stderr, want)
		}
	}
	repaired("1 foreign message. Repair: 1 message to delete.", "--delete-foreign")
	d.verify(t)
	if err := js.DeleteStream(t.Context(), "EVENTS-0"); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, nil, "", "status", "--data", d.dir); code != exitAgain ||
		!strings.Contains(stdout,
			": stream EVENTS-0 is gone; run `tidings repair stream --dry-run` (docs/runbook/OutboxPartitionStuck.md)\n") {
		t.Errorf("status of a deleted stream: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	code, stdout, _ := run(t, nil, "", "verify", "--wait", "0s", "--data", d.dir)
	if code != exitError || !strings.Contains(stdout, "\n  stopped: partition 0: stream EVENTS-0 is gone; run `tidings repair") ||
		!strings.Contains(stdout, "stopped: archiver: events of EVENTS-0 are missing; run `tidings repair") ||
		strings.Contains(stdout, "on its way") || !strings.Contains(stdout,
		"Partition 0 (EVENTS-0): 0 messages; the outbox has 1,000 as published. MISSING MESSAGES: 1,000. stream EVENTS-0 is gone") {
		t.Errorf("verify of a deleted stream: exit code %d\n%s", code, stdout)
	}
	if code, _, stderr := run(t, nil, "", "replay", "--consumer", "threadcache", "--dry-run", "--data", d.dir); code != exitError ||
		stderr != "tidings: stream EVENTS-0 is gone: run `tidings repair stream --dry-run` first\n" {
		t.Errorf("replay without the stream: exit code %d\n%s", code, stderr)
	}
	if code, stdout, stderr := run(t, nil, "", "restore", "--since", "2100-01-01", "--dry-run", "--data", d.dir); code != exitInput ||
		!strings.Contains(stderr, "--since is 2100-01-01T00:00:00Z, in the future") {
		t.Errorf("restore since a time in the future: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, stdout, stderr := run(t, nil, "", "restore", "--since", "1h", "--dry-run", "--data", d.dir); code != exitOK ||
		!strings.Contains(stdout, "Writes that the truth lost and the streams still have: 0.\nErasures to repeat: 0.\n") ||
		!strings.HasSuffix(stdout, "\nNothing was changed.\n") {
		t.Errorf("a dry run of restore: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	system, err := postgres.Open(t.Context(), d.instance(t).DatabaseURL, postgres.Config{MaxConns: 2, ConnectTimeout: time.Minute},
		postgres.RoleSystem, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer system.Close()
	_, free, err := outbox.Exclusive(t.Context(), system, "repair")
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"repair", "stream"}, {"restore", "--since", "1h"}} {
		code, _, stderr := run(t, nil, "", append(args, "--yes", "--data", d.dir)...)
		if want := fmt.Sprintf("another repair or restore is running: \"tidings repair (process %d on ", os.Getpid()); code != exitAgain ||
			!strings.Contains(stderr, want) || !strings.Contains(stderr, "SELECT pg_terminate_backend(") {
			t.Errorf("%s beside a repair: exit code %d\n%s", args[0], code, stderr)
		}
	}
	free()
	repaired("its stream is gone. Repair: 1,000 events to publish again, partition 1 replaces it.")
	// The relay continues, the consumers read all events again, and count none twice.
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)
}
