// Package declared keeps the declarations of upstreams (package upstreams) in the database. It is
// for the commands, and for all that name such events: relay, contracts, API. It may change in any
// release.
//
//	Add ──▶ declared ── Add: events, versions, tenants, limits ──▶ declared ── Remove ──▶ removed ── Add ──▶ declared
//
// The table upstreams has every version. Table outbox_messages looks each row of an upstream's
// login up there, so a change is in force for the next transaction.
package declared
