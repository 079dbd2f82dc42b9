package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// loadsAnyKind loads edges from files, and generated edges and children, each twice. It compares
// the served rows with the files and with SQL over the truth.
func (d *dev) loadsAnyKind(t *testing.T) {
	t.Helper()
	for _, c := range []struct {
		kind, stdin, generate string
		edges, children       int64 // that are made
	}{
		{kind: "like", stdin: "1 5\n2 5\n3 6\n5 5\n", edges: 4},
		{kind: "membership", stdin: "1 9 {\"role\":\"owner\"}\n2 9\n3\t9\t{}\n4 9 {\"role\": \"moderator\"}\n", edges: 4},
		{kind: "play", generate: "users=20,songs=10,edges=100,seed=4", edges: 100},
		{kind: "review", generate: "products=4,reviews=80,seed=4", children: 80},
		{kind: "message", generate: "conversations=3,messages=60,seed=4", children: 60},
		{kind: "verdict", generate: "songs=4,verdicts=60,seed=4", children: 60},
	} {
		args := []string{"load", "--kind", c.kind, "--data", d.dir, "--json"}
		if c.generate != "" {
			args = append(args, "--generate", c.generate)
		} else {
			args = append(args, "-", "--concurrency", "1") // in the order of the lines
		}
		for again := range 2 {
			code, stdout, stderr := run(t, nil, c.stdin, args...)
			var edges loadResult
			var children childrenResult
			if err := errors.Join(json.Unmarshal([]byte(stdout), &edges), json.Unmarshal([]byte(stdout), &children)); code != exitOK ||
				err != nil {
				t.Fatalf("load %s: exit code %d, %v\n%s\n%s", c.kind, code, err, stdout, stderr)
			}
			switch {
			case again == 0 && (edges.Created != c.edges+c.children || edges.Edges != c.edges ||
				c.children > 0 && (children.Changed < 3 || children.Refused > 0)):
				t.Errorf("load %s: %s", c.kind, stdout)
			case again == 1 && (edges.Created+children.Changed+children.Refused > 0 || edges.Existed != max(c.edges, children.Requests)):
				t.Errorf("load %s again: %s", c.kind, stdout)
			}
		}
	}
	d.verify(t)

	// Compare with the files.
	for path, want := range map[string]string{
		"/v1/posts/5/counts":                `"likers":3`,
		"/v1/users/5/likes":                 `"post_id":"5"`,
		"/v1/groups/9/counts":               `"members":4`,
		"/v1/groups/9/members?role=owner":   `{"items":[{"user_id":"1",`,
		"/v1/groups/9/members?role=member":  `{"items":[{"user_id":"3",`,
		"/v1/groups/9/members?role=owner&x": `"role":"owner"`,
	} {
		var got json.RawMessage
		if status, _ := d.request(t, http.MethodGet, strings.TrimSuffix(path, "&x"), "", nil, &got); status != http.StatusOK ||
			!strings.Contains(string(got), want) {
			t.Errorf("%s: %d %s, want %s", path, status, got, want)
		}
	}

	// Compare with SQL over the truth.
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	rows, _ := conn.Query(t.Context(), `
SELECT 'products', product_id, 'reviews', 'rating', count(*), count(rating), coalesce(sum(rating), 0)
  FROM (SELECT product_id, (attributes ->> 'rating')::bigint AS rating FROM reviews WHERE author_state = 'ACTIVE'
		AND moderation_state IN ('NONE', 'APPROVED')) r GROUP BY product_id
UNION ALL
SELECT 'songs', song_id, 'verdicts', 'stars', count(*), count(stars), coalesce(sum(stars), 0)
  FROM (SELECT song_id, (attributes ->> 'stars')::bigint AS stars FROM verdicts WHERE author_state = 'ACTIVE') v GROUP BY song_id
UNION ALL
SELECT 'songs', song_id, 'players', '', count(*), 0, 0 FROM plays WHERE status = 'ACTIVE' GROUP BY song_id`)
	n, summed := 0, int64(0)
	var objects, object, name, attribute string
	var count, given, sum int64
	if _, err := pgx.ForEachRow(rows, []any{&objects, &object, &name, &attribute, &count, &given, &sum}, func() error {
		path := fmt.Sprintf("/v1/%s/%s/counts", objects, object)
		var all map[string]json.RawMessage
		d.request(t, http.MethodGet, path, "", nil, &all)
		n, summed = n+1, summed+sum
		if attribute == "" {
			if got := string(all[name]); got != fmt.Sprint(count) {
				t.Errorf("%s: %s is %s, want %d", path, name, got, count)
			}
			return nil
		}
		var of struct {
			Visible    int64
			Aggregates map[string]struct{ Count, Sum int64 }
		}
		err := json.Unmarshal(all[name], &of)
		if got := of.Aggregates[attribute]; err != nil || of.Visible != count || got.Count != given || got.Sum != sum {
			t.Errorf("%s: %s, %v, want %d visible, %s %d and %d", path, all[name], err, count, attribute, given, sum)
		}
		return nil
	}); err != nil || n < 10 || summed == 0 {
		t.Errorf("%d rows, a sum of %d, %v", n, summed, err)
	}

	// Histories also of kinds that are not built in.
	var review string
	if err := conn.QueryRow(t.Context(), `SELECT review_id::text FROM reviews WHERE author_state <> 'ACTIVE' AND version = 2 LIMIT 1`).Scan(
		&review); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args, stdout, stderr string // parts
		code, lines          int
	}{
		{args: "edge 1 9 --kind membership", stdout: `ACTIVE  {"role":"owner"}`, lines: 2},
		{args: "edge 1 2 --kind play", stdout: `{"mood":"loud"}`, lines: 2},
		{args: "edge 1 2 --kind play --json", stdout: `"song_id":"2"`, lines: 1},
		{args: "child " + review + " --kind review", stdout: "REVIEW", lines: 3},
		{args: "child " + review + " --kind review", stdout: `rating`, lines: 3},
		{args: "child " + review + " --kind review --json", stdout: `"review_id":"` + review, lines: 1},
		{args: "author 1 --kind verdict", stdout: "SONG", lines: -1},
		{args: "follow 1 9", stdout: "STATUS", stderr: "No history recorded", lines: 1},
		{args: "edge 1 9 --kind nonsense", stderr: `there is no kind "nonsense" of edges`, code: exitError},
		{args: "edge 1 9 --kind verdict", stderr: `there is no kind "verdict" of edges`, code: exitError},
		{args: "child " + review + " --kind play", stderr: `there is no kind "play" of children`, code: exitError},
		{args: "thread 1 --kind verdict", stderr: `there is no kind "verdict" of moderated children`, code: exitError},
		{args: "edge 1 9", stderr: "--kind is required", code: exitInput},
	} {
		code, stdout, stderr := run(t, nil, "", append([]string{"history", "--tenant", "1", "--data", d.dir}, strings.Fields(c.args)...)...)
		if lines := strings.Count(stdout, "\n"); code != c.code || !strings.Contains(stdout, c.stdout) ||
			!strings.Contains(stderr, c.stderr) || c.lines >= 0 && lines != c.lines {
			t.Errorf("history %s: exit code %d, %d lines\n%s%swant %d, %d lines, %q, %q", c.args, code, lines, stdout, stderr, c.code,
				c.lines, c.stdout, c.stderr)
		}
	}
}
