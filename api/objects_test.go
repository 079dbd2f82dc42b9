package api_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
)

// fill writes edges of all kinds and children of all kinds, to and from a few objects.
func (f fixture) fill(t *testing.T, set *kinds.Set) {
	t.Helper()
	for _, k := range set.AllEdges() {
		if k.ToChild {
			continue // ranks_test.go has these
		}
		for _, pair := range []string{"7/42", "8/42", "7/43", "42/7", "9/1"} {
			f.want(t, 201, "PUT", "/v1/"+k.Plural+"/"+pair, "")
		}
		f.want(t, 204, "DELETE", "/v1/"+k.Plural+"/8/42", "")
	}
	for _, k := range set.AllChildren() {
		for i, object := range []string{"42", "42", "7"} {
			attributes := ""
			if names := k.Aggregates(); len(names) > 0 {
				attributes = fmt.Sprintf(`,"attributes":{%q:%d}`, names[0], 2+i)
			}
			a := f.want(t, 201, "POST", fmt.Sprintf("/v1/%s/%s/%s", set.Plural(k.Parent), object, k.Plural),
				fmt.Sprintf(`{"author_id":"%d","body":"x"%s}`, i+1, attributes))
			if i == 1 {
				f.want(t, 204, "DELETE", "/v1/"+k.Plural+"/"+a.text(k.Names().ID), "", `If-Match: "1"`)
			}
		}
	}
}

