// Package pglocal runs a private PostgreSQL from the machine's server binaries. It is for
// `tidings dev` and for tests.
//
// One directory has all its files, and other users cannot read it:
//
//	DIR/data           the cluster (initdb: UTF-8, locale C, scram-sha-256)
//	DIR/password       of the superuser "postgres", created at the first start
//	DIR/port           the last port, used again if it is free
//	DIR/postgres.log   the output of the server
//	DIR/lock           locked while a Server of this package uses the directory
//
// The server listens on loopback only and opens no Unix socket. It is durable unless Config.Unsafe
// is set. It runs in its own process group, so Ctrl-C in a terminal reaches only the parent, which
// then stops the server in order. PostgreSQL refuses to run as root, so root's server runs as the
// user postgres, or else nobody.
//
//	                Start                       Stop
//	nothing ──initdb──> data ──postgres──> ready ──fast, immediate, kill──> data
//	                      ^                  │ the parent is killed
//	                      └──Start stops it──┘ and the server remains
//
// The package does not support remote machines or versions below 15. On a system without /proc,
// such as macOS, Start returns an error if an earlier process left a server running: end that
// server.
package pglocal
