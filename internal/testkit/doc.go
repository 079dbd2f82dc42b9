// Package testkit gives tests real servers: private databases, private JetStream servers, and servers as processes that a test
// can kill, freeze and restart.
//
// PostgreSQL comes from the first of these that there is; when there is none the test fails and says what to do:
//
//	TEST_DATABASE_URL    a server that runs already; its login may create databases and roles
//	local binaries       one server per test binary, without fsync (package pglocal)
//	Docker               testcontainers-go, image TEST_POSTGRES_IMAGE (postgres:17-alpine)
//
// NATS is TEST_NATS_URL, else a server in this process. TEST_SERVERS=docker takes both from Docker (TEST_NATS_IMAGE, nats:2).
//
// A test gets a database of its own, cloned from a template that has all migrations and is named by their hash. A held
// snapshot reaches every database of a server: a test that holds a transaction open for long takes a PostgresProcess.
//
// Servers end with the test binary, also when it is killed: a child that only waits for its parent's end removes them.
// With -short, everything here that needs a server skips the test; nothing else skips.
package testkit
