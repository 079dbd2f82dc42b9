package event_test

import (
	"fmt"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
)

func ExampleParseID() {
	id, err := event.ParseID("0196b2d4-7c00-7000-8000-000000000001")
	fmt.Println(id, err)
	fmt.Println(event.IDOf(42))
	// Output:
	// 0196b2d4-7c00-7000-8000-000000000001 <nil>
	// 42
}

// A reader without package subscribe decodes a message by its subject, headers and data.
func ExampleDecode() {
	e, err := event.Decode("events.0.t1.follow.created", map[string][]string{
		"ce-specversion":    {"1.0"},
		"ce-id":             {"00000000-0001-8f46-9cd0-3550f4453cf8"},
		"ce-type":           {"tidings.follow.created.v1"},
		"ce-source":         {"/tidings"},
		"ce-subject":        {"42"},
		"ce-time":           {"2026-05-01T12:30:00.123456Z"},
		"ce-tenant":         {"1"},
		"Tidings-Outbox-Id": {"1"},
	}, []byte(`{"follower_id": "7", "followee_id": "42", "status": "ACTIVE", "version": 1}`))
	fmt.Println(e.TenantID, e.AggregateType, e.AggregateID, e.Type, err)
	// Output: 1 follow 42 created <nil>
}

// A page about post 42 subscribes to the new comments on it, if relays have NATS_LIVE_OBJECTS=true.
func ExampleObjectSubject() {
	fmt.Println(event.ObjectSubject("live", 7, "comment", "created", "42"))
	fmt.Println(event.ObjectSubject("live", 7, "*", "*", "auth0|7"))
	// Output:
	// live.t7.comment.created.42
	// live.t7.*.*._YXV0aDB8Nw
}

// The payload of a test's own event.
func ExampleEdge_Encode() {
	follow, _ := kinds.Builtin().Edge("follow")
	payload, err := event.Edge{From: "7", To: "42", Status: "ACTIVE", Version: 1}.Encode(follow.Names())
	fmt.Println(string(payload[:42]), err)
	// Output: {"follower_id":"7","followee_id":"42","sta <nil>
}
