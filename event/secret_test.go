package event

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestNoErrorOfAPayloadQuotesIt: such errors are logged, and payloads contain people's texts.
func TestNoErrorOfAPayloadQuotesIt(t *testing.T) {
	const secret = "zq7secret"
	e := Event{ID: "e", AggregateType: "comment", Type: "created", Version: 1, AggregateID: "7"}
	names := ChildNames{ID: "comment_id", Parent: "post_id"}
	good := map[string]any{"comment_id": "00000000-0000-4000-8000-000000000001", "post_id": "7", "slug": "a", "path": "a", "author_id": "3",
		"body": "b", "author_state": "ACTIVE",
		"moderation_state": "NONE", "version": 1, "created_at": "2030-01-01T00:00:00Z", "updated_at": "2030-01-01T00:00:00Z", "actor": "x",
		"parent_id": "00000000-0000-4000-8000-000000000002"}
	refused := 0
	for name := range good {
		for _, bad := range []any{secret, map[string]any{secret: secret}, []string{secret}} {
			payload := map[string]any{}
			for k, v := range good {
				payload[k] = v
			}
			payload[name] = bad
			b, err := json.Marshal(payload)
			if err != nil {
				t.Fatal(err)
			}
			for _, raw := range []string{string(b), strings.TrimSuffix(string(b), "}"), string(b) + secret, secret + string(b)} {
				e.Payload = []byte(raw)
				_, childErr := e.DecodeChild(names)
				_, edgeErr := (&Event{ID: "e", AggregateType: "follow", Type: "created", Version: 1, AggregateID: "7",
					Payload: e.Payload}).DecodeEdge(EdgeNames{From: "comment_id", To: "author_id"})
				for _, err := range []error{childErr, edgeErr, e.DecodePayload(new(Comment)), e.DecodePayload(new(Thread))} {
					if err != nil {
						refused++
						if strings.Contains(err.Error(), secret) {
							t.Errorf("%s: %v", raw, err)
						}
					}
				}
			}
		}
	}
	if refused < 200 {
		t.Errorf("only %d payloads were refused, too few for this test", refused)
	}
}
