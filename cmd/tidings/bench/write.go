package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
)

// writeOptions are the flags of `tidings bench write`.
type writeOptions struct {
	clients, tenants int
	duration         time.Duration
	hot              []string
}

func writeCommand() *cobra.Command {
	var o writeOptions
	cmd := &cobra.Command{
		Use: "write", Args: cobra.NoArgs,
		Short: "Measure single writes over HTTP against pgbench with the same statements",
		Long: `Write measures writes over HTTP, and compares them with a baseline. Every case starts with empty
tables.

Case pgbench is the baseline: it runs the two statements of a follow (the row, the outbox message)
in one transaction, with --clients connections and prepared statements. Without pgbench on the
machine, case pgx replaces it. Case write sends new follows to the API, a process of its own. Each
of --clients connections sends one request at a time. Case write-comments sends comments with an
Idempotency-Key to 1,000 posts. --tenants adds the case write-tenants, with follows of that many
tenants. --hot KIND,... adds the cases write-hot-KIND, with children of each kind under one object.

Afterwards the command searches the database for every accepted write. missing counts those without
their row or their event. duplicates counts those with more than one event, and events that belong
to no request.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.clients < 1 || o.tenants < 0 || o.duration <= 0 {
				return errors.New("want --clients of 1 or more, --tenants of 0 or more, and a --duration above 0")
			}
			for _, name := range o.hot {
				if _, ok := kinds.Builtin().Child(name); !ok {
					return fmt.Errorf("--hot: %q is not a built-in kind of children", name)
				}
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), progress(cmd))
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.clients, "clients", 32, "parallel connections that write")
	f.DurationVar(&o.duration, "duration", 20*time.Second, "how long each case writes")
	f.IntVar(&o.tenants, "tenants", 0, "also write for this many tenants at once")
	f.StringSliceVar(&o.hot, "hot", nil, "also write children of these `kinds` under one object")
	return cmd
}

// writeResult is the output line of a case. It omits members that do not apply.
type writeResult struct {
	Case              string   `json:"case"`
	Accepted          int      `json:"accepted"`
	Seconds           float64  `json:"seconds"`
	AcceptedPerSecond float64  `json:"accepted_per_second"`
	Ratio             *float64 `json:"ratio_to_baseline,omitempty"`
	P50               *float64 `json:"p50_ms,omitempty"`
	P95               *float64 `json:"p95_ms,omitempty"`
	P99               *float64 `json:"p99_ms,omitempty"`
	Refused           *int     `json:"refused,omitempty"` // 503 with Retry-After
	Errors            *int     `json:"errors,omitempty"`  // any other answer, or no answer
	Missing           *int     `json:"missing,omitempty"`
	Duplicates        *int     `json:"duplicates,omitempty"`
	Clients           int      `json:"clients"`
	Tenants           int      `json:"tenants,omitempty"`
	PeakRSS           *float64 `json:"peak_rss_mib,omitempty"`
	settings
}

func (r *writeResult) rate(accepted int, took time.Duration) {
	r.Accepted, r.Seconds = accepted, round(took.Seconds(), 3)
	r.AcceptedPerSecond = round(float64(accepted)/took.Seconds(), 0)
}

// request returns the n-th write of a client. key identifies the created row; if it is "", the
// answer's Location does.
type request func(client, n int) (method, path, headers string, body []byte, key string)

func (o writeOptions) run(ctx context.Context, out io.Writer, say func(string, ...any)) (err error) {
	say("starting servers")
	s, err := startServers(ctx, syncDefault, slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	set, err := s.settings(ctx)
	if err != nil {
		return err
	}
	if err := declareStream(ctx, s); err != nil {
		return err
	}

	base := writeResult{Clients: o.clients, settings: set}
	say("baseline: %d connections for %s", o.clients, o.duration)
	name, n, took, err := baseline(ctx, s, o.clients, o.duration)
	if err != nil {
		return err
	}
	base.Case = name
	base.rate(n, took)
	if err := writeLine(out, base); err != nil {
		return err
	}

	type writing struct {
		name    string
		tenants int
		request request
	}
	comment, _ := kinds.Builtin().Child(event.AggregateComment)
	cases := []writing{{"write", 1, follows}, {"write-comments", 1, childrenUnder(comment, 1000)}}
	if o.tenants > 0 {
		cases = append(cases, writing{"write-tenants", o.tenants, follows})
	}
	for _, name := range o.hot {
		k, _ := kinds.Builtin().Child(name)
		cases = append(cases, writing{"write-hot-" + name, 1, childrenUnder(k, 1)})
	}
	wrong := 0
	for _, c := range cases {
		if err := empty(ctx, s); err != nil {
			return err
		}
		r, err := o.writeCase(ctx, s, c.name, c.tenants, c.request, say)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		r.Ratio, r.settings = ptr(round(r.AcceptedPerSecond/base.AcceptedPerSecond, 2)), set
		if err := writeLine(out, r); err != nil {
			return err
		}
		wrong += *r.Missing + *r.Duplicates + *r.Errors + *r.Refused
	}
	if wrong > 0 {
		return fmt.Errorf("%d writes were refused, failed, are missing or have a second event", wrong)
	}
	return nil
}

func (o writeOptions) writeCase(ctx context.Context, s *servers, name string, tenants int, make request,
	say func(string, ...any)) (r writeResult, err error) {
	r = writeResult{Case: name, Clients: o.clients}
	if tenants > 1 {
		r.Tenants = tenants
	}
	a, err := startAPI(ctx, s, tenants, logTo(say))
	if err != nil {
		return r, err
	}
	defer a.child.kill()
	warm := newWriters(a, min(o.clients, 4), make)
	if err := warm.run(ctx, min(o.duration/4, time.Second)); err != nil {
		return r, err
	}
	w := newWriters(a, o.clients, make)
	say("%s: %d clients for %s", name, o.clients, o.duration)
	start := time.Now()
	if err := w.run(ctx, o.duration); err != nil {
		return r, err
	}
	took := time.Since(start)
	if _, err := a.child.stop(); err != nil {
		return r, err
	}
	w.fill(&r, took)
	r.PeakRSS = ptr(round(a.child.peak, 1))
	say("%s: searching for every accepted write", name)
	missing, duplicates, err := w.check(ctx, s, warm)
	r.Missing, r.Duplicates = &missing, &duplicates
	return r, err
}

// follows returns random pairs out of 10^15. A repeated pair would count as an error.
func follows(int, int) (method, path, headers string, body []byte, key string) {
	follower, followee := strconv.FormatInt(1+rand.Int64N(1_000_000_000_000), 10),
		strconv.FormatInt(1_000_000_000_000+1+rand.Int64N(1000), 10)
	return "PUT", "/v1/follows/" + follower + "/" + followee, "", nil, follower + " " + followee
}

// childrenUnder returns a request that creates children under random objects by random authors.
func childrenUnder(k kinds.Child, objects int64) request {
	under, attributes := "/v1/"+kinds.Builtin().Objects[k.Parent]+"/", ""
	if values := required(k.Attributes); values != "{}" {
		attributes = `,"attributes":` + values
	}
	return func(client, n int) (method, path, headers string, body []byte, key string) {
		author := strconv.FormatInt(1+rand.Int64N(1_000_000_000_000), 10)
		headers = "Content-Type: application/json\r\nIdempotency-Key: " + strconv.Itoa(client) + "-" + strconv.Itoa(n) + "\r\n"
		body = append(append([]byte(`{"author_id":"`), author...),
			`","body":"A comment of the length that people write, give or take a few words."`...)
		body = append(append(body, attributes...), '}')
		return "POST", under + strconv.FormatInt(1+rand.Int64N(objects), 10) + "/" + k.Plural, headers, body, ""
	}
}

