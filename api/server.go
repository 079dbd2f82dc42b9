package api

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"mime"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/singleflight"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/event/contracts"
	bounds "github.com/tidings/tidings/internal/shares" // shares is the name of a kind
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/internal/tracing"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/upstreams"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// Deps are the dependencies of the API. Projections acts as postgres.RoleAPI.
type Deps struct {
	Store *store.Store
	// a pool on the truth that acts as postgres.RoleAPI; it is separate and has TokenConns
	// connections, so that tokens do not wait behind requests
	Tokens      *pgxpool.Pool
	DLQ         *outbox.DLQ // its pool acts as postgres.RoleAPI
	Projections *pgxpool.Pool
	Fleet       []projections.Projection // the projections that the API reads
	Pages       *Pages                   // nil: keep no pages
	Kinds       Kinds                    // nil: the built-in kinds
	Streams     Streams                  // nil: an export resumes without a check of its streams
	Names       contracts.Names          // of what the relays publish; zero: DefaultNames
	// reads the upstreams of the installation, for the documents; nil: none
	Upstreams func(context.Context) ([]upstreams.Upstream, error)
	Log       *slog.Logger
	Reg       prometheus.Registerer
}

type server struct {
	cfg         Config
	store       *store.Store
	dlq         *outbox.DLQ
	projections *pgxpool.Pool
	fleet       map[string]projections.Projection // by name
	pages       *Pages
	streams     Streams
	published   contracts.Names
	declared    *declared
	freshness   *freshness
	ballast     []byte // ballastBytes
	log         *slog.Logger
	metrics     *metrics
	auth        *authenticator
	gate        *gate
	limits      *limits
	overlays    *caps
	same        *singleflight.Group // shares equal reads with a Tidings-Token
	cursors     cursors
	problems    problemTable
	router      *router

	// The fields below belong to the kinds in force. The servers of all kinds share the fields
	// above.
	kinds    *kinds.Set
	entities map[string]*huma.Schema // the schemas of entities, by the kind's name
	current  []*huma.Schema          // the schemas of entities that If-Match can name
	mux      *http.ServeMux
	api      huma.API
}

// Handler is the API.
type Handler struct {
	http.Handler
	// Ready returns an error while requests have been refused for so long that other processes
	// should get them.
	Ready func(context.Context) error
	// Look updates as_of. Before the first call every as_of is the Unix epoch.
	Look func(context.Context) error
	// Run calls Look once a second until ctx ends, and returns nil.
	Run func(context.Context) error
	// Traffic returns how many requests this process has answered, and the duration that 99 of 100
	// of them did not exceed since the last call; 0 without a request. One caller may call it.
	Traffic func() (requests int64, p99 time.Duration)
}

// ballastBytes is memory that counts as live and that nobody touches, so the system provides none
// for it. The garbage collector runs when the heap has doubled: 5 MB of live memory alone would
// make it run after 400 writes, which leave 13 KB each.
const ballastBytes = 6 << 20

// New returns the API. It starts nothing and connects to nothing.
func New(cfg Config, deps Deps) (*Handler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure the API: %w", err)
	}
	keys, err := cfg.CursorKeys()
	if err != nil {
		return nil, err
	}
	s := &server{
		cfg: cfg, store: deps.Store, dlq: deps.DLQ, projections: deps.Projections, pages: deps.Pages, streams: deps.Streams,
		published: cmp.Or(deps.Names, contracts.DefaultNames()),
		log:       deps.Log.With("component", "api"),
		fleet:     make(map[string]projections.Projection), auth: newAuthenticator(tokens.NewLookup(deps.Tokens)), overlays: newCaps(),
		same: new(singleflight.Group), cursors: newCursors(keys), problems: newProblemTable(),
	}
	s.ballast = make([]byte, ballastBytes)
	s.declared = &declared{list: deps.Upstreams, log: s.log}
	s.freshness = &freshness{read: deps.Store.Delivered, log: s.log}
	for _, p := range deps.Fleet {
		s.fleet[p.Name()] = p
	}
	for _, name := range []string{followercounts.Name, threadcache.Name} {
		if s.fleet[name] == nil {
			return nil, fmt.Errorf("the API needs the projection %s, but the fleet does not have it", name)
		}
	}
	s.metrics = newMetrics(deps.Reg, deps.Store, slices.Collect(maps.Keys(s.fleet)))
	s.gate = newGate(cfg, func(reason string) { s.metrics.shed.WithLabelValues(reason).Inc() })
	s.metrics.queues(deps.Reg, s.gate, deps.Store.Stats)
	s.limits = newLimits(cfg, s.metrics)
	if deps.Kinds == nil {
		deps.Kinds = builtIn{}
	}
	s.router = &router{base: s, kinds: deps.Kinds}
	if err := s.router.build(deps.Kinds.Now()); err != nil {
		return nil, err
	}
	return &Handler{Handler: s.router, Ready: s.gate.ready, Look: s.freshness.sample, Run: s.freshness.run,
		Traffic: s.metrics.traffic.sample}, nil
}

