//go:build faults

package cli

import (
	"context"
	"math/rand/v2"
	"testing"

	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/load"
)

func TestLoadSurvivesKills(t *testing.T) {
	t.Parallel()
	d := newDevWithPostgres(t)
	d.start(t)
	spec := followGraph(150, 1_600, rand.Uint64())
	t.Logf("seed %d", spec.Seed)
	quarter := spec.Edges / 4
	g, l := d.startGate(t, quarter+quarter/2, load.Config{Concurrency: 32, RetryFor: startWithin})
	loaded := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { loaded <- l.Run(ctx, followKind, sequence(spec)) }()
	for i := range int64(3) {
		testkit.Eventually(t, "a quarter more is loaded",
			func() (bool, error) { return l.Stats().Done() >= quarter*(i+1), nil })
		d.kill(t)
		g.raise(quarter*(i+2) + quarter/2)
		d.start(t)
	}
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	if s := l.Stats(); s.Done() != spec.Edges || s.Retried == 0 {
		t.Errorf("%+v, want %d edges, some retried", s, spec.Edges)
	}
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)
}

func TestThreadPagesEqualTheTruth(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	const posts, comments = 3, 100
	made := map[int][]threadRow{}
	for i := range comments {
		post := 1 + rnd.IntN(posts)
		body := map[string]string{"author_id": strconv.Itoa(1 + rnd.IntN(20)), "body": fmt.Sprintf("comment %d", i)}
		if n := len(made[post]); n > 0 && rnd.IntN(4) > 0 {
			if parent := made[post][rnd.IntN(n)]; parent.State == "VISIBLE" {
				body["parent_id"] = parent.CommentID
			}
		}
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		var c threadRow
		status, _ := d.request(t, http.MethodPost, fmt.Sprintf("/v1/posts/%d/comments", post), string(b),
			http.Header{"Idempotency-Key": {strconv.Itoa(i)}}, &c)
		if status != http.StatusCreated {
			t.Fatalf("create %s: status %d", b, status)
		}
		switch rnd.IntN(6) {
		case 0:
			status, _ := d.request(t, http.MethodPatch, "/v1/comments/"+c.CommentID, `{"body":"edited"}`,
				http.Header{"If-Match": {`"1"`}}, &c)
			if status != http.StatusOK {
				t.Fatalf("edit: status %d", status)
			}
		case 1:
			if n := len(made[post]); n > 0 { // an earlier comment, which may have replies
				old := &made[post][rnd.IntN(n)]
				if old.State == "VISIBLE" {
					status, _ := d.request(t, http.MethodDelete, "/v1/comments/"+old.CommentID, "",
						http.Header{"If-Match": {fmt.Sprintf("%q", strconv.FormatInt(old.Version, 10))}}, nil)
					if status != http.StatusNoContent {
						t.Fatalf("delete: status %d", status)
					}
					old.State = "DELETED"
				}
			}
		}
		made[post] = append(made[post], c)
	}
	d.verify(t)

	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	for post := 1; post <= posts; post++ {
		for order, sql := range map[string]string{"oldest": oldestSQL, "newest": newestSQL, "threaded": threadedSQL} {
			rows, _ := conn.Query(t.Context(), sql, fmt.Sprint(post))
			want, err := pgx.CollectRows(rows, pgx.RowToStructByPos[threadRow])
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, d.pages(t, post, order, 7)); diff != "" {
				t.Errorf("post %d, %s: %s", post, order, diff)
			}
			for skip := 0; order != "threaded" && skip <= len(want); skip += 9 {
				var page struct{ Items []threadRow }
				d.request(t, http.MethodGet, fmt.Sprintf("/v1/posts/%d/comments?order=%s&skip=%d&limit=9", post, order, skip), "", nil,
					&page)
				if diff := cmp.Diff(want[skip:min(len(want), skip+9)], page.Items, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("post %d, %s behind %d: %s", post, order, skip, diff)
				}
			}
		}
	}
}
