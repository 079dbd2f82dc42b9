//go:build upgrade

package deploy_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

// TestThisTreeRunsBesideTheReleaseBefore builds the previous release, lets people use its fleet,
// and upgrades the fleet to this tree in the order of docs/upgrade.md. Each new binary first works
// beside the old one, and two binaries are rolled back once. No request fails, no event is lost or
// doubled, and in the end `tidings verify` of both releases finds no difference.
func TestThisTreeRunsBesideTheReleaseBefore(t *testing.T) {
	r := newRollout(t)
	r.begin()
	token := strings.TrimSpace(r.by(r.before).tidings("token", "create", "--tenant", "7", "--name", "web",
		"--roles", "read,write,moderate"))
	load := r.load(token)
	load.continues()
	r.by(r.before).tidings("nats", "durable", "--name", "svc", "--filter", "follow.*", "--ack-wait", "2s")
	handles, projects := r.subscriber(r.before, "handle"), r.subscriber(r.before, "project")
	r.await("a subscriber of the previous release", r.projected(r.before), 0)

	early := r.early("threadcache")
	r.migrate()
	r.ready("the threadcache that waited for the migration", early)
	r.running["threadcache"] = append(r.running["threadcache"], early)
	r.bothWork("threadcache")
	r.stop("threadcache")
	load.continues()

	r.by(r.after).tidings("nats", "durable", "--name", "svc", "--filter", "follow.*", "--ack-wait", "2s")
	newHandles := r.subscriber(r.after, "handle")
	r.subscriber(r.after, "project")
	for of, s := range map[string]*subscriber{"before": handles, "after": newHandles} { // the relays still run the previous release
		r.await("a handler of the release "+of, func() (int, error) { return len(s.events()), nil }, len(s.events()))
	}
	r.await("a projection of this release", r.projected(r.after), 0)

	for _, who := range []string{"followercounts", "archiver", "relay", "relay"} {
		r.replace(who, r.after)
	}
	applied, err := r.projected(r.before)()
	if err != nil {
		t.Fatal(err)
	}
	r.await("a projection of the previous release to apply events that the relays of this one publish", r.projected(r.before), applied)
	r.upgradeAPI(token)
	load.continues()
	for _, who := range []string{"threadcache", "api"} { // rolls back the binary, but not the schema
		r.replace(who, r.before)
		load.continues()
		r.replace(who, r.after)
	}
	projects.Kill()
	load.continues()
	load.stop()
	r.compareSchemas()
	r.finish(load, token, func() []string { return append(handles.events(), newHandles.events()...) })
}

// early starts a binary of this tree on the schema of the previous release. The binary must wait,
// and name `tidings migrate`.
func (r *rollout) early(who string) *process {
	r.t.Helper()
	p := r.by(r.after).launch(who)
	testkit.Eventually(r.t, who+" to report that it waits for the schema", func() (bool, error) {
		_, err := r.isReady(p)
		if err == nil || !strings.Contains(err.Error(), "run `tidings migrate`") {
			return false, fmt.Errorf("/readyz: %w", err)
		}
		return strings.Contains(p.Log(), "run `tidings migrate`"), nil
	})
	return p
}

// migrate upgrades the schemas and the NATS users to this tree's while the load continues.
func (r *rollout) migrate() {
	r.t.Helper()
	start := time.Now()
	out := r.by(r.after).run([]string{"DATABASE_URL=" + r.db.URL}, "migrate", "--json")
	r.t.Logf("the migration took %s: %s", time.Since(start).Round(100*time.Millisecond), strings.TrimSpace(out))
	r.users = r.natsUsers(r.after)
	for range 2 { // docs/security.md
		r.b.Reload(r.t, r.users)
	}
	found, code := r.by(r.before).try(r.env("operator"), "doctor")
	if code == 0 || strings.Count(found, "schema-newer") != 3 {
		r.t.Errorf("doctor of the previous release ends with exit code %d, want three findings schema-newer:\n%s", code, found)
	}
}

// upgradeAPI replaces the API. While both releases serve it, each accepts the tokens, keys and
// cursors of the other.
func (r *rollout) upgradeAPI(token string) {
	r.t.Helper()
	before := r.running["api"][0]
	after := r.begun("api", r.after)
	r.bothWork("api")
	other := strings.TrimSpace(r.by(r.after).tidings("token", "create", "--tenant", "7", "--name", "other",
		"--roles", "read,write,moderate"))
	r.exchange(r.direct(before.api, token), r.direct(after.api, token), "1")
	r.exchange(r.direct(after.api, other), r.direct(before.api, other), "2")
	r.compareDocuments(before.api, after.api)
	r.stop("api")
}