// quarter returns a quarter of a pool's connections. It bounds slow work for one caller, so that
// others find a connection.
func quarter(pool *pgxpool.Pool) int { return max(1, int(pool.Stat().MaxConns())/4) }

// routes registers all routes for the server's kinds.
func (s *server) routes() {
	jsonFormat := huma.Format{Marshal: huma.DefaultJSONFormat.Marshal, Unmarshal: decodeBody}
	s.mux = http.NewServeMux()
	s.api = humago.New(verbMux{s.mux}, huma.Config{
		OpenAPI:       newOpenAPI(),
		Formats:       map[string]huma.Format{"application/json": jsonFormat, "json": jsonFormat}, // the latter: any +json
		DefaultFormat: "application/json",
		Transformers:  []huma.Transformer{s.transform},
	})
	s.relationRoutes()
	s.dlqRoutes()
	s.entities, s.current = make(map[string]*huma.Schema), nil
	for _, k := range s.kinds.AllChildren() {
		s.addChildRoutes(k)
	}
	for _, k := range s.kinds.AllEdges() {
		s.addEdgeRoutes(k)
	}
	s.objectRoutes()
	s.removalRoutes()
	s.exportRoutes()
	s.kindRoutes()
	s.describeEntities()
	s.documentRoutes()
	s.mux.HandleFunc("/", s.noRoute)
}

const requestIDHeader = "X-Request-Id"

type contextKey int

const (
	exchangeKey contextKey = iota
	callerKey
)

// exchange has the loggable facts of a request: never a body, a token or a query.
type exchange struct {
	target string // path and query, the same for equal requests; not logged
	id     string
	tenant int64  // 0 until the token is known
	token  string // the token's name
}

func exchangeOf(ctx context.Context) *exchange {
	if e, ok := ctx.Value(exchangeKey).(*exchange); ok {
		return e
	}
	return new(exchange)
}

func requestID(ctx context.Context) string { return exchangeOf(ctx).id }

