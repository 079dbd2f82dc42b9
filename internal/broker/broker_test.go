package broker_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func js(t *testing.T, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	s, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// whole is the partition of a new installation.
var whole = broker.Partition{LastSlot: event.Slots - 1}

func declare(t *testing.T, s jetstream.JetStream, cfg broker.Config, p broker.Partition) broker.Stream {
	t.Helper()
	stream, err := broker.Declare(t.Context(), s, cfg, p, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// config returns a stream's configuration on the server.
func config(t *testing.T, s jetstream.JetStream, name string) jetstream.StreamConfig {
	t.Helper()
	stream, err := s.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return stream.CachedInfo().Config
}

func TestDefaultsAreValid(t *testing.T) {
	var cfg broker.Config
	if err := envconfig.ProcessWith(t.Context(), &envconfig.Config{Target: &cfg, Lookuper: envconfig.MapLookuper(nil)}); err != nil {
		t.Fatal(err)
	}
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	want := broker.Config{URL: "nats://127.0.0.1:4222", InboxPrefix: "_INBOX", Stream: "EVENTS", Prefix: "events", LivePrefix: "live",
		Source: "/tidings", Replicas: 1, MaxAge: 30 * 24 * time.Hour, MaxBytes: -1, Timeout: 5 * time.Second, Ping: 2 * time.Second}
	if d := cmp.Diff(want, cfg); d != "" {
		t.Error(d)
	}
}

func TestValidateNamesEveryViolation(t *testing.T) {
	err := broker.Config{TLSCert: "cert.pem", Stream: "a.b", Prefix: "x.y", LivePrefix: "*", Replicas: 6, Tags: []string{"a b"},
		MaxAge: time.Second, MaxBytes: 0}.Validate()
	for _, name := range []string{"NATS_URL", "NATS_STREAM", "NATS_SUBJECT_PREFIX", "NATS_LIVE_PREFIX", "NATS_REPLICAS",
		"NATS_PLACEMENT_TAGS", "NATS_MAX_AGE", "NATS_MAX_BYTES", "NATS_TIMEOUT", "NATS_PING_INTERVAL", "NATS_TLS_KEY"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v does not name %s", err, name)
		}
	}
}

func TestStreamIsDeclaredAsTheProtocolsNeedIt(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	p := broker.Partition{Number: 12, FirstSlot: 8, LastSlot: 15, After: []int{3, 4}}
	got := declare(t, s, b.Config(), p)
	c := config(t, s, got.Name)
	for what, ok := range map[string]bool{
		"named for its partition": c.Name == b.Config().Stream+"-12",
		"on its own subjects":     len(c.Subjects) == 1 && c.Subjects[0] == b.Config().Prefix+".12.>",
		"file storage":            c.Storage == jetstream.FileStorage,
		"limits retention":        c.Retention == jetstream.LimitsPolicy,
		"30 days":                 c.MaxAge == 30*24*time.Hour,
		"discard new":             c.Discard == jetstream.DiscardNew,
		"atomic publish":          c.AllowAtomicPublish,
		"deletes allowed":         !c.DenyDelete,
		"purges denied":           c.DenyPurge,
		"no rollup":               !c.AllowRollup,
		"100 ms window":           c.Duplicates == 100*time.Millisecond,
		"republished": c.RePublish != nil && c.RePublish.Source == b.Config().Prefix+".12.*.*.*" &&
			strings.HasPrefix(c.RePublish.Destination, b.Config().LivePrefix+"."),
		"its slots known": c.Metadata[broker.MetaSlots] == "8-15" && c.Metadata[broker.MetaAfter] == "3 4",
	} {
		if !ok {
			t.Errorf("the stream lacks: %s", what)
		}
	}
	if d := cmp.Diff(p, got.Partition); d != "" {
		t.Errorf("the stream's partition (-want +got):\n%s", d)
	}
	read, err := broker.ReadStream(t.Context(), s, b.Config(), 12)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(got, read, cmpopts.IgnoreFields(broker.Stream{}, "At")); d != "" || time.Since(read.At).Abs() > time.Minute {
		t.Errorf("read at %s (-declared +read):\n%s", read.At, d)
	}
}

// TestDeclaringAgainNeverShrinksAStream: a process with lower limits changes none that others or an
// operator set.
func TestDeclaringAgainNeverShrinksAStream(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	cfg := b.Config()
	cfg.MaxAge, cfg.MaxBytes = 48*time.Hour, 1<<20
	name := declare(t, s, cfg, whole).Name
	c := config(t, s, name)
	c.Metadata["operator"] = "ann"
	c.Duplicates = time.Minute
	c.AllowAtomicPublish = false
	if _, err := s.UpdateStream(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		what      string
		age, want time.Duration
		bytes     int64
		wantBytes int64
	}{
		{"the same", 48 * time.Hour, 48 * time.Hour, 1 << 20, 1 << 20},
		{"less", time.Hour, 48 * time.Hour, 1 << 10, 1 << 20},
		{"more", 72 * time.Hour, 72 * time.Hour, 1 << 21, 1 << 21},
		{"no limit", 0, 0, -1, -1},
		{"a limit again", time.Hour, 0, 1 << 20, -1},
	} {
		cfg.MaxAge, cfg.MaxBytes = step.age, step.bytes
		declare(t, s, cfg, whole)
		if got := config(t, s, name); got.MaxAge != step.want || got.MaxBytes != step.wantBytes || got.Metadata["operator"] != "ann" ||
			got.Metadata[broker.MetaSlots] != "0-31" || got.Duplicates != 100*time.Millisecond || !got.AllowAtomicPublish {
			t.Errorf("declared with %s: age %s, %d bytes, metadata %v, window %s, atomic %t", step.what, got.MaxAge, got.MaxBytes,
				got.Metadata, got.Duplicates, got.AllowAtomicPublish)
		}
	}
}

// TestStreamsShrinkWhenTold: Configure lowers limits of all partitions' streams, and only those
// that it names.
func TestStreamsShrinkWhenTold(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	cfg := b.Config()
	declare(t, s, cfg, broker.Partition{Number: 1, LastSlot: 15, After: []int{0}})
	declare(t, s, cfg, broker.Partition{Number: 2, FirstSlot: 16, LastSlot: 31, After: []int{0}})
	day, size, second := 24*time.Hour, int64(1<<20), time.Second
	for _, step := range []struct {
		limits broker.Limits
		bytes  int64
	}{{broker.Limits{MaxAge: &day}, -1}, {broker.Limits{MaxBytes: &size}, size}} {
		got, err := broker.Configure(t.Context(), s, cfg, step.limits)
		if err != nil {
			t.Fatal(err)
		}
		want := []broker.Configured{{Stream: cfg.StreamName(1), Replicas: 1, MaxAge: day, MaxBytes: step.bytes},
			{Stream: cfg.StreamName(2), Replicas: 1, MaxAge: day, MaxBytes: step.bytes}}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("configured (-want +got):\n%s", d)
		}
		for _, w := range want {
			if c := config(t, s, w.Stream); c.MaxAge != w.MaxAge || c.MaxBytes != w.MaxBytes {
				t.Errorf("%s has %s, %d bytes", w.Stream, c.MaxAge, c.MaxBytes)
			}
		}
	}
	if _, err := broker.Configure(t.Context(), s, cfg, broker.Limits{MaxAge: &second}); err == nil {
		t.Error("an age of a second was accepted")
	}
}

// TestNobodyPurgesAStream: the server refuses to purge a stream of events or dead letters, also for
// a login that may request it. Streams of an older release, which allowed purges, get the same.
func TestNobodyPurgesAStream(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	cfg := b.Config()
	dead := cfg.Stream + "-dead"
	for n := 1; n <= 2; n++ { // as an older release made them
		source, destination := fmt.Sprintf("%s.%d.*.*.*", cfg.Prefix, n), cfg.LivePrefix+".{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}"
		if _, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: cfg.StreamName(n),
			Subjects:  []string{event.Subjects(cfg.Prefix, n)},
			RePublish: &jetstream.RePublish{Source: source, Destination: destination},
			Metadata:  map[string]string{broker.MetaSlots: "0-31", broker.MetaAfter: ""}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: dead, Subjects: []string{dead + ".*.*"}}); err != nil {
		t.Fatal(err)
	}
	attack := func(name string, want bool) {
		t.Helper()
		stream, err := s.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		err = stream.Purge(t.Context())
		if refused := err != nil && strings.Contains(err.Error(), "purge not permitted"); refused != want {
			t.Errorf("a purge of %s: %v; want it refused: %t", name, err, want)
		}
	}
	attack(cfg.StreamName(1), false)
	attack(cfg.StreamName(2), false)
	attack(dead, false)

	declare(t, s, cfg, whole)
	declare(t, s, cfg, broker.Partition{Number: 1, LastSlot: event.Slots - 1})
	attack(cfg.StreamName(0), true)
	attack(cfg.StreamName(1), true)
	day := 24 * time.Hour // no relay declares the stream of a closed partition
	if _, err := broker.Configure(t.Context(), s, cfg, broker.Limits{MaxAge: &day}); err != nil {
		t.Fatal(err)
	}
	attack(cfg.StreamName(2), true)
	attack(dead, true)

	// erasures delete messages
	ack, err := s.Publish(t.Context(), cfg.Prefix+".0.t1.follow.created", nil)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := s.Stream(t.Context(), ack.Stream)
	if err == nil {
		err = stream.SecureDeleteMsg(t.Context(), ack.Sequence)
	}
	if err != nil {
		t.Error(err)
	}
}

