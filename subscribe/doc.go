// Package subscribe reads the events of Tidings from any Go module. It needs a NATS connection.
// docs/subscribe.md begins with a program. It is for programs downstream. It is supported:
// CHANGELOG.md names every change that a program of yours would notice.
//
//	EVENTS-0 ──▶ durable consumer NAME-KIND-EVENT ──▶ instances of Handle ──▶ your function ──▶ acknowledged
//	                                                            │ Permanent, or after Attempts
//	                                                            ▼
//	                                                       EVENTS-dead ──▶ Letters: Retry, Discard
//
// Handle calls a function at least once for each event. It acknowledges an event after the function
// returned nil, and never before. An instance handles the events of an aggregate one at a time, in
// the order of the stream. With InOrder one instance at a time reads a partition. Then the first
// delivery of each event of an aggregate is in order, even if an instance dies: the next instance
// holds events until NATS has delivered again the unfinished events of the dead one. Handle begins
// a stream that a resize created after the events of its predecessors are handled.
//
// Package projector applies each message exactly once, in a transaction of your database. A program
// that only handles events links no client of PostgreSQL.
//
// Neither function delivers messages that no relay of Tidings wrote, or closing messages. They
// deliver the system's own events (aggregate type heartbeat) only if you name that type.
package subscribe