// ServeHTTP gives a request its id and its deadline, and answers if the handler panics.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	id := r.Header.Get(requestIDHeader)
	if !validRequestID(id) {
		id = uuid.NewString()
	}
	ex := &exchange{id: id, target: r.URL.RequestURI()}
	ctx, span := tracing.From(r.Context()).Request(r.Context(), traceParent(r.Header.Values("Traceparent")), label(r.Method))
	ctx, cancel := context.WithTimeout(context.WithValue(ctx, exchangeKey, ex), s.cfg.RequestTimeout)
	defer cancel()
	r = r.WithContext(ctx)
	rec := &recorder{ResponseWriter: w}
	rec.Header().Set(requestIDHeader, id)
	rec.Header().Set("X-Content-Type-Options", "nosniff")
	// A browser may keep the answer and validate it with its ETag. An ETag is valid within one
	// tenant only.
	rec.Header().Set("Cache-Control", "private, no-cache")
	rec.Header().Set("Vary", "Authorization")
	r.Header.Del("Accept") // the framework would choose by it, but every route has one type of answer
	if r.ContentLength != 0 {
		deadline, _ := ctx.Deadline()
		// The deadline also covers a body that no handler reads. The writer of a test has no
		// deadline.
		_ = http.NewResponseController(w).SetReadDeadline(deadline)
	}
	defer func() {
		if cause := recover(); cause != nil {
			s.recovered(rec, r, cause)
		}
		_, route, _ := strings.Cut(verbPattern(r.Pattern), " ")
		tracing.EndRequest(span, label(r.Method), route, rec.code(), ex.tenant)
		if route == "" {
			route = "none"
		}
		took := time.Since(start)
		s.metrics.observe(ctx, route, r.Method, rec.code(), took)
		s.access(ctx, r, rec, route, took, ex)
	}()
	refuse, room := s.gate.arrive() // before any costly work
	defer s.gate.gone()
	if refuse {
		if room {
			s.gate.hold(ctx, refusalTakes)
		}
		s.refuse(rec, r, s.problems.problem(codeOverloaded, ""))
		return
	}
	if p := s.checkURL(r); p != nil {
		s.refuse(rec, r, p)
		return
	}
	defer func(was *url.URL) { r.URL = was }(r.URL)
	r.URL = verbURL(r.URL)
	s.mux.ServeHTTP(rec, r)
}

// access writes the access log's line of one request. It cuts the path, which may be as long as the
// client likes.
func (s *server) access(ctx context.Context, r *http.Request, rec *recorder, route string, took time.Duration, ex *exchange) {
	level := slog.LevelDebug
	if s.cfg.AccessLog {
		level = slog.LevelInfo
	}
	if !s.log.Enabled(ctx, level) {
		return
	}
	_, trace, _ := strings.Cut(traceParentOf(ctx, r), "-")
	trace, _, _ = strings.Cut(trace, "-")
	const maxPath = 200
	s.log.LogAttrs(ctx, level, "request", slog.String("method", r.Method), slog.String("route", route),
		slog.String("path", r.URL.Path[:min(len(r.URL.Path), maxPath)]), slog.Int("status", rec.code()), slog.Int64("bytes", rec.bytes),
		slog.Float64("seconds", took.Seconds()), slog.String("client", r.RemoteAddr), slog.String("request_id", ex.id),
		slog.String("trace_id", trace), slog.Int64("tenant", ex.tenant), slog.String("token", ex.token))
}

// recovered answers for a handler that panicked. The framework panics if it cannot write an answer:
// then the client has gone.
func (s *server) recovered(rec *recorder, r *http.Request, cause any) {
	if err, ok := cause.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(cause)
	}
	if rec.status != 0 {
		s.log.DebugContext(r.Context(), "answer interrupted", "request_id", requestID(r.Context()), "err", cause)
		return
	}
	ex := exchangeOf(r.Context())
	s.log.ErrorContext(r.Context(), "handler panicked", "request_id", ex.id, "tenant", ex.tenant, "err", cause, "runbook", "ApiErrors")
	s.refuse(rec, r, s.problems.problem(codeInternal, ""))
}

func (s *server) refuse(w http.ResponseWriter, r *http.Request, p *Problem) {
	p.RequestID = requestID(r.Context())
	p.write(w)
}

// checkURL refuses paths that the mux would redirect, and queries that are ambiguous.
func (s *server) checkURL(r *http.Request) *Problem {
	p, verb := r.URL.Path, verbOf(r.URL)
	owner := strings.TrimSuffix(p, verb) // in /v1/users/..:remove-edges the mux would resolve its last segment
	if !strings.HasPrefix(p, "/") || strings.TrimSuffix(p, "/") != strings.TrimSuffix(path.Clean(p), "/") ||
		strings.Contains(p, verbSegment) || verb != "" && owner != path.Clean(owner) {
		return s.problems.problem(codeRouteUnknown, "the path is not canonical")
	}
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return s.problems.problem(codeBadRequest, "the query is malformed")
	}
	for name, values := range q {
		if len(values) > 1 || values[0] == "" {
			return s.problems.problem(codeBadRequest, "a query parameter has no value, or more than one",
				FieldError{Detail: "expected one value", Parameter: name})
		}
	}
	return nil
}

