package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"

	"github.com/prometheus/client_golang/prometheus"
)

// ownKinds are kinds that exist only in tests.
const ownKinds = `
objects: {place: places}
edges:
  visit:
    plural: visits
    from: user
    to: place
    ends: [guest_id, place_id]
    forward: visited
    reverse: guests
    attributes:
      role: {enum: [passer, regular], default: passer, filter: true}
      seat: {type: integer, minimum: 1, maximum: 100}
  praise: {plural: praises, from: user, to: report, ends: [fan_id, report_id], forward: praised_reports, reverse: fans}
children:
  report:
    plural: reports
    parent: place
    threaded: true
    moderated: true
    one_per_author: true
    attributes:
      stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}
      mood: {enum: [calm, cross], default: calm}
      again: {type: boolean}
  note: {plural: notes, parent: place, threaded: true}
`

// applied has kinds that change while the API runs. Refresh puts the applied kinds in force.
type applied struct {
	next, now atomic.Pointer[kinds.Set]
	looks     atomic.Int64
}

func (a *applied) Now() *kinds.Set { return a.now.Load() }

func (a *applied) Refresh(context.Context) (bool, error) {
	a.looks.Add(1)
	next := a.next.Load()
	return a.now.Swap(next) != next, nil
}

// openKinds is open with ownKinds, which are in force from the start or from the first read of the
// kinds on.
func openKinds(t *testing.T, fromTheStart bool) (fixture, *kinds.Set, *applied) {
	t.Helper()
	return openKindsOf(t, ownKinds, fromTheStart)
}

func openKindsOf(t *testing.T, file string, fromTheStart bool) (fixture, *kinds.Set, *applied) {
	t.Helper()
	set := testkit.Kinds(t, file)
	a := new(applied)
	a.now.Store(kinds.Builtin())
	a.next.Store(set)
	if fromTheStart {
		a.now.Store(set)
	}
	db := testkit.Postgres(t)
	f := fixture{system: db.Pool(t, postgres.RoleSystem), owner: db.Pool(t, postgres.RoleOwner), pool: db.Pool(t, postgres.RoleAPI),
		reg: prometheus.NewRegistry()}
	if _, err := catalog.Apply(t.Context(), catalog.Databases{Truth: f.system, Projections: f.system},
		catalog.Request{Kinds: set, Actor: "t"}); err != nil {
		t.Fatal(err)
	}
	own := []projections.Projection{followercounts.New(a.Now), threadcache.New(a.Now)}
	deps := api.Deps{Store: store.New(f.pool, nil), Tokens: f.pool, DLQ: outbox.NewDLQ(f.pool, nil), Projections: f.pool, Fleet: own,
		Kinds: a, Log: testkit.Logger(t), Reg: f.reg}
	var err error
	if f.Handler, err = api.New(config(), deps); err != nil {
		t.Fatal(err)
	}
	f.token = f.newToken(t, tenant, "tester", tokens.Roles()...)
	return f, set, a
}

type edgeEvent struct {
	Aggregate string
	ID        string
	Type      string
	Payload   map[string]any
}

func (f fixture) edgeEvents(t *testing.T, kind string) (all []edgeEvent) {
	t.Helper()
	rows, err := f.system.Query(t.Context(), `SELECT aggregate_type, aggregate_id, event_type, payload FROM outbox_messages
		WHERE aggregate_type = $1 ORDER BY id`, kind)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var e edgeEvent
		if err := rows.Scan(&e.Aggregate, &e.ID, &e.Type, &e.Payload); err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	if rows.Err() != nil {
		t.Fatal(rows.Err())
	}
	return all
}

