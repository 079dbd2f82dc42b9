package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/status"
)

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

// TestStatusWatchesUntilItIsStopped expects an object per second, with rates from the second one
// on, and no error at the end.
func TestStatusWatchesUntilItIsStopped(t *testing.T) {
	t.Parallel()
	n, db := testkit.NATS(t), testkit.Postgres(t)
	cfg := n.Config()
	js, err := jetstream.New(n.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DATABASE_URL": db.URL, "NATS_URL": n.URL, "NATS_STREAM": cfg.Stream, "NATS_SUBJECT_PREFIX": cfg.Prefix,
		"NATS_LIVE_PREFIX": cfg.LivePrefix}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out := &pages{left: 2, stop: stop}
	var stderr bytes.Buffer
	code := Execute(ctx, []string{"status", "--watch", "--json"},
		Process{Stdin: strings.NewReader(""), Stdout: out, Stderr: &stderr, Env: envconfig.MapLookuper(env)})
	var looks []status.State
	for line := range strings.Lines(out.all.String()) {
		var st status.State
		if err := json.Unmarshal([]byte(line), &st); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		looks = append(looks, st)
	}
	if code != exitOK || len(looks) != 2 || looks[0].PerSecond != nil || looks[1].PerSecond == nil {
		t.Errorf("exit code %d: %s%s", code, out.all.String(), stderr.String())
	}
	var text bytes.Buffer
	if err := printState(&text, looks[1]); err != nil || !strings.Contains(text.String(), "PUBLISHED/S") ||
		!strings.Contains(text.String(), "APPLIED/S") {
		t.Errorf("for people: %v\n%s", err, text.String())
	}
}

func TestEventsAreWatchedOfOneKind(t *testing.T) {
	var out bytes.Buffer
	w := eventWatch{session: &session{Process: Process{Stdout: &out}}, kind: "order", ctx: t.Context(), stop: func() {}}
	for _, kind := range []string{"follow", "order", "border"} {
		w.Hear(&event.Event{TenantID: 1, AggregateType: kind, AggregateID: "7", Type: event.Created, Payload: []byte(`{}`),
			Stream: "EVENTS-0", Seq: 5}, nil)
	}
	if want := "EVENTS-0/5  tenant 1  order.created  7  {}\n"; out.String() != want {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