// noRoute answers 405 if the path has routes of other methods, and 404 otherwise.
func (s *server) noRoute(w http.ResponseWriter, r *http.Request) {
	var allowed []string
	for _, m := range methods() {
		probe := &http.Request{Method: m, URL: r.URL, Host: r.Host}
		if _, pattern := s.mux.Handler(probe); pattern != "/" && pattern != "" {
			allowed = append(allowed, m)
		}
	}
	if len(allowed) == 0 {
		if next := s.router.refresh(r.Context(), s); next != nil { // the route may be of a new kind
			next.mux.ServeHTTP(w, r)
			return
		}
		s.refuse(w, r, s.problems.problem(codeRouteUnknown, "the API may be older than its client, or the kind unknown"))
		return
	}
	w.Header().Set("Allow", strings.Join(allowed, ", "))
	s.refuse(w, r, s.problems.problem(codeMethodNotAllowed, "the route supports "+strings.Join(allowed, ", ")))
}

// recorder remembers the status of the answer and counts its bytes.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
	visit  *visit // ends with the first write, which has the whole answer
}

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	if status == http.StatusNotModified {
		r.Header().Del("Content-Type") // the framework sets it, but a 304 has no body (RFC 9110, 15.4.5)
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	if v := r.visit; v != nil {
		r.visit = nil
		defer v.answered(len(b))()
	}
	n, err := r.ResponseWriter.Write(b)
	r.bytes += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController find the connection.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *recorder) code() int {
	if r.status == 0 {
		return http.StatusOK
	}
	return r.status
}

func validRequestID(id string) bool {
	if id == "" || len(id) > 100 {
		return false
	}
	return strings.IndexFunc(id, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.:", c)
	}) < 0
}

// caller is the sender of a request, with the actor and the trace of its writes.
type caller struct {
	tokens.Principal
	token   string // the name and fingerprint of the token, for audits: the actor is the caller's own word
	meta    store.Meta
	session []event.Ref // entities that reads of projections must include
	answer  http.Header
	naming  *naming // of the request's route, or nil
}

func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey).(caller)
	return c
}

// route describes one operation of /v1.
type route struct {
	method, path  string
	id            string // operationId
	tag           string
	summary       string
	description   string
	role          string
	status        int            // of success
	extraStatuses map[int]string // further answers without a problem
	codes         []string       // beyond those that every route has
	projected     bool           // read from a projection
	maxBody       int64          // bytes; 0 for API_MAX_BODY_BYTES
	streams       bool           // continues to work while it answers

	// Only for the routes of a kind (kindroute.go):
	naming *naming
	body   *huma.RequestBody // replaces the schema of the input's type
	answer *huma.Schema      // replaces the schema of the output's type
}

// writes reports whether the route changes anything. Some routes that only read are POSTs, because
// they have bodies.
func (r route) writes() bool { return r.method != http.MethodGet && r.role != tokens.RoleRead }