// required returns the required attributes as a JSON object, with the lowest integers and the first
// values of enums.
func required(all map[string]kinds.Attribute) string {
	values := map[string]any{}
	for name, a := range all {
		switch {
		case !a.Required:
		case len(a.Enum) > 0:
			values[name] = a.Enum[0]
		case a.Type == kinds.Integer && a.Minimum != nil:
			values[name] = *a.Minimum
		case a.Type == kinds.Integer:
			values[name] = 0
		case a.Type == kinds.Boolean:
			values[name] = true
		default:
			values[name] = "x"
		}
	}
	text, _ := json.Marshal(values) // never fails for strings, numbers and booleans
	return string(text)
}

// writers are connections, each of which sends one write after the other.
type writers struct {
	api  *apiUnderTest
	make request
	each []*writer
}

// writer is one of these connections, with the results of its writes.
type writer struct {
	wire     wire
	tenant   string
	accepted []string // the tenant and the key, separated by a space
	took     []time.Duration
	refused  int
	unknown  int // writes with an unknown outcome: no answer, or any answer but 201
	errors   int
	lastErr  error
}

func newWriters(a *apiUnderTest, n int, make request) *writers {
	ws := &writers{api: a, make: make}
	for i := range n {
		t := i % len(a.tokens)
		ws.each = append(ws.each, &writer{wire: wire{addr: a.addr, token: a.tokens[t], timeout: time.Minute},
			tenant: strconv.Itoa(t + tenant)})
	}
	return ws
}

