package api_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/store"
)

// TestAllEdgesOfAnObjectAreRemoved requests the removal over HTTP and follows it to its end, for a
// user and for an object of a kind that exists only in this test.
func TestAllEdgesOfAnObjectAreRemoved(t *testing.T) {
	t.Parallel()
	f, _, applied := openKinds(t, true)
	for i := range 3 {
		f.want(t, 201, "PUT", fmt.Sprintf("/v1/follows/7/%d", 100+i), "")
		f.want(t, 201, "PUT", fmt.Sprintf("/v1/follows/%d/7", 200+i), "")
		f.want(t, 201, "PUT", fmt.Sprintf("/v1/visits/7/%d", 300+i), "")
		f.want(t, 201, "PUT", fmt.Sprintf("/v1/visits/%d/7", 400+i), "") // of the place 7
	}
	f.want(t, 204, "DELETE", "/v1/follows/7/100", "")
	f.want(t, 201, "PUT", "/v1/follows/100/200", "") // of other users

	asked := f.want(t, 202, "POST", "/v1/users/7:remove-edges", "", "Tidings-Actor: officer",
		"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
	location := asked.Header.Get("Location")
	if location != "/v1/edge-removals/"+asked.text("id") || asked.text("state") != "PENDING" || asked.text("actor") != "officer" ||
		asked.text("object_id") != "7" || asked.text("object") != "user" {
		t.Errorf("asked: %s, at %s", asked.body, location)
	}
	if again := f.want(t, 202, "POST", "/v1/users/7:remove-edges", `{}`); again.text("id") != asked.text("id") ||
		again.text("actor") != "officer" {
		t.Errorf("asked again: %s", again.body)
	}
	place := f.want(t, 202, "POST", "/v1/places/7:remove-edges", `{"kinds":["visit","visit"],"direction":"to"}`)
	if place.text("id") == asked.text("id") {
		t.Error("the removals of a user and a place are one")
	}
	for body, pointer := range map[string]string{
		`{"kinds":["visit"],"direction":"to"}`: "#/direction", `{"kinds":["nothing"]}`: "#/kinds/0", `{"kinds":[]}`: "#/kinds",
		`{"direction":"up"}`: "#/direction", `{"more":1}`: "#/more",
	} {
		a := f.want(t, 422, "POST", "/v1/users/7:remove-edges", body)
		if errs, _ := a.json["errors"].([]any); len(errs) == 0 || errs[0].(map[string]any)["pointer"] != pointer {
			t.Errorf("%s: %s", body, a.body)
		}
	}
	f.want(t, 422, "POST", "/v1/users/a,b:remove-edges", "")
	f.want(t, 404, "POST", "/v1/users/7:remove", "")
	f.want(t, 404, "POST", "/v1/users/7/:remove-edges", "")
	f.want(t, 404, "POST", "/v1/users/7/*:remove-edges", "")
	f.want(t, 405, "GET", "/v1/users/7:remove-edges", "")
	f.want(t, 422, "GET", "/v1/edge-removals/7", "")
	reader := f
	reader.token = f.newToken(t, tenant, "reader", tokens.RoleRead)
	reader.want(t, 403, "POST", "/v1/users/7:remove-edges", "")
	stranger := f
	stranger.token = f.newToken(t, 2, "stranger", tokens.Roles()...)
	stranger.want(t, 404, "GET", location, "")

	remover, err := store.NewRemover(f.system, nil, applied.Now, testkit.Logger(t), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- remover.Run(ctx) }()
	for path, want := range map[string]map[string]any{
		location:                     {"follow": 5.0, "visit": 3.0},
		place.Header.Get("Location"): {"visit": 3.0},
	} {
		var a answer
		testkit.Eventually(t, "the removal to end", func() (bool, error) {
			a = reader.want(t, 200, "GET", path, "")
			return a.text("state") == "DONE", nil
		})
		if diff := cmp.Diff(want, a.json["removed"]); diff != "" || a.text("finished_at") == "" {
			t.Errorf("%s (-want +got):\n%s", a.body, diff)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	f.want(t, 404, "GET", "/v1/follows/200/7", "")
	f.want(t, 404, "GET", "/v1/visits/7/300", "")
	f.want(t, 404, "GET", "/v1/visits/400/7", "")
	f.want(t, 200, "GET", "/v1/follows/100/200", "")
	removals := 0
	for _, e := range append(f.edgeEvents(t, "follow"), f.edgeEvents(t, "visit")...) {
		if e.Type == event.Removed && e.Payload["actor"] == "officer" && e.Payload["version"] == 2.0 {
			removals++
		}
	}
	if removals != 8 {
		t.Errorf("%d events of removals by the officer, want 8", removals)
	}
	if next := f.want(t, 202, "POST", "/v1/users/7:remove-edges", ""); next.text("id") == asked.text("id") {
		t.Error("a removal that is done was answered to another request")
	}
}
