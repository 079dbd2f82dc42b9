package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
)

// TestThePageOnLookingAtRowsSaysWhatWorks runs every statement of the page with the login that it
// names, and then verifies.
func TestThePageOnLookingAtRowsSaysWhatWorks(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/runbook/looking-at-rows.md")
	if err != nil {
		t.Fatal(err)
	}
	d := newDevWithPostgres(t) // the page creates a login, which all databases of a server have
	d.start(t)
	write := func(method, path, body string, header http.Header, want int) (answer map[string]any) {
		t.Helper()
		if status, _ := d.request(t, method, path, body, header, &answer); status != want {
			t.Fatalf("%s %s: %d %v", method, path, status, answer)
		}
		return answer
	}
	write("PUT", "/v1/follows/7/42", "", nil, http.StatusCreated)
	comment := write("POST", "/v1/posts/5/comments", `{"author_id":"7","body":"a comment"}`, http.Header{"Idempotency-Key": {"k"}},
		http.StatusCreated)["comment_id"].(string)
	kept := write("POST", "/v1/posts/5/comments", `{"author_id":"7","body":"another"}`, http.Header{"Idempotency-Key": {"l"}},
		http.StatusCreated)["comment_id"].(string)
	write("PUT", "/v1/posts/5/thread", `{"title":"a title"}`, nil, http.StatusOK)
	d.verify(t)

	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(strings.ReplaceAll(string(page),
		"0190a000-0000-7000-8000-000000000001", comment), -1)
	if len(blocks) != 8 {
		t.Fatalf("the page has %d blocks: the test knows 8", len(blocks))
	}
	owner, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close(context.WithoutCancel(t.Context()))
	paste := func(conn *pgx.Conn, sql string) (affected []int64) {
		t.Helper()
		results, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		for _, r := range results {
			affected = append(affected, r.CommandTag.RowsAffected())
		}
		return affected
	}
	login, end, asks, grant, changes := blocks[0][1], blocks[1][1], blocks[2:5], blocks[5][1], blocks[6:]
	paste(owner, login)
	u, err := url.Parse(d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("ann", regexp.MustCompile(`PASSWORD '([^']+)'`).FindStringSubmatch(login)[1])
	ann, err := pgx.Connect(t.Context(), u.String())
	if err != nil {
		t.Fatal(err)
	}
	defer ann.Close(context.WithoutCancel(t.Context()))
	rows := int64(0)
	for _, b := range asks {
		for _, n := range paste(ann, b[1]) {
			rows += n
		}
	}
	if rows < 10 {
		t.Errorf("the questions have %d rows for an answer", rows)
	}
	for _, sql := range []string{`UPDATE follows SET version = 9`, `SELECT * FROM api_tokens`,
		`BEGIN READ WRITE; INSERT INTO outbox_messages (tenant_id) VALUES (1)`} {
		if _, err := ann.PgConn().Exec(t.Context(), sql).ReadAll(); err == nil {
			t.Errorf("a reader may %s", sql)
		}
		paste(ann, `ROLLBACK`)
	}
	paste(owner, grant)
	for _, b := range changes {
		for range 2 { // the second run changes nothing
			paste(ann, b[1])
		}
	}
	for _, sql := range []string{`UPDATE outbox_messages SET processed_at = now()`, `DELETE FROM outbox_messages`,
		`UPDATE outbox_partitions SET tail_seq = 0`, `UPDATE consumer_offsets SET last_processed_id = 0`} {
		if _, err := ann.PgConn().Exec(t.Context(), `BEGIN READ WRITE; `+sql).ReadAll(); err == nil {
			t.Errorf("a writer may %s", sql)
		}
		paste(ann, `ROLLBACK`)
	}
	d.verify(t)
	for path, want := range map[string]string{"/v1/follows/7/42": "2 DELETED REMOVED user:9",
		"/v1/comments/" + comment: "2 DELETED DELETED user:9"} {
		var answer struct {
			Items []struct {
				Version      int64
				VersionState string `json:"version_state"`
				Actor        string
				Follow       struct{ Status string }
				Comment      struct{ State string }
			}
		}
		d.request(t, "GET", path+"/versions", "", nil, &answer)
		if len(answer.Items) != 2 {
			t.Errorf("%s: versions %v, want 2", path, answer)
			continue
		}
		last := answer.Items[0]
		if got := fmt.Sprint(last.Version, " ", last.VersionState, " ", last.Follow.Status, last.Comment.State, " ",
			last.Actor); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
	for _, c := range []struct {
		args []string
		want []string // the columns of the first line, except the id and the time
	}{
		{[]string{"comment", comment}, []string{"DELETED user:9 2 " + comment + " 5 7 DELETED",
			"ARCHIVED dev 1 " + comment + " 5 7 VISIBLE a comment"}},
		{[]string{"follow", "7", "42"}, []string{"DELETED user:9 2 REMOVED", "ARCHIVED dev 1 ACTIVE"}},
		{[]string{"thread", "5"}, []string{"LATEST dev 1 false false a title"}},
		{[]string{"author", "7"}, []string{"LATEST dev 1 " + kept + " 5 7 VISIBLE another"}},
		{[]string{"author", "8"}, nil},
		{[]string{"comment", comment, "--limit", "1"}, []string{"DELETED user:9 2 " + comment + " 5 7 DELETED"}},
		{[]string{"follow", "7", "42", "--tenant", "2"}, nil},
	} {
		args := append([]string{"history"}, append(c.args[:len(c.args):len(c.args)], "--data", d.dir)...)
		if !slices.Contains(args, "--tenant") {
			args = append(args, "--tenant", "1")
		}
		code, stdout, stderr := run(t, nil, "", args...)
		var got []string
		for _, line := range strings.Split(strings.TrimSpace(stdout), "\n")[1:] {
			f := strings.Fields(line)
			got = append(got, strings.Join(append(f[1:2:2], f[3:]...), " "))
		}
		if none := strings.Contains(stderr, "No history recorded"); none != (c.want == nil) {
			t.Errorf("%v: it says %q", args, stderr)
		}
		if diff := cmp.Diff(c.want, got); diff != "" || code != exitOK {
			t.Errorf("%v: exit code %d, %s (-want +got):\n%s", args, code, stderr, diff)
		}
		_, stdout, _ = run(t, nil, "", append(args, "--json")...)
		var list struct{ Items []map[string]any }
		if err := json.Unmarshal([]byte(stdout), &list); err != nil || list.Items == nil || len(list.Items) != len(c.want) {
			t.Errorf("%v --json: %s, %v", args, stdout, err)
		}
	}
	for _, args := range [][]string{{"comment", "7", "--tenant", "1"}, {"follow", "7", "--tenant", "1"}, {"thread", "5"},
		{"author", "-1", "--tenant", "1"}, {"author", "1", "--tenant", "1", "--limit", "0"}} {
		if code, _, _ := run(t, nil, "", append([]string{"history"}, args...)...); code != exitInput {
			t.Errorf("history %v: exit code %d, want %d", args, code, exitInput)
		}
	}
	paste(owner, end)
	if err := ann.Ping(t.Context()); err == nil {
		t.Error("ann is still there")
	}
}
