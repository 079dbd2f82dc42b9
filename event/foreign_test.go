package event_test

import (
	"maps"
	"testing"

	"github.com/tidings/tidings/event"
)

func TestOnlyARelaysMessageIsOurs(t *testing.T) {
	e := event.Event{ID: "8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3c", TenantID: 1, AggregateType: event.AggregateFollow, AggregateID: "2",
		Type: event.Created, Version: 1, OutboxID: 7}
	if !event.Ours(e.Headers()) {
		t.Error("Ours is false for the headers of an event")
	}
	named := maps.Clone(e.Headers())
	if e.SetHeaders(named, event.Naming{TypePrefix: "com.example", Source: "https://example.com/orders"}); !event.Ours(named) {
		t.Error("Ours is false for the headers of an upstream's event")
	}
	if event.Ours(nil) {
		t.Error("Ours is true without headers")
	}
	for name, bad := range map[string][]string{
		event.HeaderID: {"", "7", "8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3", "8b5f0d5e-3f1c-4c6a-9f55-0f6f0a1f2b3x",
			"8b5f0d5e+3f1c+4c6a+9f55+0f6f0a1f2b3c"},
		event.HeaderSource:   {""},
		event.HeaderOutboxID: {"", "x", "0", "-1", "9223372036854775808"},
	} {
		for _, value := range append(bad, "missing") {
			h := maps.Clone(e.Headers())
			if h[name] = []string{value}; value == "missing" {
				delete(h, name)
			}
			if event.Ours(h) {
				t.Errorf("Ours is true with %s %q", name, value)
			}
		}
	}
}
