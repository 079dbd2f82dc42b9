// Package outbox is the only place that names outbox_messages, its DLQ, its archive and outbox_partitions in SQL.
//
//	           Append              Exchange: mark, then claim
//	writer ──────────▶ pending ──────────────▶ relay ──────────▶ processed ──▶ archive
//	                     ▲  │ fails validation (Fail: attempts+1, later)
//	                     │  ├───────▶ delayed ──── due ───▶ claimed again
//	                     │  └ Park ─▶ delayed, behind a delayed row of its aggregate ──── Unpark ───▶ pending
//	                     └ Retry ──── DLQ ◀─────── more than 10 attempts, or KillWaiting
//	                                   └── Discard ──▶ gone, but for its note in outbox_dlq_actions
//
// A claim walks the primary key from the partition's floor, below which nothing is pending: that is a proof (docs/adr/0004-floor.md). A mark
// touches no index (docs/adr/0011-heap-only-marks.md), and is fenced by the partition's tail and stream. Outbox and archive consist of
// ranges of ids (ranges.go), which go from one to the other as they are (archive.go, docs/adr/0010-outbox-archive.md); what must stay is in holds.go.
// An event's row is in one of the three tables, never in two.
//
// The layout, which partition is which stream and holds which slots, is in partitions.go. Resize replaces all partitions, Replace a lost one:
//
//	        Bind              Resize, Replace          Close
//	made ──────────▶ open ──────────────────▶ closing ──────────▶ closed     its successors open when all that they come after are closed
//
// Append joins the caller's transaction: state and event are committed together or not at all. Everything else is the relay's
// and the operators' side, and acts as the system role; the DLQ alone serves the API too, a tenant at a time.
package outbox
