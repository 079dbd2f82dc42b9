package broker_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/testkit"
)

// natsForms are the two ways to configure the logins of a NATS server.
var natsForms = map[string]func(t *testing.T) *natsLogins{"configuration": loginsOfConfiguration, "credentials": loginsOfCredentials}

// natsLogins are the logins of a server with streams.
type natsLogins struct {
	b    *testkit.Broker
	opts func(login string) nats.Option
}

// strangers are logins that must not reach anything that is not theirs, not even through a reply.
var strangers = []string{"api", "consumer", "t7_plain", "t7_mailer", "feed", "svc"}

const natsPassword = "secret-of-"

// replySubscribers are the subscribers of these tests.
var replySubscribers = []broker.Principal{
	{Role: broker.Subscriber, Name: "plain", Tenant: 7},
	{Role: broker.Subscriber, Name: "mailer", Tenant: 7, Durable: true, Filter: "follow.created"},
	{Role: broker.Subscriber, Name: "mailer", Tenant: 8, Durable: true, Filter: "follow.created"},
	{Role: broker.Subscriber, Name: "feed"},
	{Role: broker.Subscriber, Name: "svc", Durable: true, Filter: "follow.*"},
}

func replyPrincipals(t *testing.T) []broker.Principal {
	t.Helper()
	all, err := broker.Complete(replySubscribers)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var replyNaming = broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live"}

func loginsOfConfiguration(t *testing.T) *natsLogins {
	all := replyPrincipals(t)
	for _, p := range all {
		t.Setenv(p.Variable(), natsPassword+p.Login())
	}
	b := testkit.NATSWith(t, broker.Users(replyNaming, all))
	return &natsLogins{b, func(login string) nats.Option { return nats.UserInfo(login, natsPassword+login) }}
}

func loginsOfCredentials(t *testing.T) *natsLogins {
	all, keys, dir := replyPrincipals(t), make(broker.Keys), t.TempDir()
	if _, err := keys.Add(all); err != nil {
		t.Fatal(err)
	}
	conf, err := keys.Server(replyNaming, all)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		creds, err := keys.Credentials(replyNaming, p, 0)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, p.Login()+".creds"), creds, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return &natsLogins{testkit.NATSWith(t, conf), func(login string) nats.Option {
		return nats.UserCredentials(filepath.Join(dir, login+".creds"))
	}}
}

