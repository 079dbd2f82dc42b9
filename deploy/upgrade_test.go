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

// TestThisTreeRunsBesideTheReleaseBefore builds the release before, has people use its fleet, and brings the fleet to this tree as docs/upgrade.md says, each binary for a
// while beside its predecessor, two of them back and forth. No request fails, nothing is lost or doubled, and both releases find everything equal in the end.
func TestThisTreeRunsBesideTheReleaseBefore(t *testing.T) {
	r := newRollout(t)
	r.begin()
	token := strings.TrimSpace(r.by(r.before).tidings("token", "create", "--tenant", "7", "--name", "web", "--roles", "read,write,moderate"))
	load := r.load(token)
	load.goesOn()
	handles, projects := r.subscriber(r.before, "handle"), r.subscriber(r.before, "project")
	r.await("a subscriber of the release before", r.projected(r.before), 0)

	early := r.early("threadcache")
	r.migrate()
	r.ready("threadcache that waited", early)
	r.running["threadcache"] = append(r.running["threadcache"], early)
	r.bothWork("threadcache")
	r.stop("threadcache")
	load.goesOn()

	newHandles := r.subscriber(r.after, "handle")
	r.subscriber(r.after, "project")
	for of, s := range map[string]*subscriber{"before": handles, "after": newHandles} { // the relays are of the release before
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
	r.await("a projection of the release before, of what the relays of this one publish", r.projected(r.before), applied)
	r.upgradeAPI(token)
	load.goesOn()
	for _, who := range []string{"threadcache", "api"} { // a rollback: the schema stays
		r.replace(who, r.before)
		load.goesOn()
		r.replace(who, r.after)
	}
	_ = projects.cmd.Process.Kill()
	load.goesOn()
	load.stop()
	r.compareSchemas()
	r.finish(load, token, func() []string { return append(handles.events(), newHandles.events()...) })
}

// early starts a binary of this tree on the schema of the release before. It waits, and says for what.
func (r *rollout) early(who string) *process {
	r.t.Helper()
	p := r.by(r.after).launch(who)
	testkit.Eventually(r.t, 30*time.Second, who+" to say that it waits for the schema", func() (bool, error) {
		_, err := r.isReady(p)
		if err == nil || !strings.Contains(err.Error(), "run `tidings migrate`") {
			return false, fmt.Errorf("/readyz: %w", err)
		}
		return strings.Contains(p.log.String(), "run `tidings migrate`"), nil
	})
	return p
}

// migrate brings the schemas to this tree's while everybody works, and the NATS users too.
func (r *rollout) migrate() {
	r.t.Helper()
	start := time.Now()
	out := r.by(r.after).run([]string{"DATABASE_URL=" + r.db.URL}, "migrate", "--json")
	r.t.Logf("migrated in %s: %s", time.Since(start).Round(100*time.Millisecond), strings.TrimSpace(out))
	r.b.Reload(r.t, r.natsUsers(r.after))
	found, code := r.by(r.before).try(r.env("operator"), "doctor")
	if code == 0 || strings.Count(found, "schema-newer") != 2 {
		r.t.Errorf("doctor of the release before: %d\n%s", code, found)
	}
}

// upgradeAPI replaces the API. While there are both, what one gives out the other takes.
func (r *rollout) upgradeAPI(token string) {
	r.t.Helper()
	before := r.running["api"][0]
	after := r.begun("api", r.after)
	r.bothWork("api")
	other := strings.TrimSpace(r.by(r.after).tidings("token", "create", "--tenant", "7", "--name", "other", "--roles", "read,write,moderate"))
	r.exchange(r.direct(before.api, token), r.direct(after.api, token), "1")
	r.exchange(r.direct(after.api, other), r.direct(before.api, other), "2")
	r.compareDocuments(before.api, after.api)
	r.stop("api")
}

// direct is a client of one API.
func (r *rollout) direct(api, token string) *client.Client {
	r.t.Helper()
	c, err := client.New("http://"+api, client.WithToken(token), client.WithHTTPClient(r.client))
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// exchange has one API write, and the other read that by the write's token, repeat the write by its key, and continue its lists by their cursors.
func (r *rollout) exchange(one, other *client.Client, key string) {
	r.t.Helper()
	ctx, post := r.t.Context(), client.ID(3_000_000_000)+client.ID(len(key))+client.ID(key[0])
	writer := one.Session()
	for user := range client.ID(25) {
		if _, err := writer.Likes.Put(ctx, 5000+user, post); err != nil {
			r.t.Fatal(err)
		}
		if _, err := writer.Comments.Create(ctx, post, client.NewComment{AuthorID: 5000 + user, Body: "hello"}); err != nil {
			r.t.Fatal(err)
		}
	}
	reader := other.Session(writer.Token())
	if page, err := reader.Likes.Likers(post, client.PageSize(200)).First(ctx); err != nil || len(page.Items) != 25 {
		r.t.Errorf("with the token of a write of the other API there are %d likers, %v", len(page.Items), err)
	}
	var first, again client.Response
	was, err := one.Comments.Create(ctx, post, client.NewComment{AuthorID: 5000, Body: "once"}, client.IdempotencyKey(key), client.WithResponse(&first))
	if err != nil {
		r.t.Fatal(err)
	}
	is, err := other.Comments.Create(ctx, post, client.NewComment{AuthorID: 5000, Body: "once"}, client.IdempotencyKey(key), client.WithResponse(&again))
	if err != nil || is.CommentID != was.CommentID || !again.Replayed {
		r.t.Errorf("with the key of a write of the other API: %+v, %v, want %s again", is, err, was.CommentID)
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
		r.t.Errorf("pages of both APIs in turn have %d likers and %d comments, want 25 and 26", likers, comments)
	}
}

// walk reads a list whose pages two APIs give in turn, and returns how many different ids it has. An id that comes twice fails the test.
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
	t.Fatal("the list has no end")
	return 0
}

// compareDocuments wants the documents that an API serves to have all that the release before promised.
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

// finish compares everything, by both releases, once nobody writes any more.
func (r *rollout) finish(load *load, token string, handled func() []string) {
	r.t.Helper()
	r.balancer.mu.Lock()
	r.t.Logf("%d steps, %d requests refused for a while, by API %v", load.steps.Load(), r.balancer.refused, r.balancer.answers)
	for failure, n := range r.balancer.failures {
		r.t.Errorf("%d times %s", n, failure)
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
			r.permitted(who, p.log.String())
		}
	}
	published := r.published()
	pool, ctx := r.db.Pool(r.t, postgres.RoleOwner), r.t.Context()
	var waiting, all, system int
	if err := pool.QueryRow(ctx, `SELECT count(*) FILTER (WHERE processed_at IS NULL), count(*) FROM (SELECT processed_at FROM outbox_messages UNION ALL SELECT processed_at FROM outbox_messages_archive) m`).
		Scan(&waiting, &all); err != nil || waiting > 0 || all != len(published) {
		r.t.Errorf("the outbox has %d messages, of which %d wait, and the streams have %d: %v", all, waiting, len(published), err)
	}
	follows := map[string]bool{}
	for id, e := range published {
		if event.System(e.AggregateType) {
			system++
		}
		if e.AggregateType == event.AggregateFollow {
			follows[id] = true
		}
	}
	r.await("the projections of both releases to have every event once", func() (n int, err error) {
		err = pool.QueryRow(ctx, `SELECT count(*) FROM svc.seen`).Scan(&n)
		return n, err
	}, len(published)-system-1)
	testkit.Eventually(r.t, time.Minute, "the handlers of both releases to have every follow", func() (bool, error) {
		missing := maps.Clone(follows)
		for _, id := range handled() {
			delete(missing, id)
		}
		if len(missing) > 0 || len(follows) == 0 {
			return false, fmt.Errorf("%d of %d are missing", len(missing), len(follows))
		}
		return true, nil
	})
}

// published reads every stream, and wants each event once and the versions of each entity in order, none left out.
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
	slices.Sort(names) // the streams of before the resize come first
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
				r.t.Errorf("%s, message %d: the event %s is there twice", name, seq, e.ID)
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

// identity is the entity of an event, and its version after it.
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