// TestEdgesOfEveryKindGoThroughTheirRoutes writes, reads, checks and removes edges of each kind.
// One kind exists only in this test.
func TestEdgesOfEveryKindGoThroughTheirRoutes(t *testing.T) {
	t.Parallel()
	f, set, _ := openKinds(t, true)
	stranger := f
	stranger.token = f.newToken(t, tenant+1, "stranger", tokens.Roles()...)
	for _, k := range set.AllEdges() {
		t.Run(k.Name, func(t *testing.T) {
			targets, attributes := f.targets(t, set, k, 3), ""
			if own := edgeAttributes(k); strings.Contains(fmt.Sprint(own), "value") {
				attributes = own[0]
			}
			to, one := targets[0], "/v1/"+k.Plural+"/7/"+targets[0]
			first := f.want(t, 201, "PUT", one, attributes)
			if first.text(k.Ends[0]) != "7" || first.text(k.Ends[1]) != to || first.json["version"] != 1.0 ||
				first.Header.Get("ETag") != `"1"` || first.Header.Get("Tidings-Token") == "" {
				t.Errorf("PUT: %v %s", first.Header, first.body)
			}
			if again := f.want(t, 200, "PUT", one, attributes); again.body != first.body {
				t.Errorf("PUT again: %s", again.body)
			}
			if got := f.want(t, 200, "GET", one, ""); got.body != first.body || got.Header.Get("ETag") != `"1"` {
				t.Errorf("GET: %s", got.body)
			}
			f.want(t, 304, "GET", one, "", `If-None-Match: "1"`)
			if a := stranger.do(t, "GET", one, ""); a.StatusCode != 404 {
				t.Errorf("another tenant: %d", a.StatusCode)
			}
			stranger.want(t, 204, "DELETE", one, "")
			f.want(t, 204, "DELETE", one, "")
			f.want(t, 204, "DELETE", one, "")
			f.want(t, 404, "GET", one, "")
			f.want(t, 204, "DELETE", "/v1/"+k.Plural+"/8/"+to, "")
			if back := f.want(t, 201, "PUT", one, attributes); back.json["version"] != 3.0 {
				t.Errorf("PUT of a removed one: %s", back.body)
			}
			self := f.do(t, "PUT", "/v1/"+k.Plural+"/9/9", attributes)
			code := map[bool]string{false: "self-follow", true: "validation-failed"}[k.ToChild]
			if refused := self.StatusCode == 422; refused != (k.NoSelf() || k.ToChild) || refused &&
				(!strings.Contains(self.body, k.Ends[1]) || self.text("code") != code) {
				t.Errorf("to itself: %d %s", self.StatusCode, self.body)
			}
			if bad := f.want(t, 422, "PUT", "/v1/"+k.Plural+"/a,b/"+to, attributes); !strings.Contains(bad.body,
				fmt.Sprintf(`"parameter":%q`, k.Ends[0])) {
				t.Errorf("a bad id: %s", bad.body)
			}

			var types []string
			for _, e := range f.edgeEvents(t, k.Name) {
				if e.Payload[k.Ends[0]] != "7" {
					continue
				}
				types = append(types, e.Type)
				if e.ID != to || e.Payload[k.Ends[1]] != to || e.Payload["actor"] != "tester" ||
					(e.Payload["attributes"] != nil) != (len(k.Attributes) > 0) {
					t.Errorf("event %+v", e)
				}
			}
			if diff := cmp.Diff([]string{"created", "removed", "created"}, types); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}

			const put, remove = "put", "remove"
			op := func(op, from, to string) string {
				more := ""
				if op == put && attributes != "" {
					more = `,"attributes":` + attributes
				}
				return fmt.Sprintf(`{"op":%q,%q:%q,%q:%q%s}`, op, k.Ends[0], from, k.Ends[1], to, more)
			}
			batch := f.want(t, 200, "POST", "/v1/"+k.Plural+":batch",
				`{"operations":[`+strings.Join([]string{op(put, "7", targets[1]), op(put, "7", targets[1]),
					op(remove, "7", targets[1]), op(put, "..", to), op("nope", "1", to)}, ",")+`]}`)
			items := itemsOf(batch)
			var statuses []any
			for _, i := range items {
				statuses = append(statuses, i["status"])
			}
			if diff := cmp.Diff([]any{201.0, 200.0, 204.0, 422.0, 422.0}, statuses); diff != "" {
				t.Errorf("batch (-want +got):\n%s in %s", diff, batch.body)
			}
			if entity, _ := items[0][k.Name].(map[string]any); entity[k.Ends[1]] != targets[1] || items[0]["token"] == nil {
				t.Errorf("batch: %v", items[0])
			}
			check := f.want(t, 200, "POST", "/v1/"+k.Plural+":check",
				fmt.Sprintf(`{"pairs":[{%q:"7",%q:%q},{%[1]q:"1",%[2]q:%[4]q}]}`, k.Ends[0], k.Ends[1], to, targets[2]))
			if items := itemsOf(check); len(items) != 2 || items[1][k.Ends[1]] != targets[2] {
				t.Errorf("check: %s", check.body)
			}
			for _, path := range []string{set.Plural(k.To) + "/" + to + "/" + k.Reverse, set.Plural(k.From) + "/7/" + k.Forward,
				k.Plural + "/7/" + to + "/versions", set.Plural(k.To) + "/" + to + "/counts"} {
				f.want(t, 200, "GET", "/v1/"+path, "")
			}
			if counts := f.want(t, 200, "GET", "/v1/"+set.Plural(k.To)+"/"+to+"/counts", ""); counts.json[k.Reverse] == nil {
				t.Errorf("counts: %s", counts.body)
			}
		})
	}
}

