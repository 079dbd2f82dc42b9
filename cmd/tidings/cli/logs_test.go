package cli

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// secret is the beginning of every text that a log must not contain.
const secret = "Zq7secret"

// TestNoLogLineHasASecret loads a dev with the most verbose log, provokes errors, and reads the
// log.
func TestNoLogLineHasASecret(t *testing.T) {
	t.Parallel()
	db, nc := testkit.Postgres(t), testkit.NATS(t)
	b := beat(t, db.URL, db, nc)
	b.d.stop(t)
	b.read(time.Since(b.began))
}

// withPassword returns the URL of a server with a user and a password that a log must not contain.
func withPassword(t *testing.T, server string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("owner", secret+"-password")
	return u.String()
}

// beat starts a dev whose settings contain secrets, uses its API, and gives the relay and the
// consumers messages that they cannot handle. It returns when the log has their errors.
func beat(t *testing.T, database string, db *testkit.DB, nc *testkit.Broker) *beating {
	t.Helper()
	cfg, cursorKey := nc.Config(), strings.Repeat("7ec4e7", 12)
	d := newDev(t, "DATABASE_URL="+database, "NATS_URL="+withPassword(t, nc.URL), // NATS accepts any password
		"NATS_STREAM="+cfg.Stream, "NATS_SUBJECT_PREFIX="+cfg.Prefix, "NATS_LIVE_PREFIX="+cfg.LivePrefix, "DEV_TOKEN="+secret+"-token",
		"API_CURSOR_KEY="+cursorKey, "API_ACCESS_LOG=true", "LOG_LEVEL=debug", "LOG_FORMAT=json", "NATS_PING_INTERVAL=500ms")
	b := &beating{t: t, d: d, began: time.Now(), secrets: map[string]bool{secret: true, cursorKey: true}}
	d.start(t)
	b.useTheAPI()
	pool := db.Pool(t, postgres.RoleSystem)
	for i, row := range []struct{ aggregate, event, payload string }{
		{"post", "not a token", `{"body": "` + secret + `-a"}`},
		{"follow", "created", `{"follower_id": "` + secret + `-b", "followee_id": "2", "version": 1}`},
		{"follow", "created", `{"follower_id": "3", "followee_id": "2", "status": "` + secret +
			`-c", "version": 1, "created_at": "` + secret + `-d"}`},
		{"post", "created", `{"body": "` + secret + `-e", "version": "` + secret + `-f"}`},
		{"comment", "created", `{"comment_id": "` + secret + `-g", "body": {"` + secret + `-h": "` + secret + `-i"}}`},
	} {
		if _, err := pool.Exec(t.Context(), `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload,
			attempts)
			VALUES (1, $1, $2, $3, $4::jsonb, 10)`, row.aggregate, fmt.Sprint(900+i), row.event, row.payload); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Connect(t).PublishMsg(&nats.Msg{Subject: cfg.Prefix + ".0.follow.created.t1", Data: []byte(secret + "-foreign"),
		Header: nats.Header{"X": {secret + "-header"}}}); err != nil {
		t.Fatal(err)
	}
	b.await("outbox messages are in the DLQ", "poison event parked", "no relay published")
	return b
}

// beating is a dev under failures, with the texts that its log must not contain.
type beating struct {
	t       *testing.T
	d       *dev
	began   time.Time
	secrets map[string]bool
}

// useTheAPI sends writes, reads and bad requests that contain secrets.
func (b *beating) useTheAPI() {
	t, d := b.t, b.d
	key := http.Header{"Idempotency-Key": {secret + "-idempotency"}}
	var got map[string]any
	if status, h := d.request(t, http.MethodPost, "/v1/posts/1/comments", `{"author_id":"1","body":"`+secret+`-body"}`, key,
		&got); status != http.StatusCreated {
		t.Fatalf("a comment: status %d, %v", status, got)
	} else {
		b.secrets[h.Get("Tidings-Token")] = true
	}
	for i := range 3 {
		d.request(t, http.MethodPost, "/v1/posts/1/comments", fmt.Sprintf(`{"author_id":"1","body":"%s-%d"}`, secret, i), nil, nil)
	}
	var page struct{ Next string }
	testkit.Eventually(t, "a page has a cursor", func() (bool, error) {
		d.request(t, http.MethodGet, "/v1/posts/1/comments?limit=2", "", nil, &page)
		return page.Next != "", nil
	})
	b.secrets[page.Next] = true
	for _, r := range []struct {
		method, path, body string
		header             http.Header
		status             int
	}{
		{http.MethodGet, "/v1/posts/1/comments?limit=2&cursor=" + page.Next, "", nil, 200},
		{http.MethodGet, "/v1/posts/1/comments?cursor=" + secret + "-cursor", "", nil, 400},
		{http.MethodGet, "/v1/users/1/counts", "", http.Header{"Tidings-Token": {secret + "-write"}}, 400},
		{http.MethodPost, "/v1/posts/1/comments", `{"author_id":"1","body":"another ` + secret + `"}`, key, 422},
		{http.MethodPost, "/v1/posts/1/comments", `{"author_id":"1","body":"` + secret, nil, 400},
		{http.MethodPost, "/v1/posts/1/comments", `{"author_id":{"` + secret + `":1}}`, nil, 400},
		{http.MethodPost, "/v1/posts/1/comments", `{"author_id":"1","body":"` + secret + strings.Repeat("x", 140_000) + `"}`,
			http.Header{"Expect": {"100-continue"}}, 413},
	} {
		if status, _ := d.request(t, r.method, r.path, r.body, r.header, nil); status != r.status {
			t.Errorf("%s %s with %.80s: status %d, want %d", r.method, r.path, r.body, status, r.status)
		}
	}
	for _, authorization := range []string{"Bearer " + secret + "-wrong", "Basic " + secret, secret} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, d.instance(t).API+"/v1/users/1/counts", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", authorization)
		req.Close = true
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _ = resp.Body.Close(); resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("%s: %s", authorization, resp.Status)
		}
	}
}

