package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

// writeOptions are the flags of `tidings bench write`.
type writeOptions struct {
	clients, tenants int
	duration         time.Duration
	hot              []string
	ids              string
	form             idForm
}

func writeCommand() *cobra.Command {
	var o writeOptions
	cmd := &cobra.Command{
		Use: "write", Args: cobra.NoArgs,
		Short: "Measure single writes over HTTP against pgbench with the same statements",
		Long: `Write measures writes over HTTP, and compares them with a baseline and a ceiling. Every case starts
with empty tables.

Case pgbench is the baseline: it runs the two statements of a follow (the row, the outbox message)
in one transaction, with --clients connections and prepared statements. Without pgbench on the
machine, case pgx replaces it. Case ceiling is a server that does nothing but store follows, in
groups of one round trip each, in the same tables with row security. Case write sends new follows
to the API, a process of its own with the processor time api_cpu_us_per_write. Each of --clients
connections sends one request at a time. Case write-comments sends comments with an
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
			var err error
			if o.form, err = formOf(o.ids); err != nil {
				return err
			}
			return onServers(cmd, "", syncDefault, o.run)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.clients, "clients", 32, "parallel connections that write")
	f.DurationVar(&o.duration, "duration", 20*time.Second, "how long each case writes")
	f.IntVar(&o.tenants, "tenants", 0, "also write for this many tenants at once")
	idsFlag(cmd, &o.ids)
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
	OfCeiling         *float64 `json:"ratio_to_ceiling,omitempty"`
	quantiles
	Refused    *int     `json:"refused,omitempty"` // 503 with Retry-After
	Errors     *int     `json:"errors,omitempty"`  // any other answer, or no answer
	Missing    *int     `json:"missing,omitempty"`
	Duplicates *int     `json:"duplicates,omitempty"`
	Clients    int      `json:"clients"`
	IDs        idForm   `json:"ids,omitempty"`
	Tenants    int      `json:"tenants,omitempty"`
	PeakRSS    *float64 `json:"peak_rss_mib,omitempty"`
	APICPU     *float64 `json:"api_cpu_us_per_write,omitempty"`
	settings
}

func (r *writeResult) rate(accepted int, took time.Duration) {
	r.Accepted, r.Seconds, r.AcceptedPerSecond = accepted, round(took.Seconds(), 3), perSecond(accepted, took)
}

// fill sets the results of the requests, which were sent in the time took.
func (r *writeResult) fill(c *callers, took time.Duration) {
	r.rate(len(c.took), took)
	r.quantiles, r.Refused, r.Errors = quantilesOf(c.took), &c.refused, &c.failed
}

func (o writeOptions) run(ctx context.Context, s *servers) error {
	base := writeResult{Clients: o.clients}
	s.say("baseline: %d connections for %s", o.clients, o.duration)
	name, n, took, err := baseline(ctx, s, o.clients, o.duration)
	if err == nil && n == 0 { // the machine stalled for all of a short baseline
		name, n, took, err = baseline(ctx, s, o.clients, o.duration+10*time.Second)
	}
	if err == nil && n == 0 {
		err = errors.New("the baseline wrote nothing: nothing can be compared with it")
	}
	if err != nil {
		return err
	}
	base.Case = name
	base.rate(n, took)
	if err := s.print(&base); err != nil {
		return err
	}

	type writing struct {
		name    string
		tenants int
		next    func(client, n int) request
	}
	part, ceiling := partCeiling, 0.0
	comment, _ := kinds.Builtin().Child(event.AggregateComment)
	cases := []writing{{partCeiling, 1, o.form.follows}, {"write", 1, o.form.follows},
		{"write-comments", 1, o.form.childrenUnder(comment, 1000)}}
	if o.tenants > 0 {
		cases = append(cases, writing{"write-tenants", o.tenants, o.form.follows})
	}
	for _, name := range o.hot {
		k, _ := kinds.Builtin().Child(name)
		cases = append(cases, writing{"write-hot-" + name, 1, o.form.childrenUnder(k, 1)})
	}
	wrong := 0
	for _, c := range cases {
		r := writeResult{Case: c.name, Clients: o.clients, IDs: o.form}
		if err := o.measure(ctx, s, &r, part, c.tenants, c.next); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		r.Ratio = ptr(round(r.AcceptedPerSecond/base.AcceptedPerSecond, 2))
		if c.name == partCeiling {
			part, ceiling = partAPI, r.AcceptedPerSecond
		} else if ceiling > 0 {
			r.OfCeiling = ptr(round(r.AcceptedPerSecond/ceiling, 2))
		}
		if err := s.print(&r); err != nil {
			return err
		}
		wrong += *r.Missing + *r.Duplicates + *r.Errors + *r.Refused
	}
	if wrong > 0 {
		return fmt.Errorf("%d writes were refused, failed, are missing or have a second event", wrong)
	}
	return nil
}

// measure empties the tables, writes, and sets the results of r.
func (o writeOptions) measure(ctx context.Context, s *servers, r *writeResult, part string, tenants int,
	next func(client, n int) request) error {
	if tenants > 1 {
		r.Tenants = tenants
	}
	if err := s.exec(ctx, emptySQL, `CHECKPOINT`); err != nil {
		return err
	}
	a, err := s.startServer(ctx, part, tenants)
	if err != nil {
		return err
	}
	warm, c := newCallers(a, min(o.clients, 4), next), newCallers(a, o.clients, next)
	if _, err := warm.run(ctx, workload{duration: min(o.duration/4, time.Second)}); err != nil {
		return err
	}
	s.say("%s: %d clients for %s", r.Case, o.clients, o.duration)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // pgbench has one thread too
	a.child.mark()
	start := time.Now()
	if _, err := c.run(ctx, workload{duration: o.duration}); err != nil {
		return err
	}
	if r.fill(c, time.Since(start)); r.Accepted > 0 {
		r.APICPU = perEvent(a.child.used(), r.Accepted)
	}
	if _, r.PeakRSS, err = stop(a.child); err != nil {
		return err
	}
	s.say("%s: searching for every accepted write", r.Case)
	return r.check(ctx, s, warm, c)
}

// follows returns random pairs out of 10^15. A repeated pair would count as an error.
func (f idForm) follows(int, int) request {
	follower, followee := string(f.of(1+rand.Int64N(1_000_000_000_000))), string(f.of(1_000_000_000_000+1+rand.Int64N(1000)))
	return request{method: "PUT", path: "/v1/follows/" + follower + "/" + followee, key: follower + " " + followee}
}

// childrenUnder returns requests that create children under random objects by random authors.
func (f idForm) childrenUnder(k kinds.Child, objects int64) func(client, n int) request {
	under, attributes := "/v1/"+kinds.Builtin().Objects[k.Parent].Plural+"/", ""
	if values := required(k.Attributes); values != "{}" {
		attributes = `,"attributes":` + values
	}
	return func(client, n int) request {
		author := f.of(1 + rand.Int64N(1_000_000_000_000))
		headers := "Content-Type: application/json\r\nIdempotency-Key: " + strconv.Itoa(client) + "-" + strconv.Itoa(n) + "\r\n"
		body := append(append([]byte(`{"author_id":"`), author...),
			`","body":"A comment of the length that people write, give or take a few words."`...)
		body = append(append(body, attributes...), '}')
		return request{method: "POST", path: under + string(f.of(1+rand.Int64N(objects))) + "/" + k.Plural, headers: headers,
			body: body}
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

// check searches for every accepted write, and sets the results of r. More events than accepted
// writes are duplicates, except for as many as there are writes with an unknown outcome: no answer,
// or any answer but 201.
func (r *writeResult) check(ctx context.Context, s *servers, all ...*callers) error {
	var keys []string
	unknown, events := 0, 0
	for _, c := range all {
		keys = append(keys, c.created...)
		unknown += c.refused + c.failed
	}
	if _, err := s.pool.Exec(ctx, `ANALYZE`); err != nil {
		return err
	}
	r.Missing, r.Duplicates = new(int), new(int)
	err := s.pool.QueryRow(ctx, writtenSQL, pgx.StrictNamedArgs{"keys": keys}).Scan(r.Missing, r.Duplicates, &events)
	*r.Duplicates += max(0, events-len(keys)-unknown)
	return err
}

// emptySQL truncates the tables that have rows. An installation has some tables for every kind, and
// truncating them all slows the next case down (docs/performance.md).
const emptySQL = `
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
END $$`
