package api_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/store"
)

const ndjson = "Content-Type: application/x-ndjson"

// batch sends operations as one document and returns their outcomes.
func (f fixture) batch(t testing.TB, path string, ops []string) []map[string]any {
	t.Helper()
	a := f.do(t, "POST", path, `{"operations":[`+strings.Join(ops, ",")+`]}`)
	items, _ := a.json["items"].([]any)
	if a.StatusCode != 200 || a.Header.Get("Content-Type") != "application/json" || len(items) != len(ops) {
		t.Fatalf("POST %s: %d, %d outcomes of %d: %.500s", path, a.StatusCode, len(items), len(ops), a.body)
	}
	outcomes := make([]map[string]any, len(items))
	for i, item := range items {
		outcomes[i] = item.(map[string]any)
	}
	return outcomes
}

// told returns the content of an outcome without the parts that differ between two entities.
func told(status any, code any, entity map[string]any, replayed any) string {
	return fmt.Sprint(status, " ", code, " ", entity["follower_id"], " ", entity["followee_id"], " ", entity["status"], " ",
		entity["author_id"], " ", entity["body"],
		" ", entity["state"], " ", entity["version"], " ", entity["depth"], " ", replayed == true || replayed == "true")
}

func toldBy(outcome map[string]any) string {
	problem, _ := outcome["problem"].(map[string]any)
	entity, _ := outcome["follow"].(map[string]any)
	if entity == nil {
		entity, _ = outcome["comment"].(map[string]any)
	}
	if problem != nil {
		entity, _ = problem["current"].(map[string]any)
	}
	return told(outcome["status"], problem["code"], entity, outcome["replayed"])
}

func toldAlone(a answer) string {
	entity := a.json
	if current, ok := a.json["current"].(map[string]any); ok || a.StatusCode >= 400 {
		entity = current
	}
	return told(float64(a.StatusCode), a.json["code"], entity, a.Header.Get("Idempotency-Replayed"))
}

