// Package pglocal runs a PostgreSQL of one's own from the machine's server binaries, for `tidings dev` and for the tests.
//
// A directory holds all of it, readable by nobody else:
//
//	DIR/data           the cluster (initdb: UTF-8, locale C, scram-sha-256)
//	DIR/password       of the superuser "postgres", made at the first start
//	DIR/port           the last port, taken again while it is free
//	DIR/postgres.log   what the server says
//	DIR/lock           held while a Server of this package uses the directory
//
// The server listens on loopback only and opens no Unix socket. It is durable unless told otherwise. It runs in a process
// group of its own, so that Ctrl-C in a terminal reaches the parent alone, which then stops it in order. PostgreSQL refuses to
// run as root: there it runs as the user postgres, else nobody.
//
//	                Start                       Stop
//	nothing ──initdb──> data ──postgres──> ready ──fast, immediate, kill──> data
//	                      ^                  │ the parent is killed
//	                      └──Start stops it──┘ and the server is left behind
//
// It promises nothing about other machines, versions below 15, or systems without /proc.
package pglocal