// register adds a route. A request passes token, rate and role, then its body is read, then the
// framework validates it, then handle runs.
func register[I, O any](s *server, r route, handle func(ctx context.Context, in *I) (*O, error)) {
	r.path = r.naming.path(r.path)
	codes := append([]string{codeBadRequest, codeHeaderInvalid, codeUnauthenticated, codeRoleMissing, codeRateLimited, codeValidation,
		codeRequestTooLarge, codeRequestTimeout, // also of a body that the operation does not expect: pass reads it
		codeInternal, codeOverloaded, codeUnavailable}, r.codes...)
	op := huma.Operation{
		Method: r.method, Path: r.path, OperationID: r.id, Summary: r.naming.text(r.summary),
		Description: strings.TrimSpace(r.naming.text(r.description) + " Needs the role `" + r.role + "`."), Tags: []string{r.tag},
		DefaultStatus: r.status, Security: []map[string][]string{{"token": {r.role}}}, Responses: s.problemResponses(codes, r.naming),
		BodyReadTimeout: -1, MaxBodyBytes: -1, // guard has read it
		RequestBody: r.body,
	}
	if r.answer != nil {
		op.Responses[fmt.Sprint(r.status)] = &huma.Response{Content: map[string]*huma.MediaType{"application/json": {Schema: r.answer}}}
	}
	if r.writes() {
		op.Parameters = metaParameters()
	}
	if r.projected {
		op.Parameters = append(op.Parameters, sessionParameters()...)
	}
	for _, status := range []string{"429", "503"} {
		op.Responses[status].Headers = map[string]*huma.Param{"Retry-After": {Schema: &huma.Schema{Type: huma.TypeInteger},
			Description: "Seconds."}}
	}
	for status, what := range r.extraStatuses {
		op.Responses[fmt.Sprint(status)] = &huma.Response{Description: what}
	}
	op.Middlewares = huma.Middlewares{s.guard(r)}
	if r.method == http.MethodGet && !r.streams {
		handle = shared(s, handle)
	}
	s.metrics.begin(r.path, r.method, r.status)
	huma.Register(s.api, op, func(ctx context.Context, in *I) (*O, error) {
		out, err := handle(ctx, in)
		if err != nil {
			return nil, s.toProblem(ctx, err)
		}
		return out, nil
	})
	describeAnswers(op.Responses, r)
	r.naming.document(s.operation(r.method, r.path))
}

// metaParameters describes the headers that every write takes; caller reads them.
func metaParameters() []*huma.Param {
	text := &huma.Schema{Type: huma.TypeString}
	return []*huma.Param{
		{Name: "Tidings-Actor", In: "header", Schema: text, Description: fmt.Sprintf(
			"The actor of the change, recorded in events and histories: `user:7` for the user 7, or the name of a service. Never send a "+
				"person's name or address: an erasure does not find it. 1 to %d bytes of printable UTF-8. Default: the token's name.",
			store.MaxActorBytes)},
		{Name: "traceparent", In: "header", Schema: text, Description: "W3C Trace Context, recorded with the event. Ignored if malformed."},
	}
}

// toProblem turns an error into the problem that the client gets. It logs an error that the client
// must not see.
func (s *server) toProblem(ctx context.Context, err error) error {
	p, logged := s.problems.of(err)
	if errors.Is(err, store.ErrOverloaded) {
		s.metrics.shed.WithLabelValues(shedWrites).Inc()
	}
	if logged && !clientGone(ctx, err) {
		ex := exchangeOf(ctx)
		if p.Code == codeUnavailable {
			s.log.WarnContext(ctx, "request failed", "request_id", ex.id, "tenant", ex.tenant, "code", p.Code, "err", err)
		} else {
			s.log.ErrorContext(ctx, "request failed", "request_id", ex.id, "tenant", ex.tenant, "code", p.Code,
				"err", err, "runbook", "ApiErrors")
		}
	}
	if h := p.headers(); h != nil {
		header := make(http.Header)
		for name, value := range h {
			header.Set(name, value)
		}
		return huma.ErrorWithHeaders(p, header)
	}
	return p
}

// transform turns errors of the framework into problems of the table, and gives every problem the
// request's id.
func (s *server) transform(ctx huma.Context, _ string, v any) (any, error) {
	if e, ok := v.(*huma.ErrorModel); ok {
		v = s.problems.fromHuma(e)
	}
	if p, ok := v.(*Problem); ok {
		callerOf(ctx.Context()).naming.tell(p)
		p.RequestID = requestID(ctx.Context())
	}
	return v, nil
}

// guard returns what runs before a route's handler: it lets a request through, or answers with the
// reason why not.
func (s *server) guard(op route) func(huma.Context, func(huma.Context)) {
	return func(hctx huma.Context, next func(huma.Context)) {
		r, w := humago.Unwrap(hctx)
		if err := s.pass(hctx, op, w, r, next); err != nil {
			p, _ := s.problems.of(s.toProblem(hctx.Context(), err))
			s.refuse(w, r, p)
		}
	}
}

