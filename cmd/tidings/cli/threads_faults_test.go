//go:build faults

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"net/http"
	"slices"
	"time"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/load"
)

func TestALoadOfThreadsSurvivesKills(t *testing.T) {
	d := newDevWithPostgres(t)
	d.start(t)
	spec := load.ChildSpec{Objects: 30, Children: 600, Seed: rand.Uint64() >> 1}
	t.Logf("seed %d", spec.Seed)
	threads := load.GenerateChildren(commentKind, spec)
	// among the creates and the changes
	creates, changes := spec.Children/2, spec.Children+(threads.Requests()-spec.Children)/2 // answers before each kill
	g, l := d.startGate(t, creates+spec.Children/4, load.Config{Concurrency: 16, RetryFor: startWithin})
	loaded := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { loaded <- l.RunChildren(ctx, threads) }()
	for _, kill := range []struct{ at, next int64 }{{creates, changes + 1}, {changes, threads.Requests() + 1}} {
		testkit.Eventually(t, "the load to be at the kill", func() (bool, error) { return l.Stats().Done() >= kill.at, nil })
		d.kill(t)
		g.raise(kill.next)
		d.start(t)
	}
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Done() != threads.Requests() || s.Refused > 0 || s.Retried == 0 {
		t.Errorf("%+v, want %d requests, some retried, none refused", s, threads.Requests())
	}

	code, stdout, stderr := run(t, nil, "", "load", "--kind", "comment", "--generate",
		fmt.Sprintf("posts=%d,comments=%d,seed=%d", spec.Objects, spec.Children, spec.Seed), "--data", d.dir, "--json")
	var got childrenResult
	if err := json.Unmarshal([]byte(stdout), &got); code != exitOK || err != nil {
		t.Fatalf("load: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	// A busy API may refuse a request for now, which the load then repeats: how often says nothing
	// about what exists.
	got.Seconds, got.RequestsPerSecond, got.Retried = 0, 0, 0
	if want := (childrenResult{Requests: threads.Requests(), Existed: threads.Requests()}); got != want {
		t.Errorf("the second load: %+v, want %+v", got, want)
	}
	d.verify(t)

	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	var comments, events int64
	var settings bool
	if err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM comments), (SELECT count(*) FROM outbox_messages), EXISTS (SELECT
		FROM threads)`).
		Scan(&comments, &events, &settings); err != nil {
		t.Fatal(err)
	}
	if comments != spec.Children || events != threads.Requests() {
		t.Errorf("%d comments, %d events, settings %t: want %d and %d", comments, events, settings, spec.Children, threads.Requests())
	}
	rows, _ := conn.Query(t.Context(), wrongVersionsSQL)
	wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if diff := cmp.Diff([]string(nil), wrong); err != nil || len(wrong) > 0 {
		t.Errorf("events and versions: %v\n%s", err, diff)
	}
}

// TestModerationIsSeenOnPages makes some decisions, and waits for each until the thread's pages
// show it.
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
		state, want := "HIDDEN", 0
		if i%2 == 1 {
			state, want = "APPROVED", 1
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

// TestThreadSettingsAreSeenOnPages changes some settings, and waits for each until a page of the
// thread shows it.
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
