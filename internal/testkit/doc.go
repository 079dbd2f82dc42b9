// Package testkit gives tests real servers: private databases, private JetStream servers, and servers as processes that a test
// can kill, freeze and restart.
//
// PostgreSQL comes from the first of these that there is; when there is none the test fails and says what to do:
//
//	TEST_DATABASE_URL    a server that runs already; its login may create databases and roles
//	local binaries       one server per test binary, without fsync (package pglocal)
//	Docker               testcontainers-go, image TEST_POSTGRES_IMAGE (postgres:17-alpine)
//
// NATS is TEST_NATS_URL, else a server in this process, or, for a test that disturbs it, in a child. TEST_SERVERS=docker takes all of them from Docker
// (TEST_NATS_IMAGE, nats:2): then a kill is that of a container, a freeze pauses it, and a broker that is cut off leaves its network.
//
//	                    PostgreSQL            NATS, NATSWith      NATSProcess, NATSCluster
//	by default          local binaries        this process        children of this process
//	TEST_SERVERS=docker a container each      a container each    a container each
//
// Ports of containers are open on loopback only. A process in a container that shares the engine of its host reaches them at the gateway of the engine's
// network, and there they are open; TESTCONTAINERS_HOST_OVERRIDE names another address. The store of a NATS container is the test's directory, so the engine has
// to see this machine's files. No test needs to know any of this: docs/testing.md has the whole of it, and the few tests that stay on the machine.
//
// A test gets a database of its own, cloned from a template that has all migrations and is named by their hash. A held
// snapshot reaches every database of a server: a test that holds a transaction open for long takes a PostgresProcess.
//
// Local servers start from a copy of a cluster that has the template. The user's cache directory keeps it for all test binaries, by the version of
// PostgreSQL and the migrations' hash. What tests write lies in /dev/shm where it has 4 GiB; set TMPDIR to have it elsewhere.
//
// Servers end with the test binary, also when it is killed: a child that only waits for its parent's end removes them, containers and networks too, by a label
// that names the process and its start. When the child is killed as well, the next test binary removes the containers whose process has ended.
// With -short, everything here that needs a server skips the test; nothing else skips.
package testkit
