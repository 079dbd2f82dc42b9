//go:build contract

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/internal/fleet"
	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
	"github.com/tidings/tidings/projections"
)

// contract takes the projections of a running dev through every operation on a projection. It has
// no code for a specific one.
type contract struct {
	*dev
	*system
	t   *testing.T
	all []projections.Projection
	rng *rand.Rand
}

// erasedText is in every text of the author whom the test erases.
const (
	erasedText   = "swordfish"
	secretAuthor = 77
)

// TestEveryProjectionKeepsTheContract has a build tag because
// TestAProjectionIsItsFolderItsMigrationAndOneLine runs it with one more projection.
func TestEveryProjectionKeepsTheContract(t *testing.T) {
	d := newDev(t)
	d.start(t)
	y, err := Process{Stderr: io.Discard, Env: envconfig.MapLookuper(nil)}.open(t.Context(), d.dir, "contract", needAll)
	if err != nil {
		t.Fatal(err)
	}
	defer y.close()
	seed := rand.Uint64()
	c := &contract{dev: d, system: y, t: t, all: fleet.Projections(y.kinds.Now), rng: rand.New(rand.NewPCG(seed, 0))}
	t.Logf("seed %d", seed)
	c.must("load", "--generate", "users=40,edges=300,seed=3")
	c.must("load", "--kind", "comment", "--generate", "posts=4,comments=150,seed=3")
	c.write("PUT", "/v1/posts/1/thread", `{"title":"a title"}`, http.Header{"If-Match": {"*"}})
	c.write("PUT", "/v1/memberships/1/2", `{"role":"owner"}`, nil)
	c.write("POST", "/v1/products/9/reviews", `{"author_id":"7","body":"fine","attributes":{"rating":4}}`,
		http.Header{"Idempotency-Key": {"r"}})
	d.verify(t)

	events := c.events()
	for _, p := range c.all {
		t.Run(p.Name(), func(t *testing.T) {
			c := *c
			c.t = t
			c.lag(p)
			c.applies(p, events)
			c.windows(p)
			c.repairs(p)
			for _, from := range []string{"stream", "truth"} {
				c.must("replay", "--yes", "--consumer", p.Name(), "--from", from)
				c.same(p, "after a replay from the "+from)
			}
		})
	}
	c.consumes(c.all[len(c.all)-1])
	c.parksErasesAndRetries()
	d.verify(t)
}

func (c *contract) must(args ...string) string {
	c.t.Helper()
	code, stdout, stderr := run(c.t, nil, "", append(args, "--data", c.dir)...)
	if code != exitOK {
		c.t.Fatalf("%v: exit code %d\n%s%s", args, code, stdout, stderr)
	}
	return stdout
}

func (c *contract) write(method, path, body string, header http.Header) {
	c.t.Helper()
	var answer map[string]any
	if status, _ := c.request(c.t, method, path, body, header, &answer); status != http.StatusOK && status != http.StatusCreated {
		c.t.Fatalf("%s %s: %d %v", method, path, status, answer)
	}
}

// events returns all written events, in the order of their ids.
func (c *contract) events() []event.Event {
	c.t.Helper()
	rows, _ := c.Truth.Query(c.t.Context(), `SELECT event_id::text, tenant_id, aggregate_type, aggregate_id, event_type, event_version::int,
		payload FROM outbox_messages ORDER BY id`)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (e event.Event, err error) {
		return e, row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.Type, &e.Version, &e.Payload)
	})
	if err != nil || len(all) < 400 {
		c.t.Fatalf("%d events, %v", len(all), err)
	}
	return all
}

// differences returns the differences that Verify reports.
func (c *contract) differences(p projections.Projection) (all []projections.Difference) {
	c.t.Helper()
	checked, err := p.Verify(c.t.Context(), c.Truth, c.Projections, func(d projections.Difference) { all = append(all, d) })
	if err != nil || checked == 0 {
		c.t.Fatalf("verify %s: %d checked, %v", p.Name(), checked, err)
	}
	return all
}

func (c *contract) same(p projections.Projection, when string) {
	c.t.Helper()
	for _, d := range c.differences(p) {
		c.t.Errorf("%s: %s", when, d)
	}
}

// lag checks that `tidings status` shows the projection without a lag.
func (c *contract) lag(p projections.Projection) {
	c.t.Helper()
	var st status.State
	if err := json.Unmarshal([]byte(c.must("status", "--json")), &st); err != nil {
		c.t.Fatal(err)
	}
	i := slices.IndexFunc(st.Consumers, func(s status.Consumer) bool { return s.Consumer == p.Name() })
	if i < 0 || st.Consumers[i].Messages != 0 || st.Consumers[i].AsOf.IsZero() {
		c.t.Errorf("the status has %+v, want %s without lag", st.Consumers, p.Name())
	}
}