// events returns the content of the tenant's events, in order for each entity.
func (f fixture) events(t *testing.T, tenant int) []string {
	t.Helper()
	rows, _ := f.system.Query(t.Context(), `SELECT concat_ws(' ', payload->>'follower_id', payload->>'followee_id', payload->>'author_id',
		event_type, payload->>'version', payload->>'body')
		FROM outbox_messages WHERE tenant_id = $1 ORDER BY aggregate_id, payload->>'follower_id', payload->>'slug', id`, tenant)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func TestABatchAnswersAsTheSingleRoutesWould(t *testing.T) {
	t.Parallel()
	f := open(t)
	alone := f
	alone.token = f.newToken(t, 2, "alone", tokens.Roles()...)
	seed, _ := testkit.Seed(t)
	rnd := rand.New(rand.NewPCG(seed, 1))
	compare := func(t *testing.T, outcomes []map[string]any, singly func(i int) answer) {
		t.Helper()
		statuses := map[string]int{}
		for i, o := range outcomes {
			want := toldAlone(singly(i))
			if got := toldBy(o); got != want {
				t.Fatalf("operation %d: %s, want %s: %v", i, got, want, o)
			}
			statuses[fmt.Sprint(o["status"])]++
		}
		t.Logf("outcomes: %v", statuses)
	}
	t.Run("follows", func(t *testing.T) {
		ops, paths := make([]string, 1000), make([]string, 1000)
		for i := range ops {
			a, b := rnd.IntN(7), rnd.IntN(7) // 0 is not a valid user, and a pair may have one user twice
			op := []string{"put", "remove"}[rnd.IntN(2)]
			ops[i] = fmt.Sprintf(`{"op":%q,"follower_id":"%d","followee_id":"%d"}`, op, a, b)
			paths[i] = map[string]string{"put": "PUT", "remove": "DELETE"}[op] + fmt.Sprintf(" /v1/follows/%d/%d", a, b)
		}
		compare(t, f.batch(t, "/v1/follows:batch", ops), func(i int) answer {
			method, path, _ := strings.Cut(paths[i], " ")
			return alone.do(t, method, path, "")
		})
		if diff := cmp.Diff(f.events(t, 2), f.events(t, tenant)); diff != "" {
			t.Errorf("events (-singly +batch):\n%s", diff)
		}
	})
	t.Run("comments", func(t *testing.T) {
		const post = "/v1/posts/5/comments"
		var ids, theirs []string
		for n := range 30 {
			ids = append(ids, f.comment(t, 5, fmt.Sprint("seed ", n)).text("comment_id"))
			theirs = append(theirs, alone.comment(t, 5, fmt.Sprint("seed ", n)).text("comment_id"))
		}
		for _, x := range []fixture{f, alone} {
			x.want(t, 200, "PUT", "/v1/posts/8/thread", `{"locked":true}`)
			x.want(t, 200, "PUT", "/v1/posts/9/thread", `{"premoderated":true}`)
		}
		bodies := []string{`"one"`, `" two "`, `""`, `5`, `"nul \u0000"`}
		var ops []string
		var single []func() answer
		for range 1000 {
			n, body, version := rnd.IntN(len(ids)), bodies[rnd.IntN(len(bodies))], rnd.IntN(4)
			ifMatch, header := fmt.Sprintf(`,"if_match":%d`, version), fmt.Sprintf(`If-Match: "%d"`, version)
			if version == 0 {
				ifMatch, header = `,"if_match":"*"`, "If-Match: *"
			}
			switch rnd.IntN(5) {
			case 0:
				ops = append(ops, fmt.Sprintf(`{"op":"edit","comment_id":%q,"body":%s%s}`, strings.ToUpper(ids[n]), body, ifMatch))
				single = append(single, func() answer {
					return alone.do(t, "PATCH", "/v1/comments/"+theirs[n],
						`{"body":`+body+`}`, header)
				})
			case 1:
				ops = append(ops, fmt.Sprintf(`{"op":"delete","comment_id":%q%s}`, ids[n], ifMatch))
				single = append(single, func() answer { return alone.do(t, "DELETE", "/v1/comments/"+theirs[n], "", header) })
			case 2:
				key := fmt.Sprint("k", rnd.IntN(100))
				ops = append(ops, fmt.Sprintf(`{"op":"create","post_id":"5","author_id":"3","body":%s,"idempotency_key":%q}`, body, key))
				single = append(single, func() answer {
					return alone.do(t, "POST", post, `{"author_id":"3","body":`+body+`}`, "Idempotency-Key: "+key)
				})
			case 3:
				ops = append(ops, fmt.Sprintf(`{"op":"create","post_id":"5","author_id":"4","body":%s,"parent_id":%q}`, body, ids[n]))
				single = append(single, func() answer {
					return alone.do(t, "POST", post, fmt.Sprintf(`{"author_id":"4","body":%s,"parent_id":%q}`, body, theirs[n]))
				})
			default:
				p, author := rnd.IntN(10), rnd.IntN(3)
				ops = append(ops, fmt.Sprintf(`{"op":"create","post_id":"%d","author_id":"%d","body":%s}`, p, author, body))
				single = append(single, func() answer {
					return alone.do(t, "POST", fmt.Sprintf("/v1/posts/%d/comments", p),
						fmt.Sprintf(`{"author_id":"%d","body":%s}`, author, body))
				})
			}
		}
		compare(t, f.batch(t, "/v1/comments:batch", ops), func(i int) answer { return single[i]() })
		want, got := f.events(t, 2), f.events(t, tenant)
		slices.Sort(want) // slugs differ, and so does the order of entities
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("events (-singly +batch):\n%s", diff)
		}
	})
}

