// Package event is the wire contract: the events, their types, and their encoding on the stream. It
// is for everyone who reads or writes an event, in Tidings and downstream. It is supported:
// CHANGELOG.md names every change that a program of yours would notice.
//
// An event is written to the outbox in the transaction of its state change and published by the
// relay as a CloudEvents 1.0 message in binary mode:
//
//	subject   events.0.t1.follow.created            partition, tenant, aggregate type, event type; never an entity's id
//	headers   ce-id ce-type ce-source ce-subject ce-time ce-datacontenttype ce-dataschema
//	          ce-tenant traceparent
//	          Tidings-Outbox-Id
//	data      JSON: the entity's whole state after the write, its version, and the actor; never a delta
//
// The entity is one state row (a pair, a comment, a thread's settings), and its version rises by
// exactly one with each event. The aggregate is the unit by which events are partitioned: the
// followee, the post. Each aggregate belongs to one of 32 slots; a partition is a JetStream stream
// that holds a range of slots. Its last message may be a closing message (HeaderClosed), which is
// not an event.
//
// The package promises that Decode reads everything that Headers and Subject wrote, in every
// release since (golden files in testdata). It knows neither PostgreSQL nor NATS.
package event