// connect connects as a login. Refusals by the server are no errors of the test.
func (l *natsLogins) connect(t *testing.T, login string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(l.b.URL, l.opts(login), nats.CustomInboxPrefix("_INBOX_"+login), nats.Timeout(time.Minute),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatalf("connect as %s: %v", login, err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func (l *natsLogins) stream(t *testing.T, login string) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(l.connect(t, login))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// TestNoLoginDestroysThroughAReply sends, as each login, every request that it may know with every
// reply subject that would harm others. NATS checks no reply subject, so an answer would become a
// request.
func TestNoLoginDestroysThroughAReply(t *testing.T) {
	for form, logins := range natsForms {
		for _, login := range strangers {
			t.Run(form+"/"+login, func(t *testing.T) {
				l := logins(t)
				r := prepareReplies(t, l)
				nc := l.connect(t, login)
				for _, request := range r.requests {
					for _, reply := range r.replies {
						if err := nc.PublishMsg(&nats.Msg{Subject: request[0], Reply: reply, Data: []byte(request[1])}); err != nil {
							t.Fatal(err)
						}
					}
				}
				if err := nc.Flush(); err != nil {
					t.Fatal(err)
				}
				r.check(t)
			})
		}
	}
}

// replies is a server with events of two tenants, and what must not change.
type replies struct {
	l        *natsLogins
	operator jetstream.JetStream
	requests [][2]string // subject and data
	replies  []string
	live     *nats.Subscription // what the operator gets
	neighbor *nats.Subscription // what tenant 8 gets
	before   string
}

const replyBatch = `{"batch":1,"no_wait":true}`

var replyDurables = map[string]string{"t7_mailer": "events.*.t7.follow.created", "t8_mailer": "events.*.t8.follow.created",
	"svc-follow": "events.*.*.follow.*"}

func prepareReplies(t *testing.T, l *natsLogins) *replies {
	t.Helper()
	r := &replies{l: l, operator: l.stream(t, "operator")}
	relay, ctx, cfg := l.stream(t, "relay"), t.Context(), l.b.Config()
	for n := range 2 {
		if _, err := broker.Declare(ctx, relay, cfg, broker.Partition{Number: n, FirstSlot: 16 * n, LastSlot: 16*n + 15},
			testkit.Logger(t)); err != nil {
			t.Fatal(err)
		}
		for tenant := int64(7); tenant <= 8; tenant++ {
			if _, err := relay.Publish(ctx, fmt.Sprintf("events.%d.t%d.follow.created", n, tenant), []byte("{}")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := r.operator.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS-dead",
		Subjects: []string{"EVENTS-dead.*.*"}}); err != nil {
		t.Fatal(err)
	}
	for durable, filter := range replyDurables {
		for _, stream := range []string{"EVENTS-0", "EVENTS-1"} {
			if _, err := r.operator.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{Durable: durable, FilterSubject: filter,
				AckPolicy: jetstream.AckExplicitPolicy}); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Tenant 8 has a message in hand, whose acknowledgment by another would lose it.
	held, err := r.operator.Consumer(ctx, "EVENTS-0", "t8_mailer")
	if err != nil {
		t.Fatal(err)
	}
	m, err := held.Next()
	if err != nil {
		t.Fatal(err)
	}
	for durable := range replyDurables {
		for range 2 { // the first answer has an event, later ones have no data
			r.requests = append(r.requests, [2]string{"$JS.API.CONSUMER.MSG.NEXT.EVENTS-0." + durable, replyBatch})
		}
		r.requests = append(r.requests, [2]string{"$JS.API.CONSUMER.INFO.EVENTS-0." + durable, ""},
			[2]string{"$JS.ACK.EVENTS-0." + durable + ".1.1.1.1.1", "+NXT"}, [2]string{"EVENTS-dead.letter." + durable, ""},
			[2]string{"$JS.API.CONSUMER.CREATE.EVENTS-1." + durable, `{"stream_name":"EVENTS-1","config":{"ack_policy":"explicit"}}`})
	}
	for _, verb := range []string{"INFO", "STREAM.NAMES", "STREAM.INFO.EVENTS-0", "CONSUMER.LIST.EVENTS-0"} {
		r.requests = append(r.requests, [2]string{"$JS.API." + verb, ""})
	}
	r.requests = append(r.requests, [2]string{"$JS.API.STREAM.MSG.GET.EVENTS-0", `{"seq":1}`}, [2]string{broker.WakeSubject, ""},
		[2]string{"$JS.API.CONSUMER.CREATE.EVENTS-0.x", `{"stream_name":"EVENTS-0","config":{"name":"x","ack_policy":"none"}}`},
		[2]string{"$JS.API.CONSUMER.MSG.NEXT.EVENTS-0.x", `{"batch":9,"no_wait":true}`})
	for _, verb := range []string{"STREAM.PURGE.EVENTS-0", "STREAM.DELETE.EVENTS-0", "STREAM.MSG.DELETE.EVENTS-0",
		"CONSUMER.DELETE.EVENTS-0.t8_mailer", "STREAM.DELETE.EVENTS-dead"} {
		r.replies = append(r.replies, "$JS.API."+verb)
	}
	r.replies = append(r.replies, "events.0.t8.follow.created", "live.t8.follow.created", m.Reply(), "EVENTS-dead.letter.t8_mailer",
		broker.WakeSubject)
	if r.live, err = l.connect(t, "operator").SubscribeSync("live.>"); err == nil {
		r.neighbor, err = l.connect(t, "t8_mailer").SubscribeSync("live.t8.follow.created")
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*nats.Subscription{r.live, r.neighbor} {
		if err := s.SetPendingLimits(-1, -1); err != nil {
			t.Fatal(err)
		}
	}
	r.before = r.state(t)
	return r
}

// state describes what belongs to others.
func (r *replies) state(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, name := range []string{"EVENTS-0", "EVENTS-1", "EVENTS-dead"} {
		s, err := r.operator.Stream(t.Context(), name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			fmt.Fprintf(&b, "%s is gone; ", name)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		own := uint64(0) // a subscriber of all tenants may store its own dead letters
		for subject, n := range mustSubjects(t, s) {
			if strings.HasPrefix(subject, "EVENTS-dead.") && !strings.HasSuffix(subject, ".t8_mailer") {
				own += n
			}
		}
		fmt.Fprintf(&b, "%s has %d messages; ", name, s.CachedInfo().State.Msgs-own)
	}
	c, err := r.operator.Consumer(t.Context(), "EVENTS-0", "t8_mailer")
	if err != nil {
		return b.String() + err.Error()
	}
	i := c.CachedInfo()
	return b.String() + fmt.Sprintf("tenant 8 has %d to read, %d to acknowledge", i.NumPending, i.NumAckPending)
}

func mustSubjects(t *testing.T, s jetstream.Stream) map[string]uint64 {
	t.Helper()
	i, err := s.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	if err != nil {
		t.Fatal(err)
	}
	return i.State.Subjects
}

// check waits until the server has handled all requests, and compares.
func (r *replies) check(t *testing.T) {
	t.Helper()
	nc := r.operator.Conn()
	for durable := range replyDurables { // its answer comes after those to the others
		if _, err := nc.Request("$JS.API.CONSUMER.MSG.NEXT.EVENTS-0."+durable, []byte(replyBatch), time.Minute); err != nil {
			t.Errorf("%s: %v", durable, err)
		}
	}
	// The operator's own trick is behind the others' requests, and must work: otherwise this test
	// could not fail.
	c, err := r.operator.CreateConsumer(t.Context(), "EVENTS-1", jetstream.ConsumerConfig{Durable: "scratch",
		FilterSubject: "events.1.none", AckPolicy: jetstream.AckExplicitPolicy})
	if err == nil {
		_, err = r.operator.CreateStream(t.Context(), jetstream.StreamConfig{Name: "SCRATCH"})
	}
	if err != nil {
		t.Fatalf("%v; before: %s; after: %s", err, r.before, r.state(t))
	}
	if err := nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.EVENTS-1."+c.CachedInfo().Name, "$JS.API.STREAM.DELETE.SCRATCH",
		[]byte(replyBatch)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the operator's own trick to work", func() (bool, error) {
		_, err := r.operator.Stream(t.Context(), "SCRATCH")
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return true, nil
		}
		return false, err
	})
	if after := r.state(t); after != r.before {
		t.Errorf("before: %s\nafter: %s", r.before, after)
	}
	for who, s := range map[string]*nats.Subscription{"operator": r.live, "tenant 8": r.neighbor} {
		n, _, err := s.Pending()
		if err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			m, err := s.NextMsg(time.Minute)
			t.Errorf("%s got %d messages on live.>, the first is %+v, %v", who, n, m, err)
		}
	}
}

// TestWhatTrustedLoginsCanDo proves the sentences of docs/threat-model.md about the logins that it
// calls trusted. If one of these ways closes, the page can promise more.
func TestWhatTrustedLoginsCanDo(t *testing.T) {
	for login, request := range map[string]*nats.Msg{
		// a push consumer delivers copies of events to any subject that has a subscription
		"consumer": {Subject: "$JS.API.CONSUMER.CREATE.EVENTS-0.x", Data: []byte(`{"stream_name":"EVENTS-0","config":{"name":"x",
			"ack_policy":"none","deliver_subject":"live.t8.follow.created"}}`)},
		// the answer to the first message of a batch has no data
		"relay": {Subject: "events.0.t7.follow.created", Reply: "$JS.API.STREAM.DELETE.EVENTS-1",
			Header: nats.Header{"Nats-Batch-Id": {"x"}, "Nats-Batch-Sequence": {"1"}}},
		"operator": {Subject: "$JS.API.STREAM.DELETE.EVENTS-1"},
	} {
		t.Run(login, func(t *testing.T) {
			l := loginsOfConfiguration(t)
			r := prepareReplies(t, l)
			nc := l.connect(t, login)
			if err := nc.PublishMsg(request); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, "the harm", func() (bool, error) {
				if login == "consumer" {
					n, _, err := r.neighbor.Pending()
					return n > 0, err
				}
				_, err := r.operator.Stream(t.Context(), "EVENTS-1")
				if errors.Is(err, jetstream.ErrStreamNotFound) {
					return true, nil
				}
				return false, err
			})
		})
	}
}

// TestAStreamGetsTheSubscribersConsumersBeforeAnybodyWritesToIt: a process that dies after it
// created a stream leaves the rest to the next one.
func TestAStreamGetsTheSubscribersConsumersBeforeAnybodyWritesToIt(t *testing.T) {
	b := testkit.NATS(t)
	cfg, s := b.Config(), js(t, b.Connect(t))
	all := []broker.Principal{{Role: broker.Subscriber, Name: "mailer", Tenant: 7, Durable: true, Filter: "follow.created"},
		{Role: broker.Subscriber, Name: "svc", Durable: true, Filter: "follow.*"}}
	how := broker.Subscription{AckWait: 10 * time.Second}
	if _, err := broker.Subscribe(t.Context(), s, cfg, all[0], how); err == nil {
		t.Error("a subscriber without a stream is created")
	}
	declare(t, s, cfg, whole)
	for _, p := range all {
		created, err := broker.Subscribe(t.Context(), s, cfg, p, how)
		if err != nil || len(created) != 2 {
			t.Fatalf("%v, %v", created, err)
		}
	}
	other := all[0]
	other.Filter = "like.created"
	if _, err := broker.Subscribe(t.Context(), s, cfg, other, how); err == nil || !strings.Contains(err.Error(), "filter") {
		t.Errorf("a second filter for one consumer: %v", err)
	}
	next := broker.Partition{Number: 1, LastSlot: 31, After: []int{0}}
	stream := declare(t, s, cfg, next)
	if err := s.DeleteConsumer(t.Context(), stream.Name, "t7_mailer"); err != nil { // as if the process had died before it
		t.Fatal(err)
	}
	declare(t, s, cfg, next)
	c, err := s.Consumer(t.Context(), stream.Name, "t7_mailer")
	if err != nil {
		t.Fatal(err)
	}
	got := c.CachedInfo().Config
	if got.FilterSubject != cfg.Prefix+".*.t7.follow.created" || got.Metadata[broker.MetaOf] != "0" || got.AckWait != how.AckWait ||
		got.DeliverPolicy != jetstream.DeliverAllPolicy {
		t.Errorf("%+v", got)
	}
	if err := s.DeleteConsumer(t.Context(), cfg.Stream+"-dead", "t7_mailer"); err != nil { // ends the subscriber
		t.Fatal(err)
	}
	stream = declare(t, s, cfg, broker.Partition{Number: 2, LastSlot: 31, After: []int{1}})
	if _, err := s.Consumer(t.Context(), stream.Name, "t7_mailer"); !errors.Is(err, jetstream.ErrConsumerNotFound) {
		t.Errorf("a deleted subscriber has a consumer on a new stream: %v", err)
	}
	if _, err := s.Consumer(t.Context(), stream.Name, "svc-follow"); err != nil {
		t.Error(err)
	}
}

// TestAReloadAddsLogins reloads a server: from one account to accounts, and with another tenant. In
// the form of a configuration, nats-server 2.15 needs two reloads: it connects the requests of a
// new account at the second one.
func TestAReloadAddsLogins(t *testing.T) {
	some, err := broker.Complete(replySubscribers[:2])
	if err != nil {
		t.Fatal(err)
	}
	all := replyPrincipals(t)
	names := func(l *natsLogins, logins ...string) {
		t.Helper()
		for _, login := range logins {
			lister, n := l.stream(t, login).StreamNames(t.Context()), 0
			for range lister.Name() {
				n++
			}
			if err := lister.Err(); err != nil && !errors.Is(err, jetstream.ErrEndOfData) || n != 1 {
				t.Errorf("%s lists %d streams, %v", login, n, err)
			}
		}
	}
	declareOne := func(l *natsLogins) {
		t.Helper()
		declare(t, l.stream(t, "relay"), l.b.Config(), whole)
	}
	t.Run("configuration", func(t *testing.T) {
		for _, p := range all {
			t.Setenv(p.Variable(), natsPassword+p.Login())
		}
		b := testkit.NATSWith(t, "accounts { TIDINGS: { jetstream: enabled, users: [{user: relay, password: $NATS_PASSWORD_RELAY}] } }")
		l := &natsLogins{b, func(login string) nats.Option { return nats.UserInfo(login, natsPassword+login) }}
		declareOne(l)
		for range 2 {
			b.Reload(t, broker.Users(replyNaming, some))
		}
		names(l, "api", "consumer", "operator", "t7_mailer")
		for range 2 {
			b.Reload(t, broker.Users(replyNaming, all))
		}
		names(l, "api", "consumer", "operator", "t7_mailer", "t8_mailer", "svc")
	})
	t.Run("credentials", func(t *testing.T) {
		keys, dir, conf := make(broker.Keys), t.TempDir(), ""
		l := &natsLogins{opts: func(login string) nats.Option { return nats.UserCredentials(filepath.Join(dir, login+".creds")) }}
		for _, who := range [][]broker.Principal{some, all} {
			if _, err = keys.Add(who); err != nil {
				t.Fatal(err)
			}
			if conf, err = keys.Server(replyNaming, who); err != nil {
				t.Fatal(err)
			}
			for _, p := range who {
				creds, err := keys.Credentials(replyNaming, p, 0)
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, p.Login()+".creds"), creds, 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if l.b == nil {
				l.b = testkit.NATSWith(t, conf)
				declareOne(l)
			} else {
				l.b.Reload(t, conf)
			}
			names(l, "api", "consumer", "operator", "t7_mailer")
		}
		names(l, "t8_mailer", "svc")
	})
}