// pass admits the caller, reads the body and passes the request to next. A body may take long to
// arrive, so pass verifies the token again after it. The request is outside the gate only while its
// body arrives and while its answer is sent.
func (s *server) pass(hctx huma.Context, op route, w http.ResponseWriter, r *http.Request, next func(huma.Context)) error {
	ctx, hasBody := hctx.Context(), hctx.Operation().RequestBody != nil
	c, err := s.admit(hctx, op, w, r)
	if err != nil {
		return err
	}
	present := s.gate.arrived.Hold(c.TenantID, "")
	defer present.Release()
	if !present.Take(1) {
		return s.overloaded(ctx, shedArrived)
	}
	if hasBody || r.ContentLength != 0 { // an unexpected body must arrive too: the next request begins after it
		memory := s.gate.bodies.Hold(c.TenantID, c.Limits)
		defer memory.Release()
		if err := s.readBody(w, r, memory, cmp.Or(op.maxBody, s.cfg.MaxBodyBytes)); err != nil {
			return err
		}
	}
	atOnce := op.maxBody == 0 && !op.streams // a batch continues to work while it answers
	v, ok := s.gate.enter(c.TenantID, atOnce)
	if !ok {
		s.gate.hold(ctx, refusalTakes)
		return s.problems.problem(codeOverloaded, "")
	}
	defer v.leave()
	v.token = c.Limits
	if rec, ok := w.(*recorder); ok && atOnce {
		rec.visit = v
	}
	if hasBody {
		if c.Principal, err = s.principal(ctx, w, r); err != nil {
			return err
		}
		if err := s.checkRole(c.Principal, op); err != nil {
			return err
		}
	}
	if err := s.checkNames(r.URL.Query(), hctx.Operation()); err != nil {
		return err
	}
	if bad := op.naming.checkIDs(hctx); bad != nil {
		return s.problems.problem(codeValidation, "validation failed", bad...)
	}
	c.answer, c.naming = w.Header(), op.naming
	next(huma.WithValue(namedContext{hctx, op.naming}, callerKey, c))
	return nil
}

// admit authenticates the caller, counts the request, and checks the role and then the headers, in
// this order: a caller without access learns nothing else.
func (s *server) admit(hctx huma.Context, op route, w http.ResponseWriter, r *http.Request) (c caller, err error) {
	ctx := hctx.Context()
	p, err := s.principal(ctx, w, r)
	if err != nil {
		return c, err
	}
	ex := exchangeOf(ctx)
	ex.tenant, ex.token = p.TenantID, p.Name
	if err := s.limitRequest(w.Header(), p, op); err != nil {
		return c, err
	}
	if err := s.checkRole(p, op); err != nil {
		return c, err
	}
	if c, err = s.caller(r, p); err != nil {
		return c, err
	}
	if err := s.checkIntegers(hctx); err != nil {
		return c, err
	}
	return c, s.checkMedia(w, r, hctx.Operation())
}

// checkNames refuses a query with parameters that the operation does not have.
func (s *server) checkNames(query url.Values, op *huma.Operation) error {
	for _, p := range op.Parameters {
		if p.In == "query" {
			delete(query, p.Name)
		}
	}
	if len(query) == 0 {
		return nil
	}
	p := s.problems.problem(codeValidation, "validation failed")
	for _, name := range slices.Sorted(maps.Keys(query)) {
		p.Errors = append(p.Errors, FieldError{Detail: "unknown query parameter", Parameter: name})
	}
	return p
}

// overloaded counts a refusal, delays it, and returns its problem.
func (s *server) overloaded(ctx context.Context, reason string) error {
	s.gate.refused(reason)
	s.gate.hold(ctx, refusalTakes)
	return s.problems.problem(codeOverloaded, "")
}

