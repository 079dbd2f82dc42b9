package cli

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/load"
	"github.com/tidings/tidings/relay"
)

func TestRepairStreamBringsALostStreamBack(t *testing.T) {
	d := newDev(t)
	d.start(t)
	spec := load.Spec{Users: 100, Edges: 1000, Seed: 3}
	if code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=100,edges=1000,seed=3", "--data", d.dir); code != exitOK {
		t.Fatalf("load: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	d.verify(t)
	if code, stdout, _ := run(t, nil, "", "repair", "stream", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "Nothing was done") {
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
	if _, err := js.Publish(t.Context(), "events.p05.x", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, nil, "", "repair", "stream", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "1 messages that no relay wrote") {
		t.Errorf("of a stray message: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, stdout, stderr := run(t, nil, "", "repair", "stream", "--delete-foreign", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "1 messages that no relay wrote were taken off") {
		t.Errorf("of a stray message: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, stdout, stderr := run(t, nil, "", "stream", "configure", "--max-age", "48h", "--data", d.dir); code != exitOK || !strings.Contains(stdout, "age 48h0m0s") {
		t.Errorf("a shorter age: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	if code, _, stderr := run(t, nil, "", "stream", "configure", "--data", d.dir); code != exitInput {
		t.Errorf("nothing to configure: exit code %d\n%s", code, stderr)
	}
	d.verify(t)
	if err := js.DeleteStream(t.Context(), "EVENTS"); err != nil {
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
	if !report.Repaired || !report.MadeAnew || report.Republish != spec.Edges || report.Generation != 2 {
		t.Errorf("repair: %s", stdout)
	}
	// The relay goes on, the consumers read everything again, and nothing is counted twice.
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)
}
