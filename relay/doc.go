// Package relay publishes the outbox to JetStream: every event exactly once, the events of one entity in the order of its
// version, whatever is killed, paused or restarted, with any number of relays.
//
// # Safety
//
// A partition is a stream with one writer at a time, and the stream itself is the record of what was published. Every publish, one message or an
// atomic batch, names the stream's last sequence (the tail), and the server refuses it if the stream ends elsewhere. A claim shows the stored
// tail in its own transaction, so a row that another relay has published is not claimed, or the tails differ. Whenever the outcome of a publish
// is not a plain ack, the relay reads from the stream's leader what the stream holds behind the stored tail, marks those rows and only then continues:
//
//	    ┌──────────────────────── any error, timeout, conflict, another stored tail ────────────────────────┐
//	    ▼                                                                                                   │
//	catch-up ──▶ round: mark the last publish (fenced by the tail), claim ──▶ publish (names the tail) ──▶ publish ack ──▶ next round
//	    │   │                                    │ the layout says "closing"
//	    │   │                                    └──▶ mark what is in hand ──▶ closing message ──▶ closed
//	    │   └──▶ waiting: the stream has no leader with a quorum; it continues by itself
//	    └──▶ stuck: the stream or the database lost data; a person decides (tidings repair stream)
//
// Leases only keep relays out of each other's way. A relay that is frozen past its lease and thaws finds its publish refused
// and its mark without effect (docs/adr/0003-exactly-once-publish.md).
//
// # Sessions and writers
//
// A session is one connection to the broker that never reconnects. It has a writer per partition that the relay leases, each a goroutine that knows
// nothing of the others, with at most one publish in flight. A writer begins with a catch-up, which compares the stream's creation
// and last sequence with the database; it repeats the comparison every few seconds and after each failure. A writer that fails to reach the broker
// twice in a row ends the session: its leases are freed for a relay that can, and the next session asks another server. If other streams answer,
// its partition alone waits, and after a few failures another relay takes it.
//
// # Rounds
//
// Few rows are published at once and marked with the next claim. While many rows wait, the next ones are claimed during the publish. Rounds rest a
// moment in between, so that wake-ups gather. Whether rows go one by one or as a batch is measured (pace). A claim begins where no transaction that
// runs can add a row (horizon).
//
// # Heartbeats
//
// Beside its session, a relay has heartbeats written into the outbox, for every partition and whether or not it can publish (outbox.Heartbeat).
//
// # Messages of others
//
// A catch-up skips and counts what event.Ours does not know, and a message of an event that an earlier one has. One that is ours and has no row
// stops the partition: the database went back in time.
//
// # Repair
//
// Repair makes streams and database agree again: a lost stream is replaced by a new partition's, what is missing in the middle is published
// again (docs/adr/0012-partitions-are-streams.md).
package relay