// applies builds empty tables from all events: aggregates in any order, batches of any size, and
// with repetitions of earlier events.
func (c *contract) applies(p projections.Projection, events []event.Event) {
	c.t.Helper()
	type aggregate struct {
		kind string
		id   event.ID
	}
	var wanted []event.Event
	queues := make(map[aggregate][]event.Event)
	var keys []aggregate
	for _, e := range events {
		if a := (aggregate{e.AggregateType, e.AggregateID}); p.Wants(e.AggregateType) {
			if queues[a] == nil {
				keys = append(keys, a)
			}
			queues[a] = append(queues[a], e)
		}
	}
	for len(keys) > 0 {
		i := c.rng.IntN(len(keys))
		a := keys[i]
		wanted = append(wanted, queues[a][0])
		if queues[a] = queues[a][1:]; len(queues[a]) == 0 {
			keys = slices.Delete(keys, i, i+1)
		}
	}
	if len(wanted) == 0 {
		c.t.Fatalf("%s applies none of the events", p.Name())
	}
	ctx := c.t.Context()
	err := postgres.InTx(ctx, c.Projections, pgx.TxOptions{}, func(tx pgx.Tx) error {
		if _, err := consumers.Hold(ctx, tx, p.Name()); err != nil {
			return err
		}
		for _, table := range p.Tables() {
			if _, err := tx.Exec(ctx, `DELETE FROM `+pgx.Identifier{table}.Sanitize()); err != nil {
				return err
			}
		}
		for at := 0; at < len(wanted); {
			next := min(at+1+c.rng.IntN(60), len(wanted))
			again := c.rng.IntN(at + 1)
			for _, batch := range [][]event.Event{wanted[at:next], wanted[again:min(again+20, next)]} {
				if err := p.Apply(ctx, tx, batch); err != nil {
					return err
				}
			}
			at = next
		}
		return nil
	})
	if err != nil {
		c.t.Fatalf("apply %d events to %s: %v", len(wanted), p.Name(), err)
	}
	c.same(p, "after events that were shuffled and came again")
}

// windows verifies all windows once, and expects no difference.
func (c *contract) windows(p projections.Projection) {
	c.t.Helper()
	var after any
	for n := 0; n == 0 || after != nil; n++ {
		checked, next, err := p.Window(c.t.Context(), c.Truth, c.Projections, after, 25,
			func(d projections.Difference) { c.t.Errorf("window %d: %s", n, d) })
		if err != nil || n > 1000 {
			c.t.Fatalf("window %d of %s: %d checked, %v", n, p.Name(), checked, err)
		}
		after = next
	}
}

// repairs deletes a row of each table that has rows. Verify must find the difference, and Repair
// must restore the row.
func (c *contract) repairs(p projections.Projection) {
	c.t.Helper()
	damaged := 0
	for _, table := range p.Tables() {
		name := pgx.Identifier{table}.Sanitize()
		tag, err := c.Projections.Exec(c.t.Context(), `DELETE FROM `+name+` WHERE ctid = (SELECT ctid FROM `+name+
			` ORDER BY random() LIMIT 1)`)
		if err != nil {
			c.t.Fatal(err)
		}
		if tag.RowsAffected() == 0 {
			continue
		}
		damaged++
		found := c.differences(p)
		if len(found) == 0 {
			c.t.Errorf("a row of %s is missing, and Verify finds no difference", table)
		}
		for _, d := range found {
			if d.Projection != p.Name() {
				c.t.Errorf("a difference of %s names the projection %s", p.Name(), d.Projection)
			}
		}
		if _, err := verify.Repair(c.t.Context(), c.verifying(), p, arriveWithin, false); err != nil {
			c.t.Fatal(err)
		}
		c.same(p, "after a row of "+table+" was repaired")
	}
	if damaged == 0 && len(p.Tables()) > 0 {
		c.t.Errorf("%s: none of the tables %v has rows", p.Name(), p.Tables())
	}
}

