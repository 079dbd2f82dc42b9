// Package relay publishes the outbox to JetStream. Every event is on its stream exactly once, and
// the events of one entity are in the order of their versions. This holds for any number of relays,
// whatever is killed, frozen or restarted. docs/adr/0003-exactly-once-publish.md gives the reasons
// and names the tests. It is for the path of an event: the relay's process and operators' repairs.
// It may change in any release.
//
// # Exactly once
//
// A partition is a stream with one writer at a time. The stream itself is the record of what was
// published:
//
//   - Every publish names the stream's last sequence, the tail. The server refuses it if the stream
//     ends elsewhere. So a late or repeated publish has no effect.
//   - A relay claims rows and then reads the stored tail, in one transaction. If another relay has
//     marked rows, that tail differs from the relay's own, and the relay discards the claim.
//   - The stored tail also fences each mark. The mark moves the tail from its old value, or records
//     nothing.
//   - Any answer but a plain publish ack leaves the outcome unknown. Then the relay catches up
//     before it publishes again. It asks the stream's leader for all messages after the stored
//     tail, and marks their rows.
//
// The loop of one partition:
//
//	    ┌──────────────────────── any error, timeout, conflict, another stored tail ────────────────────────┐
//	    ▼                                                                                                   │
//	catch-up ──▶ round: mark the last publish (fenced by the tail), claim ──▶ publish (names the tail) ──▶ publish ack ──▶ next round
//	    │   │                                    │ the layout says "closing"
//	    │   │                                    └──▶ mark all published rows ──▶ closing message ──▶ closed
//	    │   └──▶ waiting: the stream has no leader with a quorum; the relay resumes by itself
//	    └──▶ stuck: the stream or the database lost data; an operator decides (tidings repair stream)
//
// Leases only keep relays from working on the same partition. Correctness does not need them: a
// relay that was frozen past its lease finds its publish refused and its mark without effect.
//
// # In order
//
// A writer of the API locks an entity before it inserts the entity's event, so the ids of one
// entity rise with its versions. A claim takes rows in the order of their ids. But ids do not
// commit in order: a running transaction may still add a row below the rows of an earlier claim.
// The horizon knows where the next claim must begin to find such a row (docs/adr/0004-floor.md).
//
// A row that fails holds back the later rows of its aggregate until it is published or in the DLQ.
//
// # Sessions and writers
//
// A session is one connection to the broker, which never reconnects. It runs one writer per leased
// partition. Writers are independent goroutines, and each has at most one publish in flight. A
// writer begins with a catch-up. The catch-up compares the stream's creation time and last sequence
// with the database. The writer repeats the comparison every few seconds and after each failure.
//
// A writer that fails to reach the broker twice in a row ends the session. The session gives up its
// leases, so another relay can take them, and the next session tries another server. If other
// streams still answer, only the failing partition waits. After a few more failures another relay
// takes it.
//
// With NATS_LIVE_OBJECTS a relay also publishes the stored events by object, at most once, over one
// more connection. Writers never wait for it.
//
// # Rounds
//
// The relay publishes few rows at once, and marks them together with the next claim. If writers
// announce their rows by wake-ups, the mark waits for the next one, at most 20 ms. Then a steady
// row costs one exchange with the database. While many rows wait, the relay claims the next ones
// during the publish. It pauses briefly between rounds, so that wake-ups gather. It sends rows one
// by one or as an atomic batch, whichever it measures to be faster (pace).
//
// # Heartbeats
//
// A relay also writes heartbeats into the outbox, for every partition, whether or not it can
// publish (outbox.Heartbeat).
//
// # Messages of others
//
// A catch-up skips and counts a message without a relay's headers (event.Ours), and the second
// message of an event. A message with our headers but without a row stops the partition: the
// database went back in time.
//
// # Repair
//
// Repair makes streams and database agree again. A new partition replaces one whose stream is lost.
// Messages that are missing in the middle are published again
// (docs/adr/0012-partitions-are-streams.md).
package relay
