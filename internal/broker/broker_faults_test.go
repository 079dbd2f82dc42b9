//go:build faults

package broker_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// TestCredentialsThatExpireAreReplacedInTheFile: in operator mode, a connection with expired
// credentials reconnects once the file has new ones.
func TestCredentialsThatExpireAreReplacedInTheFile(t *testing.T) {
	all, err := broker.Complete(nil)
	if err != nil {
		t.Fatal(err)
	}
	keys := make(broker.Keys)
	if _, err := keys.Add(all); err != nil {
		t.Fatal(err)
	}
	conf, err := keys.Server(replyNaming, all)
	if err != nil {
		t.Fatal(err)
	}
	b := testkit.NATSWith(t, conf)
	cfg, p := b.Config(), all[0]
	cfg.InboxPrefix, cfg.Credentials = p.InboxPrefix(), filepath.Join(t.TempDir(), "relay.creds")
	write := func(expires time.Duration) {
		creds, err := keys.Credentials(cfg, p, expires)
		if err == nil {
			err = os.WriteFile(cfg.Credentials, creds, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	connect := func(log *slog.Logger) (*nats.Conn, jetstream.JetStream) {
		t.Helper()
		nc, err := broker.Connect(cfg, "test", log)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		return nc, js
	}
	write(time.Hour) // a busy machine may need seconds for the declaration
	_, js := connect(testkit.Logger(t))
	if _, err := broker.Declare(t.Context(), js, cfg, broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	write(2 * time.Second) // expiry counts in whole seconds
	var out lockedBuffer
	nc, js := connect(slog.New(slog.NewTextHandler(&out, nil)))
	testkit.Eventually(t, "four attempts with credentials that have expired", func() (bool, error) {
		if nc.IsClosed() {
			t.Fatalf("closed: %v", nc.LastError())
		}
		return nc.Stats().Reconnects >= 4, nil
	})
	write(time.Hour)
	testkit.Eventually(t, "the connection to be back", func() (bool, error) { return nc.IsConnected(), nil })
	if _, err := js.Publish(t.Context(), "events.0.t1.follow.created", nil, jetstream.WithExpectLastSequence(0)); err != nil {
		t.Error(err)
	}
	if log := strings.ToLower(out.String()); !strings.Contains(log, "expired") || strings.Contains(log, "permissions violation") {
		t.Errorf("want a log that tells of the expiry, and of no missing permission: %s", out.String())
	}
	if err := js.DeleteStream(t.Context(), "EVENTS-0"); err == nil {
		t.Error("the relay's credentials can delete streams")
	}
}

// TestAPasswordThatIsWrongForAWhileIsWaitedOut: by default, nats.go closes a connection after two
// refusals.
func TestAPasswordThatIsWrongForAWhileIsWaitedOut(t *testing.T) {
	conf := func(password string) string {
		return fmt.Sprintf("authorization { users: [{user: u, password: %q}] }", password)
	}
	b := testkit.NATSWith(t, conf("old"))
	connect := func(password string) *nats.Conn {
		cfg := b.Config()
		cfg.URL = strings.Replace(b.URL, "nats://", "nats://u:"+password+"@", 1)
		nc, err := broker.Connect(cfg, "test", testkit.Logger(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	old, early := connect("old"), connect("new") // of a process that knew the password before the server did
	watched := make(chan error, 1)
	go func() { watched <- broker.Watch(t.Context(), old) }()
	b.Reload(t, conf("other"))
	for _, nc := range []*nats.Conn{old, early} {
		testkit.Eventually(t, "four attempts", func() (bool, error) {
			if nc.IsClosed() {
				t.Fatalf("closed after %d attempts: %v", nc.Stats().Reconnects, nc.LastError())
			}
			return nc.Stats().Reconnects >= 4, nil
		})
	}
	b.Reload(t, conf("old"))
	testkit.Eventually(t, "the old password works again", func() (bool, error) { return old.IsConnected(), nil })
	b.Reload(t, conf("new"))
	testkit.Eventually(t, "the new password works", func() (bool, error) { return early.IsConnected(), nil })
	select {
	case err := <-watched:
		t.Errorf("closed: %v", err)
	default:
	}
	old.Close()
	if err := <-watched; !errors.Is(err, broker.ErrClosed) {
		t.Errorf("Watch reports the end of a connection as %v", err)
	}
	if err := broker.Watch(t.Context(), old); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("Watch reports an ended connection as %v", err)
	}
}
