package console_test

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/audit"
)

// fill sets the samples of a source: one for each of the last moments. The values are SQL
// expressions of n, which is 0 for the newest. Stop the console's own sampler before.
func (h *harness) fill(t *testing.T, source, version string, moments int, figures map[string]string) {
	t.Helper()
	var pairs []string
	for name, value := range figures {
		pairs = append(pairs, fmt.Sprintf("'%s', %s", name, value))
	}
	h.exec(t, `DELETE FROM samples WHERE source = $1`, source)
	h.exec(t, `INSERT INTO samples (at, source, version, figures)
		SELECT date_bin('10 s', now(), 'epoch') - n * interval '10 s', $1, $2, jsonb_build_object(`+strings.Join(pairs, ", ")+`)
		  FROM generate_series(0, $3::int - 1) n`,
		source, version, moments)
}

func TestTheLastDayIsDrawn(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.stop()
	// An hour with 5 writes per second. For ten minutes the lag of threadcache has grown by 15/s.
	h.fill(t, "", "1.0", 360, map[string]string{"written": "100000 - 50 * n", "published": "100000 - 50 * n", "pending": "3",
		"oldest": "0.5", "stored": "77", "partitions": "CASE WHEN n > 30 THEN 1 ELSE 4 END", "dead outbox": "2",
		"behind threadcache": "greatest(0, 150 * (60 - n))", "late threadcache": "greatest(0, 10 * (60 - n))",
		"applied threadcache": "100000 - 50 * n", "dead threadcache": "0",
		"paused threadcache":    "CASE WHEN n BETWEEN 20 AND 40 THEN 1 ELSE 0 END",
		"replaying archiver":    "CASE WHEN n BETWEEN 70 AND 80 THEN 1 ELSE 0 END", // by command
		"replaying threadcache": "CASE WHEN n = 0 THEN 1 ELSE 0 END"})              // the console's
	h.fill(t, "api-1", "1.0", 360, map[string]string{"requests": "100000 - 1234 * n", "p99": "0.025"})
	h.fill(t, "api-2", "1.1", 50, map[string]string{"requests": "100000 - 10 * n", "p99": "0.5"})
	a := audit.Act{ActID: uuid.New(), TokenName: "ada", Fingerprint: "0123456789ab", Name: "consumer.replay", Target: "threadcache",
		Reason: "r"}
	if _, _, err := audit.Begin(t.Context(), h.pool, a); err != nil {
		t.Fatal(err)
	}
	if err := audit.Finish(t.Context(), h.pool, a.ActID, "Replayed.", false); err != nil {
		t.Fatal(err)
	}
	rea := h.signIn(t, h.Tokens.Reader)
	p := page(t, rea, "/console/day").says("Events per second", "written: 5/s , at most 5/s", "pending: 3 , at most 3", "outbox: 2",
		"requests: 124/s", "p99: 500 ms", "late from 1 min", "threadcache resumed", "threadcache paused", "resized from 1 to 4 partitions",
		"version 1.1", "threadcache replayed by ada")
	if n := strings.Count(p.body, "<polyline"); n < 12 {
		t.Errorf("%d lines", n)
	}
	if n := strings.Count(p.body, `class="mark"`); n != 9*6 {
		t.Errorf("%d marks in nine charts, want 54", n)
	}
	if !regexp.MustCompile(`<title>[-0-9]{10} [:0-9]{8} UTC\nwritten: 5/s\npublished: 5/s</title>`).MatchString(p.body) {
		t.Error("no column says its values")
	}
	page(t, rea, "/console/day?range=1h").says("archiver is replayed", "threadcache replayed by ada").without("threadcache is replayed")
	for _, r := range []struct {
		name string
		rows int
	}{{"15m", 90}, {"1h", 120}, {"24h", 144}} {
		p := page(t, rea, "/console/day?range="+r.name).says("threadcache paused")
		if n := strings.Count(p.body, `<th scope="row">`); n != r.rows {
			t.Errorf("%s: the table has %d rows, want %d", r.name, n, r.rows)
		}
	}
	page(t, rea, "/console/day?range=24h").says("unknown") // only one hour has samples
	if a := rea.get("/console/day?range=1y"); a.status != http.StatusUnprocessableEntity {
		t.Errorf("an unknown range: %d", a.status)
	}
	if a := h.signIn(t, h.Tokens.TenantReader).get("/console/day"); a.status != http.StatusForbidden {
		t.Errorf("a tenant's token: %d", a.status)
	}
	page(t, rea, "/console/consumers").says("Lag in the last hour, at most 9,000").without("fell behind") // it is up to date now
	if n := strings.Count(page(t, rea, "/console/").body, `class="spark"`); n < 5 {
		t.Errorf("the boxes of the overview have %d lines", n)
	}
}

// TestTheConsoleSamplesTheInstallation has two consoles on one database.
func TestTheConsoleSamplesTheInstallation(t *testing.T) {
	t.Parallel()
	h := start(t)
	startOn(t, h.db, h.nats)
	h.declare(t)
	h.pend(t, 7)
	testkit.Eventually(t, "samples of two moments", func() (bool, error) {
		return h.count(t, `SELECT count(*) FROM samples WHERE source = '' AND version <> '' AND (figures ->> 'pending')::int = 7
			AND figures ? 'behind threadcache'`) > 0 && h.count(t, `SELECT count(*) FROM samples`) > 1, nil
	})
	if n := h.count(t, `SELECT count(*) FROM samples WHERE at > now()`); n != 0 {
		t.Errorf("%d samples of the future", n)
	}
}

func TestAConsumerThatIsBehindSaysSinceWhen(t *testing.T) {
	t.Parallel()
	h := start(t)
	h.declare(t)
	h.pend(t, 24)
	h.publish(t)
	h.stop()
	before := time.Now()
	h.fill(t, "", "1.0", 30, map[string]string{"behind threadcache": "greatest(0, 24 - 5 * n)", "behind archiver": "24 + 6 * n"})
	after := time.Now()
	rea := h.signIn(t, h.Tokens.Reader)
	text := page(t, rea, "/console/consumers").text()
	grows := regexp.MustCompile(`threadcache nobody runs it .*24 messages.*` +
		` fell behind ([-0-9]{10} [:0-9]{8}) (?:just now|\d min ago) , growing by 30/min`)
	found := grows.FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("no consumer says when it fell behind: %.2000s", text)
	}
	// The newest sample is of the ten seconds before it was written.
	at, err := time.Parse(time.DateTime, found[1])
	if err != nil || at.Before(before.Add(-51*time.Second)) || at.After(after.Add(-40*time.Second)) {
		t.Errorf("fell behind %s, %v; want 40 seconds before %v", found[1], err, after)
	}
	if !regexp.MustCompile(`was already behind [-0-9]{10} [:0-9]{8} \d min ago , catches up in 40 s`).MatchString(text) {
		t.Errorf("no consumer says when it catches up: %.2000s", text)
	}
	page(t, rea, "/console/").says("growing by", "catches up in")
}
