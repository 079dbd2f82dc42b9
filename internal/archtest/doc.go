// Package archtest holds the import rules of this module as a test: which package may know which. It also
// tests that the licenses of all that the binaries import are compatible with ours. It has no code of its own.
//
//	cmd ─> everything
//	api ─> store, tokens, outbox, projections, versioned, event  consumers ─> event, lease, broker, postgres
//	store ─> outbox, versioned, event, postgres                  projections ─> projections (the shared half), store, versioned, event, postgres
//	relay ─> outbox, lease, broker, event                        subscribe ─> consumers, kinds, migrations, event, broker, postgres
//	internal ─> internal                                         client ─> event
//	console ─> what api reads, audit, replay, erasure, internal; no SQL of its own
//	client/clienttest ─> client, cmd/tidings/cli                 internal/{status,doctor,verify} ─> what they look at
//
// A new edge is a decision: it is added to the table in the test, with its reason.
package archtest
