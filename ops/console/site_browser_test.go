//go:build browser

package console_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/testkit"
)

const (
	siteTenant = 1                     // dev's
	siteTime   = 2 * time.Minute       // for changes of the site without an act
	person     = 4_242                 // the person to erase
	secret     = "the-words-of-person" // in all texts of the person
)

// site is `tidings dev` with `tidings demo` beside it, and its console.
type site struct {
	*harness
	bin, dir   string
	API, Token string
}

// live builds the binary and starts dev.
func live(t *testing.T) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "tidings-site-")
	if err == nil {
		err = os.Chmod(dir, 0o755) // PostgreSQL runs as another user if the test runs as root
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &site{harness: &harness{}, dir: dir}
	s.bin = filepath.Join(s.dir, "tidings")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", s.bin, "../../cmd/tidings").CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	s.run(t, "dev")
	var in struct {
		API          string `json:"api"`
		Token        string `json:"token"`
		ConsoleToken string `json:"console_token"`
		DatabaseURL  string `json:"database_url"`
		NATSURL      string `json:"nats_url"`
	}
	testkit.Eventually(t, "dev is up", func() (bool, error) {
		b, err := os.ReadFile(filepath.Join(s.dir, "data", "dev.json"))
		if err != nil {
			return false, err
		}
		return true, json.Unmarshal(b, &in)
	})
	s.url, s.API, s.Token, s.Tokens.Admin = in.API, in.API, in.Token, in.ConsoleToken
	if s.pool, err = pgxpool.New(t.Context(), in.DatabaseURL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.pool.Close)
	if s.conn, err = nats.Connect(in.NATSURL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.conn.Close)
	if s.js, err = jetstream.New(s.conn); err != nil {
		t.Fatal(err)
	}
	return s
}

// run runs a command of the binary until the test calls stop or ends.
func (s *site) run(t *testing.T, args ...string) (stop func()) {
	t.Helper()
	cmd := exec.Command(s.bin, append(args, "--data", filepath.Join(s.dir, "data"))...)
	cmd.Env = append(os.Environ(), "API_ADDR=127.0.0.1:0", "OPS_ADDR=127.0.0.1:0")
	log, err := os.Create(filepath.Join(s.dir, args[0]+".log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = cmd.Process.Signal(os.Interrupt) // an error means that the process has ended
		err := cmd.Wait()
		log.Close()
		if said, _ := os.ReadFile(log.Name()); err != nil || t.Failed() {
			t.Logf("tidings %s: %v: %s", args[0], err, said)
		}
	}
	t.Cleanup(stop)
	return stop
}

// write sends a write to the API.
func (s *site) write(t *testing.T, method, path, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, s.API+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.Token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		t.Fatalf("%s %s: %s", method, path, res.Status)
	}
}

// TestTheSiteInTheBrowser uses a healthy installation under load. It reads the API's documents
// without the internet, and erases a person with comments and edges. `make screenshots` takes its
// pictures from here.
func TestTheSiteInTheBrowser(t *testing.T) {
	s, c := live(t), chromium(t)
	stop := s.run(t, "demo", "--rate", "60", "--seed", "7")
	b := s.browser(t, c, s.Tokens.Admin, look{})
	s.isWell(b)
	s.documents(b)
	s.pictures(b)
	stop() // an erasure ends only when the person no longer writes
	s.erases(b)
	s.deadLetters(b)
}

// moving is a JavaScript condition: the API, the relay and each consumer show a rate.
const moving = `[...document.querySelectorAll(".box")].filter(box => [2, 3].some(i => ` +
	`/^[1-9][0-9]*\/s$/.test(box.children[i].textContent))).length === 5`

// isWell waits until the overview shows a healthy installation with changing rates.
func (s *site) isWell(b *browser) {
	b.open("/console/")
	b.until(`document.querySelector("main").innerText.includes("Needs attention\n\nAll clear") && ` +
		`document.querySelectorAll(".box.ok").length >= 7 && ` + moving)
	testkit.Eventually(b.t, "the doctor finds no error", func() (bool, error) {
		b.open("/console/doctor")
		if text := b.text(); strings.Contains(text, "error") {
			return false, errors.New(text)
		}
		return true, nil
	})
}

