// Package upstreams keeps the upstreams of an installation: aggregate types whose events a service
// appends to the outbox itself, from tables of its own (docs/upstream.md). It is for subscribers of
// such events, for the commands, and for all that name such events: relay, contracts, API. Package
// kindfile reads the file of `tidings upstream add`. It is supported: CHANGELOG.md names every
// change that a program of yours would notice.
//
//	Add ──▶ declared ── Add: events, versions, tenants, limits ──▶ declared ── Remove ──▶ removed ── Add ──▶ declared
//
// The table upstreams has every version. Table outbox_messages looks each row of an upstream's
// login up there, so a change is in force for the next transaction.
package upstreams