func TestTheStreamsOfAllPartitionsAreListed(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	if got, err := broker.Streams(t.Context(), s, b.Config()); err != nil || len(got) != 0 {
		t.Errorf("streams of a new broker: %v, %v", got, err)
	}
	want := []broker.Partition{whole, {Number: 1, LastSlot: 15, After: []int{0}}, {Number: 2, FirstSlot: 16, LastSlot: 31, After: []int{0}},
		{Number: 10, LastSlot: 31, After: []int{1, 2}}}
	for _, i := range []int{3, 1, 0, 2} {
		declare(t, s, b.Config(), want[i])
	}
	other := b.Config() // another installation on the same broker
	other.Stream, other.Prefix, other.LivePrefix = b.Config().Stream+"-X", b.Config().Prefix+"x", b.Config().LivePrefix+"x"
	declare(t, s, other, whole)
	if _, err := s.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}}); err != nil {
		t.Fatal(err)
	}
	all, err := broker.Streams(t.Context(), s, b.Config())
	if err != nil {
		t.Fatal(err)
	}
	var got []broker.Partition
	for _, stream := range all {
		got = append(got, stream.Partition)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("streams (-want +got):\n%s", d)
	}
	if _, err := broker.ReadStream(t.Context(), s, b.Config(), 3); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("a partition without a stream: %v, want ErrStreamNotFound", err)
	}
}