// write sends parallel writes from several clients, and returns the last status.
func (b *beating) write(clients int) (status int) {
	var all sync.WaitGroup
	var mu sync.Mutex
	for range clients {
		all.Go(func() {
			got, _ := b.d.request(b.t, http.MethodPost, "/v1/posts/2/comments", `{"author_id":"2","body":"`+secret+`-again"}`, nil, nil)
			mu.Lock()
			defer mu.Unlock()
			status = got
		})
	}
	all.Wait()
	return status
}

// await waits until the log has lines with all of these messages.
func (b *beating) await(messages ...string) {
	b.t.Helper()
	testkit.Eventually(b.t, fmt.Sprintf("the log has %q", messages), func() (bool, error) {
		log := b.d.errors()
		return !slices.ContainsFunc(messages, func(m string) bool { return !strings.Contains(log, m) }), nil
	})
}

// read checks the log: no secret, each line structured, and no warning more often than its rate
// limit.
func (b *beating) read(took time.Duration) {
	t := b.t
	said := map[string]int{}
	for line := range strings.Lines(b.d.errors()) {
		for s := range b.secrets {
			if strings.Contains(strings.ToLower(line), strings.ToLower(s)) {
				t.Errorf("%q is in %s", s, line)
			}
		}
		var l struct {
			Level, Msg, Part, Component, Consumer, Kind, Runbook string
			RequestID                                            string `json:"request_id"`
			Tenant                                               int64
			Status                                               int
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil || l.Level == "" || l.Msg == "" || l.Component == "" {
			t.Errorf("not structured, or without a component (%v): %s", err, line)
		}
		if l.Level == "ERROR" && l.Runbook == "" {
			t.Errorf("no page: %s", line)
		}
		if l.Msg == "request" && (l.RequestID == "" || l.Tenant == 0 && l.Status != http.StatusUnauthorized && l.Status < 500) {
			t.Errorf("a request without its id or its tenant: %s", line)
		}
		if l.Level == "WARN" || l.Level == "ERROR" {
			said[fmt.Sprint(l.Level, l.Msg, l.Part, l.Component, l.Consumer, l.Kind)]++
		}
	}
	most := 2 + int(took/(10*time.Second)) // the first one, and the one that is due at the end
	for _, m := range slices.Sorted(maps.Keys(said)) {
		if said[m] > most {
			t.Errorf("%d times in %s: %s", said[m], took, m)
		}
	}
	t.Logf("%d messages of warnings and errors in %s", len(said), took)
}

// An error contains a server's address, but not its password.
func TestNoErrorOfACommandHasAPassword(t *testing.T) {
	for name, env := range map[string]map[string]string{
		"nobody listens":               {"DATABASE_URL": "postgres://u:" + secret + "@127.0.0.1:1/x"},
		"a port that is none":          {"DATABASE_URL": "postgres://u:" + secret + "@127.0.0.1:port/x"},
		"a password with a slash":      {"DATABASE_URL": "postgres://u:1/" + secret + "@127.0.0.1:1/x"},
		"NATS, with a slash":           {"NATS_URL": "nats://u:" + secret + "/1@127.0.0.1:1"},
		"a password that is not coded": {"DATABASE_URL": "postgres://u:" + secret + "%zz/@127.0.0.1:1/x"},
		"a setting that is none":       {"DATABASE_URL": "postgres://u:" + secret + "@127.0.0.1:1/x?sslmode=" + "maybe"},
		"words":                        {"DATABASE_URL": "host=127.0.0.1 port=1 password=" + secret + " user"},
		"words in quotes":              {"DATABASE_URL": "host=127.0.0.1 port=1 password='" + secret},
		"another scheme":               {"DATABASE_URL": "mysql://u:" + secret + "@127.0.0.1:1/x"},
		"NATS":                         {"NATS_URL": "nats://u:" + secret + "@127.0.0.1:1"},
		"NATS at a port that is none":  {"NATS_URL": "nats://u:" + secret + "@127.0.0.1:port"},
		"NATS, not coded":              {"NATS_URL": "nats://u:" + secret + "%zz@127.0.0.1:1"},
		"a cursor key":                 {"API_CURSOR_KEY": secret},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := maps.Clone(env)
			if all["DATABASE_URL"] == "" {
				all["DATABASE_URL"] = "postgres://u:" + secret + "@127.0.0.1:1/x"
			}
			all["POSTGRES_CONNECT_TIMEOUT"], all["NATS_TIMEOUT"], all["API_ADDR"], all["OPS_ADDR"], all["DEV_TOKEN"] = "200ms", "200ms",
				"127.0.0.1:0", "127.0.0.1:0", secret
			for _, command := range []string{"status", "migrate", "doctor", "token list --tenant 1", "dev --data " + t.TempDir()} {
				code, stdout, stderr := run(t, all, "", strings.Fields(command)...)
				if code == exitOK || stdout+stderr == "" {
					t.Errorf("%s: exit code %d, %s", command, code, stderr)
				}
				if strings.Contains(stdout+stderr, secret) {
					t.Errorf("%s says %s%s", command, stdout, stderr)
				}
			}
		})
	}
}