// targets returns ids to which edges of the kind may lead: for edges to children, those of new
// children.
func (f fixture) targets(t *testing.T, set *kinds.Set, k kinds.Edge, n int) (all []string) {
	t.Helper()
	child, is := set.Child(k.To)
	for i := range n {
		if !is {
			all = append(all, fmt.Sprint(42+i))
			continue
		}
		under := fmt.Sprintf("/v1/%s/5/%s", set.Plural(child.Parent), child.Plural)
		all = append(all, f.want(t, 201, "POST", under, fmt.Sprintf(`{"author_id":"%d","body":"body"}`, 100+i)).text(child.Names().ID))
	}
	return all
}

func TestAttributesOfAnEdge(t *testing.T) {
	t.Parallel()
	f, _, _ := openKinds(t, true)
	const one = "/v1/visits/7/42"
	attributes := func(a answer, want string) {
		t.Helper()
		got, err := json.Marshal(a.json["attributes"])
		if err != nil || string(got) != want {
			t.Errorf("attributes %s, want %s", got, want)
		}
	}
	attributes(f.want(t, 201, "PUT", one, `{"seat":3}`), `{"role":"passer","seat":3}`)
	attributes(f.want(t, 200, "PUT", one, ``), `{"role":"passer","seat":3}`)
	same := f.want(t, 200, "PUT", one, `{"seat":3,"role":"passer"}`)
	if same.Header.Get("ETag") != `"1"` {
		t.Errorf("the same again: %s", same.body)
	}
	attributes(f.want(t, 200, "PUT", one, `{"role":"regular"}`), `{"role":"regular"}`)
	attributes(f.want(t, 200, "PATCH", one, `{"seat":5}`, `If-Match: "2"`), `{"role":"regular","seat":5}`)
	attributes(f.want(t, 200, "PATCH", one, `{"role":null}`, `If-Match: *`), `{"role":"passer","seat":5}`)
	attributes(f.want(t, 200, "PATCH", one, `{"role":"passer"}`, `If-Match: "4"`), `{"role":"passer","seat":5}`)
	attributes(f.want(t, 200, "GET", one, ``), `{"role":"passer","seat":5}`)

	for name, c := range map[string]struct {
		method, body, header string
		status               int
		code, at             string
	}{
		"a change without a version":      {"PATCH", `{"seat":1}`, "", 428, "if-match-missing", ""},
		"a change of an old version":      {"PATCH", `{"seat":1}`, `If-Match: "3"`, 412, "version-stale", `"seat":5`},
		"a change of a foreign tag":       {"PATCH", `{"seat":1}`, `If-Match: W/"4"`, 412, "version-stale", ""},
		"a put of an old version":         {"PUT", `{"seat":1}`, `If-Match: "3"`, 412, "version-stale", `"seat":5`},
		"a removal of an old version":     {"DELETE", ``, `If-Match: "3"`, 412, "version-stale", `"seat":5`},
		"no tag":                          {"PUT", ``, `If-Match: 4`, 400, "header-invalid", "If-Match"},
		"a value that is not of the enum": {"PUT", `{"role":"king"}`, "", 422, "validation-failed", `"#/role"`},
		"a number out of bounds":          {"PUT", `{"seat":101}`, "", 422, "validation-failed", `"#/seat"`},
		"an attribute that is not there":  {"PUT", `{"hat":1}`, "", 422, "validation-failed", `"#/hat"`},
		"an integer that is none":         {"PATCH", `{"seat":1.5}`, `If-Match: *`, 422, "validation-failed", `"#/seat"`},
		"no object":                       {"PUT", `[]`, "", 422, "validation-failed", `"#"`},
		"no JSON":                         {"PUT", `{`, "", 400, "json-invalid", ""},
	} {
		headers := []string{}
		if c.header != "" {
			headers = append(headers, c.header)
		}
		a := f.do(t, c.method, one, c.body, headers...)
		if a.StatusCode != c.status || a.text("code") != c.code || !strings.Contains(a.body, c.at) {
			t.Errorf("%s: %d %s, want %d %s with %s", name, a.StatusCode, a.body, c.status, c.code, c.at)
		}
	}
	f.want(t, 404, "PATCH", "/v1/visits/7/43", `{"seat":1}`, `If-Match: *`)
	f.want(t, 404, "PUT", "/v1/visits/7/43", `{"seat":1}`, `If-Match: "1"`)
	f.want(t, 204, "DELETE", one, "", `If-Match: "4"`)
	f.want(t, 404, "PATCH", one, `{"seat":1}`, `If-Match: *`)
	attributes(f.want(t, 201, "PUT", one, ``), `{"role":"passer"}`) // a new edge has the default role
	f.want(t, 200, "GET", "/v1/places/42/guests?role=regular", "")
	for _, query := range []string{"role=king", "seat=1", "filter=x"} {
		if a := f.want(t, 422, "GET", "/v1/places/42/guests?"+query, ""); !strings.Contains(a.body,
			`"parameter":"`+strings.Split(query, "=")[0]+`"`) {
			t.Errorf("%s: %s", query, a.body)
		}
	}
	batch := f.want(t, 200, "POST", "/v1/visits:batch", `{"operations":[
		{"op":"put","guest_id":"7","place_id":"42","attributes":{"seat":9}},
		{"op":"put","guest_id":"7","place_id":"42","attributes":{"seat":8},"if_match":1},
		{"op":"put","guest_id":"7","place_id":"44","attributes":{"role":"king"}},
		{"op":"remove","guest_id":"7","place_id":"42","if_match":"*"}]}`)
	items := itemsOf(batch)
	if items[0]["status"] != 200.0 || items[1]["status"] != 412.0 || items[2]["status"] != 422.0 || items[3]["status"] != 204.0 ||
		!strings.Contains(fmt.Sprint(items[2]), "#/attributes/role") {
		t.Errorf("batch: %s", batch.body)
	}

	var types []string
	version := 0.0
	for _, e := range f.edgeEvents(t, "visit") {
		types = append(types, e.Type)
		if version++; e.Payload["version"] != version {
			t.Errorf("%+v: want version %v", e, version)
		}
	}
	want := []string{"created", "updated", "updated", "updated", "removed", "created", "updated", "removed"}
	if diff := cmp.Diff(want, types); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

// TestRacingChangesOfAttributesAreAllThere lets writers change different attributes of one edge.
// With * no change is lost; with a version one writer wins.
func TestRacingChangesOfAttributesAreAllThere(t *testing.T) {
	t.Parallel()
	f, _, _ := openKinds(t, true)
	const one, writers = "/v1/visits/7/42", 4
	f.want(t, 201, "PUT", one, `{"seat":1}`)
	var won, lost, refused atomic.Int64
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range 10 {
				switch a := f.do(t, "PATCH", one, fmt.Sprintf(`{"seat":%d}`, 2+w*20+i), fmt.Sprintf(`If-Match: "%d"`, 1+i)); a.StatusCode {
				case http.StatusOK:
					won.Add(1)
				case http.StatusPreconditionFailed:
					lost.Add(1)
				default:
					refused.Add(1)
					t.Errorf("%d %s", a.StatusCode, a.body)
				}
			}
		})
	}
	wg.Wait()
	events := f.edgeEvents(t, "visit")
	last := f.want(t, 200, "GET", one, "")
	if int64(len(events)) != 1+won.Load() || last.json["version"] != float64(len(events)) || won.Load() == 0 || lost.Load() == 0 {
		t.Errorf("%d won, %d lost, %d events, at last %s", won.Load(), lost.Load(), len(events), last.body)
	}
	for i, e := range events {
		if e.Payload["version"] != float64(i+1) {
			t.Errorf("event %d: %v", i, e.Payload)
		}
	}
	// Several writers put the same edge at once: one creates it.
	var created atomic.Int64
	for w := range writers {
		wg.Go(func() {
			if a := f.do(t, "PUT", "/v1/visits/8/42", fmt.Sprintf(`{"seat":%d}`, w+1)); a.StatusCode == 201 {
				created.Add(1)
			} else if a.StatusCode != 200 {
				t.Errorf("%d %s", a.StatusCode, a.body)
			}
		})
	}
	wg.Wait()
	if got := f.want(t, 200, "GET", "/v1/visits/8/42", ""); created.Load() != 1 || got.json["version"] != float64(writers) {
		t.Errorf("%d created, %s", created.Load(), got.body)
	}
}