func TestNextPassesDeletedMessages(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	name := declare(t, s, b.Config(), whole).Name
	for i := range 4 {
		msg := nats.NewMsg(b.Config().Prefix + ".0.t1.follow.created")
		msg.Data = []byte{byte('1' + i)}
		msg.Header.Set("ce-id", msg.Subject)
		if _, err := s.PublishMsg(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := s.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{1, 3} {
		if err := stream.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	for from, want := range map[uint64]uint64{0: 2, 1: 2, 2: 2, 3: 4, 4: 4} {
		got, err := broker.Next(t.Context(), s, name, from)
		if err != nil || got == nil || got.Seq != want || string(got.Data) != strconv.Itoa(int(want)) ||
			got.Header.Get("ce-id") != got.Subject || got.Time.IsZero() {
			t.Errorf("from %d: %+v, %v; want message %d", from, got, err, want)
		}
	}
	if got, err := broker.Next(t.Context(), s, name, 5); got != nil || err != nil {
		t.Errorf("after the last message: %+v, %v", got, err)
	}
	if _, err := broker.Next(t.Context(), s, "ABSENT", 1); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Errorf("of an unknown stream: %v, want ErrStreamNotFound", err)
	}
}

func TestAnOfflineStreamIsWaitedFor(t *testing.T) {
	for code, want := range map[jetstream.ErrorCode]bool{10118: true, jetstream.JSErrCodeStreamNotFound: false} {
		err := fmt.Errorf("look up a stream: %w", &jetstream.APIError{Code: 500, ErrorCode: code})
		if broker.IsLeaderless(err) != want || broker.IsTransient(err) != want {
			t.Errorf("code %d: leaderless %t, transient %t", code, broker.IsLeaderless(err), broker.IsTransient(err))
		}
	}
}

func TestForeignMessagesDoNotHideTheClosingMessage(t *testing.T) {
	b := testkit.NATS(t)
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	s, err := broker.Declare(t.Context(), js, b.Config(), broker.Partition{LastSlot: event.Slots - 1}, testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	subject, headers := event.ClosingMessage(b.Config().Prefix, 0)
	for n, step := range []struct {
		m    *nats.Msg
		want uint64
	}{
		{&nats.Msg{Subject: b.Config().Prefix + ".0.foreign"}, 0},
		{&nats.Msg{Subject: subject}, 0},
		{&nats.Msg{Subject: subject, Header: headers}, 3},
		{&nats.Msg{Subject: subject}, 3},
		{&nats.Msg{Subject: b.Config().Prefix + ".0.foreign"}, 3},
	} {
		if _, err := js.PublishMsg(t.Context(), step.m); err != nil {
			t.Fatal(err)
		}
		if final, err := broker.Closed(t.Context(), js, b.Config(), s); err != nil || final != step.want {
			t.Errorf("after message %d: the closing message is %d, %v; want %d", n+1, final, err, step.want)
		}
	}
}

// TestAStreamHasEndedAlsoOnceItsClosingMessageHasExpired: a relay publishes to a new stream only
// after it has closed the old one.
func TestAStreamHasEndedAlsoOnceItsClosingMessageHasExpired(t *testing.T) {
	b := testkit.NATS(t)
	cfg := b.Config()
	js, err := jetstream.New(b.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	declare := func(p broker.Partition) {
		t.Helper()
		if _, err := broker.Declare(t.Context(), js, cfg, p, testkit.Logger(t)); err != nil {
			t.Fatal(err)
		}
	}
	publish := func(m *nats.Msg) {
		t.Helper()
		if _, err := js.PublishMsg(t.Context(), m); err != nil {
			t.Fatal(err)
		}
	}
	expire := func() {
		t.Helper()
		s, err := js.Stream(t.Context(), cfg.StreamName(0))
		if err != nil {
			t.Fatal(err)
		}
		testkit.Expire(t, s, 0)
	}
	check := func(when string, want bool) {
		t.Helper()
		all, err := broker.Streams(t.Context(), js, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if ended, err := broker.Ended(t.Context(), js, cfg, all[0], all); err != nil || ended != want {
			t.Errorf("%s: ended: %v, %v; want %v", when, ended, err, want)
		}
	}
	subject, headers := event.ClosingMessage(cfg.Prefix, 0)
	old, next := &nats.Msg{Subject: cfg.Prefix + ".0.x"}, &nats.Msg{Subject: cfg.Prefix + ".2.x"}

	declare(broker.Partition{LastSlot: event.Slots - 1})
	check("without a message", false)
	publish(old)
	check("with a message", false)
	expire()
	declare(broker.Partition{Number: 1, LastSlot: 15, After: []int{0}})
	declare(broker.Partition{Number: 2, FirstSlot: 16, LastSlot: event.Slots - 1, After: []int{0}})
	check("when its messages have expired, and its successors have none yet", false)
	publish(&nats.Msg{Subject: subject, Header: headers})
	check("with the closing message", true)
	publish(next)
	check("with the closing message, and a message on a successor", true)
	expire()
	check("when the closing message has expired", true)
	publish(old)
	check("with a message and without the closing message, which no relay makes", false)
}

func TestManyProcessesMayDeclareTheStreamAtOnce(t *testing.T) {
	b := testkit.NATS(t)
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for range cap(errs) {
		s := js(t, b.Connect(t))
		wg.Go(func() {
			_, err := broker.Declare(t.Context(), s, b.Config(), whole, testkit.Logger(t))
			errs <- err
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
}

// After the deletion of an account's last stream, the server removes its folders in the background.
func TestAStreamIsDeclaredAtOnceAfterItsDeletion(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	for range 300 {
		if err := s.DeleteStream(t.Context(), declare(t, s, b.Config(), whole).Name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStreamOfAnotherShapeIsRefused(t *testing.T) {
	good := map[string]string{broker.MetaSlots: "0-31", broker.MetaAfter: ""}
	for name, change := range map[string]func(*jetstream.StreamConfig){
		"its subjects are others":    func(c *jetstream.StreamConfig) { c.Subjects = []string{"other-" + c.Name + ".>"} },
		"its storage is memory":      func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage },
		"its messages end when read": func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy },
		"it denies deletes":          func(c *jetstream.StreamConfig) { c.DenyDelete = true },
		"it was made for something":  func(c *jetstream.StreamConfig) { c.Metadata = nil },
		"it has other slots":         func(c *jetstream.StreamConfig) { c.Metadata = map[string]string{broker.MetaSlots: "0-15"} },
		"it comes after another": func(c *jetstream.StreamConfig) {
			c.Metadata = map[string]string{broker.MetaSlots: "0-31", broker.MetaAfter: "7"}
		},
		"it answers before it has kept": func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode },
	} {
		t.Run(name, func(t *testing.T) {
			b := testkit.NATS(t)
			s := js(t, b.Connect(t))
			c := jetstream.StreamConfig{Name: b.Config().StreamName(0), Subjects: []string{b.Config().Prefix + ".0.>"},
				Storage: jetstream.FileStorage, Metadata: good}
			change(&c)
			if _, err := s.CreateStream(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			before, err := s.Stream(t.Context(), c.Name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := broker.Declare(t.Context(), s, b.Config(), whole, testkit.Logger(t)); !errors.Is(err, broker.ErrStreamShape) {
				t.Errorf("error %v, want ErrStreamShape", err)
			}
			after, err := s.Stream(t.Context(), c.Name)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(before.CachedInfo().Config, after.CachedInfo().Config); d != "" {
				t.Errorf("the stream changed: %s", d)
			}
		})
	}
}

func TestStoredEventsAreRepublishedToPlainSubscribers(t *testing.T) {
	b := testkit.NATS(t)
	nc := b.Connect(t)
	s := js(t, nc)
	declare(t, s, b.Config(), whole)
	sub, err := nc.SubscribeSync(b.Config().LivePrefix + ".>")
	if err != nil {
		t.Fatal(err)
	}
	// only one of these is an event for subscribers
	for _, subject := range []string{"system.t0.heartbeat.sent", "t1.follow.created", "closed"} {
		if _, err := s.Publish(t.Context(), b.Config().Prefix+".0."+subject, []byte("{}")); err != nil {
			t.Fatal(err)
		}
	}
	m, err := sub.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if want := b.Config().LivePrefix + ".t1.follow.created"; m.Subject != want {
		t.Errorf("subject %s, want %s", m.Subject, want)
	}
	if m.Header.Get("Nats-Stream") != b.Config().StreamName(0) || m.Header.Get("Nats-Sequence") != "2" {
		t.Errorf("its headers lack the stream or the sequence: %v", m.Header)
	}
	if m, err := sub.NextMsg(100 * time.Millisecond); err == nil {
		t.Errorf("%s is republished", m.Subject)
	}
}

func TestConnectionWaitsForAServerThatIsNotThereYet(t *testing.T) {
	b := testkit.NATSProcess(t)
	b.Kill(t)
	nc := b.Connect(t)
	if err := nc.Publish("x", nil); err == nil {
		t.Error("a publish was accepted before the first connection")
	}
	b.Restart(t)
	testkit.Eventually(t, "the connection is made", func() (bool, error) { return nc.IsConnected(), nil })
	if err := nc.FlushTimeout(5 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestAFailedConnectionNamesTheServersWithoutPasswords(t *testing.T) {
	t.Parallel()
	b := testkit.NATS(t)
	cfg := b.Config()
	one, other := testkit.FreeAddr(t), testkit.FreeAddr(t)
	cfg.URL = "nats://ann:secret@" + one + ", nats://ann:secret@" + other
	_, err := broker.Connect(cfg, "test", slog.New(slog.DiscardHandler), nats.RetryOnFailedConnect(false))
	if err == nil || !strings.Contains(err.Error(), "("+one+", "+other+")") || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v, want both addresses and no password", err)
	}
}

func TestMissingPermissionIsLogged(t *testing.T) {
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true,
		Users: []*server.User{{Username: "u", Password: "p",
			Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{"events.>"}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer srv.WaitForShutdown()
	defer srv.Shutdown()
	if !srv.ReadyForConnections(10 * time.Second) {
		t.Fatal("no server")
	}
	var out lockedBuffer
	cfg := broker.Config{URL: strings.Replace(srv.ClientURL(), "nats://", "nats://u:p@", 1), Stream: "EVENTS", Prefix: "events",
		LivePrefix: "live", Replicas: 1, MaxBytes: -1, Timeout: 10 * time.Second, Ping: time.Second}
	nc, err := broker.Connect(cfg, "test", slog.New(slog.NewTextHandler(&out, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.Publish("events.0.x", nil); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the violation is in the log", func() (bool, error) {
		return strings.Contains(strings.ToLower(out.String()), "permissions violation"), nil
	})
	if strings.Contains(out.String(), "u:p@") {
		t.Errorf("the log has the password: %s", out.String())
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestServerKeepsItsStoreAndServesInProcess(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	dir := t.TempDir()
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxBytes: -1,
		Timeout: 5 * time.Second, Ping: time.Second}
	for round := uint64(1); round <= 2; round++ {
		srv, err := natsserver.Start(natsserver.Config{Dir: dir, Log: testkit.Logger(t)})
		if err != nil {
			t.Fatal(err)
		}
		cfg.URL = srv.URL()
		nc, err := broker.Connect(cfg, "test", testkit.Logger(t), srv.InProcess())
		if err != nil {
			t.Fatal(err)
		}
		s := js(t, nc)
		declare(t, s, cfg, whole)
		ack, err := s.Publish(t.Context(), "events.0.t1.follow.created", nil)
		if err != nil {
			t.Fatal(err)
		}
		if ack.Sequence != round {
			t.Errorf("start %d: sequence %d", round, ack.Sequence)
		}
		nc.Close()
		srv.Shutdown()
		srv.Shutdown() // a second call does nothing
	}
}

// TestAServerGetsItsFirstUser has a store of a server that anybody could use.
func TestAServerGetsItsFirstUser(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	cfg := natsserver.Config{Dir: t.TempDir(), Log: testkit.Logger(t)}
	publish := func() uint64 {
		t.Helper()
		srv, err := natsserver.Start(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Shutdown()
		nc, err := nats.Connect(srv.URL())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		s := js(t, nc)
		if _, err := s.CreateOrUpdateStream(t.Context(), jetstream.StreamConfig{Name: "KEPT", Subjects: []string{"kept"}}); err != nil {
			t.Fatal(err)
		}
		ack, err := s.Publish(t.Context(), "kept", nil)
		if err != nil {
			t.Fatal(err)
		}
		if cfg.User == nil {
			return ack.Sequence
		}
		stranger := strings.Replace(srv.URL(), cfg.User.String()+"@", "", 1)
		if nc, err := nats.Connect(stranger); !errors.Is(err, nats.ErrAuthorization) {
			if err == nil {
				nc.Close()
			}
			t.Errorf("a connection to %s: %v, want %v", stranger, err, nats.ErrAuthorization)
		}
		return ack.Sequence
	}
	if got := publish(); got != 1 {
		t.Errorf("without a user: sequence %d", got)
	}
	cfg.User = url.UserPassword("u", "a/b@c")
	if got := publish(); got != 2 {
		t.Errorf("with a user: sequence %d, so the stream is another one", got)
	}
}

func TestTakenPortIsReported(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	one, err := natsserver.Start(natsserver.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Shutdown()
	port := portOf(t, one.URL())
	if two, err := natsserver.Start(natsserver.Config{Dir: t.TempDir(), Port: port}); err == nil {
		two.Shutdown()
		t.Error("two servers on one port")
	} else if !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("error %v does not report an address in use", err)
	}
}

func portOf(t *testing.T, raw string) int {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestConnectionIsEncryptedAndBothSidesAreChecked(t *testing.T) {
	srvCert, clientCert := testkit.NewCertificate(t), testkit.NewCertificate(t)
	config, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: srvCert.CertFile, KeyFile: srvCert.KeyFile,
		CaFile: clientCert.CertFile, Verify: true, Timeout: 5})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, TLS: true,
		TLSVerify: true, TLSConfig: config, TLSTimeout: 5})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer srv.WaitForShutdown()
	defer srv.Shutdown()
	if !srv.ReadyForConnections(10 * time.Second) {
		t.Fatal("no server")
	}
	good := broker.Config{URL: srv.ClientURL(), TLSCA: srvCert.CertFile, TLSCert: clientCert.CertFile, TLSKey: clientCert.KeyFile,
		Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxBytes: -1, Timeout: 5 * time.Second, Ping: time.Second}
	for name, c := range map[string]struct {
		change func(*broker.Config)
		ok     bool
	}{
		"both know each other":        {func(*broker.Config) {}, true},
		"the server is not known":     {func(c *broker.Config) { c.TLSCA = clientCert.CertFile }, false},
		"the client has none":         {func(c *broker.Config) { c.TLSCert, c.TLSKey = "", "" }, false},
		"the client's is not allowed": {func(c *broker.Config) { c.TLSCert, c.TLSKey = srvCert.CertFile, srvCert.KeyFile }, false},
	} {
		cfg := good
		c.change(&cfg)
		nc, err := broker.Connect(cfg, "test", slog.New(slog.DiscardHandler), nats.RetryOnFailedConnect(false))
		if err == nil {
			_, err = nc.TLSConnectionState()
			err = errors.Join(err, nc.FlushTimeout(5*time.Second)) // the server refuses a client's certificate after the handshake
			nc.Close()
		}
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := broker.Connect(broker.Config{URL: good.URL, TLSCA: "absent.pem", Stream: "E", Prefix: "a", LivePrefix: "b", Replicas: 1,
		MaxBytes: -1, Timeout: 1, Ping: time.Second},
		"test", slog.New(slog.DiscardHandler)); err == nil {
		t.Error("an unreadable authority was ignored")
	}
}

func TestAPrincipalThatIsNoneIsRefused(t *testing.T) {
	of := func(p broker.Principal) []broker.Principal { return []broker.Principal{p} }
	a := broker.Principal{Role: broker.Subscriber, Name: "mailer", Tenant: 7, Durable: true}
	all := map[string][]broker.Principal{
		"without a role":                   of(broker.Principal{}),
		"of no role":                       of(broker.Principal{Role: "admin"}),
		"a relay with a name":              of(broker.Principal{Role: broker.Relay, Name: "a"}),
		"a relay of a tenant":              of(broker.Principal{Role: broker.Relay, Tenant: 7}),
		"a consumer with a durable":        of(broker.Principal{Role: broker.Consumer, Durable: true}),
		"a second relay":                   of(broker.Principal{Role: broker.Relay}),
		"a subscriber without a name":      of(broker.Principal{Role: broker.Subscriber, Tenant: 7}),
		"a name with a dot":                of(broker.Principal{Role: broker.Subscriber, Name: "a.b"}),
		"a name with a wildcard":           of(broker.Principal{Role: broker.Subscriber, Name: "a*"}),
		"a name that is a number":          of(broker.Principal{Role: broker.Subscriber, Name: "1", Tenant: 7}),
		"the name of a tenant's":           of(broker.Principal{Role: broker.Subscriber, Name: "t7_mailer"}),
		"a negative tenant":                of(broker.Principal{Role: broker.Subscriber, Name: "a", Tenant: -1}),
		"a filter that is all":             of(broker.Principal{Role: broker.Subscriber, Name: "a", Filter: ">"}),
		"a filter that begins with a star": of(broker.Principal{Role: broker.Subscriber, Name: "a", Filter: "*.created"}),
		"a filter of three":                of(broker.Principal{Role: broker.Subscriber, Name: "a", Filter: "a.b.c"}),
		"a consumer with a name of others": of(broker.Principal{Role: broker.Consumer, Name: "t7_mailer"}),
		"two of one name":                  {a, a},
		"two with one password":            {{Role: broker.Subscriber, Name: "a-b"}, {Role: broker.Subscriber, Name: "a_b"}},
		"one durable for two": {{Role: broker.Subscriber, Name: "a-follow", Durable: true},
			{Role: broker.Subscriber, Name: "a", Durable: true, Filter: "follow.*"}},
	}
	for _, name := range []string{"relay", "api", "consumer", "operator", "subscriber", "console", "projector", "archiver", "Relay"} {
		all["the name "+name] = of(broker.Principal{Role: broker.Subscriber, Name: name, Tenant: 7})
	}
	for name, p := range all {
		if got, err := broker.Complete(p); err == nil {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestAStreamThatIsEmptyFromTheBeginningHasNotEnded has a stream whose successor has messages. Its
// leader knows none of its own messages yet: a stream that has ended has had a closing message.
func TestAStreamThatIsEmptyFromTheBeginningHasNotEnded(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	first := declare(t, s, b.Config(), whole)
	next := broker.Stream{Partition: broker.Partition{Number: 1, After: []int{0}}, Last: 1, Messages: 1}
	if ended, err := broker.Ended(t.Context(), s, b.Config(), first, []broker.Stream{first, next}); err != nil || ended {
		t.Errorf("ended: %v, %v", ended, err)
	}
}

// TestNoTwoTenantsShareAName: login, inbox, durable consumer and account of a tenant's subscriber
// name the tenant.
func TestNoTwoTenantsShareAName(t *testing.T) {
	of := func(tenant int64) string {
		p := broker.Principal{Role: broker.Subscriber, Name: "mailer", Tenant: tenant, Durable: true, Filter: "follow.created"}
		return strings.Join([]string{p.Login(), p.InboxPrefix(), p.DurableName(), p.Account()}, " ")
	}
	for tenant, want := range map[int64]string{7: "t7_mailer _INBOX_t7_mailer t7_mailer TENANT_7",
		8: "t8_mailer _INBOX_t8_mailer t8_mailer TENANT_8", 0: "mailer _INBOX_mailer mailer-follow-created SUBSCRIBER_mailer"} {
		if got := of(tenant); got != want {
			t.Errorf("tenant %d: %s, want %s", tenant, got, want)
		}
	}
}
