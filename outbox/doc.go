// Package outbox appends events in your transactions, and holds all SQL on the outbox: the table
// outbox_messages, its dead letter queue (DLQ), its archive and outbox_partitions. It is for
// services that append events of their own tables (with Append or AppendSQL), and for
// the path of an event. It is supported: CHANGELOG.md names every change that a program of yours
// would notice.
//
// # Rows
//
// Append joins the caller's transaction, so a state and its event commit together or not at all. A
// row then moves through these states:
//
//	           Append              Exchange: mark, then claim
//	writer ──────────▶ pending ──────────────▶ relay ──────────▶ processed ──▶ archive
//	                     ▲  │ fails validation (Fail: attempts+1, later)
//	                     │  ├───────▶ delayed ──── due ───▶ claimed again
//	                     │  └ Park ─▶ delayed, behind a delayed row of its aggregate ──── Unpark ───▶ pending
//	                     └ Retry ──── DLQ ◀─────── more than 10 attempts, or KillWaiting
//	                                   └── Discard ──▶ deleted; outbox_dlq_actions keeps a note
//
// An event's row is in exactly one of three tables: the outbox, its archive or the DLQ.
//
// # Claim, mark, floor
//
// A claim takes no lock. It walks the primary key from the partition's floor. No row up to the
// floor is pending, now or later, unless it is delayed; docs/adr/0004-floor.md proves it. A delayed
// row has indexes of its own.
//
// A mark records publish acks and moves the partition's tail. Two values fence it: the stored tail
// and the stream. A relay that lost the partition finds another tail and marks nothing. A mark
// updates no index (docs/adr/0011-heap-only-marks.md).
//
// # Ranges
//
// The outbox and the archive consist of ranges of ids, which are table partitions (ranges.go). A
// whole range moves from the outbox to the archive without a copy of its rows (archive.go,
// docs/adr/0010-outbox-archive.md). Holds keep rows from being dropped (holds.go).
//
// # Partitions
//
// The layout maps each partition to its stream and its slots (partitions.go). Resize replaces all
// partitions. Replace replaces a partition whose stream was lost.
//
//	        Bind              Resize, Replace          Close
//	new ───────────▶ open ──────────────────▶ closing ──────────▶ closed     a successor opens when all its predecessors are closed
//
// # Roles
//
// Append and Appended serve writers. Most other functions serve relays and operators, and need a
// pool that acts as the system role. The DLQ also serves the API, one tenant at a time.
package outbox
