package doctor

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestEveryCheckOfTheBrokerFindsItsIllness changes streams without the relays, and has each check
// find the change.
func TestEveryCheckOfTheBrokerFindsItsIllness(t *testing.T) {
	n := testkit.NATS(t)
	nc, cfg := n.Connect(t), n.Config()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	p := broker.Partition{LastSlot: event.Slots - 1}
	if _, err := broker.Declare(t.Context(), js, cfg, p, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	found := func() map[string]Severity {
		t.Helper()
		all, err := Broker(t.Context(), nc, cfg, []broker.Partition{p})
		if err != nil {
			t.Fatal(err)
		}
		m := make(map[string]Severity)
		for _, f := range all {
			m[f.Check] = f.Severity
			if f.What == "" || f.Action() == "" || f.Where == "" {
				t.Errorf("%+v", f)
			}
		}
		return m
	}
	if got := found(); len(got) > 0 {
		t.Fatalf("a new stream: %v", got)
	}
	cfg.Tags = []string{"zone:a"}
	if got := found(); len(got) != 1 || got["stream-placement"] != Warning {
		t.Errorf("a stream with other placement tags than the environment: %v", got)
	}
	cfg.Tags = nil
	edit := func(change func(c *jetstream.StreamConfig)) {
		t.Helper()
		s, err := js.Stream(t.Context(), cfg.StreamName(0))
		if err != nil {
			t.Fatal(err)
		}
		c := s.CachedInfo().Config
		change(&c)
		if _, err := js.UpdateStream(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	keys, operator := broker.Keys{}, broker.Principal{Role: broker.Operator}
	if _, err := keys.Add([]broker.Principal{operator}); err != nil {
		t.Fatal(err)
	}
	cfg.Credentials = filepath.Join(t.TempDir(), "operator.creds")
	if got := found(); len(got) != 1 || got["nats-credentials"] != Warning {
		t.Errorf("credentials that cannot be read: %v", got)
	}
	for _, life := range []time.Duration{10 * time.Hour, 0} {
		creds, err := keys.Credentials(cfg, operator, life)
		if err == nil {
			err = os.WriteFile(cfg.Credentials, creds, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := found(); len(got) > 0 {
			t.Errorf("new credentials for %s: %v", life, got)
		}
	}
	cfg.Credentials = ""
	now := time.Now()
	for _, c := range []struct {
		issued, expires time.Duration // from now
		want            int
	}{
		{-10 * time.Hour, 4 * time.Hour, 0}, {-10 * time.Hour, 3 * time.Hour, 1}, {-10 * time.Hour, -time.Hour, 1},
		{-1000 * 24 * time.Hour, 15 * 24 * time.Hour, 0}, {-1000 * 24 * time.Hour, 13 * 24 * time.Hour, 1},
	} {
		user := broker.User{Name: "operator", Issued: now.Add(c.issued), Expires: now.Add(c.expires)}
		if got := credentials("NATS", user, now); len(got) != c.want {
			t.Errorf("credentials from %s to %s: %v, want %d findings", c.issued, c.expires, got, c.want)
		}
	}
	dead := jetstream.StreamConfig{Name: cfg.DeadStream(), Subjects: []string{cfg.DeadStream() + ".*.*"}}
	if _, err := js.CreateStream(t.Context(), dead); err != nil {
		t.Fatal(err)
	}
	if got := found(); len(got) != 1 || got["stream-purge"] != Warning {
		t.Errorf("a stream of dead letters that an older release created: %v", got)
	}
	dead.DenyPurge = true
	if _, err := js.UpdateStream(t.Context(), dead); err != nil {
		t.Fatal(err)
	}
	edit(func(c *jetstream.StreamConfig) { c.MaxMsgs = 7 })
	if got := found(); len(got) != 1 || got["stream-limits"] != Warning {
		t.Errorf("a stream with another limit of messages: %v", got)
	}
	edit(func(c *jetstream.StreamConfig) { c.MaxMsgs = -1; c.MaxBytes = 1000 })
	if _, err := js.Publish(t.Context(), "events.0.t1.follow.created", make([]byte, 850), jetstream.WithExpectLastSequence(0)); err != nil {
		t.Fatal(err)
	}
	if got := found(); got["storage"] != Warning {
		t.Errorf("a stream that is nearly full: %v", got)
	}
	edit(func(c *jetstream.StreamConfig) { c.Sealed = true })
	if got := found(); got["stream-shape"] != Error {
		t.Errorf("a sealed stream: %v", got)
	}
	for version, want := range map[string]int{"2.11.9": 1, "2.12.0": 0, "2.15.0-preview.1": 0, "3.0.0": 0, "1.99.0": 1, "": 1} {
		if got := serverVersion("NATS", version); len(got) != want {
			t.Errorf("version %q: %v", version, got)
		}
	}
	gone := n.Connect(t)
	gone.Close()
	if all, err := Broker(t.Context(), gone, cfg, nil); err != nil || len(all) == 0 || all[len(all)-1].Check != "jetstream" {
		t.Errorf("a connection without JetStream: %v, %v", all, err)
	}
	for err, want := range map[error]string{
		jetstream.ErrJetStreamNotEnabled:           "enable JetStream",
		jetstream.ErrJetStreamNotEnabledForAccount: "enable JetStream",
		&jetstream.APIError{Code: 503, ErrorCode: 10008, Description: "JetStream system temporarily unavailable"}: "start the servers",
		context.DeadlineExceeded: "start the servers",
	} {
		if got := enable(err); !strings.HasPrefix(got, want) {
			t.Errorf("%v: got %q, want %q", err, got, want)
		}
	}
}
