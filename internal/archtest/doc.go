// Package archtest enforces the import rules of this module with a test: which package may import
// which. It also tests that every package says who reads it, that comments are American English,
// how wide and long code may be, and that the licenses of all libraries in the binaries are
// compatible with ours. It has no code except tests. It is for those who add a package, an import
// or a name.
//
//	cmd ─> everything
//	api ─> store, tokens, outbox, projections, versioned, event  consumers ─> event, lease, broker, postgres
//	store ─> outbox, versioned, event, postgres                  projections ─> projections, store, versioned, event, postgres
//	relay ─> outbox, lease, broker, event                        subscribe ─> consumers, kinds, migrations, event, broker, postgres
//	internal ─> internal                                         client ─> event
//	console ─> what api reads, audit, replay, erasure, internal; no SQL of its own
//	client/clienttest ─> client, cmd/tidings/cli                 internal/{status,doctor,verify} ─> the packages that they check
//
// A new edge is a decision: add it to the table in the test, with its reason.
package archtest