// run writes for the duration d.
func (ws *writers) run(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var wg sync.WaitGroup
	for client, w := range ws.each {
		wg.Go(func() {
			defer w.wire.close()
			for n := 0; ctx.Err() == nil; n++ {
				w.write(client, n, ws.make)
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

func (w *writer) write(client, n int, make request) {
	method, path, headers, body, key := make(client, n)
	start := time.Now()
	a, err := w.wire.send(method, path, headers, body)
	took := time.Since(start)
	switch {
	case err == nil && a.status == 201:
		if key == "" {
			key = string(a.location[strings.LastIndexByte(string(a.location), '/')+1:])
		}
		w.accepted, w.took = append(w.accepted, w.tenant+" "+key), append(w.took, took)
	case err == nil && a.status == 503 && a.retryAfter:
		w.refused++
		w.unknown++ // overloaded, or a database that did not answer in time
	default:
		w.errors++
		w.unknown++
		if w.lastErr = err; err == nil {
			w.lastErr = fmt.Errorf("%s %s: %d", method, path, a.status)
		}
	}
}

func (ws *writers) fill(r *writeResult, took time.Duration) {
	var times []time.Duration
	r.Refused, r.Errors = new(int), new(int)
	for _, w := range ws.each {
		times = append(times, w.took...)
		*r.Refused += w.refused
		*r.Errors += w.errors
	}
	r.rate(len(times), took)
	r.P50, r.P95, r.P99 = quantiles(times)
}

// writtenSQL compares the accepted writes with the stored rows and events. It counts the accepted
// writes without a row or an event, those with more than one event, and all events. No other
// process writes.
const writtenSQL = `
WITH accepted AS (SELECT unnest(@keys::text[]) AS key),
told AS (
  SELECT tenant_id || ' ' || coalesce(payload ->> (aggregate_type || '_id'), (payload ->> 'follower_id') || ' ' || aggregate_id) AS key,
         count(*) AS n
    FROM outbox_messages GROUP BY 1
), stored AS (
  SELECT tenant_id || ' ' || follower_id || ' ' || followee_id AS key FROM follows
  UNION ALL SELECT tenant_id || ' ' || child_id FROM children
)
SELECT count(*) FILTER (WHERE stored.key IS NULL OR told.n IS NULL), count(*) FILTER (WHERE told.n > 1),
       (SELECT coalesce(sum(n), 0) FROM told)::bigint
  FROM accepted LEFT JOIN told USING (key) LEFT JOIN stored USING (key)`

// check searches for every accepted write, also of the writers before. More events than accepted
// writes are duplicates, except for as many as there are writes with an unknown outcome.
func (ws *writers) check(ctx context.Context, s *servers, before ...*writers) (missing, duplicates int, err error) {
	var keys []string
	unknown, events := 0, 0
	for _, ws := range append(before, ws) {
		for _, w := range ws.each {
			keys = append(keys, w.accepted...)
			unknown += w.unknown
		}
	}
	if _, err := s.pool.Exec(ctx, `ANALYZE`); err != nil {
		return 0, 0, err
	}
	if err := s.pool.QueryRow(ctx, writtenSQL, pgx.StrictNamedArgs{"keys": keys}).Scan(&missing, &duplicates, &events); err != nil {
		return 0, 0, err
	}
	return missing, duplicates + max(0, events-len(keys)-unknown), nil
}

// empty truncates the tables that have rows. An installation has some tables for every kind, and
// truncating them all slows the next case down (docs/performance.md).
func empty(ctx context.Context, s *servers) error {
	owner, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	_, err = owner.Exec(ctx, `
DO $$
DECLARE t regclass; filled boolean; full_ones text[] := '{outbox_messages}';
BEGIN
  FOR t IN SELECT relid FROM pg_partition_tree('edges') WHERE isleaf
           UNION ALL SELECT relid FROM pg_partition_tree('children') WHERE isleaf
           UNION ALL SELECT 'child_keys'::regclass LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', t) INTO filled;
    IF filled THEN
      full_ones := full_ones || t::text;
    END IF;
  END LOOP;
  EXECUTE 'TRUNCATE ' || array_to_string(full_ones, ', ');
END $$`)
	if err == nil {
		_, err = owner.Exec(ctx, `CHECKPOINT`)
	}
	return errors.Join(err, owner.Close(ctx))
}

// declareStream creates the stream that the API listens to.
func declareStream(ctx context.Context, s *servers) error {
	js, closeJS, err := s.stream(ctx, slog.Default())
	if err != nil {
		return err
	}
	defer closeJS()
	_, err = broker.Declare(ctx, js, s.broker, broker.Partition{LastSlot: event.Slots - 1}, slog.Default())
	return err
}

// apiUnderTest is the API as a child process, with a token for each tenant, from tenant 1 on.
type apiUnderTest struct {
	child  *child
	addr   string
	tokens []string
}

// startAPI starts the API with env on the servers.
func startAPI(ctx context.Context, s *servers, tenants int, stderr io.Writer, env ...string) (*apiUnderTest, error) {
	a := &apiUnderTest{}
	for t := range tenants {
		token := tokens.New()
		if err := tokens.Ensure(ctx, s.pool, int64(t+tenant), "bench", token, []string{tokens.RoleRead, tokens.RoleWrite}); err != nil {
			return nil, err
		}
		a.tokens = append(a.tokens, token)
	}
	env = append([]string{"API_ADDR=127.0.0.1:0", "API_CURSOR_KEY=" + strings.Repeat("ab", 32),
		"API_RATE_READ=off", "API_RATE_WRITE=off", "API_RATE_AUTHOR=off"}, env...)
	c, err := startChild(s, partAPI, leaseTTL, stderr, env...)
	if err != nil {
		return nil, err
	}
	addr, err := c.out.ReadString('\n')
	if err != nil {
		c.kill()
		return nil, fmt.Errorf("read the address of the API: %w", err)
	}
	a.child, a.addr = c, strings.TrimSpace(addr)
	return a, nil
}