// documents reads /docs. hear watches for requests to other hosts.
func (s *site) documents(b *browser) {
	b.open("/docs")
	b.waits("PUT /v1/follows/{follower_id}/{followee_id}")
	if n := eval[int](b, `document.querySelectorAll("h2[id]").length`); n < 40 {
		b.t.Errorf("/docs lists %d operations", n)
	}
	if got := eval[int](b, `fetch(document.querySelector("a[href$='.json']").href).then(r => r.json()).then(d => `+
		`Object.keys(d.paths).length)`); got < 30 {
		b.t.Errorf("the OpenAPI document has %d paths", got)
	}
	b.accessible("/docs")
}

// pictures takes screenshots of the main pages with current data.
func (s *site) pictures(b *browser) {
	var event, child, object string
	testkit.Eventually(b.t, "every consumer has applied an event, and a comment waits for a moderator", func() (bool, error) {
		err := s.pool.QueryRow(b.t.Context(), `SELECT event_id::text FROM outbox_messages WHERE aggregate_type = 'comment'
			AND event_type = 'created' AND processed_at < now() - interval '3 s' AND stream_seq <=
			(SELECT min(last_processed_id) FROM consumer_offsets WHERE consumer_name IN ('threadcache', 'archiver'))
			ORDER BY id DESC LIMIT 1`).Scan(&event)
		if err == nil {
			err = s.pool.QueryRow(b.t.Context(), `SELECT child_id::text, object_id FROM child_lists WHERE kind = 'comment'
				AND moderation_state = 'PENDING' LIMIT 1`).Scan(&child, &object)
		}
		return err == nil, err
	})
	for _, p := range []browserPage{
		{path: "/console/event?q=" + event, says: "Applied by archiver", shot: "console-event"},
		{path: "/console/partitions", says: "open", shot: "console-partitions"},
		{path: "/console/moderation?tenant=1", says: "version", shot: "console-moderation"},
		{path: fmt.Sprintf("/console/inspect?tenant=1&kind=comment&id=%s", object), says: "same", shot: "console-inspector"},
		{path: "/console/consumers", says: "Lag in the last hour", shot: "console-consumers"},
	} {
		b.open(p.path)
		b.waits(p.says)
		b.shot(p.shot)
	}
	b.open("/console/")
	b.until(moving)
	b.run(chromedp.EmulateViewport(1280, 700))
	b.shot("console-overview")
	b.run(chromedp.EmulateViewport(1280, 900))
	b.open("/console/archive")
	b.act("Add a hold")
	b.open("/console/archive")
	b.waits("the archive of every tenant")
	b.shot("console-archive")
}

// erases lets the person write, be followed and be answered, and then erases them. A paused
// consumer delays the erasure, and the act's page shows that it waits.
func (s *site) erases(b *browser) {
	t := b.t
	if _, err := consumers.Pause(t.Context(), s.pool, "threadcache", consumers.Paused{Actor: "ann", Reason: "the test"}); err != nil {
		t.Fatal(err)
	}
	const behind = 20 // messages; threadcache no longer follows
	testkit.Eventually(t, "threadcache applies no more events", func() (bool, error) {
		s.write(t, http.MethodPost, fmt.Sprintf("/v1/posts/%d/comments", 2*person), `{"author_id":"1","body":"somebody else's"}`)
		return s.count(t, `SELECT count(*) FROM consumer_offsets a JOIN consumer_offsets c USING (partition_key)
			WHERE a.consumer_name = 'archiver' AND c.consumer_name = 'threadcache'
			AND a.last_processed_id >= c.last_processed_id + $1`, behind) == 1, nil
	})
	for i := range 3 {
		s.write(t, http.MethodPut, fmt.Sprintf("/v1/follows/%d/%d", person, i+1), "")
		s.write(t, http.MethodPut, fmt.Sprintf("/v1/follows/%d/%d", i+1, person), "")
		s.write(t, http.MethodPost, fmt.Sprintf("/v1/posts/%d/comments", person+i),
			fmt.Sprintf(`{"author_id":"%d","body":"%s %d"}`, person, secret, i))
	}
	testkit.Eventually(t, "the comments are published", func() (bool, error) {
		return s.count(t, `SELECT count(*) FROM outbox_messages WHERE payload::text LIKE '%' || $1 || '%' AND processed_at IS NOT NULL`,
			secret) == 3, nil
	})
	rows, _ := s.pool.Query(t.Context(), `SELECT stream_seq FROM outbox_messages WHERE payload::text LIKE '%' || $1 || '%'`, secret)
	sequences, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		t.Fatal(err)
	}
	b.open("/console/erasure")
	b.click("Scan")
	b.run(chromedp.SetValue(chromedp.CSS("#f-tenant"), fmt.Sprint(siteTenant)),
		chromedp.SetValue(chromedp.CSS("#f-author"), fmt.Sprint(person)))
	b.confirm("ticket 17")
	b.waits("Nothing was changed. Found: ")
	b.click("Erase a person")
	b.run(chromedp.SendKeys(chromedp.CSS("#confirm"), fmt.Sprint(person)))
	b.confirm("ticket 17")
	b.waits("under way waiting for")
	b.accessible("an erasure under way")
	if _, err := consumers.Resume(t.Context(), s.pool, "threadcache"); err != nil {
		t.Fatal(err)
	}
	b.waits("A scan of all stores found nothing more. Redacted: ")
	b.open("/console/erasure")
	row := eval[string](b, `document.querySelector("tbody tr").innerText`)
	for _, want := range []string{"4,242", "erased", "ticket 17", "children 3", "edges 6", "followercounts", "archiver", "stream"} {
		if !strings.Contains(strings.ReplaceAll(row, "4242", "4,242"), want) {
			t.Errorf("the record does not say %q: %s", want, row)
		}
	}
	b.act("Scan again")
	b.waits("Nothing was changed. Found: nothing.")
	s.nothingLeft(t, sequences)
}

