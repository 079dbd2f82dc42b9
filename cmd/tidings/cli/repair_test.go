package cli

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestRepairStreamBringsALostStreamBack(t *testing.T) {
	d := newDev(t)
	d.start(t)
	spec := followGraph(100, 1000, 3)
	if code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=100,edges=1000,seed=3", "--data", d.dir); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t)
	if code, stdout, _ := run(t, nil, "", "repair", "stream", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "nothing to do") {
		t.Errorf("of a healthy stream: exit code %d\n%s", code, stdout)
	}

	nc, err := nats.Connect(d.instance(t).NATSURL)
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
		planned, _ := strings.CutSuffix(said, "Nothing was changed. The same command without --dry-run does what is listed.\n")
		done, _ := strings.CutSuffix(did, "The streams are repaired. The relay publishes what is missing.\n")
		if code != exitOK || dryCode != code || planned != done || len(planned) == len(said) || len(done) == len(did) || !strings.Contains(planned, want) {
			t.Errorf("exit codes %d and %d; the dry run said\n%s%s, the repair did\n%s%s, want %q", dryCode, code, said, dryErr, did, stderr, want)
		}
	}
	repaired("1 foreign message. Repair: 1 message to delete.", "--delete-foreign")
	d.verify(t)
	if err := js.DeleteStream(t.Context(), "EVENTS-0"); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, nil, "", "status", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "Nothing is published") || !strings.Contains(stdout, "tidings repair stream") {
		t.Errorf("status of a deleted stream: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	repaired("its stream is gone. Repair: 1,000 events to publish again, replace the partition by 1.")
	// The relay goes on, the consumers read everything again, and nothing is counted twice.
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)
}
