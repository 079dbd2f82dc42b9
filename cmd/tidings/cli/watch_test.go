package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMovedCountsWhatWasPublishedAndApplied(t *testing.T) {
	state := func(last uint64, behind int64, unknown string) systemState {
		return systemState{Partitions: []partitionState{{Partition: 0, LastSeq: last}, {Partition: 1, LastSeq: 7}},
			Consumers: []consumerState{{ConsumerLag: consumers.ConsumerLag{Consumer: "c", Messages: behind}, Unknown: unknown}}}
	}
	r := moved(state(100, 50, ""), state(300, 10, ""), 2*time.Second)
	if r.Published != 100 || r.Applied["c"] != 120 {
		t.Errorf("200 published and 240 applied in 2 s: %+v", r)
	}
	if r := moved(state(100, 50, "NATS is away"), state(300, 10, ""), time.Second); len(r.Applied) != 0 {
		t.Errorf("what was not known: %+v", r)
	}
}

// pages is a writer that ends a command after some lines.
type pages struct {
	mu   sync.Mutex
	all  bytes.Buffer
	left int
	stop func()
}

func (p *pages) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left -= bytes.Count(b, []byte("\n")); p.left <= 0 {
		p.stop()
	}
	return p.all.Write(b)
}

// TestStatusWatchesUntilItIsStopped: an object per second, with rates from the second one on, and no error when it is stopped.
func TestStatusWatchesUntilItIsStopped(t *testing.T) {
	n, db := testkit.NATS(t), testkit.Postgres(t)
	cfg := n.Config()
	js, err := jetstream.New(n.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": n.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix, "NATS_LIVE_PREFIX": cfg.LivePrefix}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out := &pages{left: 2, stop: stop}
	var stderr bytes.Buffer
	code := Execute(ctx, []string{"status", "--watch", "--json"}, Process{Stdin: strings.NewReader(""), Stdout: out, Stderr: &stderr, Env: envconfig.MapLookuper(env)})
	var looks []systemState
	for line := range strings.Lines(out.all.String()) {
		var st systemState
		if err := json.Unmarshal([]byte(line), &st); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		looks = append(looks, st)
	}
	if code != exitOK || len(looks) != 2 || looks[0].PerSecond != nil || looks[1].PerSecond == nil {
		t.Errorf("exit code %d: %s%s", code, out.all.String(), stderr.String())
	}
	var text bytes.Buffer
	if err := (Process{Stdout: &text}).printState(looks[1]); err != nil || !strings.Contains(text.String(), "PUBLISHED/S") || !strings.Contains(text.String(), "APPLIED/S") {
		t.Errorf("for people: %v\n%s", err, text.String())
	}
}
