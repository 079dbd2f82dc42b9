package console_test

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds/catalog"
)

// crowd fills the servers with dead letters of the outbox and of a consumer, half of them of one
// cause, with as many published events, and with kinds and 32 partitions. The last letters of each
// source are of the cause late, and the very last is of the type rare and of tenant 77.
func (d *desk) crowd(t *testing.T, n, kinds int) {
	t.Helper()
	owner := d.db.Pool(t, postgres.RoleOwner)
	for _, sql := range []string{
		`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, inserted_at, available_at, processed_at,
			partition, stream_seq) SELECT 1 + g % 9, 'post', g, 'made', '{}', now() - interval '1 h', now() - interval '1 h', now(), 0, g
			FROM generate_series($2::int, least($1::int, $2::int + 99999)) g`,
		`INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
			available_at, attempts, event_id, inserted_at, slot, last_error, cause, dead_at)
		 SELECT nextval('outbox_messages_id_seq'), CASE g WHEN $1::int THEN 77 ELSE 1 + g % 9 END, 'post', g,
			CASE g WHEN $1::int THEN 'rare' ELSE 'made' END, 1, '{}', now(), now(), 11, gen_random_uuid(), now(), 0, 'e',
			CASE WHEN g > $1::int * 7 / 8 THEN 'late' WHEN g % 2 = 0 THEN 'often' ELSE 'cause ' || g % 600 END, now() + g * interval '1 ms'
			FROM generate_series($2::int, least($1::int, $2::int + 99999)) g`,
		`INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id, event_id,
			event_type, event_version, headers, payload, error, cause, dead_at)
		 SELECT 'threadcache', g, 'EVENTS-0', CASE g WHEN $1::int THEN 77 ELSE 1 + g % 9 END, 'comment', g % 1000, gen_random_uuid(),
			CASE g WHEN $1::int THEN 'rare' ELSE 'created' END, 1, '{}', '', 'e',
			CASE WHEN g > $1::int * 7 / 8 THEN 'late' WHEN g % 2 = 0 THEN 'often' ELSE 'cause ' || g % 600 END, now() + g * interval '1 ms'
			FROM generate_series($2::int, least($1::int, $2::int + 99999)) g`,
	} {
		for from := 1; from <= n; from += 100_000 { // fewer than the limit of a statement
			if _, err := owner.Exec(t.Context(), sql, n, from); err != nil {
				t.Fatal(err)
			}
		}
	}
	var file strings.Builder
	file.WriteString("objects: {song: songs}\nedges:\n")
	for i := range kinds {
		fmt.Fprintf(&file, "  play%d: {plural: plays%d, from: user, to: song, forward: plays%d, reverse: players%d}\n", i, i, i, i)
	}
	if _, err := catalog.Apply(t.Context(), catalog.Databases{Truth: d.pool, Projections: d.pool},
		catalog.Request{Kinds: testkit.Kinds(t, file.String()), Actor: "ann"}); err != nil {
		t.Fatal(err)
	}
	for i := range 32 {
		if _, err := broker.Declare(t.Context(), d.js, d.nats.Config(), broker.Partition{Number: i, FirstSlot: i, LastSlot: i},
			testkit.Logger(t)); err != nil {
			t.Fatal(err)
		}
	}
	for _, sql := range []string{`UPDATE outbox_partitions SET last_slot = 0, stream = 'EVENTS-0', created = now(), floor_id = 1e9;
		INSERT INTO outbox_partitions (partition, first_slot, last_slot, stream, created, floor_id)
		SELECT g, g, g, 'EVENTS-' || g, now(), 1e9 FROM generate_series(1, 31) g`,
		`ANALYZE outbox_messages, outbox_messages_dlq, consumer_dead_letters`} {
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
}

// crowdPages are the pages that read much in a crowd.
var crowdPages = []string{"/console/", "/console/dead-letters", "/console/dead-letters?q=often", "/console/dead-letters?tenant=3",
	"/console/dead-letters/letters?source=outbox", "/console/dead-letters/letters?source=consumers",
	"/console/dead-letters/letters?source=outbox&type=made&aggregate=post&aggregate_id=7&tenant=8", "/console/retrying", "/console/event",
	"/console/event?tenant=3", "/console/event?state=dead&tenant=3", "/console/event?type=none",
	"/console/event?type=none&since=2020-01-01",
	"/console/event?q=post/7&tenant=8",
	"/console/moderation?tenant=7", "/console/moderation-threads?tenant=7", "/console/kinds", "/console/partitions", "/console/consumers",
	"/console/day"}

// crowdOf returns crowdPages, and the pages of a large and of a small group of each source.
func (d *desk) crowdOf(t *testing.T) []string {
	t.Helper()
	all := slices.Clone(crowdPages)
	for source, table := range map[string]string{"outbox": "outbox_messages_dlq", "consumers": "consumer_dead_letters"} {
		letters := "/console/dead-letters/letters?source=" + source
		all = append(all, letters+"&type=rare", letters+"&tenant=77", letters+"&until=2020-01-01", letters+"&aggregate=none",
			letters+"&tenant=8&aggregate="+map[string]string{"outbox": "post", "consumers": "comment"}[source]+"&aggregate_id=7")
		for _, act := range []string{"retry", "discard"} {
			form := "/console/act/dead_letter." + act + "?source=" + source
			all = append(all, form, form+"&type=rare", form+"&aggregate=none")
		}
		for _, cause := range []string{"often", "late", "cause 1"} {
			var group, letter string
			if err := d.pool.QueryRow(t.Context(), `SELECT group_id, id FROM `+table+` WHERE cause = $1 ORDER BY id DESC LIMIT 1`,
				cause).Scan(&group, &letter); err != nil {
				t.Fatal(err)
			}
			of := "?source=" + source + "&group=" + group
			all = append(all, "/console/dead-letters/letters"+of, "/console/dead-letters/letters"+of+"&tenant=3",
				"/console/dead-letters/letter?source="+source+"&id="+letter, "/console/act/dead_letter.retry"+of,
				"/console/act/dead_letter.discard"+of)
		}
	}
	return all
}

// recorder keeps the statements of a pool, with those of a batch together.
type recorder struct {
	mu  sync.Mutex
	all [][]*pgx.QueuedQuery
}

func (r *recorder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	var one pgx.Batch
	one.Queue(q.SQL, q.Args...)
	return r.TraceBatchStart(ctx, nil, pgx.TraceBatchStartData{Batch: &one})
}

func (r *recorder) TraceBatchStart(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchStartData) context.Context {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, b.Batch.QueuedQueries)
	return ctx
}