func TestLinesOfABatchStandAlone(t *testing.T) {
	t.Parallel()
	f := open(t)
	a := f.do(t, "POST", "/v1/follows:batch", strings.Join([]string{
		`{"op":"put","follower_id":"1","followee_id":"2"}` + "\r", `{"op":"put","follower_id":"1",`, ``,
		`{"op":"like","follower_id":"1","followee_id":"2"}`, `[]`,
		`{"op":"remove","follower_id":"1","followee_id":"2","op":"put"}`, `{"op":"put","follower_id":"1","followee_id":"1"}`,
		`{"op":"remove","follower_id":"1","followee_id":"2"}`, `{"op":"put","follower_id":"1","followee_id":"3"}`,
	}, "\n")+"\n", ndjson, "Tidings-Actor: importer")
	var got, want []string
	var token string
	for i, line := range strings.Split(strings.TrimSuffix(a.body, "\n"), "\n") {
		var o map[string]any
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if o["line"] != float64(i+1) {
			t.Errorf("line %d: %s", i+1, line)
		}
		problem, _ := o["problem"].(map[string]any)
		errors, _ := problem["errors"].([]any)
		at := ""
		if len(errors) > 0 {
			at = fmt.Sprint(errors[0].(map[string]any)["pointer"])
		}
		got = append(got, fmt.Sprint(o["status"], " ", problem["code"], " ", at))
		token, _ = o["token"].(string)
	}
	want = append(want, "201 <nil> ", "400 json-invalid #", "400 json-invalid #", "422 validation-failed #/op",
		"422 validation-failed #/op", "400 json-invalid #", "422 self-follow #/followee_id", "204 <nil> ", "201 <nil> ")
	if diff := cmp.Diff(want, got); diff != "" || a.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Errorf("outcomes (-want +got):\n%s%v", diff, a.Header)
	}
	if counts := f.want(t, 200, "GET", "/v1/users/3/counts", "", "Tidings-Token: "+token); counts.json["followers"] != 1.0 {
		t.Errorf("with the last one's token: %s", counts.body)
	}
	if diff := cmp.Diff([]string{"1 2 created 1", "1 2 removed 2", "1 3 created 1"}, f.events(t, tenant)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestWhatFailsInABatchFailsAlone has an operation that makes its whole transaction fail, and one
// that fails for a reason that no client can know.
func TestWhatFailsInABatchFailsAlone(t *testing.T) {
	t.Parallel()
	f := open(t)
	lost := f.want(t, 201, "POST", "/v1/posts/5/comments", `{"author_id":"3","body":"x"}`, "Idempotency-Key: lost").text("comment_id")
	f.exec(t, `DELETE FROM comments WHERE comment_id = '`+lost+`'`)
	if _, err := f.owner.Exec(t.Context(), `ALTER TABLE children_comment ADD CHECK (body <> 'poison')`); err != nil {
		t.Fatal(err)
	}
	ops := make([]string, 150)
	for n := range ops {
		key, body := fmt.Sprint("k", n), "x"
		switch n {
		case 70:
			body = "poison"
		case 120:
			key = "lost"
		}
		ops[n] = fmt.Sprintf(`{"op":"create","post_id":"5","author_id":"3","body":%q,"idempotency_key":%q}`, body, key)
	}
	for n, o := range f.batch(t, "/v1/comments:batch", ops) {
		if want := map[bool]any{true: 500.0, false: 201.0}[n == 70 || n == 120]; o["status"] != want || o["replayed"] != nil {
			t.Errorf("operation %d: %v, want %v", n, o, want)
		}
	}
	if got := len(f.events(t, tenant)); got != 1+148 {
		t.Errorf("%d events, want 149", got)
	}
}

// deadlocks counts the statements of a pool that the server ended to resolve a deadlock. The store
// repeats them, so that nobody else notices.
type deadlocks struct{ atomic.Int64 }

func (d *deadlocks) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (d *deadlocks) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if err, ok := errors.AsType[*pgconn.PgError](data.Err); ok && err.Code == "40P01" {
		d.Add(1)
	}
}

