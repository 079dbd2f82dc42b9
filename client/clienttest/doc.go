// Package clienttest runs a Tidings of its own for the tests of programs that use package client:
//
//	func TestMyProgram(t *testing.T) {
//		c := clienttest.New(t)
//		...
//	}
//
// It is the real one: PostgreSQL, NATS, API, relay and consumers, without syncing to disk. The first call of a test binary starts it, as a child process; each call
// makes a tenant of its own, so tests do not see each other. It ends with the test binary, also when that is killed, and leaves nothing behind.
//
//	test binary ── pipe ──> the same binary again, as the server ──> PostgreSQL
//
// The machine needs PostgreSQL's server programs, version 15 or later: from its packages, or where POSTGRES_BIN points. The test fails without them and says so.
//
// Only tests import this package: it brings all of Tidings along. A program that imports it and is started with TIDINGS_CLIENTTEST in its environment becomes the server.
package clienttest
