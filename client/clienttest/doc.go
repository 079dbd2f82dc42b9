// Package clienttest runs a Tidings of its own for the tests of programs that use packages client
// and subscribe. It is for the tests of callers of the API and of subscribers. It is supported:
// CHANGELOG.md names every change that a program of yours would notice.
//
// A test starts it:
//
//	func TestMyProgram(t *testing.T) {
//		c := clienttest.New(t)
//		...
//	}
//
// It runs the real servers: PostgreSQL, NATS, API, relay and consumers, without syncing to disk.
// The first call of a test binary starts them in a child process. Each call creates a tenant of
// its own, so tests do not see each other's data. The child ends with the test binary, even if that
// is killed, and removes its files.
//
// A subscriber under test connects to Tenant.NATS, and uses Database for its tables. It gets the
// events of all tenants: compare their TenantID with Tenant.ID.
//
//	test binary ── pipe ──> the same binary again, as the server ──> PostgreSQL
//
// The machine needs PostgreSQL's server programs, version 15 or later: from packages, or in the
// directory POSTGRES_BIN. Without them the test fails with a message.
//
// Import this package in tests only, because it brings all of Tidings along. A program that imports
// it becomes the server if its environment has TIDINGS_CLIENTTEST.
package clienttest
