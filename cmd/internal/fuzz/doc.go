// Package fuzz has the fuzzer of the HTTP surface. It has no code but tests.
//
//	lane, one per tenant: a client ──▶ two API processes ──▶ one database ◀── the archiver of threads, the remover of edges
//	  │                                                          │
//	  └─ model: what each answer must be ◀── compared ── events, ┴─ applied to the projections by the lane
//
// A lane makes requests that its seed chooses, one after the other, and compares each answer with its model: status, code, body, ETag, counts, pages,
// order. It applies its tenant's events itself, so it knows what each list shows, with a Tidings-Token and without one. Each event must be the next one
// that the model has: so nothing is lost or doubled, and nothing is written that was refused. The lanes use the same ids, and no answer may have a text of
// another tenant's.
//
// Then clients of each tenant race for the same entities. There the events say in which order the writes happened, and each answer must fit that
// order and the time at which it came.
//
// `make test` makes 20,000 requests, and `make soak` 50,000 from each of its seeds. The soak also takes guards out of the system, one at a time, and shows
// that the fuzzer notices (mutants_test.go has the list).
package fuzz
