package broker_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/pglocal"
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

func TestDefaultsAreValid(t *testing.T) {
	var cfg broker.Config
	if err := envconfig.ProcessWith(t.Context(), &envconfig.Config{Target: &cfg, Lookuper: envconfig.MapLookuper(nil)}); err != nil {
		t.Fatal(err)
	}
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	want := broker.Config{URL: "nats://127.0.0.1:4222", Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxAge: 30 * 24 * time.Hour,
		MaxBytes: -1, Timeout: 5 * time.Second}
	if d := cmp.Diff(want, cfg); d != "" {
		t.Error(d)
	}
}

func TestValidateNamesEveryViolation(t *testing.T) {
	err := broker.Config{TLSCert: "cert.pem", Stream: "a.b", Prefix: "x.y", LivePrefix: "*", Replicas: 6, MaxAge: time.Second, MaxBytes: 0}.Validate()
	for _, name := range []string{"NATS_URL", "NATS_STREAM", "NATS_SUBJECT_PREFIX", "NATS_LIVE_PREFIX", "NATS_REPLICAS", "NATS_MAX_AGE", "NATS_MAX_BYTES", "NATS_TIMEOUT", "NATS_TLS_KEY"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v does not name %s", err, name)
		}
	}
}

func TestStreamIsDeclaredAsTheProtocolsNeedIt(t *testing.T) {
	b := testkit.NATS(t)
	stream, err := broker.EnsureStream(t.Context(), js(t, b.Connect(t)), b.Config())
	if err != nil {
		t.Fatal(err)
	}
	c := stream.CachedInfo().Config
	for what, ok := range map[string]bool{
		"file storage":     c.Storage == jetstream.FileStorage,
		"limits retention": c.Retention == jetstream.LimitsPolicy,
		"30 days":          c.MaxAge == 30*24*time.Hour,
		"discard new":      c.Discard == jetstream.DiscardNew,
		"atomic publish":   c.AllowAtomicPublish,
		"direct get":       c.AllowDirect,
		"deletes allowed":  !c.DenyDelete,
		"no rollup":        !c.AllowRollup,
		"100 ms window":    c.Duplicates == 100*time.Millisecond,
		"republished":      c.RePublish != nil && c.RePublish.Source == b.Config().Prefix+".>" && c.RePublish.Destination == b.Config().LivePrefix+".>",
		"generation 1":     c.Metadata[broker.MetaGeneration] == "1",
	} {
		if !ok {
			t.Errorf("the stream is not: %s", what)
		}
	}
	if got, want := c.Metadata[broker.MetaPartitions], "32"; got != want || event.Partitions != 32 {
		t.Errorf("the stream says %s partitions, package event %d, want %s", got, event.Partitions, want)
	}
}