// TestCountsOfManyAreThoseOfEach compares the counts of many objects with those of each, for the
// built-in objects and one of a file.
func TestCountsOfManyAreThoseOfEach(t *testing.T) {
	t.Parallel()
	f, set, a := openKinds(t, true)
	f.fill(t, set)
	f.catchUpWith(t, a.Now)
	reader, stranger := f, f
	reader.token = f.newToken(t, tenant, "reader", tokens.RoleRead)
	stranger.token = f.newToken(t, tenant+1, "stranger", tokens.RoleRead)
	asked := []string{"42", "none", "7", "42", "1"}
	for object := range set.Objects {
		plural := set.Plural(object)
		path := "/v1/" + plural + ":counts"
		var want []any
		for _, id := range asked {
			one := reader.want(t, 200, "GET", "/v1/"+plural+"/"+id+"/counts", "").json
			delete(one, "as_of")
			want = append(want, map[string]any{"id": id, "counts": one})
		}
		got := reader.want(t, 200, "POST", path, `{"ids":["42","none","7","42","1"]}`)
		if diff := cmp.Diff(want, got.json["items"]); diff != "" || got.text("as_of") == "" {
			t.Errorf("%s (-want +got):\n%s", plural, diff)
		}
		zero := itemsOf(got)[1]["counts"]
		if cmp.Equal(itemsOf(got)[0]["counts"], zero) {
			t.Errorf("%s: nothing is counted: %s", plural, got.body)
		}
		for _, item := range itemsOf(stranger.want(t, 200, "POST", path, `{"ids":["42","7"]}`)) {
			if diff := cmp.Diff(zero, item["counts"]); diff != "" {
				t.Errorf("%s: another tenant counts (-none +got):\n%s", object, diff)
			}
		}
		if many := itemsOf(reader.want(t, 200, "POST", path, ids(200))); len(many) != 200 || many[199]["id"] != "9223372036854775608" {
			t.Errorf("%s: %d items, the last %v", object, len(many), many[len(many)-1])
		}
	}
	got := itemsOf(f.want(t, 200, "POST", "/v1/places:counts", `{"ids":["42"]}`))[0]["counts"]
	want := map[string]any{"guests": 1.0, "notes": map[string]any{"total": 2.0, "visible": 1.0},
		"reports": map[string]any{"total": 2.0, "visible": 1.0,
			"aggregates": map[string]any{"stars": map[string]any{"count": 1.0, "sum": 2.0}}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("counts of a place (-want +got):\n%s", diff)
	}
}

// TestCountsOfManyIncludeTheWritesOfTokens has no consumer.
func TestCountsOfManyIncludeTheWritesOfTokens(t *testing.T) {
	t.Parallel()
	f := open(t)
	like := f.want(t, 201, "PUT", "/v1/likes/7/42", "").Header.Get("Tidings-Token")
	comment := f.want(t, 201, "POST", "/v1/posts/42/comments", `{"author_id":"3","body":"x"}`).Header.Get("Tidings-Token")
	for token, want := range map[string][2]float64{like: {1, 0}, comment: {0, 1}, like + ", " + comment: {1, 1}} {
		counts := itemsOf(f.want(t, 200, "POST", "/v1/posts:counts", `{"ids":["1","42"]}`, "Tidings-Token: "+token))[1]["counts"]
		got := counts.(map[string]any)
		if got["likers"] != want[0] || got["comments"].(map[string]any)["visible"] != want[1] {
			t.Errorf("%v, want %v", got, want)
		}
	}
}

// TestCountsAreAsOldAsTheOlderProjection has one of the two projections behind, in turn.
func TestCountsAreAsOldAsTheOlderProjection(t *testing.T) {
	t.Parallel()
	f := &asOfTest{fixture: open(t)}
	consumers := []string{followercounts.Name, threadcache.Name}
	f.publish(t, "true")
	for _, c := range consumers {
		f.apply(t, c)
	}
	if err := f.Handler.(*api.Handler).Look(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, behind := range consumers {
		before := f.now(t)
		f.want(t, 201, "PUT", "/v1/likes/7/"+behind, "")
		f.want(t, 201, "POST", "/v1/posts/"+behind+"/comments", `{"author_id":"3","body":"x"}`)
		written := f.now(t)
		f.publish(t, "true")
		for _, c := range consumers {
			if c != behind {
				f.apply(t, c)
			}
		}
		ahead := map[string]string{followercounts.Name: threadPath, threadcache.Name: mutualsPath}[behind]
		if at := f.asOf(t, ahead); at.Before(written) {
			t.Errorf("%s is the one behind, and the other one is at %s", behind, at)
		}
		one := f.want(t, 200, "GET", "/v1/posts/42/counts", "").text("as_of")
		many := f.want(t, 200, "POST", "/v1/posts:counts", `{"ids":["42"]}`).text("as_of")
		at, err := time.Parse(time.RFC3339Nano, many)
		if err != nil || at.After(written) || at.Before(before.Add(-time.Hour)) || one != many {
			t.Errorf("%s is behind: as_of %s and %s, written at %s", behind, one, many, written)
		}
		f.apply(t, behind)
	}
}

// edgeWords returns the members active and reversed of the kind's own check.
func edgeWords(k kinds.Edge) (active, reversed string) {
	if k.Name == "follow" {
		return "following", "followed_by"
	}
	return "active", "reversed"
}

// TestAnObjectIsCheckedForAllKindsAtOnce compares the check of many objects with the check of each
// kind, and the attributes with those of the edge.
func TestAnObjectIsCheckedForAllKindsAtOnce(t *testing.T) {
	t.Parallel()
	f, set, a := openKinds(t, true)
	f.fill(t, set)
	f.want(t, 200, "PUT", "/v1/visits/7/42", `{"role":"regular","seat":3}`)
	f.catchUpWith(t, a.Now)
	reader, stranger := f, f
	reader.token = f.newToken(t, tenant, "reader", tokens.RoleRead)
	stranger.token = f.newToken(t, tenant+1, "stranger", tokens.RoleRead)
	asked := []string{"42", "none", "7", "43", "42"}
	const body = `{"user_id":"7","ids":["42","none","7","43","42"]`
	for object := range set.Objects {
		plural := set.Plural(object)
		var want []any
		for _, id := range asked {
			edges := make(map[string]any)
			for _, k := range set.AllEdges() {
				if k.To != object {
					continue
				}
				active, reversed := edgeWords(k)
				check := itemsOf(f.want(t, 200, "POST", "/v1/"+k.Plural+":check",
					fmt.Sprintf(`{"pairs":[{%q:"7",%q:%q}]}`, k.Ends[0], k.Ends[1], id)))[0]
				link := map[string]any{"active": check[active]}
				if k.From == k.To {
					link["reversed"] = check[reversed]
				}
				if check[active] == true {
					link["positioned_at"] = check["positioned_at"]
					if len(k.Attributes) > 0 {
						link["attributes"] = f.want(t, 200, "GET", "/v1/"+k.Plural+"/7/"+id, "").json["attributes"]
					}
				}
				edges[k.Name] = link
			}
			want = append(want, map[string]any{"id": id, "edges": edges})
		}
		path := "/v1/" + plural + ":check"
		if len(want[0].(map[string]any)["edges"].(map[string]any)) == 0 {
			f.want(t, 404, "POST", path, body+"}") // no edge leads to the object
			continue
		}
		got := reader.want(t, 200, "POST", path, body+"}")
		if diff := cmp.Diff(want, got.json["items"]); diff != "" || got.text("as_of") == "" {
			t.Errorf("%s (-want +got):\n%s", plural, diff)
		}
		for i, item := range itemsOf(stranger.want(t, 200, "POST", path, body+"}")) {
			for name, link := range item["edges"].(map[string]any) {
				if link.(map[string]any)["active"] != false || link.(map[string]any)["reversed"] == true || item["id"] != asked[i] {
					t.Errorf("%s: another tenant has a %s: %v", plural, name, item)
				}
			}
		}
		if many := itemsOf(f.want(t, 200, "POST", path, strings.Replace(ids(200), "{", `{"user_id":"7",`, 1))); len(many) != 200 ||
			many[199]["id"] != "9223372036854775608" {
			t.Errorf("%s: %d items", plural, len(many))
		}
	}
	got := f.want(t, 200, "POST", "/v1/posts:check", body+`,"edges":["share"]}`)
	for i, item := range itemsOf(got) {
		if edges := item["edges"].(map[string]any); len(edges) != 1 || edges["share"] == nil || item["id"] != asked[i] {
			t.Errorf("only shares: %v", item)
		}
	}
	visit := itemsOf(f.want(t, 200, "POST", "/v1/places:check", body+"}"))[0]["edges"].(map[string]any)["visit"]
	if diff := cmp.Diff(map[string]any{"role": "regular", "seat": 3.0}, visit.(map[string]any)["attributes"]); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
}

// TestAnObjectWithSeveralOriginsIsCheckedFromOne has edges from users, groups and places to places.
func TestAnObjectWithSeveralOriginsIsCheckedFromOne(t *testing.T) {
	t.Parallel()
	f, _, a := openKindsOf(t, `
objects: {place: places}
edges:
  visit: {plural: visits, from: user, to: place, forward: visited, reverse: guests}
  tour: {plural: tours, from: group, to: place, forward: stops, reverse: tourists}
  road: {plural: roads, from: place, to: place, ends: [start_id, end_id], forward: leads_to, reverse: reached_from, self: true}
`, true)
	for _, path := range []string{"visits/7/1", "tours/7/2", "roads/7/3", "roads/3/7", "roads/7/7"} {
		f.want(t, 201, "PUT", "/v1/"+path, "")
	}
	f.catchUpWith(t, a.Now)
	for origin, want := range map[string][]string{"user": {"visit 1"}, "group": {"tour 2"}, "place": {"road 3 back", "road 7 back"}} {
		got := f.want(t, 200, "POST", "/v1/places:check", fmt.Sprintf(`{"%s_id":"7","ids":["1","2","3","7"]}`, origin))
		var found []string
		for _, item := range itemsOf(got) {
			edges := item["edges"].(map[string]any)
			if len(edges) != 1 {
				t.Errorf("from a %s: %v", origin, edges)
			}
			for name, l := range edges {
				if link := l.(map[string]any); link["active"] == true {
					text := name + " " + item["id"].(string)
					if link["reversed"] == true {
						text += " back"
					}
					found = append(found, text)
				}
			}
		}
		if diff := cmp.Diff(want, found); diff != "" {
			t.Errorf("from a %s (-want +got):\n%s", origin, diff)
		}
	}
	for body, at := range map[string]string{`{"ids":["1"]}`: "#", `{"user_id":"7","group_id":"7","ids":["1"]}`: "#",
		`{"user_id":"7","ids":["1"],"edges":["visit","road"]}`: "#/edges/1", `{"group_id":"a,b","ids":["1"]}`: "#/group_id",
		`{"group_id":"..","ids":["1"]}`: "#/group_id"} {
		if a := f.want(t, 422, "POST", "/v1/places:check", body); !strings.Contains(a.body, fmt.Sprintf(`"pointer":%q`, at)) {
			t.Errorf("%s: %s", body, a.body)
		}
	}
	if text := f.want(t, 200, "GET", "/v1/openapi.json", "", "Authorization").body; !strings.Contains(text,
		"The body has one of `group_id`, `place_id`, `user_id`.") {
		t.Error("the document does not say that the body has one origin")
	}
}

// TestAnObjectIsCheckedWithTheWriteOfAToken has no consumer.
func TestAnObjectIsCheckedWithTheWriteOfAToken(t *testing.T) {
	t.Parallel()
	f := open(t)
	token := f.want(t, 201, "PUT", "/v1/memberships/7/42", `{"role":"owner"}`).Header.Get("Tidings-Token")
	for header, want := range map[string]string{"X-Nothing": `"active":false}`, "Tidings-Token: " + token: `"role":"owner"`} {
		if a := f.want(t, 200, "POST", "/v1/groups:check", `{"user_id":"7","ids":["42"]}`, header); !strings.Contains(a.body, want) {
			t.Errorf("%s: %s", header, a.body)
		}
	}
}
