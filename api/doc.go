// Package api is the HTTP edge: routes, validation, problem details, authentication. It is for
// those who add or change a route of the API. It may change in any release.
//
//	request ─ id, deadline, panic guard ─ route ─ token, rate, role ─ body ─ validation ─ handler ─┬─ store        writes, single reads
//	                                                                                               ├─ outbox       the DLQ
//	                                                                                               └─ projections  lists, counts
//
// Every answer outside 2xx and 304 is an RFC 9457 problem with a stable code from one table
// (problem.go). OpenAPI and the page at /docs list the codes of each route. The API refuses invalid
// input with 4xx before it writes anything. If a database is unavailable, the answer is 503 with
// Retry-After. The outcome of such a write is unknown; a retry is safe with an Idempotency-Key or
// an If-Match.
//
// Ids are strings in JSON, times RFC 3339 in UTC with microseconds. Lists and counts come from
// projections, which lag: as_of says how current they are. A single follow or comment comes from
// the truth.
//
// A token is a service token: it acts for every user of its tenant. Only the token determines the
// tenant, never the request. A revoked or expired token is refused a second later (auth.go). Each
// process counts the requests of tokens and users alone (limit.go).
package api
