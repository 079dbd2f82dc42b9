// Package testkit gives tests real servers: private databases, private JetStream servers, and
// servers as processes that a test can kill, freeze and restart. It is for tests.
//
// PostgreSQL is the first of these that exists. If none exists, the test fails with the remedies:
//
//	TEST_DATABASE_URL    a running server; its login may create databases and roles
//	local binaries       one server per test binary, without fsync (package pglocal)
//	Docker               testcontainers-go, image TEST_POSTGRES_IMAGE (postgres:17-alpine)
//
// NATS is TEST_NATS_URL, else a server in this process or, for a test that disturbs it, in a child
// process. With TEST_SERVERS=docker all servers run in Docker (TEST_NATS_IMAGE, nats:2). A kill
// then kills the container, a freeze pauses it, and a broker that is cut off leaves its network.
//
//	                    PostgreSQL            NATS, NATSWith      NATSProcess, NATSCluster
//	by default          local binaries        this process        children of this process
//	TEST_SERVERS=docker a container each      a container each    a container each
//
// The ports of containers are open on loopback only. A process in a container that shares the
// engine of its host reaches them at the gateway of the engine's network, and there they are open.
// TESTCONTAINERS_HOST_OVERRIDE names another address. The store of a NATS container is the test's
// directory, so the engine must see this machine's files. Tests need not know this. CONTRIBUTING.md
// has the details, and lists the few tests that always use local servers.
//
// A test gets its own database, a clone of a template that has all migrations and is named by their
// hash. An open snapshot affects every database of a server. So a test that keeps a transaction
// open for long uses a PostgresProcess.
//
// Local servers start from a copy of a cluster that has the template. The user's cache directory
// keeps the cluster for all test binaries, by the version of PostgreSQL and the hash of the
// migrations. Tests write to /dev/shm if it has 4 GiB; set TMPDIR for another place.
//
// Servers end with the test binary, also if it is killed: a child process, the reaper, waits for
// its parent's end and removes them. It removes containers and networks by a label that identifies
// the process. If the reaper is killed too, the next test binary removes the containers whose
// process has ended. With -short, each function here that needs a server skips the test. Tests skip
// for no other reason.
package testkit
