package cli

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/relay"
)

func TestRepairStreamBringsALostStreamBack(t *testing.T) {
	d := newDev(t)
	d.start(t)
	spec := followGraph(100, 1000, 3)
	if code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=100,edges=1000,seed=3", "--data", d.dir); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t)
	if code, stdout, _ := run(t, nil, "", "repair", "stream", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "did nothing") {
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
	if code, stdout, stderr := run(t, nil, "", "repair", "stream", "--delete-foreign", "--dry-run", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "1 foreign message") {
		t.Errorf("of a stray message: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, stdout, stderr := run(t, nil, "", "repair", "stream", "--delete-foreign", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "1 message deleted") {
		t.Errorf("of a stray message: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t)
	if err := js.DeleteStream(t.Context(), "EVENTS-0"); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, nil, "", "status", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "Nothing is published") || !strings.Contains(stdout, "tidings repair stream") {
		t.Errorf("status of a deleted stream: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	code, stdout, stderr := run(t, nil, "", "repair", "stream", "--data", d.dir, "--json")
	var report relay.RepairReport
	if err := json.Unmarshal([]byte(stdout), &report); code != exitOK || err != nil {
		t.Fatalf("repair: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	if part := report.Partitions[0]; !report.Repaired || part.Republish != int64(spec.Edges) || !slices.Equal(part.ReplacedBy, []int{1}) {
		t.Errorf("repair: %s", stdout)
	}
	// The relay goes on, the consumers read everything again, and nothing is counted twice.
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)
}
