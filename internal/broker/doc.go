// Package broker connects to NATS and maintains the streams of events. Package natsserver runs a
// server in this process. It is for all parts that use NATS.
//
//	Connect        a connection that reconnects forever and never buffers: a message that cannot be sent now fails now
//	Declare        creates or updates a partition's stream; it never shrinks one and refuses one of another shape
//	Configure      sets the limits of all partitions' streams, also to lower values
//	ReadStream     a partition's stream as its leader reports it, or ErrNoLeader; Streams: those of all partitions
//	Next, Scan     messages as the leader has them
//	RecordErased   records sequences before their messages are deleted; Erased proves a gap by that record
//	Doubt          decides when to believe a loss that a broker reports; Confirm and ConfirmByQuorum wait for that
//	Waker          tells the relays which slots have new rows
//	Listen         passes events to a cache as they are stored, over plain NATS, and reports when it missed some
//
// Every decision reads from a leader that has recently heard from a quorum of its replicas. It
// never reads from a replica, which may lag, or from a broker that knows no leader. The relay
// publishes; consumers receive. This package does neither.
package broker