// principal returns the principal of the request's token. A remembered token costs nothing. Other
// tokens are looked up on a few connections, and not for an address that sends many unknown tokens.
// So guesses do not delay good tokens.
func (s *server) principal(ctx context.Context, w http.ResponseWriter, r *http.Request) (tokens.Principal, error) {
	h, ok := bearer(r.Header.Get("Authorization"))
	if !ok || len(r.Header.Values("Authorization")) > 1 {
		return tokens.Principal{}, tokens.ErrUnauthenticated
	}
	from := clientOf(r)
	mayFind := func() error {
		if s.limits.mayGuess(w.Header(), from) {
			return nil
		}
		s.gate.hold(ctx, guessTakes)
		return s.problems.problem(codeRateLimited, "the address sent too many unknown tokens")
	}
	p, err := s.auth.principal(ctx, h, mayFind)
	switch {
	case errors.Is(err, tokens.ErrUnauthenticated):
		if err := mayFind(); err != nil { // a remembered unknown token passed without this check
			return tokens.Principal{}, err
		}
		s.limits.guessed(from)
	case errors.Is(err, errBusy):
		err = s.overloaded(ctx, shedTokens)
	}
	return p, err
}

func (s *server) checkRole(p tokens.Principal, op route) error {
	if p.System() {
		return s.problems.problem(codeRoleMissing, "a system token only opens the console; use a token of a tenant "+
			"(tidings token create --tenant)")
	}
	if p.Has(op.role) {
		return nil
	}
	return s.problems.problem(codeRoleMissing, fmt.Sprintf("the route needs the role %s", op.role))
}

// caller reads the headers that every route takes.
func (s *server) caller(r *http.Request, p tokens.Principal) (caller, error) {
	for _, name := range []string{"Tidings-Actor", "Idempotency-Key", "If-Match"} {
		if v := r.Header.Values(name); len(v) > 1 || len(v) == 1 && v[0] == "" {
			return caller{}, s.problems.problem(codeHeaderInvalid, "", FieldError{Detail: "expected one value", Header: name})
		}
	}
	actor := r.Header.Get("Tidings-Actor")
	if actor == "" {
		actor = p.Name
	} else if !store.ValidActor(actor) {
		return caller{}, s.problems.problem(codeHeaderInvalid, "", FieldError{
			Detail: fmt.Sprintf("expected 1 to %d bytes of printable UTF-8", store.MaxActorBytes), Header: "Tidings-Actor",
		})
	}
	refs, err := s.sessionRefs(p.TenantID, r.Header.Values(tokenHeader))
	if err != nil {
		return caller{}, err
	}
	h, _ := bearer(r.Header.Get("Authorization"))
	return caller{Principal: p, token: p.Name + " " + h.Fingerprint(), session: refs,
		meta: store.Meta{Actor: actor, TraceParent: traceParentOf(r.Context(), r)}}, nil
}

// checkIntegers refuses integers of the query with a sign or leading zeros, so that each integer
// has one form.
func (s *server) checkIntegers(hctx huma.Context) error {
	for _, p := range hctx.Operation().Parameters {
		if p.In != "query" || p.Schema == nil || p.Schema.Type != huma.TypeInteger {
			continue
		}
		v := hctx.Query(p.Name)
		if n, err := strconv.ParseInt(v, 10, 64); err == nil && strconv.FormatInt(n, 10) != v {
			return s.problems.problem(codeValidation, "",
				FieldError{Detail: "expected a number without a sign and without leading zeros", Parameter: p.Name})
		}
	}
	return nil
}

// checkMedia refuses a body with a content coding, or of a type that the operation does not take. A
// body without a type is JSON.
func (s *server) checkMedia(w http.ResponseWriter, r *http.Request, op *huma.Operation) error {
	if op.RequestBody == nil || r.ContentLength == 0 {
		return nil
	}
	for _, coding := range r.Header.Values("Content-Encoding") {
		if !strings.EqualFold(coding, "identity") {
			w.Header().Set("Accept-Encoding", "identity") // RFC 9110, 15.5.16
			return s.problems.problem(codeMediaType, "",
				FieldError{Detail: "expected a body without content coding", Header: "Content-Encoding"})
		}
	}
	types := r.Header.Values("Content-Type")
	if len(types) == 0 {
		types = []string{"application/json"}
	}
	media, parameters, err := mime.ParseMediaType(types[0])
	charset, coded := parameters["charset"]
	if err != nil || len(types) > 1 || op.RequestBody.Content[media] == nil || coded && !strings.EqualFold(charset, "utf-8") {
		want := strings.Join(slices.Sorted(maps.Keys(op.RequestBody.Content)), " or ")
		return s.problems.problem(codeMediaType, "", FieldError{Detail: "expected " + want + ", in UTF-8", Header: "Content-Type"})
	}
	r.Header.Set("Content-Type", media)
	return nil
}

