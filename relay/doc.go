// Package relay publishes the outbox to JetStream: every event exactly once, the events of one entity in the order of its
// version, whatever is killed, paused or restarted, with any number of relays.
//
// # Safety
//
// The stream itself is the record of what was published. Every publish, one message or an atomic batch, names the last
// sequence of its partition (the tail) and the server refuses it if that is not the last one any more. The tail is read
// before the rows that are published after it, so a row that was published meanwhile moved the tail and the publish fails.
// Whenever the outcome of a publish is not a plain ack, the relay reads what the stream holds after the stored tail, marks
// those rows and only then goes on:
//
//	    ┌────────────────────────── any error, timeout, conflict ──────────────────────────┐
//	    ▼                                                                                   │
//	catch-up ──▶ idle ──▶ claim ──▶ publish (tail check) ──▶ publish ack ──▶ mark (tail fence) ──▶ idle
//	    │                                                                        (own tail moves)
//	    └──▶ stuck: the stream or the database lost data; a person decides (tidings repair stream)
//
// Leases only keep relays out of each other's way. A relay that is frozen past its lease and thaws finds its publish refused
// and its mark without effect.
//
// # Sessions
//
// A session is one connection to the broker that never reconnects. The stream is compared with the database before the
// session's first publish (stream.go), so nothing can be published to a stream that was lost or made anew behind the
// relay's back. When the connection ends the session ends, its leases are freed, and the next one begins with a catch-up. So it is when the
// stream is deleted, made anew or repaired: the session verifies it every few seconds and after each failure.
//
// # Messages of others
//
// The tail check names the partition's last message, whoever wrote it; the stored tail and Tidings-Prev name the last event. A catch-up skips
// and counts what event.Ours does not know, and a message of an event that an earlier one has. One that is ours and has no row stops the partition.
//
// # Flow
//
// In a session one goroutine owns the state of all partitions and claims; publishers publish and catch up; one marker
// records acks, all that have gathered in one transaction. At most one piece of work is in flight per partition, which
// bounds every channel and the memory.
package relay
