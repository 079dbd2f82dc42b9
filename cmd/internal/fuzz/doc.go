// Package fuzz contains the fuzzer of the HTTP API. It has only tests. It is for those who change
// the API or the write path.
//
//	lane, one per tenant: a client ──▶ two API processes ──▶ one database ◀── the shelver of threads, the remover of edges
//	  │                                                          │
//	  └─ model: what each answer must be ◀── compared ── events, ┴─ applied to the projections by the lane
//
// A lane makes requests that its seed chooses, one after the other. It compares each answer with
// its model: status, code, body, ETag, counts, pages and order. It applies its tenant's events
// itself, so it knows the content of each list, with a Tidings-Token and without one. Each event
// must be the next version in the model. This shows that no event is lost or doubled, and that
// refused requests write nothing. The lanes use the same ids, and no answer may contain text of
// another tenant.
//
// Then the clients of each tenant race for the same entities. The events give the order of the
// writes. Each answer must fit that order and its own time.
//
// `make test` makes 20,000 requests, and `make soak` 50,000 from each of its seeds. The soak also
// removes guards from the system, one at a time, and shows that the fuzzer notices
// (internal/testkit/mutants has the list).
package fuzz