// errNoMemory reports that a body exceeds its caller's share of the memory for bodies.
var errNoMemory = errors.New("api: no memory for the body")

// readBody reads the body into memory, so that a failed transfer is an error of the client and not
// of the framework. A large body takes memory as it arrives.
func (s *server) readBody(w http.ResponseWriter, r *http.Request, memory *bounds.Hold, limit int64) error {
	var body []byte
	err := error(&http.MaxBytesError{Limit: limit})
	if r.ContentLength <= limit {
		body, err = readAll(http.MaxBytesReader(w, r.Body, limit), r.ContentLength, memory)
	}
	var tooLarge *http.MaxBytesError
	var timeout net.Error
	switch {
	case errors.As(err, &tooLarge):
		return s.problems.problem(codeRequestTooLarge, fmt.Sprintf("the limit is %d bytes", limit))
	case errors.As(err, &timeout) && timeout.Timeout():
		return s.problems.problem(codeRequestTimeout, "")
	case errors.Is(err, errNoMemory):
		memory.Release() // before the delay of the refusal
		return s.overloaded(r.Context(), shedBodies)
	case err != nil:
		return s.problems.problem(codeBadRequest, "the body cannot be read")
	case r.Context().Err() != nil: // it arrived, but took all the time of the request
		return s.problems.problem(codeRequestTimeout, "")
	}
	// Otherwise the server's own read of the connection times out, and the client seems to have
	// gone.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	r.Body = io.NopCloser(bytes.NewReader(body))
	return nil
}

// readAll reads a body of length bytes (-1: unknown). Beyond smallBody it takes memory for each
// piece that has arrived, and returns errNoMemory if there is none.
func readAll(in io.Reader, length int64, memory *bounds.Hold) ([]byte, error) {
	if length < 0 {
		length = math.MaxInt64 - 1
	}
	var body []byte
	for counted := int64(0); ; {
		body = slices.Grow(body, int(min(length+1-int64(len(body)), bounds.PaceBytes))) // 1 more finds the end
		n, err := in.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if have := int64(len(body)); have > smallBody {
			if !memory.Take(have - counted) {
				return nil, errNoMemory
			}
			counted = have
		}
		if err == io.EOF {
			return body, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// traceParent returns the header's value if it is valid (W3C Trace Context level 1), else "": the
// standard ignores an invalid one.
func traceParent(values []string) string {
	if len(values) != 1 || !tracing.IsTraceParent(values[0]) {
		return ""
	}
	return values[0]
}

// traceParentOf returns the context of the request's span, or the request's own context if there is
// no span.
func traceParentOf(ctx context.Context, r *http.Request) string {
	return cmp.Or(tracing.TraceParent(ctx), traceParent(r.Header.Values("Traceparent")))
}

// problemResponses describes the answers with these codes, grouped by status.
func (s *server) problemResponses(codes []string, n *naming) map[string]*huma.Response {
	byStatus := make(map[int][]string)
	for _, k := range s.problems.kinds {
		if slices.Contains(codes, k.Code) {
			byStatus[k.Status] = append(byStatus[k.Status], fmt.Sprintf("`%s`: %s.", k.Code, n.title(k.Title)))
		}
	}
	schema := s.problemSchema()
	all := make(map[string]*huma.Response)
	for _, status := range slices.Sorted(maps.Keys(byStatus)) {
		all[fmt.Sprint(status)] = &huma.Response{
			Description: strings.Join(byStatus[status], "\n"),
			Content:     map[string]*huma.MediaType{problemMediaType: {Schema: schema}},
		}
	}
	return all
}
