// Command peers compares four ways to bring events from PostgreSQL to NATS JetStream. Each way gets
// the same load and the same faults, and a checker compares the stream with the committed rows. It
// is for people who choose one of them. It is a module of its own, so its libraries are no part of
// Tidings.
//
//	naive      an outbox of 150 lines: poll with FOR UPDATE SKIP LOCKED, publish, mark (naive.go)
//	watermill  Watermill's SQL outbox with its Forwarder (watermill.go)
//	river      one River job per event, whose worker publishes (river.go)
//	tidings    outbox.Append and the relay's binary (tidings.go)
//
// One run is one way in one scenario, on a database and a broker of its own:
//
//	writers ──one transaction: state, version, outbox──> PostgreSQL ──relay, a child process──> NATS
//	   └────────────────── what was committed ──> judge <── the whole stream ──────────────────┘
//
// The file of each way quotes the documentation that it follows. docs/comparison.md has results.
package main