func TestExistingStreamKeepsItsGenerationAndIsBroughtUpToDate(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	stream, err := broker.EnsureStream(t.Context(), s, b.Config())
	if err != nil {
		t.Fatal(err)
	}
	c := stream.CachedInfo().Config
	c.Metadata[broker.MetaGeneration] = "7"
	c.Duplicates = time.Minute
	c.AllowAtomicPublish = false
	if _, err := s.UpdateStream(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	cfg := b.Config()
	cfg.MaxAge = 2 * cfg.MaxAge
	if stream, err = broker.EnsureStream(t.Context(), s, cfg); err != nil {
		t.Fatal(err)
	}
	got := stream.CachedInfo().Config
	if got.Metadata[broker.MetaGeneration] != "7" || got.Duplicates != 100*time.Millisecond || !got.AllowAtomicPublish || got.MaxAge != cfg.MaxAge {
		t.Errorf("generation %s, window %s, atomic %v, age %s", got.Metadata[broker.MetaGeneration], got.Duplicates, got.AllowAtomicPublish, got.MaxAge)
	}
}

func TestDeclaringNeverShrinksTheStream(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	small, large, all := b.Config(), b.Config(), b.Config()
	small.MaxAge, small.MaxBytes = 24*time.Hour, 1<<20
	large.MaxAge, large.MaxBytes = 48*time.Hour, 2<<20
	all.MaxAge, all.MaxBytes = 0, -1
	declare := func(cfg broker.Config) jetstream.StreamConfig {
		t.Helper()
		stream, err := broker.EnsureStream(t.Context(), s, cfg)
		if err != nil {
			t.Fatal(err)
		}
		return stream.CachedInfo().Config
	}
	c := declare(large)
	c.MaxMsgSize, c.Metadata["team"] = 100_000, "social" // an operator's
	if _, err := s.UpdateStream(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if c := declare(small); c.MaxAge != large.MaxAge || c.MaxBytes != large.MaxBytes || c.MaxMsgSize != 100_000 || c.Metadata["team"] != "social" {
		t.Errorf("the stream has now %s, %d bytes, %d bytes per message, %v", c.MaxAge, c.MaxBytes, c.MaxMsgSize, c.Metadata)
	}
	if c := declare(all); c.MaxAge != 0 || c.MaxBytes != -1 {
		t.Errorf("without limits it has %s, %d bytes", c.MaxAge, c.MaxBytes)
	}
	if c := declare(large); c.MaxAge != 0 || c.MaxBytes != -1 {
		t.Errorf("it had no limits, and has now %s, %d bytes", c.MaxAge, c.MaxBytes)
	}
}

// cluster starts three servers and returns how to reach them.
func cluster(t *testing.T) broker.Config {
	t.Helper()
	if testing.Short() {
		t.Skip("needs servers")
	}
	var ports [3]int
	var routes []*url.URL
	for i := range ports {
		var err error
		if ports[i], err = pglocal.FreePort(); err != nil {
			t.Fatal(err)
		}
		routes = append(routes, &url.URL{Scheme: "nats", Host: fmt.Sprintf("127.0.0.1:%d", ports[i])})
	}
	var servers []*server.Server
	for i, port := range ports {
		srv, err := server.NewServer(&server.Options{
			ServerName: fmt.Sprintf("n%d", i), Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true,
			JetStream: true, StoreDir: t.TempDir(), Cluster: server.ClusterOpts{Name: "tidings", Host: "127.0.0.1", Port: port}, Routes: routes,
		})
		if err != nil {
			t.Fatal(err)
		}
		srv.Start()
		t.Cleanup(srv.WaitForShutdown)
		t.Cleanup(srv.Shutdown)
		if !srv.ReadyForConnections(10 * time.Second) {
			t.Fatal("no server")
		}
		servers = append(servers, srv)
	}
	testkit.Eventually(t, 30*time.Second, "a leader, and everybody to know", func() (bool, error) {
		for _, srv := range servers {
			if h := srv.Healthz(&server.HealthzOptions{}); h.Status != "ok" {
				return false, errors.New(h.Error)
			}
		}
		return true, nil
	})
	return broker.Config{URL: servers[0].ClientURL(), Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxAge: time.Hour, MaxBytes: -1, Timeout: 20 * time.Second}
}

func TestOneDeclarerWithFewerReplicasTakesNoneAway(t *testing.T) {
	cfg := cluster(t)
	nc, err := broker.Connect(cfg, "test", testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	s := js(t, nc)
	for _, replicas := range []int{3, 1} {
		cfg.Replicas = replicas
		if _, err := broker.EnsureStream(t.Context(), s, cfg); err != nil {
			t.Fatal(err)
		}
		stream, err := s.Stream(t.Context(), cfg.Stream)
		if err != nil {
			t.Fatal(err)
		}
		if got := stream.CachedInfo().Config.Replicas; got != 3 {
			t.Errorf("declared with %d, the stream has %d replicas", replicas, got)
		}
	}
}

func TestWhoeverSetsMetadataKeepsThatOfOthers(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	known, err := broker.EnsureStream(t.Context(), s, b.Config()) // before the operator's change
	if err != nil {
		t.Fatal(err)
	}
	for seq := range 3 {
		if _, err := s.Publish(t.Context(), b.Config().Prefix+".p00.x", nil, jetstream.WithMsgID(fmt.Sprint(seq))); err != nil {
			t.Fatal(err)
		}
	}
	c := known.CachedInfo().Config
	c.Metadata = maps.Clone(c.Metadata)
	c.Metadata["team"], c.MaxMsgSize = "social", 100_000
	if _, err := s.UpdateStream(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := broker.SetMetadata(t.Context(), s, known, broker.MetaGeneration, func(string) string { return "2" }); err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Erase(t.Context(), s, b.Config(), []broker.Doomed{{Seq: 1, MsgID: "0"}}); err != nil {
		t.Fatal(err)
	}
	stream, err := broker.EnsureStream(t.Context(), s, b.Config())
	if err != nil {
		t.Fatal(err)
	}
	got := stream.CachedInfo().Config
	if m := got.Metadata; m["team"] != "social" || m[broker.MetaGeneration] != "2" || m[broker.MetaErased] != "1-1" || m[broker.MetaPartitions] != "32" || got.MaxMsgSize != 100_000 {
		t.Errorf("the stream has %v, messages of %d bytes", m, got.MaxMsgSize)
	}
}

func TestAStreamShrinksWhenTold(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	cfg := b.Config()
	if _, err := broker.EnsureStream(t.Context(), s, cfg); err != nil {
		t.Fatal(err)
	}
	day, size := 24*time.Hour, int64(1<<20)
	got, err := broker.Configure(t.Context(), s, cfg, broker.Limits{MaxAge: &day})
	if err != nil || got.MaxAge != day || got.MaxBytes != -1 || got.Replicas != 1 {
		t.Errorf("got %s, %d, %d, %v", got.MaxAge, got.MaxBytes, got.Replicas, err)
	}
	if got, err = broker.Configure(t.Context(), s, cfg, broker.Limits{MaxBytes: &size}); err != nil || got.MaxAge != day || got.MaxBytes != size {
		t.Errorf("got %s, %d, %v", got.MaxAge, got.MaxBytes, err)
	}
	second := time.Second
	if _, err = broker.Configure(t.Context(), s, cfg, broker.Limits{MaxAge: &second}); err == nil {
		t.Error("an age of a second was taken")
	}
	less := cfg
	less.MaxAge, less.MaxBytes = time.Hour, 1000
	if got := strings.Join(less.Less(got), "; "); !strings.Contains(got, "NATS_MAX_AGE is 1h0m0s, the stream has 24h") || !strings.Contains(got, "NATS_MAX_BYTES is 1000, the stream has 1048576") {
		t.Errorf("got %q", got)
	}
}

func TestManyProcessesMayDeclareTheStreamAtOnce(t *testing.T) {
	b := testkit.NATS(t)
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for range cap(errs) {
		s := js(t, b.Connect(t))
		wg.Go(func() {
			_, err := broker.EnsureStream(t.Context(), s, b.Config())
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

// The server removes the folders of an account that lost its last stream in the background.
func TestAStreamIsDeclaredAtOnceAfterItsDeletion(t *testing.T) {
	b := testkit.NATS(t)
	s := js(t, b.Connect(t))
	for range 300 {
		if _, err := broker.EnsureStream(t.Context(), s, b.Config()); err != nil {
			t.Fatal(err)
		}
		if err := s.DeleteStream(t.Context(), b.Config().Stream); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStreamOfAnotherShapeIsRefused(t *testing.T) {
	good := map[string]string{broker.MetaGeneration: "1", broker.MetaPartitions: "32"}
	for name, change := range map[string]func(*jetstream.StreamConfig){
		"its subjects are others":    func(c *jetstream.StreamConfig) { c.Subjects = []string{"orders.>"} },
		"its storage is memory":      func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage },
		"its messages end when read": func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy },
		"it denies deletes":          func(c *jetstream.StreamConfig) { c.DenyDelete = true },
		"it was made for something":  func(c *jetstream.StreamConfig) { c.Metadata = nil },
		"it has 16 partitions": func(c *jetstream.StreamConfig) {
			c.Metadata = map[string]string{broker.MetaGeneration: "1", broker.MetaPartitions: "16"}
		},
		"it answers before it has kept": func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode },
	} {
		t.Run(name, func(t *testing.T) {
			b := testkit.NATS(t)
			s := js(t, b.Connect(t))
			c := jetstream.StreamConfig{Name: b.Config().Stream, Subjects: []string{b.Config().Prefix + ".>"}, Storage: jetstream.FileStorage, Metadata: good}
			change(&c)
			if _, err := s.CreateStream(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			before, err := s.Stream(t.Context(), c.Name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := broker.EnsureStream(t.Context(), s, b.Config()); !errors.Is(err, broker.ErrStreamShape) {
				t.Errorf("error %v, want ErrStreamShape", err)
			}
			after, err := s.Stream(t.Context(), c.Name)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(before.CachedInfo().Config, after.CachedInfo().Config); d != "" {
				t.Errorf("the stream was changed: %s", d)
			}
		})
	}
}

func TestStoredEventsAreRepublishedToPlainSubscribers(t *testing.T) {
	b := testkit.NATS(t)
	nc := b.Connect(t)
	s := js(t, nc)
	if _, err := broker.EnsureStream(t.Context(), s, b.Config()); err != nil {
		t.Fatal(err)
	}
	sub, err := nc.SubscribeSync(b.Config().LivePrefix + ".>")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Publish(t.Context(), b.Config().Prefix+".p17.t1.follow.created", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	m, err := sub.NextMsg(5 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if want := b.Config().LivePrefix + ".p17.t1.follow.created"; m.Subject != want {
		t.Errorf("subject %s, want %s", m.Subject, want)
	}
}

func TestConnectionWaitsForAServerThatIsNotThereYet(t *testing.T) {
	b := testkit.NATSProcess(t)
	b.Kill(t)
	nc := b.Connect(t)
	if err := nc.Publish("x", nil); err == nil {
		t.Error("a publish was taken before there ever was a connection")
	}
	b.Restart(t)
	testkit.Eventually(t, 10*time.Second, "the connection is made", func() (bool, error) { return nc.IsConnected(), nil })
	if err := nc.FlushTimeout(5 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestMissingPermissionIsLogged(t *testing.T) {
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true,
		Users: []*server.User{{Username: "u", Password: "p", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{"events.>"}}}}}})
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
	cfg := broker.Config{URL: strings.Replace(srv.ClientURL(), "nats://", "nats://u:p@", 1), Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1,
		MaxBytes: -1, Timeout: time.Second}
	nc, err := broker.Connect(cfg, "test", slog.New(slog.NewTextHandler(&out, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.Publish("events.p00.x", nil); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 5*time.Second, "the violation is in the log", func() (bool, error) {
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
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxBytes: -1, Timeout: 5 * time.Second}
	for round := uint64(1); round <= 2; round++ {
		srv, err := broker.StartServer(broker.ServerConfig{Dir: dir, Log: testkit.Logger(t)})
		if err != nil {
			t.Fatal(err)
		}
		cfg.URL = srv.URL()
		nc, err := broker.Connect(cfg, "test", testkit.Logger(t), srv.InProcess())
		if err != nil {
			t.Fatal(err)
		}
		s := js(t, nc)
		if _, err := broker.EnsureStream(t.Context(), s, cfg); err != nil {
			t.Fatal(err)
		}
		ack, err := s.Publish(t.Context(), "events.p00.t1.follow.created", nil)
		if err != nil {
			t.Fatal(err)
		}
		if ack.Sequence != round {
			t.Errorf("start %d: sequence %d", round, ack.Sequence)
		}
		nc.Close()
		srv.Shutdown()
		srv.Shutdown() // again: nothing
	}
}

func TestTakenPortIsReported(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a server")
	}
	one, err := broker.StartServer(broker.ServerConfig{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer one.Shutdown()
	port := portOf(t, one.URL())
	if two, err := broker.StartServer(broker.ServerConfig{Dir: t.TempDir(), Port: port}); err == nil {
		two.Shutdown()
		t.Error("two servers on one port")
	} else if !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("error %v does not say that the address is in use", err)
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
	config, err := server.GenTLSConfig(&server.TLSConfigOpts{CertFile: srvCert.CertFile, KeyFile: srvCert.KeyFile, CaFile: clientCert.CertFile, Verify: true, Timeout: 5})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true, TLS: true, TLSVerify: true, TLSConfig: config, TLSTimeout: 5})
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
		Stream: "EVENTS", Prefix: "events", LivePrefix: "live", Replicas: 1, MaxBytes: -1, Timeout: 5 * time.Second}
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
			err = errors.Join(err, nc.FlushTimeout(5*time.Second)) // a client's certificate is refused after the handshake
			nc.Close()
		}
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := broker.Connect(broker.Config{URL: good.URL, TLSCA: "absent.pem", Stream: "E", Prefix: "a", LivePrefix: "b", Replicas: 1, MaxBytes: -1, Timeout: 1},
		"test", slog.New(slog.DiscardHandler)); err == nil {
		t.Error("an authority that cannot be read was ignored")
	}
}
