// Package broker is the plumbing to NATS: connections, the streams that carry the events, and a server
// inside this process for `tidings dev` and the tests.
//
//	Connect        a connection that comes back for ever and never buffers: what cannot be sent now fails now
//	Declare        a partition's stream, made or brought up to date, never shrunk; one of another shape is refused
//	Configure      sets the limits of all partitions' streams, also to less
//	ReadStream     a partition's stream as its leader has it, or ErrNoLeader
//	StartServer    JetStream in this process, synced to disk before every publish ack
//
// It publishes nothing and reads nothing; that is for relay and consumers.
package broker
