// Package outbox is the only place that names outbox_messages, its DLQ and its archive in SQL.
//
//	           Append                Claim              Mark
//	writer ──────────▶ pending ──────────────▶ relay ──────────▶ processed ──▶ archive
//	                     ▲  │ fails validation (Defer: attempts+1, later)
//	                     │  └───────▶ delayed ──── due (Release) ───▶ pending
//	                     └ Retry ──── DLQ ◀─────── more than 10 attempts
//	                                   └── Discard ──▶ gone, but for its note in outbox_dlq_actions
//
// The archive is by month of occurrence; what becomes of its months is in months.go, what must stay in holds.go. An event's row is in one
// of the three tables, never in two.
//
// Append joins the caller's transaction: state and event are committed together or not at all. Everything else is the relay's
// and the operators' side, and acts as the system role; the DLQ alone serves the API too, a tenant at a time.
package outbox
