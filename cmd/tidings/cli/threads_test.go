package cli

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
)

// wrongVersionsSQL finds entities without exactly one event per version, in order, up to the version of the truth.
const wrongVersionsSQL = `
WITH events AS (
  SELECT coalesce(payload->>'comment_id', 'thread ' || (payload->>'post_id')) AS entity, (payload->>'version')::bigint AS version,
         row_number() OVER (PARTITION BY coalesce(payload->>'comment_id', 'thread ' || (payload->>'post_id')) ORDER BY stream_seq) AS place
    FROM outbox_messages
), truth AS (
  SELECT comment_id::text AS entity, version FROM comments
  UNION ALL SELECT 'thread ' || post_id, (object->>'version')::bigint FROM threads WHERE version_state = 'LATEST'
)
SELECT entity || ' has version ' || version || ' at place ' || place FROM events WHERE version <> place
UNION ALL
SELECT entity || ' ends at ' || coalesce(e.last::text, '-') || ', the truth is ' || coalesce(t.version::text, '-')
  FROM (SELECT entity, max(version) AS last FROM events GROUP BY entity) e FULL JOIN truth t USING (entity)
 WHERE e.last IS DISTINCT FROM t.version`

// TestModerationIsSeenOnPages makes some decisions, and waits for each until the thread's pages show it.
func TestModerationIsSeenOnPages(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	const path = "/v1/posts/1/comments"
	var c threadRow
	if status, _ := d.request(t, http.MethodPost, path, `{"author_id":"1","body":"words"}`, nil, &c); status != http.StatusCreated {
		t.Fatalf("create: status %d", status)
	}
	d.verify(t) // The consumers find the new stream, which takes them longer than an event.
	var took []time.Duration
	for i := range 6 {
		state, want := "hidden", 0
		if i%2 == 1 {
			state, want = "approved", 1
		}
		body, header := fmt.Sprintf(`{"state":%q,"reason":"round %d"}`, state, i),
			http.Header{"If-Match": {"*"}, "Tidings-Actor": {"moderator"}}
		if status, _ := d.request(t, http.MethodPut, "/v1/comments/"+c.CommentID+"/moderation", body, header,
			nil); status != http.StatusOK {
			t.Fatalf("moderate: status %d", status)
		}
		start := time.Now()
		for { // not Eventually: the test would measure its interval
			if n := len(d.pages(t, 1, "oldest", 50)); n == want && len(d.pages(t, 1, "threaded", 50)) == want {
				break
			}
			if time.Since(start) > arriveWithin {
				t.Fatalf("%s is not seen after %s", state, arriveWithin)
			}
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("from the answer of a moderation to both pages: median %s, longest %s", took[len(took)/2], took[len(took)-1])
	if took[len(took)/2] > 2*time.Second { // milliseconds on an idle machine; polling bounds it by 100 ms
		t.Errorf("a decision takes %s to be seen", took[len(took)/2])
	}
	d.verify(t)

	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	rows, _ := conn.Query(t.Context(), `SELECT concat_ws(' ', metadata->>'created_by', object->>'moderation_state', object->>'reason')
		FROM comment_history ORDER BY version LIMIT 3`)
	history, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if diff := cmp.Diff([]string{"dev NONE", "moderator HIDDEN round 0", "moderator APPROVED round 1"}, history); err != nil || diff != "" {
		t.Errorf("history (-want +got): %v\n%s", err, diff)
	}
}

// TestThreadSettingsAreSeenOnPages changes some settings, and waits for each until a page of the thread shows it.
func TestThreadSettingsAreSeenOnPages(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	var took []time.Duration
	for i := range 5 {
		title := fmt.Sprintf("title %d", i)
		body := fmt.Sprintf(`{"title":%q,"locked":%t}`, title, i%2 == 0)
		if status, _ := d.request(t, http.MethodPut, "/v1/posts/1/thread", body, http.Header{"If-Match": {"*"}},
			nil); status != http.StatusOK {
			t.Fatalf("set the thread: status %d", status)
		}
		if i == 0 {
			d.verify(t) // The consumers find the new stream, which takes them longer than an event.
		}
		start := time.Now()
		for { // not Eventually: the test would measure its interval
			var page struct {
				Thread struct {
					Title  string `json:"title"`
					Locked bool   `json:"locked"`
				} `json:"thread"`
			}
			if status, _ := d.request(t, http.MethodGet, "/v1/posts/1/comments", "", nil, &page); status != http.StatusOK {
				t.Fatalf("page: status %d", status)
			}
			if page.Thread.Title == title && page.Thread.Locked == (i%2 == 0) {
				break
			}
			if time.Since(start) > arriveWithin {
				t.Fatalf("%q is not seen after %s", title, arriveWithin)
			}
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("from the answer to the settings to a page: median %s, longest %s", took[len(took)/2], took[len(took)-1])
	if took[len(took)/2] > 2*time.Second { // milliseconds on an idle machine; polling bounds it by 100 ms
		t.Errorf("settings take %s to be seen", took[len(took)/2])
	}
}
