// Package api is the HTTP edge: routes, validation, problem details, authentication.
//
//	request ─ id, deadline, panic guard ─ route ─ token, rate, role ─ body ─ validation ─ handler ─┬─ store        writes, single reads
//	                                                                                               ├─ outbox       its DLQ
//	                                                                                               └─ projections  lists, counts
//
// Every answer outside 2xx and 304 is an RFC 9457 problem with a stable code, out of one table (problem.go); OpenAPI and the
// page at /docs list the codes of each route. Bad input is a 4xx before anything is written; a database that is away is a 503
// with Retry-After, and the outcome of a write answered so is unknown unless it carried an Idempotency-Key or an If-Match.
//
// Ids are strings in JSON, times RFC 3339 in UTC with microseconds. Lists and counts come from projections, which lag: as_of
// says when they were current. A single follow or comment comes from the truth.
//
// Tokens are service tokens: one acts for every user of its tenant. The tenant is the token's, never the request's. One that has ended is
// refused a second later (auth.go). How much a token and a user may do is counted in this process alone (limit.go).
package api
