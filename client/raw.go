package client

import (
	"context"
	"encoding/json"
	"net/http"
)

// Call sends a request that the package has no method for, for example of a newer API. It uses the
// token, the retries and the typed errors of all other calls. path begins with /v1/. body is
// encoded as JSON, unless it is nil. The answer is decoded from JSON into result; a *[]byte gets
// the raw body, and nil discards it. If the outcome of a POST is unknown, Call repeats it only with
// an IdempotencyKey.
func (c *Calls) Call(ctx context.Context, method, path string, body, result any, opts ...Option) error {
	k := newCall(method, path, opts)
	k.safe = method != http.MethodPost || k.header.Get("Idempotency-Key") != ""
	if k.session = method == http.MethodGet; !k.session && method == http.MethodPost {
		k.subject = "" // the answer's Location names the created entity
	}
	if body != nil {
		k.json(body)
	}
	answered, a, err := c.core.do(ctx, k)
	if err != nil {
		return err
	}
	switch result := result.(type) {
	case nil:
	case *[]byte:
		*result = answered
	default:
		if err := json.Unmarshal(answered, result); err != nil {
			return a.broken(k, answered, err)
		}
	}
	return nil
}