// direct returns a client of one API, without the balancer.
func (r *rollout) direct(api, token string) *client.Client {
	r.t.Helper()
	c, err := client.New("http://"+api, client.WithToken(token), client.WithHTTPClient(&http.Client{Transport: r.balancer.transport}))
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// exchange writes through one API. Through the other it reads with the write's token, repeats the
// write with its key, and continues lists with their cursors.
func (r *rollout) exchange(one, other *client.Client, key string) {
	r.t.Helper()
	ctx, post := r.t.Context(), client.ID("post-"+key)
	writer := one.Session()
	for user := range 25 {
		if _, err := writer.Likes.Put(ctx, event.IDOf(5000+user), post); err != nil {
			r.t.Fatal(err)
		}
		if _, err := writer.Comments.Create(ctx, post, client.NewComment{AuthorID: event.IDOf(5000 + user), Body: "hello"}); err != nil {
			r.t.Fatal(err)
		}
	}
	reader := other.Session(writer.Token())
	if page, err := reader.Likes.Likers(post, client.PageSize(200)).First(ctx); err != nil || len(page.Items) != 25 {
		r.t.Errorf("with the token of the other API's writes, the list has %d likers, want 25: %v", len(page.Items), err)
	}
	var first, again client.Response
	was, err := one.Comments.Create(ctx, post, client.NewComment{AuthorID: "5000", Body: "once"}, client.IdempotencyKey(key),
		client.WithResponse(&first))
	if err != nil {
		r.t.Fatal(err)
	}
	is, err := other.Comments.Create(ctx, post, client.NewComment{AuthorID: "5000", Body: "once"}, client.IdempotencyKey(key),
		client.WithResponse(&again))
	if err != nil || is.CommentID != was.CommentID || !again.Replayed {
		r.t.Errorf("with the key of the other API's write, the answer is %+v, %v; want the comment %s again", is, err, was.CommentID)
	}
	reader.Add(first.Token)
	apis := [2]*client.Session{writer, reader}
	writer.Add(first.Token)
	likers := walk(r.t, func(turn int, cursor string) (ids []string, next string, err error) {
		page, err := apis[turn%2].Likes.Likers(post, client.PageSize(7), client.Cursor(cursor)).First(ctx)
		for _, i := range page.Items {
			ids = append(ids, fmt.Sprint(i.UserID))
		}
		return ids, page.Next, err
	})
	comments := walk(r.t, func(turn int, cursor string) (ids []string, next string, err error) {
		page, err := apis[turn%2].Comments.List(post, client.PageSize(7), client.Cursor(cursor), client.Order("threaded")).First(ctx)
		for _, i := range page.Items {
			ids = append(ids, i.CommentID)
		}
		return ids, page.Next, err
	})
	if likers != 25 || comments != 26 {
		r.t.Errorf("alternate pages of the two APIs have %d likers and %d comments, want 25 and 26", likers, comments)
	}
}

// walk reads a list whose pages come from two APIs in turn, and returns the number of different
// ids. An id on two pages fails the test.
func walk(t *testing.T, page func(turn int, cursor string) (ids []string, next string, err error)) int {
	t.Helper()
	seen, cursor := map[string]bool{}, ""
	for turn := range 20 {
		ids, next, err := page(turn, cursor)
		if err != nil {
			t.Fatalf("page %d: %v", turn, err)
		}
		for _, id := range ids {
			if seen[id] {
				t.Errorf("page %d has %s again", turn, id)
			}
			seen[id] = true
		}
		if cursor = next; cursor == "" {
			return len(seen)
		}
	}
	t.Fatal("the list does not end after 20 pages")
	return 0
}

// compareDocuments checks that the OpenAPI and AsyncAPI documents keep all promises of the previous
// release.
func (r *rollout) compareDocuments(before, after string) {
	r.t.Helper()
	get := func(api, path string) (doc map[string]any) {
		resp, err := r.client.Get("http://" + api + path)
		if err != nil {
			r.t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err == nil {
			err = json.Unmarshal(body, &doc)
		}
		if err != nil || resp.StatusCode != http.StatusOK {
			r.t.Fatalf("%s: %s, %v", path, resp.Status, err)
		}
		return doc
	}
	for _, broken := range brokenPromises(get(before, "/v1/openapi.json"), get(after, "/v1/openapi.json")) {
		r.t.Errorf("OpenAPI: %s", broken)
	}
	for _, broken := range goneFrom("#", get(before, "/v1/asyncapi.json"), get(after, "/v1/asyncapi.json")) {
		r.t.Errorf("AsyncAPI: %s", broken)
	}
}

// finish runs after the last write. It compares all state with both releases: verify, the people's
// writes, streams and subscribers.
func (r *rollout) finish(load *load, token string, handled func() []string) {
	r.t.Helper()
	r.balancer.mu.Lock()
	r.t.Logf("%d steps, %d requests that were refused and retried, answers by API %v", load.steps.Load(), r.balancer.refused,
		r.balancer.answers)
	for failure, n := range r.balancer.failures {
		r.t.Errorf("%d times: %s", n, failure)
	}
	r.balancer.mu.Unlock()
	for _, of := range []release{r.before, r.after} {
		if out := r.by(of).tidings("verify", "--wait", "60s"); !strings.Contains(out, "Everything is equal.") {
			r.t.Errorf("verify of the release %s:\n%s", of.name, out)
		}
	}
	r.begun("api", r.before)
	for _, api := range r.running["api"] {
		for n, p := range load.people {
			if err := p.equal(r.t.Context(), r.direct(api.api, token)); err != nil {
				r.t.Errorf("person %d: %v", n, err)
			}
		}
	}
	for who, all := range r.running {
		for _, p := range all {
			r.permitted(who, p.Log())
		}
	}
	published := r.published()
	pool, ctx := r.db.Pool(r.t, postgres.RoleOwner), r.t.Context()
	follows, system := map[string]bool{}, 0
	for id, e := range published {
		if event.System(e.AggregateType) {
			system++
		}
		if e.AggregateType == event.AggregateFollow {
			follows[id] = true
		}
	}
	var waiting, all int
	// The relays still write a heartbeat per partition and minute, so these are not counted.
	if err := pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE processed_at IS NULL), count(*)
		FROM (SELECT aggregate_type, processed_at FROM outbox_messages
			UNION ALL SELECT aggregate_type, processed_at FROM outbox_messages_archive) m WHERE aggregate_type <> $1`,
		event.AggregateHeartbeat).Scan(&waiting, &all); err != nil || waiting > 0 || all != len(published)-system {
		r.t.Errorf("the outbox has %d messages (%d are pending), and the streams have %d: %v", all, waiting, len(published)-system, err)
	}
	r.await("the projections of both releases to have every event once", func() (n int, err error) {
		err = pool.QueryRow(ctx, `SELECT count(*) FROM svc.seen`).Scan(&n)
		return n, err
	}, len(published)-system-1)
	testkit.Eventually(r.t, "the handlers of both releases to have every follow", func() (bool, error) {
		missing := maps.Clone(follows)
		for _, id := range handled() {
			delete(missing, id)
		}
		if len(missing) > 0 || len(follows) == 0 {
			return false, fmt.Errorf("the handlers lack %d of %d follows", len(missing), len(follows))
		}
		return true, nil
	})
}

// published reads every stream. Each event must be there once, and the versions of each entity must
// rise by one.
func (r *rollout) published() map[string]event.Event {
	r.t.Helper()
	ctx := r.t.Context()
	js, err := jetstream.New(r.connect("operator", nil))
	if err != nil {
		r.t.Fatal(err)
	}
	var names []string
	for name := range js.StreamNames(ctx).Name() {
		if strings.HasPrefix(name, "EVENTS-") && name != "EVENTS-dead" {
			names = append(names, name)
		}
	}
	slices.Sort(names) // the streams from before the resize come first
	all, versions := map[string]event.Event{}, map[string]int64{}
	for _, name := range names {
		stream, err := js.Stream(ctx, name)
		if err != nil {
			r.t.Fatal(err)
		}
		for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
			m, err := stream.GetMsg(ctx, seq)
			if err != nil {
				r.t.Fatalf("%s, message %d: %v", name, seq, err)
			}
			if event.Closes(m.Subject, m.Header) {
				continue
			}
			e, err := event.Decode(m.Subject, m.Header, m.Data)
			if err != nil {
				r.t.Fatalf("%s, message %d: %v", name, seq, err)
			}
			if _, twice := all[e.ID]; twice {
				r.t.Errorf("%s, message %d: a second copy of the event %s", name, seq, e.ID)
			}
			all[e.ID] = e
			entity, version := identity(r.t, e)
			if !event.System(e.AggregateType) && version != versions[entity]+1 {
				r.t.Errorf("%s, message %d: %s has version %d after %d", name, seq, entity, version, versions[entity])
			}
			versions[entity] = version
		}
	}
	r.t.Logf("%d events of %d entities on %v", len(all), len(versions), names)
	return all
}

// identity returns the entity of an event, and the entity's version after the event.
func identity(t *testing.T, e event.Event) (string, int64) {
	t.Helper()
	var payload map[string]any
	if err := json.Unmarshal(e.Payload, &payload); err != nil {
		t.Fatal(err)
	}
	var parts []string
	for name, value := range payload {
		if strings.HasSuffix(name, "_id") && name != "author_id" && name != "parent_id" {
			parts = append(parts, fmt.Sprintf("%s=%v", name, value))
		}
	}
	slices.Sort(parts)
	version, _ := payload["version"].(float64)
	return fmt.Sprintf("tenant %d, %s %s", e.TenantID, e.AggregateType, strings.Join(parts, " ")), int64(version)
}
