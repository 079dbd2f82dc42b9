// Package broker is the plumbing to NATS: connections, the declaration of the stream that carries the events, and a server
// inside this process for `tidings dev` and the tests.
//
//	Connect        a connection that comes back for ever and never buffers: what cannot be sent now fails now
//	EnsureStream   the stream, declared or brought up to date, never shrunk; one of another shape is refused
//	Configure      sets the stream's limits, also to less
//	SetMetadata    one key of the stream's metadata; those of others stay
//	StartServer    JetStream in this process, synced to disk before every publish ack
//
// It publishes nothing and reads nothing; that is for relay and consumers.
package broker
