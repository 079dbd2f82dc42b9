// Package broker is the plumbing to NATS: connections, the streams that carry the events, and a server
// inside this process for `tidings dev` and the tests.
//
//	Connect        a connection that comes back for ever and never buffers: what cannot be sent now fails now
//	Declare        a partition's stream, made or brought up to date, never shrunk; one of another shape is refused
//	Configure      sets the limits of all partitions' streams, also to less
//	ReadStream     a partition's stream as its leader has it, or ErrNoLeader; Streams, of all partitions
//	Next, Scan     messages as the leader has them
//	RecordErased   notes sequences before their messages are deleted; Erased proves a gap by that
//	Doubt          says when a loss that a broker reports is to be believed
//	Waker          tells the relays which slots have new rows
//	Listen         tells a cache of events as they are stored, over plain NATS, and when it missed some
//	StartServer    JetStream in this process, synced to disk before every publish ack
//
// What decides comes from a leader that has heard from a quorum of its replicas: neither from a replica that may be behind, nor from a broker that
// knows no leader. Publishing and delivery are for relay and consumers.
package broker
