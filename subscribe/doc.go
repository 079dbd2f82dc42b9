// Package subscribe reads the events of Tidings from any module: with a NATS connection, and for Project a pool of connections to PostgreSQL. docs/subscribe.md begins
// with a program.
//
//	EVENTS-0 ──▶ durable consumer NAME-KIND-EVENT ──▶ instances of Handle ──▶ your function ──▶ acknowledged
//	   │                                                        │ Permanent, or after Attempts
//	   │                                                        ▼
//	   │                                                   EVENTS-dead ──▶ Letters: Retry, Discard
//	   │
//	   └─────▶ the loop of package consumers ──▶ instances of Project ──▶ one transaction: the place on the stream, then your function
//
// Handle calls a function at least once for each event. An event is acknowledged after the function returned nil, and never before. The events of an aggregate are
// handled one at a time in an instance, in the order of the stream. With InOrder one instance at a time reads a partition, and an aggregate's event comes first behind
// those before it, whatever dies: the next instance holds events until NATS has delivered again what the one before had in hand. A stream that a resize
// made is begun when those before it are handled.
//
// Project applies each event exactly once: see package consumers. Both ask for no type of an internal package.
//
// Neither delivers messages that no relay of Tidings wrote, nor closing messages, nor the system's own events (aggregate type heartbeat) unless they are asked for by name.
package subscribe