// consumes runs one more instance of the projection's consumer, like a process of its own.
func (c *contract) consumes(p projections.Projection) {
	c.t.Helper()
	in := c.instance(c.t)
	ops := testkit.FreeAddr(c.t)
	env := map[string]string{"DATABASE_URL": in.DatabaseURL, "NATS_URL": in.NATSURL, "OPS_ADDR": ops, "LEASE_TTL": "1s"}
	ctx, stop := context.WithCancel(c.t.Context())
	defer stop()
	var stderr bytes.Buffer
	done := make(chan int, 1)
	go func() {
		done <- Execute(ctx, []string{"consume", "--consumer", p.Name()},
			Process{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: &stderr, Env: envconfig.MapLookuper(env)})
	}()
	testkit.Eventually(c.t, "the consumer to have its share of the partitions", func() (bool, error) {
		resp, err := http.Get("http://" + ops + "/readyz")
		if err != nil {
			return false, err
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK, nil
	})
	stop()
	if code := <-done; code != exitOK {
		c.t.Errorf("consume: exit code %d\n%s", code, &stderr)
	}
}

// parksErasesAndRetries parks aggregates behind an unreadable event, erases an author whose text is
// in one of them, and retries the dead letters.
func (c *contract) parksErasesAndRetries() {
	c.t.Helper()
	ctx := c.t.Context()
	c.write("POST", "/v1/posts/1/comments", fmt.Sprintf(`{"author_id":"%d","body":"%s"}`, secretAuthor, erasedText),
		http.Header{"Idempotency-Key": {"s"}})
	c.dev.verify(c.t)
	if n := c.holding(); n == 0 {
		c.t.Fatal("no table has the text")
	}
	aggregates := map[string]event.ID{event.AggregateComment: "1", event.AggregateFollow: "1"}
	var want, parked int
	for kind, id := range aggregates {
		if _, err := c.Truth.Exec(ctx, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES ($1, $2, $3, 'created', '{}')`, devTenant, kind, id); err != nil {
			c.t.Fatal(err)
		}
		for _, p := range c.all {
			if p.Wants(kind) {
				want++
			}
		}
	}
	testkit.Eventually(c.t, "everyone to park what cannot be read", func() (bool, error) {
		err := c.Projections.QueryRow(ctx, `SELECT count(*) FROM consumer_dead_letters`).Scan(&parked)
		return parked == want, err
	})
	c.write("PUT", "/v1/follows/900/1", "", nil)
	c.must("erase", "--yes", "--tenant", fmt.Sprint(devTenant), "--author", fmt.Sprint(secretAuthor), "--actor", "test")
	if n := c.holding(); n != 0 {
		c.t.Errorf("%d rows have the text of an erased author", n)
	}
	letters := consumers.NewDeadLetters(c.Projections, c.all...)
	first, err := postgres.Collect(letters.List(ctx, consumers.DeadLetterFilter{First: true}, 100))
	if err != nil || len(first) != want {
		c.t.Fatalf("%d aggregates are parked, want %d: %v", len(first), want, err)
	}
	for _, l := range first {
		r := consumers.DeadLetterRequest{ID: l.ID, Actor: "test"}
		if again, err := letters.Retry(ctx, r); err != nil || again.Fault == nil {
			c.t.Errorf("%s: a retry of %s succeeds: %v", l.Consumer, l.Event.Type, err)
		}
		rest, err := letters.Discard(ctx, r)
		if err != nil || rest.Next == 0 {
			c.t.Fatalf("%s: no dead letter waits behind the event of %s %s: %v", l.Consumer, l.Event.AggregateType,
				l.Event.AggregateID, err)
		}
		r.ID = rest.Next
		if rest, err = letters.Retry(ctx, r); err != nil || rest.Fault != nil || rest.Left != 0 {
			c.t.Errorf("%s: retry %s %s: %d left, %v, %v", l.Consumer, l.Event.AggregateType, l.Event.AggregateID, rest.Left,
				rest.Fault, err)
		}
	}
}

// holding counts the rows of the database that have the erased text.
func (c *contract) holding() (n int) {
	c.t.Helper()
	rows, _ := c.Projections.Query(c.t.Context(), `SELECT format('%I', tablename) FROM pg_tables WHERE schemaname = 'public'
		AND has_table_privilege(schemaname || '.' || quote_ident(tablename), 'SELECT')`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 20 {
		c.t.Fatalf("%d tables, %v", len(tables), err)
	}
	for _, table := range tables {
		var some int
		if err := c.Projections.QueryRow(c.t.Context(), `SELECT count(*) FROM `+table+
			` t WHERE strpos(t::text, $1) + strpos(t::text, encode($1::text::bytea, 'hex')) > 0`, erasedText).Scan(&some); err != nil {
			c.t.Fatalf("%s: %v", table, err)
		}
		n += some
	}
	return n
}