// TestOverlappingBatches sends batches of the same pairs in different orders at once. They are
// written in the order of their versions, and wait for each other without a deadlock.
func TestOverlappingBatches(t *testing.T) {
	t.Parallel()
	f := open(t)
	var met deadlocks
	traced := f.pool.Config()
	traced.ConnConfig.Tracer = &met
	pool, err := pgxpool.NewWithConfig(t.Context(), traced)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if f.Handler, err = api.New(config(), api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil),
		Projections: pool, Fleet: fleet, Log: testkit.Logger(t), Reg: prometheus.NewRegistry()}); err != nil {
		t.Fatal(err)
	}
	seed, _ := testkit.Seed(t)
	var wg sync.WaitGroup
	for turn := range uint64(4) {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, turn))
			for range 5 {
				ops := make([]string, 200)
				for i := range ops {
					ops[i] = fmt.Sprintf(`{"op":%q,"follower_id":"1","followee_id":"%d"}`, []string{"put", "remove"}[i/100], i%100+2)
				}
				rnd.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
				for i, o := range f.batch(t, "/v1/follows:batch", ops) {
					if s, _ := o["status"].(float64); s < 200 || s > 204 {
						t.Errorf("operation %d: %v", i, o)
					}
				}
			}
		})
	}
	wg.Wait()
	if n := met.Load(); n > 0 {
		t.Errorf("%d deadlocks", n)
	}
	var broken int
	err = f.system.QueryRow(t.Context(), `SELECT count(*) FROM (SELECT (payload->>'version')::bigint - row_number() OVER
		(PARTITION BY aggregate_id ORDER BY id) AS off
		FROM outbox_messages) v WHERE off <> 0`).Scan(&broken)
	if err != nil || broken > 0 {
		t.Errorf("%d events out of the order of their versions, %v", broken, err)
	}
}