func (*recorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (*recorder) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*recorder) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// take returns the statements since the last call.
func (r *recorder) take() (all [][]*pgx.QueuedQuery) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, r.all = r.all, nil
	return all
}

// node is a node of a plan that ran.
type node struct {
	Relation string  `json:"Relation Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Plans    []node
}

// most adds the rows that each table's largest scan read.
func (n node) most(of map[string]float64) {
	if n.Relation != "" {
		of[n.Relation] = max(of[n.Relation], (n.Rows+n.Filtered)*n.Loops)
	}
	for _, p := range n.Plans {
		p.most(of)
	}
}

var (
	reads  = regexp.MustCompile(`^\s*(SELECT|WITH)\b`)
	writes = regexp.MustCompile(`\b(INSERT|UPDATE|DELETE|set_config)\b`)
)

// explained runs the statements again and returns the rows that their largest scans read, by table.
func explained(t *testing.T, pool *pgxpool.Pool, statements []*pgx.QueuedQuery) map[string]float64 {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }() // it changes nothing
	if _, err := tx.Exec(t.Context(), `SELECT set_config('tidings.tenant', '7', true)`); err != nil {
		t.Fatal(err)
	}
	of := map[string]float64{}
	for _, q := range statements {
		switch {
		case !reads.MatchString(q.SQL):
		case writes.MatchString(q.SQL):
			if !strings.Contains(q.SQL, "set_config") {
				continue
			}
			if _, err := tx.Exec(t.Context(), q.SQL, q.Arguments...); err != nil {
				t.Fatalf("%s: %v", q.SQL, err)
			}
		default:
			var text []byte
			var plan []struct{ Plan node }
			err := tx.QueryRow(t.Context(), "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) "+q.SQL, q.Arguments...).Scan(&text)
			if err == nil {
				err = json.Unmarshal(text, &plan)
			}
			if err != nil {
				t.Fatalf("%s: %v", q.SQL, err)
			}
			plan[0].Plan.most(of)
		}
	}
	return of
}

// TestPagesReadAFewOfManyDeadLetters opens pages and then explains their statements. A page that
// reads every dead letter is slow in a crowd, however fast it is in a test.
func TestPagesReadAFewOfManyDeadLetters(t *testing.T) {
	t.Parallel()
	var said recorder
	d := openDesk(t, traced(t, &said))
	const letters, few = 45_000, 20_100 // a window of ids has 20,000
	d.crowd(t, letters, 20)
	ada := d.signIn(t, d.Tokens.Admin)
	seen := 0
	for _, path := range d.crowdOf(t) {
		said.take()
		page(t, ada, path)
		for _, statements := range said.take() {
			if strings.Contains(statements[len(statements)-1].SQL, "/* outbox.stats */") {
				continue // it stops at 100,000 letters
			}
			for table, rows := range explained(t, d.pool, statements) {
				seen++
				if rows > few && strings.Contains(table, "dead") || rows > few && strings.Contains(table, "dlq") {
					t.Errorf("%s reads %.0f rows of %s: %s", path, rows, table, statements[len(statements)-1].SQL)
				}
			}
		}
	}
	if seen < 100 {
		t.Errorf("%d scans are explained", seen)
	}
}
