package subscribe_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe"
)

// tenants is a rig whose clients have the logins of docs/security.md.
type tenants struct {
	*rig
	subscribers []broker.Principal
	option      func(login string) nats.Option
	operator    jetstream.JetStream
}

func tenantSubscribers() []broker.Principal {
	all := []broker.Principal{{Role: broker.Subscriber, Name: "svc", Durable: true, Filter: "follow.*"}}
	for tenant := int64(7); tenant <= 9; tenant++ {
		all = append(all, broker.Principal{Role: broker.Subscriber, Name: "mailer", Tenant: tenant, Durable: true,
			Filter: "follow.created"})
	}
	return all
}

func tenantNaming() broker.Config {
	return broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live"}
}

// byConfiguration starts a server with users and passwords.
func byConfiguration(t *testing.T, all []broker.Principal) (*testkit.Broker, func(login string) nats.Option) {
	for _, p := range all {
		t.Setenv(p.Variable(), "secret-of-"+p.Login())
	}
	return testkit.NATSWith(t, broker.Users(tenantNaming(), all)),
		func(login string) nats.Option { return nats.UserInfo(login, "secret-of-"+login) }
}

// byCredentials starts a server that trusts signed accounts.
func byCredentials(t *testing.T, all []broker.Principal) (*testkit.Broker, func(login string) nats.Option) {
	keys, dir := make(broker.Keys), t.TempDir()
	if _, err := keys.Add(all); err != nil {
		t.Fatal(err)
	}
	conf, err := keys.Server(tenantNaming(), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		creds, err := keys.Credentials(tenantNaming(), p, 0)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, p.Login()), creds, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return testkit.NATSWith(t, conf), func(login string) nats.Option { return nats.UserCredentials(filepath.Join(dir, login)) }
}

func newTenants(t *testing.T, start func(*testing.T, []broker.Principal) (*testkit.Broker, func(string) nats.Option)) *tenants {
	t.Helper()
	w := &tenants{subscribers: tenantSubscribers()}
	all, err := broker.Complete(w.subscribers)
	if err != nil {
		t.Fatal(err)
	}
	b, option := start(t, all)
	w.rig, w.option = &rig{t: t, b: b, cfg: b.Config()}, option
	w.nc = w.connect("relay")
	if w.js, err = jetstream.New(w.nc); err != nil {
		t.Fatal(err)
	}
	if w.operator, err = jetstream.New(w.connect("operator")); err != nil {
		t.Fatal(err)
	}
	w.declare(broker.Partition{LastSlot: event.Slots - 1})
	return w
}

// connect connects as a login. The server must refuse nothing.
func (w *tenants) connect(login string) *nats.Conn {
	w.t.Helper()
	nc, err := nats.Connect(w.b.URL, w.option(login), nats.CustomInboxPrefix("_INBOX_"+login), nats.Timeout(30*time.Second),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { w.t.Errorf("%s: %v", login, err) }))
	if err != nil {
		w.t.Fatalf("connect as %s: %v", login, err)
	}
	w.t.Cleanup(nc.Close)
	return nc
}

// subscribe creates the durable consumers of all subscribers.
func (w *tenants) subscribe() {
	w.t.Helper()
	for _, p := range w.subscribers {
		s := broker.Subscription{AckWait: 10 * time.Second, InOrder: p.Tenant == 9}
		for range 2 { // the second call changes nothing
			if _, err := broker.Subscribe(w.t.Context(), w.operator, w.cfg, p, s); err != nil {
				w.t.Fatal(err)
			}
		}
	}
}

// write publishes the next version of some follows of each tenant.
func (w *tenants) write(version int64) {
	w.t.Helper()
	for tenant := int64(7); tenant <= 9; tenant++ {
		for followee := range int64(8) {
			e := follow("1", event.IDOf(followee+1), version)
			e.TenantID = tenant
			w.publish(e)
		}
	}
}

// log collects the events of a subscriber as "tenant aggregate version".
type log struct {
	mu  sync.Mutex
	got []string
}

func (l *log) add(tenant int64, aggregate event.ID, version int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.got = append(l.got, fmt.Sprintf("%d %s %d", tenant, aggregate, version))
}

func (l *log) has(n int) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.got) < n {
		return false, fmt.Errorf("%d events of %d", len(l.got), n)
	}
	return true, nil
}

// exact reports whether the log has each event of the tenants once, and each follow in order.
func (l *log) exact(t *testing.T, who string, versions int64, tenants ...int64) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var want []string
	for _, tenant := range tenants {
		for followee := range int64(8) {
			for v := range versions {
				want = append(want, fmt.Sprintf("%d %d %d", tenant, followee+1, v+1))
			}
		}
	}
	sorted := slices.Sorted(slices.Values(l.got))
	slices.Sort(want)
	if !slices.Equal(sorted, want) {
		t.Errorf("%s got %d events, want %d: %v", who, len(sorted), len(want), l.got)
	}
	last := map[string]string{}
	for _, e := range l.got {
		key, version := e[:strings.LastIndex(e, " ")], e[strings.LastIndex(e, " "):]
		if last[key] >= version {
			t.Errorf("%s got %s after version%s", who, e, last[key])
		}
		last[key] = version
	}
}

