package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/ops/load"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
)

// arriveWithin is the longest time until every write has arrived everywhere. It only ends a broken
// test.
const arriveWithin = 2 * time.Minute

type counts struct{ Followers, Following int64 }

// The kinds of the loads that follow a graph and write threads.
var (
	followKind  = load.EdgeKind{Name: "follow", Plural: "follows", From: "user", To: "user", Ends: [2]string{"follower_id", "followee_id"}}
	commentKind = load.ChildKind{Name: "comment", Plural: "comments", Parent: "post", Parents: "posts", Threaded: true, Moderated: true}
)

// followGraph is a graph of users who follow each other.
func followGraph(users, edges int64, seed uint64) load.Spec {
	return load.Spec{Origins: users, Targets: users, NoSelf: true, Edges: edges, Seed: seed}
}

// countsOf returns the counts of a graph's accounts.
func countsOf(spec load.Spec) map[event.ID]counts {
	all := map[event.ID]counts{}
	for e := range load.Generate(spec) {
		from, to := all[e.From], all[e.To]
		from.Following++
		to.Followers++
		all[e.From], all[e.To] = from, to
	}
	return all
}

// sequence returns the graph in the loader's format.
func sequence(spec load.Spec) iter.Seq2[load.Edge, error] {
	return func(yield func(load.Edge, error) bool) {
		for e := range load.Generate(spec) {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// verify runs `tidings verify`, which waits until everything has arrived, and fails the test if it
// finds a difference.
func (d *dev) verify(t *testing.T) {
	t.Helper()
	code, stdout, stderr := run(t, nil, "", "verify", "--data", d.dir, "--wait", arriveWithin.String(), "--limit", "3")
	if code != exitOK {
		t.Fatalf("verify: exit code %d\n%s%s", code, stdout, stderr)
	}
}

// checkCounts compares the counts that the API shows with those of the graph.
func (d *dev) checkCounts(t *testing.T, spec load.Spec) {
	t.Helper()
	for user, want := range countsOf(spec) {
		var got struct{ Followers, Following json.Number }
		if status, _ := d.request(t, http.MethodGet, fmt.Sprintf("/v1/users/%s/counts", user), "", nil, &got); status != http.StatusOK {
			t.Fatalf("counts of %s: status %d", user, status)
		}
		if got.Followers.String() != strconv.FormatInt(want.Followers, 10) ||
			got.Following.String() != strconv.FormatInt(want.Following, 10) {
			t.Errorf("counts of %s are %v, want %v", user, got, want)
		}
	}
}

// checkStream checks that the streams have exactly this many follow events, each of a different
// pair.
func (d *dev) checkStream(t *testing.T, want int64) {
	t.Helper()
	nc, err := nats.Connect(d.instance(t).NATSURL, nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := broker.Config{Stream: "EVENTS", Prefix: "events", Timeout: 10 * time.Second}
	streams, err := broker.Streams(t.Context(), js, cfg)
	if err != nil {
		t.Fatal(err)
	}
	pairs := map[string]bool{}
	for _, s := range streams {
		if _, err := broker.Scan(t.Context(), js, cfg, s.Number, broker.Scanning{}, func(m *broker.Stored) error {
			if m.Header.Get(event.HeaderClosed) != "" {
				return nil
			}
			var f struct {
				FollowerID string `json:"follower_id"`
				FolloweeID string `json:"followee_id"`
			}
			if err := json.Unmarshal(m.Data, &f); err != nil {
				return err
			}
			pair := f.FollowerID + "/" + f.FolloweeID
			if pairs[pair] {
				t.Errorf("two events of %s", pair)
			}
			pairs[pair] = true
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if int64(len(pairs)) != want {
		t.Errorf("the streams hold events of %d pairs, want %d", len(pairs), want)
	}
}

func TestLoadArrivesEverywhere(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	spec := followGraph(40, 400, 7)
	for i, want := range []loadResult{{Edges: spec.Edges, Created: spec.Edges}, {Edges: spec.Edges, Existed: spec.Edges}} {
		code, stdout, stderr := run(t, nil, "", "load", "--generate", "users=40,edges=400,seed=7", "--data", d.dir, "--json")
		var got loadResult
		if err := json.Unmarshal([]byte(stdout), &got); code != exitOK || err != nil {
			t.Fatalf("load: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
		}
		got.Seconds, got.EdgesPerSecond = 0, 0
		if got != want {
			t.Errorf("load %d: %+v, want %+v", i+1, got, want)
		}
	}
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)

	code, stdout, stderr := run(t, nil, "", "status", "--data", d.dir, "--json")
	var st status.State
	if err := json.Unmarshal([]byte(stdout), &st); code != exitOK || err != nil {
		t.Fatalf("status: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	if len(st.Consumers) != 3 || len(st.Lagging())+len(st.DeadLetters()) != 0 || len(st.Partitions) != 1 || len(st.Leases) != 4 {
		t.Errorf("status: %s", stdout)
	}
	want := status.Partition{Stream: "EVENTS-0", LastSlot: 31, State: status.Open, Tail: uint64(spec.Edges), FirstSeq: 1,
		LastSeq: uint64(spec.Edges), Messages: uint64(spec.Edges), Replicas: 1, Current: 1}
	if diff := cmp.Diff(want, st.Partitions[0], cmpopts.IgnoreFields(status.Partition{}, "Relay")); diff != "" ||
		!strings.HasPrefix(st.Partitions[0].Relay, "relay-") {
		t.Errorf("status: the relay %q, (-want +got):\n%s", st.Partitions[0].Relay, diff)
	}

	// Verify lists differences up to the limit, and counts all of them.
	conn, err := pgx.Connect(t.Context(), d.instance(t).DatabaseURL)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.Exec(t.Context(), `UPDATE edge_counts SET incoming = incoming + 1 WHERE object_id IN ('1', '2', '3')`); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr = run(t, nil, "", "verify", "--data", d.dir, "--limit", "2", "--json")
	var v verify.Report
	if err := json.Unmarshal([]byte(stdout), &v); code != exitError || err != nil || stderr != "" {
		t.Fatalf("verify: exit code %d, %v\n%s\n%s", code, err, stdout, stderr)
	}
	if counts := v.Projections[0]; v.OK || counts.Different != 3 || len(counts.Differences) != 2 ||
		counts.Differences[0].Entity != "counts of user 1" {
		t.Errorf("verify: %s", stdout)
	}
	if code, stdout, _ := run(t, nil, "", "verify", "--data", d.dir, "--limit", "2"); code != exitError ||
		!strings.Contains(stdout, "followercounts: and 1 more") ||
		!strings.HasSuffix(stdout, "\nNOT equal:\n  followercounts: 3 differences without an explanation "+
			"(run it again if others write)\n") {
		t.Errorf("verify: exit code %d\n%s", code, stdout)
	}
}

// threadRow is a comment of a page, or of SQL over the truth.
type threadRow struct {
	CommentID string `json:"comment_id"`
	ParentID  string `json:"parent_id"`
	Slug      string `json:"slug"`
	Body      string `json:"body"`
	State     string `json:"state"`
	Version   int64  `json:"version"`
}

const (
	columnsSQL = `comment_id::text, coalesce(parent_id::text, ''), slug,
		CASE WHEN author_state = 'ACTIVE' THEN body ELSE '' END,
		CASE WHEN author_state = 'ACTIVE' THEN 'VISIBLE' ELSE 'DELETED' END, version`
	oldestSQL = `SELECT ` + columnsSQL + ` FROM comments c WHERE post_id = $1 AND author_state = 'ACTIVE' ORDER BY ` +
		`created_at, c.comment_id`
	newestSQL = `SELECT ` + columnsSQL + ` FROM comments c WHERE post_id = $1 AND author_state = 'ACTIVE' ORDER BY created_at ` +
		`DESC, c.comment_id DESC`
	threadedSQL = `SELECT ` + columnsSQL + ` FROM comments c WHERE post_id = $1 AND (author_state = 'ACTIVE' OR EXISTS (
		SELECT FROM comments d WHERE d.post_id = c.post_id AND starts_with(d.path, c.path || '/') AND d.author_state = 'ACTIVE'))
		ORDER BY path`
)

// pages reads a thread page by page.
func (d *dev) pages(t *testing.T, post int, order string, limit int) []threadRow {
	t.Helper()
	var all []threadRow
	cursor := ""
	for {
		var page struct {
			Items []threadRow
			Next  string
		}
		path := fmt.Sprintf("/v1/posts/%d/comments?order=%s&limit=%d", post, order, limit)
		if cursor != "" {
			path += "&cursor=" + cursor
		}
		if status, _ := d.request(t, http.MethodGet, path, "", nil, &page); status != http.StatusOK {
			t.Fatalf("%s: status %d", path, status)
		}
		if len(page.Items) > limit || page.Next != "" && len(page.Items) != limit {
			t.Errorf("%s: %d items", path, len(page.Items))
		}
		all = append(all, page.Items...)
		if cursor = page.Next; cursor == "" {
			return all
		}
	}
}

func TestMalformedEdgeLine(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	code, _, stderr := run(t, nil, "1 2\r\n# a comment\r\n3\tx,y\r\n5 6\r\n", "load", "-", "--data", d.dir)
	want := "tidings: line 3: \"x,y\" is not an id: 1 to 128 of the characters A-Z a-z 0-9 - _ . ~ : @ | + =, but not . or .. alone\n"
	if code != exitInput || stderr != want {
		t.Errorf("exit code %d, %q: want %d, %q", code, stderr, exitInput, want)
	}
	if status, _ := d.request(t, http.MethodGet, "/v1/follows/1/2", "", nil, nil); status != http.StatusOK {
		t.Errorf("what stands before the line: status %d", status)
	}
	if status, _ := d.request(t, http.MethodGet, "/v1/follows/5/6", "", nil, nil); status != http.StatusNotFound {
		t.Errorf("what stands after the line: status %d", status)
	}
}
