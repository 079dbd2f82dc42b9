package api_test

import (
	"fmt"
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
			a := f.want(t, 201, "POST", fmt.Sprintf("/v1/%s/%s/%s", set.Objects[k.Parent], object, k.Plural),
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
	f, set, a := openKinds(t, true)
	f.fill(t, set)
	f.catchUpWith(t, a.Now)
	reader, stranger := f, f
	reader.token = f.newToken(t, tenant, "reader", tokens.RoleRead)
	stranger.token = f.newToken(t, tenant+1, "stranger", tokens.RoleRead)
	asked := []string{"42", "none", "7", "42", "1"}
	for object, plural := range set.Objects {
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
