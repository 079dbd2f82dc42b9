// Package broker is the plumbing to NATS: connections, the declaration of the stream that carries the events, and a server
// inside this process for `tidings dev` and the tests.
//
//	Connect        a connection that comes back for ever and never buffers: what cannot be sent now fails now
//	EnsureStream   the stream, declared or brought up to date; one of another shape is refused
//	StartServer    JetStream in this process, synced to disk before every publish ack
//
// It publishes nothing and reads nothing; that is for relay and consumers.
package broker
