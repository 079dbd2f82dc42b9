// Package client calls the HTTP API of Tidings. It is for callers of the API. It is supported:
// CHANGELOG.md names every change that a program of yours would notice.
//
//	c, err := client.New("https://tidings.example", client.WithToken(token))
//	follow, err := c.Follows.Put(ctx, "7", "42")
//	for follower, err := range c.Follows.Followers("42").All(ctx) { ... }
//
// Every operation of every built-in kind is a typed method: [Client.Follows], [Client.Likes],
// [Client.Comments] and others. [Client.Edges] and [Client.Children] have the operations of any
// other kind, which you name.
//
//	method ─ options ─ attempt ─┬─ 2xx            typed result, [Response] on demand
//	            ▲               ├─ problem        *[Problem]: branch on Code
//	            └── back-off ───┤─ other answer   *[AnswerError]: a proxy's page, a broken body
//	                            └─ no answer      *[TransportError]
//
// The client retries 429 and 503 after Retry-After, and a lost connection if a repeated request is
// safe. A create is safe to repeat, because all its attempts have one Idempotency-Key. The client
// never repeats a request whose context has ended.
//
// A [Session] makes a caller's reads include their own writes: it keeps the Tidings-Tokens of
// writes and sends them with reads.
//
// The package depends on the standard library and on package event. A Client and a Session are safe
// for concurrent use; a [List] is not.
package client

//go:generate go run ../internal/clientgen