// TestEachTenantGetsItsEventsOverResizesInItsAccount: three tenants and a subscriber of all, each
// in its account, read through the consumers that the operator created and Declare copied to the
// streams of two resizes.
func TestEachTenantGetsItsEventsOverResizesInItsAccount(t *testing.T) {
	for form, start := range map[string]func(*testing.T, []broker.Principal) (*testkit.Broker, func(string) nats.Option){
		"configuration": byConfiguration, "credentials": byCredentials} {
		t.Run(form, func(t *testing.T) {
			w := newTenants(t, start)
			w.write(1)
			w.subscribe()
			logs := map[string]*log{"svc": {}, "t7_mailer": {}, "t8_mailer": {}, "t9_mailer": {}}
			var refused atomic.Bool // tenant 8's handler refuses one event until the operator retries it
			run := func(login, name, of string, opts ...subscribe.Option) *running {
				nc := w.connect(login)
				return w.start(func(ctx context.Context) error {
					return subscribe.Handle(ctx, nc, name, of, func(_ context.Context, e subscribe.Event[event.Edge]) error {
						if login == "t8_mailer" && e.AggregateID == "3" && e.Data.Version == 4 && refused.CompareAndSwap(false, true) {
							return subscribe.Permanent(errors.New("not now"))
						}
						logs[login].add(e.TenantID, e.AggregateID, e.Data.Version)
						return nil
					}, append(opts, subscribe.Log(testkit.Logger(t)))...)
				})
			}
			running := []*running{run("svc", "svc", "follow.*"), run("t8_mailer", "mailer", "follow.created", subscribe.Tenant(8)),
				run("t9_mailer", "mailer", "follow.created", subscribe.Tenant(9), subscribe.InOrder())}
			w.resize(3)
			w.write(2)
			w.resize(1)
			w.resize(2) // the streams before had no event
			w.write(3)
			w.write(4)
			w.plain(logs["t7_mailer"], 4*8)
			for login, n := range map[string]int{"svc": 3 * 4 * 8, "t8_mailer": 4*8 - 1, "t9_mailer": 4 * 8} {
				w.await(login, func() (bool, error) { return logs[login].has(n) })
			}
			w.retry(logs["t8_mailer"])
			for _, r := range running {
				if err := r.stop(); err != nil {
					t.Error(err)
				}
			}
			logs["svc"].exact(t, "svc", 4, 7, 8, 9)
			for tenant, login := range map[int64]string{7: "t7_mailer", 8: "t8_mailer", 9: "t9_mailer"} {
				logs[login].exact(t, login, 4, tenant)
			}
		})
	}
}

// TestATenantsHandlerRefusesWhatItsConsumersAreNotMadeFor: only the operator changes these
// consumers, so a wait for a match might last forever.
func TestATenantsHandlerRefusesWhatItsConsumersAreNotMadeFor(t *testing.T) {
	w := newTenants(t, byConfiguration)
	w.subscribe()
	nc := w.connect("t7_mailer")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for name, c := range map[string]struct {
		of   string
		opts []subscribe.Option
		want error
	}{
		"another type of events": {"follow.removed", nil, subscribe.ErrFilter},
		"all types of events":    {"follow.*", nil, subscribe.ErrFilter},
		"an order":               {"follow.created", []subscribe.Option{subscribe.InOrder()}, subscribe.ErrOption},
		"another takeover":       {"follow.created", []subscribe.Option{subscribe.Takeover(time.Second)}, subscribe.ErrOption},
	} {
		if err := subscribe.Handle(ctx, nc, "mailer", c.of, func(context.Context, subscribe.Event[event.Edge]) error { return nil },
			append(c.opts, subscribe.Tenant(7), subscribe.Log(testkit.Logger(t)))...); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// plain reads as tenant 7 with the client of NATS alone, in the order of the streams.
func (w *tenants) plain(l *log, events int) {
	w.t.Helper()
	js, err := jetstream.New(w.connect("t7_mailer"))
	if err != nil {
		w.t.Fatal(err)
	}
	all, err := broker.StreamsOf(w.t.Context(), js, w.cfg, "t7_mailer")
	if err != nil || len(all) != 7 {
		w.t.Fatalf("%d streams, want 7: %v", len(all), err)
	}
	for _, s := range all {
		c, err := js.Consumer(w.t.Context(), s.Name, "t7_mailer")
		if err != nil {
			w.t.Fatal(err)
		}
		for left := c.CachedInfo().NumPending; left > 0; left-- {
			m, err := c.Next(jetstream.FetchMaxWait(30 * time.Second))
			if err != nil {
				w.t.Fatal(err)
			}
			e, err := event.Decode(m.Subject(), m.Headers(), m.Data())
			if err = errors.Join(err, m.DoubleAck(w.t.Context())); err != nil {
				w.t.Fatal(err)
			}
			edge, err := subscribe.Decode[event.Edge](kinds.Builtin(), &e)
			if err != nil {
				w.t.Fatal(err)
			}
			l.add(e.TenantID, e.AggregateID, edge.Version)
		}
	}
	if ok, err := l.has(events); !ok {
		w.t.Error(err)
	}
}

// retry makes tenant 8 handle its dead letter. The finished request goes with the next act of the
// operator.
func (w *tenants) retry(l *log) {
	w.t.Helper()
	letters, err := subscribe.HandlerDeadLetters(w.operator.Conn())
	if err != nil {
		w.t.Fatal(err)
	}
	var all []subscribe.Letter
	w.await("the dead letter", func() (bool, error) {
		all, err = postgres.Collect(letters.List(w.t.Context(), "t8_mailer", 0))
		return len(all) == 1, err
	})
	if err := letters.Retry(w.t.Context(), all[0].ID); err != nil {
		w.t.Fatal(err)
	}
	w.await("the retry", func() (bool, error) { return l.has(4 * 8) })
}