// TestAKindAppearsWithoutARestart applies a kind while the API runs. A request for its path makes
// the API read the kinds. The routes of other kinds continue to work. A path of no kind causes at
// most one read a second.
func TestAKindAppearsWithoutARestart(t *testing.T) {
	t.Parallel()
	f, set, a := openKinds(t, false)
	before := f.want(t, 200, "GET", "/v1/kinds", "")
	if strings.Contains(before.body, "visit") {
		t.Fatal(before.body)
	}
	f.want(t, 304, "GET", "/v1/kinds", "", "If-None-Match: "+before.Header.Get("ETag"))
	began := time.Now()
	f.want(t, 201, "PUT", "/v1/visits/7/42", "")
	if looks := a.looks.Load(); looks != 1 {
		t.Errorf("%d looks", looks)
	}
	for range 20 {
		if got := f.want(t, 404, "GET", "/v1/nothing/7/42", ""); got.text("code") != "route-unknown" {
			t.Fatal(got.body)
		}
	}
	if looks, took := a.looks.Load(), time.Since(began); looks > 1+int64(took/time.Second) {
		t.Errorf("%d looks within %s, want one a second", looks, took)
	}
	after := f.want(t, 200, "GET", "/v1/kinds", "", "If-None-Match: "+before.Header.Get("ETag"))
	if !strings.Contains(after.body, `"name":"visit"`) ||
		!strings.Contains(f.want(t, 200, "GET", "/v1/openapi.json", "", "Authorization").body, "/v1/visits/{guest_id}/{place_id}") {
		t.Errorf("the kind is missing in the list: %s", after.body)
	}
	f.want(t, 201, "PUT", "/v1/follows/7/42", "")

	// Kinds whose routes collide are not served. The previous kinds continue to be served.
	broken := *set
	broken.Edges = map[string]kinds.Edge{}
	for name, k := range set.Edges {
		broken.Edges[name] = k
	}
	clash := set.Edges["visit"]
	clash.Name, clash.Plural = "comment", "comments"
	broken.Edges["clash"] = clash
	a.now.Store(&broken)
	f.want(t, 200, "GET", "/v1/visits/7/42", "")
}
