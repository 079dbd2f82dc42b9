//go:build faults

package cli

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/ops/status"
)

// TestADemoIsASiteThatLives kills dev during a demo, and compares the demo's statistics with the
// truth.
func TestADemoIsASiteThatLives(t *testing.T) {
	d := newDevWithPostgres(t)
	d.start(t)
	// The answers after the kill have any order, so the acts are random. The rarest act that the
	// test wants, a hidden comment, is one of eighty. With so many requests, the chance that it is
	// missing is less than 1 in 10^7.
	r := d.lives(t, 1500, func() { d.kill(t); d.start(t) }, "--seed", "3", "--rate", "250", "--users", "30")
	if r.Retried == 0 || r.Reads == 0 || r.Refused > r.Requests/10 || r.Seed != 3 {
		t.Errorf("%+v", r)
	}
	var names []string
	for _, k := range kinds.Builtin().AllEdges() {
		names = append(names, k.Name)
	}
	for _, k := range kinds.Builtin().AllChildren() {
		names = append(names, k.Name)
	}
	for _, did := range append(names, "comment edited", "comment hidden", "comment thread opened") {
		if r.Did[did] == 0 {
			t.Errorf("no %s of %d requests", did, r.Requests)
		}
	}
	var pending struct{ Items []any }
	if code, _ := d.request(t, http.MethodGet, "/v1/moderation/pending", "", nil, &pending); code != http.StatusOK ||
		len(pending.Items) == 0 {
		t.Errorf("%d: no comment waits for a moderator", code)
	}
	d.verify(t)
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	for place, want := range map[string]int{"EVENTS-0/1": exitOK, "EVENTS-0/999999": exitError, "NONE-0/1": exitError} {
		code, stdout, stderr := run(t, nil, "", "events", "find", "--sequence", place, "--data", d.dir, "--json")
		if code != want || (code == exitOK) != strings.Contains(stdout, `"stream":"EVENTS-0","stream_seq":"1"`) {
			t.Errorf("%s: exit code %d: %s%s", place, code, stdout, stderr)
		}
	}
	var comments, premoderated int64
	if err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM comments), (SELECT count(*) FROM threads
		WHERE object->>'premoderated' = 'true')`).Scan(&comments, &premoderated); err != nil ||
		comments != r.Did["comment"] || premoderated == 0 {
		t.Errorf("%d comments, %d premoderated threads, and the site wrote %d: %v", comments, premoderated, r.Did["comment"], err)
	}
	for _, args := range [][]string{{"--url", "http://127.0.0.1:1", "--trouble"}, {"--token", "x", "--tenant", "7"},
		{"--rate", "0"}, {"--tenant", "0"}} {
		if code, _, stderr := run(t, nil, "", append([]string{"demo", "--data", d.dir}, args...)...); code != exitInput {
			t.Errorf("%v: exit code %d: %s", args, code, stderr)
		}
	}

	// Trouble, in another tenant.
	if r := d.lives(t, 10, nil, "--tenant", "7", "--trouble"); r.Writes() == 0 {
		t.Errorf("%+v", r)
	}
	testkit.Eventually(t, "trouble to show", func() (bool, error) {
		var st status.State
		_, stdout, _ := run(t, nil, "", "status", "--data", d.dir, "--json")
		err := json.Unmarshal([]byte(stdout), &st)
		return err == nil && st.Outbox.Retrying > 0 && len(st.DeadLetters()) > 0, err
	})
	_, stdout, stderr := run(t, nil, "", "token", "list", "--tenant", "7", "--data", d.dir, "--json")
	var token struct {
		Name  string
		Works bool
	}
	if err := json.Unmarshal([]byte(stdout), &token); err != nil || !strings.HasPrefix(token.Name, "demo-") || token.Works {
		t.Errorf("the token of the demo: %v\n%s%s", err, stdout, stderr)
	}
}
