package client

import (
	"context"
	"net/http"
)

// Call sends a request that the package has no method for, such as one of a newer API, as all others are sent: with the token, retries and typed errors. path
// begins with /v1/. body is encoded as JSON; nil is none. result is what JSON is decoded into, a *[]byte that gets the answer's body as it is, or nil. A POST is
// repeated when its outcome is unknown only with an IdempotencyKey.
func (c *Client) Call(ctx context.Context, method, path string, body, result any, opts ...Option) error {
	k := newCall(method, path, opts)
	k.safe = method != http.MethodPost || k.header.Get("Idempotency-Key") != ""
	if k.fresh = method == http.MethodGet; !k.fresh && method == http.MethodPost {
		k.subject = "" // what it made is at its Location
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
		if err := decode(nil, answered, result); err != nil {
			return a.broken(k, answered, err)
		}
	}
	return nil
}
