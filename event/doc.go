// Package event is the wire contract: what an event is, which types there are, and how one looks on the stream.
//
// An event is written to the outbox in the transaction of its state change and published by the relay as a CloudEvents 1.0
// message in binary mode:
//
//	subject   events.0.t1.follow.created            partition, tenant, aggregate type, event type; never an entity's id
//	headers   ce-id ce-type ce-source ce-subject ce-time ce-datacontenttype traceparent
//	          Tidings-Outbox-Id
//	data      JSON: the entity's whole state after the write, its version, and the actor; never a delta
//
// The entity is one state row (a pair, a comment, a thread's settings) and its version rises by exactly one with each event.
// The aggregate is what events are partitioned by: the followee, the post. It falls into one of 32 slots; a partition is a JetStream stream that
// holds a range of them. Its last message may be a closing message (HeaderClosed), which is no event.
//
// The package promises that what Decode reads is what Headers and Subject wrote, in every release since (golden files in
// testdata). It knows neither PostgreSQL nor NATS.
package event