// TestAnOperationThatTheStoreHasNoRoomForIsRefusedAlone lets the maximum number of writes wait for
// a pair that another transaction has locked.
func TestAnOperationThatTheStoreHasNoRoomForIsRefusedAlone(t *testing.T) {
	t.Parallel()
	f := open(t)
	s := store.New(f.pool, nil)
	var err error
	if f.Handler, err = api.New(config(), api.Deps{Store: s, Tokens: f.pool, DLQ: outbox.NewDLQ(f.pool, nil), Projections: f.pool,
		Fleet: fleet, Log: testkit.Logger(t), Reg: prometheus.NewRegistry()}); err != nil {
		t.Fatal(err)
	}
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	tx, err := f.system.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := tx.Exec(t.Context(), `SELECT FROM follows FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	write := func() {
		if _, err := s.PutEdges(ctx, tenant, kinds.Builtin().Edges["follow"],
			[]store.EdgeWrite{{Meta: store.Meta{Actor: "a"}, From: "1", To: "2"}}); !errors.Is(err, context.Canceled) {
			t.Errorf("a write that waits: %v", err)
		}
	}
	groups := s.Stats().Groups
	wg.Go(write)
	testkit.Eventually(t, "a write to have the pair", func() (bool, error) { return s.Stats().Groups > groups, nil })
	const room = 2048 // the store's limit
	for range room {
		wg.Go(write)
	}
	testkit.Eventually(t, "the room to be full", func() (bool, error) { return s.Stats().Waiting == room, nil })
	outcomes := f.batch(t, "/v1/follows:batch", []string{`{"op":"put","follower_id":"3","followee_id":"4"}`,
		`{"op":"remove","follower_id":"3","followee_id":"5"}`})
	if got := toldBy(outcomes[0]); !strings.HasPrefix(got, "503 overloaded ") || outcomes[1]["status"] != 204.0 {
		t.Errorf("outcomes: %v, want a 503 and a 204", outcomes)
	}
	f.want(t, 404, "GET", "/v1/follows/3/4", "")
	for i, o := range f.batch(t, "/v1/follows:batch",
		[]string{`{"op":"put","follower_id":"3","followee_id":"4"}`, `{"op":"put","follower_id":"3","followee_id":"5"}`}) {
		if o["status"] != 201.0 {
			t.Errorf("operation %d of a transaction of its own: %v", i, o)
		}
	}
}

// TestABatchThatBreaksOffHasDoneWhatItTold stops a batch in its fifth transaction, at a pair that
// somebody else has locked: once by losing the connection to the database, once by losing the
// client.
func TestABatchThatBreaksOffHasDoneWhatItTold(t *testing.T) {
	t.Parallel()
	f := open(t)
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	follows := func(follower int) string {
		var all strings.Builder
		for n := range 1000 {
			fmt.Fprintf(&all, `{"op":"put","follower_id":"%d","followee_id":"%d"}`+"\n", follower, 10+n)
		}
		return all.String()
	}
	written := func(follower int) (n int) {
		t.Helper()
		err := f.system.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE payload->>'follower_id' = $1`,
			fmt.Sprint(follower)).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	// start sends a batch, reads the 400 outcomes that come, and leaves it waiting.
	start := func(follower int) (resp *http.Response, lines *bufio.Scanner, unlock func()) {
		t.Helper()
		f.exec(t, fmt.Sprintf(`INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, %d, 450)`, follower))
		tx, err := f.system.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), `SELECT FROM follows WHERE follower_id = $1 FOR UPDATE`, fmt.Sprint(follower)); err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), "POST", srv.URL+"/v1/follows:batch", strings.NewReader(follows(follower)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+f.token)
		req.Header.Set("Content-Type", "application/x-ndjson")
		if resp, err = srv.Client().Do(req); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		lines = bufio.NewScanner(resp.Body)
		for n := range 400 {
			if !lines.Scan() || !strings.Contains(lines.Text(), `"status":201`) {
				t.Fatalf("outcome %d while a later transaction waits: %s %v", n, lines.Text(), lines.Err())
			}
		}
		unlock = func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }
		t.Cleanup(unlock) // before the pool closes
		return resp, lines, unlock
	}
	waiting := func() (n int, err error) {
		err = f.owner.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND wait_event_type = 'Lock'`).Scan(&n)
		return n, err
	}

	_, lines, unlock := start(1)
	testkit.Eventually(t, "the fifth transaction to be ended", func() (ended bool, err error) {
		err = f.owner.QueryRow(t.Context(), `SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&ended)
		return ended, err
	})
	rest := 0
	for ; lines.Scan(); rest++ {
		if !strings.Contains(lines.Text(), `"status":503`) || !strings.Contains(lines.Text(), `"code":"unavailable"`) {
			t.Fatalf("after the database was lost: %s", lines.Text())
		}
	}
	unlock()
	if got := written(1); rest != 600 || got != 400 {
		t.Errorf("%d outcomes after 400, and %d follows were written: want 600 and 400", rest, got)
	}

	resp, _, unlock := start(2)
	testkit.Eventually(t, "the fifth transaction to wait", func() (bool, error) { n, err := waiting(); return n > 0, err })
	resp.Body.Close()
	testkit.Eventually(t, "the batch to end with its client",
		func() (bool, error) { n, err := waiting(); return n == 0, err })
	unlock()
	if got := written(2); got != 400 {
		t.Errorf("%d follows were written, want 400", got)
	}
	a := f.want(t, 200, "POST", "/v1/follows:batch", follows(2), ndjson)
	if was, now := strings.Count(a.body, `"status":200`),
		strings.Count(a.body, `"status":201`); was != 401 || now != 599 || written(2) != 999 {
		t.Errorf("sent again: %d were, %d now, %d events: want 401, 599, 999", was, now, written(2))
	}
}
