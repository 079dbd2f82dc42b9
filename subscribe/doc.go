// Package subscribe reads the events of Tidings from any Go module. It needs a NATS connection.
// docs/subscribe.md starts with a program to copy. It is for programs downstream. It is supported:
// CHANGELOG.md names every change that a program of yours would notice.
//
//	EVENTS-0 ──▶ durable consumer NAME-KIND-EVENT ──▶ instances of Handle ──▶ your function ──▶ acknowledged
//	                                                            │ Permanent, or after Attempts
//	                                                            ▼
//	                                                       EVENTS-dead ──▶ Letters: Retry, Discard
//
// Handle calls a function at least once for each event. It acknowledges an event after the function
// returned nil, and never before. An instance handles the events of an aggregate one at a time, in
// the order of the stream. With InOrder one instance at a time reads a partition, so the first
// deliveries of an aggregate's events are in order between instances too. Even a crash keeps that
// order, because the next instance first waits for the events that the dead one had not finished.
// After a resize, Handle finishes the old streams before it starts the new ones.
//
// Package projector applies each message exactly once, in a transaction of your database. It is a
// package of its own, so that a program that only handles events links no client of PostgreSQL.
//
// Neither function delivers messages that no relay of Tidings wrote, or closing messages. They
// deliver the system's own events (aggregate type heartbeat) only if you name that type.
package subscribe