// nothingLeft searches for the person's words in every table and on the stream.
func (s *site) nothingLeft(t *testing.T, sequences []int64) {
	t.Helper()
	rows, _ := s.pool.Query(t.Context(), `SELECT format('%I.%I', schemaname, tablename) FROM pg_tables
		WHERE schemaname NOT IN ('pg_catalog', 'information_schema')`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(tables) < 40 {
		t.Fatal(len(tables), err)
	}
	for _, table := range tables {
		if n := s.count(t, `SELECT count(*) FROM `+table+` r WHERE r::text LIKE '%' || $1 || '%'`, secret); n != 0 {
			t.Errorf("%d rows of %s have words of the person", n, table)
		}
	}
	if n := s.count(t, `SELECT count(*) FROM edges_follow WHERE from_id = $1 OR to_id = $1`, fmt.Sprint(person)) +
		s.count(t, `SELECT count(*) FROM edge_lists WHERE from_id = $1 OR to_id = $1`, fmt.Sprint(person)); n != 0 {
		t.Errorf("%d edges of the person are left", n)
	}
	stream, err := s.js.Stream(t.Context(), "EVENTS-0")
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range sequences {
		if m, err := stream.GetMsg(t.Context(), uint64(seq)); err == nil && strings.Contains(string(m.Data), secret) {
			t.Errorf("the stream has them at sequence %d", seq)
		}
	}
	if len(sequences) != 3 {
		t.Errorf("%d published messages had the words of the person, want 3", len(sequences))
	}
}

// deadLetters takes a screenshot of dead letters.
func (s *site) deadLetters(b *browser) {
	for cause, n := range map[string]int{"nats: maximum payload exceeded": 12, "nats: no response from stream": 3} {
		s.exec(b.t, `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload,
			occurred_at, available_at, attempts, event_id, inserted_at, slot, last_error, cause, dead_at)
			SELECT nextval('outbox_messages_id_seq'), 1, 'comment', 300 + g, 'created', 1, '{}', now(), now(), 11, gen_random_uuid(), now(),
			0, $1::text, $1, now() - g * interval '7 s' FROM generate_series(1, $2::int) g`, cause, n)
	}
	s.exec(b.t, `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type, aggregate_id,
		event_id, event_type, event_version, headers, payload, error, cause)
		SELECT 'threadcache', g, 'EVENTS-0', 1, 'comment', 300 + g, gen_random_uuid(), 'muted', 1, '{}', '',
		'unknown type of event: comment.muted', 'unknown type of event: comment.muted' FROM generate_series(1, 4) g`)
	b.open("/console/dead-letters")
	b.waits("maximum payload exceeded")
	b.shot("console-dead-letters")
}
