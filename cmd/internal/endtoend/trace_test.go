package endtoend_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sethvargo/go-envconfig"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/lease"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/relay"
	"github.com/tidings/tidings/store"
)

// traced is a line that keeps its spans. The relay reaches NATS through a proxy.
type traced struct {
	t      *testing.T
	ctx    context.Context
	spans  *tracetest.InMemoryExporter
	client client
	system *pgxpool.Pool
	nats   *testkit.Broker
	store  *store.Store
	proxy  *testkit.Proxy
	reg    *prometheus.Registry
	parent bool
}

// tracedTTL is longer than a stall. A batch that outlives its lease is applied again, and has a
// span for each time.
const tracedTTL = 30 * time.Second

var tracedConsumers = []string{followercounts.Name, history.Name}

func newTraced(t *testing.T, env map[string]string) *traced {
	db := testkit.Postgres(t)
	l := &traced{t: t, spans: tracetest.NewInMemoryExporter(), system: db.Pool(t, postgres.RoleSystem), nats: testkit.NATS(t),
		reg: prometheus.NewRegistry(), parent: env["TRACE_RELATION"] == "parent"}
	ctx, stop, err := daemon.Trace(context.WithoutCancel(t.Context()), envconfig.MapLookuper(env), "test", testkit.Logger(t), l.spans)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	var cancel context.CancelFunc
	l.ctx, cancel = context.WithCancel(ctx)
	var parts sync.WaitGroup
	t.Cleanup(func() { cancel(); parts.Wait() })
	run := func(name string, fn func(context.Context) error) {
		parts.Go(func() {
			if err := fn(l.ctx); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	js, err := jetstream.New(l.nats.Connect(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := broker.Declare(t.Context(), js, l.nats.Config(), broker.Partition{LastSlot: event.Slots - 1},
		testkit.Logger(t)); err != nil {
		t.Fatal(err)
	}
	pool := db.Pool(t, postgres.RoleAPI)
	l.store = store.New(pool, nil)
	cfg := api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 1 << 17, MaxBatchBytes: 1 << 20, PageCacheBytes: 1 << 20,
		RequestTimeout: 20 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: time.Second}
	handler, err := api.New(cfg, api.Deps{Store: l.store, Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
		Fleet: fleet.Projections(kinds.Builtin), Log: testkit.Logger(t), Reg: l.reg})
	if err != nil {
		t.Fatal(err)
	}
	token, err := tokens.Create(t.Context(), l.system, 1, "tester", tokens.Roles(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	l.client = client{ctx: l.ctx, handler: handler, token: token}
	u, err := url.Parse(l.nats.URL)
	if err != nil {
		t.Fatal(err)
	}
	l.proxy = testkit.NewProxy(t, u.Host)
	u.Host = l.proxy.Addr()
	through := l.nats.Config()
	through.URL, through.Ping = u.String(), time.Minute
	r, err := relay.New(relay.Config{BatchSize: 100, BatchBytes: 1 << 20, PollInterval: 10 * time.Millisecond,
		RoundInterval: 2 * time.Millisecond, PublishTimeout: 4 * time.Second, // longer than a stall, since only lostAck may meet it
		CheckInterval: time.Minute, DrainTimeout: 5 * time.Second, DatabaseTimeout: 10 * time.Second, Lease: lease.Config{TTL: tracedTTL}},
		l.system, through, testkit.Logger(t), l.reg)
	if err != nil {
		t.Fatal(err)
	}
	run("relay", r.Run)
	for _, name := range tracedConsumers {
		c, err := consumers.New(consumers.Config{BatchEvents: 200, BatchBytes: 1 << 20, ApplyTimeout: 20 * time.Second,
			LagInterval: 500 * time.Millisecond, Recheck: 500 * time.Millisecond, Lease: lease.Config{TTL: tracedTTL}},
			consumers.Deps{Pool: l.system, JetStream: js, Streams: consumers.Streams{Name: through.Stream, Prefix: through.Prefix,
				Timeout: through.Timeout}, Registry: l.reg, Log: testkit.Logger(t)}, projection(name, kinds.Builtin))
		if err != nil {
			t.Fatal(err)
		}
		run(name, c.Run)
	}
	return l
}

// call sends a write that must succeed.
func (l *traced) call(method, path, body string, headers ...string) {
	l.t.Helper()
	if a := l.client.call(method, path, body, headers...); a.status >= 300 {
		l.t.Errorf("%s %s: %d %s", method, path, a.status, a.body)
	}
}

// of returns the spans of an operation that belong to the creation, by a link or as its children.
func (l *traced) of(created trace.SpanContext, operation string) (found tracetest.SpanStubs) {
	for _, s := range l.spans.GetSpans() {
		linked := slices.ContainsFunc(s.Links, func(k sdk.Link) bool {
			return k.SpanContext.TraceID() == created.TraceID() && k.SpanContext.SpanID() == created.SpanID()
		})
		child := s.Parent.SpanID() == created.SpanID() && s.SpanContext.TraceID() == created.TraceID()
		if strings.HasPrefix(s.Name, operation+" ") && (linked || child) {
			if linked == l.parent {
				l.t.Errorf("%s is linked: %v", s.Name, linked)
			}
			found = append(found, s)
		}
	}
	return found
}

func text(s tracetest.SpanStub, key string) string {
	for _, a := range s.Attributes {
		if a.Key == attribute.Key(key) {
			return a.Value.String()
		}
	}
	return ""
}

// find waits for the only span of a trace that has this parent and a name with this prefix.
func (l *traced) find(id trace.TraceID, parent trace.SpanID, name string) (found tracetest.SpanStub) {
	l.t.Helper()
	testkit.Eventually(l.t, "a span "+name+" of trace "+id.String(), func() (bool, error) {
		n := 0
		for _, s := range l.spans.GetSpans() {
			if s.SpanContext.TraceID() == id && s.Parent.SpanID() == parent && strings.HasPrefix(s.Name, name) {
				found = s
				n++
			}
		}
		if n > 1 {
			return false, fmt.Errorf("%d of them", n)
		}
		return n == 1, nil
	})
	return found
}

// arrives waits until the event of a creation is sent, and each consumer has processed it once.
func (l *traced) arrives(created trace.SpanContext) (sent tracetest.SpanStubs) {
	l.t.Helper()
	testkit.Eventually(l.t, "spans of an event's way", func() (bool, error) {
		by := map[string]int{}
		for _, s := range l.of(created, "process") {
			by[text(s, "messaging.consumer.group.name")]++
		}
		sent = l.of(created, "send")
		for _, name := range tracedConsumers {
			if by[name] > 1 {
				return false, fmt.Errorf("%s processed it %d times", name, by[name])
			}
		}
		return len(by) == len(tracedConsumers) && len(sent) > 0, nil
	})
	return sent
}

// incoming returns a client's traceparent with a trace id of its own.
func incoming(n int, flags string) (header string, id trace.TraceID, span trace.SpanID) {
	text := fmt.Sprintf("%032x", 0xabc000+n)
	id, _ = trace.TraceIDFromHex(text)
	span, _ = trace.SpanIDFromHex("00f067aa0ba902b7")
	return "traceparent: 00-" + text + "-00f067aa0ba902b7-" + flags, id, span
}

func TestOneTraceLeadsFromTheRequestToTheProjections(t *testing.T) {
	for _, relation := range []string{"link", "parent"} {
		t.Run(relation, func(t *testing.T) {
			t.Parallel()
			l := newTraced(t, map[string]string{"TRACE_RELATION": relation})
			header, id, client := incoming(1, "01")
			l.call(http.MethodPut, "/v1/follows/7/42", "", header)
			request := l.find(id, client, "PUT /v1/follows/")
			created := l.find(id, request.SpanContext.SpanID(), "create follow.created")
			if request.SpanKind != trace.SpanKindServer || created.SpanKind != trace.SpanKindProducer ||
				text(request, "http.response.status_code") != "201" {
				t.Errorf("%v %v: %v", request.SpanKind, created.SpanKind, request.Attributes)
			}
			var kept string
			if err := l.system.QueryRow(t.Context(), `SELECT trace_id FROM outbox_messages`).Scan(&kept); err != nil ||
				kept != "00-"+id.String()+"-"+created.SpanContext.SpanID().String()+"-01" {
				t.Errorf("the outbox has the context %s, %v", kept, err)
			}
			for _, s := range append(l.arrives(created.SpanContext), l.of(created.SpanContext, "process")...) {
				want := map[string]trace.SpanKind{"send": trace.SpanKindClient,
					"process": trace.SpanKindConsumer}[text(s, "messaging.operation.name")]
				own := s.SpanContext.TraceID() != id && !s.Parent.IsValid()
				if s.SpanKind != want || own == l.parent || s.Status.Code == codes.Error ||
					text(s, "messaging.batch.message_count") != "1" {
					t.Errorf("%s: kind %v, of a trace of its own: %v, %v %v", s.Name, s.SpanKind, own, s.Status, s.Attributes)
				}
			}
			l.groups()
			l.batch()
			l.sampledOut()
			l.lostAck()
			l.poison()
			l.exemplars()
			l.privacy()
		})
	}
}

// groups sends requests at once until some have shared a transaction. The creation of each event
// must be in the trace of its own request.
func (l *traced) groups() {
	l.t.Helper()
	before, n := l.store.Stats(), 100
	testkit.Eventually(l.t, "writes that share a transaction", func() (bool, error) {
		var wg sync.WaitGroup
		for range 12 {
			n++
			header, _, _ := incoming(n, "01")
			path := fmt.Sprintf("/v1/follows/7/%d", n)
			wg.Go(func() { l.call(http.MethodPut, path, "", header) })
		}
		wg.Wait()
		now := l.store.Stats()
		return now.Grouped-before.Grouped > now.Groups-before.Groups, nil
	})
	for i := 101; i <= n; i++ {
		_, id, client := incoming(i, "01")
		request := l.find(id, client, "PUT ")
		if sent := l.arrives(l.find(id, request.SpanContext.SpanID(), "create ").SpanContext); len(sent) != 1 {
			l.t.Errorf("the event of request %d was sent %d times", i, len(sent))
		}
	}
}

// batch sends a request with several events.
func (l *traced) batch() {
	l.t.Helper()
	header, id, client := incoming(2, "01")
	l.call(http.MethodPost, "/v1/follows:batch", `{"op":"put","follower_id":"8","followee_id":"1"}
{"op":"put","follower_id":"8","followee_id":"2"}
{"op":"put","follower_id":"8","followee_id":"3"}
`, header, "Content-Type: application/x-ndjson")
	l.find(id, client, "POST /v1/follows")
	var created tracetest.SpanStubs
	testkit.Eventually(l.t, "a creation per event of a batch", func() (bool, error) {
		created = slices.DeleteFunc(l.spans.GetSpans(), func(s tracetest.SpanStub) bool {
			return s.SpanContext.TraceID() != id || !strings.HasPrefix(s.Name, "create ")
		})
		return len(created) == 3, nil
	})
	most := 0
	for _, c := range created {
		for _, s := range l.arrives(c.SpanContext) {
			most = max(most, len(s.Links))
		}
	}
	if most < 2 && !l.parent {
		l.t.Error("no publish has links to several creations")
	}
}

// sampledOut sends a request whose client does not sample. The context is passed on, and no span is
// recorded.
func (l *traced) sampledOut() {
	l.t.Helper()
	header, id, _ := incoming(3, "00")
	l.call(http.MethodPut, "/v1/follows/9/42", "", header)
	var kept string
	if err := l.system.QueryRow(l.t.Context(), `SELECT trace_id FROM outbox_messages WHERE trace_id LIKE '00-' || $1 || '-%'`,
		id.String()).Scan(&kept); err != nil || !strings.HasSuffix(kept, "-00") {
		l.t.Errorf("the outbox has the context %q, %v", kept, err)
	}
	header, next, client := incoming(4, "01") // a later event, so that the first one is processed
	l.call(http.MethodPut, "/v1/follows/10/42", "", header)
	l.arrives(l.find(next, l.find(next, client, "PUT ").SpanContext.SpanID(), "create ").SpanContext)
	for _, s := range l.spans.GetSpans() {
		if s.SpanContext.TraceID() == id || slices.ContainsFunc(s.Links, func(k sdk.Link) bool { return k.SpanContext.TraceID() == id }) {
			l.t.Errorf("%s is recorded", s.Name)
		}
	}
}

// lostAck loses the acknowledgment of a publish, so the relay finds the event on the stream. There
// is one span of the publish, with an unknown outcome.
func (l *traced) lostAck() {
	l.t.Helper()
	l.proxy.LoseAnswers()
	header, id, client := incoming(5, "01")
	l.call(http.MethodPut, "/v1/follows/11/42", "", header)
	created := l.find(id, l.find(id, client, "PUT ").SpanContext.SpanID(), "create ").SpanContext
	testkit.Eventually(l.t, "the relay to find what it has published", func() (done bool, err error) {
		err = l.system.QueryRow(l.t.Context(), `SELECT processed_at IS NOT NULL FROM outbox_messages
			WHERE trace_id LIKE '00-' || $1 || '-%'`, id.String()).Scan(&done)
		return done, err
	})
	if sent := l.arrives(created); len(sent) != 1 || sent[0].Status.Code != codes.Error || text(sent[0], "error.type") != "timeout" {
		l.t.Errorf("sent %d times: %+v", len(sent), sent)
	}
}

// poison writes an event by SQL that no projection can apply, with a trace context of its own. The
// context must stay, and the event must have a failed span.
func (l *traced) poison() {
	l.t.Helper()
	header, id, span := incoming(6, "01")
	own := strings.TrimPrefix(header, "traceparent: ")
	if _, err := l.system.Exec(l.t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id,
		event_type, payload, trace_id)
		VALUES (1, 'follow', 66, 'created', '{"follower_id":"SECRET-PAYLOAD"}', $1)`, own); err != nil {
		l.t.Fatal(err)
	}
	creation := trace.NewSpanContext(trace.SpanContextConfig{TraceID: id, SpanID: span, TraceFlags: trace.FlagsSampled})
	var sent, failed tracetest.SpanStubs
	testkit.Eventually(l.t, "spans of an event that failed, below those of its batches", func() (bool, error) {
		failed = nil
		for _, s := range l.spans.GetSpans() {
			if strings.HasPrefix(s.Name, "process ") && s.Status.Code == codes.Error {
				failed = append(failed, s)
			}
		}
		var lone error
		batch := l.of(creation, "process")
		for _, s := range failed {
			if !slices.ContainsFunc(batch, func(b tracetest.SpanStub) bool { return b.SpanContext.SpanID() == s.Parent.SpanID() }) {
				lone = fmt.Errorf("a failed event's span has no parent in the batch: %+v", s)
			}
		}
		sent = l.of(creation, "send") // it may end after the consumers have processed the event
		return len(failed) == len(tracedConsumers) && len(sent) > 0, lone
	})
	if len(sent) != 1 {
		l.t.Errorf("it was sent %d times", len(sent))
	}
	var kept string
	if err := l.system.QueryRow(l.t.Context(), `SELECT trace_id FROM outbox_messages WHERE aggregate_id = '66'`).Scan(&kept); err != nil ||
		kept != own {
		l.t.Errorf("its context is %s now, %v", kept, err)
	}
}

// exemplars requires an exemplar with a trace on each latency histogram.
func (l *traced) exemplars() {
	l.t.Helper()
	traces := map[string]bool{}
	for _, s := range l.spans.GetSpans() {
		traces[s.SpanContext.TraceID().String()] = true
	}
	families, err := l.reg.Gather()
	if err != nil {
		l.t.Fatal(err)
	}
	have := map[string]bool{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, b := range m.GetHistogram().GetBucket() {
				for _, label := range b.GetExemplar().GetLabel() {
					have[f.GetName()] = have[f.GetName()] || label.GetName() == "trace_id" && traces[label.GetValue()]
				}
			}
		}
	}
	for _, name := range []string{"tidings_api_request_duration_seconds", "tidings_relay_stage_duration_seconds",
		"tidings_consumer_batch_duration_seconds"} {
		if !have[name] {
			l.t.Errorf("%s has no exemplar of a trace", name)
		}
	}
}

// privacy sends secrets, and searches for them in all spans.
func (l *traced) privacy() {
	l.t.Helper()
	header, id, client := incoming(7, "01")
	l.call(http.MethodPost, "/v1/conversations/100/messages", `{"author_id":"7","body":"SECRET-BODY"}`, header,
		"Idempotency-Key: SECRET-KEY", "Tidings-Actor: SECRET-ACTOR")
	l.arrivesAtHistory(l.find(id, l.find(id, client, "POST ").SpanContext.SpanID(), "create ").SpanContext)
	header, id, client = incoming(8, "01")
	if a := l.client.call(http.MethodGet, "/v1/conversations/100/messages?cursor=SECRET-CURSOR", "", header,
		"Tidings-Token: SECRET-TOKEN"); a.status < 400 {
		l.t.Errorf("an invalid cursor: %d", a.status)
	}
	l.find(id, client, "GET ")
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(l.ctx, "SECRET-METHOD", "/SECRET-PATH?SECRET=QUERY", nil)
	header, id, client = incoming(9, "01")
	r.Header.Set("traceparent", strings.TrimPrefix(header, "traceparent: "))
	l.client.handler.ServeHTTP(w, r)
	l.find(id, client, "HTTP")
	for _, s := range l.spans.GetSpans() {
		all := fmt.Sprintf("%s %v %v %v %v", s.Name, s.Attributes, s.Events, s.Links, s.Status)
		if strings.Contains(all, "SECRET") || strings.Contains(all, l.client.token) {
			l.t.Errorf("a span has what it must not: %s", all)
		}
	}
}

// arrivesAtHistory waits for a message that followercounts ignores.
func (l *traced) arrivesAtHistory(created trace.SpanContext) {
	l.t.Helper()
	testkit.Eventually(l.t, "a span of a message's record", func() (bool, error) {
		found := l.of(created, "process")
		for _, s := range found {
			if text(s, "messaging.consumer.group.name") != history.Name {
				return false, fmt.Errorf("%v has a span of an event that it ignores", s.Attributes)
			}
		}
		return len(found) == 1, nil
	})
}
